"""I/O. The software device: GPU memory, and the driver's checkpoint verbs, on a machine without a GPU.

This file knows how a device's memory is shared by processes (:class:`SoftGpu`), what one process has on it
(:class:`SoftProcess`, :class:`Segment`), and how the driver's four verbs act on a process from outside
(:class:`RemoteProcess`). Which verb is legal where comes from ``driver_states``. It must not know ranks,
tags, stages or torch: those belong to the coordinator and to the workers' soft backend.

How it stands in for a GPU:

- *Memory* of a process is memfds that the process itself owns, one for each allocation, mapped once at an
  address that never changes. Taking the bytes away is ``ftruncate(0)``, so that a stray access is SIGBUS and
  can never be mistaken for zeros. When the process dies the kernel frees them; nothing is left in ``/dev/shm``.
- *Capacity* is a ledger file under ``flock``. Who holds what is keyed by pid and start time, and dead holders
  are dropped by whoever reads next, so SIGKILL gives device memory back as it does on a GPU.
- *The driver* is a thread in the target process, as the real one has, behind an abstract unix socket. So the
  state outlives the caller, a caller killed half-way through a checkpoint does not stop it, and a stopped
  target (SIGSTOP) hangs the caller whatever its timeout: all three as measured on the real driver.

One limit: the ledger's lock is shared by all processes of a device, so a process stopped in the microseconds
in which it holds it stops every reader until SIGCONT.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import select
import selectors
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from checkpoint_executor import procfs
from checkpoint_executor.driver_states import TRANSITIONS, DriverCode, DriverError, ProcessState, Verb

__all__ = [
    "CONTEXT_BYTES",
    "DEFAULT_CAPACITY_BYTES",
    "LOCAL_MEMORY_BYTES",
    "POISON_BYTE",
    "ROOT_VARIABLE",
    "ImportedSegment",
    "RemoteProcess",
    "Segment",
    "SoftGpu",
    "SoftProcess",
    "default_root",
    "device_name",
]

#: Capacity of a software device that nobody gave one, bytes.
DEFAULT_CAPACITY_BYTES = 8 << 30

#: What an open context costs on the device, bytes (a real one costs hundreds of MiB).
CONTEXT_BYTES = 1 << 20

#: Of these, what the context has for kernels' local variables and can do without while nothing runs (264 of 621 MiB on
#: H200).
LOCAL_MEMORY_BYTES = 256 << 10

#: Fresh memory is filled with this. All ones is NaN in every floating type torch has and -1 in the signed
#: integers, so that reading undefined memory shows, where zeros or small numbers would pass for data.
POISON_BYTE = 0xFF

#: Environment variable that names the folder of all software devices.
ROOT_VARIABLE = "CHECKPOINT_EXECUTOR_SOFTGPU_ROOT"

#: Copies go through preadv/pwritev in pieces of this size: each call releases the GIL, and none keeps the
#: kernel from delivering a signal for long.
_CHUNK_BYTES = 16 << 20

_MEMFD_NAME = "checkpoint-executor-softgpu"
_MESSAGE_BYTES = 4096
_POISON = bytes([POISON_BYTE]) * (1 << 20)


# ------------------------------------------------------------------------------------------------
# Folders, names, process identity
# ------------------------------------------------------------------------------------------------


def default_root() -> Path:
    """The folder of this user's software devices, created (0700) if it is missing.

    ``CHECKPOINT_EXECUTOR_SOFTGPU_ROOT`` overrides the place.

    Raises:
        PermissionError: the folder belongs to someone else, or others may write to it.
        ConfigError: so does the user's own directory that it is in by default.
    """
    override = os.environ.get(ROOT_VARIABLE)
    if override:
        root = Path(override)
        root.parent.mkdir(parents=True, exist_ok=True)
        return _own_directory(root)
    # Here, because its own imports cost more than all of this module's.
    from checkpoint_executor import directories

    return _own_directory(directories.user_directory() / "softgpu")


def device_name(index: int) -> str:
    """Name of the software device with this index, e.g. ``"SOFT-0"``."""
    return f"SOFT-{index}"


def _own_directory(path: Path) -> Path:
    """Create ``path`` (0700) or check that it is a real folder, ours, that nobody else can write to."""
    path = Path(path)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass  # checked below, as is one that another process created in between
    # lstat: in a world-writable /tmp, a link planted by another user must not be followed.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(
            errno.EPERM, "the software device's folder is not a folder (links are not followed)", str(path)
        )
    if found.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            f"the software device's folder belongs to user {found.st_uid}, not to {os.geteuid()};"
            f" set {ROOT_VARIABLE} to a folder of your own",
            str(path),
        )
    if found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "other users may write to the software device's folder", str(path))
    return path


def _socket_address(pid: int, start_time: int) -> bytes:
    # Abstract: vanishes with the process, leaves no file.
    return f"\0checkpoint-executor-softgpu/{pid}/{start_time}".encode()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, from the kernel."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


# ------------------------------------------------------------------------------------------------
# The device: a capacity, and who holds how much of it
# ------------------------------------------------------------------------------------------------


class SoftGpu:
    """A software device as seen from outside every process that uses it.

    Args:
        root: folder of all devices (:func:`default_root`), created if missing (its parent must exist).
        name: the device's name, e.g. ``"SOFT-0"``; created if missing.
        capacity_bytes: capacity. None takes what is there, or ``DEFAULT_CAPACITY_BYTES`` for a new device.

    Raises:
        ValueError: not a usable name or capacity, or another capacity than that of a device in use.
        PermissionError: the folder belongs to someone else.
    """

    def __init__(self, root: Path | str, name: str, capacity_bytes: int | None = None) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise ValueError(f"not a software device's name: {name!r}")
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes must be positive, got {capacity_bytes}")
        self._name = name
        self._directory = _own_directory(_own_directory(Path(root)) / name)
        with self._ledger_lock():
            found, held = self._read()
            if capacity_bytes is not None and found not in (None, capacity_bytes) and held:
                raise ValueError(f"{name} is in use with {found} bytes; it cannot become {capacity_bytes} bytes")
            capacity = capacity_bytes or found or DEFAULT_CAPACITY_BYTES
            if capacity != found:
                self._write(capacity, held)

    @staticmethod
    def exists(root: Path | str, name: str) -> bool:
        """Whether the device is there, without creating it."""
        return (Path(root) / name / "ledger.json").is_file()

    @property
    def name(self) -> str:
        return self._name

    @property
    def total_bytes(self) -> int:
        """Capacity, bytes."""
        with self._ledger_lock():
            return self._read()[0] or 0

    def used_bytes(self) -> int:
        """Bytes held by living processes."""
        return sum(size for _, size in self.holders())

    def holders(self) -> tuple[tuple[int, int], ...]:
        """(pid, bytes) of every living process that holds memory here."""
        with self._ledger_lock():
            held = self._read()[1]
        return tuple((int(owner.partition(":")[0]), size) for owner, size in held.items())

    def _charge(self, owner: str, delta_bytes: int) -> None:
        """Take (or with a negative number give back) bytes, all or nothing. Raises MemoryError."""
        with self._ledger_lock():
            capacity, held = self._read()
            total = capacity or 0
            free = total - sum(held.values())
            if delta_bytes > free:
                raise MemoryError(f"{self._name} is full: {delta_bytes} bytes wanted, {free} of {total} bytes free")
            mine = held.pop(owner, 0) + delta_bytes
            if mine > 0:
                held[owner] = mine
            self._write(total, held)

    @contextmanager
    def _ledger_lock(self) -> Iterator[None]:
        # Opened anew each time: two threads sharing one open file would not exclude each other.
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Explicitly: a child forked in between shares the open file, and closing ours would leave it locked.
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _read(self) -> tuple[int | None, dict[str, int]]:
        """(capacity, bytes by "pid:start time") with the dead left out. Needs the ledger lock."""
        try:
            text = (self._directory / "ledger.json").read_bytes()
        except FileNotFoundError:
            return None, {}
        ledger = json.loads(text)
        held: dict[str, int] = ledger["held_bytes"]
        return ledger["capacity_bytes"], {
            owner: size for owner, size in held.items() if procfs.is_alive(*map(int, owner.split(":")))
        }

    def _write(self, capacity: int, held: dict[str, int]) -> None:
        # Renamed into place: a writer killed in the middle must not leave half a ledger. The next one reuses the name.
        new = self._directory / "ledger.json.new"
        new.write_bytes(json.dumps({"capacity_bytes": capacity, "held_bytes": held}).encode())
        new.replace(self._directory / "ledger.json")


# ------------------------------------------------------------------------------------------------
# The gate: what "locked" means
# ------------------------------------------------------------------------------------------------


class _Gate:
    """Lets device calls through while open; closing waits until those inside have left.

    Closing shuts out newcomers *first*, so that a stream of short calls from many threads cannot starve it
    (a plain readers-writer lock is starved: tried). A thread already inside may enter again while the gate
    is closing: it must be able to finish, or it would never drain.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._open = True
        self._dead = False
        self._inside = 0
        self._thread = threading.local()

    def enter(self) -> None:
        depth: int = getattr(self._thread, "depth", 0)
        if depth == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._dead)
                if self._dead:
                    raise RuntimeError("the software device is closed in this process")
                self._inside += 1
        self._thread.depth = depth + 1

    def leave(self) -> None:
        self._thread.depth -= 1
        if self._thread.depth == 0:
            with self._changed:
                self._inside -= 1
                if self._inside == 0:
                    self._changed.notify_all()

    def close(self, timeout_ms: int) -> bool:
        """Shut the gate and wait until nobody is inside; 0 waits for ever. False (and open again) on timeout."""
        timeout_s = timeout_ms / 1000 if timeout_ms else None
        with self._changed:
            self._open = False
            if not self._wait_until_drained(timeout_s) or self._dead:
                self._open = True
                self._changed.notify_all()
                return False
            return True

    def _wait_until_drained(self, timeout_s: float | None) -> bool:
        return self._changed.wait_for(lambda: self._inside == 0 or self._dead, timeout_s)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def kill(self) -> None:
        """For good: everyone who waits, and everyone who comes, gets a RuntimeError."""
        with self._changed:
            self._dead = True
            self._changed.notify_all()


