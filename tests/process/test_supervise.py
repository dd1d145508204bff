"""The supervisor on real processes: nothing survives, nothing is asked twice, and the engine comes back."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoint_executor import AsleepError, ConfigError, CycleReport, ForkedError, InvalidRequestError, RefusedError
from checkpoint_executor.errors import ResultTypeError
from checkpoint_executor.processes import child_environment
from checkpoint_executor.softgpu import CONTEXT_BYTES
from checkpoint_executor.supervise import (
    Cause,
    ControlCallError,
    ControlClient,
    EngineCallError,
    EngineRestarted,
    Incident,
    OutcomeUnknownError,
    ProcessTree,
    RestartPolicy,
    RestartsExhaustedError,
    Supervised,
    SupervisedCommand,
    soft_used_bytes,
)
from tests.support.executor_harness import DEADLINE_S, REPOSITORY, SoftMachine, in_thread, running, wait_until
from tests.support.executor_workers import pattern
from tests.support.supervise_engine import log_of
from tests.support.supervise_factories import Plain, fail_to_start, read_weights, stop_myself, wake

FAST = RestartPolicy(
    max_restarts=3, backoff_s=0.01, backoff_max_s=0.02, start_s=DEADLINE_S, free_s=DEADLINE_S, free_slack_bytes=0
)

#: Leaves two orphans, one of them without the marker, says so by staying alive, and waits.
WITH_ORPHANS = """
from tests.support.supervise_engine import orphan
orphan()
orphan(marked=False)
import time
time.sleep(1000)
"""


def no_devices() -> dict[str, int]:
    return {}


def environment() -> dict[str, str]:
    return child_environment(os.environ, {})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def with_orphans() -> ProcessTree:
    tree = ProcessTree(python(WITH_ORPHANS), environ=environment())
    wait_until(lambda: len({session(pid) for pid in tree.pids()} - {0}) == 3, "two orphans in sessions of their own")
    return tree


def session(pid: int) -> int:
    """0 if the process is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    made = with_orphans()
    yield made
    made.kill()


# ---------------------------------------------------------------------------------------------- the tree


def test_killing_ends_orphans_in_sessions_of_their_own_with_and_without_the_marker(tree: ProcessTree) -> None:
    pids = tree.pids()
    ended = tree.kill()
    assert running([*pids, tree.warden_pid]) == []
    assert set(pids) <= set(ended.pids)
    assert ended.survivors == ()
    assert tree.kill() == ended


