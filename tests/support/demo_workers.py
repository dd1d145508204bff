"""Stand-ins for the example model, without torch: one that is honest, and one for each way of failing the demo."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

from checkpoint_executor.workers import Worker, WorkerContext, execution

__all__ = ["DriftingWorker", "HoardingWorker", "HonestWorker", "MonotonousWorker", "QuarrellingWorker"]

_WEIGHTS_BYTES = 64 << 10

#: Takes device memory beside the worker, and stays.
_HOARDER = """
import sys, threading
from checkpoint_executor.softgpu import SoftProcess
process = SoftProcess.open(sys.argv[1], "SOFT-0")
print("ready", flush=True)
threading.Event().wait()
"""


class HonestWorker(Worker):
    """Its tokens and logits are read off its weights."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.weights = context.allocator.allocate(_WEIGHTS_BYTES, "weights")
        self.kv_cache = context.allocator.allocate(_WEIGHTS_BYTES, "kv_cache")
        self.weights.write(hashlib.shake_128(b"weights").digest(_WEIGHTS_BYTES))

    @execution
    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        digest = hashlib.sha256(self.weights.read()).digest()
        tokens = [[digest[(sum(prompt) + at) % 32] for at in range(max_new_tokens)] for prompt in prompts]
        return {
            "tokens": tokens,
            "logits_sha256": digest.hex(),
            "distinct_tokens": len({token for answer in tokens for token in answer}),
        }

    def weight_checksums(self) -> dict[str, str]:
        return {"weights": hashlib.sha256(self.weights.read()).hexdigest()}

    def addresses(self) -> dict[str, int]:
        return {"weights": self.weights.address, "kv_cache": self.kv_cache.address}


class DriftingWorker(HonestWorker):
    """One bit of its weights is lost in every sleep."""

    def after_wake(self, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            first = self.weights.read(0, 1)
            self.weights.write(bytes([first[0] ^ 1]))


class MonotonousWorker(HonestWorker):
    """Says one thing for ever."""

    @execution
    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        answer = super().decode(prompts, max_new_tokens)
        return {**answer, "tokens": [[7] * max_new_tokens for _ in prompts], "distinct_tokens": 1}


class QuarrellingWorker(HonestWorker):
    """Every rank has its own logits."""

    @execution
    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        answer = super().decode(prompts, max_new_tokens)
        return {**answer, "logits_sha256": f"{self.context.rank}{answer['logits_sha256'][1:]}"}


class HoardingWorker(HonestWorker):
    """Starts a process that holds device memory, and that nobody ends."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        root = json.loads(sys.argv[1])["soft_root"]
        hoarder = subprocess.Popen(
            [sys.executable, "-c", _HOARDER, root],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert hoarder.stdout is not None
        hoarder.stdout.readline()
