"""PURE. Which versions of vLLM this front door works with."""

from __future__ import annotations

import re

from checkpoint_executor.errors import ConfigError

__all__ = ["OLDEST", "TESTED", "require_supported", "version_note"]

#: ``is_sleeping`` from tags, a sleep that survives a partial wake, and NCCL's suspend are all there from here on.
OLDEST = (0, 31)

#: The last one that the tests run against; newer ones are accepted.
TESTED = (0, 33)


def require_supported(version: str) -> None:
    """Refuse a vLLM that is too old.

    Raises:
        ConfigError: naming the version.
    """
    found = _release(version)
    if found is not None and found < OLDEST:
        oldest, tested = (".".join(map(str, release)) for release in (OLDEST, TESTED))
        message = (
            f"vLLM {version} is not supported by checkpoint_executor.vllm.CUDACheckpointExecutor: it needs {oldest} or "
            f"later (tested up to {tested}). Nothing was started"
        )
        raise ConfigError(message, problems=(message,))


def version_note(version: str) -> str | None:
    """What there is to say about a version that is accepted."""
    found = _release(version)
    if found is None:
        return f"vLLM {version!r}: not a release, so whether it is supported is not known"
    if found > TESTED:
        return f"vLLM {version} is newer than the newest that was tested ({'.'.join(map(str, TESTED))})"
    return None


def _release(version: str) -> tuple[int, int] | None:
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None:
        return None
    release = (int(match[1]), int(match[2]))
    return release if release > (0, 1) else None  # a build from a checkout says 0.1.dev