def test_a_stopped_tree_is_killed_warden_and_all(tree: ProcessTree) -> None:
    pids = [*tree.pids(), tree.warden_pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    ended = tree.kill(timeout_s=1)
    assert running(pids) == []
    assert ended.survivors == ()


def test_when_the_warden_is_killed_the_command_dies_and_the_marked_orphan_is_found() -> None:
    code = "from tests.support.supervise_engine import orphan; orphan(); import time; time.sleep(1000)"
    tree = ProcessTree(python(code), environ=environment())
    wait_until(lambda: len(tree.pids()) == 2, "the command has an orphan")
    pids = tree.pids()
    os.kill(tree.warden_pid, signal.SIGKILL)
    assert tree.wait(DEADLINE_S)
    assert tree.exit_status is None
    wait_until(lambda: running([tree.pid]) == [], "the command died with its warden")
    tree.kill()
    assert running(pids) == []


def test_a_command_that_ends_takes_its_orphans_with_it() -> None:
    code = "from tests.support.supervise_engine import orphan; orphan(); orphan(marked=False)"
    tree = ProcessTree(python(code), environ=environment())
    warden = psutil.Process(tree.warden_pid)
    assert tree.wait(DEADLINE_S)
    assert tree.exit_status == 0
    wait_until(lambda: not warden.is_running() or not warden.children(), "the warden ends what is left by itself")
    assert len(tree.kill().pids) == 3
    assert running(tree.kill().pids) == []


def test_when_the_supervisor_is_killed_nothing_survives_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.support.supervise_parent_main", *python(WITH_ORPHANS)],
        env=environment(),
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        warden = psutil.Process(json.loads(parent.stdout.readline())["warden"])
        wait_until(lambda: len(warden.children(recursive=True)) == 3, "the command has two orphans")
        pids = [warden.pid, *(child.pid for child in warden.children(recursive=True))]
        parent.kill()
    wait_until(lambda: running(pids) == [], "the warden ended everything, and itself")


def test_stopping_lets_the_command_end_in_good_order(tmp_path: Path) -> None:
    # The shell has set its trap before it says so.
    tree = ProcessTree(["sh", "-c", f"trap 'exit 5' TERM; echo > {tmp_path}/up; sleep 1000 & wait"])
    wait_until((tmp_path / "up").exists, "the trap is set")
    tree.stop(DEADLINE_S)
    assert tree.exit_status == 5


def test_stopping_ends_a_command_that_ignores_it(tmp_path: Path) -> None:
    tree = ProcessTree(["sh", "-c", f"trap '' TERM; echo > {tmp_path}/up; sleep 1000"])
    wait_until((tmp_path / "up").exists, "the trap is set")
    ended = tree.stop(0.05)
    assert running(ended.pids) == []


def test_a_command_that_cannot_be_run_is_an_error_of_configuration() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ProcessTree(["/no/such/command"])


# ---------------------------------------------------------------------------------------------- a command


class HttpEngine:
    """``supervise_engine`` as a supervised command, on a software device."""

    def __init__(self, machine: SoftMachine, **options: Any) -> None:
        machine.gpu()
        self.machine = machine
        self.incidents: list[Incident] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.url.rpartition(":")[2]
        given: dict[str, Any] = {
            "health": f"{self.url}/health",
            "probe_interval_s": 0.02,
            "health_timeout_s": DEADLINE_S,
            "policy": FAST,
            "used_bytes": soft_used_bytes(machine.root),
            "report": self.incidents.append,
            "environ": environment(),
        }
        command = [sys.executable, "-m", "tests.support.supervise_engine", port, str(machine.folder), str(machine.root)]
        self.engine = SupervisedCommand(command, **{**given, **options})
        self.client = ControlClient(self.url, self.engine, timeout_s=DEADLINE_S)

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [entry for entry in log_of(self.machine.folder) if entry.get("path") == path]


@pytest.fixture
def http(machine: SoftMachine) -> Iterator[HttpEngine]:
    made = HttpEngine(machine)
    with made.engine:
        made.engine.wait_ready(DEADLINE_S)
        yield made


def test_a_killed_engine_is_restarted_once_its_orphans_are_gone_and_its_device_is_free(http: HttpEngine) -> None:
    http.client.post("/do", {"what": "orphan"})
    first = http.engine.pid
    tree = http.engine._tree
    assert tree is not None
    wait_until(lambda: len(tree.pids()) == 2, "there is an orphan")
    pids = tree.pids()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: http.engine.generation == 2, "a second engine")
    http.engine.wait_ready(DEADLINE_S)
    assert running(pids) == []
    assert http.engine.pid not in (0, first)
    (incident,) = http.incidents
    assert (incident.cause, incident.exit_status, incident.restart) == (Cause.EXITED, -9, 1)
    assert set(pids) <= set(incident.pids)
    assert (incident.survivors, incident.left_bytes) == ((), {})
    assert incident.dead_s is not None
    assert incident.free_s is not None
    assert incident.dead_s <= incident.free_s
    http.client.sleep()
    assert http.client.is_sleeping()


def test_a_server_that_ends_with_status_0_has_failed_too(http: HttpEngine) -> None:
    """vLLM's API server ends so when its engine core has died."""
    with pytest.raises(OSError):  # not by the control client, which would give the engine up by itself
        urllib.request.urlopen(f"{http.url}/do?what=end", data=b"", timeout=DEADLINE_S)
    wait_until(lambda: http.engine.generation == 2, "a second engine")
    http.engine.wait_ready(DEADLINE_S)
    (incident,) = http.incidents
    assert (incident.cause, incident.exit_status, incident.restart) == (Cause.EXITED, 0, 1)
    http.client.sleep()
    assert http.client.is_sleeping()


