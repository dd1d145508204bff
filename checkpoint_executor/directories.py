"""I/O. The directories an executor uses: private to the user, and swept of what the dead left behind."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from checkpoint_executor import procfs
from checkpoint_executor.errors import ConfigError

__all__ = ["locks_directory", "make_runtime_directory", "require_usable", "sweep", "user_directory"]

#: ``sun_path`` holds 108 bytes with its final zero (unix(7)).
_MAX_SOCKET_PATH = 107
#: The longest socket name that is made below the runtime directory.
_LONGEST_NAME = len("/rendezvous/000000000000000000000000")

_count = itertools.count()


def user_directory(base: str | None = None, *, make: bool = True) -> Path:
    """The user's own 0700 directory below ``base`` (by default the temporary directory).

    Args:
        make: whether to make it if it is not there; a reader does not.

    Raises:
        ConfigError: it cannot be made, or exists and is not ours, or is open to others.
    """
    # Absolute, because the caller may change folders before it is removed.
    path = Path(base or tempfile.gettempdir()).absolute() / f"checkpoint-executor-{os.getuid()}"
    if not make and not path.exists():
        return path
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error}. Nothing was started") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        # Somebody else made it first, or opened it: sockets in it would not be private.
        raise ConfigError(
            f"{path} must be a directory of our own with mode 0700 (is: uid {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}). Remove it, or choose another runtime_dir. Nothing was started"
        )
    return path


def locks_directory() -> Path:
    """Where the per-device admission locks are, for all executors of this user."""
    return user_directory() / "locks"


def make_runtime_directory(base: str | None) -> Path:
    """A fresh private directory for one executor; its name says whose it is.

    Raises:
        ConfigError: it cannot be made, or sockets below it would have too long a path.
    """
    _fresh(user_directory(base, make=False), 0)  # before anything is made: a path that is too long leaves nothing
    parent = user_directory(base)
    sweep(parent)
    path = _fresh(parent, next(_count))
    try:
        path.mkdir(mode=0o700)
        (path / "rendezvous").mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error}. Nothing was started") from error
    return path


def require_usable(base: str | None) -> None:
    """Find out whether :func:`make_runtime_directory` will succeed, before anything is started.

    Raises:
        ConfigError: it will not.
    """
    _fresh(user_directory(base, make=False), 0)
    user_directory(base)


def _fresh(parent: Path, number: int) -> Path:
    pid = os.getpid()
    path = parent / f"{pid}-{procfs.start_time(pid)}-{number}"
    if len(os.fsencode(path)) + _LONGEST_NAME > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for sockets ({_MAX_SOCKET_PATH} bytes with their names): choose a shorter "
            "runtime_dir (or TMPDIR, where none is given). Nothing was started"
        )
    return path


def sweep(parent: Path) -> None:
    """Remove runtime directories whose executor is dead: SIGKILL of parent and helper at once leaves one."""
    for path in parent.iterdir():
        pid, _, rest = path.name.partition("-")
        started, _, _ = rest.partition("-")
        if pid.isdigit() and started.isdigit() and not procfs.is_alive(int(pid), int(started)):
            shutil.rmtree(path, ignore_errors=True)