# ------------------------------------------------------------------------------------------------
# Memory of one process
# ------------------------------------------------------------------------------------------------


def _copy_out(fd: int, host: memoryview, offset: int = 0) -> None:
    """Device to host, in pieces, without the GIL."""
    done = 0
    while done < len(host):
        with host[done : done + _CHUNK_BYTES] as piece:
            moved = os.preadv(fd, [piece], offset + done)
        if moved == 0:
            raise RuntimeError("device memory ended early: it was taken away during a copy")
        done += moved


def _copy_in(fd: int, host: memoryview, offset: int = 0) -> None:
    """Host to device, in pieces, without the GIL."""
    done = 0
    while done < len(host):
        with host[done : done + _CHUNK_BYTES] as piece:
            done += os.pwritev(fd, [piece], offset + done)


def _poison(fd: int, size_bytes: int) -> None:
    with memoryview(_POISON) as pattern:
        for start in range(0, size_bytes, len(pattern)):
            with pattern[: size_bytes - start] as piece:
                _copy_in(fd, piece, start)


def _address_of(buffer: mmap.mmap) -> int:
    # The ctypes object is an export of the buffer; it must be gone before anybody may close the mapping.
    probe = ctypes.c_char.from_buffer(buffer)
    address = ctypes.addressof(probe)
    del probe
    return address


