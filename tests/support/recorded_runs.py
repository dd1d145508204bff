"""Recorded runs as their writers write them, small. Each function returns a new value that a test may change."""

from __future__ import annotations

from typing import Any

MIB, GIB = 1 << 20, 1 << 30

STEPS = (
    "awake",
    "allocator_asleep",
    "communicators_suspended",
    "workspaces_prepared",
    "checkpointed",
    "restored",
    "workspaces_restored",
    "communicators_resumed",
    "woken",
)


def host() -> dict[str, Any]:
    return {"python": "3.12.3", "cpus": 32, "gpus": ["NVIDIA H200, 580.159.04, 143771 MiB"] * 2}


def attribution(ranks: int = 2, *, remainder: int = 5 * MIB) -> dict[str, Any]:
    def memory(rank: int, step: str) -> dict[str, Any]:
        kinds = {
            "weights": 2 * GIB if step in ("awake", "woken") else 0,
            "kv_cache": GIB if step in ("awake", "woken") else 0,
            "graph_pools": 0 if step == "checkpointed" else 200 * MIB,
            "context": 0 if step == "checkpointed" else 500 * MIB,
            "helper": 3 * MIB,
            "remainder": 0 if step == "checkpointed" else remainder,
        }
        host = {"backup_arena": 2 * GIB, "driver_backup": 700 * MIB if step == "checkpointed" else 0, "rss": 3 * GIB}
        return {"rank": rank, "device_used_bytes": sum(kinds.values()), "kinds": kinds, "host": host}

    steps = [{"step": step, "ranks": [memory(rank, step) for rank in range(ranks)]} for step in STEPS]
    return {
        "kind": "attribution",
        "command": ["scripts/attribution.py", "--ranks", str(ranks)],
        "when": "2026-12-01T10:00:00Z",
        "host": host(),
        "device": "cuda",
        "tensor_parallel_size": ranks,
        "cycles": [{"number": number, "steps": steps} for number in range(2)],
    }


def soak(iterations: int = 4, ranks: int = 2) -> dict[str, Any]:
    def iteration(number: int) -> dict[str, Any]:
        return {
            "number": number,
            "burst_requests": 64,
            "burst_failed": 0,
            "burst_s": 1.5,
            "sleep_s": 1.0 + number % 3 / 100,
            "wake_s": 0.75,
            "wake": "by_tag" if number % 2 else "whole",
            "occupied": number % 2 == 0,
            "occupied_bytes": 100 * GIB if number % 2 == 0 else 0,
            "identical": True,
            "probe_s": 0.4,
            "device_awake_bytes": [26 * GIB] * ranks,
            "device_asleep_bytes": [3 * MIB] * ranks,
            "rss_bytes": {"parent": 90 * MIB, "helper": 60 * MIB, **{f"worker {r}": 18 * GIB for r in range(ranks)}},
            "open_files": {"parent": 31 + number % 2},
        }

    return {
        "kind": "soak",
        "command": ["scripts/soak.py", "--iterations", str(iterations)],
        "when": "2026-12-01T11:00:00Z",
        "host": host(),
        "device": "cuda",
        "tensor_parallel_size": ranks,
        "seed": 7,
        "iterations": [iteration(number) for number in range(iterations)],
        "slopes": {
            "sleep_s": {"per_100": 0.001, "standard_error": 0.002, "unit": "s", "bound": 0.05, "ok": True},
            "rss parent": {"per_100": 9e6, "standard_error": 1e3, "unit": "bytes", "bound": 1e6, "ok": False},
        },
        "mismatches": 0,
        "failed_requests": 0,
        "ok": True,
    }


def stages(ranks: int = 2, *, waking: bool = False) -> list[dict[str, Any]]:
    names = (
        {"restore": 0.5, "wake_allocator": 0.2}
        if waking
        else {"sleep_allocator": 0.3, "lock": 0.002, "checkpoint": 0.7}
    )
    return [
        {"name": name, "wall_s": seconds, "ranks": [seconds * (0.9 + 0.05 * r) for r in range(ranks)], "figures": []}
        for name, seconds in names.items()
    ]


def demo(ranks: int = 2, cycles: int = 3) -> dict[str, Any]:
    def cycle(number: int) -> dict[str, Any]:
        partial = number == cycles - 1
        down = [{"operation": "sleep", **stage} for stage in stages(ranks)]
        up = [{"operation": "wake weights" if partial else "wake", **stage} for stage in stages(ranks, waking=True)]
        return {
            "sleep_s": 1.0,
            "wake_s": 0.7,
            "partial": partial,
            "stages": down + up,
            "device_bytes": {"awake": [GIB] * ranks, "asleep": [9 * MIB] * ranks, "woken": [GIB] * ranks},
            "identical": True,
            "token_sha256": {"before": "t", "after": "t"},
            "logits_sha256": {"before": "l", "after": "l"},
            "distinct_tokens": 80,
            "weights_identical": True,
            "addresses_identical": True,
        }

    return {
        "device": "cuda",
        "device_note": "NVIDIA GPU",
        "tensor_parallel_size": ranks,
        "communication": "suspend",
        "start_s": 4.8,
        "cycles": [cycle(number) for number in range(cycles)],
        "empty_device_bytes": [5 * MIB] * ranks,
        "closed_device_bytes": [5 * MIB] * ranks,
        "left_behind": [],
        "problems": [],
        "passed": True,
        "environment": {"time": "2026-12-01T09:00:00Z", "command": ["cli.py", "demo"], "gpus": ["NVIDIA H200"]},
    }


