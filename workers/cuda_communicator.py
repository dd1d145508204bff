"""Collectives among GPUs: NCCL by ``nccl4py``, able to give up its device memory at fixed addresses.

Knows NCCL, and torch as far as streams and tensors go. Does not know the order of a sleep, nor the environment that
makes a suspend possible (``checkpoint_executor.communication`` has that).

What was measured (H200, 580.159, NCCL 2.30.7): with peer memory still mapped, the driver's checkpoint *succeeds* and
its restore fails for ever. So ``is_suspended`` reads NCCL's own flag, and nothing else counts. After a resume the
flag proves little as well: NCCL logs a failed import as a warning and carries on, so :meth:`CudaCommunicator.check`
runs collectives.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_executor.workers.cuda_rendezvous import HostGroup

if TYPE_CHECKING:
    import torch

__all__ = ["COLLECTIVES_NEED", "CudaCommunicator", "LocalCommunicator"]

_log = logging.getLogger(__name__)

#: The first NCCL with ``ncclCommSuspend``.
COLLECTIVES_NEED = "2.29.7"

#: Elements of the two canaries (int32). The small one goes by NCCL's low-latency protocol, the large one over
#: all channels by the simple one: they use different peer buffers.
_CANARY_ELEMENTS = (256, 4 << 20)


class LocalCommunicator:
    """The communicator of a single rank: nothing travels, and no NCCL is loaded."""

    rank = 0
    world_size = 1
    needs_suspend = False

    def __init__(self) -> None:
        self._suspended = False

    @property
    def is_suspended(self) -> bool:
        return self._suspended

    @property
    def collectives(self) -> int:
        """How many collectives were submitted so far."""
        return 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor``."""
        self.require_active()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with a first dimension of one."""
        self.require_active()
        return tensor.unsqueeze(0).clone()

    def suspend(self) -> None:
        if self._suspended:
            raise RuntimeError("the communicator is suspended already")
        self._suspended = True

    def resume(self) -> None:
        if not self._suspended:
            raise RuntimeError("the communicator is not suspended")
        self._suspended = False

    def check(self) -> None:
        self.require_active()

    def memory_bytes(self) -> dict[str, int]:
        return {"suspendable": 0, "persistent": 0}

    def require_active(self) -> None:
        """Raises RuntimeError while suspended."""
        if self._suspended:
            raise RuntimeError("the communicator is suspended; a collective must wait for wake_up()")


class CudaCommunicator:
    """Meets :class:`~checkpoint_executor.workers.protocols.Communicator` over NCCL. The constructor is collective.

    Args:
        group: the ranks. device: torch's index of this rank's device, which is current.
        suspendable: the *suspend* configuration; False for *socket*.

    Raises:
        ImportError: no nccl4py. RuntimeError: NCCL is too old to suspend.
    """

    def __init__(self, group: HostGroup, device: int, *, suspendable: bool) -> None:
        from nccl import core

        self._nccl: Any = core
        self._group = group
        self._device = device
        self._suspendable = suspendable
        self._suspended = False
        self._collectives = 0
        if suspendable:
            _require_suspendable_nccl(core)
        # A unique id opens sockets of the rank that makes it, so only rank 0 does.
        own = bytes(core.get_unique_id()) if group.rank == 0 else b""
        unique_id = core.UniqueId.from_bytes(group.exchange("NCCL unique id", own)[0].data)
        self._communicator: Any = core.Communicator.init(group.world_size, group.rank, unique_id)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def is_suspended(self) -> bool:
        """NCCL's own flag. Always False in the *socket* configuration, where there is nothing to suspend."""
        if not self._suspendable:
            return False
        return int(self._communicator.get_mem_stat(self._nccl.NcclCommMemStat.GpuMemSuspended)) == 1

    @property
    def needs_suspend(self) -> bool:
        return self._suspendable

    @property
    def collectives(self) -> int:
        """How many collectives were submitted so far, captured ones included: what tells a graph that holds some."""
        return self._collectives

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over all ranks, on the current stream. Returns ``tensor``.

        Raises:
            RuntimeError: suspended; nothing reached the device.
        """
        self.require_active()
        if tensor.numel():
            dense = tensor.contiguous()
            self._communicator.allreduce(dense, dense, self._nccl.SUM, stream=self._stream())
            self._collectives += 1
            if dense is not tensor:
                tensor.copy_(dense)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of shape ``(world_size, *tensor.shape)``, in rank order. Raises as :meth:`all_reduce`."""
        import torch

        self.require_active()
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel():
            self._communicator.allgather(tensor.contiguous(), gathered, stream=self._stream())
            self._collectives += 1
        return gathered

    def suspend(self) -> None:
        """Give up the device memory, keep its addresses. A barrier among the ranks, without a timeout.

        Raises:
            RuntimeError: suspended already. NCCL's error if it refuses.
        """
        if self._suspended:
            raise RuntimeError("the communicator is suspended already")
        # Before NCCL is asked: if it fails half-way, nothing may use it.
        self._suspended = True
        if self._suspendable:
            self._synchronize()
            self._communicator.suspend()

    def resume(self) -> None:
        """Take the memory back at the same addresses. A barrier among the ranks, without a timeout.

        Raises:
            RuntimeError: not suspended. NCCL's error if it fails, after which the communicator is of no use.
        """
        if not self._suspended:
            raise RuntimeError("the communicator is not suspended")
        if self._suspendable:
            self._communicator.resume()
        self._suspended = False

    def check(self) -> None:
        """All-reduces with a known sum, small and large. Raises RuntimeError if a sum is wrong or this is suspended."""
        import torch

        self.require_active()
        size = self.world_size
        for elements in _CANARY_ELEMENTS:
            # Distinct numbers, so that a shifted buffer is noticed as well.
            numbers = torch.arange(elements, dtype=torch.int32, device=f"cuda:{self._device}")
            canary = self.all_reduce(numbers + self.rank)
            expected = numbers * size + size * (size - 1) // 2
            wrong = int((canary != expected).sum())
            if wrong:
                raise RuntimeError(
                    f"the communicator is broken: {wrong} of {elements} sums over {size} ranks are wrong"
                )
        del numbers, canary, expected
        # What torch keeps of them would stand in the way of the memory that wakes next.
        torch.cuda.empty_cache()

    def memory_bytes(self) -> dict[str, int]:
        """``suspendable`` and ``persistent`` device bytes, by NCCL's statistics; zeros in *socket*, which has none."""
        if not self._suspendable:
            return {"suspendable": 0, "persistent": 0}
        statistic = self._nccl.NcclCommMemStat
        return {
            "suspendable": int(self._communicator.get_mem_stat(statistic.GpuMemSuspend)),
            "persistent": int(self._communicator.get_mem_stat(statistic.GpuMemPersist)),
        }

    def require_active(self) -> None:
        """Raises RuntimeError while suspended: a collective would fault on unmapped memory."""
        if self._suspended:
            raise RuntimeError("the communicator is suspended; a collective must wait for wake_up()")

    # Details

    def _stream(self) -> int:
        """torch's current stream. nccl4py takes None for the default stream, which would race with torch's work."""
        import torch

        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)


def _require_suspendable_nccl(core: Any) -> None:
    from packaging.version import Version

    library = core.get_version().libnccl
    if library is None or library.version < Version(COLLECTIVES_NEED):
        raise RuntimeError(
            f"communication='suspend' needs NCCL {COLLECTIVES_NEED} or newer, not {library or 'none'}: put a newer "
            "libnccl.so.2 into LD_PRELOAD, or choose communication='socket'"
        )
    loaded = sorted(set(_loaded_libraries("libnccl.so")))
    if len(loaded) > 1:
        _log.warning(
            "this process has loaded %d NCCL libraries, only one of which is suspended: %s", len(loaded), loaded
        )


def _loaded_libraries(name: str) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if name in line)
    return [path for path in paths if Path(path).name.startswith(name)]
