"""Another process on a rank's device that fills most of what is free there, and lets go, whenever it is told to.

It stays between iterations, because starting one that uses a GPU costs seconds. Its context is on the device all the
time; the ballast is ordinary device memory (on a GPU ``cudaMalloc`` through torch), written to in full.

Run as ``python -m scripts.soaking.occupier JSON``; commands are lines on stdin, answers lines of JSON on stdout.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Occupiers"]

#: How much of the free device memory is taken.
SHARE = 0.9


class Occupiers:
    """One process for each rank's device. A context manager; all of them are gone afterwards.

    Args:
        kind: ``"soft"`` or ``"cuda"``. ranks: number of devices, in the workers' order. soft_root: of software devices.
    """

    def __init__(self, kind: str, ranks: int, soft_root: str) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                job = {"parent": os.getpid(), "device": kind, "rank": rank, "soft_root": soft_root}
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "scripts.soaking.occupier", json.dumps(job)],
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            self._answers()
        except BaseException:
            self.close()
            raise

    def take(self) -> int:
        """Fill most of each device; returns when it is filled. Bytes taken in all.

        Raises:
            RuntimeError: one of the processes failed.
        """
        return sum(self._ask("take"))

    def free(self) -> None:
        """Let go; returns when the memory is free. Raises RuntimeError as :meth:`take`."""
        self._ask("free")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def _ask(self, command: str) -> list[int]:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(command + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its answer will be missing, which says who it was
        return self._answers()

    def _answers(self) -> list[int]:
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the process that fills device {rank} ended with status {process.wait()}")
            answers.append(int(json.loads(line)["bytes"]))
        return answers

    def __enter__(self) -> Occupiers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------
# In the process itself
# ------------------------------------------------------------------------------------------------

Verbs = tuple[Callable[[], int], Callable[[], None]]


def soft(job: dict[str, Any]) -> Verbs:
    """How memory of a software device is taken and freed."""
    from checkpoint_executor.softgpu import Segment, SoftGpu, SoftProcess, device_name

    name = device_name(job["rank"])
    gpu, process = SoftGpu(job["soft_root"], name), SoftProcess.open(job["soft_root"], name)
    held: list[Segment] = []

    def take() -> int:
        held.append(process.allocate(int((gpu.total_bytes - gpu.used_bytes()) * SHARE)))
        return held[-1].size_bytes

    def free() -> None:
        while held:
            process.free(held.pop())

    return take, free


def cuda(job: dict[str, Any]) -> Verbs:
    """How memory of a GPU is taken and freed."""
    import torch

    device = torch.device("cuda", job["rank"])
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # the context and its first kernel: now, and not in the first sleep
    held: list[torch.Tensor] = []

    def take() -> int:
        available, _ = torch.cuda.mem_get_info(device)
        ballast = torch.empty(int(available * SHARE), dtype=torch.uint8, device=device)
        held.append(ballast.fill_(0xA5))
        torch.cuda.synchronize(device)
        return ballast.numel()

    def free() -> None:
        held.clear()
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)

    return take, free


def main(job: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it does not outlive the soak
    if os.getppid() != job["parent"]:
        return
    take, free = {"soft": soft, "cuda": cuda}[job["device"]](job)
    print(json.dumps({"bytes": 0}), flush=True)
    for line in sys.stdin:
        taken = 0
        if line.strip() == "take":
            taken = take()
        else:
            free()
        print(json.dumps({"bytes": taken}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
