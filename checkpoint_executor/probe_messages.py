"""PURE. What ``doctor`` asks its probe (``helper/probe.py``), and the answers: one line of JSON each."""

from __future__ import annotations

from msgspec import Struct

from checkpoint_executor.facts import ProcessFacts, StateQuery
from checkpoint_executor.messages import Target

__all__ = ["ProbeDriver", "ProbeRequest", "ProbeState"]


class ProbeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Open the driver as a helper would, and ask it for the state of these processes."""

    device_kind: str
    soft_root: str
    targets: tuple[Target, ...] = ()


class ProbeDriver(Struct, frozen=True, tag="driver"):
    """How the driver was opened. The first answer.

    Attributes:
        helper: the probe itself, with the driver loaded. description: of the driver. problem: why it did not open.
    """

    helper: ProcessFacts
    description: str = ""
    problem: str | None = None


class ProbeState(Struct, frozen=True, tag="state"):
    """The driver's answer about a process."""

    pid: int
    query: StateQuery
