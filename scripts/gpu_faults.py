#!/usr/bin/env python3
"""Faults on real GPUs: a process killed or stopped in each stage, and a restore that does not fit.

The software device's matrix covers every fault; this shows on the real driver that a kill at the worst moment ends in
time, in the right error, and with an empty GPU. Each case runs an executor of its own in a process of its own with a
hard timeout; several run at once. Writes one JSON file and prints a table last.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkpoint_executor import CUDACheckpointExecutor, FatalError, RefusedError
from checkpoint_executor.coordinator import OWN_STAGES
from checkpoint_executor.messages import Send
from checkpoint_executor.workers import Worker, WorkerContext, execution

MIB = 1 << 20
DOWN = [stage.name for stage in OWN_STAGES.down]
UP = [stage.name for stage in OWN_STAGES.up]


class SmallWorker(Worker):
    """Weights, a KV cache and a graph; small, because many run at once."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        import torch

        self.weights = context.allocator.empty((1024, 1024), torch.float32, "weights")
        self.weights.copy_(torch.linspace(-1, 1, 1 << 20).view(1024, 1024))
        self.kv = context.allocator.empty((64 * MIB // 4,), torch.float32, "kv_cache")
        self.x = context.allocator.empty((1, 1024), torch.float32, "weights")
        self.x.fill_(0.5)
        self.graph = context.capture(lambda: torch.tanh(self.x @ self.weights))

    @execution
    def decode(self) -> list[float]:
        return [float(value) for value in self.graph.replay().flatten()[:64].cpu()]

    def busy(self, seconds: float) -> None:
        """Leave work on the GPU that outlasts the driver's lock timeout; returns at once."""
        import torch

        cuda: Any = torch.cuda
        cuda._sleep(int(seconds * 1.9e9))


def act_in_stage(executor: CUDACheckpointExecutor, stage: str, action: Any) -> None:
    """Do something just after the command of a stage was sent: the stage is then in progress."""
    control = executor._control
    original = control._send

    def send(instruction: Send) -> None:
        original(instruction)
        if instruction.stage == stage:
            control._send = original  # type: ignore[method-assign]
            action()

    control._send = send  # type: ignore[method-assign, assignment]


def run_case(args: argparse.Namespace) -> dict[str, Any]:
    case = json.loads(args.case)
    options: dict[str, Any] = {"device": args.device}
    if args.device == "soft":
        options["soft_root"] = args.soft_root
    elif case.get("device_id"):
        options["device_ids"] = (case["device_id"],)
    if case["what"] == "busy":
        options["deadlines"] = {"driver_lock_s": 1.0}
    if case["what"] == "SIGSTOP":
        options["deadlines"] = {"driver_s": 3.0, "driver_lock_s": 1.0, "worker_sleep_s": 3.0, "hook_s": 3.0}
    executor = CUDACheckpointExecutor(SmallWorker, 1, **options)
    pids = executor.pids
    expected = executor.collective_rpc("decode")
    result: dict[str, Any] = dict(case)
    stage = case.get("stage", "")
    try:
        if case["what"] in ("SIGKILL", "SIGSTOP"):
            pid = pids["helper" if case["role"] == "helper" else "worker 0"]
            number = getattr(signal, case["what"])
            if stage in UP and stage not in DOWN:
                executor.sleep()
            moment: dict[str, float] = {}

            def strike() -> None:
                moment["at"] = time.monotonic()
                os.kill(pid, number)

            act_in_stage(executor, stage, strike)
            try:
                if stage in DOWN:
                    executor.sleep()
                else:
                    executor.wake_up()
                executor.check_health()
                time.sleep(0.05)
                executor.check_health()
                result["outcome"] = "succeeded"
            except FatalError as error:
                result |= {
                    "outcome": "fatal",
                    "verdict_s": time.monotonic() - moment["at"],
                    "error": type(error).__name__,
                    "message": error.message[:400],
                    "rank": error.rank,
                    "pid": error.pid,
                    "stage_named": error.stage,
                }
        elif case["what"] == "busy":
            executor.collective_rpc("busy", args=(3.0,))
            begun = time.monotonic()
            try:
                # The worker's own sleep would drain the GPU first, so the driver is asked directly.
                from checkpoint_executor.helper.cuda_driver import CudaDriver

                raise_from_lock(CudaDriver(), pids["worker 0"])
                result["outcome"] = "locked"
            except Exception as error:  # noqa: BLE001
                result |= {"outcome": "not ready", "verdict_s": time.monotonic() - begun, "message": str(error)}
            result["identical"] = executor.collective_rpc("decode") == expected
            executor.sleep()
            executor.wake_up()
            result["identical_after_cycle"] = executor.collective_rpc("decode") == expected
        elif case["what"] == "no room":
            result |= no_room(executor, args, expected)
        elif case["what"] == "no room, no admission":
            result |= without_admission(executor, args)
    finally:
        executor.shutdown()
        result["processes_left"] = [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]
    return result


def raise_from_lock(driver: Any, pid: int) -> None:
    from checkpoint_executor import procfs
    from checkpoint_executor.messages import Target

    driver.open()
    driver.lock(Target(0, pid, procfs.start_time(pid), ""), 1000)


def start_hog(args: argparse.Namespace) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A process that holds the first device's memory until it gets a line, and what it says it took."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--hog", "--device", args.device, "--soft-root", args.soft_root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def no_room(executor: CUDACheckpointExecutor, args: argparse.Namespace, expected: Any) -> dict[str, Any]:
    """Another process takes the memory while we sleep: the wake is refused, and works once it is gone."""
    executor.sleep()
    awake = executor.wake_up()
    needed = awake.device_bytes_after[0] - executor.sleep().device_bytes_after[0]
    process, taken = start_hog(args)
    free = free_bytes(args)
    margin = executor.config.wake_margin_bytes
    result: dict[str, Any] = {"hog": taken, "needed_bytes": needed, "free_bytes": free, "margin_bytes": margin}
    result["really_missing_bytes"] = needed + margin - free
    try:
        begun = time.monotonic()
        try:
            executor.wake_up()
            result["outcome"] = "woke"
        except RefusedError as error:
            result |= {
                "outcome": "refused",
                "verdict_s": time.monotonic() - begun,
                "error": type(error).__name__,
                "message": error.message[:600],
                "missing_bytes": getattr(error, "missing_bytes", None),
                "missing_off_by_bytes": next(iter((getattr(error, "missing_bytes", None) or {"": 0}).values()))
                - result["really_missing_bytes"],
                "holders": getattr(error, "holders", None),
            }
        result["phase_after_refusal"] = executor.phase
    finally:
        process.communicate("\n", timeout=30)
    report = executor.wake_up()
    result["wake_after_s"] = report.wall_s
    result["admit_wake_s"] = next(stage.wall_s for stage in report.stages if stage.name == "admit_wake")
    result["identical"] = executor.collective_rpc("decode") == expected
    return result


def without_admission(executor: CUDACheckpointExecutor, args: argparse.Namespace) -> dict[str, Any]:
    """The same, had nobody asked first: the driver's restore runs out of memory, and the engine is lost."""
    executor.sleep()
    process, taken = start_hog(args)
    control = executor._control
    original = control._arguments

    def arguments(send: Send) -> dict[str, Any]:
        given = original(send)
        if send.stage == "admit_wake":
            # A need that no device can fail to have: -1 TiB.
            given |= {"needed_bytes": tuple(-(1 << 40) for _ in send.ranks), "margin_bytes": 0}
        return given

    control._arguments = arguments  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        executor.wake_up()
        return {"outcome": "woke", "hog": taken}
    except FatalError as error:
        return {
            "outcome": "fatal",
            "verdict_s": time.monotonic() - begun,
            "error": type(error).__name__,
            "message": error.message[:400],
            "code_name": error.code_name,
            "state_after": error.state_after,
            "hog": taken,
        }
    finally:
        process.communicate("\n", timeout=30)


def free_bytes(args: argparse.Namespace) -> int:
    """Free bytes of the first device, from outside."""
    if args.device == "soft":
        from checkpoint_executor.softgpu import SoftGpu, device_name

        gpu = SoftGpu(Path(args.soft_root), device_name(0))
        return gpu.total_bytes - gpu.used_bytes()
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).free)


