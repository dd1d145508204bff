"""PURE. What a child is told when it is started."""

from __future__ import annotations

from msgspec import Struct

from checkpoint_executor.faults import Injection
from checkpoint_executor.messages import Role, identity

__all__ = ["ChildSpec"]


class ChildSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What a child is told on its command line. No secrets: others may read it."""

    role: Role
    rank: int
    world_size: int
    parent_pid: int
    parent_start_time: int
    runtime_dir: str
    device_kind: str
    #: By rank; empty entries leave the choice to the worker.
    device_id: str = ""
    communication: str = "suspend"
    retain_backup: bool = True
    release_local_memory: bool = True
    verify_weights: bool = False
    #: Largest single frame of user data that the parent takes.
    max_payload_bytes: int = 64 << 30
    soft_root: str = ""
    soft_capacity_bytes: int | None = None
    #: Directory of the per-device admission locks, shared by the user's executors.
    locks_dir: str = ""
    #: Whom the worker lets trace it (``PR_SET_PTRACER``).
    helper_pid: int = 0
    #: Whose workers they are, ``"own"`` or ``"vllm"`` (preflight).
    front_door: str = "own"
    #: Preflight checks whose blockers do not count.
    ignore_preflight: tuple[str, ...] = ()
    #: Whether to tell whose the device's bytes are.
    attribution: bool = False
    faults: tuple[Injection, ...] = ()

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.runtime_dir}/control"

    @property
    def identity(self) -> bytes:
        return identity(self.role, self.rank)
