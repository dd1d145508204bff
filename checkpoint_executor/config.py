"""PURE. The executor's configuration, and a validation that names every problem at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from checkpoint_executor import communication, preflight
from checkpoint_executor.errors import ConfigError
from checkpoint_executor.faults import Injection
from checkpoint_executor.messages import DeadlineClass
from checkpoint_executor.wire import MAX_HEADER_BYTES

__all__ = ["Deadlines", "ExecutorConfig", "validate"]


class Deadlines(Struct, frozen=True, forbid_unknown_fields=True):
    """How long each kind of stage may take, seconds, counted once for the stage and not for each rank.

    The defaults are the seed's: 30 s for a driver stage with 10 s for the driver's own lock timeout, 120 s for the
    worker's sleep, its wake, and the workspace hooks.
    """

    driver_s: float = 30.0
    driver_lock_s: float = 10.0
    worker_sleep_s: float = 120.0
    worker_wake_s: float = 120.0
    hook_s: float = 120.0
    #: From the start of the first process until the last worker is built (a model may have to be loaded).
    start_s: float = 900.0
    #: An orderly exit; then SIGKILL.
    shutdown_s: float = 5.0
    #: Reaping after SIGKILL. A process that outlives it is reported, not waited for.
    reap_s: float = 5.0

    def seconds(self, deadline: DeadlineClass) -> float:
        """Seconds of a deadline class."""
        value: float = getattr(self, f"{deadline.value}_s")
        return value


class ExecutorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set, apart from the worker itself.

    Attributes:
        tensor_parallel_size: number of ranks, one worker process and one device each.
        device: ``"cuda"``, ``"soft"`` (the software device), or ``"auto"``: CUDA if this machine has an NVIDIA GPU.
        device_ids: by rank, GPU UUIDs (or software device names); by default the visible devices in order.
        communication: ``"suspend"`` (NCCL gives its memory back; peer-to-peer is kept) or ``"socket"``.
        undo_before_checkpoint: undo a failed lock and serve on (True), or treat it as fatal, as the seed does.
        retain_backup: keep the host memory of the weights' backup while awake, so that the next sleep is fast.
        release_local_memory: give what CUDA keeps for kernels' local variables back before a checkpoint, instead of
            having the driver copy it (``workers/cuda_local_memory.py`` has what that rests on, and what it saves).
        deadlines: see :class:`Deadlines`.
        wake_margin_bytes: free device memory that admission asks for beyond what waking needs.
        host_margin_bytes: available host memory that admission asks for beyond what a checkpoint moves there.
        verify_weights: compare a hash of every weight allocation, taken on the device before the sleep, with one taken
            after its wake; a difference is fatal and named.
        attribution: read the devices after every stage and have the workers tell what they hold, so that the reports of
            sleeps and wakes say whose the bytes are (``CycleReport.memory``). Costs some milliseconds a stage.
        runtime_dir: where the private 0700 directory of this executor is made; by default the user's.
        soft_root, soft_capacity_bytes: where the software devices live, and the size of a new one.
        max_payload_bytes: largest single frame of user data.
        worker_env: environment variables added for the workers.
        ignore_preflight: preflight checks (``docs/preflight.md``) whose blockers shall not keep it from starting.
        faults: what shall go wrong; for tests, on the software device only.
    """

    tensor_parallel_size: int = 1
    device: str = "auto"
    device_ids: tuple[str, ...] = ()
    communication: str = "suspend"
    undo_before_checkpoint: bool = True
    retain_backup: bool = True
    release_local_memory: bool = True
    deadlines: Deadlines = Deadlines()
    wake_margin_bytes: int = 64 << 20
    host_margin_bytes: int = 256 << 20
    verify_weights: bool = False
    attribution: bool = False
    runtime_dir: str | None = None
    soft_root: str | None = None
    soft_capacity_bytes: int | None = None
    max_payload_bytes: int = 64 << 30
    worker_env: dict[str, str] = {}
    ignore_preflight: tuple[str, ...] = ()
    faults: tuple[Injection, ...] = ()