def hog(args: argparse.Namespace) -> None:
    """Take all but 100 MiB of the first device, say so, and hold it until a line comes."""
    if args.device == "soft":
        from checkpoint_executor.softgpu import SoftGpu, SoftProcess, device_name

        gpu = SoftGpu(Path(args.soft_root), device_name(0))
        process = SoftProcess.open(Path(args.soft_root), device_name(0))
        size = gpu.total_bytes - gpu.used_bytes() - MIB
        process.allocate(size)
    else:
        import torch

        torch.zeros(1, device="cuda:0")
        free, _ = torch.cuda.mem_get_info(0)
        size = free - 100 * MIB
        keep = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        keep[:1].fill_(1)
        torch.cuda.synchronize()
    print(json.dumps({"pid": os.getpid(), "bytes": size}), flush=True)
    sys.stdin.readline()


def used_bytes(args: argparse.Namespace) -> list[int]:
    if args.device == "soft":
        from checkpoint_executor.softgpu import SoftGpu, device_name

        return [SoftGpu(Path(args.soft_root), device_name(0)).used_bytes()]
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2).used) for h in handles]


def device_ids(args: argparse.Namespace) -> list[str]:
    if args.device == "soft":
        return [""]
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return [str(pynvml.nvmlDeviceGetUUID(h)) for h in handles]


