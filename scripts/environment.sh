# Sourced by scripts/demo and scripts/check: makes the virtual environment and installs into it.
# shellcheck shell=bash
#
# The environment is .venv in the checkout (CHECKPOINT_EXECUTOR_VENV names another). Versions are those of
# constraints.txt. A second run finds that nothing changed and takes no time.

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "$@"; exit 1; }

venv=${CHECKPOINT_EXECUTOR_VENV:-.venv}

# A Python of 3.11 or later that can make environments. A command of that name may exist and not run (pyenv's shims),
# so each is tried.
find_python() {
    local name
    for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3 python; do
        if [ -n "$name" ] && "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
        then
            printf '%s\n' "$name"
            return
        fi
    done
    die "needs Python 3.11 or later with venv and ensurepip (on Debian: apt-get install python3-venv);" \
        "PYTHON=... names one that is not on the PATH"
}

gpu_count() {
    local found=(/dev/nvidia[0-9]*)
    if [ -e "${found[0]}" ]; then printf '%s\n' "${#found[@]}"; else printf '0\n'; fi
}

# What an installation depends on, as one number.
fingerprint() { { cat pyproject.toml constraints.txt; printf '%s %s\n' "$1" "$PWD"; } | sha256sum | cut -d' ' -f1; }

in_venv() { "$venv/bin/python" "$@"; }

pip_install() {
    # Quiet twice: errors only.
    in_venv -m pip install -qq --disable-pip-version-check "$@"
}

# make_environment EXTRAS: have the project in the environment, editable, with these extras.
make_environment() {
    local extras=$1 stamp wanted constraints
    stamp=$venv/.checkpoint-executor-$extras
    wanted=$(fingerprint "$extras")
    if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$venv/bin/python" ]; then
        local python
        python=$(find_python)
        say "making $venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    in_venv -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$venv has $(in_venv --version), but 3.11 or later is needed: remove it and run this again"
    in_venv -m pip --version >/dev/null 2>&1 ||
        die "$venv has no pip: remove it and run this again, or name another place in CHECKPOINT_EXECUTOR_VENV"
    say "installing into $venv (the first time takes a minute or two)"
    pip_install --constraint constraints.txt pip setuptools
    install_torch
    # Without build isolation, so that the build tools too are the ones of constraints.txt.
    constraints=$(constraints_beside_torch)
    pip_install --no-build-isolation --constraint "$constraints" --editable ".[$extras]"
    printf '%s\n' "$wanted" >"$stamp"
}

# A torch that is there already stays, if it is recent enough: which build is right is the user's choice. Otherwise
# the pinned one comes, but not a CUDA build of several gigabytes onto a machine that cannot use it.
install_torch() {
    if have_torch; then return; fi
    local picked=$venv/torch.json
    # A first look that downloads nothing but metadata.
    pip_install --dry-run --constraint constraints.txt --report "$picked" torch ||
        die "pip finds no torch for $(in_venv --version); see the message above"
    if in_venv - "$picked" <<'END' && [ "$(gpu_count)" = 0 ] && [ "${CHECKPOINT_EXECUTOR_ALLOW_CUDA_TORCH:-}" != 1 ]
import json, sys
names = {entry["metadata"]["name"].lower() for entry in json.load(open(sys.argv[1]))["install"]}
sys.exit(not any(name.startswith(("nvidia-", "cuda-toolkit", "triton")) for name in names))
END
    then
        die "pip would install a CUDA build of torch here (several GB), and this machine has no NVIDIA GPU." \
            "It was not downloaded. Either give pip an index with CPU builds (PIP_EXTRA_INDEX_URL=..., the address" \
            "is on PyTorch's \"Get Started\" page), or install any torch >= 2.9 into $venv yourself, or set" \
            "CHECKPOINT_EXECUTOR_ALLOW_CUDA_TORCH=1; then run this again"
    fi
    pip_install --constraint constraints.txt torch
}

have_torch() {
    in_venv - 2>/dev/null <<'END'
from importlib.metadata import version
major, minor = version("torch").split(".")[:2]
raise SystemExit((int(major), int(minor)) < (2, 9))
END
}

# constraints.txt, with the torch that is installed in place of the pinned one.
constraints_beside_torch() {
    local file=$venv/constraints.txt torch
    torch=$(in_venv -c 'import importlib.metadata as m; print(m.version("torch"))')
    { grep -v '^torch==' constraints.txt; printf 'torch==%s\n' "$torch"; } >"$file"
    printf '%s\n' "$file"
}
