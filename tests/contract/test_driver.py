"""The contract of :class:`~checkpoint_executor.helper.drivers.Driver`: one for the software device and the CUDA driver.

The cases are what was measured on a real driver (580.159 on H200); ``--backend cuda`` runs them there again. Written
against the protocols only, so that neither side can drift from the other.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoint_executor.driver_states import TRANSITIONS, DriverCode, DriverError, ProcessState, Verb
from checkpoint_executor.helper.drivers import Driver
from checkpoint_executor.messages import Target
from tests.support.targets import DEADLINE_S, Backend, TargetProcess

LOCK_TIMEOUT_MS = 10_000

#: How each state is reached from RUNNING. FAILED is not: nothing legal leads there.
PATHS = {
    ProcessState.RUNNING: (),
    ProcessState.LOCKED: (Verb.LOCK,),
    ProcessState.CHECKPOINTED: (Verb.LOCK, Verb.CHECKPOINT),
}
ILLEGAL = [(state, verb) for state in PATHS for verb in Verb if (state, verb) not in TRANSITIONS]


def perform(driver: Driver, target: Target, verb: Verb, timeout_ms: int = LOCK_TIMEOUT_MS) -> None:
    if verb is Verb.LOCK:
        driver.lock(target, timeout_ms)
    else:
        {Verb.CHECKPOINT: driver.checkpoint, Verb.RESTORE: driver.restore, Verb.UNLOCK: driver.unlock}[verb](target)


def bring_to(driver: Driver, target: Target, state: ProcessState) -> None:
    for verb in PATHS[state]:
        perform(driver, target, verb)


def code_of(driver: Driver, target: Target, verb: Verb, timeout_ms: int = LOCK_TIMEOUT_MS) -> DriverCode:
    with pytest.raises(DriverError) as caught:
        perform(driver, target, verb, timeout_ms)
    return DriverCode(caught.value.code)


# ---------------------------------------------------------------------------------------------- the cycle


def test_every_legal_verb_leads_to_the_state_the_table_says(driver: Driver, target: TargetProcess) -> None:
    seen = {}
    for verb in (Verb.LOCK, Verb.UNLOCK, Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK):
        before = driver.get_state(target.target)
        perform(driver, target.target, verb)
        seen[before, verb] = driver.get_state(target.target)
    assert seen == TRANSITIONS


def test_a_full_cycle_keeps_every_byte_and_every_address(driver: Driver, target: TargetProcess) -> None:
    addresses = target.request("address")
    assert target.request("checksum") == target.pattern_checksum
    for verb in (Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK):
        perform(driver, target.target, verb)
    assert target.request("address") == addresses
    assert target.request("checksum") == target.pattern_checksum


def test_several_cycles_in_a_row_keep_every_byte_and_the_device_usage(
    backend: Backend, driver: Driver, target: TargetProcess
) -> None:
    awake_bytes = backend.settled_used_bytes()
    for _ in range(3):
        for verb in (Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK):
            perform(driver, target.target, verb)
        assert target.request("checksum") == target.pattern_checksum
        # The real driver may come back a little smaller: caches it does not restore.
        assert backend.settled_used_bytes() <= awake_bytes


def test_a_checkpointed_process_leaves_next_to_nothing_on_the_device(backend: Backend, driver: Driver) -> None:
    baseline_bytes = backend.settled_used_bytes()
    target = backend.spawn()
    assert backend.settled_used_bytes() >= baseline_bytes + backend.target_bytes
    bring_to(driver, target.target, ProcessState.CHECKPOINTED)
    assert backend.settled_used_bytes() <= baseline_bytes + backend.asleep_limit_bytes


def test_two_targets_go_through_every_verb_at_the_same_time(backend: Backend, driver: Driver) -> None:
    targets = [backend.spawn(seed=seed) for seed in (1, 2)]
    assert targets[0].pattern_checksum != targets[1].pattern_checksum
    with ThreadPoolExecutor(len(targets)) as pool:
        for verb in (Verb.LOCK, Verb.CHECKPOINT, Verb.RESTORE, Verb.UNLOCK):
            for done in [pool.submit(perform, driver, each.target, verb) for each in targets]:
                done.result(DEADLINE_S)
    for each in targets:
        assert each.request("checksum") == each.pattern_checksum


# ---------------------------------------------------------------------------------------------- illegal verbs


@pytest.mark.parametrize(("state", "verb"), ILLEGAL, ids=[f"{verb}-while-{state}" for state, verb in ILLEGAL])
def test_an_illegal_verb_is_illegal_state_and_changes_nothing(
    driver: Driver, target: TargetProcess, state: ProcessState, verb: Verb
) -> None:
    bring_to(driver, target.target, state)
    assert code_of(driver, target.target, verb) is DriverCode.ILLEGAL_STATE
    assert driver.get_state(target.target) is state
    # And the process still finds its way home.
    if state is ProcessState.CHECKPOINTED:
        driver.restore(target.target)
    if state is not ProcessState.RUNNING:
        driver.unlock(target.target)
    assert target.request("checksum") == target.pattern_checksum


# ---------------------------------------------------------------------------------------------- lock and running work


def test_lock_of_a_busy_process_is_not_ready_and_a_later_lock_works(driver: Driver, target: TargetProcess) -> None:
    target.request("start_busy", kind="long")
    assert code_of(driver, target.target, Verb.LOCK, timeout_ms=100) is DriverCode.NOT_READY
    assert driver.get_state(target.target) is ProcessState.RUNNING
    target.request("stop_busy")
    driver.lock(target.target, LOCK_TIMEOUT_MS)
    assert driver.get_state(target.target) is ProcessState.LOCKED


def test_a_lock_that_timed_out_lets_calls_through_again(driver: Driver, target: TargetProcess) -> None:
    target.request("start_busy", kind="long")
    assert code_of(driver, target.target, Verb.LOCK, timeout_ms=100) is DriverCode.NOT_READY
    target.request("stop_busy")
    target.request("call_from_thread")
    assert target.request("call_result") == target.pattern_checksum


def test_lock_waits_for_work_that_ends_within_the_timeout(driver: Driver, target: TargetProcess) -> None:
    target.request("start_busy", kind="long")
    with ThreadPoolExecutor(1) as pool:
        lock = pool.submit(driver.lock, target.target, int(DEADLINE_S * 1000))
        target.request("stop_busy")
        lock.result(DEADLINE_S)
    assert driver.get_state(target.target) is ProcessState.LOCKED


def test_lock_is_not_starved_by_short_calls_from_many_threads(
    backend: Backend, driver: Driver, target: TargetProcess
) -> None:
    target.request("start_busy", kind="short", threads=8)
    code = DriverCode.SUCCESS
    try:
        driver.lock(target.target, LOCK_TIMEOUT_MS)
    except DriverError as error:
        code = DriverCode(error.code)
    if code is DriverCode.SUCCESS:
        assert driver.get_state(target.target) is ProcessState.LOCKED
        driver.unlock(target.target)
    else:
        # A real device's queue may never be empty under such a load. The software device's can: calls are short.
        assert backend.kind != "soft"
        assert code is DriverCode.NOT_READY
        assert driver.get_state(target.target) is ProcessState.RUNNING
    assert target.request("stop_busy") > 0
    assert target.request("checksum") == target.pattern_checksum


@pytest.mark.parametrize("state", [ProcessState.LOCKED, ProcessState.CHECKPOINTED])
def test_a_call_of_a_locked_process_waits_for_unlock_and_is_then_right(
    driver: Driver, target: TargetProcess, state: ProcessState
) -> None:
    bring_to(driver, target.target, state)
    target.request("call_from_thread")
    if state is ProcessState.CHECKPOINTED:
        driver.restore(target.target)
    assert target.request("call_done") is False
    driver.unlock(target.target)
    assert target.request("call_result") == target.pattern_checksum


# ---------------------------------------------------------------------------------------------- processes not there


@pytest.mark.parametrize("verb", Verb)
def test_a_process_that_is_gone_is_operating_system(driver: Driver, target: TargetProcess, verb: Verb) -> None:
    named = target.target
    target.kill()
    assert code_of(driver, named, verb) is DriverCode.OPERATING_SYSTEM
    with pytest.raises(DriverError) as caught:
        driver.get_state(named)
    assert caught.value.code == DriverCode.OPERATING_SYSTEM


def test_a_reused_pid_is_not_the_target(driver: Driver, target: TargetProcess) -> None:
    named = target.target
    earlier = Target(named.rank, named.pid, named.start_time - 1, named.device)
    assert code_of(driver, earlier, Verb.LOCK) is DriverCode.OPERATING_SYSTEM
    assert driver.get_state(named) is ProcessState.RUNNING


@pytest.mark.parametrize("verb", Verb)
def test_a_process_without_a_device_is_not_initialized(backend: Backend, driver: Driver, verb: Verb) -> None:
    assert code_of(driver, backend.spawn_bystander().target, verb) is DriverCode.NOT_INITIALIZED


# ---------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("state", [ProcessState.LOCKED, ProcessState.CHECKPOINTED])
def test_killing_the_caller_between_verbs_leaves_the_state_to_the_next_caller(
    backend: Backend, target: TargetProcess, state: ProcessState
) -> None:
    named = target.target
    caller = backend.spawn_caller()
    for verb in PATHS[state]:
        assert caller.request("verb", name=verb, pid=named.pid, start_time=named.start_time) is None
    caller.kill()
    successor = backend.driver()
    assert successor.get_state(named) is state
    if state is ProcessState.CHECKPOINTED:
        successor.restore(named)
    successor.unlock(named)
    successor.close()
    assert target.request("checksum") == target.pattern_checksum


@pytest.mark.parametrize("state", PATHS)
def test_sigkill_in_any_state_gives_all_device_bytes_back(
    backend: Backend, driver: Driver, state: ProcessState
) -> None:
    baseline_bytes = backend.settled_used_bytes()
    target = backend.spawn()
    bring_to(driver, target.target, state)
    target.kill()
    assert backend.settled_used_bytes() <= baseline_bytes


def test_a_verb_in_progress_ends_when_the_target_dies(backend: Backend, driver: Driver, target: TargetProcess) -> None:
    if backend.kind != "soft":
        pytest.skip("not measured: should the real driver not notice, its call never returns and hangs the suite")
    target.request("start_busy", kind="long")
    with ThreadPoolExecutor(1) as pool:
        # No timeout: but for the death this would never end.
        lock = pool.submit(code_of, driver, target.target, Verb.LOCK, 0)
        os.kill(target.target.pid, signal.SIGKILL)
        target.wait_exit()
        assert lock.result(DEADLINE_S) in (DriverCode.OPERATING_SYSTEM, DriverCode.NOT_INITIALIZED)


def test_a_stray_access_while_checkpointed_kills_the_process(
    backend: Backend, driver: Driver, target: TargetProcess
) -> None:
    if backend.kind != "soft":
        pytest.skip("the host cannot address memory of a real device: there is no stray host access to make")
    bring_to(driver, target.target, ProcessState.CHECKPOINTED)
    target.send("stray_read")
    with pytest.raises(EOFError):
        target.receive()
    assert target.wait_exit() == -signal.SIGBUS


# ---------------------------------------------------------------------------------------------- capacity


def test_processes_share_the_capacity_of_the_device(backend: Backend, driver: Driver) -> None:
    baseline_bytes = backend.settled_used_bytes()
    first, second = backend.spawn(), backend.spawn()
    memory = driver.device_memory(backend.device)
    assert memory.used_bytes >= baseline_bytes + 2 * backend.target_bytes
    assert memory.free_bytes == memory.total_bytes - memory.used_bytes
    held = dict(memory.holders)
    for target in (first, second):
        # A reader in another pid namespace than the driver sees no holders at all.
        assert not held or held[target.target.pid] >= backend.target_bytes
    with pytest.raises(MemoryError):
        backend.spawn(size_bytes=memory.total_bytes - backend.target_bytes)


def test_a_device_in_use_is_among_those_that_are_listed(
    backend: Backend, driver: Driver, target: TargetProcess
) -> None:
    assert backend.device in driver.devices()
    for device in driver.devices():
        assert driver.device_memory(device).total_bytes > 0


def test_the_memory_of_a_checkpointed_process_is_free_for_others(backend: Backend, driver: Driver) -> None:
    target = backend.spawn()
    bring_to(driver, target.target, ProcessState.CHECKPOINTED)
    other = backend.fill(leave_bytes=0)
    other.kill()
    driver.restore(target.target)
    driver.unlock(target.target)
    assert target.request("checksum") == target.pattern_checksum


def test_a_restore_without_room_is_out_of_memory_and_no_later_restore_works(backend: Backend, driver: Driver) -> None:
    target = backend.spawn()
    bring_to(driver, target.target, ProcessState.CHECKPOINTED)
    neighbour = backend.fill(leave_bytes=backend.target_bytes // 2)
    assert code_of(driver, target.target, Verb.RESTORE) is DriverCode.OUT_OF_MEMORY
    assert driver.get_state(target.target) is ProcessState.CHECKPOINTED
    neighbour.kill()
    for _ in range(2):
        assert code_of(driver, target.target, Verb.RESTORE) is DriverCode.OPERATING_SYSTEM
        assert driver.get_state(target.target) is ProcessState.CHECKPOINTED


def test_of_two_restores_that_do_not_both_fit_one_succeeds_whole(backend: Backend, driver: Driver) -> None:
    if backend.kind != "soft":
        pytest.skip("a real restore takes its memory piece by piece: both may fail")
    targets = [backend.spawn(seed=seed) for seed in (1, 2)]
    for each in targets:
        bring_to(driver, each.target, ProcessState.CHECKPOINTED)
    backend.fill(leave_bytes=backend.target_bytes * 3 // 2)
    together = threading.Barrier(2)

    def restore(each: TargetProcess) -> int:
        together.wait(DEADLINE_S)
        try:
            driver.restore(each.target)
        except DriverError as error:
            return error.code
        return DriverCode.SUCCESS

    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(restore, targets))
    assert sorted(codes) == [DriverCode.SUCCESS, DriverCode.OUT_OF_MEMORY]
    winner = targets[codes.index(DriverCode.SUCCESS)]
    driver.unlock(winner.target)
    assert winner.request("checksum") == winner.pattern_checksum


def test_a_device_that_nobody_opened_has_no_reading(driver: Driver) -> None:
    with pytest.raises(DriverError):
        driver.device_memory("no-such-device")
