"""PURE. What a user may set for the executor under vLLM: ``CHECKPOINT_EXECUTOR_*`` variables.

Variables and not vLLM's ``additional_config``, because that enters the hash by which vLLM finds its compiled kernels:
a longer deadline would compile the model again.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from checkpoint_executor.config import Deadlines

__all__ = ["PREFIX", "Settings", "parse_settings"]

PREFIX = "CHECKPOINT_EXECUTOR_"

#: Ours too, but read elsewhere: the software device, the scripts of the checkout, and the supervisor's mark on all that
#: runs below it.
_ELSEWHERE = frozenset({"SOFTGPU_ROOT", "VENV", "ALLOW_CUDA_TORCH", "SUPERVISED"})


class Settings(Struct, frozen=True):
    """The settings. Each field is the variable of that name in capitals; deadlines are ``..._DRIVER_S`` and so on.

    Attributes:
        log: file that gets one JSON line for every sleep, wake and release.
        runtime_dir: where the executor's private directory is made; short, since sockets are in it.
        host_arena: keep cumem's backups in our huge-page arena although the sleep-mode backend is called ``cumem``.
        undo_before_checkpoint: undo a failed lock and serve on, or kill, as the seed does.
        attribution: read the GPUs after every stage and have the workers tell what they hold, for the log.
        release_local_memory: give kernels' local memory back before a checkpoint, instead of having the driver copy it.
        wake_margin_mib: free device memory that a wake asks for beyond what it needs, MiB.
        deadlines: seconds, by kind of stage.
    """

    log: str | None = None
    runtime_dir: str | None = None
    host_arena: bool = False
    undo_before_checkpoint: bool = True
    release_local_memory: bool = True
    attribution: bool = False
    wake_margin_mib: int = 64
    deadlines: Deadlines = Deadlines(start_s=120.0)


#: How long a shutdown may take is vLLM's to say.
_SHUTDOWN = "SHUTDOWN_S"

_DEADLINES = {name.upper(): name for name in Deadlines.__struct_fields__ if name.upper() != _SHUTDOWN}
_FIELDS = {name.upper(): name for name in Settings.__struct_fields__ if name != "deadlines"}


def parse_settings(environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """The settings, and everything that is wrong with them. A wrong one has its default."""
    problems: list[str] = []
    fields: dict[str, object] = {}
    deadlines: dict[str, float] = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        name, text = variable.removeprefix(PREFIX), environ[variable]
        if name in _DEADLINES:
            value = _number(text, float)
            if value is None or not 0 < value < float("inf"):
                problems.append(f"{variable}={text} must be a positive number of seconds")
            else:
                deadlines[_DEADLINES[name]] = value
        elif name in _FIELDS:
            problem = _take(fields, _FIELDS[name], variable, text)
            problems.extend([problem] if problem else [])
        elif name == _SHUTDOWN:
            problems.append(f"{variable} has no effect under vLLM; set VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS")
        elif name not in _ELSEWHERE:
            problems.append(f"{variable} is not a setting{_suggestion(name)}")
    settings = Settings(
        **fields,  # type: ignore[arg-type]
        deadlines=msgspec.structs.replace(Deadlines(start_s=120.0), **deadlines),
    )
    if settings.deadlines.driver_lock_s >= settings.deadlines.driver_s:
        problems.append(
            f"{PREFIX}DRIVER_LOCK_S ({settings.deadlines.driver_lock_s:g}) must be below {PREFIX}DRIVER_S "
            f"({settings.deadlines.driver_s:g}): a lock that times out in the driver can be undone, a missed stage "
            "deadline cannot"
        )
    return settings, problems


def _take(fields: dict[str, object], name: str, variable: str, text: str) -> str | None:
    """Put a variable's value into ``fields``; returns what is wrong with it."""
    if name == "wake_margin_mib":
        value = _number(text, int)
        if value is None or value < 0:
            return f"{variable}={text} must be a whole number of MiB, not negative"
        fields[name] = value
    elif name in ("host_arena", "undo_before_checkpoint", "release_local_memory", "attribution"):
        if text not in ("0", "1"):
            return f"{variable}={text} must be 0 or 1"
        fields[name] = text == "1"
    elif text:
        fields[name] = text
    return None


def _number(text: str, kind: type[float]) -> float | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _suggestion(name: str) -> str:
    known = sorted({*_FIELDS, *_DEADLINES})
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {PREFIX}{close[0]}?"
    return f"; known are {', '.join(PREFIX + other for other in known)}"
