"""What a worker's device backend provides: the protocols that the soft and the CUDA backend both meet.

A user's :class:`~checkpoint_executor.workers.worker.Worker` is written against this file; the worker
service calls the ``sleep`` / ``suspend`` / ``checkpoint_prepare`` side of it. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["Allocation", "Allocator", "Communicator", "DeviceRuntime", "Graph", "Workspace"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
M = TypeVar("M", bound="torch.nn.Module")


class Allocation(Protocol):
    """Device memory at an address that never changes, whether or not it is resident.

    Attributes:
        address: virtual address. size_bytes: size. tag: the tag it sleeps with.
    """

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def tag(self) -> str: ...

    def read(self, offset_bytes: int = 0, size_bytes: int | None = None) -> bytes:
        """Copy bytes to the host."""
        ...

    def write(self, data: bytes, offset_bytes: int = 0) -> None:
        """Copy bytes to the device."""
        ...


class Allocator(Protocol):
    """Device memory by tag: ``weights`` is backed up in host memory while asleep, ``kv_cache`` is dropped."""

    @property
    def sleeping(self) -> frozenset[str]:
        """Tags whose memory is not resident."""
        ...

    def tag_bytes(self) -> dict[str, int]:
        """Device bytes that the allocations of each tag take when resident."""
        ...

    def allocate(self, size_bytes: int, tag: str = "weights") -> Allocation:
        """Raw memory. Raises ValueError (unknown or sleeping tag), MemoryError (no room on the device)."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tag: str = "weights") -> torch.Tensor:
        """An uninitialised contiguous tensor on the device."""
        ...

    def materialize(self, module: M, tag: str = "weights") -> M:
        """Give every parameter and buffer of a module that was built on the meta device memory of this tag.

        Contents are uninitialised; shared parameters stay shared.
        """
        ...

    def use(self, tag: str) -> AbstractContextManager[None]:
        """Tensors that torch creates on the device inside the ``with`` land in this tag."""
        ...

    def sleep(self) -> dict[str, int]:
        """Back up and drop everything that is resident. Returns bytes: ``weights`` backed up, ``kv_cache``
        dropped, ``copied`` really copied (less than ``weights`` where the backup was proven right)."""
        ...

    def fingerprints(self, tag: str) -> dict[str, bytes]:
        """A hash of every allocation of a resident tag, by address and size, taken on the device.

        Raises RuntimeError if the device cannot hash.
        """
        ...

    def wake(self, tags: Sequence[str]) -> dict[str, int]:
        """Make the tags resident at their old addresses; ``weights`` get their bytes back. Returns bytes by tag.

        Raises MemoryError if there is no room.
        """
        ...

    def release(self, tag: str) -> dict[str, int]:
        """Drop a tag without a backup (``kv_cache`` only). Returns bytes by tag."""
        ...


class Communicator(Protocol):
    """Collectives among the ranks. While suspended, a collective raises RuntimeError and never reaches a device."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_suspended(self) -> bool:
        """Whether the communicator gave up its device memory: the flag of the library itself."""
        ...

    @property
    def needs_suspend(self) -> bool:
        """Whether a driver checkpoint needs it suspended (False for one rank and for sockets only)."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over all ranks; the result is the same bits on every rank. Returns ``tensor``."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of shape ``(world_size, *tensor.shape)``, in rank order."""
        ...

    def suspend(self) -> None:
        """Give up device memory, keep its addresses. A barrier among the ranks, without a timeout."""
        ...

    def resume(self) -> None:
        """Take the memory back at the same addresses. A barrier among the ranks, without a timeout."""
        ...

    def check(self) -> None:
        """A small all-reduce with a known answer. Raises RuntimeError if the sum is wrong."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """``suspendable`` and ``persistent`` device bytes of the communicator."""
        ...


class Workspace(Protocol):
    """Device memory shared with peers outside the communicator, e.g. a FlashInfer all-reduce workspace.

    Both hooks are idempotent and collective. Names are FlashInfer's, whose restore takes one argument more: see
    ``cuda_workspace.py``.
    """

    def checkpoint_prepare(self) -> None:
        """Release peer memory, keep the addresses."""
        ...

    def checkpoint_restore(self) -> None:
        """Map it again at the same addresses."""
        ...


class Graph(Protocol, Generic[T_co]):
    """A captured computation that replays over the addresses it was captured with."""

    @property
    def output(self) -> T_co:
        """What the captured function returned; its tensors are rewritten by every replay."""
        ...

    def replay(self) -> T_co:
        """Run it and return :attr:`output`."""
        ...


class DeviceRuntime(Protocol):
    """One rank's device, opened. Built by the worker service before the user's Worker.

    Attributes:
        kind: ``"soft"`` or ``"cuda"``. device_id: GPU UUID, or the software device's name.
        torch_device: what to give torch, e.g. ``"cuda:0"``; ``"cpu"`` on the software device.
        workspaces: registered workspaces, in the order in which they are prepared.
    """

    @property
    def kind(self) -> str: ...
    @property
    def device_id(self) -> str: ...
    @property
    def torch_device(self) -> str: ...
    @property
    def allocator(self) -> Allocator: ...
    @property
    def communicator(self) -> Communicator: ...
    @property
    def workspaces(self) -> list[Workspace]: ...

    def capture(self, function: Callable[[], T]) -> Graph[T]:
        """Warm up and capture ``function`` (no arguments: it reads and writes tensors at fixed addresses)."""
        ...

    def shared_workspace(self, size_bytes: int) -> Workspace:
        """A peer-mapped workspace of our own, registered. Collective."""
        ...

    def device_call(self) -> AbstractContextManager[None]:
        """Held while a worker's method runs, so that eager work is seen by the driver's lock. May nest."""
        ...

    def prepare_backup(self) -> Mapping[str, int]:
        """Get the host memory of the weights' backup now, so that the first sleep is as fast as the others.

        Returns bytes by name.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all submitted work is done."""
        ...

    def ledger(self) -> dict[str, int]:
        """Bytes that this rank holds now as far as they can be told apart, by kind
        (:data:`~checkpoint_executor.attribution.KINDS`), and ``backup_arena`` in host memory.

        Makes no call that reaches the device. On CUDA some kinds are only known if the device was opened with
        ``attribution``.
        """
        ...

    def trim(self) -> Mapping[str, int]:
        """Give back what is cheap to give back before the driver copies it. Returns bytes by name."""
        ...

    def release_local_memory(self) -> int:
        """Give back what the context keeps for kernels' local variables, which no kernel holds when none runs.

        The last thing before the lock: until :meth:`restore_local_memory` no graph may be replayed. Returns device
        bytes.
        """
        ...

    def restore_local_memory(self) -> None:
        """Get it again, as large as it was; the first thing after the unlock. Idempotent. Raises MemoryError."""
        ...

    def close(self) -> None:
        """Orderly end of an awake worker."""
        ...