def test_a_command_without_a_health_check_is_done_when_it_ends_with_status_0() -> None:
    incidents: list[Incident] = []
    engine = SupervisedCommand(["true"], policy=FAST, used_bytes=no_devices, report=incidents.append)
    assert engine.run() == 0
    assert (engine.generation, incidents) == (1, [])


@pytest.mark.parametrize("url", ["localhost:8000/health", "http:///health", "/health", ""])
def test_what_is_no_url_is_refused_and_not_taken_for_an_engine_that_is_ill(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL such as"):
        SupervisedCommand(["true"], health=url)


def test_an_engine_without_healthy_answers_is_restarted(machine: SoftMachine) -> None:
    http = HttpEngine(machine, health_timeout_s=0.2)
    with http.engine:
        http.engine.wait_ready(DEADLINE_S)
        http.client.post("/do", {"what": "sick"})
        wait_until(lambda: http.engine.generation == 2, "a second engine")
        http.engine.wait_ready(DEADLINE_S)
        # A machine that is busy may have been slow to answer once more, which is no fault of the supervisor.
        assert {incident.cause for incident in http.incidents} == {Cause.UNHEALTHY}


def test_an_engine_that_does_not_come_up_is_given_up_after_the_limit(machine: SoftMachine) -> None:
    policy = RestartPolicy(max_restarts=1, backoff_s=0.01, start_s=0.2)
    http = HttpEngine(machine, health=lambda: False, policy=policy)
    with pytest.raises(RestartsExhaustedError, match="start"):
        http.engine.run()
    assert [(incident.cause, incident.restart) for incident in http.incidents] == [
        (Cause.START, 1),
        (Cause.START, None),
    ]
    with pytest.raises(RestartsExhaustedError):
        http.engine.wait_ready(0)


def test_the_wait_for_a_device_is_bounded_and_what_is_left_is_told(machine: SoftMachine) -> None:
    http = HttpEngine(machine, policy=RestartPolicy(backoff_s=0.01, free_s=0.1, free_slack_bytes=0))
    with http.engine:
        http.engine.wait_ready(DEADLINE_S)
        machine.take(CONTEXT_BYTES + 4096)  # somebody else, after the first reading
        incident = http.engine.fail("a test")
    assert incident.free_s is None
    assert incident.left_bytes == {"SOFT-0": CONTEXT_BYTES + 4096}
    assert incident.restart == 1


def test_a_stop_while_the_device_is_waited_for_ends_it_and_promises_no_restart(machine: SoftMachine) -> None:
    policy = RestartPolicy(backoff_s=0.01, free_s=10 * DEADLINE_S, free_slack_bytes=0)
    http = HttpEngine(machine, policy=policy)
    done = in_thread(http.engine.run)
    http.engine.wait_ready(DEADLINE_S)
    machine.take(CONTEXT_BYTES + 4096)  # somebody else, who stays
    os.kill(http.engine.pid, signal.SIGKILL)
    wait_until(lambda: http.engine.pid == 0, "the engine was lost")
    http.engine.stop()
    assert done.result(DEADLINE_S) is None
    assert (http.engine.generation, http.engine.restarts) == (1, 0)
    (incident,) = http.incidents
    assert (incident.cause, incident.restart, incident.backoff_s) == (Cause.EXITED, None, None)
    assert incident.free_s is None


def test_every_failure_is_reported_and_after_the_limit_nothing_is_started_again() -> None:
    incidents: list[Incident] = []
    engine = SupervisedCommand(["sh", "-c", "exit 3"], policy=FAST, used_bytes=no_devices, report=incidents.append)
    with pytest.raises(RestartsExhaustedError, match="status 3") as caught:
        engine.run()
    assert caught.value.incident == incidents[-1]
    assert [incident.restart for incident in incidents] == [1, 2, 3, None]
    assert [incident.backoff_s for incident in incidents] == [0.01, 0.02, 0.02, None]
    assert {incident.exit_status for incident in incidents} == {3}
    assert all(running(incident.pids) == [] for incident in incidents)


def test_a_report_that_fails_does_not_keep_the_engine_down(capsys: pytest.CaptureFixture[str]) -> None:
    def report(incident: Incident) -> None:
        raise OSError("disk full")

    policy = RestartPolicy(max_restarts=1, backoff_s=0.01)
    engine = SupervisedCommand(["false"], policy=policy, used_bytes=no_devices, report=report)
    with pytest.raises(RestartsExhaustedError):
        engine.run()
    assert capsys.readouterr().err.count("disk full") == 2


def test_stopping_a_supervised_command_ends_it_and_run_returns() -> None:
    engine = SupervisedCommand(["sleep", "1000"], policy=FAST, used_bytes=no_devices)
    done = in_thread(engine.run)
    engine.wait_ready(DEADLINE_S)
    pid = engine.pid
    engine.stop()
    assert done.result(DEADLINE_S) is None
    assert running([pid]) == []
    with pytest.raises(InvalidRequestError):
        engine.fail("too late")


# ---------------------------------------------------------------------------------------------- control calls


def test_a_control_call_that_hangs_is_sent_once_and_the_engine_restarted(http: HttpEngine) -> None:
    first = http.engine.pid
    with pytest.raises(EngineRestarted, match="outcome is unknown") as caught:
        http.client.post("/do", {"what": "hang"}, timeout_s=0.3)
    assert caught.value.incident.cause is Cause.TIMEOUT
    assert len(http.asked("/do")) == 1
    assert running([first]) == []
    http.client.wake_up()  # the new one serves
    assert [entry["pid"] for entry in http.asked("/wake_up")] == [http.engine.pid]


def test_an_answer_that_trickles_does_not_outwit_the_timeout(http: HttpEngine) -> None:
    with pytest.raises(EngineRestarted):
        http.client.post("/trickle", timeout_s=0.5)


def test_an_engine_that_dies_during_a_control_call_leaves_it_unknown(http: HttpEngine) -> None:
    with pytest.raises(EngineRestarted):
        http.client.post("/do", {"what": "exit"})
    assert len(http.asked("/do")) == 1
    assert len(http.incidents) == 1


def test_an_error_is_an_answer_and_the_engine_stays(http: HttpEngine) -> None:
    first = http.engine.pid
    with pytest.raises(ControlCallError, match="unharmed") as caught:
        http.client.post("/do", {"what": "refuse"})
    assert caught.value.status == 500
    with pytest.raises(ControlCallError, match="unknown tag") as caught:
        http.client.wake_up(["nonsense"])
    assert caught.value.status == 400
    assert http.engine.pid == first
    assert http.incidents == []


def test_an_error_of_an_engine_that_is_not_healthy_any_more_restarts_it(http: HttpEngine) -> None:
    with pytest.raises(EngineRestarted, match="engine dead") as caught:
        http.client.post("/do", {"what": "break"})
    assert caught.value.incident.cause is Cause.FATAL


def test_without_a_supervisor_a_client_never_asks_again_after_an_unknown_outcome(http: HttpEngine) -> None:
    client = ControlClient(http.url)
    with pytest.raises(OutcomeUnknownError):
        client.post("/do", {"what": "hang"}, timeout_s=0.3)
    with pytest.raises(OutcomeUnknownError) as again:
        client.wake_up()
    assert isinstance(again.value, TimeoutError)
    assert len(http.asked("/do")) == 1
    assert http.asked("/wake_up") == []


def test_a_call_to_nobody_was_not_sent_and_has_no_unknown_outcome() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = ControlClient(f"http://127.0.0.1:{free.getsockname()[1]}")
        for _ in range(2):
            with pytest.raises(ControlCallError, match="not sent") as caught:
                client.sleep()
            assert caught.value.status is None


# ---------------------------------------------------------------------------------------------- a factory


@pytest.fixture
def plain() -> Iterator[Supervised[Plain]]:
    with Supervised(Plain, policy=FAST, used_bytes=no_devices, report=lambda _: None) as made:
        yield made


def test_a_factory_that_raises_leaves_no_engine_to_be_unharmed() -> None:
    with pytest.raises(EngineCallError, match=r"ZeroDivisionError.*There is no engine yet\."):
        Supervised(lambda: 1 // 0)


def count(engine: Supervised[Plain]) -> int:
    """Calls that the present engine has counted: 1 for a new one."""
    return engine.call(lambda plain: plain.count(), DEADLINE_S)


def test_what_the_engine_raises_reaches_the_caller_and_the_engine_stays(plain: Supervised[Plain]) -> None:
    assert [count(plain), count(plain)] == [1, 2]
    with pytest.raises(RefusedError, match="not now") as refused:
        plain.call(lambda engine: engine.refuse(), DEADLINE_S)
    assert (type(refused.value), refused.value.rank, refused.value.story) == (RefusedError, 3, ("a", "b"))
    with pytest.raises(EngineCallError, match="KeyError") as caught:
        plain.call(lambda engine: engine.stumble(), DEADLINE_S)
    assert "stumble" in (caught.value.traceback_text or "")
    with pytest.raises(ResultTypeError, match="Plain"):
        plain.call(lambda engine: engine, DEADLINE_S)
    assert count(plain) == 3
    assert plain.incidents == ()


@pytest.mark.parametrize(
    ("function", "timeout_s", "cause"),
    [
        (lambda engine: engine.fail(), DEADLINE_S, Cause.FATAL),
        (lambda _: os._exit(9), DEADLINE_S, Cause.EXITED),
        (lambda engine: engine.hang(), 0.2, Cause.TIMEOUT),
        (stop_myself, 0.5, Cause.TIMEOUT),
    ],
    ids=["fails for good", "exits", "hangs", "is stopped"],
)
def test_a_lost_engine_is_replaced_and_the_caller_told(
    plain: Supervised[Plain], function: Callable[[Plain], None], timeout_s: float, cause: Cause
) -> None:
    assert count(plain) == 1
    first = plain.pid
    with pytest.raises(EngineRestarted) as caught:
        plain.call(function, timeout_s)
    incident = caught.value.incident
    assert (incident.cause, incident.restart, incident.survivors) == (cause, 1, ())
    assert first in incident.pids
    assert running([first]) == []
    assert (count(plain), plain.generation, plain.restarts) == (1, 2, 1)


def test_an_interrupted_call_leaves_an_engine_that_is_not_asked_again(plain: Supervised[Plain]) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: plain._exchange is not None and not plain._exchange.done(), "the call is on its way")
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        plain.call(lambda engine: engine.hang(), DEADLINE_S)
    interrupter.result(DEADLINE_S)
    with pytest.raises(EngineRestarted, match="interrupted"):
        count(plain)
    assert count(plain) == 1


def test_a_forked_child_can_neither_use_nor_end_the_engine(plain: Supervised[Plain]) -> None:
    child = os.fork()
    if child == 0:
        try:
            plain.call(lambda engine: engine.count(), 1)
        except ForkedError:
            plain.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert count(plain) == 1


def test_dropping_a_supervised_engine_ends_it() -> None:
    engine = Supervised(Plain, policy=FAST, used_bytes=no_devices)
    pid = engine.pid
    del engine
    gc.collect()
    assert running([pid]) == []


def test_a_factory_that_can_never_work_is_an_error_at_once_and_leaves_nothing() -> None:
    def fail() -> Plain:
        raise ConfigError("no such thing", problems=("a", "b"))

    incidents: list[Incident] = []
    with pytest.raises(ConfigError, match="no such thing") as caught:
        Supervised(fail, policy=FAST, used_bytes=no_devices, report=incidents.append)
    assert caught.value.problems == ("a", "b")
    assert incidents == []


def test_a_start_that_fails_is_tried_again_up_to_the_limit(tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("1")
    incidents: list[Incident] = []
    policy = RestartPolicy(max_restarts=1, backoff_s=0.01)
    with Supervised(
        lambda: fail_to_start(times), policy=policy, used_bytes=no_devices, report=incidents.append
    ) as engine:
        assert [(incident.cause, incident.restart) for incident in incidents] == [(Cause.START, 1)]
        with pytest.raises(RestartsExhaustedError):
            engine.call(lambda plain: plain.fail(), DEADLINE_S)
        with pytest.raises(RestartsExhaustedError) as later:
            count(engine)
        assert later.value.incident == incidents[-1]
        assert engine.pid == 0


def test_an_executor_comes_back_whoever_of_it_was_killed(machine: SoftMachine) -> None:
    """A worker awake, the helper and then the engine's own process asleep."""
    options = machine.options()

    def make() -> Any:
        from checkpoint_executor import CUDACheckpointExecutor

        return CUDACheckpointExecutor("tests.support.executor_workers:RawWorker", 1, **options)

    with Supervised(make, policy=FAST, used_bytes=soft_used_bytes(machine.root), report=lambda _: None) as engine:
        for target, asleep in (("worker 0", False), ("helper", True), ("engine", True)):
            pids = {**engine.call(lambda executor: executor.pids, DEADLINE_S), "engine": engine.pid}
            if asleep:
                report = engine.call(lambda executor: executor.sleep(), DEADLINE_S)
                assert isinstance(report, CycleReport)
                assert report.device_bytes_after == (0,)
                with pytest.raises(AsleepError):
                    engine.call(read_weights, DEADLINE_S)
            os.kill(pids[target], signal.SIGKILL)
            wait_until(lambda gone=pids[target]: running([gone]) == [], f"{target} is dead")  # type: ignore[misc]
            # Awake, a wake would be a no-op that needs no worker.
            with pytest.raises(EngineRestarted) as caught:
                engine.call(wake if asleep else read_weights, DEADLINE_S)
            assert running(pids.values()) == []
            assert caught.value.incident.left_bytes == {}
            assert caught.value.incident.free_s is not None
        assert engine.restarts == 3
        assert engine.call(read_weights, DEADLINE_S) == [pattern(0)]


# ---------------------------------------------------------------------------------------------- the script


def script(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "scripts" / "restart_on_failure.py"), "--device", "none", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_script_restarts_until_the_command_succeeds(tmp_path: Path) -> None:
    incidents, flag = tmp_path / "incidents", tmp_path / "flag"
    command = ["sh", "-c", f"test -e {flag} || {{ touch {flag}; exit 4; }}; echo done"]
    with script("--backoff-s", "0.01", "--incidents", str(incidents), "--", *command) as process:
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output, errors) == (0, "done\n", "")
    (line,) = incidents.read_text().splitlines()
    assert (json.loads(line)["exit_status"], json.loads(line)["restart"]) == (4, 1)


def test_the_script_says_by_its_status_how_it_ended() -> None:
    for arguments, status, text in (
        (("--max-restarts", "0", "--", "false"), 1, "status 1"),
        (("--", "/no/such"), 2, "No such file"),
        (("--gpus", "0", "--", "true"), 2, "--gpus cannot be used with --device none"),
        (("--soft-root", "x", "--", "true"), 2, "--soft-root cannot be used with --device none"),
        (("--device", "auto", "--gpus", "0", "--soft-root", "x", "--", "true"), 2, "name one"),
    ):
        with script(*arguments) as process:
            assert text in process.communicate(timeout=DEADLINE_S)[1]
            assert process.returncode == status
    with script("--", "sh", "-c", "echo up; sleep 1000") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
