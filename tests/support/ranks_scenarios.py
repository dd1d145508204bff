"""What the rank processes of the tests do; each function gets the rank first. State stays between calls."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from checkpoint_executor.softgpu import device_name
from checkpoint_executor.workers.protocols import DeviceRuntime
from checkpoint_executor.workers.soft_communicator import SoftCommunicator
from checkpoint_executor.workers.soft_runtime import SoftRuntime
from checkpoint_executor.workers.soft_workspace import SoftWorkspace

_open: dict[str, Any] = {}


def open_runtime(rank: int, root: Path, world_size: int, communication: str) -> None:
    runtime: DeviceRuntime = SoftRuntime.open(
        root=root / "devices",
        name=device_name(rank),
        rank=rank,
        world_size=world_size,
        rendezvous=root,
        communication=communication,
        capacity_bytes=256 << 20,
    )
    _open["runtime"] = runtime


def close_runtime(rank: int) -> None:
    """Not collective: the group's ranks are idle between two calls."""
    runtime = _open.pop("runtime", None)
    _open.clear()
    if runtime is not None:
        runtime.close()


def communicator() -> SoftCommunicator:
    found: SoftCommunicator = _open["runtime"].communicator
    return found


def check(rank: int) -> dict[str, Any]:
    communicator().check()
    return {"needs_suspend": communicator().needs_suspend, "suspended": communicator().is_suspended}


def imported_torch(rank: int) -> bool:
    import sys

    return "torch" in sys.modules


def suspend(rank: int) -> int | None:
    communicator().suspend()
    return communicator().staging_address


def resume(rank: int) -> int | None:
    communicator().resume()
    return communicator().staging_address


def device_bytes(rank: int) -> int:
    """Bytes this rank holds on its device, the context's included."""
    held: int = _open["runtime"]._process.resident_bytes
    return held


def other_operation(rank: int) -> None:
    communicator().barrier("one" if rank == 0 else "another")


def values(rank: int, dtype: str, elements: int) -> Any:
    """A rank's own deterministic tensor; sums depend on the order of the ranks in the last bits."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    if dtype == "int64":
        return torch.randint(-(2**60), 2**60, (elements,), generator=generator)
    return (torch.randn(elements, generator=generator, dtype=torch.float64) * 10.0**rank).to(getattr(torch, dtype))


def reduce(rank: int, dtype: str, elements: int) -> tuple[str, str]:
    """(digest of the all-reduced tensor, digest of the sum in rank order worked out here)."""
    import torch

    tensor = values(rank, dtype, elements)
    world_size = communicator().world_size
    returned = communicator().all_reduce(tensor)
    assert returned is tensor
    wide = torch.float32 if dtype == "bfloat16" else tensor.dtype
    expected = values(0, dtype, elements).to(wide)
    for other in range(1, world_size):
        expected = expected + values(other, dtype, elements).to(wide)
    return digest(tensor), digest(expected.to(tensor.dtype))


def gather(rank: int, dtype: str, elements: int) -> bool:
    import torch

    gathered = communicator().all_gather(values(rank, dtype, elements))
    expected = torch.stack([values(other, dtype, elements) for other in range(communicator().world_size)])
    return digest(gathered) == digest(expected) and gathered.shape == expected.shape


def reduce_strided(rank: int) -> list[list[float]]:
    """All-reduce a transposed tensor: not contiguous."""
    import torch

    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).t()
    communicator().all_reduce(tensor)
    rows: list[list[float]] = tensor.tolist()
    return rows


def refused_while_suspended(rank: int) -> dict[str, str]:
    """What each collective raises; the tensor must be untouched."""
    import torch

    tensor = torch.ones(4)
    errors = {}
    for name, call in {
        "all_reduce": lambda: communicator().all_reduce(tensor),
        "all_gather": lambda: communicator().all_gather(tensor),
        "check": communicator().check,
        "suspend": communicator().suspend,
    }.items():
        try:
            call()
        except RuntimeError as error:
            errors[name] = str(error)
    assert torch.equal(tensor, torch.ones(4))
    return errors


def wait_in_barrier(rank: int) -> None:
    communicator().barrier()


def capture_collective(rank: int) -> None:
    """A graph of both collectives over a fixed input."""
    runtime = _open["runtime"]
    import torch

    x = runtime.allocator.empty((4,), torch.float32, "kv_cache")
    x.fill_(1)
    _open["x"] = x
    _open["graph"] = runtime.capture(lambda: communicator().all_gather(communicator().all_reduce(x * 2) + x))


def replay_collective(rank: int, value: float) -> list[list[float]]:
    _open["x"].fill_(value + rank)
    rows: list[list[float]] = _open["graph"].replay().tolist()
    return rows


def replay_refused(rank: int) -> str:
    before = _open["graph"].output.clone()
    try:
        _open["graph"].replay()
    except RuntimeError as error:
        assert digest(before) == digest(_open["graph"].output)
        return str(error)
    return ""


def open_workspace(rank: int) -> int:
    workspace = _open["runtime"].shared_workspace(4096)
    _open["workspace"] = workspace
    address: int = workspace.address
    return address


def swap(rank: int, text: str) -> list[bytes]:
    workspace: SoftWorkspace = _open["workspace"]
    return workspace.swap(f"{text} {rank}".encode())


def prepare(rank: int) -> int:
    for _ in range(2):
        _open["workspace"].checkpoint_prepare()
    address: int = _open["workspace"].address
    return address


def restore(rank: int) -> int:
    for _ in range(2):
        _open["workspace"].checkpoint_restore()
    address: int = _open["workspace"].address
    return address


def build_transformer(rank: int, world_size: int, **config: Any) -> None:
    from checkpoint_executor.workers.transformer import TransformerConfig, TransformerWorker
    from checkpoint_executor.workers.worker import WorkerContext

    with _open["runtime"].device_call():
        context = WorkerContext(rank, world_size, _open["runtime"])
        _open["worker"] = TransformerWorker(context, TransformerConfig(**config))


def call_worker(rank: int, method: str, *args: Any) -> Any:
    with _open["runtime"].device_call():
        return getattr(_open["worker"], method)(*args)


def replay_any(rank: int) -> None:
    """Replay a graph of the model as it stands."""
    _open["worker"]._graphs[1].replay()


def sleep_memory(rank: int) -> dict[str, int]:
    figures: dict[str, int] = _open["runtime"].allocator.sleep()
    return figures


def wake_memory(rank: int, tags: list[str]) -> None:
    _open["runtime"].allocator.wake(tags)


def digest(tensor: Any) -> str:
    from checkpoint_executor.workers.soft_tensors import tensor_view

    host = tensor.contiguous()
    return hashlib.sha256(tensor_view(host)).hexdigest()
