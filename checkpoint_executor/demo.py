"""I/O. The demo: the example model decodes, sleeps, wakes and decodes again, and what came of it as data.

Knows the executor's public face and the example worker's methods, and reads device memory itself where no executor
lives: before the start and after the shutdown. Prints nothing (``cli.py`` does) and never imports torch. Fields of the
report are the JSON that ``checkpoint-executor demo --json`` writes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
from msgspec import Struct

from checkpoint_executor import directories, procfs, softgpu
from checkpoint_executor.errors import AsleepError, CheckpointExecutorError
from checkpoint_executor.executor import CUDACheckpointExecutor, detect_device_kind
from checkpoint_executor.report import CycleReport
from checkpoint_executor.tags import KV_CACHE, WEIGHTS

__all__ = ["Audience", "BeforeAfter", "Cycle", "DemoOptions", "DemoReport", "DeviceBytes", "StageTimes", "run"]

EXAMPLE_WORKER = "checkpoint_executor.workers.transformer:TransformerWorker"

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [9], [100, 200]]
NEW_TOKENS = 24

#: Random weights easily decode to one token for ever, and then equal tokens would prove little.
MIN_DISTINCT_TOKENS = 20

#: What may stay on a sleeping GPU beyond what an empty one has: 4 MiB were measured (H200, driver 580.159), and other
#: users of the GPU move the reading.
MAX_ASLEEP_BYTES_ON_GPU = 64 << 20

#: How long a GPU may take to show that a process is gone.
_SETTLE_S = 10.0

_BALLAST_BLOCK_BYTES = 32 << 20


class DemoOptions(Struct, frozen=True):
    """What to run.

    Attributes:
        tensor_parallel_size: ranks. cycles: sleeps and wakes; the last wakes tag by tag.
        device: ``"auto"``, ``"soft"`` or ``"cuda"``. communication: ``"suspend"`` or ``"socket"``.
        weights_gib: ballast for each rank beside the example model, tagged as weights and compared after every wake.
        worker: name of the worker class. new_tokens: decoded for each prompt.
    """

    tensor_parallel_size: int = 1
    cycles: int = 3
    device: str = "auto"
    communication: str = "suspend"
    weights_gib: float = 0.0
    worker: str = EXAMPLE_WORKER
    new_tokens: int = NEW_TOKENS


class StageTimes(Struct, frozen=True):
    """One stage of a cycle: ``operation`` is ``"sleep"``, ``"wake"``, ``"wake weights"`` or ``"wake kv_cache"``."""

    operation: str
    name: str
    wall_s: float
    ranks: tuple[float, ...]


class DeviceBytes(Struct, frozen=True):
    """Bytes in use on each rank's device, by rank, read from outside the workers; ``weights_woken`` between the two
    halves of a wake by tag."""

    awake: tuple[int, ...]
    asleep: tuple[int, ...]
    woken: tuple[int, ...]
    weights_woken: tuple[int, ...] | None = None


class BeforeAfter(Struct, frozen=True):
    """A value before the first sleep and after this cycle's wake."""

    before: str
    after: str

    @property
    def equal(self) -> bool:
        return self.before == self.after


class Cycle(Struct, frozen=True):
    """One sleep and wake.

    Attributes:
        sleep_s, wake_s: whole calls, seconds (both calls of a wake by tag). partial: whether it woke tag by tag.
        identical: whether all ranks decoded the same tokens with the same bits of logits as before the first sleep.
        token_sha256, logits_sha256: what ``identical`` rests on; ``distinct_tokens`` says how much it proves.
        weights_identical, addresses_identical: every weight's bytes, and the address of everything a graph uses.
    """

    sleep_s: float
    wake_s: float
    partial: bool
    stages: tuple[StageTimes, ...]
    device_bytes: DeviceBytes
    identical: bool
    token_sha256: BeforeAfter
    logits_sha256: BeforeAfter
    distinct_tokens: int
    weights_identical: bool
    addresses_identical: bool


class DemoReport(Struct, frozen=True):
    """The whole run. ``passed`` if ``problems`` is empty.

    Attributes:
        device: ``"soft"`` or ``"cuda"``; ``device_note`` says it in words. start_s: until the executor was ready.
        empty_device_bytes: on each rank's device before the start. closed_device_bytes: after the shutdown.
        left_behind: what outlived the executor. problems: why it did not pass, one sentence each.
    """

    device: str
    device_note: str
    tensor_parallel_size: int
    communication: str
    start_s: float
    cycles: tuple[Cycle, ...]
    empty_device_bytes: tuple[int, ...]
    closed_device_bytes: tuple[int, ...]
    left_behind: tuple[str, ...]
    problems: tuple[str, ...]
    passed: bool
    environment: dict[str, Any]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


