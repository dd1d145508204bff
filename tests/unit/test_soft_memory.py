"""The soft allocator: bytes and addresses before, during and after sleep, by tag."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint_executor.softgpu import POISON_BYTE
from checkpoint_executor.workers.protocols import DeviceRuntime
from checkpoint_executor.workers.soft_memory import SoftAllocator
from checkpoint_executor.workers.soft_runtime import SoftRuntime
from tests.support.ranks_device import own_driver, single_runtime

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[SoftRuntime]:
    with single_runtime(tmp_path) as opened:
        yield opened


@pytest.fixture
def allocator(runtime: SoftRuntime) -> SoftAllocator:
    return runtime.allocator


def held_bytes(runtime: SoftRuntime) -> int:
    return runtime._process.resident_bytes


def test_the_runtime_meets_the_protocol(runtime: SoftRuntime) -> None:
    device: DeviceRuntime = runtime  # mypy holds this
    assert (device.kind, device.device_id, device.torch_device) == ("soft", "SOFT-0", "cpu")
    assert device.trim() == {}
    assert not device.communicator.needs_suspend
    device.synchronize()


def test_weights_keep_bytes_and_addresses_through_sleep(runtime: SoftRuntime, allocator: SoftAllocator) -> None:
    weights = [allocator.allocate(size) for size in (100, 5000, 70_000)]
    cache = allocator.allocate(9000, "kv_cache")
    contents = [os.urandom(weight.size_bytes) for weight in weights]
    for cycle in range(3):
        for weight, data in zip(weights, contents, strict=True):
            weight.write(data)
        cache.write(bytes([cycle]) * 9000)
        addresses = [block.address for block in (*weights, cache)]
        held = held_bytes(runtime)
        assert allocator.tag_bytes() == {"weights": 75_100, "kv_cache": 9000}

        assert allocator.sleep() == {"weights": 75_100, "kv_cache": 9000, "copied": 75_100}
        assert allocator.sleeping == {"weights", "kv_cache"}
        assert held_bytes(runtime) == held - 84_100
        assert allocator.tag_bytes() == {"weights": 75_100, "kv_cache": 9000}
        assert allocator.sleep() == {"weights": 0, "kv_cache": 0, "copied": 0}

        assert allocator.wake(["weights", "kv_cache"]) == {"weights": 75_100, "kv_cache": 9000}
        assert allocator.sleeping == frozenset()
        assert held_bytes(runtime) == held
        assert [block.address for block in (*weights, cache)] == addresses
        assert [weight.read() for weight in weights] == contents
        # Neither what was there nor zeros, which would pass for data.
        assert cache.read() == bytes([POISON_BYTE]) * 9000
        contents = [data[::-1] for data in contents]


def test_weights_alone_can_wake_and_sleep_again(allocator: SoftAllocator) -> None:
    weight, cache = allocator.allocate(64), allocator.allocate(64, "kv_cache")
    weight.write(b"w" * 64)
    allocator.sleep()
    assert allocator.wake(["weights"]) == {"weights": 64}
    assert allocator.sleeping == {"kv_cache"}
    assert weight.read() == b"w" * 64
    with pytest.raises(RuntimeError, match=r"kv_cache sleeps and cannot be read; wake_up\(\['kv_cache'\]\)"):
        cache.read()
    weight.write(b"x" * 64)
    assert allocator.sleep() == {"weights": 64, "kv_cache": 0, "copied": 64}
    allocator.wake(["kv_cache"])
    # The cache alone is awake: this sleep must leave the backup of the weights alone.
    assert allocator.sleep() == {"weights": 0, "kv_cache": 64, "copied": 0}
    allocator.wake(["kv_cache", "weights"])
    assert weight.read() == b"x" * 64
    assert allocator.wake(["weights"]) == {"weights": 0}


def test_a_released_cache_may_sleep_with_the_rest(runtime: SoftRuntime, allocator: SoftAllocator) -> None:
    weight, cache = allocator.allocate(64), allocator.allocate(1000, "kv_cache")
    weight.write(b"w" * 64)
    held = held_bytes(runtime)
    assert allocator.release("kv_cache") == {"kv_cache": 1000}
    assert held_bytes(runtime) == held - 1000
    with pytest.raises(RuntimeError, match="released already"):
        allocator.release("kv_cache")
    assert allocator.sleep() == {"weights": 64, "kv_cache": 0, "copied": 64}
    allocator.wake(["weights", "kv_cache"])
    assert weight.read() == b"w" * 64
    assert cache.read() == bytes([POISON_BYTE]) * 1000
    with pytest.raises(ValueError, match="would be lost"):
        allocator.release("weights")


def test_a_wake_without_room_leaves_everything_asleep_and_can_be_repeated(tmp_path: Path) -> None:
    with single_runtime(tmp_path, capacity_bytes=2 << 20) as runtime:
        allocator = runtime.allocator
        weights = [allocator.allocate(200_000) for _ in range(3)]
        for index, weight in enumerate(weights):
            weight.write(bytes([index]) * 200_000)
        allocator.sleep()
        other = runtime._process.allocate(800_000)
        with pytest.raises(MemoryError, match="waking takes 600000 bytes"):
            allocator.wake(["weights"])
        assert "weights" in allocator.sleeping
        runtime._process.free(other)
        allocator.wake(["weights"])
        assert [weight.read() for weight in weights] == [bytes([index]) * 200_000 for index in range(3)]


def test_bad_requests_are_refused_before_anything_is_touched(allocator: SoftAllocator) -> None:
    weight = allocator.allocate(64)
    with pytest.raises(ValueError, match="unknown tag 'graphs'; the tags are weights, kv_cache"):
        allocator.allocate(64, "graphs")
    with pytest.raises(ValueError, match="positive"):
        allocator.allocate(0)
    with pytest.raises(MemoryError, match="SOFT-0 is full"):
        allocator.allocate(1 << 40)
    allocator.sleep()
    with pytest.raises(ValueError, match="unknown tag"):
        allocator.wake(["weights", "graphs"])
    assert "weights" in allocator.sleeping
    with pytest.raises(ValueError, match=r"weights sleeps.*wake_up"):
        allocator.allocate(64)
    with pytest.raises(ValueError, match="sleeps"), allocator.use("weights"):
        pass
    allocator.wake(["weights"])
    with pytest.raises(ValueError, match="outside"):
        weight.write(b"x" * 65)


def test_a_module_built_inside_use_lives_in_segments(allocator: SoftAllocator) -> None:
    torch.manual_seed(0)
    with allocator.use("weights"):
        first = torch.nn.Linear(8, 16)
        module = torch.nn.Sequential(first, torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        module.register_buffer("table", torch.tensor([1.0, 2.0]))
        moved = first.weight.t().contiguous()
    tensors = [*module.parameters(), *module.buffers(), moved]
    assert all(allocator.tag_at(tensor.data_ptr()) == "weights" for tensor in tensors)
    assert allocator.tag_bytes()["weights"] == sum(4 * tensor.numel() for tensor in tensors)
    torch.manual_seed(0)
    assert torch.equal(first.weight, torch.nn.Linear(8, 16).weight)

    # It is an ordinary module: it trains.
    x = torch.randn(3, 8)
    module(x).sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    before, addresses = module(x).detach(), [tensor.data_ptr() for tensor in tensors]
    allocator.sleep()
    allocator.wake(["weights"])
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert torch.equal(module(x), before)


def test_use_leaves_views_and_values_alone(allocator: SoftAllocator) -> None:
    outside = torch.arange(12.0).reshape(3, 4)
    with allocator.use("kv_cache"):
        view = outside.t()[1:]
        strided = outside.t() + 1
        empty = torch.empty(0)
        expanded = torch.ones(1).expand(3)
    assert view.data_ptr() == outside.data_ptr() + 4
    assert strided.stride() == (outside.t() + 1).stride()
    assert torch.equal(strided, outside.t() + 1)
    assert allocator.tag_at(strided.data_ptr()) == "kv_cache"
    assert empty.numel() == 0
    assert expanded.tolist() == [1.0, 1.0, 1.0]


def test_materialize_keeps_what_the_module_says(allocator: SoftAllocator) -> None:
    class Tied(torch.nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Parameter(torch.empty(10, 4))
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding
            self.frozen = torch.nn.Parameter(torch.empty(3, dtype=torch.bfloat16), requires_grad=False)
            self.frozen.loader = "kept"  # type: ignore[attr-defined]
            self.register_buffer("table", torch.arange(3, device="cpu"))
            self.register_buffer("missing", None)

    with torch.device("meta"):
        module = Tied()
    assert allocator.materialize(module) is module
    assert module.head.weight is module.embedding
    assert module.embedding.requires_grad
    assert not module.frozen.requires_grad
    assert module.frozen.loader == "kept"  # type: ignore[attr-defined]
    assert module.table.tolist() == [0, 1, 2]
    tensors = [module.embedding, module.frozen, module.table]
    assert all(allocator.tag_at(tensor.data_ptr()) == "weights" for tensor in tensors)
    assert allocator.tag_bytes()["weights"] == 160 + 6 + 24


def test_memory_of_a_dead_tensor_is_given_back(runtime: SoftRuntime, allocator: SoftAllocator) -> None:
    held = held_bytes(runtime)
    tensor = allocator.empty((1000,), torch.float32)
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert allocator.tag_bytes()["weights"] == 4000  # the view still looks at it
    del view
    gc.collect()
    assert allocator.tag_bytes()["weights"] == 0
    assert held_bytes(runtime) == held


def test_a_tensor_may_die_while_its_tag_sleeps(allocator: SoftAllocator) -> None:
    dying, staying = (allocator.empty((1000,), torch.float32).fill_(value) for value in (1, 2))
    allocator.sleep()
    del dying
    gc.collect()
    assert allocator.wake(["weights"]) == {"weights": 4000}
    assert torch.equal(staying, torch.full((1000,), 2.0))


def test_a_dead_tensor_makes_no_device_call_while_frees_are_deferred(
    runtime: SoftRuntime, allocator: SoftAllocator
) -> None:
    tensor = allocator.empty((1000,), torch.float32)
    allocator.sleep()
    allocator.defer_frees()
    driver = own_driver()
    driver.lock(1000)
    driver.checkpoint()
    del tensor
    gc.collect()
    # A device call would wait for the unlock below, and so for ever.
    assert allocator.tag_bytes()["weights"] == 4000
    driver.restore()
    driver.unlock()
    assert allocator.drain_frees() == 1
    assert allocator.tag_bytes()["weights"] == 0
    assert allocator.wake(["weights"]) == {"weights": 0}


def run_without_torch(code: str, root: Path) -> subprocess.CompletedProcess[str]:
    text = f"""
import sys
from pathlib import Path
from tests.support.ranks_device import single_runtime
with single_runtime(Path(sys.argv[1])) as runtime:
    block = runtime.allocator.allocate(4096)
    block.write(b"w" * 4096)
{code}
"""
    command = [sys.executable, "-c", text, str(root)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30, check=False)


def test_raw_memory_needs_no_torch(tmp_path: Path) -> None:
    code = """
    runtime.allocator.sleep()
    runtime.allocator.wake(["weights", "kv_cache"])
    runtime.communicator.check()
    runtime.shared_workspace(4096).checkpoint_prepare()
    assert block.read() == b"w" * 4096
    assert "torch" not in sys.modules
"""
    done = run_without_torch(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_stray_access_to_sleeping_memory_ends_the_process(tmp_path: Path) -> None:
    code = """
    import ctypes
    print(ctypes.string_at(block.address, 1), flush=True)
    runtime.allocator.sleep()
    ctypes.string_at(block.address, 1)
"""
    done = run_without_torch(code, tmp_path)
    assert (done.stdout, done.returncode) == ("b'w'\n", -signal.SIGBUS), done.stderr
