"""Many requests at once, over an executor that takes one call at a time.

A second caller of ``collective_rpc`` gets BusyError while a call is in progress, so whoever serves many clients puts a
queue before it, as every engine does: the requests of all threads wait there, and what waits is decoded together.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["BURST_REQUESTS", "Burst", "BurstResult", "Queue"]

#: Fewest and most requests of a burst.
BURST_REQUESTS = (64, 256)

_PROMPT_TOKENS = (1, 4)
_NEW_TOKENS = 4

#: Far beyond anything; a request that takes so long has failed.
_DEADLINE_S = 120.0

#: Decodes prompts; the answers of all ranks.
Decode = Callable[[list[list[int]], int], list[dict[str, Any]]]


class BurstResult(NamedTuple):
    """``failures`` are what went wrong, in words, one for each request that failed."""

    requests: int
    failures: list[str]
    seconds: float


class Queue:
    """Decodes the requests of any number of threads, up to ``batch`` of them at a time.

    Args:
        decode: of all ranks. batch: the largest batch.
    """

    def __init__(self, decode: Decode, batch: int) -> None:
        self._decode = decode
        self._batch = batch
        self._waiting: SimpleQueue[tuple[list[int], Future[list[int]]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="soak-queue", daemon=True)
        self._thread.start()

    def request(self, prompt: list[int]) -> list[int]:
        """Decode one prompt, for the thread that calls. Raises whatever the decoding raised, or TimeoutError."""
        answer: Future[list[int]] = Future()
        self._waiting.put((prompt, answer))
        return answer.result(_DEADLINE_S)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            ended = False
            while len(batch) < self._batch:
                try:
                    following = self._waiting.get_nowait()
                except Empty:
                    break
                if following is None:
                    ended = True
                    break
                batch.append(following)
            self._answer(batch)
            if ended:
                return

    def _answer(self, batch: list[tuple[list[int], Future[list[int]]]]) -> None:
        try:
            answers = self._decode([prompt for prompt, _ in batch], _NEW_TOKENS)
            if any(answer["tokens"] != answers[0]["tokens"] for answer in answers):
                raise RuntimeError("the ranks decoded different tokens")
            for (_, future), tokens in zip(batch, answers[0]["tokens"], strict=True):
                future.set_result(tokens)
        except Exception as error:  # noqa: BLE001 - it is the requests'
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)


class Burst:
    """Sends bursts, a thread for each request. A context manager.

    Args:
        queue: where the requests go. vocabulary: tokens are below it.
    """

    def __init__(self, queue: Queue, vocabulary: int) -> None:
        self._queue = queue
        self._vocabulary = vocabulary

    def send(self, requests: int, chance: random.Random) -> BurstResult:
        """So many requests at once, of random prompts; returns when all are answered."""
        prompts = [
            [chance.randrange(self._vocabulary) for _ in range(chance.randint(*_PROMPT_TOKENS))]
            for _ in range(requests)
        ]
        begun = time.monotonic()
        # New threads each time: hundreds that stay touch a little more of their stacks now and then, for hundreds of
        # iterations, which looks like memory of this process that grows.
        with ThreadPoolExecutor(requests, thread_name_prefix="soak-request") as threads:
            together = threading.Barrier(requests)
            answers = [threads.submit(self._request, together, prompt) for prompt in prompts]
            failures = [problem for answer in answers if (problem := _problem(answer)) is not None]
        return BurstResult(requests, failures, time.monotonic() - begun)

    def _request(self, together: threading.Barrier, prompt: list[int]) -> list[int]:
        # Or the first would be answered while the last are still to come.
        together.wait(_DEADLINE_S)
        return self._queue.request(prompt)

    def __enter__(self) -> Burst:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._queue.close()


def _problem(answer: Future[list[int]]) -> str | None:
    try:
        tokens = answer.result(2 * _DEADLINE_S)
    except FutureTimeout:
        return f"no answer within {_DEADLINE_S:g} s"
    except Exception as error:  # noqa: BLE001 - counted and told
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None if len(tokens) == _NEW_TOKENS else f"{len(tokens)} tokens instead of {_NEW_TOKENS}"
