"""Collectives among the ranks of software devices, over peer memory or over sockets.

Knows how bytes travel between the ranks, and how the communicator gives up its device memory. Knows nothing of
the driver's checkpoint, nor of the order in which it comes. torch is imported only by the collectives on tensors.

Two modes, for the two ways in which NCCL is used here:

- ``suspend``: each rank has a *staging* segment on its device that its peers map. The mappings must be gone before the
  driver's checkpoint (with one alive the checkpoint succeeds and no restore ever does), so ``suspend()`` releases them
  and drops the segment; ``resume()`` brings it back at the same address.
- ``socket``: bytes go through the sockets that both modes use to agree, and there is nothing to suspend.

Sums are taken in rank order on every rank, so that all ranks hold the same bits.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_executor.softgpu import ImportedSegment, SoftProcess
from checkpoint_executor.workers.rendezvous import meet

if TYPE_CHECKING:
    import torch

__all__ = ["MODES", "SoftCommunicator"]

MODES = ("suspend", "socket")

_STAGING_BYTES = 1 << 20
_SOCKET_NAME = "communicator.sock"
_HEADER = struct.Struct("!HQ")  # bytes of the operation's name, bytes of the payload
_LENGTH = struct.Struct("!Q")
_MISMATCH = "mismatch: "


# ------------------------------------------------------------------------------------------------
# Sockets: a star around rank 0
# ------------------------------------------------------------------------------------------------


class _Star:
    """Lock-step exchange of bytes through rank 0, which hears of every rank's death while it waits.

    Each exchange carries the name of the operation, so that ranks that are not in the same one get an error and not
    each other's bytes. After an error the star is closed, which is how the other ranks learn of it.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: Path, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        #: On rank 0 the peers by rank, elsewhere rank 0.
        self._sockets = meet(rank, world_size, rendezvous, _SOCKET_NAME, socket.SOCK_STREAM, timeout_s)

    def exchange(self, operation: str, payload: bytes | memoryview = b"") -> list[bytearray]:
        """Give every rank everybody's payload, in rank order. Returns when all ranks are in it.

        Raises:
            ConnectionError: a rank is gone. RuntimeError: a rank is in another operation.
        """
        try:
            return self._serve(operation, payload) if self._rank == 0 else self._ask(operation, payload)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def _serve(self, operation: str, payload: bytes | memoryview) -> list[bytearray]:
        frames = {0: (operation, bytearray(payload)), **self._collect(operation)}
        strays = [f"rank {rank} is in {name!r}" for rank, (name, _) in sorted(frames.items()) if name != operation]
        if strays:
            message = f"rank 0 is in {operation!r}, but {', '.join(strays)}"
            for peer, connection in self._sockets.items():
                self._send(connection, peer, _MISMATCH + message, b"")
            raise RuntimeError(f"the ranks are not in the same collective: {message}")
        parts = [frames[rank][1] for rank in range(self._world_size)]
        reply = b"".join(_LENGTH.pack(len(part)) for part in parts) + b"".join(parts)
        for peer, connection in self._sockets.items():
            self._send(connection, peer, operation, reply)
        return parts

    def _collect(self, operation: str) -> dict[int, tuple[str, bytearray]]:
        """One frame of every peer, in whatever order they come."""
        if len(self._sockets) != self._world_size - 1:
            raise ConnectionError(f"{operation}: the communicator was closed, or lost a rank earlier")
        ranks = {connection.fileno(): rank for rank, connection in self._sockets.items()}
        poller = select.poll()
        for fd in ranks:
            poller.register(fd, select.POLLIN | select.POLLRDHUP)
        frames: dict[int, tuple[str, bytearray]] = {}
        while len(frames) < len(ranks):
            for fd, event in poller.poll():
                rank = ranks[fd]
                if rank not in frames and event & select.POLLIN:
                    frames[rank] = self._receive(self._sockets[rank], rank, operation)
                    # It waits for the answer now; all that can still come of it is its death.
                    poller.modify(fd, select.POLLRDHUP)
                elif event & ~select.POLLIN:
                    raise ConnectionError(f"{operation}: rank {rank} is gone")
        return frames

    def _ask(self, operation: str, payload: bytes | memoryview) -> list[bytearray]:
        connection = self._sockets.get(0)
        if connection is None:
            raise ConnectionError(f"{operation}: the communicator was closed, or lost a rank earlier")
        self._send(connection, 0, operation, payload)
        name, reply = self._receive(connection, 0, operation)
        if name.startswith(_MISMATCH):
            raise RuntimeError(f"the ranks are not in the same collective: {name.removeprefix(_MISMATCH)}")
        start = _LENGTH.size * self._world_size
        parts = []
        for rank in range(self._world_size):
            (length,) = _LENGTH.unpack_from(reply, _LENGTH.size * rank)
            parts.append(reply[start : start + length])
            start += length
        return parts

    @staticmethod
    def _send(connection: socket.socket, peer: int, operation: str, payload: bytes | memoryview) -> None:
        name = operation.encode()
        try:
            connection.sendall(_HEADER.pack(len(name), len(payload)) + name)
            # Nothing more if there is nothing more: the peer may have answered by now, and closed.
            if payload:
                connection.sendall(payload)
        except OSError as error:
            raise ConnectionError(f"{operation}: rank {peer} is gone") from error

    @classmethod
    def _receive(cls, connection: socket.socket, peer: int, operation: str) -> tuple[str, bytearray]:
        header = cls._receive_exactly(connection, peer, operation, _HEADER.size)
        name_bytes, payload_bytes = _HEADER.unpack(header)
        name = cls._receive_exactly(connection, peer, operation, name_bytes).decode()
        return name, cls._receive_exactly(connection, peer, operation, payload_bytes)

    @staticmethod
    def _receive_exactly(connection: socket.socket, peer: int, operation: str, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                received = connection.recv_into(view)
            except OSError as error:
                raise ConnectionError(f"{operation}: rank {peer} is gone") from error
            if received == 0:
                other = " (or it lost another rank)" if peer == 0 else ""
                raise ConnectionError(f"{operation}: rank {peer} is gone{other}")
            view = view[received:]
        return data


# ------------------------------------------------------------------------------------------------
# Peer memory
# ------------------------------------------------------------------------------------------------


class _Staging:
    """A segment of every rank, mapped by all of the others, through which payloads travel."""

    def __init__(self, process: SoftProcess, star: _Star, size_bytes: int) -> None:
        self._process = process
        self._star = star
        self._half_bytes = size_bytes // 2
        self._half = 0
        self._imports: list[ImportedSegment | None] = []
        self.segment = process.allocate(size_bytes)
        self._exchange_handles()

    @property
    def chunk_bytes(self) -> int:
        """The most that one exchange carries."""
        return self._half_bytes

    def exchange(self, operation: str, payload: bytes | memoryview) -> list[memoryview]:
        """Everybody's payload, in rank order, valid until the exchange after the next one.

        One barrier is enough because the halves take turns: whoever passed the barrier of one exchange is done reading
        the other half, which the next exchange overwrites.
        """
        start = self._half * self._half_bytes
        self._half = 1 - self._half
        end = start + len(payload)
        memoryview(self.segment.buffer)[start:end] = payload
        self._star.exchange(operation)
        buffers = [self.segment.buffer if peer is None else peer.buffer for peer in self._imports]
        return [memoryview(buffer)[start:end] for buffer in buffers]

    def suspend(self) -> None:
        # Everybody is out of the last collective; nobody looks at anybody's segment after the second barrier.
        self._star.exchange("suspend: begin")
        self._release_imports()
        self._star.exchange("suspend: peers released")
        self.segment.unmap()
        self._star.exchange("suspend: done")

    def resume(self) -> None:
        self._star.exchange("resume: begin")
        self.segment.map()
        self._half = 0
        self._exchange_handles()
        self._star.exchange("resume: done")

    def close(self) -> None:
        self._release_imports()
        self._process.free(self.segment)

    def _exchange_handles(self) -> None:
        own = self.segment.export()
        handles = [bytes(handle).decode() for handle in self._star.exchange("staging handles", own.encode())]
        self._imports = [None if handle == own else self._process.import_segment(handle) for handle in handles]

    def _release_imports(self) -> None:
        for peer in self._imports:
            if peer is not None:
                peer.release()
        self._imports = []


# ------------------------------------------------------------------------------------------------
# The communicator
# ------------------------------------------------------------------------------------------------


class SoftCommunicator:
    """Meets :class:`~checkpoint_executor.workers.protocols.Communicator` on software devices.

    Args:
        process: this rank's device. rank, world_size: this rank's place.
        rendezvous: an existing folder, the same for all ranks and for no other communicator.
        mode: ``"suspend"`` or ``"socket"``. With one rank there is neither.
        staging_bytes: device memory for payloads, in the ``suspend`` mode; larger payloads go in pieces.
        timeout_s: how long to wait for the other ranks at the start, seconds.

    Raises:
        ValueError: not a mode, or ranks that do not fit. TimeoutError: a rank did not come.
        MemoryError: no room for the staging memory.

    A collective raises ConnectionError when a rank dies in it; the communicator is of no use after that.
    """

    def __init__(
        self,
        process: SoftProcess,
        rank: int,
        world_size: int,
        rendezvous: Path,
        mode: str,
        *,
        staging_bytes: int = _STAGING_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown communication {mode!r}; the software device has {', '.join(MODES)}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist among {world_size} ranks")
        if staging_bytes < 16 or staging_bytes % 16:
            raise ValueError(f"staging_bytes must be a positive multiple of 16, got {staging_bytes}")
        self._process = process
        self._rank = rank
        self._world_size = world_size
        self._suspended = False
        self._star: _Star | None = None
        self._staging: _Staging | None = None
        if world_size > 1:
            self._star = _Star(rank, world_size, rendezvous, timeout_s)
            try:
                if mode == "suspend":
                    self._staging = _Staging(process, self._star, staging_bytes)
            except BaseException:
                self._star.close()
                raise

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def is_suspended(self) -> bool:
        return self._suspended

    @property
    def needs_suspend(self) -> bool:
        """Whether a driver checkpoint needs it suspended (False for one rank and for sockets only)."""
        return self._staging is not None

    @property
    def staging_address(self) -> int | None:
        """Where the staging memory is, suspended or not; None without any."""
        return self._staging.segment.address if self._staging else None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over all ranks, in rank order; half-precision types are summed in float32. Returns ``tensor``.

        Raises:
            RuntimeError: suspended, or the ranks are not in the same collective. ConnectionError: a rank is gone.
        """
        from checkpoint_executor.workers.soft_graphs import run_collective

        self._require_active()
        run_collective(lambda: self._reduce_into(tensor), [tensor], self._require_active)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of shape ``(world_size, *tensor.shape)``, in rank order. Raises as :meth:`all_reduce`."""
        import torch

        from checkpoint_executor.workers.soft_graphs import run_collective

        self._require_active()
        gathered = torch.empty((self._world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        run_collective(lambda: self._gather_into(gathered, tensor), [gathered, tensor], self._require_active)
        return gathered

    def suspend(self) -> None:
        """Give up the staging memory, keep its address. A barrier among the ranks, without a timeout.

        Raises:
            RuntimeError: suspended already. ConnectionError: a rank is gone.
        """
        if self._suspended:
            raise RuntimeError("the communicator is suspended already")
        if self._staging is not None:
            self._staging.suspend()
        else:
            self.barrier("suspend")
        self._suspended = True

    def resume(self) -> None:
        """Take the memory back at the same address. A barrier among the ranks, without a timeout.

        Raises:
            RuntimeError: not suspended. MemoryError: no room. ConnectionError: a rank is gone.
        """
        if not self._suspended:
            raise RuntimeError("the communicator is not suspended")
        if self._staging is not None:
            self._staging.resume()
        else:
            self.barrier("resume")
        self._suspended = False

    def check(self) -> None:
        """Sum ``rank + 1`` over the ranks by the way that tensors go. Raises RuntimeError if the sum is wrong."""
        self._require_active()
        number = struct.Struct("<q")
        with self._process.call():
            parts = self._exchange("check", number.pack(self._rank + 1))
            total = sum(number.unpack(part)[0] for part in parts)
        expected = self._world_size * (self._world_size + 1) // 2
        if total != expected:
            raise RuntimeError(f"the communicator is broken: the ranks sum to {total}, not to {expected}")

    def memory_bytes(self) -> dict[str, int]:
        """``suspendable`` and ``persistent`` device bytes, the same whether or not suspended."""
        return {"suspendable": self._staging.segment.size_bytes if self._staging else 0, "persistent": 0}

    def exchange(self, operation: str, payload: bytes = b"") -> list[bytes]:
        """Everybody's payload in rank order, through host memory only: works while suspended.

        Raises:
            RuntimeError: the ranks are not in the same operation. ConnectionError: a rank is gone.
        """
        if self._star is None:
            return [payload]
        return [bytes(part) for part in self._star.exchange(operation, payload)]

    def barrier(self, operation: str = "barrier") -> None:
        """Return when all ranks are in it. Raises as :meth:`exchange`."""
        self.exchange(operation)

    def close(self) -> None:
        """Give everything up. Idempotent. Not a collective: the caller sees to it that no rank is in one."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        if self._star is not None:
            self._star.close()

    # Details

    def _require_active(self) -> None:
        if self._suspended:
            raise RuntimeError("the communicator is suspended; a collective must wait for wake_up()")
        self._process.require_local_memory()

    def _exchange(self, operation: str, payload: bytes | memoryview) -> list[Any]:
        """Everybody's payload (at most ``_chunk_bytes``), as writable buffers, by the way that this mode has."""
        if self._staging is not None:
            return list(self._staging.exchange(operation, payload))
        if self._star is not None:
            return list(self._star.exchange(operation, payload))
        return [bytearray(payload)]

    def _chunks(self, operation: str, tensor: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """(which elements, those elements of every rank) for a flat contiguous tensor, piece by piece."""
        import torch

        from checkpoint_executor.workers.soft_tensors import tensor_view

        size = tensor.element_size()
        # Sockets take pieces as well: rank 0 holds a piece of every rank at a time.
        step = (self._staging.chunk_bytes if self._staging else _STAGING_BYTES) // size
        data = tensor_view(tensor)
        for start in range(0, tensor.numel(), step):
            end = min(start + step, tensor.numel())
            name = f"{operation} of {tensor.numel()} {tensor.dtype}, from {start}"
            parts = self._exchange(name, data[start * size : end * size])
            yield slice(start, end), [torch.frombuffer(part, dtype=tensor.dtype) for part in parts]

    def _reduce_into(self, tensor: torch.Tensor) -> None:
        import torch

        with self._process.call(), torch.no_grad():
            self._require_active()
            flat = tensor.contiguous().view(-1)
            half = tensor.dtype in (torch.bfloat16, torch.float16)
            for where, parts in self._chunks("all_reduce", flat):
                total = parts[0].to(torch.float32 if half else tensor.dtype, copy=True)
                for part in parts[1:]:
                    total += part
                flat[where] = total
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))

    def _gather_into(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        import torch

        with self._process.call(), torch.no_grad():
            self._require_active()
            rows = gathered.view(self._world_size, -1)
            for where, parts in self._chunks("all_gather", tensor.contiguous().view(-1)):
                for row, part in zip(rows, parts, strict=True):
                    row[where] = part
