"""PURE. The driver's process states, verbs and error codes, and which verb is legal where.

This file knows the rules of ``cuCheckpointProcess*`` and nothing else: it does not know who calls
them (the helper), in which order ranks are put through them (the coordinator), or whether a real
driver stands behind them. The software device takes its rules from here, and the contract suite
holds the real driver to the same tables, so a wrong entry shows on a GPU.

Sources: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CHECKPOINT.html, and what was
measured on driver 580.159 with H200 where the documentation is silent.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

__all__ = ["EXPECTED_STATE", "TRANSITIONS", "DriverCode", "DriverError", "ProcessState", "Verb", "code_name"]


class ProcessState(StrEnum):
    """State of a CUDA process, in the driver's words (``CUprocessState``)."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Verb(StrEnum):
    """The four driver verbs (``cuCheckpointProcessLock`` and so on)."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


#: (state, verb) -> state after success. A missing key *is* the definition of illegal: the driver
#: answers ILLEGAL_STATE and the state does not change.
TRANSITIONS: dict[tuple[ProcessState, Verb], ProcessState] = {
    (ProcessState.RUNNING, Verb.LOCK): ProcessState.LOCKED,
    (ProcessState.LOCKED, Verb.CHECKPOINT): ProcessState.CHECKPOINTED,
    (ProcessState.CHECKPOINTED, Verb.RESTORE): ProcessState.LOCKED,
    (ProcessState.LOCKED, Verb.UNLOCK): ProcessState.RUNNING,
}

#: The state that must read back after a verb succeeded, wherever it started.
EXPECTED_STATE: dict[Verb, ProcessState] = {verb: after for (_, verb), after in TRANSITIONS.items()}


class DriverCode(IntEnum):
    """``CUresult`` values that the checkpoint calls were documented, or seen, to return."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    NO_DEVICE = 100
    OPERATING_SYSTEM = 304
    ILLEGAL_STATE = 401
    NOT_READY = 600
    NOT_SUPPORTED = 801
    UNKNOWN = 999


def code_name(code: int) -> str:
    """The driver's own name of a ``CUresult``, e.g. ``CUDA_ERROR_NOT_READY`` for 600."""
    try:
        known = DriverCode(code)
    except ValueError:
        return f"CUDA_ERROR_{code}"
    return "CUDA_SUCCESS" if known is DriverCode.SUCCESS else f"CUDA_ERROR_{known.name}"


#: What a code usually means in practice, for people who read the error. Public reports and own
#: measurements; the driver's documentation is shorter.
ADVICE: dict[int, str] = {
    DriverCode.OUT_OF_MEMORY: "not enough free GPU memory; after a restore this is permanent",
    DriverCode.NOT_INITIALIZED: "the process has not used CUDA, or is a zombie",
    DriverCode.OPERATING_SYSTEM: (
        "the process does not exist, or the helper may not trace it (user, ptrace_scope, "
        "CAP_SYS_PTRACE, pid namespace); also what every restore returns after one ran out of memory"
    ),
    DriverCode.ILLEGAL_STATE: "the verb is not legal in the state the process is in",
    DriverCode.NOT_READY: "work was still running on the GPU when the driver's lock timeout ended",
    DriverCode.NOT_SUPPORTED: (
        "the process holds something the driver cannot checkpoint (managed memory, CUDA IPC, imported "
        "or multicast memory); this does not mean that the driver is old"
    ),
}


class DriverError(Exception):
    """A driver call returned something other than CUDA_SUCCESS.

    Args:
        call: what was called, e.g. ``"lock"``.
        code: the ``CUresult`` as the driver returned it.
        name: the driver's name of the code; by default looked up here.
        detail: anything else that is known.
    """

    def __init__(self, call: str, code: int, name: str | None = None, detail: str = "") -> None:
        self.call = call
        self.code = int(code)
        self.name = name or code_name(code)
        self.detail = detail
        super().__init__(call, self.code, self.name, detail)

    def __str__(self) -> str:
        advice = ADVICE.get(self.code, "")
        tail = "; ".join(part for part in (self.detail, advice) if part)
        return f"{self.call}: {self.name} ({self.code})" + (f": {tail}" if tail else "")
