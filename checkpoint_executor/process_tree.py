"""I/O. A command that can be ended with everything below it, orphans included.

This file knows processes and nothing of what they do. It imports neither zmq nor the executor: the warden below must
be small, and must work when an engine does not.

**Why nothing escapes.** Engines leave orphans: an API server that dies leaves its engine core behind, with workers
that hold the GPU. Process groups do not hold them, since each worker may have its own. So:

1. Between us and the command stands a *warden*, a small process that is a child subreaper: whoever below it loses
   its parent, by a crash or by a double fork, becomes the warden's child and nobody else's. "No child left" is then
   the kernel's own word for "no descendant left".
2. The warden holds a pidfd of us. When we die, by SIGKILL too, it kills everything and ends.
3. The command dies with the warden (``PR_SET_PDEATHSIG``). What was orphaned by *that* is found by its session, and
   by a marker in its environment, which children inherit even when they leave the session.

What escapes: a process that the tree asked someone else to start (a container, a systemd unit), and, only when the
warden was killed before, one that left the session and whose environment was cleared or overwritten (``setproctitle``
does that). The command must stay in the foreground: when it ends, all of it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import POLLIN, poll
from typing import Any, NamedTuple

from msgspec import Struct

from checkpoint_executor import processes, procfs
from checkpoint_executor.errors import ConfigError, FatalError

__all__ = ["MARKER", "Ended", "ProcessTree"]

#: In the environment of everything below a warden: the tokens of the trees it is in, joined by colons.
MARKER = "CHECKPOINT_EXECUTOR_SUPERVISED"

_WARDEN_START_S = 60.0
_ROUND_S = 0.005
_MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


# ------------------------------------------------------------------------------------------------
# Who belongs to it
# ------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    parent: int
    session: int
    started: int
    alive: bool


class _Identity(NamedTuple):
    """What a tree is known by: the warden and the command, each by pid and start time, and the marker's token."""

    root: int
    root_started: int
    leader: int
    leader_started: int
    token: str

    def members(self) -> dict[int, int]:
        """Start times, by pid, of what lives of the tree; without the root, and without this process."""
        seen = _scan()
        found = self._below(seen)
        # The session's number stays taken while anybody is in it. A leader of another start time is a stranger.
        if self.leader and (self.leader not in seen or seen[self.leader].started == self.leader_started):
            found.update(pid for pid, process in seen.items() if process.session == self.leader)
        token = self.token.encode()
        found.update(pid for pid in seen if pid not in found and _is_marked(pid, token))
        return {pid: seen[pid].started for pid in found - {self.root, os.getpid()} if seen[pid].alive}

    def _below(self, seen: Mapping[int, _Seen]) -> set[int]:
        if self.root not in seen or seen[self.root].started != self.root_started:
            return set()  # the pid is nobody's, or a stranger's by now
        children: dict[int, list[int]] = {}
        for pid, process in seen.items():
            children.setdefault(process.parent, []).append(pid)
        below: set[int] = set()
        waiting = [self.root]
        while waiting:
            added = children.get(waiting.pop(), [])
            below.update(added)
            waiting.extend(added)
        return below

    def kill(self, until: float) -> tuple[set[int], tuple[int, ...]]:
        """SIGKILL in rounds, because what is killed may have forked meanwhile. Returns pids killed, and survivors."""
        killed: set[int] = set()
        while members := self.members():
            for pid, started in members.items():
                _signal(pid, started, signal.SIGKILL)
            killed.update(members)
            if time.monotonic() >= until:
                return killed, tuple(sorted(members))
            time.sleep(_ROUND_S)
        return killed, ()


