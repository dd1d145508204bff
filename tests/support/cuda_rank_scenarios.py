"""What the rank processes of ``tests/gpu`` do; each function gets the rank first. State stays between calls."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_executor.communication import worker_environment
from checkpoint_executor.tags import KV_CACHE, WEIGHTS

if TYPE_CHECKING:
    import torch

    from checkpoint_executor.workers.cuda_memory import CudaAllocator
    from checkpoint_executor.workers.cuda_runtime import CudaRuntime
    from checkpoint_executor.workers.cuda_workspace import CudaWorkspace

MIB = 1 << 20
GIB = 1 << 30

_open: dict[str, Any] = {}


def open_runtime(
    rank: int, folder: Path, gpus: list[str], communication: str = "suspend", retain_backup: bool = True
) -> str:
    """Open this rank's GPU by UUID; the UUID that the runtime reports."""
    os.environ.update(worker_environment(communication, len(gpus), os.environ))
    from checkpoint_executor.workers.cuda_runtime import CudaRuntime

    _open["runtime"] = CudaRuntime.open(
        device_uuid=gpus[rank],
        rank=rank,
        world_size=len(gpus),
        rendezvous=folder,
        communication=communication,
        retain_backup=retain_backup,
    )
    return runtime().device_id


def runtime() -> CudaRuntime:
    found: CudaRuntime = _open["runtime"]
    return found


def allocator() -> CudaAllocator:
    return runtime().allocator


def digest(tensor: torch.Tensor) -> str:
    import torch

    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


def make_tensors(rank: int, sizes: list[int]) -> list[int]:
    """Random bfloat16 weights of these numbers of elements, and a cache; their addresses."""
    import torch

    torch.manual_seed(rank)
    weights = [allocator().empty((size,), torch.bfloat16) for size in sizes]
    for weight in weights:
        weight.normal_()
    cache = allocator().empty((4, MIB), torch.float16, KV_CACHE)
    cache.fill_(1)
    _open["weights"], _open["cache"] = weights, cache
    return [tensor.data_ptr() for tensor in (*weights, cache)]


def weight_digests(rank: int) -> list[str]:
    return [digest(weight) for weight in _open["weights"]]


def addresses(rank: int) -> list[int]:
    return [tensor.data_ptr() for tensor in (*_open["weights"], _open["cache"])]


def sleep(rank: int) -> dict[str, int]:
    """As the worker's service does it."""
    gc.collect()
    runtime().synchronize()
    figures = allocator().sleep()
    return {**figures, **runtime().trim()}


def wake(rank: int, tags: list[str]) -> dict[str, int]:
    figures = allocator().wake(tags)
    runtime().synchronize()
    return figures


def sleeping(rank: int) -> list[str]:
    return sorted(allocator().sleeping)


def update_weight(rank: int, index: int) -> str:
    """What a trainer's step does; the digest of the new bytes."""
    _open["weights"][index].mul_(1.5).add_(0.25)
    return digest(_open["weights"][index])


def swap_weights(rank: int, first: int, second: int) -> None:
    one, two = _open["weights"][first], _open["weights"][second]
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


def flip_byte(rank: int, index: int, offset: int) -> None:
    import torch

    _open["weights"][index].view(torch.uint8)[offset] ^= 1


def replace_weight(rank: int, index: int, elements: int) -> None:
    """Free a weight and make another of a different size."""
    import torch

    _open["weights"][index] = None
    _open["weights"][index] = allocator().empty((elements,), torch.bfloat16).normal_()


def drop_weight(rank: int, index: int) -> dict[str, int]:
    """Free a weight; bytes by tag after the next call of the allocator."""
    del _open["weights"][index]
    gc.collect()
    allocator().allocate(1, KV_CACHE)
    return allocator().tag_bytes()


def arena_bytes(rank: int) -> int:
    return runtime()._arena.capacity_bytes


def free_device_bytes(rank: int) -> int:
    from checkpoint_executor.workers.cuda_calls import call

    return int(call("cuMemGetInfo")[0])


def materialize_model(rank: int) -> dict[str, Any]:
    """A module from the meta device: shared parameters, a buffer computed early, all types."""
    import torch

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100), torch.nn.LayerNorm(100))
        model[1].weight = model[0].weight
    model.register_buffer("table", torch.arange(7))
    model.to(torch.bfloat16)
    allocator().materialize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    x = torch.ones(3, 100, dtype=torch.bfloat16, device="cuda")
    table: Any = model.table
    return {
        "shared": model[0].weight is model[1].weight,
        "table": table.tolist(),
        "devices": sorted({str(p.device) for p in model.parameters()}),
        "leaves": all(p.is_leaf and p.requires_grad for p in model.parameters()),
        "finite": bool(torch.isfinite(model(x)).all()),
        "bytes": allocator().tag_bytes()[WEIGHTS],
    }


# ------------------------------------------------------------------------------------------------
# The hash and the copies
# ------------------------------------------------------------------------------------------------