class Audience(Protocol):
    """Is told what happens while the demo runs."""

    def during(self, what: str, detail: Callable[[], str] | None = None) -> AbstractContextManager[None]:
        """Entered for as long as something takes; ``detail()`` says at any time what it is at."""
        ...

    def cycle_done(self, number: int, cycle: Cycle) -> None:
        """A cycle is over."""
        ...


class _Nobody:
    """The audience that is not there."""

    def during(self, what: str, detail: Callable[[], str] | None = None) -> AbstractContextManager[None]:
        del what, detail
        return nullcontext()

    def cycle_done(self, number: int, cycle: Cycle) -> None:
        pass


def device_note(kind: str) -> str:
    """The device in words."""
    return "software device: no GPU was used" if kind == "soft" else "NVIDIA GPU"


def run(options: DemoOptions, audience: Audience | None = None) -> DemoReport:
    """Run the demo. What goes wrong is in the report; errors of the executor do not pass through.

    Raises:
        ConfigError: the directory of this user's executors cannot be used.
    """
    demo = _Demo(options, audience or _Nobody())
    try:
        demo.run()
    except CheckpointExecutorError as error:
        demo.problems.append(f"{type(error).__name__}: {error}")
    finally:
        demo.clean_up()
    return demo.report()


class _Decoded(Struct, frozen=True):
    """What is compared, each by rank."""

    answers: list[dict[str, Any]]
    weights: list[dict[str, str]]
    addresses: list[dict[str, int]]
    ballast_intact: bool

    @property
    def token_sha256(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.answers[0]["tokens"])).hexdigest()

    @property
    def logits_sha256(self) -> str:
        return str(self.answers[0]["logits_sha256"])

    @property
    def distinct_tokens(self) -> int:
        return int(self.answers[0]["distinct_tokens"])


