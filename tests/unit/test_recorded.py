"""Reading recorded runs: every kind is told from its content, and what is broken is refused with its place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import ConfigError, FatalError, recorded
from checkpoint_executor.recorded import Run, UnreadableRunError
from checkpoint_executor.status import CycleLog
from tests.support import recorded_runs as runs

_MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
MIB, GIB = 1 << 20, 1 << 30

MAKERS: dict[str, Callable[[], Any]] = {
    "attribution": runs.attribution,
    "soak": runs.soak,
    "arms": runs.arms,
    "demo": runs.demo,
    "bench_gpu table": runs.table,
    "bench_gpu ways": runs.ways,
    "gpu_vllm": runs.part,
    "cycle log": runs.log,
}
every_kind = pytest.mark.parametrize("kind", MAKERS)


def read(document: Any, source: str = "run.json") -> Run:
    return recorded.read(source, json.dumps(document).encode())


def problem(data: bytes) -> str:
    with pytest.raises(UnreadableRunError) as caught:
        recorded.read("folder/run.json", data)
    text = str(caught.value)
    assert text.startswith("folder/run.json: ")
    return text


# -- each kind -----------------------------------------------------------------------------------


@every_kind
def test_a_kind_is_told_from_the_content(kind: str) -> None:
    run = read(MAKERS[kind]())
    assert (run.kind, run.source) == (kind, "run.json")
    assert run.name


def test_a_demo_is_read_with_its_stages_and_what_its_check_rested_on() -> None:
    run = read(runs.demo())
    assert (run.ranks, run.device, run.machine, run.good) == (2, "NVIDIA GPU", "NVIDIA H200", True)
    assert (run.command, run.when) == ("cli.py demo", "2026-12-01T09:00:00Z")
    first, _, last = run.cycles
    assert [operation.name for operation in first.operations] == ["sleep", "wake"]
    assert [stage.name for stage in first.operations[0].stages] == ["sleep_allocator", "lock", "checkpoint"]
    assert first.operations[0].stages[2].ranks == pytest.approx((0.63, 0.665))
    assert (first.partial, last.partial) == (False, True)
    # Beyond what empty devices have.
    assert first.asleep_bytes == (4 * MIB, 4 * MIB)
    assert ("bits of all logits, SHA-256", "the same in 3 of 3") in run.evidence
    assert ("distinct tokens among those compared", "at least 80") in run.evidence


def test_a_failed_demo_says_why() -> None:
    run = read({**runs.demo(), "passed": False, "problems": ["it broke"], "left_behind": ["pid 7"]})
    assert (run.good, run.verdict, run.remarks) == (False, "FAILED; it broke", ("left behind: pid 7",))


def test_a_table_sums_the_calls_of_a_wake_by_tag() -> None:
    run = read(runs.table())
    assert [cycle.wake_s for cycle in run.cycles] == [0.5, 1.0, 0.5]
    assert [cycle.partial for cycle in run.cycles] == [False, True, False]
    assert [operation.name for operation in run.cycles[1].operations] == ["sleep", "wake, 1 of 2", "wake, 2 of 2"]
    assert run.cycles[2].note == "weights changed before it"
    assert run.machine.startswith("2 x NVIDIA H200, 580.159.04")
    assert "d2h 55.0 GB/s" in run.remarks[0]


@pytest.mark.parametrize(
    ("options", "device"),
    [([], "CUDA"), (["--device", "soft"], "software device"), (["--device=soft"], "software device")],
)
def test_a_benchmark_says_its_device_in_its_command(options: list[str], device: str) -> None:
    assert read({**runs.table(), "command": ["bench_gpu.py", *options]}).device == device


def test_ways_are_read() -> None:
    run = read(runs.ways())
    assert [(way.way, way.down_s) for way in run.ways] == [("both, first", 1.0), ("driver, first", 11.0)]


def test_arms_come_to_medians_and_ranges_over_their_launches() -> None:
    run = read(runs.arms())
    assert run.name == "Arms, own workers, TP=2, 16.0 GiB of weights a rank, CUDA"
    assert (run.good, run.verdict) == (True, "identical")
    assert [way.way for way in run.ways] == ["allocator", "all"]
    allocator, everything = run.ways
    assert (allocator.down_s, allocator.down_range_s) == (2.0, (1.0, 3.0))
    assert (allocator.up_s, allocator.up_range_s) == (0.5, (0.5, 0.5))
    # Beyond an empty device, on the one that kept most.
    assert (allocator.left_above_empty_bytes, everything.left_above_empty_bytes) == (899 * MIB, 4 * MIB)
    assert allocator.rss_asleep_bytes - allocator.rss_before_bytes == GIB
    assert "driver was refused: no" in run.remarks
    assert ("launches that came to their end", "4 of 4") in run.evidence
    copies = "44.00 GB/s (80% of a plain copy) / 55.00 GB/s (100% of a plain copy)"
    assert ("copies of all, down / up, medians", copies) in run.evidence


def test_arms_beside_others_count_what_was_their_own() -> None:
    document = runs.arms()
    for launch in document["launches"]:
        launch |= {"together": True, "after_bytes": [4 * MIB, 4 * MIB]}
    assert [way.left_above_empty_bytes for way in read(document).ways] == [897 * MIB, 2 * MIB]


def test_an_arm_that_failed_is_no_good_news_and_says_why() -> None:
    document = runs.arms()
    document["launches"][0] |= {"completed": False, "how": "cut off after 9 s", "cycles": []}
    document["launches"][1]["left_processes"] = [77]
    run = read(document)
    assert (run.good, run.verdict) == (False, "a launch failed")
    assert ("launches that came to their end", "2 of 4") in run.evidence
    assert "allocator, launch 1: cut off after 9 s" in run.remarks
    assert "all, launch 1: processes were left: 77" in run.remarks


def test_arms_that_differ_once_are_not_identical() -> None:
    document = runs.arms()
    document["launches"][3]["cycles"][2]["identical"] = False
    run = read(document)
    assert (run.good, run.verdict) == (False, "NOT identical")
    assert [way.identical for way in run.ways] == [True, False]


def test_arms_that_are_still_measured_have_no_verdict() -> None:
    document = runs.arms()
    last = document["launches"][-1]
    del last["how"], last["cycles"][1:]
    last["completed"] = False
    run = read(document)
    assert (run.good, run.verdict) == (None, "not finished")
    assert read({**runs.arms(), "launches": []}).ways == ()


def test_a_part_of_vllm_takes_its_stages_from_the_log() -> None:
    run = read(runs.part())
    assert run.name == "vLLM 8b, TP=1, arena"
    assert run.machine == "NVIDIA H200, driver 580.159.04, vllm 0.33.0, torch 2.11.0"
    assert [cycle.asleep_bytes for cycle in run.cycles] == [(3 * MIB,), (3 * MIB,)]
    assert all(len(cycle.operations) == 2 for cycle in run.cycles)


def test_a_part_of_all_counts_what_was_its_own() -> None:
    own = {**runs.part(), "how": "exit 0", "seconds": 99.0, "mib_after": [3]}
    own |= {"tokens_per_s_before": [1000.0, 1010.0], "tokens_per_s_after": [990.0]}
    failed = {"how": "exit 1", "seconds": 3.0, "log_ends": "Traceback", "mib_after": "no NVML"}
    other = {"part": {"kind": "fail_worker"}, "how": "exit 0", "seconds": 9.0, "completed": True}
    other["summary"] = {"client": "EngineDeadError", "gone_s": 0.1}
    data = json.dumps({"ours-8b-tp1": own, "stock": failed, "fail-worker": other}).encode()
    first, second, third = recorded.read_all("all.json", data)
    assert (first.source, first.name) == ("all.json#ours-8b-tp1", "vLLM 8b, TP=1, arena")
    assert first.cycles[0].asleep_bytes == (MIB,)
    assert first.remarks == ("tokens/s, medians: 1,005 before any sleep, 990 after the last wake",)
    assert (second.name, second.good, second.verdict) == ("vLLM, stock", False, "no result: exit 1")
    assert second.remarks == ("the log ends: Traceback",)
    assert (third.good, third.evidence) == (None, (("client", "EngineDeadError"), ("gone_s", "0.1")))
    with pytest.raises(UnreadableRunError, match=r"all\.json: one run was expected, and it holds 3"):
        recorded.read("all.json", data)


def test_a_broken_part_of_all_is_called_by_its_name() -> None:
    own = {**runs.part(), "how": "exit 0", "seconds": 99.0}
    own["cycles"][1]["sleep_s"] = None
    with pytest.raises(UnreadableRunError, match=r"^all\.json#ours: .*cycles\[1\]\.sleep_s"):
        recorded.read_all("all.json", json.dumps({"ours": own}).encode())


def test_a_part_alone_says_what_it_cannot_know() -> None:
    assert "if other engines ran beside it" in read(runs.part()).remarks[0]


def test_a_part_whose_log_does_not_fit_is_shown_without_stages() -> None:
    run = read({**runs.part(), "log": runs.log(cycles=1)})
    assert all(not cycle.operations for cycle in run.cycles)
    assert "the log has another number of cycles than the run: its stages are not shown" in run.remarks


def test_a_part_that_was_cut_off_is_read_as_far_as_it_came() -> None:
    document = {name: value for name, value in runs.part().items() if name in ("part", "cycles", "gpus")}
    run = read(document)
    assert len(run.cycles) == 2
    assert run.remarks[0] == "the run was cut off: it has no mark of its end"


def test_a_part_whose_weights_changed_is_not_identical() -> None:
    run = read({**runs.part(), "same_checksums": False})
    assert (run.good, run.verdict) == (False, "NOT identical")


def test_a_cycle_log_is_json_lines_or_one_line() -> None:
    lines = "\n".join(map(json.dumps, runs.log())).encode()
    run = recorded.read("log.jsonl", lines)
    assert [(cycle.sleep_s, cycle.asleep_bytes) for cycle in run.cycles] == [(1.0, (3 * MIB,))] * 2
    # A sleep that nobody woke from is no cycle yet.
    assert recorded.read("log.jsonl", lines.splitlines()[0]).cycles == ()


def test_a_log_with_attribution_has_the_steps_of_each_cycle() -> None:
    def memory(step: str, used: int) -> dict[str, Any]:
        rank = {"rank": 0, "used_bytes": used, "empty_bytes": 0, "kinds": {"weights": used}, "host": {"rss": 1}}
        return {"step": step, "ranks": [rank]}

    entries = runs.log(cycles=2)
    for sleep, wake in (entries[:2], entries[2:]):
        sleep["memory"] = [memory("awake", 7), memory("checkpointed", 0)]
        wake["memory"] = [memory("woken", 7)]
    run = recorded.read("cycles.jsonl", "\n".join(map(json.dumps, entries)).encode())
    assert [cycle.number for cycle in run.attribution] == [1, 2]
    for cycle in run.attribution:
        assert [step.step for step in cycle.steps] == ["awake", "checkpointed", "woken"]
        assert [step.ranks[0].kinds["weights"] for step in cycle.steps] == [7, 0, 7]
        assert [step.ranks[0].missing_bytes for step in cycle.steps] == [0, 0, 0]
    assert read(runs.part()).attribution == ()


def test_a_log_may_hold_operations_that_were_refused_or_failed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = CycleLog(str(path))
    log.error("sleep", ConfigError("level 2 is not supported"))
    path.write_text(
        path.read_text() + "\n".join(json.dumps({**entry, "pid": os.getpid()}) for entry in runs.log()) + "\n"
    )
    log.error("wake", FatalError("lost"))
    run = recorded.read(path.name, path.read_bytes())
    assert [cycle.number for cycle in run.cycles] == [1, 2]
    assert run.remarks[-1] == "refused or failed, and not counted here: sleep: ConfigError (1), wake: FatalError (1)"


def test_a_log_of_several_executors_is_several_runs() -> None:
    """Two that share a file, whose sleeps and wakes alternate."""
    entries = [{**entry, "pid": pid} for entry in runs.log(cycles=2) for pid in (7, 8)]
    found = recorded.read_all("log.jsonl", "\n".join(map(json.dumps, entries)).encode())
    assert [run.source for run in found] == ["log.jsonl#pid 7", "log.jsonl#pid 8"]
    assert [[(cycle.wake_s, cycle.partial) for cycle in run.cycles] for run in found] == [[(1.0, False)] * 2] * 2


def test_a_log_skips_what_did_nothing_and_joins_a_wake_by_tag() -> None:
    sleep, wake = runs.log(cycles=1)
    idle = {**sleep, "performed": False}
    run = read([wake, sleep, idle, wake, wake, sleep, wake])
    assert [(cycle.partial, cycle.wake_s) for cycle in run.cycles] == [(True, 2.0), (False, 1.0)]


def test_an_attribution_keeps_every_kind_and_says_what_does_not_add_up() -> None:
    document = runs.attribution(remainder=-7 * MIB)
    document["cycles"][0]["steps"][0]["ranks"][1]["device_used_bytes"] += GIB
    run = read(document)
    first = run.attribution[0].steps[0].ranks
    assert first[0].kinds["remainder"] == -7 * MIB
    assert [memory.missing_bytes for memory in first] == [0, GIB]
    assert first[0].host["backup_arena"] == 2 * GIB
    text = "\n".join(run.remarks)
    assert "cycle 0, awake, rank 1: the kinds add up to" in text
    assert "cycle 0, awake, rank 0: the remainder is negative (-7.00 MiB)" in text


def test_a_soak_is_read_with_its_slopes() -> None:
    run = read(runs.soak())
    assert (run.good, run.verdict, len(run.iterations)) == (True, "passed", 4)
    assert run.slopes["rss parent"].per_100 == 9e6
    assert [cycle.partial for cycle in run.cycles] == [False, True, False, True]
    assert run.cycles[0].note == "another process held 100 GiB"
    assert ("requests that failed", "0 of 256") in run.evidence


def test_a_soak_that_still_runs_has_no_verdict() -> None:
    document = runs.soak()
    for name in ("slopes", "mismatches", "failed_requests", "ok"):
        del document[name]
    run = read(document)
    assert (run.good, run.verdict) == (None, "not finished")
    assert "cut off" in run.remarks[0]


def test_a_soak_is_read_as_it_is_written_while_it_runs() -> None:
    document = {name: value for name, value in runs.soak().items() if name not in ("slopes", "ok")}
    iterations = document.pop("iterations")
    run = recorded.read("soak.jsonl", "\n".join(map(json.dumps, [document, *iterations])).encode())
    assert (run.verdict, len(run.iterations)) == ("not finished", 4)


def test_an_iteration_that_an_error_stopped_is_remarked_and_not_counted() -> None:
    document = {**runs.soak(), "ok": False, "problems": ["it stopped"], "warm_up_iterations": 1}
    last = document["iterations"][-1]
    for name in ("wake_s", "probe_s", "rss_bytes", "open_files"):
        del last[name]
    last["stopped"] = "FatalError: gone"
    run = read(document)
    assert (run.verdict, len(run.iterations), len(run.cycles)) == ("FAILED; it stopped", 3, 3)
    assert run.remarks[0] == "stopped in iteration 3: FatalError: gone"
    assert ("probe prompts, bit for bit as in iteration 0", "the same in 3 of 3") in run.evidence
    # Its requests were sent all the same.
    assert ("requests that failed", "0 of 256") in run.evidence
    assert run.warm_up_iterations == 1


def test_a_soak_that_contradicts_itself_is_remarked() -> None:
    document = {**runs.soak(), "mismatches": 3, "failed_requests": 2}
    assert [remark.partition(",")[0] for remark in read(document).remarks] == [
        "the file counts 3 mismatches",
        "the file counts 2 failed requests",
    ]


#: Runs that are committed although something of them failed; docs/measurements says what.
_WENT_WRONG = {
    "2026-11-30-two-h200s/vllm/third/arms-vllm-0.6b-tp1.json",
    "2026-12-01-h200/arms/arms-own-16gib-tp1.json",
}


@pytest.mark.parametrize(
    "path",
    [
        *_MEASUREMENTS.rglob("table-*.json"),
        *_MEASUREMENTS.rglob("demo-*.json"),
        *_MEASUREMENTS.rglob("ways*.json"),
        *_MEASUREMENTS.rglob("arms*.json"),
        *_MEASUREMENTS.rglob("*.cycles.jsonl"),
    ],
    ids=lambda path: str(path.relative_to(_MEASUREMENTS)),
)
def test_what_is_committed_can_be_read(path: Path) -> None:
    run = recorded.read(path.name, path.read_bytes())
    assert run.cycles or run.ways
    assert (run.good is False) == (str(path.relative_to(_MEASUREMENTS)) in _WENT_WRONG)


# -- broken files --------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b" \n", b"not json", b"{", b"\xff\xfe", b'{"a":1}\n{"b"', b"[" * 100_000])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    text = problem(data)
    assert "Expected an attribution, a soak's JSON" in text


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "it is empty"),
        ({"mode": 1, "model": 2}, "its fields are mode, model."),
        ({"kind": "holiday"}, "its kind is 'holiday'"),
        ([], "it is a JSON list"),
        ([1, 2], "it is a JSON list"),
        (7, "it is a JSON int"),
        (None, "it is a JSON NoneType"),
    ],
)
def test_what_is_no_run_is_refused_with_what_was_expected(document: Any, said: str) -> None:
    text = problem(json.dumps(document).encode())
    assert said in text
    assert "Expected an attribution, a soak's JSON" in text


@every_kind
def test_a_file_that_ends_in_the_middle_is_refused(kind: str) -> None:
    data = json.dumps(MAKERS[kind]()).encode()
    assert "it is not JSON" in problem(data[: len(data) // 2])


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


@every_kind
def test_whatever_is_replaced_by_nonsense_the_file_is_read_or_refused(kind: str) -> None:
    refused = 0
    nonsense: Any
    for place in _places(MAKERS[kind]())[1:]:
        for nonsense in (None, "nonsense", [], {}, -1):
            document = MAKERS[kind]()
            holder = document
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = nonsense
            try:
                read(document)
            except UnreadableRunError:  # and nothing else
                refused += 1
    assert refused > 10


def test_a_broken_run_is_called_by_its_kind_and_place() -> None:
    document = runs.soak()
    document["iterations"][1]["sleep_s"] = "long"
    text = problem(json.dumps(document).encode())
    assert "it looks like a soak's JSON, but is broken" in text
    assert "`$.iterations[1].sleep_s`" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (3407872, "3.25 MiB"),
        (-12 * MIB, "-12.0 MiB"),
        (26773094400, "24.9 GiB"),
        (143 * GIB, "143 GiB"),
    ],
)
def test_a_size_is_written_as_people_read_it(size: int, text: str) -> None:
    assert recorded.size_text(size) == text
