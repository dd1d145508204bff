"""The arms of ``scripts/bench_cycle.py``: refusals and their reasons, order, figures, options, and vLLM's engines."""

from __future__ import annotations

import argparse
import io
import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from rich.console import Console

from checkpoint_executor.driver_states import ProcessState
from scripts import bench_cycle, gpu_vllm
from scripts.benchmarking import comparison, vllm_launch
from scripts.benchmarking.arms import ARMS, FRONT_DOORS, Arm, Spec, order, plan, summarise
from scripts.benchmarking.machine import visible_gpus
from scripts.benchmarking.verbs import DriverAlone
from tests.support import recorded_runs as runs

MIB = 1 << 20


def spec(**fields: Any) -> Spec:
    given = {"front_door": "vllm", "arm": "all", "communication": "suspend", "device": "cuda", "ranks": 1, "cycles": 2}
    return Spec(**{**given, "model": "0.6b", "kv_bytes": 5 << 30, **fields})


# -- what is measured, and how -------------------------------------------------------------------


@pytest.mark.parametrize("front_door", FRONT_DOORS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_driver_alone_never_meets_live_peer_memory(front_door: str, ranks: int) -> None:
    for communication in ("suspend", "socket"):
        driver = plan("driver", front_door, ranks, communication)
        if ranks > 1 and not driver.refused:
            assert driver.communication == "socket"
        if ranks > 1 and communication == "suspend":
            assert "every restore fails for ever" in driver.note + driver.refused
    assert bool(plan("driver", front_door, ranks).refused) is (front_door == "vllm" and ranks > 1)


def test_a_suspension_of_nothing_is_refused() -> None:
    for front_door in FRONT_DOORS:
        assert plan("allocator+nccl", front_door, 1).refused == "one rank has no communicator to suspend"
        assert not plan("allocator+nccl", front_door, 2).refused
    assert "nothing to suspend" in plan("allocator+nccl", "own", 2, "socket").refused


@pytest.mark.parametrize("front_door", FRONT_DOORS)
def test_the_other_arms_are_never_refused(front_door: str) -> None:
    assert not any(
        plan(name, front_door, ranks).refused for ranks in (1, 4) for name in ("nothing", "allocator", "all")
    )


def test_an_arm_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no arm 'some'"):
        plan("some", "own", 1)


def test_rounds_go_forwards_and_backwards_and_leave_out_what_is_refused() -> None:
    arms = [Arm("nothing"), Arm("driver", refused="no"), Arm("all")]
    names = [(number, [arm.name for arm in chosen]) for number, chosen in order(arms, 3)]
    assert names == [(1, ["nothing", "all"]), (2, ["all", "nothing"]), (3, ["nothing", "all"])]


def test_the_verbs_stop_where_a_state_is_not_what_it_should_be() -> None:
    class Liar:
        """Every verb succeeds and nothing happens."""

        def lock(self, target: object, timeout_ms: int) -> None: ...

        def get_state(self, target: object) -> str:
            return "running"

    class Target:
        rank = 3

    verbs = DriverAlone(Liar(), [Target()])  # type: ignore[arg-type,list-item]
    with pytest.raises(RuntimeError, match="rank 3 is running, not locked"):
        verbs.down()


# -- figures -------------------------------------------------------------------------------------


def test_figures_are_medians_and_ranges_over_all_launches() -> None:
    launches = runs.arms()["launches"]
    found = summarise("allocator", launches)
    assert (found.launches, found.cycles, found.identical) == (2, 6, True)
    assert found.first_down_s == (1.0, 1.0, 1.0)
    assert found.down_s == (2.0, 1.0, 3.0)
    assert found.left_bytes == (898 * MIB, 899 * MIB)
    assert found.taken_bytes == (1 << 30,) * 3
    assert found.of_plain_down is not None
    assert found.of_plain_down[0] == pytest.approx(0.8)
    assert found.of_plain_up == (1.0, 1.0, 1.0)


def test_an_arm_without_a_cycle_has_no_figures() -> None:
    launches = runs.arms()["launches"]
    launches[0]["cycles"], launches[0]["completed"] = [], False
    assert summarise("allocator", launches[:2]) == msgspec.convert(
        {"arm": "allocator", "launches": 0, "cycles": 0}, type(summarise("allocator", []))
    )


def test_copies_are_compared_with_plain_ones_only_where_those_were_measured() -> None:
    launches = runs.arms()["launches"]
    for launch in launches:
        launch["plain_copy_gb_s"] = [{}, {}]
    found = summarise("all", launches)
    assert found.copy_down_gb_s == (44.0, 44.0, 44.0)
    assert found.of_plain_down is None


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(comparison.table(document), *comparison.notes(document))
    return out.getvalue()


def test_the_table_has_a_row_for_every_arm_and_reasons_for_those_that_are_not_measured() -> None:
    text = shown(runs.arms())
    assert "own workers, TP=2, 16.0 GiB of weights a rank" in text
    assert "refused: no" in text
    assert "44.0 (80%) / 55.0 (100%)" in text
    assert "898 / 899" in text
    assert comparison.good(runs.arms())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda launch: launch.update(completed=False, how="failed", error="MemoryError: no"),
            "failed: MemoryError: no",
        ),
        (lambda launch: launch.update(left_processes=[7]), "processes are left: [7]"),
        (lambda launch: launch["cycles"][0].update(identical=False), "NO"),
    ],
)
def test_what_went_wrong_is_said_and_fails_the_run(spoil: Any, said: str) -> None:
    document = runs.arms()
    spoil(document["launches"][1])
    assert said in shown(document)
    assert not comparison.good(document)