class _Demo:
    """One run, and what it has found so far."""

    def __init__(self, options: DemoOptions, audience: Audience) -> None:
        self.options = options
        self.audience = audience
        self.kind = detect_device_kind() if options.device == "auto" else options.device
        self.cycles: list[Cycle] = []
        self.problems: list[str] = []
        self.left_behind: list[str] = []
        self.start_s = 0.0
        self._ranks = range(options.tensor_parallel_size)
        own = f"{os.getpid()}-{procfs.start_time(os.getpid())}"
        # Devices of its own: another executor on the shared ones would show in the readings. A directory named like
        # this is swept by the next executor if we die.
        self._soft_root = directories.user_directory() / f"{own}-demo"
        self._own_directories = f"{own}-*"
        self._directories_before = self._directories()
        self._processes: set[tuple[int, int]] = set()
        self._devices: list[str] = []
        self._empty = self._read_devices()
        self._closed: dict[str, int] = {}
        if self.kind == "cuda" and not self._empty:
            self.problems.append("NVML could not be asked how much of each GPU is in use before the start")

    def run(self) -> None:
        options = self.options
        ballast_bytes = int(options.weights_gib * (1 << 30))
        settings: dict[str, Any] = {"device": self.kind, "communication": options.communication}
        if self.kind == "soft":
            self._soft_root.mkdir(mode=0o700)
            settings["soft_root"] = str(self._soft_root)
            settings["soft_capacity_bytes"] = softgpu.DEFAULT_CAPACITY_BYTES + ballast_bytes
        begun = time.monotonic()
        with self.audience.during(f"starting {options.tensor_parallel_size} worker(s)"):
            executor = CUDACheckpointExecutor(options.worker, options.tensor_parallel_size, **settings)
        self.start_s = time.monotonic() - begun
        try:
            self._remember_processes()
            self._devices = executor.collective_rpc(attrgetter("context.runtime.device_id"))
            if ballast_bytes:
                with self.audience.during(f"filling {options.weights_gib:g} GiB of ballast on each rank"):
                    executor.collective_rpc(add_ballast, args=(ballast_bytes,))
            with self.audience.during("decoding"):
                before = self._decode(executor)
            if before.distinct_tokens < MIN_DISTINCT_TOKENS:
                self.problems.append(
                    f"the model decoded only {before.distinct_tokens} distinct tokens, so that equal ones prove little "
                    f"(at least {MIN_DISTINCT_TOKENS} are wanted)"
                )
            for number in range(1, options.cycles + 1):
                cycle = self._cycle(executor, number, before)
                self.cycles.append(cycle)
                self.audience.cycle_done(number, cycle)
            self._remember_processes()
        finally:
            with self.audience.during("shutting down"):
                executor.shutdown()

    # -- a cycle ---------------------------------------------------------------------------------

    def _cycle(self, executor: CUDACheckpointExecutor, number: int, before: _Decoded) -> Cycle:
        name = f"cycle {number} of {self.options.cycles}"
        partial = number == self.options.cycles
        with self._during(executor, f"{name}: sleep"):
            sleep = executor.sleep()
        first: CycleReport | None = None
        if partial:
            with self._during(executor, f"{name}: wake weights"):
                first = executor.wake_up([WEIGHTS])
            self._expect_refusal(executor, number)
            with self._during(executor, f"{name}: wake kv_cache"):
                wake = executor.wake_up([KV_CACHE])
            wakes = {"wake weights": first, "wake kv_cache": wake}
        else:
            with self._during(executor, f"{name}: wake"):
                wake = executor.wake_up()
            wakes = {"wake": wake}
        with self.audience.during(f"{name}: decoding again"):
            after = self._decode(executor)
        cycle = Cycle(
            sleep_s=sleep.wall_s,
            wake_s=sum(report.wall_s for report in wakes.values()),
            partial=partial,
            stages=tuple(
                StageTimes(operation, stage.name, stage.wall_s, stage.ranks)
                for operation, report in {"sleep": sleep, **wakes}.items()
                for stage in report.stages
            ),
            device_bytes=DeviceBytes(
                awake=sleep.device_bytes_before,
                asleep=sleep.device_bytes_after,
                woken=wake.device_bytes_after,
                weights_woken=first.device_bytes_after if first else None,
            ),
            identical=after.answers == before.answers,
            token_sha256=BeforeAfter(before.token_sha256, after.token_sha256),
            logits_sha256=BeforeAfter(before.logits_sha256, after.logits_sha256),
            distinct_tokens=after.distinct_tokens,
            weights_identical=after.weights == before.weights and after.ballast_intact,
            addresses_identical=after.addresses == before.addresses,
        )
        self.problems += [f"cycle {number}: {problem}" for problem in self._problems_of(cycle)]
        return cycle

    def _problems_of(self, cycle: Cycle) -> Iterator[str]:
        if not cycle.token_sha256.equal:
            yield "the tokens differ from those before the sleep"
        elif not cycle.identical:
            yield "the logits' bits differ from those before the sleep"
        if not cycle.weights_identical:
            yield "weights differ from those before the sleep"
        if not cycle.addresses_identical:
            yield "something a graph uses is at another address than before the sleep"
        readings = cycle.device_bytes
        if not all(len(bytes_) == len(self._ranks) for bytes_ in (readings.awake, readings.asleep, readings.woken)):
            yield "the device memory could not be read"
            return
        for rank, asleep in enumerate(readings.asleep):
            above = asleep - self._empty_bytes(rank)
            if above > (0 if self.kind == "soft" else MAX_ASLEEP_BYTES_ON_GPU):
                yield f"{above} bytes stayed on the device of rank {rank} while asleep"
        if self.kind == "soft" and readings.woken != readings.awake:
            yield f"the devices hold {readings.woken} bytes after waking, not {readings.awake} as before"

    def _expect_refusal(self, executor: CUDACheckpointExecutor, number: int) -> None:
        try:
            executor.collective_rpc("decode", args=(PROMPTS, 1))
        except AsleepError:
            return
        self.problems.append(f"cycle {number}: decoding was let through while the KV cache was asleep")

    def _decode(self, executor: CUDACheckpointExecutor) -> _Decoded:
        answers = executor.collective_rpc("decode", args=(PROMPTS, self.options.new_tokens))
        if any(answer != answers[0] for answer in answers):
            self.problems.append("the ranks decoded different tokens or logits")
        return _Decoded(
            answers,
            executor.collective_rpc("weight_checksums"),
            executor.collective_rpc("addresses"),
            all(executor.collective_rpc(ballast_is_intact)) if self.options.weights_gib else True,
        )

    def _during(self, executor: CUDACheckpointExecutor, what: str) -> AbstractContextManager[None]:
        return self.audience.during(what, lambda: executor.stage or executor.phase)

    # -- what is left ----------------------------------------------------------------------------

    def clean_up(self) -> None:
        """After the shutdown: look for what is still there, and remove what is the demo's own."""
        for pid, started in sorted(self._processes):
            if procfs.is_alive(pid, started):
                self.left_behind.append(f"process {pid}")
        self._closed = self._settled_devices()
        for rank in self._ranks:
            above = self._bytes_of(self._closed, rank) - self._empty_bytes(rank)
            if above > (0 if self.kind == "soft" else MAX_ASLEEP_BYTES_ON_GPU):
                self.left_behind.append(f"{above} bytes on the device of rank {rank}")
        shutil.rmtree(self._soft_root, ignore_errors=True)
        self.left_behind += [f"directory {path}" for path in sorted(self._directories() - self._directories_before)]
        self.problems += [f"left behind after the shutdown: {what}" for what in self.left_behind]

    def _settled_devices(self) -> dict[str, int]:
        """Readings after the shutdown, once they are back where they were, or no longer change their mind."""
        until = time.monotonic() + (0 if self.kind == "soft" else _SETTLE_S)
        while True:
            found = self._read_devices()
            if time.monotonic() >= until or all(used <= self._empty.get(name, 0) for name, used in found.items()):
                return found
            time.sleep(0.1)

    def _remember_processes(self) -> None:
        """The workers, the helper, and whatever they started."""
        for process in psutil.Process().children(recursive=True):
            try:
                self._processes.add((process.pid, procfs.start_time(process.pid)))
            except ProcessLookupError:
                pass  # gone meanwhile

    def _directories(self) -> set[Path]:
        return set(directories.user_directory().glob(self._own_directories))

    def _read_devices(self) -> dict[str, int]:
        """Bytes in use by device, from outside every process that uses it."""
        return _read_soft_devices(self._soft_root) if self.kind == "soft" else _read_gpus()

    def _empty_bytes(self, rank: int) -> int:
        return self._bytes_of(self._empty, rank)

    def _bytes_of(self, readings: dict[str, int], rank: int) -> int:
        return readings.get(self._devices[rank], 0) if rank < len(self._devices) else 0

    # -- the report ------------------------------------------------------------------------------

    def report(self) -> DemoReport:
        options = self.options
        if len(self.cycles) < options.cycles and not self.problems:
            self.problems.append(f"only {len(self.cycles)} of {options.cycles} cycles were run")
        return DemoReport(
            device=self.kind,
            device_note=device_note(self.kind),
            tensor_parallel_size=options.tensor_parallel_size,
            communication=options.communication,
            start_s=self.start_s,
            cycles=tuple(self.cycles),
            empty_device_bytes=tuple(self._empty_bytes(rank) for rank in self._ranks),
            closed_device_bytes=tuple(self._bytes_of(self._closed, rank) for rank in self._ranks),
            left_behind=tuple(self.left_behind),
            problems=tuple(self.problems),
            passed=not self.problems,
            environment=environment(self.kind),
        )


