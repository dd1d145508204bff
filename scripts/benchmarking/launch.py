"""In the process of one launch: tell the parent what happens, and wait for the turn.

Each message is a packet of its own, so that whatever was told before a kill has arrived.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from typing import Any

import msgspec

from scripts.benchmarking.arms import Spec

__all__ = ["Teller", "serve"]

_TRACE_CHARACTERS = 4000


class Teller:
    """The way to the parent. Called with facts of the launch, which are added to those told before."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def __call__(self, **facts: Any) -> None:
        self._send({"facts": facts})

    def cycle(self, **figures: Any) -> None:
        """A cycle that came to its end."""
        self._send({"cycle": figures})

    def wait_turn(self) -> None:
        """Until the parent says that this launch is the one that is measured. Ends the process if there is none."""
        if not self._channel.recv(16):
            os._exit(1)

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.send(json.dumps(message, default=str).encode())


def serve(spec_text: str, descriptor: int, log: str) -> None:
    """Do what the specification says, tell how it went, and end the process, without an orderly end of what is left:
    the parent ends everything below us."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    spec = msgspec.json.decode(spec_text, type=Spec)
    tell = Teller(socket.socket(fileno=descriptor))
    status = 0
    try:
        if spec.front_door == "vllm":
            from scripts.benchmarking import vllm_launch

            vllm_launch.run(spec, tell)
        else:
            from scripts.benchmarking import own_launch

            own_launch.run(spec, tell)
        tell(completed=True)
    except Exception as error:  # noqa: BLE001 - a failed arm is a result, and the parent goes on with the others
        traceback.print_exc()
        trace = traceback.format_exc()[-_TRACE_CHARACTERS:]
        tell(error=f"{type(error).__name__}: {error}"[:1000], trace=trace)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