def _close_mapping(buffer: mmap.mmap) -> None:
    try:
        buffer.close()
    except BufferError:
        # A tensor still looks at it. Its bytes are gone (truncated), so using it is SIGBUS, as using freed
        # device memory is an error; the address range goes when the last view does.
        pass


class Segment:
    """One allocation: device memory at an address that stays the same for life, resident or not.

    Costs two file descriptors (the memfd, and the duplicate that Python's mmap keeps). Made by
    :meth:`SoftProcess.allocate`.
    """

    def __init__(self, process: SoftProcess, size_bytes: int) -> None:
        self._process = process
        self._size_bytes = size_bytes
        self._fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size_bytes)
            self._buffer = mmap.mmap(self._fd, size_bytes)
            _poison(self._fd, size_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._address = _address_of(self._buffer)
        self._mapped = True
        self._freed = False
        self._backup: mmap.mmap | None = None

    @property
    def address(self) -> int:
        """Virtual address of the first byte."""
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def resident(self) -> bool:
        """Whether the bytes are on the device now; False when unmapped, freed or checkpointed."""
        return self._mapped and self._backup is None

    @property
    def buffer(self) -> mmap.mmap:
        """The memory itself, writable, for ``memoryview`` and ``torch.frombuffer``.

        Access is not gated and, while the segment is not resident, SIGBUS. Hold :meth:`SoftProcess.call`
        around work on it, as a kernel would be seen by the driver.
        """
        return self._buffer

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Copy ``size`` bytes (None: the rest) at ``offset`` to the host.

        Raises:
            ValueError: outside the segment. RuntimeError: not mapped, or freed.
        """
        length = self._size_bytes - offset if size is None else size
        self._check_range(offset, length)
        with self._process.call():
            self._check_mapped()
            host = bytearray(length)
            with memoryview(host) as view:
                _copy_out(self._fd, view, offset)
            return bytes(host)

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy ``data`` to the device at ``offset`` bytes.

        Raises:
            ValueError: outside the segment. RuntimeError: not mapped, or freed.
        """
        with memoryview(data) as anything, anything.cast("B") as view:
            self._check_range(offset, len(view))
            with self._process.call():
                self._check_mapped()
                _copy_in(self._fd, view, offset)

    def unmap(self) -> None:
        """Drop the bytes and give them back to the device; the address stays. Nothing happens if already unmapped."""
        with self._process._exclusive():
            self._check_not_freed()
            if self._mapped:
                self._mapped = False
                os.ftruncate(self._fd, 0)
                self._process._charge(-self._size_bytes)

    def map(self) -> None:
        """Make the segment resident at its address, contents undefined (poisoned). Nothing happens if it is.

        Raises:
            MemoryError: the device is full; the segment stays unmapped.
        """
        with self._process._exclusive():
            self._check_not_freed()
            if not self._mapped:
                self._process._charge(self._size_bytes)
                try:
                    os.ftruncate(self._fd, self._size_bytes)
                    _poison(self._fd, self._size_bytes)
                except BaseException:
                    os.ftruncate(self._fd, 0)
                    self._process._charge(-self._size_bytes)
                    raise
                self._mapped = True

    def export(self) -> str:
        """A handle, ``pid:start time:fd:size``, for :meth:`SoftProcess.import_segment` in another process."""
        self._check_not_freed()
        return f"{self._process.owner}:{self._fd}:{self._size_bytes}"

    def _check_range(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self._size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size} are outside a segment of {self._size_bytes} bytes")

    def _check_not_freed(self) -> None:
        if self._freed:
            raise RuntimeError(f"the segment at {self._address:#x} was freed")

    def _check_mapped(self) -> None:
        self._check_not_freed()
        if not self._mapped:
            raise RuntimeError(f"the segment at {self._address:#x} is not mapped")

    # What follows is the driver's and the owner's side; the gate is closed, or the owner's mutex held.

    def _release(self) -> None:
        self._freed = True
        self._mapped = False
        os.ftruncate(self._fd, 0)
        os.close(self._fd)
        _close_mapping(self._buffer)
        self._drop_backup()

    def _copy_to_backup(self) -> None:
        # Private: the bytes count as the target's own anonymous memory, as the real driver's do, and a forked
        # child cannot write to them.
        backup = mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            with memoryview(backup) as view:
                _copy_out(self._fd, view)
        except BaseException:
            backup.close()
            raise
        self._backup = backup

    def _drop_backup(self) -> None:
        if self._backup is not None:
            self._backup.close()
            self._backup = None

    def _evict(self) -> None:
        os.ftruncate(self._fd, 0)

    def _bring_back(self) -> None:
        if self._backup is None:
            raise RuntimeError(f"the segment at {self._address:#x} has no backup")
        os.ftruncate(self._fd, self._size_bytes)
        with memoryview(self._backup) as view:
            _copy_in(self._fd, view)


class ImportedSegment:
    """A peer's segment mapped into this process. Counts as a live import until :meth:`release`.

    It costs the importer no device memory. When the peer unmaps the segment or is checkpointed, access is SIGBUS.
    """

    def __init__(self, process: SoftProcess, handle: str, buffer: mmap.mmap) -> None:
        self._process = process
        self._handle = handle
        self._buffer = buffer

    @property
    def handle(self) -> str:
        return self._handle

    @property
    def buffer(self) -> mmap.mmap:
        """The peer's memory, writable."""
        return self._buffer

    def release(self) -> None:
        """Unmap it. Nothing happens the second time."""
        with self._process._exclusive():
            self._process._imports.discard(self)
            _close_mapping(self._buffer)


# ------------------------------------------------------------------------------------------------
# The device opened in its owner process, and the driver's thread there
# ------------------------------------------------------------------------------------------------

#: The device this process opened, as a process has one driver. Cleared in forked children.
_opened: SoftProcess | None = None
_opened_lock = threading.Lock()


class SoftProcess:
    """The software device opened in this process: its context, its memory, and the driver's thread.

    Made by :meth:`open`. In a forked child of its process, :meth:`close` does nothing and every other call
    raises RuntimeError; the child may open a device of its own.
    """

    def __init__(self, gpu: SoftGpu, context_bytes: int) -> None:
        self._gpu = gpu
        self._pid = os.getpid()
        self._owner = f"{self._pid}:{procfs.start_time(self._pid)}"
        self._state = ProcessState.RUNNING
        self._gate = _Gate()
        self._mutex = threading.Lock()
        self._context_bytes = context_bytes
        self._local_memory_bytes = self._whole_local_memory_bytes = min(LOCAL_MEMORY_BYTES, context_bytes)
        self._held_bytes = 0
        self._segments: dict[int, Segment] = {}
        self._imports: set[ImportedSegment] = set()
        self._closed = False
        #: What every restore answers from now on, once one thing went wrong for good.
        self._restore_verdict: tuple[DriverCode, str] | None = None
        self._charge(context_bytes)
        self._server = _Server(self, _socket_address(self._pid, int(self._owner.partition(":")[2])))

    @classmethod
    def open(
        cls,
        root: Path | str,
        name: str,
        *,
        capacity_bytes: int | None = None,
        context_bytes: int = CONTEXT_BYTES,
    ) -> SoftProcess:
        """Open the device in this process: take ``context_bytes`` on it and start the driver's thread.

        Args:
            root, name, capacity_bytes: as for :class:`SoftGpu`.
            context_bytes: what the context costs on the device while it is resident, bytes.

        Raises:
            MemoryError: the context does not fit.
            RuntimeError: this process has a device open.
            ValueError, PermissionError: as for :class:`SoftGpu`.
        """
        global _opened
        if context_bytes < 0:
            raise ValueError(f"context_bytes must not be negative, got {context_bytes}")
        with _opened_lock:
            if _opened is not None:
                raise RuntimeError(f"this process has {_opened.device} open already")
            process = cls(SoftGpu(root, name, capacity_bytes), context_bytes)
            try:
                process._server.start()
            except BaseException:
                process._charge(-context_bytes)
                raise
            _opened = process
            return process

    @property
    def device(self) -> str:
        """The device's name."""
        return self._gpu.name

    @property
    def owner(self) -> str:
        """``pid:start time`` of the process."""
        return self._owner

    @property
    def state(self) -> ProcessState:
        return self._state

    @property
    def context_bytes(self) -> int:
        """What the context costs on the device while it is resident, its local memory included."""
        return self._context_bytes

    @property
    def local_memory_bytes(self) -> int:
        """Of :attr:`context_bytes`, what is there for kernels' local variables; 0 while it is given back."""
        return self._local_memory_bytes

    def release_local_memory(self) -> int:
        """Give it back. Idempotent. Returns the bytes given back."""
        return self._resize_local_memory(0)

    def restore_local_memory(self) -> None:
        """Get it again. Idempotent. Raises MemoryError."""
        self._resize_local_memory(self._whole_local_memory_bytes)

    def require_local_memory(self) -> None:
        """Raises RuntimeError where CUDA has no more than "unspecified launch failure", and no context after it."""
        if self._local_memory_bytes < self._whole_local_memory_bytes:
            raise RuntimeError("the context's local memory was given back: nothing may run before it is restored")

    def _resize_local_memory(self, size_bytes: int) -> int:
        with self._exclusive():
            given_back = self._local_memory_bytes - size_bytes
            self._charge(-given_back)
            self._local_memory_bytes = size_bytes
            self._context_bytes -= given_back
            return given_back

    @property
    def resident_bytes(self) -> int:
        """Bytes this process holds on the device now, context included: its entry in the ledger."""
        return self._held_bytes

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._gate.enter()
        try:
            yield
        finally:
            self._gate.leave()

    def call(self) -> AbstractContextManager[None]:
        """A device call, to hold around work on the memory. May nest.

        Entering waits while the process is locked or checkpointed; the driver's lock waits for it to be left.

        Raises:
            RuntimeError: the device was closed, or this is a forked child.
        """
        self._check_process()
        return self._call()

    def allocate(self, size_bytes: int) -> Segment:
        """Device memory of ``size_bytes``, resident, contents undefined (poisoned).

        Raises:
            MemoryError: the device is full. ValueError: not a positive size.
        """
        if size_bytes <= 0:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        with self._exclusive():
            self._charge(size_bytes)
            try:
                segment = Segment(self, size_bytes)
            except BaseException:
                self._charge(-size_bytes)
                raise
            self._segments[segment.address] = segment
            return segment

    def free(self, segment: Segment) -> None:
        """Give a segment back, address and all. A tensor that still looks at it is SIGBUS from now on.

        Raises:
            ValueError: it was freed, or belongs to another process.
        """
        with self._exclusive():
            if self._segments.get(segment.address) is not segment:
                raise ValueError(f"the segment at {segment.address:#x} was freed, or is not of this process")
            del self._segments[segment.address]
            held = segment.size_bytes if segment.resident else 0
            segment._release()
            self._charge(-held)

    def import_segment(self, handle: str) -> ImportedSegment:
        """Map a peer's segment (``Segment.export()``) through ``/proc/<pid>/fd``.

        A process that is checkpointed while it holds a live import can never be restored.

        Raises:
            ValueError: not a handle, or the segment is not there or not resident any more.
            ProcessLookupError: the peer is gone.
        """
        try:
            pid, start_time, peer_fd, size_bytes = map(int, handle.split(":"))
        except ValueError:
            raise ValueError(f"not a segment's handle: {handle!r}") from None
        with self._exclusive():
            if not procfs.is_alive(pid, start_time):
                raise ProcessLookupError(errno.ESRCH, f"the process of segment {handle} is gone")
            path = f"/proc/{pid}/fd/{peer_fd}"
            # The peer may have freed the segment and got the same number for something else since.
            try:
                if not os.readlink(path).startswith(f"/memfd:{_MEMFD_NAME}"):
                    raise ValueError(f"segment {handle} was freed by its owner")
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise ValueError(f"segment {handle} was freed by its owner") from None
            try:
                if os.fstat(fd).st_size != size_bytes:
                    raise ValueError(f"segment {handle} is not resident")
                imported = ImportedSegment(self, handle, mmap.mmap(fd, size_bytes))
            finally:
                os.close(fd)
            self._imports.add(imported)
            return imported

    def close(self) -> None:
        """Free everything and stop the driver's thread, whatever the state. Idempotent; waits for a verb in progress.

        Calls that wait at the gate, and later ones, raise RuntimeError. The caller sees to it that no call is inside.
        """
        global _opened
        if os.getpid() != self._pid:
            return  # a forked child: the memory, the ledger entry and the socket are its parent's
        with _opened_lock:
            if self._closed:
                return
            self._closed = True
            self._gate.kill()
            self._server.stop()
            with self._mutex:
                for segment in self._segments.values():
                    segment._release()
                self._segments.clear()
                for imported in self._imports:
                    _close_mapping(imported.buffer)
                self._imports.clear()
                self._charge(-self._held_bytes)
            if _opened is self:
                _opened = None

    def _check_process(self) -> None:
        # Before any lock is touched: one that was held at the fork is held for ever in the child.
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self.device} was opened by process {self._pid}; a forked child cannot use it")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """A device call that changes the books: one at a time."""
        with self.call(), self._mutex:
            yield

    def _charge(self, delta_bytes: int) -> None:
        self._gpu._charge(self._owner, delta_bytes)
        self._held_bytes += delta_bytes

    # The verbs, on the driver's thread, which does one at a time. From lock to unlock nobody is inside the
    # gate, so the books stand still.

    def _perform(self, verb: Verb, timeout_ms: int) -> None:
        """Do a verb. Raises DriverError; the state then is as before (or FAILED, see ``_bring_back``)."""
        after = TRANSITIONS.get((self._state, verb))
        if after is None:
            raise DriverError(verb, DriverCode.ILLEGAL_STATE, detail=f"the process is {self._state}")
        if verb is Verb.LOCK:
            if not self._gate.close(timeout_ms):
                raise DriverError(verb, DriverCode.NOT_READY, detail=f"device calls still ran after {timeout_ms} ms")
        elif verb is Verb.CHECKPOINT:
            self._evict()
        elif verb is Verb.RESTORE:
            self._bring_back()
        # Before the gate opens: whoever is let through must find the process running.
        self._state = after
        if verb is Verb.UNLOCK:
            self._gate.open()

    def _evict(self) -> None:
        resident = [segment for segment in self._segments.values() if segment.resident]
        try:
            for segment in resident:
                segment._copy_to_backup()
        except BaseException as error:
            # Nothing was truncated yet: the process stays as it was.
            for segment in resident:
                segment._drop_backup()
            if isinstance(error, OSError | MemoryError):
                raise DriverError(Verb.CHECKPOINT, DriverCode.OUT_OF_MEMORY, detail=f"host memory: {error}") from error
            raise
        for segment in resident:
            segment._evict()
        self._charge(-self._held_bytes)
        if self._imports:
            # Measured with peer access and no NCCL suspend: checkpoint succeeds, no restore ever does.
            count = len(self._imports)
            self._restore_verdict = (
                DriverCode.NOT_SUPPORTED,
                f"checkpointed with {count} live imports of peers' memory",
            )

    def _bring_back(self) -> None:
        if self._restore_verdict is not None:
            code, why = self._restore_verdict
            raise DriverError(Verb.RESTORE, code, detail=why)
        backed_up = [segment for segment in self._segments.values() if segment._backup is not None]
        try:
            # All of it before any of it, in one step: two processes that wake at once must not both get half.
            self._charge(self._context_bytes + sum(segment.size_bytes for segment in backed_up))
        except MemoryError as error:
            self._restore_verdict = (DriverCode.OPERATING_SYSTEM, "an earlier restore ran out of device memory")
            raise DriverError(Verb.RESTORE, DriverCode.OUT_OF_MEMORY, detail=str(error)) from error
        try:
            for segment in backed_up:
                segment._bring_back()
        except BaseException:
            self._state = ProcessState.FAILED
            raise
        for segment in backed_up:
            segment._drop_backup()


class _Server:
    """The driver's thread in the target: takes requests from the socket, does one at a time, answers.

    One message each way on a SEQPACKET connection: the request is a verb (or ``get_state``) and a timeout, the
    reply a code, the state and a detail. A caller that sends nothing holds up nobody; one that is gone when
    the answer comes changes nothing.
    """

    def __init__(self, process: SoftProcess, address: bytes) -> None:
        self._process = process
        self._address = address
        self._listener: socket.socket | None = None
        self._stop_fd = -1
        self._thread = threading.Thread(target=self._serve, name="softgpu-driver", daemon=True)

    def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(self._address)
            listener.listen(64)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()

    def stop(self) -> None:
        if self._listener is None:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptors; in a forked child this leaves the parent's alone."""
        if self._listener is not None:
            self._listener.close()
            os.close(self._stop_fd)
            self._listener = None

    def _serve(self) -> None:
        listener = self._listener
        if listener is None:
            raise RuntimeError("the driver's thread was started without a socket")
        # poll, not epoll: an epoll set is shared with forked children.
        with selectors.PollSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._stop_fd, selectors.EVENT_READ)
            connections: set[socket.socket] = set()
            while True:
                for key, _ in selector.select():
                    if key.fileobj is listener:
                        accepted = self._accept(listener)
                        if accepted is not None:
                            connections.add(accepted)
                            selector.register(accepted, selectors.EVENT_READ)
                    elif isinstance(key.fileobj, socket.socket):
                        selector.unregister(key.fileobj)
                        connections.discard(key.fileobj)
                        self._answer(key.fileobj)
                    else:
                        for connection in connections:
                            connection.close()
                        return

    @staticmethod
    def _accept(listener: socket.socket) -> socket.socket | None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return None  # the caller gave up meanwhile
        if _peer(connection)[1] != os.geteuid():
            # The kernel says who called, and another user's word is not even read.
            connection.close()
            return None
        return connection

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = connection.recv(_MESSAGE_BYTES)
            except OSError:
                return
            if not request:
                return
            code, detail = self._perform(request)
            _send(connection, f"{int(code)} {self._process.state} {detail}")

    def _perform(self, request: bytes) -> tuple[DriverCode, str]:
        try:
            call, _, timeout_ms = request.decode().partition(" ")
            verb = None if call == "get_state" else Verb(call)
            timeout = int(timeout_ms)
        except ValueError as error:
            return DriverCode.INVALID_VALUE, str(error)
        try:
            if verb is not None:
                self._process._perform(verb, timeout)
        except DriverError as error:
            return DriverCode(error.code), error.detail
        except Exception as error:  # noqa: BLE001 - the driver's thread must live to answer the next caller
            return DriverCode.UNKNOWN, f"{type(error).__name__}: {error}"
        return DriverCode.SUCCESS, ""


