"""I/O. What the helper and the workers have in common: their specification, channel, and end.

The helper and the workers never import each other; what both need stands here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import POLLIN, poll

import msgspec
import zmq

from checkpoint_executor import procfs, wire
from checkpoint_executor.child_spec import ChildSpec
from checkpoint_executor.driver_states import DriverCode, DriverError, Verb
from checkpoint_executor.errors import WireError
from checkpoint_executor.faults import Fault, Injection, armed_name
from checkpoint_executor.messages import ErrorInfo, Hello, Role, StageReply, ToChild, ToParent

__all__ = ["Channel", "FaultPlan", "die_with_parent", "error_info", "parse_spec"]

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)


def parse_spec(argv: Sequence[str]) -> ChildSpec:
    """Read the specification from the command line; a usage error ends the process."""
    if len(argv) != 2:
        sys.exit(f"{argv[0]} is started by the executor, not by hand")
    return msgspec.json.decode(argv[1], type=ChildSpec)


def die_with_parent(spec: ChildSpec, on_death: Callable[[], None] | None = None) -> int:
    """Make sure this process does not outlive its parent. Returns the parent's pidfd.

    ``on_death`` runs in a thread when the parent is gone; without it the process exits at once, without clean-up:
    a clean-up would call CUDA, which never returns in a checkpointed process. Pass nothing and poll the pidfd
    yourself where a loop exists anyway.
    """
    # Fires when the thread that spawned us ends, however it ends, and needs no cooperation from this process. A helper
    # that is stopped has to go on and clean up; left stopped, the kernel would end it as an orphan (SIGHUP, _exit(2)).
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if spec.role is Role.WORKER else signal.SIGCONT, 0, 0, 0)
    try:
        descriptor = procfs.open_pidfd(spec.parent_pid, spec.parent_start_time)
    except ProcessLookupError:
        # The parent died while we were starting: nobody is left to tell, and perhaps nobody else to clean up.
        shutil.rmtree(spec.runtime_dir, ignore_errors=True)
        os._exit(1)
    if on_death is not None:

        def watch() -> None:
            poller = poll()
            poller.register(descriptor, POLLIN)
            poller.poll()
            on_death()

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    return descriptor


def allow_tracing_by(pid: int) -> None:
    """Let the helper, a sibling of ours, act on this process under Yama's ``ptrace_scope=1``."""
    if pid:
        # EINVAL where the kernel has no Yama: then nothing needs allowing.
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


