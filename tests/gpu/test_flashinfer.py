"""FlashInfer's own trtllm workspace through sleep and wake, by the real executor on two GPUs.

FlashInfer compiles its kernels with nvcc at first use, for minutes. They have to be there already: compiled ahead at
``flashinfer/data/aot/trtllm_comm/trtllm_comm.so``, or in the package flashinfer-jit-cache.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import CUDACheckpointExecutor
from checkpoint_executor.errors import StartError
from tests.support.cuda_targets import make_driver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

# By name, since the module imports torch and this process shall not.
WORKER = "tests.support.flashinfer_worker:FlashInferWorker"

MIB = 1 << 20
RPC_S = 30
#: Three processes of 4 MiB each, as measured on H200, and some room; the workspace alone is more than 128 MiB.
ASLEEP_LIMIT_BYTES = 32 * MIB

MAPPED, RELEASED = [True] * 3, [False] * 3
CYCLE = [
    {"hook": "prepare", "before": MAPPED, "after": RELEASED},
    {"hook": "restore", "before": RELEASED, "after": MAPPED},
]
ALL_RIGHT = {"eager": [True, True], "graph": [True, True]}


@pytest.fixture
def flashinfer(two_gpus: list[str]) -> None:
    # Looked for and not imported: that would open CUDA in this process.
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")


@contextmanager
def started(gpus: list[str], folder: Path, communication: str) -> Iterator[CUDACheckpointExecutor]:
    """An executor on these GPUs; nothing of it is left afterwards, however long a stage or a call would have taken."""
    environment = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # What is missing is an error at once, and nothing compiled earlier in the home directory is picked up.
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_WORKSPACE_BASE": str(folder),
    }
    if communication == "socket":
        # The machine may be set up for the other configuration, which this one refuses.
        environment["NCCL_CUMEM_ENABLE"] = "0"
    deadlines = {"start_s": 120.0, "worker_sleep_s": 30.0, "worker_wake_s": 30.0, "hook_s": 30.0}
    try:
        executor = CUDACheckpointExecutor(
            WORKER,
            len(gpus),
            worker_args=(str(folder / "meeting"),),
            device="cuda",
            device_ids=gpus,
            communication=communication,
            deadlines=deadlines,
            worker_env=environment,
        )
    except StartError as error:
        if "MissingJITCacheError" in str(error):
            pytest.skip("FlashInfer's trtllm_comm is not compiled ahead")
        raise
    with executor:
        yield executor


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("communication", ["suspend", "socket"])
def test_flashinfers_workspace_lets_go_for_the_driver_and_reduces_to_the_same_bits_afterwards(
    two_gpus: list[str], tmp_path: Path, communication: str
) -> None:
    driver = make_driver()
    empty = [driver.device_memory(gpu).used_bytes for gpu in two_gpus]
    with started(two_gpus, tmp_path, communication) as executor:

        def ask(method: str) -> Any:
            return executor.collective_rpc(method, timeout=RPC_S)

        found = ask("describe")
        print(f"{found[0]['type']}, {found[0]['bytes'] / MIB:.0f} MiB a rank, from {found[0]['library']}")
        assert [each["type"] for each in found] == ["TRTLLMAllReduceFusionWorkspace"] * 2
        assert [each["multicast"] for each in found] == [[False] * 3] * 2
        assert all(each["bytes"] > 128 * MIB for each in found)
        assert ask("known_answer") == [ALL_RIGHT] * 2
        before = ask("digests")
        assert before[0] == before[1]  # an all-reduce gives every rank the same bits
        assert before[0]["eager"] == before[0]["graph"]

        for number in range(1, 3):
            executor.sleep()
            used = [driver.device_memory(gpu).used_bytes for gpu in two_gpus]
            assert all(now <= then + ASLEEP_LIMIT_BYTES for now, then in zip(used, empty, strict=True))
            executor.wake_up()
            assert ask("hooks") == [CYCLE * number] * 2
            # The graph first would prove nothing about an eager call, nor the other way round: each does both.
            assert ask("digests") == before
            assert ask("known_answer") == [ALL_RIGHT] * 2
            assert ask("describe") == found
