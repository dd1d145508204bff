# ruff: noqa: ARG003 - the names are vLLM's
"""An out-of-tree platform for vLLM on a machine without a GPU: the entry point that makes vLLM believe in a device.

``vllm.platform_plugins`` finds it through a ``.dist-info`` that ``vllm_harness`` writes. It only says what vLLM asks
while it builds a configuration; the device itself is the software device, which :mod:`tests.support.vllm_worker` opens.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

__all__ = ["SoftPlatform", "register"]


def register() -> str:
    """The entry point: the platform's name, after making torch's accelerator calls harmless where there is none."""
    for name in ("empty_cache", "empty_host_cache", "synchronize"):
        setattr(torch.accelerator, name, _nothing)
    return "tests.support.vllm_platform.SoftPlatform"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """vLLM calls these at its end, and torch raises without an accelerator."""


class SoftPlatform(Platform):  # type: ignore[misc, unused-ignore]
    _enum = PlatformEnum.OOT
    device_name = "software device"
    # "cuda", because vLLM takes the type as the sign of a GPU; nothing here touches CUDA.
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "gloo"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    supported_dtypes = [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "software device"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 1 << 34

    @classmethod
    def is_async_output_supported(cls, enforce_eager: bool | None = None) -> bool:
        return True

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()

    @classmethod
    def device_count(cls) -> int:
        return 4

    @classmethod
    def set_device(cls, device: Any) -> None:
        pass

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        return True  # so that the rule about it can be broken

    def is_cumem_allocator_available(self) -> bool:
        return True

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        # Before 0.33, vLLM refuses the V2 model runner without Triton, which no worker here uses.
        sys.modules["vllm.config.vllm"].HAS_TRITON = True  # type: ignore[attr-defined]

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "tests.support.vllm_worker.SoftWorker"

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        pass

    @classmethod
    def log_warnings(cls) -> None:
        pass
