"""I/O. The parent's end of the wire: a ROUTER socket and a poller. The parent's only import of zmq.

Owned by the control thread. Knows identities and frames; what a message means is not decided here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from checkpoint_executor import wire
from checkpoint_executor.errors import WireError
from checkpoint_executor.messages import ToChild, ToParent

__all__ = ["Transport"]


class Transport:
    """A bound ROUTER socket in a private directory, polled together with plain descriptors.

    Args:
        runtime_dir: the executor's private directory. max_frame_bytes: largest frame accepted.
    """

    def __init__(self, runtime_dir: Path, max_frame_bytes: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        # No high-water mark: a stage's commands must never be dropped or block, and calls are serialised anyway.
        self._socket.rcvhwm = self._socket.sndhwm = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        # A command to a child that never connected is an error here, not a silent loss.
        self._socket.router_mandatory = True
        self._socket.bind(f"ipc://{runtime_dir}/control")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Let :meth:`poll` report this descriptor when it is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def poll(self, timeout_s: float | None) -> set[int]:
        """Wait for a message or a watched descriptor; returns the descriptors that are readable."""
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000) + 1)
        return {source for source, _ in self._poller.poll(timeout_ms) if isinstance(source, int)}

    def send(self, identity: bytes, message: ToChild, payload: Sequence[wire.Frame] = ()) -> None:
        """Send to one child.

        Raises:
            ConnectionError: the child is not connected.
        """
        try:
            self._socket.send_multipart([identity, *wire.encode(message, payload)], copy=False)
        except zmq.ZMQError as error:
            raise ConnectionError(f"cannot send to {identity.decode(errors='replace')}: {error}") from error

    def receive(self) -> tuple[bytes, ToParent, Sequence[wire.Frame]] | None:
        """The next well-formed message with its sender, or None. A malformed one is dropped and said on stderr."""
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            sender = identity.bytes
            try:
                message, rest = wire.decode_to_parent([frame.buffer for frame in frames])
            except WireError as error:
                name = sender.decode(errors="replace")
                print(f"checkpoint-executor: message from {name} refused: {error}", file=sys.stderr)  # noqa: T201
                continue
            return sender, message, rest

    def close(self) -> None:
        """Close without waiting: whoever was addressed is dead or leaving."""
        self._socket.close(linger=0)
        self._context.term()


def new_wake_descriptor() -> int:
    """An eventfd with which another thread ends a :meth:`Transport.poll`."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