def hash_against_reference(rank: int, sizes: list[int]) -> list[int]:
    """Sizes for which the kernel and the reference differ."""
    import torch

    from checkpoint_executor.workers.cuda_hash import GpuHasher, reference_fingerprint

    hasher = GpuHasher(runtime()._context)
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    found = hasher([(each.data_ptr(), each.numel()) for each in data])
    expected = [reference_fingerprint(each.cpu().numpy().tobytes()) for each in data]
    return [size for size, one, two in zip(sizes, found, expected, strict=True) if one != two]


def hash_bandwidth(rank: int, size_bytes: int) -> float:
    """Bytes per second, the best of five."""
    import torch

    from checkpoint_executor.workers.cuda_hash import GpuHasher

    hasher = GpuHasher(runtime()._context)
    data = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        hasher([(data.data_ptr(), size_bytes)])
        best = min(best, time.perf_counter() - begun)
    return size_bytes / best


def copy_bandwidth(rank: int, size_bytes: int) -> dict[str, float]:
    """Bytes per second of sleep and wake (maps and unmaps included), and of plain pinned copies of the same size."""
    import torch

    weight = allocator().empty((size_bytes,), torch.uint8)
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    speeds: dict[str, float] = {}

    def measure(name: str, action: Any) -> None:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        action()
        torch.cuda.synchronize()
        speeds[name] = max(speeds.get(name, 0.0), size_bytes / (time.perf_counter() - begun))

    for round_number in range(4):
        measure("plain d2h", lambda: host.copy_(weight, non_blocking=True))
        measure("plain h2d", lambda: weight.copy_(host, non_blocking=True))
        weight.fill_(round_number)
        if round_number == 0:
            begun = time.perf_counter()
            allocator().prepare_backup()
            speeds["prepare_backup_s"] = time.perf_counter() - begun
        measure("sleep", allocator().sleep)
        measure("wake", lambda: allocator().wake([WEIGHTS, KV_CACHE]))
        assert int(weight[-1]) == round_number
    measure("sleep, unchanged", allocator().sleep)
    allocator().wake([WEIGHTS, KV_CACHE])
    return speeds


# ------------------------------------------------------------------------------------------------
# The torch pool
# ------------------------------------------------------------------------------------------------


def build_in_pool(rank: int) -> dict[str, Any]:
    """An ordinary model built inside ``use``; where it landed."""
    import torch

    torch.manual_seed(0)
    before = allocator().tag_bytes()
    with allocator().use(WEIGHTS):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="cuda") for _ in range(16)))
        with allocator().use(KV_CACHE):
            cache = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
        scratch = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        del scratch
    outside = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    after = allocator().tag_bytes()
    _open.update(model=model, cache=cache, x=torch.randn(4, 1024, device="cuda"), outside=outside)
    _open["weights"] = list(model.parameters())
    _open["expected"] = run_model(rank)
    return {tag: after[tag] - before[tag] for tag in after}


def run_model(rank: int) -> str:
    import torch

    with torch.no_grad():
        return digest(_open["model"](_open["x"]))


def expected_output(rank: int) -> str:
    expected: str = _open["expected"]
    return expected


def drop_model(rank: int) -> dict[str, int]:
    """Bytes by tag once nothing of the pool is in use."""
    import torch

    for name in ("model", "cache", "weights"):
        _open.pop(name)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return allocator().tag_bytes()