def one(args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", args.device, "--soft-root", args.soft_root]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--case", json.dumps(case)], capture_output=True, text=True, timeout=args.timeout_s, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        result = json.loads(lines[-1]) if lines else {**case, "outcome": "crashed", "stderr": done.stderr[-2000:]}
    except subprocess.TimeoutExpired:
        result = {**case, "outcome": "HUNG"}
    result["case_s"] = time.monotonic() - begun
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "soft"), default="cuda")
    parser.add_argument("--soft-root", default="")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=90)
    parser.add_argument("--out", default="faults.json")
    parser.add_argument("--only-room", action="store_true", help="only the cases about memory that is not there")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--hog", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "soft" and not args.soft_root:
        from checkpoint_executor.softgpu import default_root

        args.soft_root = str(default_root())
    if args.hog:
        hog(args)
        return
    if args.case:
        print(json.dumps(run_case(args)), flush=True)
        return
    empty = used_bytes(args)
    gpus = device_ids(args)
    cases: list[dict[str, Any]] = [
        {"what": "SIGKILL", "role": role, "stage": stage} for stage in DOWN + UP for role in ("worker", "helper")
    ]
    cases += [{"what": "SIGSTOP", "role": "worker", "stage": stage} for stage in ("sleep_allocator", "lock", "unlock")]
    if args.device == "cuda":
        cases.append({"what": "busy"})
    if args.only_room:
        cases = []
    for number, case in enumerate(cases):
        case["device_id"] = gpus[number % len(gpus)]
    with ThreadPoolExecutor(args.at_once) as pool:
        results = list(pool.map(lambda case: one(args, case), cases))
    # Alone: they take all of the memory.
    results += [one(args, {"what": what, "device_id": gpus[0]}) for what in ("no room", "no room, no admission")]
    until = time.monotonic() + 10
    while (left := used_bytes(args)) != empty and time.monotonic() < until:
        time.sleep(0.05)
    data = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "empty_bytes": empty,
        "left_bytes": left,
        "cases": results,
    }
    Path(args.out).write_text(json.dumps(data, indent=1))
    for result in results:
        where = f"{result['what']} {result.get('role', '')} {result.get('stage', '')}"
        verdict = f"{result['verdict_s']:.3f} s" if "verdict_s" in result else "-"
        same = result.get("identical", "")
        print(
            f"{where:48} {result['outcome']:10} {verdict:>10} {result.get('error', '')} {same} {result['case_s']:.1f} s"
        )
    fatal = [r["verdict_s"] for r in results if r["outcome"] == "fatal"]
    print(f"{len(results)} cases; fatal {len(fatal)}, slowest verdict {max(fatal, default=0):.3f} s")
    print(f"bytes on the devices before {empty}, after {left}")


if __name__ == "__main__":
    main()