def test_the_file_is_whole_after_every_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "arms.json"
    header = {name: value for name, value in runs.arms().items() if name != "launches"}
    journal = comparison.Journal(path, header)
    assert json.loads(path.read_text())["launches"] == []
    journal.launch(**runs.arms()["launches"][0])
    journal.write()
    document = json.loads(path.read_text())
    assert [summary["cycles"] for summary in document["summaries"]] == [3, 0]
    assert [each.name for each in path.parent.iterdir()] == ["arms.json"]


# -- options -------------------------------------------------------------------------------------


def parse(text: str) -> argparse.Namespace:
    return bench_cycle.parse(text.split())


def refusal(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(text)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_without_arms_it_is_the_executors_own_part_as_ever() -> None:
    options = parse("--device soft --ranks 1,2,4")
    assert (options.arms, options.device, options.ranks, options.cycles, options.starts) == (
        None,
        "soft",
        (1, 2, 4),
        100,
        3,
    )
    assert parse("").ranks == (1, 2, 4, 8, 16, 32)


def test_arms_have_defaults_of_their_own() -> None:
    options = parse("--arms all,nothing,all --out arms.json")
    assert (options.arms, options.front_door, options.device) == (("all", "nothing"), "own", "auto")
    assert (options.cycles, options.launches, options.gib, options.keep_weights) == (4, 2, None, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--launches 2", "--launches cannot be used without --arms"),
        ("--arms all --out x --ranks 2 --json y", "--ranks, --json cannot be used with --arms"),
        ("--arms everything --out x", "no arm 'everything'; they are nothing, allocator"),
        ("--arms all", "--arms needs --out"),
        ("--arms all --out x --launches 0", "must be at least 1"),
        ("--arms all --out x --model 8b", "--model is of vLLM's arms"),
        ("--device auto", "--device auto is of --arms"),
        ("--arms all --out x --front-door vllm --device soft", "vLLM's arms need a GPU"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(text, capsys)


def test_vllms_arms_need_a_gpu_and_no_options_of_our_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_cycle, "detect_device_kind", lambda: "soft")
    assert "vLLM's arms need a GPU" in refusal("--arms all --out x --front-door vllm", capsys)
    monkeypatch.setattr(bench_cycle, "detect_device_kind", lambda: "cuda")
    assert "are of our own workers" in refusal("--arms all --out x --front-door vllm --gib 8", capsys)
    options = parse("--arms all --out x --front-door vllm --together")
    assert (options.model, options.together, options.device) == ("0.6b", True, "auto")


# -- vLLM's engines ------------------------------------------------------------------------------


def llm_options(**fields: Any) -> dict[str, Any]:
    """What ``LLM`` would get."""
    given = spec(**fields)
    return gpu_vllm.engine_options(vllm_launch.part_of(given), **vllm_launch.engine_options(given))


def test_only_the_last_arm_is_run_by_our_executor(tmp_path: Path) -> None:
    for arm in ARMS:
        options = llm_options(arm=arm, ranks=2)
        environ = vllm_launch.environment(spec(arm=arm, ranks=2, folder=str(tmp_path)))
        ours = arm == "all"
        assert options["distributed_executor_backend"] == (gpu_vllm.EXECUTOR if ours else "mp")
        assert ("CHECKPOINT_EXECUTOR_LOG" in environ) is ours
        assert ("CHECKPOINT_EXECUTOR_HOST_ARENA" in environ) is ours
        assert options["kv_cache_memory_bytes"] == 5 << 30


def test_what_is_to_be_put_to_sleep_by_nobody_or_by_the_driver_alone_has_no_sleep_mode() -> None:
    assert {arm: llm_options(arm=arm)["enable_sleep_mode"] for arm in ARMS} == {
        "nothing": False,
        "allocator": True,
        "allocator+nccl": True,
        "driver": False,
        "all": True,
    }


def test_nccl_is_suspended_in_two_arms_and_in_our_communication_settings(tmp_path: Path) -> None:
    for arm in ARMS:
        options = llm_options(arm=arm, ranks=2)
        environ = vllm_launch.environment(spec(arm=arm, ranks=2, folder=str(tmp_path), nccl="/lib/nccl"))
        suspends = arm in ("allocator+nccl", "all")
        assert options.get("enable_nccl_comm_suspend", False) is suspends
        assert options["disable_custom_all_reduce"] is suspends
        assert (gpu_vllm.SUSPEND.items() <= environ.items()) is suspends
        assert environ["LD_PRELOAD"] == environ["VLLM_NCCL_SO_PATH"] == "/lib/nccl"


def test_multicast_is_off_in_every_arm(tmp_path: Path) -> None:
    for arm in ARMS:
        environ = vllm_launch.environment(spec(arm=arm, ranks=2, folder=str(tmp_path)))
        assert (environ["NCCL_NVLS_ENABLE"], environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")


def test_arms_that_start_together_do_not_share_what_is_compiled_and_launches_of_one_arm_do(tmp_path: Path) -> None:
    roots = [vllm_launch.environment(spec(arm=arm, folder=str(tmp_path)))["VLLM_CACHE_ROOT"] for arm in ARMS * 2]
    assert len(set(roots)) == len(ARMS)
    assert roots[: len(ARMS)] == roots[len(ARMS) :]


class FakeEngine:
    """An engine of 1,000 bytes of weights on each of two ranks."""

    #: The weights at each sleep, of all engines.
    slept_with: ClassVar[list[list[str]]] = []

    def __init__(self, part: gpu_vllm.Part, record: Any, *, wait_turn: Any, **more: Any) -> None:
        self.llm = self.llm_engine = self
        self.calls: list[str] = []
        self.sign = 1
        record(start_s=1.0, up=True)
        wait_turn()
        self.ranks = part.ranks
        self.tokens = [[number] for number in range(30)]

    def collective_rpc(self, function: Any) -> list[Any]:
        answers = {"worker_pid": 1, "parameter_bytes": 1000, "plain_copy": {"d2h": 2.0, "h2d": 2.0}}
        self.calls.append(function.__name__)
        if function is gpu_vllm.negate_parameters:
            self.sign = -self.sign
        return [answers.get(function.__name__)] * self.ranks

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.slept_with.append(self.fingerprints())

    def wake_up(self) -> None:
        self.calls.append("wake_up")

    def is_sleeping(self) -> bool:
        return self.calls[-1] == "sleep 1"

    def outputs(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "logprobs": [self.sign]}

    def fingerprints(self) -> list[str]:
        return [f"sign {self.sign}"] * self.ranks

    def first_request_s(self) -> float:
        return 0.25


class Listener:
    """What a launch tells."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.cycles: list[dict[str, Any]] = []
        self.turns = 0

    def __call__(self, **facts: Any) -> None:
        self.facts |= facts

    def cycle(self, **figures: Any) -> None:
        self.cycles.append(figures)

    def wait_turn(self) -> None:
        assert self.facts["up"]
        self.turns += 1


class FakeDriver:
    """Verbs that take no time to speak of, and do what they are to do."""

    def __init__(self) -> None:
        self.state = ProcessState.RUNNING

    def lock(self, target: object, timeout_ms: int) -> None:
        self.state = ProcessState.LOCKED

    def checkpoint(self, target: object) -> None:
        self.state = ProcessState.CHECKPOINTED

    def restore(self, target: object) -> None:
        self.state = ProcessState.LOCKED

    def unlock(self, target: object) -> None:
        self.state = ProcessState.RUNNING

    def get_state(self, target: object) -> ProcessState:
        return self.state


@pytest.fixture
def engine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "slept_with", [])
    readings = itertools.cycle([[3000, 3000], [1000, 1000]])  # awake, asleep
    monkeypatch.delenv("CHECKPOINT_EXECUTOR_LOG", raising=False)
    monkeypatch.setattr(gpu_vllm, "Engine", FakeEngine)
    monkeypatch.setattr(vllm_launch, "used_bytes", lambda device, root, ranks: next(readings)[:ranks])
    monkeypatch.setattr(vllm_launch, "rss_bytes", lambda pid: 7)
    monkeypatch.setattr(vllm_launch, "open_driver", lambda device, root: FakeDriver())
    monkeypatch.setattr(vllm_launch, "target_of", lambda rank, pid: None)


@pytest.mark.usefixtures("engine_without_gpu")
@pytest.mark.parametrize(
    ("arm", "ranks", "state", "rates"),
    [
        ("nothing", 2, "awake", 0),
        ("allocator", 2, "asleep", 2),
        ("allocator+nccl", 2, "asleep", 2),
        ("driver", 1, "checkpointed", 1),
        ("all", 2, "checkpointed", 2),
    ],
)
def test_a_launch_of_vllm_tells_each_cycle(arm: str, ranks: int, state: str, rates: int) -> None:
    told = Listener()
    vllm_launch.run(spec(arm=arm, ranks=ranks), told)  # type: ignore[arg-type]
    assert told.turns == 1
    assert told.facts["plain_copy_gb_s"] == [{"d2h": 2.0, "h2d": 2.0}] * ranks
    assert told.facts["same_before_any_sleep"]
    assert [cycle["number"] for cycle in told.cycles] == [0, 1]
    for cycle in told.cycles:
        assert cycle["states"] == [state] * ranks
        assert cycle["used_asleep_bytes"] == [1000] * ranks
        assert cycle["rss_asleep_bytes"] == [7] * ranks
        assert cycle["identical"]
        assert len(cycle.get("copy_down_gb_s", ())) == len(cycle.get("copy_up_gb_s", ())) == rates
    launch = {"arm": arm, "completed": True, "empty_bytes": [0] * ranks, "cycles": told.cycles, **told.facts}
    assert summarise(arm, [launch]).left_bytes == (1000,) * ranks


@pytest.mark.usefixtures("engine_without_gpu")
@pytest.mark.parametrize(("keep", "signs"), [(False, [-1, 1, -1, 1]), (True, [1, 1, 1, 1])])
def test_every_sleep_of_vllm_finds_other_weights_than_the_one_before_unless_they_are_kept(
    keep: bool, signs: list[int]
) -> None:
    told = Listener()
    vllm_launch.run(spec(arm="all", cycles=4, keep_weights=keep), told)  # type: ignore[arg-type]
    assert FakeEngine.slept_with == [[f"sign {sign}"] for sign in signs]
    assert all(cycle["identical"] for cycle in told.cycles)
    assert [cycle["weights_changed"] for cycle in told.cycles] == [not keep] * 4
    # A sleep that copied nothing has no rate.
    assert [bool(cycle["copy_down_gb_s"]) for cycle in told.cycles] == [not keep] * 4


@pytest.mark.usefixtures("engine_without_gpu")
def test_what_our_executor_copies_is_timed_by_its_own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    stages = {"sleep": [0.5, 0.25], "wake": [1.0, 2.0]}
    lines = [
        {"operation": name, "stages": [{"name": f"worker_{name}", "wall_s": 9.0, "ranks": seconds}]}
        for name, seconds in stages.items()
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setenv("CHECKPOINT_EXECUTOR_LOG", str(log))
    told = Listener()
    vllm_launch.run(spec(arm="all", ranks=2), told)  # type: ignore[arg-type]
    assert told.cycles[0]["copy_down_gb_s"] == pytest.approx([2e-6, 4e-6])
    assert told.cycles[0]["copy_up_gb_s"] == pytest.approx([1e-6, 0.5e-6])


@pytest.mark.usefixtures("engine_without_gpu")
def test_equal_answers_that_would_prove_nothing_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "outputs", lambda self: {"tokens": [[7]] * 30, "logprobs": []})
    with pytest.raises(RuntimeError, match="1 distinct tokens"):
        vllm_launch.run(spec(arm="all"), Listener())  # type: ignore[arg-type]


@pytest.mark.usefixtures("engine_without_gpu")
def test_the_driver_alone_refuses_several_ranks_of_vllm_whoever_asks() -> None:
    with pytest.raises(ValueError, match="would fail for ever"):
        vllm_launch.run(spec(arm="driver", ranks=2), Listener())  # type: ignore[arg-type]


class FakeNvml:
    """Handles that say how they were found."""

    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: f"index {index}")  # noqa: N815 - NVML's names
    nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: f"uuid {uuid}")  # noqa: N815


@pytest.mark.parametrize(
    ("visible", "count", "handles"),
    [
        (None, 2, ["index 0", "index 1"]),
        ("", 1, ["index 0"]),
        ("1", 1, ["index 1"]),
        ("3, 2 ,0", 2, ["index 3", "index 2"]),
        ("GPU-aa,1", 2, ["uuid GPU-aa", "index 1"]),
    ],
)
def test_nvml_is_asked_about_the_gpus_that_cuda_shows(
    visible: str | None, count: int, handles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(FakeNvml, count) == handles


def test_fewer_gpus_than_ranks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ValueError, match=r"shows 1 GPU\(s\), and 2 are wanted"):
        visible_gpus(FakeNvml, 2)
