"""The software driver between processes: who may call, callers and targets that die, imports, forked children."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint_executor.driver_states import DriverCode, DriverError, ProcessState
from checkpoint_executor.softgpu import RemoteProcess, SoftProcess, _socket_address
from tests.support.soft_targets import SoftBackend
from tests.support.targets import ChildProcess

DEADLINE_S = 60.0
NOBODY = 65534


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[SoftBackend]:
    made = SoftBackend(tmp_path)
    yield made
    made.close()
    assert made.gpu.holders() == ()


@pytest.fixture
def target(backend: SoftBackend) -> ChildProcess:
    return backend.spawn()


def remote(child: ChildProcess) -> RemoteProcess:
    return RemoteProcess(child.target.pid, child.target.start_time)


def connect(child: ChildProcess) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(_socket_address(child.target.pid, child.target.start_time))
    return connection


def code_of(verb: Callable[[], object]) -> DriverCode:
    with pytest.raises(DriverError) as caught:
        verb()
    return DriverCode(caught.value.code)


def checkpoint(child: ChildProcess) -> None:
    remote(child).lock(0)
    remote(child).checkpoint()


# ---------------------------------------------------------------------------------------------- callers


def test_a_caller_that_is_gone_does_not_stop_the_verb(target: ChildProcess) -> None:
    for request in (b"lock 0", b"checkpoint 0"):
        with connect(target) as connection:
            connection.send(request)
    assert remote(target).get_state() is ProcessState.CHECKPOINTED


def test_a_caller_that_says_nothing_holds_up_nobody(target: ChildProcess) -> None:
    with connect(target):
        assert remote(target).get_state() is ProcessState.RUNNING


@pytest.mark.parametrize("request_text", [b"reset 0", b"lock soon", b"\xff", b"lock"])
def test_nonsense_is_an_invalid_value_and_changes_nothing(target: ChildProcess, request_text: bytes) -> None:
    with connect(target) as connection:
        connection.settimeout(DEADLINE_S)
        connection.send(request_text)
        assert connection.recv(4096).startswith(b"1 running ")
    assert remote(target).get_state() is ProcessState.RUNNING


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_may_not_call(target: ChildProcess) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"nothing"
        try:
            os.setuid(NOBODY)
            with connect(target) as connection:
                connection.settimeout(DEADLINE_S)
                connection.send(b"lock 0")
                answer = connection.recv(4096) or answer
        except (BrokenPipeError, ConnectionResetError):
            pass  # turned away: how it looks depends on who was faster
        except OSError as error:
            answer = str(error).encode()
        finally:
            os.write(writing, answer)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        assert answers.read() == b"nothing"
    os.waitpid(pid, 0)
    assert remote(target).get_state() is ProcessState.RUNNING


def test_nobody_can_answer_in_another_process_name(backend: SoftBackend) -> None:
    bystander = backend.spawn_bystander()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind(_socket_address(bystander.target.pid, bystander.target.start_time))
        impostor.listen()
        assert code_of(remote(bystander).get_state) is DriverCode.OPERATING_SYSTEM


# ---------------------------------------------------------------------------------------------- targets


def test_a_stopped_target_hangs_the_caller_until_it_goes_on(target: ChildProcess) -> None:
    states: list[ProcessState] = []
    target.signal(signal.SIGSTOP)
    # Returns once it is stopped.
    os.waitid(os.P_PID, target.target.pid, os.WSTOPPED | os.WNOWAIT)
    caller = threading.Thread(target=lambda: states.append(remote(target).get_state()), daemon=True)
    caller.start()
    caller.join(0.1)
    assert caller.is_alive()
    target.signal(signal.SIGCONT)
    caller.join(DEADLINE_S)
    assert states == [ProcessState.RUNNING]


def test_a_zombie_is_not_initialized(target: ChildProcess) -> None:
    target.signal(signal.SIGKILL)
    os.waitid(os.P_PID, target.target.pid, os.WEXITED | os.WNOWAIT)
    assert code_of(remote(target).get_state) is DriverCode.NOT_INITIALIZED


# ---------------------------------------------------------------------------------------------- imports


def test_an_import_sees_the_peers_bytes_and_costs_no_device_memory(backend: SoftBackend, tmp_path: Path) -> None:
    peer = backend.spawn()
    process = SoftProcess.open(backend.root, backend.device)
    try:
        used_bytes = backend.gpu.used_bytes()
        imported = process.import_segment(peer.request("export"))
        assert imported.buffer[0] == peer.request("stray_read")
        imported.buffer[0] ^= 0xFF
        assert imported.buffer[0] == peer.request("stray_read")
        assert backend.gpu.used_bytes() == used_bytes
        imported.release()
        imported.release()
    finally:
        process.close()


def test_a_live_import_at_the_checkpoint_makes_restore_impossible_for_ever(backend: SoftBackend) -> None:
    peer, importer = backend.spawn(), backend.spawn()
    importer.request("import_segment", handle=peer.request("export"))
    checkpoint(importer)
    for _ in range(2):
        assert code_of(remote(importer).restore) is DriverCode.NOT_SUPPORTED
        assert remote(importer).get_state() is ProcessState.CHECKPOINTED
    # The one whose memory was imported is none the worse.
    checkpoint(peer)
    remote(peer).restore()
    remote(peer).unlock()
    assert peer.request("checksum") == peer.pattern_checksum


def test_an_import_released_before_the_checkpoint_does_no_harm(backend: SoftBackend) -> None:
    peer, importer = backend.spawn(), backend.spawn()
    importer.request("import_segment", handle=peer.request("export"))
    importer.request("release_import")
    checkpoint(importer)
    remote(importer).restore()
    remote(importer).unlock()
    assert importer.request("checksum") == importer.pattern_checksum


@pytest.mark.parametrize("command", ["unmap_first", "free_first"])
def test_memory_that_is_gone_cannot_be_imported(backend: SoftBackend, command: str) -> None:
    peer = backend.spawn()
    handle = peer.request("export")
    peer.request(command)
    process = SoftProcess.open(backend.root, backend.device)
    try:
        with pytest.raises(ValueError, match=r"resident|freed"):
            process.import_segment(handle)
        for nonsense in ("", "1:2:3", "a:b:c:d"):
            with pytest.raises(ValueError, match="handle"):
                process.import_segment(nonsense)
        peer.kill()
        with pytest.raises(ProcessLookupError):
            process.import_segment(handle)
    finally:
        process.close()


# ---------------------------------------------------------------------------------------------- forks


def test_a_forked_child_cannot_use_or_disturb_its_parents_device(backend: SoftBackend, target: ChildProcess) -> None:
    used_bytes = backend.gpu.used_bytes()
    answers = target.request("fork_and_use")
    assert answers == [
        f"SOFT-0 was opened by process {target.target.pid}; a forked child cannot use it",
    ]
    assert backend.gpu.used_bytes() == used_bytes
    checkpoint(target)
    remote(target).restore()
    remote(target).unlock()
    assert target.request("checksum") == target.pattern_checksum


def test_a_child_that_outlives_its_parent_keeps_neither_memory_nor_the_drivers_socket(
    backend: SoftBackend, target: ChildProcess
) -> None:
    orphan = target.request("fork_and_linger")
    try:
        address = _socket_address(target.target.pid, target.target.start_time)
        target.kill()
        assert backend.gpu.holders() == ()
        assert code_of(remote(target).get_state) is DriverCode.OPERATING_SYSTEM
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, pytest.raises(ConnectionRefusedError):
            connection.connect(address)
    finally:
        os.kill(orphan, signal.SIGKILL)
