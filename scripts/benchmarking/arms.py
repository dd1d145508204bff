"""PURE. The arms of a comparison: which there are, which cannot be measured and why, and what their figures come to.

Knows the file of a comparison (its readers are ``checkpoint_executor/recorded.py`` and the table), and nothing of
processes or devices. Bytes and seconds throughout.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from checkpoint_executor.communication import SOCKET, SUSPEND

__all__ = ["ARMS", "FRONT_DOORS", "Arm", "Spec", "Summary", "order", "own_left_bytes", "plan", "summarise"]

#: In the order of the table: each adds to what the one before gives back.
ARMS = ("nothing", "allocator", "allocator+nccl", "driver", "all")

FRONT_DOORS = ("own", "vllm")

_PEERS = "while peers have each other's memory mapped the driver's checkpoint succeeds and every restore fails for ever"


class Arm(Struct, frozen=True):
    """One way of giving memory back.

    Attributes:
        name: one of :data:`ARMS`. communication: of its ranks.
        note: what a reader of its row has to know. refused: why it is not measured; empty if it is.
    """

    name: str
    communication: str = SUSPEND
    note: str = ""
    refused: str = ""


class Spec(Struct, frozen=True):
    """What one launch is to do; goes to its process.

    Attributes:
        device: ``"soft"`` or ``"cuda"``. soft_root, soft_capacity_bytes: of the software devices.
        weights_bytes, kv_bytes: on each rank; of vLLM the weights are the model's. graphs: of the ballast worker.
        keep_weights: leave the weights as they are, so that a later sleep may find its backup still right.
        together: other engines are up on the same devices.
        model, nccl, folder: of vLLM: which dimensions, which NCCL is loaded before torch's, where its files go.
    """

    front_door: str
    arm: str
    communication: str
    device: str
    ranks: int
    cycles: int
    weights_bytes: int = 0
    kv_bytes: int = 0
    graphs: int = 0
    keep_weights: bool = False
    soft_root: str = ""
    soft_capacity_bytes: int = 0
    together: bool = False
    model: str = ""
    nccl: str = ""
    folder: str = ""
    limit_s: float = 0.0


def plan(name: str, front_door: str, ranks: int, communication: str = SUSPEND) -> Arm:
    """How an arm is measured here, or why it is not.

    Raises:
        ValueError: there is no such arm.
    """
    if name not in ARMS:
        raise ValueError(f"there is no arm {name!r}: they are {', '.join(ARMS)}")
    if name == "allocator+nccl":
        if ranks == 1:
            return Arm(name, communication, refused="one rank has no communicator to suspend")
        if communication == SOCKET:
            return Arm(name, communication, refused="over sockets there is nothing to suspend")
    if front_door == "vllm":
        if name == "driver" and ranks > 1:
            return Arm(name, communication, refused=_PEERS)
        notes = {
            "nothing": "started without sleep mode",
            "allocator": "vLLM's own sleep, and its own all-reduce",
            "allocator+nccl": "vLLM's own sleep with enable_nccl_comm_suspend, in our communication settings",
            "driver": "started without sleep mode; the four verbs on vLLM's worker, from outside",
        }
        note = notes.get(name, "")
        return Arm(name, communication, note if ranks > 1 else note.replace(", and its own all-reduce", ""))
    if name == "driver" and ranks > 1 and communication == SUSPEND:
        return Arm(name, SOCKET, note=f"over sockets, since {_PEERS}")
    return Arm(name, communication)


def order(arms: Sequence[Arm], launches: int) -> Iterator[tuple[int, Sequence[Arm]]]:
    """Rounds of one launch an arm, forwards and backwards in turn, so that a drift of the machine hits all arms alike.

    Yields:
        The number of the round, from 1, and the arms that are not refused.
    """
    measured = [arm for arm in arms if not arm.refused]
    for number in range(1, launches + 1):
        yield number, measured if number % 2 else measured[::-1]


class Summary(Struct, frozen=True):
    """The figures of an arm over all its launches: (median, least, most), None where there are none.

    Attributes:
        launches: those that came to their end. cycles: over all launches.
        first_down_s: of each launch's first sleep. down_s, up_s: of all cycles.
        left_bytes: by device, the most that any cycle left beyond what the device held without the launch.
        host_bytes: host memory of a worker while asleep. taken_bytes: by how much the sleep made it grow.
        copy_down_gb_s, copy_up_gb_s: of the weights' copies, by rank. of_plain_down, of_plain_up: against the plain
            copies of the same process.
    """

    arm: str
    launches: int
    cycles: int
    identical: bool | None = None
    first_down_s: tuple[float, float, float] | None = None
    down_s: tuple[float, float, float] | None = None
    up_s: tuple[float, float, float] | None = None
    left_bytes: tuple[int, ...] = ()
    host_bytes: tuple[float, float, float] | None = None
    taken_bytes: tuple[float, float, float] | None = None
    copy_down_gb_s: tuple[float, float, float] | None = None
    copy_up_gb_s: tuple[float, float, float] | None = None
    of_plain_down: tuple[float, float, float] | None = None
    of_plain_up: tuple[float, float, float] | None = None


def summarise(arm: str, launches: Iterable[dict[str, Any]]) -> Summary:
    """An arm's figures, from the launches as they are written; those of other arms are passed over."""
    own = [launch for launch in launches if launch["arm"] == arm]
    cycles = [(launch, cycle) for launch in own for cycle in launch["cycles"]]
    completed = sum(bool(launch.get("completed")) for launch in own)
    if not cycles:
        return Summary(arm, completed, 0)

    def spread(
        values: Callable[[dict[str, Any], dict[str, Any]], Iterable[float]],
    ) -> tuple[float, float, float] | None:
        found = [value for launch, cycle in cycles for value in values(launch, cycle)]
        return (statistics.median(found), min(found), max(found)) if found else None

    def of_plain(name: str, way: str) -> tuple[float, float, float] | None:
        def shares(launch: dict[str, Any], cycle: dict[str, Any]) -> Iterable[float]:
            plain = launch.get("plain_copy_gb_s", ())
            rates = cycle.get(name, ())
            if len(plain) == len(rates) and all(way in rank for rank in plain):
                return [rate / rank[way] for rate, rank in zip(rates, plain, strict=True)]
            return ()

        return spread(shares)

    left = [own_left_bytes(launch, cycle) for launch, cycle in cycles]
    return Summary(
        arm,
        completed,
        len(cycles),
        all(cycle["identical"] for _, cycle in cycles),
        spread(lambda launch, cycle: [cycle["down_s"]] if cycle is launch["cycles"][0] else []),
        spread(lambda _, cycle: [cycle["down_s"]]),
        spread(lambda _, cycle: [cycle["up_s"]]),
        tuple(max(each) for each in zip(*left, strict=True)),
        spread(lambda _, cycle: cycle["rss_asleep_bytes"]),
        spread(
            lambda _, cycle: [
                asleep - before
                for asleep, before in zip(cycle["rss_asleep_bytes"], cycle["rss_before_bytes"], strict=True)
            ]
        ),
        spread(lambda _, cycle: cycle.get("copy_down_gb_s", ())),
        spread(lambda _, cycle: cycle.get("copy_up_gb_s", ())),
        of_plain("copy_down_gb_s", "d2h"),
        of_plain("copy_up_gb_s", "h2d"),
    )


def own_left_bytes(launch: dict[str, Any], cycle: dict[str, Any]) -> list[int]:
    """What the launch itself left on each device while asleep.

    Beside other engines (``together``) only the reading after its end tells what was not its own; before it has ended,
    and alone on the machine, what was there before its start.
    """
    others = (launch.get("after_bytes") if launch.get("together") else None) or launch["empty_bytes"]
    return [used - other for used, other in zip(cycle["used_asleep_bytes"], others, strict=True)]
