"""How the ranks of one host meet: a unix socket between rank 0 and each of the others.

Knows how they find each other and that they belong together. Does not know what goes over the sockets afterwards.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

__all__ = ["meet"]

_HELLO = struct.Struct("!II")  # rank, world size
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def meet(rank: int, world_size: int, folder: Path, name: str, kind: int, timeout_s: float) -> dict[int, socket.socket]:
    """Connect the ranks in a star around rank 0; returns when this rank is connected.

    Args:
        rank, world_size: this rank's place. folder: an existing one, the same for all ranks and for no others.
        name: of the socket in it. kind: ``socket.SOCK_STREAM`` or ``SOCK_SEQPACKET``.
        timeout_s: how long to wait for the others, seconds.

    Returns:
        Blocking sockets: on rank 0 the peers by rank, elsewhere rank 0. The caller closes them.

    Raises:
        TimeoutError: a rank did not come. ValueError: a rank of another group came, or one came twice.
        ConnectionError: a rank came and died.
    """
    deadline = time.monotonic() + timeout_s
    # A unix socket's path is limited to 108 bytes; this way only its last part counts.
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = f"/proc/self/fd/{directory}/{name}"
        if rank == 0:
            return _listen(world_size, path, kind, deadline)
        return {0: _connect(rank, world_size, path, kind, deadline)}
    finally:
        os.close(directory)


def _listen(world_size: int, path: str, kind: int, deadline: float) -> dict[int, socket.socket]:
    try:
        os.unlink(path)  # left by a run that was killed here
    except FileNotFoundError:
        pass
    peers: dict[int, socket.socket] = {}
    try:
        with socket.socket(socket.AF_UNIX, kind) as listener:
            listener.bind(path)
            listener.listen(world_size)
            try:
                while len(peers) < world_size - 1:
                    rank, connection = _accept(listener, world_size, peers, deadline)
                    peers[rank] = connection
            finally:
                os.unlink(path)
    except BaseException:
        for connection in peers.values():
            connection.close()
        raise
    return peers


def _accept(
    listener: socket.socket, world_size: int, peers: dict[int, socket.socket], deadline: float
) -> tuple[int, socket.socket]:
    """The next rank that comes, and the socket to it."""
    missing = sorted(set(range(1, world_size)) - set(peers))
    late = TimeoutError(f"ranks {missing} did not come to the rendezvous in time")
    try:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        connection, _ = listener.accept()
    except TimeoutError:
        raise late from None
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        if not hello:
            # Which rank it was is not known; the next one that is missing is as good a name as any.
            raise ConnectionError(f"rendezvous: rank {missing[0]} is gone")
        rank, world = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, -1)
        if world != world_size or not 0 < rank < world_size or rank in peers:
            raise ValueError(f"rank {rank} of {world} came to a rendezvous of {world_size} ranks")
        connection.settimeout(None)
        return rank, connection
    except TimeoutError:
        connection.close()
        raise late from None
    except BaseException:
        connection.close()
        raise


def _connect(rank: int, world_size: int, path: str, kind: int, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, kind)
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            connection.connect(path)
            connection.sendall(_HELLO.pack(rank, world_size))
            return connection
        except (FileNotFoundError, ConnectionRefusedError) as error:
            # Rank 0 is not there yet, or is between bind and listen.
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                connection.close()
                raise TimeoutError(f"rank {rank}: rank 0 did not open the rendezvous in time") from error
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except BaseException:
            connection.close()
            raise