def _send(connection: socket.socket, text: str) -> None:
    try:
        connection.send(text.encode()[:_MESSAGE_BYTES], socket.MSG_NOSIGNAL)
    except OSError:
        pass  # the caller was killed; the verb was done all the same, as the real driver does it


def _forget_after_fork() -> None:
    """In a forked child: let go of the parent's socket, so that it vanishes with the parent."""
    global _opened, _opened_lock
    _opened_lock = threading.Lock()
    if _opened is not None:
        _opened._server.forget()
        _opened = None


os.register_at_fork(after_in_child=_forget_after_fork)


# ------------------------------------------------------------------------------------------------
# The caller's side
# ------------------------------------------------------------------------------------------------


class RemoteProcess:
    """The driver's verbs on another process, by pid and start time (field 22 of ``/proc/PID/stat``).

    Holds nothing between calls and may be used from several threads. Every method blocks until the target's
    driver thread answers, or the target dies, and raises :class:`DriverError`: OPERATING_SYSTEM (no such
    process, it died, or it is another user's), NOT_INITIALIZED (it never opened a software device),
    ILLEGAL_STATE, and what the verb names below.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self._pid = pid
        self._start_time = start_time

    def get_state(self) -> ProcessState:
        """State of the process. Waits for a verb in progress."""
        return ProcessState(self._request("get_state"))

    def lock(self, timeout_ms: int) -> None:
        """RUNNING -> LOCKED. NOT_READY if device calls do not drain within ``timeout_ms`` (0: wait for ever)."""
        if timeout_ms < 0:
            raise DriverError(Verb.LOCK, DriverCode.INVALID_VALUE, detail=f"timeout_ms is {timeout_ms}")
        self._request(Verb.LOCK, timeout_ms)

    def checkpoint(self) -> None:
        """LOCKED -> CHECKPOINTED: device memory moves to the target's host memory."""
        self._request(Verb.CHECKPOINT)

    def restore(self) -> None:
        """CHECKPOINTED -> LOCKED. OUT_OF_MEMORY without room, and OPERATING_SYSTEM for ever after.

        NOT_SUPPORTED, for ever, if the process was checkpointed with live imports.
        """
        self._request(Verb.RESTORE)

    def unlock(self) -> None:
        """LOCKED -> RUNNING: calls that wait go on."""
        self._request(Verb.UNLOCK)

    def _request(self, call: str, timeout_ms: int = 0) -> str:
        """One question, one answer. Returns the state as the target told it."""
        try:
            pidfd = procfs.open_pidfd(self._pid, self._start_time)
        except OSError as error:
            raise self._failed(call, DriverCode.OPERATING_SYSTEM, "no such process") from error
        try:
            if not procfs.is_alive(self._pid, self._start_time):
                raise self._failed(call, DriverCode.NOT_INITIALIZED, "the process is a zombie")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                reply = self._exchange(connection, pidfd, call, timeout_ms)
        finally:
            os.close(pidfd)
        code, state, detail = reply.split(" ", 2)
        if int(code) != DriverCode.SUCCESS:
            raise self._failed(call, int(code), detail)
        return state

    def _exchange(self, connection: socket.socket, pidfd: int, call: str, timeout_ms: int) -> str:
        try:
            connection.connect(_socket_address(self._pid, self._start_time))
        except ConnectionRefusedError as error:
            raise self._failed(call, DriverCode.NOT_INITIALIZED, "it has no software device open") from error
        if _peer(connection) != (self._pid, os.geteuid()):
            raise self._failed(call, DriverCode.OPERATING_SYSTEM, "another process or user answers in its name")
        try:
            connection.send(f"{call} {timeout_ms}".encode(), socket.MSG_NOSIGNAL)
            # The process's own end beside the socket's: a child it forked may hold the connection open.
            poller = select.poll()
            poller.register(connection, select.POLLIN)
            poller.register(pidfd, select.POLLIN)
            poller.poll()
            reply = connection.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT).decode()
        except OSError as error:  # reset, or (BlockingIOError) dead without a word
            raise self._failed(call, DriverCode.OPERATING_SYSTEM, "the process died") from error
        if not reply:
            raise self._failed(call, DriverCode.OPERATING_SYSTEM, "the process died or closed the device")
        return reply

    def _failed(self, call: str, code: int, detail: str) -> DriverError:
        return DriverError(call, code, detail=f"process {self._pid}: {detail}")
