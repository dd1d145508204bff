"""PURE. Faults by name, for the software device only: what can go wrong, where, and how often.

Tests choose a fault by (fault, role, rank, stage); the helper and the worker services ask for it when they reach
that stage. A real device takes no injections: the configuration refuses them there, and the children look for none.

There are two ways in. The ``faults`` option fixes them at the start. In a live executor one is *armed*: a file with
the injection as JSON, by the name of :func:`armed_name`, in the executor's private runtime directory; the child takes
the file away when it reaches the stage.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from checkpoint_executor.messages import Role

__all__ = ["Fault", "Injection", "armed_name"]


class Fault(StrEnum):
    """What goes wrong."""

    DRIVER_ERROR = "driver_error"  #: the driver answers ``code``, and the verb has no effect or the reading none
    WRONG_STATE = "wrong_state"  #: the driver answers success and the verb had no effect
    EXCEPTION = "exception"  #: the stage raises
    OUT_OF_MEMORY = "out_of_memory"  #: the stage raises MemoryError (worker) or CUDA_ERROR_OUT_OF_MEMORY (helper)
    FULL_DIRECTORY = "full_directory"  #: the runtime directory's (small) file system is full when the stage begins
    HANG = "hang"  #: the stage never answers
    SLOW = "slow"  #: the stage answers late, but within its deadline (``delay_s``)
    DIE = "die"  #: the process dies by ``signal`` when the stage begins
    STOP = "stop"  #: the process stops (SIGSTOP) when the stage begins
    GARBAGE = "garbage"  #: a frame of noise is sent before the right answer
    PARTIAL = "partial"  #: half of a frame is sent instead of an answer, and nothing more
    DUPLICATE_REPLY = "duplicate_reply"  #: the answer is sent twice
    STALE_REPLY = "stale_reply"  #: an answer to the previous cycle is sent before the right one


class Injection(Struct, frozen=True, forbid_unknown_fields=True):
    """One fault in one place.

    Attributes:
        fault: what. role, rank, stage: where; the helper acts once for each rank.
        times: how often, counted per process. skip: how many times the stage passes unharmed before.
        code: the driver's code. signal: number. delay_s: seconds.
    """

    fault: Fault
    role: Role
    rank: int
    stage: str
    times: int = 1
    skip: int = 0
    code: int = 999
    signal: int = 9
    delay_s: float = 0.0


def armed_name(role: Role, rank: int, stage: str) -> str:
    """File name, below the runtime directory, of a fault armed in a live executor."""
    return f"fault-{role}-{rank}-{stage}.json"