def _scan() -> dict[int, _Seen]:
    """Every process that ``/proc`` shows."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # From the state (field 3) on: a command's name may hold spaces and brackets.
            fields = text[text.rindex(b")") + 2 :].split()
            # A process whose first thread has ended looks like a zombie while its other threads run (field 20).
            alive = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
            found[int(name)] = _Seen(int(fields[1]), int(fields[3]), int(fields[19]), alive)
    return found


def _is_marked(pid: int, token: bytes) -> bool:
    try:
        return token in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # gone, or not ours


def _signal(pid: int, started: int, number: int) -> None:
    """Send a signal to exactly this process, if it is there and ours."""
    try:
        descriptor = procfs.open_pidfd(pid, started)
    except OSError:
        return
    try:
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        pass  # gone meanwhile, or another user's: then it shows among the survivors
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------
# Our side
# ------------------------------------------------------------------------------------------------


class Ended(Struct, frozen=True):
    """How a tree ended: its pids, those that SIGKILL did not end in time, and how long it took."""

    pids: tuple[int, ...]
    survivors: tuple[int, ...]
    elapsed_s: float


class ProcessTree:
    """A command in a session of its own, with a warden above it, that can be ended with everything below it.

    Args:
        command: what to run; its stdin is empty. environ, cwd: its environment and folder, by default ours.
        pass_fds: descriptors it inherits under the same numbers. stdout: a descriptor; None: ours.

    Raises:
        ConfigError: the command cannot be run. FatalError: the warden did not start.

    For one thread at a time, but for :meth:`pids`. End it with :meth:`kill`; dropping the object or our own death ends
    the processes too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | None = None,
    ) -> None:
        self.command = tuple(map(str, command))
        token = uuid.uuid4().hex
        given = dict(os.environ if environ is None else environ)
        given[MARKER] = ":".join(filter(None, [given.get(MARKER), token]))
        spec = {
            "command": self.command,
            "environ": given,
            "cwd": None if cwd is None else str(cwd),
            "pass_fds": list(pass_fds),
            "token": token,
            "supervisor": [os.getpid(), procfs.start_time(os.getpid())],
        }
        self._ended: Ended | None = None
        self._known: set[int] = set()
        self._exited = False
        self._exit_status: int | None = None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Through a file, since an environment may be larger than a socket's buffer or a command line.
        with theirs, os.fdopen(os.memfd_create("supervise-spec"), "w+b") as file:
            file.write(json.dumps(spec).encode())
            file.seek(0)
            # Not reaped before kill(): until then its pid is its own.
            self._warden = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=file,
                stdout=stdout,
                env=processes.child_environment({**os.environ, MARKER: given[MARKER]}, {}),
                pass_fds=[theirs.fileno(), *pass_fds],
                start_new_session=True,
            )
        self._identity = _Identity(self._warden.pid, procfs.start_time(self._warden.pid), 0, 0, token)
        self._meet()

    def _meet(self) -> None:
        hello = self._receive(_WARDEN_START_S)
        if hello is not None and "pid" in hello:
            self._identity = self._identity._replace(leader=hello["pid"], leader_started=hello["started"])
            self._known.add(self.pid)
            return
        self.kill()
        if hello is not None and "error" in hello:
            raise ConfigError(f"cannot run {self.command[0]!r}: {hello['error']}. Nothing was started")
        raise FatalError(f"the warden of {self.command[0]!r} did not start. Nothing of it is left running")

    def fileno(self) -> int:
        """Readable when the command has ended."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        """Of the command."""
        return self._identity.leader

    @property
    def warden_pid(self) -> int:
        return self._warden.pid

    @property
    def exit_status(self) -> int | None:
        """Of the command, negative for a signal; None if it runs, or if nobody knows."""
        return self._exit_status

    def wait(self, timeout_s: float) -> bool:
        """Wait until the command has ended (or its warden, which comes to the same). True if so."""
        until = time.monotonic() + timeout_s
        while not self._exited:
            message = self._receive(until - time.monotonic())
            if message is None:
                return False
            self._exit_status = message.get("exited")
            self._known.update(message.get("pids", ()))
            self._exited = True
        return True

    def pids(self) -> tuple[int, ...]:
        """What lives of it now, without the warden."""
        return tuple(sorted(self._identity.members()))

    def signal(self, number: int) -> None:
        """Send the command itself a signal."""
        self._tell({"signal": int(number)})

    def stop(self, grace_s: float) -> Ended:
        """SIGTERM to the command, some time for it to end by itself, then :meth:`kill`."""
        self.signal(signal.SIGTERM)
        self.wait(grace_s)
        return self.kill()

    def kill(self, timeout_s: float = 10.0) -> Ended:
        """SIGKILL everything and wait until it is gone. The second time it only says again how it went."""
        if self._ended is not None:
            return self._ended
        begun = time.monotonic()
        until = begun + timeout_s
        # From here rather than in the warden, which may be stopped or dead.
        killed, survivors = self._identity.kill(until)
        # A responsive warden ends once the kernel has no child for it: nothing can have slipped through a scan.
        self._tell({"finish": True})
        try:
            self._warden.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()
        if not survivors:
            again, survivors = self._identity.kill(max(until, time.monotonic() + 1))
            killed |= again
        self.wait(0)
        self._channel.close()
        self._ended = Ended(tuple(sorted(self._known | killed)), survivors, time.monotonic() - begun)
        return self._ended

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it is gone or stuck: kill() does not depend on it

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The warden's next message, ``{}`` once it is gone, None if there is none in time."""
        if self._channel.fileno() < 0:
            return {}
        poller = poll()
        poller.register(self._channel, POLLIN)
        if not poller.poll(max(0.0, timeout_s) * 1000):
            return None
        try:
            data = self._channel.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return {}
        message: dict[str, Any] = json.loads(data) if data else {}
        return message


