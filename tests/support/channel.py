"""JSON lines over a socket between a test and a child process it started. Used on both sides; imports nothing heavy."""

from __future__ import annotations

import json
import socket
from typing import Any

__all__ = ["Channel"]


class Channel:
    """One end. Not thread-safe: a child answers from its main thread only."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. Raises EOFError (the other end is gone) or TimeoutError."""
        self._connection.settimeout(timeout_s)
        try:
            line = self._reader.readline()
        except ConnectionResetError:
            line = b""
        if not line:
            raise EOFError("the other end of the channel is gone")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._reader.close()
        self._connection.close()
