"""How the ranks of one host agree without CUDA: bytes and file descriptors over unix sockets, in lock step.

Knows sockets. Does not know what is agreed: NCCL's unique id goes through here, and so do the handles of workspaces, at
times when no collective may run because the communicator is suspended.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from checkpoint_executor.workers.rendezvous import meet

__all__ = ["HostGroup", "Part"]

_SOCKET_NAME = "cuda.sock"
#: A datagram of the unix domain is limited by the socket's buffer, 208 KiB by default.
_MAX_BYTES = 64 << 10
_MAX_DESCRIPTORS = 64


class Part(NamedTuple):
    """What one rank contributed. The caller owns the descriptors and closes them; those of its own part are left
    out."""

    data: bytes
    descriptors: list[int]


class HostGroup:
    """Lock-step exchange among the ranks, a star around rank 0. The constructor is collective.

    Args:
        rank, world_size: this rank's place. rendezvous: an existing folder, the same for all ranks and for no others.
        timeout_s: how long to wait for the other ranks, at the start and in every exchange, seconds.

    Raises:
        TimeoutError: a rank did not come. ValueError: a rank of another group came, or one came twice.
        ConnectionError: a rank came and died.

    After an error the sockets are closed, which is how the other ranks learn of it.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: Path, *, timeout_s: float = 120.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        #: On rank 0 the peers by rank, elsewhere rank 0.
        self._peers: dict[int, socket.socket] = {}
        if world_size > 1:
            self._peers = meet(rank, world_size, rendezvous, _SOCKET_NAME, socket.SOCK_SEQPACKET, timeout_s)
            for connection in self._peers.values():
                connection.settimeout(timeout_s)

    def exchange(self, operation: str, data: bytes = b"", descriptors: Sequence[int] = ()) -> list[Part]:
        """Everybody's part, in rank order. Returns when all ranks are in it; descriptors arrive duplicated.

        Raises:
            ConnectionError: a rank is gone. TimeoutError: a rank did not come. RuntimeError: it is in another
            operation.
        """
        own = Part(data, [])
        if self.world_size == 1:
            return [own]
        message = operation.encode() + b"\0" + data
        if len(message) > _MAX_BYTES or len(descriptors) > _MAX_DESCRIPTORS:
            raise ValueError(f"{operation}: {len(message)} bytes and {len(descriptors)} descriptors are too many")
        try:
            if self.rank == 0:
                collected = self._collect(operation)
                parts = [own] + [collected[peer] for peer in range(1, self.world_size)]
                for peer in range(1, self.world_size):
                    for origin, part in enumerate(parts):
                        if origin != peer:
                            handed = descriptors if origin == 0 else part.descriptors
                            self._send(operation, peer, operation.encode() + b"\0" + part.data, handed)
                return parts
            self._send(operation, 0, message, descriptors)
            return [own if origin == self.rank else self._receive(operation, 0) for origin in range(self.world_size)]
        except BaseException:
            self.close()
            raise

    def barrier(self, operation: str) -> None:
        """Return when all ranks are in it. Raises as :meth:`exchange`."""
        self.exchange(operation)

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()
        self._peers.clear()

    # Details

    def _send(self, operation: str, peer: int, message: bytes, descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self._connection(operation, peer), [message], list(descriptors))
        except TimeoutError:
            raise TimeoutError(f"{operation}: rank {peer} does not take its message") from None
        except OSError as error:
            raise ConnectionError(f"{operation}: rank {peer} is gone") from error

    def _collect(self, operation: str) -> dict[int, Part]:
        """One part of every peer, in whatever order they come: a rank that died is noticed whoever is late."""
        waiting = {self._connection(operation, peer).fileno(): peer for peer in range(1, self.world_size)}
        poller = select.poll()
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN | select.POLLRDHUP)
        parts: dict[int, Part] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(parts) < len(waiting):
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                missing = sorted(set(waiting.values()) - set(parts))
                raise TimeoutError(f"{operation}: ranks {missing} did not come within {self._timeout_s:.0f} s")
            for descriptor, _ in ready:
                peer = waiting[descriptor]
                if peer in parts:
                    raise ConnectionError(f"{operation}: rank {peer} is gone")
                parts[peer] = self._receive(operation, peer)
                # It waits for the answer now; all that can still come of it is its death.
                poller.modify(descriptor, select.POLLRDHUP)
        return parts

    def _receive(self, operation: str, peer: int) -> Part:
        connection = self._connection(operation, peer)
        try:
            message, descriptors, flags, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_DESCRIPTORS)
        except TimeoutError:
            raise TimeoutError(f"{operation}: rank {peer} did not come within {self._timeout_s:.0f} s") from None
        except OSError as error:
            raise ConnectionError(f"{operation}: rank {peer} is gone") from error
        if not message:
            raise ConnectionError(f"{operation}: rank {peer} is gone" if peer else f"{operation}: a rank is gone")
        for descriptor in descriptors:
            # recv_fds takes MSG_CMSG_CLOEXEC and ignores it (CPython 3.11).
            os.set_inheritable(descriptor, False)
        name, _, data = message.partition(b"\0")
        if name != operation.encode() or flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            if flags & socket.MSG_CTRUNC:
                raise ConnectionError(f"{operation}: this process may not open more files (RLIMIT_NOFILE)")
            raise RuntimeError(f"rank {self.rank} is in {operation!r}, but rank {peer} is in {name.decode()!r}")
        return Part(data, list(descriptors))

    def _connection(self, operation: str, peer: int) -> socket.socket:
        try:
            return self._peers[peer]
        except KeyError:
            raise ConnectionError(f"{operation}: the group was closed, or lost a rank earlier") from None