class Channel:
    """A child's DEALER socket. Owned by one thread.

    Args:
        spec: who we are. wake_fd: a descriptor that also ends a wait.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvhwm = self._socket.sndhwm = 0
        self._socket.setsockopt(zmq.ROUTING_ID, spec.identity)
        self._socket.connect(spec.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def hello(self, spec: ChildSpec, error: ErrorInfo | None = None) -> None:
        """Tell the parent that we are here, and with ``error``, that we are of no use."""
        self.send(Hello(spec.role, spec.rank, os.getpid(), procfs.start_time(os.getpid()), error))

    def watch(self, descriptor: int) -> None:
        """Let a descriptor that becomes readable end :meth:`wait` too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self) -> set[int]:
        """Wait until there is a message or a watched descriptor is readable; returns those descriptors."""
        return {fd for fd, _ in self._poller.poll() if isinstance(fd, int)}

    def receive(self) -> tuple[ToChild, Sequence[wire.Frame]] | None:
        """The next message, or None if there is none. A malformed one is dropped, and said on stderr."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            try:
                return wire.decode_to_child([frame.buffer for frame in frames])
            except WireError as error:
                print(f"checkpoint-executor: message from the parent refused: {error}", file=sys.stderr)  # noqa: T201

    def send(self, message: ToParent, payload: Sequence[wire.Frame] = ()) -> None:
        self.send_frames(wire.encode(message, payload))

    def send_frames(self, frames: Sequence[wire.Frame]) -> None:
        self._socket.send_multipart(frames, copy=False)

    def close(self) -> None:
        # What was sent last must still leave: the parent is there, or it is not and linger ends it.
        self._socket.close(linger=1000)
        self._context.term()


def error_info(error: BaseException) -> ErrorInfo:
    """An exception as data, cut to what a header may hold."""
    limit = wire.MAX_TEXT_CHARACTERS
    text = _encodable("".join(traceback.format_exception(error)))
    driver = isinstance(error, DriverError)
    return ErrorInfo(
        kind="driver" if driver else "exception",
        message=_message(error)[:limit],
        error_type=f"{type(error).__module__}.{type(error).__qualname__}",
        traceback_text=text if len(text) <= limit else f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}",
        code=error.code if isinstance(error, DriverError) else None,
        code_name=error.name if isinstance(error, DriverError) else None,
    )


def _message(error: BaseException) -> str:
    try:
        return _encodable(str(error)) or type(error).__name__
    except Exception:  # noqa: BLE001 - a user's exception may not even print
        return f"{type(error).__name__}, whose text cannot be made"


def _encodable(text: str) -> str:
    """Without lone surrogates (from file names, say), which UTF-8 does not have."""
    return text.encode(errors="backslashreplace").decode()


class FaultPlan:
    """The injections that concern this process; counts how often each was met. Empty on real devices."""

    def __init__(self, spec: ChildSpec) -> None:
        soft = spec.device_kind == "soft"
        self._role = spec.role
        #: With each injection, how many times it still passes unharmed and how many times it is still committed.
        self._left = [(i, [i.skip, i.times]) for i in spec.faults if soft and i.role is spec.role]
        #: Where faults are armed while we run; None: nowhere.
        self._folder = Path(spec.runtime_dir) if soft and spec.runtime_dir else None
        self._lock = threading.Lock()

    def _take_armed(self, stage: str, rank: int) -> None:
        if self._folder is None:
            return
        path = self._folder / armed_name(self._role, rank, stage)
        try:
            injection = msgspec.json.decode(path.read_bytes(), type=Injection)
            path.unlink()
        except FileNotFoundError:
            return
        self._left.append((injection, [injection.skip, injection.times]))

    def take(self, stage: str, rank: int) -> Injection | None:
        """The fault to commit now, if any."""
        with self._lock:
            self._take_armed(stage, rank)
            for injection, left in self._left:
                if (injection.stage, injection.rank) != (stage, rank) or left[1] == 0:
                    continue
                if left[0]:
                    left[0] -= 1
                    return None
                left[1] -= 1
                return injection
        return None

    @contextmanager
    def around(self, stage: str, rank: int) -> Iterator[Injection | None]:
        """Commit what happens before or instead of the stage's work; yields the fault for the rest."""
        fault = self.take(stage, rank)
        if fault is not None:
            match fault.fault:
                case Fault.DIE:
                    os.kill(os.getpid(), fault.signal)
                    threading.Event().wait()  # a signal that is blocked or ignored leaves a hang
                case Fault.STOP:
                    os.kill(os.getpid(), signal.SIGSTOP)
                case Fault.HANG:
                    threading.Event().wait()
                case Fault.SLOW:
                    threading.Event().wait(fault.delay_s)
                case Fault.EXCEPTION:
                    raise RuntimeError(f"injected into {stage}")
                case Fault.OUT_OF_MEMORY if self._role is Role.WORKER:
                    raise MemoryError(f"injected into {stage}")
                # A verb's errors are made where it is called, so that its states are read before and after.
                case Fault.OUT_OF_MEMORY if stage not in set(Verb):
                    raise DriverError(stage, DriverCode.OUT_OF_MEMORY, detail="injected")
                case Fault.DRIVER_ERROR if stage not in set(Verb):
                    raise DriverError(stage, fault.code, detail="injected")
                case Fault.FULL_DIRECTORY if self._folder is not None:
                    _fill(self._folder)
        yield fault

    @staticmethod
    def send(channel: Channel, reply: StageReply, fault: Injection | None) -> None:
        """Send a reply, with the fault's distortion of it."""
        match fault.fault if fault else None:
            case Fault.GARBAGE:
                channel.send_frames([b"\xff\x00noise"])
            case Fault.PARTIAL:
                whole = wire.encode(reply)[0]
                channel.send_frames([whole[: len(whole) // 2]])
                return
            case Fault.STALE_REPLY:
                channel.send(msgspec.structs.replace(reply, cycle=reply.cycle - 1))
            case Fault.DUPLICATE_REPLY:
                channel.send(reply)
        channel.send(reply)


#: The largest file system that :func:`_fill` fills: one that was made for it.
_SMALL_BYTES = 4 << 20


def _fill(folder: Path) -> None:
    """Leave no byte free where ``folder`` is."""
    status = os.statvfs(folder)
    if status.f_blocks * status.f_frsize > _SMALL_BYTES:
        raise RuntimeError(f"{folder} is not on a small file system of its own: not filled")
    with (folder / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start
