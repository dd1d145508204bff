"""The parent's side of a launch: its process and everything below it, its time, and what it tells.

Knows processes and time, and nothing of what an arm does.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from checkpoint_executor.process_tree import ProcessTree
from scripts.benchmarking.arms import Spec

__all__ = ["Launch"]

SCRIPT = Path(__file__).resolve().parents[1] / "bench_cycle.py"

#: How long a launch that has told everything may take to end, seconds.
_END_S = 10.0
_LOG_CHARACTERS = 1200


class Launch:
    """One launch of an arm, started at once, until :meth:`finish`.

    Args:
        spec: what it is to do. record: gets its facts and cycles as it tells them. changed: is called after each.
        environ: its environment. log: gets its output.

    The limit counts the seconds of its start and of its turn, and not those in which it waits for its turn. If this
    process dies, by SIGKILL too, everything below the launch ends with it.
    """

    def __init__(
        self,
        spec: Spec,
        record: dict[str, Any],
        changed: Callable[[], None],
        environ: Mapping[str, str],
        log: Path,
    ) -> None:
        self.spec = spec
        self.record = record
        self._changed = changed
        self._log = log
        self._begun = time.monotonic()
        self._start_took_s: float | None = None
        log.write_bytes(b"")  # there, however early it ends
        record |= {"arm": spec.arm, "together": spec.together, "cycles": [], "completed": False}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = theirs.fileno()
        arguments = [json.dumps(msgspec.to_builtins(spec)), str(descriptor), str(log)]
        try:
            with theirs:
                self._tree = ProcessTree(
                    [sys.executable, str(SCRIPT), "--launch", *arguments], environ=environ, pass_fds=[descriptor]
                )
        except BaseException:
            self._channel.close()
            raise

    def wait_up(self) -> bool:
        """Until it waits for its turn. False if it ended before, or if its time is over."""
        if self._follow("up", self._begun + self.spec.limit_s):
            self._start_took_s = time.monotonic() - self._begun
            return True
        return False

    def finish(self) -> None:
        """Give it its turn, wait for its end, and note how it ended, and whatever of it SIGKILL could not end."""
        turn = time.monotonic()
        try:
            if self._start_took_s is not None:
                self._give_turn()
                if self._follow("completed", turn + self.spec.limit_s - self._start_took_s):
                    self._tree.wait(_END_S)
            how = self._how()
        except BaseException:
            self.record["how"] = "interrupted"
            raise
        finally:
            self.close()
        self.record |= {"how": how, "turn_s": round(time.monotonic() - turn, 1)}
        if not self.record["completed"]:
            self.record["log_ends"] = self._log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        self._changed()

    def close(self) -> None:
        """End everything that it started. Does nothing the second time."""
        ended = self._tree.kill()
        self.record["left_processes"] = list(ended.survivors)
        self._channel.close()

    # -- details ---------------------------------------------------------------------------------

    def _give_turn(self) -> None:
        try:
            self._channel.send(b"go", socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it ended already, which is seen next

    def _follow(self, fact: str, until: float) -> bool:
        """Take in what it tells until a fact is there. False once it has ended without it, or time is over."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._tree, select.POLLIN)
        while not self.record.get(fact):
            left_s = until - time.monotonic()
            if left_s <= 0:
                self.record["cut_off"] = True
                return False
            ready = {descriptor for descriptor, _ in poller.poll(left_s * 1000)}
            # Its processes inherit the channel, so that its end shows on the tree alone. What it told before has come.
            ended = self._tree.fileno() in ready and self._tree.wait(0)
            while self._take():
                pass
            if ended or "error" in self.record:
                return bool(self.record.get(fact))
        return True

    def _take(self) -> bool:
        """One message, if there is one."""
        try:
            data = self._channel.recv(1 << 20, socket.MSG_DONTWAIT)
        except OSError:
            return False  # nothing more for now, or ever
        if not data:
            return False
        message = json.loads(data)
        if "cycle" in message:
            self.record["cycles"].append(message["cycle"])
        self.record |= message.get("facts", {})
        self._changed()
        return True

    def _how(self) -> str:
        if self.record.get("cut_off"):
            return f"cut off after {self.spec.limit_s:g} s"
        if self.record["completed"]:
            return "completed"
        if "error" in self.record:
            return "failed"
        return f"ended with status {self._tree.exit_status}"
