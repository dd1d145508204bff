"""What the vLLM tests share: the real engine on software devices, and proof that nothing of it is left.

A front end (``LLM``, or the API server in a process of its own), vLLM's EngineCore process, its MultiprocExecutor
under ours, its worker processes, and our helper. Only the platform and the worker's model are ours.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from checkpoint_executor import communication, procfs, status
from checkpoint_executor.faults import Injection
from checkpoint_executor.softgpu import CONTEXT_BYTES, SoftGpu, device_name
from tests.support.targets import ChildProcess, close_all
from tests.support.vllm_waiting import DEADLINE_S, pause, wait_until

__all__ = ["EXECUTOR", "Engine", "OnMachine", "VllmMachine", "install_plugins"]

REPOSITORY = Path(__file__).resolve().parents[2]

EXECUTOR = "tests.support.vllm_executor.SoftCheckpointExecutor"

#: A prompt long enough for several KV blocks.
PROMPT = list(range(5, 45))

_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def install_plugins() -> Path:
    """Let vLLM find the test's platform and the project's own plugin, as it finds installed ones.

    The project's entry points are read from ``pyproject.toml``, so what is tested is what is shipped.
    """
    site = Path(tempfile.mkdtemp(prefix="cx-site-"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = {**project["entry-points"], "vllm.platform_plugins": {"soft": "tests.support.vllm_platform:register"}}
    info = site / "cx_test_plugins-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cx-test-plugins\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for path in (str(site), str(REPOSITORY)):
        if path not in sys.path:
            sys.path.insert(0, path)
    return site


class VllmMachine:
    """Software devices, a model folder and an environment of their own, for one engine at a time."""

    def __init__(self) -> None:
        # Short, because sockets are below it.
        self.folder = Path(tempfile.mkdtemp(prefix="cxv-"))
        self.root = self.folder / "gpu"
        self.runtime_base = self.folder / "run"
        self.runtime_base.mkdir()
        self.log = self.folder / "cycles.jsonl"
        self.model = self.folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(_MODEL))
        self._saved: dict[str, str | None] = {}
        self.engines: list[Engine] = []

    def environment(self, ranks: int = 1, faults: Sequence[Injection] = (), **more: str) -> dict[str, str]:
        """What vLLM's processes need in their environment."""
        environ = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "OMP_NUM_THREADS": "1",
            "CHECKPOINT_EXECUTOR_SOFTGPU_ROOT": str(self.root),
            "CHECKPOINT_EXECUTOR_RUNTIME_DIR": str(self.runtime_base),
            "CHECKPOINT_EXECUTOR_LOG": str(self.log),
            "TEST_VLLM_FAULTS": msgspec.json.encode(list(faults)).decode(),
        }
        if ranks > 1:
            environ |= suspend_environment(ranks)
        return {**environ, **more}

    def enter(self, environ: dict[str, str]) -> None:
        """Put an environment into this process, until :meth:`close`."""
        for name, value in environ.items():
            self._saved.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def options(self, ranks: int = 1, **options: Any) -> dict[str, Any]:
        """Arguments of ``LLM`` or ``EngineArgs``."""
        given: dict[str, Any] = {
            "model": str(self.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_sleep_mode": True,
            "tensor_parallel_size": ranks,
            "max_model_len": 512,
            "distributed_executor_backend": EXECUTOR,
        }
        if ranks > 1:
            given |= {"enable_nccl_comm_suspend": True, "disable_custom_all_reduce": True}
        return {**given, **options}

    def start(
        self, ranks: int = 1, faults: Sequence[Injection] = (), environ: dict[str, str] | None = None, **options: Any
    ) -> Engine:
        """An engine, ended with the machine."""
        self.enter(self.environment(ranks, faults, **(environ or {})))
        engine = Engine(self, ranks, self.options(ranks, **options))
        self.engines.append(engine)
        return engine

    # Looking

    def gpu(self, rank: int = 0) -> SoftGpu:
        return SoftGpu(self.root, device_name(rank))

    def used_bytes(self, ranks: int = 1) -> list[int]:
        return [self.gpu(rank).used_bytes() for rank in range(ranks)]

    def statuses(self) -> list[status.Status]:
        return status.read_all(str(self.runtime_base))

    @contextmanager
    def room_taken(self, rank: int = 0, leave_bytes: int = 0) -> Iterator[None]:
        """Another process holds all that is free on a rank's device, but for so many bytes."""
        gpu = self.gpu(rank)
        child = ChildProcess(
            "tests.support.soft_target_main",
            {
                "root": str(self.root),
                "device": gpu.name,
                "capacity_bytes": gpu.total_bytes,
                "size_bytes": gpu.total_bytes - gpu.used_bytes() - CONTEXT_BYTES - leave_bytes,
                "seed": 0,
            },
            device=gpu.name,
        )
        try:
            child.wait_ready()
            yield
        finally:
            close_all([child])

    def cycles(self) -> list[dict[str, Any]]:
        """The lines of the log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def assert_empty(self, ranks: int = 1) -> None:
        assert self.statuses() == []
        assert [path for parent in self.runtime_base.iterdir() for path in parent.iterdir()] == []
        assert self.used_bytes(ranks) == [0] * ranks

    def close(self) -> None:
        try:
            for engine in self.engines:
                engine.close()
        finally:
            for name, value in self._saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            shutil.rmtree(self.folder, ignore_errors=True)


#: The other accepted environment, beside what is the same in both.
SOCKET = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def suspend_environment(ranks: int) -> dict[str, str]:
    """The accepted environment for more than one rank, as docs/vllm.md has it."""
    settings = communication.required_settings(communication.SUSPEND, ranks, vllm=True)
    return {
        **{setting.name: setting.value for setting in settings},
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    }


class OnMachine:
    """What runs on a machine of its own, seen from outside."""

    machine: VllmMachine
    ranks: int

    @property
    def status(self) -> status.Status:
        (found,) = self.machine.statuses()
        return found

    @property
    def used_bytes(self) -> list[int]:
        return self.machine.used_bytes(self.ranks)

    @property
    def nothing(self) -> list[int]:
        """:attr:`used_bytes` of a checkpointed engine."""
        return [0] * self.ranks


class Engine(OnMachine):
    """A running ``LLM``, and its processes as seen from outside."""

    def __init__(self, machine: VllmMachine, ranks: int, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.machine = machine
        self.ranks = ranks
        self.llm = LLM(**options)
        self.core_pid: int = self.client.resources.engine_manager.processes[0].pid
        self.pids = {"EngineCore": self.core_pid, **self.status.processes}
        #: A pid alone may be another process's by the time it is looked at.
        self._started = {pid: procfs.start_time(pid) for pid in self.pids.values()}
        self._closed = False
        self._call_ids = itertools.count(1)

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def client(self) -> Any:
        return self.llm.llm_engine.engine_core

    @property
    def worker_pids(self) -> list[int]:
        return [self.pids[f"worker {rank}"] for rank in range(self.ranks)]

    @property
    def is_sleeping(self) -> bool:
        return bool(self.client.is_sleeping())

    def tokens(self, prompt: Sequence[int] = PROMPT, count: int = 24) -> list[int]:
        """Greedy tokens after a prompt."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def submit(self, name: str, prompt: Sequence[int] = PROMPT, count: int = 24) -> None:
        """Queue a request without waiting for it."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)

    def finish(self) -> dict[str, list[int]]:
        """Step until every queued request is done; tokens by request."""
        done = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        return done

    def wake(self, tags: list[str] | None = None) -> bool:
        """Wake; whether all is awake then. (``LLM.wake_up`` says so itself from 0.32 on.)"""
        self.llm.wake_up(tags)
        return not self.is_sleeping

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self.llm.collective_rpc(method, args=args))

    def reset(self) -> None:
        """Forget what the workers were asked before, and the log."""
        self.events()
        self.machine.log.unlink(missing_ok=True)

    def events(self) -> list[list[Any]]:
        """By rank, what the worker was asked since the last time."""
        return self.rpc("take_events")

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Begin a utility call of the client's, without waiting. By hand, since its socket is for one thread only."""
        from vllm.v1.engine import EngineCoreRequestType

        call_id = next(self._call_ids)
        future: Future[Any] = Future()
        self.client.utility_results[call_id] = future
        self.client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
        return future

    def settle(self) -> None:
        """Until EngineCore's main thread waits for work.

        A signal that comes in the moment before a Python thread begins to wait is seen only when the wait ends: vLLM's
        shutdown right after an answered call then takes its 5 s, with any executor.
        """
        calm = 0
        while calm < 5:
            try:
                text = Path(f"/proc/{self.core_pid}/task/{self.core_pid}/stat").read_text()
            except FileNotFoundError:
                return  # it is dead: nothing will wait
            state = text.rsplit(")", 1)[1].split()[0]
            calm = calm + 1 if state == "S" else 0
            pause(0.005)

    def is_alive(self, pid: int) -> bool:
        """Whether one of its processes is there, and still the same."""
        return procfs.is_alive(pid, self._started[pid])

    def assert_gone(self, deadline_s: float = DEADLINE_S) -> None:
        """None of its processes is left, and they have left nothing."""
        for name, pid in self.pids.items():
            wait_until(lambda pid=pid: not self.is_alive(pid), f"{name} ({pid}) is gone", deadline_s)  # type: ignore[misc]
        self.machine.assert_empty(self.ranks)

    def close(self) -> None:
        """Shut down, however it is, and hold it to having left nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.is_alive(self.core_pid):
                self.settle()
            self.client.shutdown()
            self.assert_gone()
        finally:
            for pid in self.pids.values():  # or one failure would be many
                if self.is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