def parse(options: Mapping[str, Any]) -> ExecutorConfig:
    """Build a configuration from keyword options, refusing unknown names and wrong types.

    Raises:
        ConfigError: with every problem in one message, those of the values that could be read included.
    """
    known = ", ".join(sorted(ExecutorConfig.__struct_fields__))
    unknown = sorted(set(options) - set(ExecutorConfig.__struct_fields__))
    problems = [f"unknown option {name!r}; known are {known}" for name in unknown]
    given: dict[str, Any] = {}
    for field in msgspec.structs.fields(ExecutorConfig):
        if field.name in options:
            try:
                given[field.name] = msgspec.convert(options[field.name], field.type, builtin_types=(bytes,))
            except msgspec.ValidationError as error:
                problems.append(f"{field.name}: {error}")
    config = ExecutorConfig(**given)
    if problems:
        raise _config_error([*problems, *_value_problems(config)])
    return config


def validate(config: ExecutorConfig, environ: Mapping[str, str], device_kind: str) -> tuple[str, ...]:
    """Check a configuration against the environment, before any process is started.

    Args:
        config: what was asked for.
        environ: the environment the workers would inherit.
        device_kind: what ``device="auto"`` came to: ``"soft"`` or ``"cuda"``.

    Returns:
        Warnings.

    Raises:
        ConfigError: with every problem in one message.
    """
    problems = _value_problems(config)
    warnings: tuple[str, ...] = ()
    if unknown := sorted(set(config.ignore_preflight) - set(preflight.CHECKS)):
        problems.append(f"ignore_preflight names no check: {', '.join(unknown)}")
    if config.faults and device_kind != "soft":
        problems.append("faults can be injected on the software device only")
    if device_kind == "cuda" and config.communication in ("suspend", "socket"):
        merged = {**environ, **config.worker_env}
        found, warnings = communication.check_environment(config.communication, config.tensor_parallel_size, merged)
        problems.extend(found)
    if problems:
        raise _config_error(problems)
    return warnings


def _config_error(problems: Sequence[str]) -> ConfigError:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return ConfigError(
        f"the executor cannot start; nothing was started. {len(problems)} problem(s):\n{listed}",
        problems=tuple(problems),
    )


def _value_problems(config: ExecutorConfig) -> list[str]:
    """What is wrong with the values themselves, wherever the executor would run."""
    problems: list[str] = []
    size = config.tensor_parallel_size
    if size < 1:
        problems.append(f"tensor_parallel_size must be at least 1, not {size}")
    if config.device not in ("auto", "soft", "cuda"):
        problems.append(f"device must be 'auto', 'soft' or 'cuda', not {config.device!r}")
    if config.communication not in ("suspend", "socket"):
        problems.append(f"communication must be 'suspend' or 'socket', not {config.communication!r}")
    if "" in config.device_ids:
        problems.append("device_ids holds an empty name")
    if config.device_ids and len(config.device_ids) != size:
        problems.append(f"device_ids names {len(config.device_ids)} devices for {size} rank(s)")
    if len(set(config.device_ids)) != len(config.device_ids):
        problems.append("device_ids names a device twice: each rank needs one of its own")
    for name in Deadlines.__struct_fields__:
        value = getattr(config.deadlines, name)
        if not 0 < value < float("inf"):
            problems.append(f"deadlines.{name} must be a positive number of seconds, not {value}")
    if config.deadlines.driver_lock_s >= config.deadlines.driver_s:
        problems.append(
            f"deadlines.driver_lock_s ({config.deadlines.driver_lock_s}) must be below deadlines.driver_s "
            f"({config.deadlines.driver_s}): a lock that times out in the driver can be undone, a missed stage "
            "deadline cannot"
        )
    for name in ("wake_margin_bytes", "host_margin_bytes"):
        if getattr(config, name) < 0:
            problems.append(f"{name} must not be negative")
    if config.max_payload_bytes < MAX_HEADER_BYTES:
        problems.append(f"max_payload_bytes must be at least {MAX_HEADER_BYTES}: messages of our own pass there too")
    if config.soft_capacity_bytes is not None and config.soft_capacity_bytes <= 0:
        problems.append("soft_capacity_bytes must be positive")
    for name, value in config.worker_env.items():
        if name == "" or "=" in name or "\0" in name + value:
            problems.append(f"worker_env: {name!r} cannot be an environment variable")
    return problems