# -- run in the workers --------------------------------------------------------------------------


def add_ballast(worker: Any, size_bytes: int) -> None:
    """Give a worker more weights to carry: bytes that differ by rank and place."""
    ballast = worker.context.allocator.allocate(size_bytes, WEIGHTS)
    for offset, block in _ballast_blocks(worker.context.rank, size_bytes):
        ballast.write(block, offset)
    worker.demo_ballast = ballast


def ballast_is_intact(worker: Any) -> bool:
    """Whether every byte of the ballast is what :func:`add_ballast` wrote."""
    ballast = worker.demo_ballast
    blocks = _ballast_blocks(worker.context.rank, ballast.size_bytes)
    return all(ballast.read(offset, len(block)) == block for offset, block in blocks)


def _ballast_blocks(rank: int, size_bytes: int) -> Iterator[tuple[int, bytes]]:
    noise = random.Random(rank).randbytes(_BALLAST_BLOCK_BYTES)
    for offset in range(0, size_bytes, _BALLAST_BLOCK_BYTES):
        block = offset.to_bytes(8, "little") + noise[8:]
        yield offset, block[: size_bytes - offset]


# -- readings ------------------------------------------------------------------------------------


def _read_soft_devices(root: Path) -> dict[str, int]:
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    return {name: softgpu.SoftGpu(root, name).used_bytes() for name in names if softgpu.SoftGpu.exists(root, name)}


def _read_gpus() -> dict[str, int]:
    """NVML's "used" by UUID; needs no context. Empty where NVML cannot be asked."""
    # Version 2 counts the driver's own reserve apart, as nvidia-smi and the helper do.
    return {
        _text(nvml.nvmlDeviceGetUUID(handle)): int(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used)
        for nvml, handle in _gpus()
    }


def _gpus() -> list[tuple[Any, Any]]:
    """NVML and its handle of each GPU."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001 - no module, no library or no GPU, each in its own words
        return []


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def environment(kind: str) -> dict[str, Any]:
    """What a result depends on: versions, machine, command line. Imports none of what it names."""
    packages = ("checkpoint-executor", "torch", "msgspec", "pyzmq", "cuda-bindings", "nccl4py", "nvidia-ml-py")
    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
    }
    if kind == "cuda" and (gpus := _gpus()):
        found["gpus"] = [_text(nvml.nvmlDeviceGetName(handle)) for nvml, handle in gpus]
        found["driver"] = _text(gpus[0][0].nvmlSystemGetDriverVersion())
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