# ------------------------------------------------------------------------------------------------
# The warden
# ------------------------------------------------------------------------------------------------


class _Warden:
    """The process between us and a command: adopts orphans, reaps them, and ends everything when it is time.

    It has one thread, on which the command's ``PR_SET_PDEATHSIG`` depends.
    """

    def __init__(self, channel: socket.socket, spec: dict[str, Any]) -> None:
        self._channel = channel
        self._spec = spec
        self._identity = _Identity(os.getpid(), procfs.start_time(os.getpid()), 0, 0, spec["token"])
        self._status: int | None = None

    def run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            supervisor = procfs.open_pidfd(*self._spec["supervisor"])
        except ProcessLookupError:
            return
        try:
            command = self._start(libc)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._say({"error": str(error)})
            return
        self._say({"pid": self._identity.leader, "started": self._identity.leader_started})
        poller = poll()
        for descriptor in (supervisor, self._channel.fileno(), command):
            poller.register(descriptor, POLLIN)
        while True:
            # Orphans that end are reaped within the second; nobody waits for them.
            ready = {descriptor for descriptor, _ in poller.poll(1000)}
            self._reap()
            if self._status is not None:
                self._say({"exited": self._status, "pids": sorted(self._identity.members())[:1000]})
                break
            if supervisor in ready or (self._channel.fileno() in ready and not self._obey()):
                break
        self._end()

    def _start(self, libc: ctypes.CDLL) -> int:
        """Start the command; its pidfd."""
        warden = os.getpid()

        def die_with_warden() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != warden:
                os._exit(1)

        pass_fds = self._spec["pass_fds"]
        popen = subprocess.Popen(
            self._spec["command"],
            env=self._spec["environ"],
            cwd=self._spec["cwd"],
            stdin=subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=die_with_warden,
        )
        popen.returncode = 0  # it is reaped by _reap, with all the others
        for descriptor in pass_fds:
            os.close(descriptor)
        self._identity = self._identity._replace(leader=popen.pid, leader_started=procfs.start_time(popen.pid))
        return os.pidfd_open(popen.pid)

    def _obey(self) -> bool:
        """Do what we are told. False if it is to end, or if nobody is left to tell us."""
        try:
            message = json.loads(self._channel.recv(_MESSAGE_BYTES) or b"{}")
        except OSError:
            return False
        if "signal" in message:
            _signal(self._identity.leader, self._identity.leader_started, message["signal"])
            return True
        return False

    def _reap(self) -> bool:
        """Reap whoever has ended. False if there is no child left, so no descendant either."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._identity.leader:
                self._status = os.waitstatus_to_exitcode(status)

    def _end(self) -> None:
        # No bound: what SIGKILL cannot end now may end later, and a supervisor that lives kills us in time.
        while self._reap():
            for pid, started in self._identity.members().items():
                _signal(pid, started, signal.SIGKILL)
            time.sleep(_ROUND_S)
        self._identity.kill(time.monotonic() + 1)

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(json.dumps(message).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the supervisor is gone, and its pidfd says so


if __name__ == "__main__":
    _Warden(socket.socket(fileno=int(sys.argv[1])), json.load(sys.stdin.buffer)).run()