def churn_in_pool(rank: int, threads: int, seconds: float) -> dict[str, int]:
    """Threads that allocate and free, in pools and outside, while this one does too: what deadlocked with callbacks
    into Python.

    Returns:
        Rounds made ``inside`` and ``outside``, and the bytes by tag that are left.
    """
    import torch

    stop = time.monotonic() + seconds
    counts = {"inside": 0, "outside": 0}
    errors: list[BaseException] = []

    def churn(where: str, seed: int, until: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        while time.monotonic() < until:
            sizes = torch.randint(1, 48, (6,), generator=generator).tolist()
            kept = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in sizes]
            kept[0].fill_(seed)
            del kept
            counts[where] += 1
            if where == "outside" and counts[where] % 5 == 0:
                torch.cuda.empty_cache()

    def inside(seed: int) -> None:
        while time.monotonic() < stop:
            with allocator().use(WEIGHTS):
                churn("inside", seed, min(stop, time.monotonic() + seconds / 10))

    def guarded(function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(inside, seed), daemon=True) for seed in range(threads)]
    workers += [
        threading.Thread(target=guarded, args=(churn, "outside", seed, stop), daemon=True) for seed in range(threads)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        # A tensor in a cycle ends in the collector, with the GIL held, while the others are in torch's allocator.
        cycle: list[Any] = [torch.empty(MIB, dtype=torch.uint8, device="cuda")]
        cycle.append(cycle)
        del cycle
        gc.collect()
        for worker in workers:
            worker.join(0.01)
    if errors:
        raise RuntimeError(f"{type(errors[0]).__name__}: {errors[0]}")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return counts | allocator().tag_bytes()


# ------------------------------------------------------------------------------------------------
# Graphs and collectives
# ------------------------------------------------------------------------------------------------


def capture(rank: int, collective: bool) -> None:
    """A graph of some layers, with an all-reduce after each if ``collective``."""
    import torch

    size = 512
    torch.manual_seed(rank)
    layers = [allocator().empty((size, size), torch.float32).normal_(std=size**-0.5) for _ in range(4)]
    x = allocator().empty((8, size), torch.float32, KV_CACHE)

    @torch.no_grad()
    def step() -> torch.Tensor:
        y = x
        for layer in layers:
            y = torch.tanh(y @ layer)
            if collective:
                y = runtime().communicator.all_reduce(y)
        return y

    x.fill_(0)
    _open.update(weights=layers, cache=x, graph=runtime().capture(step), step=step)


def replay(rank: int, value: float) -> tuple[str, str]:
    """Digests of the graph's output for an input, and of the same computed eagerly."""
    _open["cache"].fill_(value)
    replayed = digest(_open["graph"].replay())
    return replayed, digest(_open["step"]())


def capture_local_arrays(rank: int, array_ints: int) -> str:
    """A graph of a kernel whose threads each use an array too large for registers; the digest of what it computes."""
    import torch

    from checkpoint_executor.workers.self_test_kernel import LocalArrays

    kernel = LocalArrays(torch.cuda.current_device(), array_ints)
    seeds = torch.zeros(1, dtype=torch.int32, device=runtime().torch_device)
    out = torch.zeros(kernel.numbers, dtype=torch.int32, device=runtime().torch_device)

    def step() -> torch.Tensor:
        kernel.launch(seeds, out)
        return out

    _open.update(local_seeds=seeds, local_graph=runtime().capture(step))
    return replay_local_arrays(rank, 1)


def replay_local_arrays(rank: int, seed: int) -> str:
    """The digest of the output of the last graph with local arrays."""
    _open["local_seeds"].fill_(seed)
    return digest(_open["local_graph"].replay())


def release_local_memory(rank: int) -> int:
    runtime().synchronize()
    return runtime().release_local_memory()


def restore_local_memory(rank: int) -> None:
    runtime().restore_local_memory()


def graph_address(rank: int) -> int:
    address: int = _open["graph"].output.data_ptr()
    return address


def replay_seconds(rank: int, rounds: int = 200) -> float:
    """Seconds of one replay, the median of several runs."""
    import torch

    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(rounds):
            _open["graph"].replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / rounds)
    return sorted(times)[2]


def replay_refused(rank: int) -> str:
    try:
        _open["graph"].replay()
    except RuntimeError as error:
        return str(error)
    return ""


def suspend(rank: int) -> dict[str, Any]:
    communicator = runtime().communicator
    if communicator.needs_suspend:
        communicator.suspend()
    return {"suspended": communicator.is_suspended, **communicator.memory_bytes()}


def resume(rank: int) -> dict[str, Any]:
    communicator = runtime().communicator
    if communicator.needs_suspend:
        communicator.resume()
    communicator.check()
    return {"suspended": communicator.is_suspended, **communicator.memory_bytes()}


def collectives_refused(rank: int) -> list[str]:
    import torch

    tensor = torch.ones(4, device="cuda")
    errors = []
    for attempt in (
        lambda: runtime().communicator.all_reduce(tensor),
        lambda: runtime().communicator.all_gather(tensor),
        runtime().communicator.check,
    ):
        try:
            attempt()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def reduce_and_gather(rank: int) -> dict[str, Any]:
    """Sums on a stream that is not the default one, of a strided tensor too; and gathered ranks."""
    import torch

    communicator = runtime().communicator
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        big = torch.full((MIB,), float(rank + 1), device="cuda")
        communicator.all_reduce(big)
        strided = torch.arange(6.0, device="cuda").view(2, 3).t()
        communicator.all_reduce(strided)
        gathered = communicator.all_gather(torch.full((2,), rank, device="cuda"))
        torch.cuda.current_stream().synchronize()
    return {"sum": sorted(set(big.tolist())), "strided": strided.tolist(), "gathered": gathered.tolist()}


def open_workspace(rank: int, size_bytes: int) -> tuple[int, ...]:
    workspace: CudaWorkspace = runtime().shared_workspace(size_bytes)
    return workspace.addresses


def workspace() -> CudaWorkspace:
    found: Any = runtime().workspaces[0]
    return found  # type: ignore[no-any-return]


def swap(rank: int, text: str) -> list[bytes]:
    return workspace().swap(f"{text} {rank}".encode())


def prepare(rank: int) -> tuple[int, ...]:
    for _ in range(2):
        workspace().checkpoint_prepare()
    return workspace().addresses


def restore(rank: int) -> tuple[int, ...]:
    for _ in range(2):
        workspace().checkpoint_restore()
    return workspace().addresses