def table() -> dict[str, Any]:
    def cycle(wakes: int, changed: bool) -> dict[str, Any]:
        return {
            "weights_changed": changed,
            "sleep": {"wall_s": 1.1, "stages": stages(1)},
            "wake": [{"wall_s": 0.5, "stages": stages(1, waking=True)} for _ in range(wakes)],
            "asleep_above_empty_bytes": [3 * MIB],
            "identical": True,
        }

    return {
        "command": ["bench_gpu.py", "--ranks", "1"],
        "when": "2026-12-01T08:00:00Z",
        "host": host(),
        "ranks": 1,
        "weights_gib": 16.0,
        "communication": "suspend",
        "empty_bytes": [0],
        "plain_copy_gb_s": [{"d2h": 55.0, "h2d": 55.5}],
        "cycles": [cycle(1, False), cycle(2, False), cycle(1, True)],
    }


def ways() -> dict[str, Any]:
    way = {
        "way": "both, first",
        "down_s": 1.0,
        "up_s": 0.9,
        "left_above_empty_bytes": 3 * MIB,
        "rss_before_bytes": 17 * GIB,
        "rss_asleep_bytes": 18 * GIB,
        "identical": True,
    }
    slow = {**way, "way": "driver, first", "down_s": 11.0, "rss_asleep_bytes": 38 * GIB}
    return {
        "command": ["bench_gpu.py", "--parts", "ways"],
        "weights_gib": 16.0,
        "empty_bytes": [0],
        "runs": [way, slow],
    }


def log(ranks: int = 1, cycles: int = 2) -> list[dict[str, Any]]:
    entries = []
    for _ in range(cycles):
        for operation, waking in (("sleep", False), ("wake", True)):
            entry = {"time": 1.0, "pid": 7, "operation": operation, "performed": True, "wall_s": 1.0}
            used = [30 * GIB] * ranks if waking else [3 * MIB] * ranks
            entries.append({**entry, "stages": stages(ranks, waking=waking), "device_bytes_after": used})
    return entries


def part(*, stock: bool = False) -> dict[str, Any]:
    cycle = {
        "sleep_s": 1.3,
        "wake_s": 1.0,
        "partial": False,
        "mib_asleep": [1109 if stock else 4],
        "mib_awake": [71000],
        "first_request_s": 0.1,
        "same_tokens": True,
        "same_logprobs": True,
    }
    return {
        "part": {
            "name": "ours-8b-tp1",
            "kind": "cycles",
            "model": "8b",
            "ranks": 1,
            "backend": "stock" if stock else "arena",
        },
        "gpus": ["NVIDIA H200"],
        "driver": "580.159.04",
        "mib_before_start": [1],
        "versions": {"vllm": "0.33.0", "torch": "2.11.0", "nccl": None},
        "distinct_tokens": 60,
        "same_before_any_sleep": True,
        "cycles": [{**cycle, "sleep_s": 21.7 if stock else 1.3}, cycle],
        "same_checksums": True,
        "log": [] if stock else log(),
        "completed": True,
    }


def arms(ranks: int = 2, launches: int = 2) -> dict[str, Any]:
    """The driver alone was refused, and everything together takes half of what the allocator takes."""

    def cycle(number: int, left: int) -> dict[str, Any]:
        return {
            "number": number,
            "down_s": 1.0 + number,
            "up_s": 0.5,
            "used_awake_bytes": [26 * GIB] * ranks,
            "used_asleep_bytes": [left + rank * MIB for rank in range(ranks)],
            "rss_before_bytes": [17 * GIB] * ranks,
            "rss_asleep_bytes": [18 * GIB] * ranks,
            "states": ["asleep"] * ranks,
            "copy_down_gb_s": [44.0] * ranks,
            "copy_up_gb_s": [55.0] * ranks,
            "weights_changed": True,
            "identical": True,
            "work_s": 0.01,
        }

    def launch(arm: str, number: int, left: int) -> dict[str, Any]:
        return {
            "arm": arm,
            "number": number,
            "communication": "suspend",
            "empty_bytes": [2 * MIB] * ranks,
            "after_bytes": [2 * MIB] * ranks,
            "together": False,
            "plain_copy_gb_s": [{"d2h": 55.0, "h2d": 55.0}] * ranks,
            "start_s": 5.0,
            "cycles": [cycle(each, left) for each in range(3)],
            "completed": True,
            "how": "completed",
            "left_processes": [],
        }

    names = ("allocator", "driver", "all")
    lefts = {"allocator": 900 * MIB, "all": 5 * MIB}
    return {
        "kind": "arms",
        "command": ["bench_cycle.py", "--arms", ",".join(names)],
        "when": "2026-12-01T12:00:00Z",
        "host": host(),
        "device": "cuda",
        "front_door": "own",
        "model": "",
        "tensor_parallel_size": ranks,
        "weights_gib": 16.0,
        "arms": [
            {"name": name, "communication": "suspend", "note": "", "refused": "no" if name == "driver" else ""}
            for name in names
        ],
        "launches": [launch(arm, number + 1, left) for number in range(launches) for arm, left in lefts.items()],
    }
