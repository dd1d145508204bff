"""PURE. Whose the bytes on a device are: what was read from outside, put beside what a rank says of itself.

Knows the kinds, the steps and the arithmetic. Does not know how anything is read: the helper reads devices and host
memory, the workers' runtimes keep the ledgers, and the control thread brings the two together.

The rule of the page is that nothing is hidden. What was read and nobody accounts for is ``remainder``, and where the
parts come to more than was read it is negative, which says that a part is wrong or was freed in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from checkpoint_executor.report import MemoryStep, RankMemory

__all__ = ["HOST_KINDS", "KINDS", "LEDGER_KINDS", "STEPS", "Observation", "memory_steps"]

#: Kinds of device bytes that a worker accounts for.
#:
#: ``graph_pools`` are the graphs' intermediate results; ``graph_executables`` what the device lost across captures and
#: first replays beyond what pools grew; ``nccl_*`` the communicator's own statistics; ``cublas`` the workspaces that
#: torch gave it; ``local_memory`` what the context has for kernels' local variables; ``context`` the rest of the
#: context, and modules as far as they were loaded while somebody watched (opening the device, making the communicator,
#: warming up before a capture).
LEDGER_KINDS = (
    "weights",
    "kv_cache",
    "graph_pools",
    "graph_executables",
    "nccl_persistent",
    "nccl_suspendable",
    "workspaces",
    "cublas",
    "local_memory",
    "context",
)

#: All kinds of device bytes; they add up to what was read.
KINDS = (*LEDGER_KINDS, "helper", "remainder")

HOST_KINDS = ("backup_arena", "driver_backup", "rss")

#: The steps of a whole cycle, in order. A release ends in ``"released"`` instead, and a wake without a restore has only
#: ``"woken"``.
STEPS = (
    "awake",
    "allocator_asleep",
    "communicators_suspended",
    "workspaces_prepared",
    "checkpointed",
    "restored",
    "workspaces_restored",
    "communicators_resumed",
    "woken",
)


class Observation(Struct, frozen=True):
    """One rank at one step.

    Attributes:
        step: when. rank: whose. device_bytes: in use on its device, by everybody.
        ledger: bytes by kind that the rank last said it holds. outside: what the helper read beside the device:
            ``empty`` and ``helper`` (device bytes), ``rss`` and ``rss_anon`` of the rank (host bytes).
    """

    step: str
    rank: int
    device_bytes: int
    ledger: Mapping[str, int]
    outside: Mapping[str, int]


def memory_steps(operation: str, observations: Sequence[Observation]) -> tuple[MemoryStep, ...]:
    """The steps of an operation (``"sleep"``, ``"wake"``, ``"release"``), from its observations in their order."""
    steps: dict[str, list[RankMemory]] = {}
    #: Anonymous memory of each rank at the step before.
    before: dict[int, int] = {}
    for seen in observations:
        step = seen.step if seen.step != "asleep" else "checkpointed" if operation == "sleep" else "released"
        steps.setdefault(step, []).append(_rank_memory(step, seen, before.get(seen.rank)))
        if "rss_anon" in seen.outside:
            before[seen.rank] = seen.outside["rss_anon"]
    return tuple(
        MemoryStep(step, tuple(sorted(ranks, key=lambda memory: memory.rank))) for step, ranks in steps.items()
    )


def _rank_memory(step: str, seen: Observation, anonymous_before: int | None) -> RankMemory:
    checkpointed = step == "checkpointed"
    empty = seen.outside.get("empty", 0)
    used = seen.device_bytes - empty
    # The driver moved all of a checkpointed process to the host: its last account is of before.
    kinds = {kind: 0 if checkpointed else seen.ledger.get(kind, 0) for kind in LEDGER_KINDS}
    kinds["helper"] = seen.outside.get("helper", 0)
    kinds["remainder"] = used - sum(kinds.values())
    anonymous = seen.outside.get("rss_anon")
    grown = anonymous - anonymous_before if anonymous is not None and anonymous_before is not None else 0
    return RankMemory(
        rank=seen.rank,
        used_bytes=used,
        empty_bytes=empty,
        kinds=kinds,
        host={
            "backup_arena": seen.ledger.get("backup_arena", 0),
            "driver_backup": grown if checkpointed else 0,
            "rss": seen.outside.get("rss", 0),
        },
        unaccounted={} if checkpointed or "torch" not in seen.ledger else {"torch": seen.ledger["torch"]},
    )
