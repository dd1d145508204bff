"""The child's side that all targets share: hello, the command loop, and nothing left behind on a crash."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from checkpoint_executor import procfs
from tests.support.channel import Channel

__all__ = ["CallsFromThread", "arguments", "channel", "serve"]


def arguments() -> dict[str, Any]:
    """What the parent passed."""
    parsed: dict[str, Any] = json.loads(sys.argv[2])
    return parsed


def channel() -> Channel:
    """The channel to the parent. Also switches core dumps off: some commands kill the process on purpose."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return Channel(socket.socket(fileno=int(sys.argv[1])))


def serve(parent: Channel, commands: dict[str, Callable[..., Any]], **hello: Any) -> None:
    """Say hello and obey until ``exit`` or until the parent is gone."""
    parent.send({"start_time": procfs.start_time(os.getpid()), **hello})
    while True:
        try:
            message = parent.receive()
        except EOFError:
            return
        command = message.pop("command")
        if command == "exit":
            return
        parent.send({"reply": commands[command](**message)})


if __name__ == "__main__":  # run as a module: a bystander
    serve(channel(), {})


class CallsFromThread:
    """The part of a target that makes a device call from a thread of its own: one that waits while it is locked."""

    _caller: threading.Thread | None = None
    _call_checksum: str | None = None

    def checksum(self) -> str:
        """A device call, and what it found."""
        raise TypeError(f"{type(self).__name__} has no checksum")

    def call_from_thread(self) -> None:
        started = threading.Event()

        def call() -> None:
            started.set()
            self._call_checksum = self.checksum()

        self._call_checksum = None
        self._caller = threading.Thread(target=call, daemon=True)
        self._caller.start()
        started.wait()

    def call_done(self) -> bool:
        return self._call_checksum is not None

    def call_result(self) -> str | None:
        if self._caller is not None:
            self._caller.join()
        return self._call_checksum
