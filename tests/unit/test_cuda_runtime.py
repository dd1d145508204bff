"""What of the CUDA runtime needs no GPU: choosing a device, the single rank's communicator, tensors over a storage."""

from __future__ import annotations

import pytest
import torch

from checkpoint_executor.workers.cuda_calls import choose_device
from checkpoint_executor.workers.cuda_communicator import LocalCommunicator
from checkpoint_executor.workers.cuda_memory import _contiguous_stride

UUIDS = ["GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-aaaaaaaa-0000-0000-0000-000000000002"]


def test_a_device_is_found_by_its_uuid_whatever_its_place() -> None:
    for uuids in (UUIDS, UUIDS[::-1]):
        assert uuids[choose_device(uuids, UUIDS[1], 0)] == UUIDS[1]
        assert uuids[choose_device(uuids, UUIDS[1].upper(), 0)] == UUIDS[1]


def test_without_a_uuid_the_place_counts() -> None:
    assert [choose_device(UUIDS, None, index) for index in (0, 1)] == [0, 1]


@pytest.mark.parametrize(("uuid", "index"), [("GPU-bbbb", 0), (None, 2), (None, -1)])
def test_a_device_that_is_not_there_is_refused(uuid: str | None, index: int) -> None:
    with pytest.raises(ValueError, match="device"):
        choose_device(UUIDS, uuid, index)


def test_a_single_rank_needs_no_library_and_still_keeps_the_rules() -> None:
    communicator = LocalCommunicator()
    tensor = torch.ones(3)
    assert communicator.all_reduce(tensor) is tensor
    assert communicator.all_gather(tensor).shape == (1, 3)
    assert not communicator.needs_suspend
    communicator.suspend()
    with pytest.raises(RuntimeError, match="suspended"):
        communicator.all_reduce(tensor)
    with pytest.raises(RuntimeError, match="already"):
        communicator.suspend()
    communicator.resume()
    communicator.check()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_tensor_of_any_type_can_be_set_on_a_storage_of_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What ``CudaAllocator.empty`` relies on."""
    expected = torch.empty(shape, dtype=dtype)
    raw = torch.zeros(expected.numel() * expected.element_size(), dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(raw.untyped_storage(), 0, shape, _contiguous_stride(shape))
    assert tensor.shape == expected.shape
    assert tensor.stride() == expected.stride()
    assert tensor.data_ptr() == raw.data_ptr()
    assert tensor._base is None
    parameter = torch.nn.Parameter(tensor, requires_grad=dtype is torch.bfloat16)
    assert parameter.data_ptr() == raw.data_ptr()
