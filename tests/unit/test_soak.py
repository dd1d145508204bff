"""The soak's own parts: slopes and their errors, the record that survives a kill, and the queue of a burst."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from scripts.soaking.burst import BURST_REQUESTS, Burst, Queue
from scripts.soaking.drift import MIN_POINTS, SIGMAS, Bound, fit, judge, warm_up
from scripts.soaking.journal import RSS_BOUND_BYTES, Journal, bounds, finish, read

DEADLINE_S = 30.0

# ---------------------------------------------------------------------------------------------- slopes


def test_a_line_is_found_exactly() -> None:
    assert fit([7.0 + 3.0 * step for step in range(50)]) == pytest.approx((3.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("value", [0, 1, 1 << 50, 0.1])
def test_what_does_not_change_has_no_slope_and_no_error(value: float) -> None:
    assert fit([value] * 2000) == (0.0, 0.0)


def test_the_standard_error_is_the_textbooks() -> None:
    # Five points, worked by hand: the slope is 6 / 10, and what the line misses them by is -0.6, 0.8, -0.8, 1.6, -1.
    assert fit([1, 3, 2, 5, 3]) == pytest.approx((0.6, (5.2 / 3 / 10) ** 0.5))


def test_points_that_resemble_each_other_widen_the_error() -> None:
    step = [0.0] * 500 + [1000.0] * 500
    found = fit(step)
    middle = (len(step) - 1) / 2
    left = [value - 500 - found.slope * (number - middle) for number, value in enumerate(step)]
    plain = (sum(each**2 for each in left) / 998 / sum((number - middle) ** 2 for number in range(1000))) ** 0.5
    assert found.standard_error > 10 * plain
    # A leak of 100 bytes an iteration, seen in pages of 4 KiB, is still certain.
    leak = fit([100 * number // 4096 * 4096 for number in range(1000)])
    assert leak.slope == pytest.approx(100, rel=0.01)
    assert leak.slope > 100 * leak.standard_error


def test_a_slope_of_noise_is_mostly_within_its_error() -> None:
    chance = random.Random(0)
    fits = [fit([chance.gauss(0, 1) for _ in range(100)]) for _ in range(200)]
    within = sum(abs(found.slope) <= 2 * found.standard_error for found in fits)
    assert 180 <= within <= 199  # 95 % of 200, give or take


def test_two_points_have_no_error() -> None:
    with pytest.raises(ValueError, match="three points"):
        fit([1, 2])


BOUND = Bound(10.0, "bytes")


def rising(per_100: float, count: int = 200) -> list[float]:
    return [1e9 + per_100 * step / 100 for step in range(count)]


def test_drift_is_beyond_the_bound_and_not_by_chance() -> None:
    chance = random.Random(1)
    assert judge(rising(9.0), BOUND).ok
    assert not judge(rising(11.0), BOUND).ok
    noisy = [value + chance.gauss(0, 100) for value in rising(11.0)]
    verdict = judge(noisy, BOUND)
    assert verdict.per_100 < SIGMAS * verdict.standard_error
    assert verdict.ok


def test_a_fall_counts_only_where_it_should() -> None:
    assert judge(rising(-50.0), BOUND).ok
    assert not judge(rising(-50.0), BOUND._replace(both_ways=True)).ok


def test_what_is_exact_may_not_change_even_once() -> None:
    exact = Bound(0, "bytes", both_ways=True, exact=True)
    assert judge([4096.0] * 100, exact).ok
    assert not judge([4096.0] * 50 + [4097.0] + [4096.0] * 50, exact).ok
    assert not judge([4096.0, 4097.0], exact).ok


def test_a_short_series_is_not_judged() -> None:
    verdict = judge(rising(1e6, MIN_POINTS - 1), BOUND)
    assert verdict.ok
    assert not verdict.judged
    assert judge(rising(1e6, MIN_POINTS), BOUND).judged


def test_the_warm_up_is_a_part_of_a_short_run_and_no_more_than_it_takes() -> None:
    assert [warm_up(count) for count in (0, 3, 4, 100, 200, 2000)] == [0, 0, 1, 25, 50, 200]


# ---------------------------------------------------------------------------------------------- the record


def header(wanted: int, device: str = "soft") -> dict[str, Any]:
    return {"kind": "soak", "device": device, "tensor_parallel_size": 1, "wanted_iterations": wanted}


def iteration(number: int, **changes: Any) -> dict[str, Any]:
    record = {
        "number": number,
        "burst_requests": 64,
        "burst_failed": 0,
        "identical": True,
        "probe_s": 0.1,
        "probe_cpu_s": 0.02,
        "device_awake_bytes": [1000],
        "device_asleep_bytes": [0],
        "rss_bytes": {"parent": 1 << 30},
        "open_files": {"parent": 40},
    }
    return {**record, **changes}


def recorded(path: Path, records: list[dict[str, Any]], wanted: int, device: str = "soft") -> Path:
    with Journal(path, header(wanted, device)) as journal:
        for record in records:
            journal.iteration(record)
    return path


def test_a_run_in_which_nothing_happened_is_ok(tmp_path: Path) -> None:
    lines = recorded(tmp_path / "soak.jsonl", [iteration(number) for number in range(100)], 100)
    result = finish(lines, tmp_path / "soak.json")
    assert result["ok"]
    assert result["problems"] == []
    assert (result["mismatches"], result["failed_requests"], result["warm_up_iterations"]) == (0, 0, 25)
    slope = {"per_100": 0.0, "standard_error": 0.0, "unit": "bytes", "bound": 0, "judged": True, "ok": True}
    assert result["slopes"]["device_asleep_bytes rank 0"] == slope
    assert set(result["slopes"]) == {
        "device_awake_bytes rank 0",
        "device_asleep_bytes rank 0",
        "rss_bytes parent",
        "open_files parent",
        "probe_cpu_s",
        "probe_s",
    }
    assert json.loads((tmp_path / "soak.json").read_text()) == result
    assert "wanted_iterations" not in result
    assert [path.name for path in tmp_path.iterdir()] == ["soak.json"]


def test_every_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "soak.jsonl"
    with Journal(path, header(3)) as journal:
        for number in range(3):
            journal.iteration(iteration(number))
            assert [each["number"] for each in read(path)[1]] == list(range(number + 1))


def test_a_run_that_was_killed_is_judged_without_its_cut_line(tmp_path: Path) -> None:
    lines = recorded(tmp_path / "soak.jsonl", [iteration(number) for number in range(5)], 100)
    with lines.open("a") as file:
        file.write(json.dumps(iteration(5))[:40])
    result = finish(lines, None)
    assert len(result["iterations"]) == 5
    assert result["problems"] == ["only 5 of 100 iterations were done"]
    assert not result["ok"]
    assert lines.exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"identical": False}, "1 probes differ from iteration 0's, the first in iteration 90"),
        ({"burst_failed": 2, "failures": ["BusyError: no"]}, "2 requests failed: BusyError: no"),
        ({"device_asleep_bytes": [1]}, "device_asleep_bytes rank 0 drifts"),
        ({"device_awake_bytes": [999]}, "device_awake_bytes rank 0 drifts"),
    ],
)
def test_one_thing_that_is_wrong_fails_the_run(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    records = [iteration(number, **(changes if number == 90 else {})) for number in range(100)]
    result = finish(recorded(tmp_path / "soak.jsonl", records, 100), None)
    assert not result["ok"]
    assert len(result["problems"]) == 1
    assert result["problems"][0].startswith(problem)


def test_a_sleep_that_fails_ends_the_run_and_is_counted(tmp_path: Path) -> None:
    stopped = {"number": 1, "burst_requests": 64, "burst_failed": 0, "identical": True, "stopped": "FatalError: gone"}
    lines = recorded(tmp_path / "soak.jsonl", [iteration(0), {**stopped, "failures": ["FatalError: gone"]}], 2)
    result = finish(lines, None)
    assert result["failed_requests"] == 1
    assert result["problems"] == ["1 requests failed: FatalError: gone"]


def test_memory_may_grow_by_its_bound_and_by_no_more(tmp_path: Path) -> None:
    for factor, ok in ((0.9, True), (1.1, False)):
        grown = [
            iteration(number, rss_bytes={"parent": (1 << 30) + int(factor * RSS_BOUND_BYTES * number / 100)})
            for number in range(100)
        ]
        assert finish(recorded(tmp_path / "soak.jsonl", grown, 100), None)["ok"] is ok


def test_a_gpu_may_move_by_a_page_and_the_software_device_not_at_all() -> None:
    assert bounds("soft")["device_asleep_bytes"].per_100 == 0
    assert bounds("cuda")["device_asleep_bytes"].per_100 == 4 << 20


@pytest.mark.parametrize(("device", "figure"), [("soft", "probe_cpu_s"), ("cuda", "probe_s")])
def test_a_probe_may_not_become_half_as_slow_again(tmp_path: Path, device: str, figure: str) -> None:
    for factor, ok in ((1.4, True), (3.0, False)):
        slower = [iteration(number, **{figure: 1.0 + (factor - 1) * number / 100}) for number in range(100)]
        result = finish(recorded(tmp_path / "soak.jsonl", slower, 100, device), None)
        assert result["slopes"][figure]["judged"]
        assert result["ok"] is ok


def test_other_work_on_the_host_does_not_fail_a_software_device(tmp_path: Path) -> None:
    busy = [iteration(number, probe_s=0.1 if number < 50 else 1.0) for number in range(100)]
    result = finish(recorded(tmp_path / "soak.jsonl", busy, 100), None)
    assert result["ok"]
    waited = result["slopes"]["probe_s"]
    assert waited["per_100"] > waited["bound"] > 0
    assert (waited["judged"], waited["ok"]) == (False, True)


def test_other_files_are_not_taken_for_a_soak(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"kind": "attribution"}\n')
    with pytest.raises(ValueError, match="soak"):
        finish(other, None)


# ---------------------------------------------------------------------------------------------- the burst


class Ranks:
    """Two ranks that answer with the prompt's first token; the first call waits to be let go."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.begun, self.go = Event(), Event()
        self.wrong = False

    def decode(self, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
        self.sizes.append(len(prompts))
        if len(self.sizes) == 1:
            self.begun.set()
            assert self.go.wait(DEADLINE_S)
        if any(prompt == [13] for prompt in prompts):
            raise RuntimeError("not this one")
        answers = [{"tokens": [[prompt[0]] * new_tokens for prompt in prompts]} for _ in range(2)]
        if self.wrong:
            answers[1] = {"tokens": [[-1] * new_tokens for _ in prompts]}
        return answers


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.go.set()


def test_what_waits_is_decoded_together_and_everyone_gets_his_own(ranks: Ranks) -> None:
    queue = Queue(ranks.decode, batch=8)
    answers: dict[int, list[int]] = {}
    threads = [Thread(target=lambda n=n: answers.update({n: queue.request([n])})) for n in range(100, 121)]
    threads[0].start()
    assert ranks.begun.wait(DEADLINE_S)
    for thread in threads[1:]:
        thread.start()
    while queue._waiting.qsize() < 20:
        Event().wait(0.001)
    ranks.go.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    queue.close()
    assert ranks.sizes == [1, 8, 8, 4]
    assert answers == {n: [n] * 4 for n in range(100, 121)}


def test_a_request_that_fails_is_counted_and_the_next_is_served(ranks: Ranks) -> None:
    ranks.go.set()
    queue = Queue(ranks.decode, batch=1)
    with pytest.raises(RuntimeError, match="not this one"):
        queue.request([13])
    assert queue.request([14]) == [14] * 4
    ranks.wrong = True
    with pytest.raises(RuntimeError, match="different tokens"):
        queue.request([15])
    queue.close()


def test_a_burst_answers_every_request(ranks: Ranks) -> None:
    ranks.go.set()
    with Burst(Queue(ranks.decode, batch=64), vocabulary=10) as burst:
        sent = burst.send(BURST_REQUESTS[1], random.Random(0))
        assert (sent.requests, sent.failures) == (256, [])
        assert sum(ranks.sizes) == 256
        ranks.wrong = True
        failed = burst.send(64, random.Random(0))
    assert len(failed.failures) == 64
    assert failed.failures[0] == "RuntimeError: the ranks decoded different tokens"
