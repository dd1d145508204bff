#!/usr/bin/env python3
"""Run a command, and start it again whenever it fails:

    restart_on_failure.py --health-url http://localhost:8000/health --timeout-s 60 -- vllm serve MODEL

A command with a health URL is a server: it has failed when the URL gives no good answer for ``--timeout-s``, and when
it ends, with whatever status (vLLM's API server ends with 0 when its engine core has died). One without has failed when
it ends with a status other than 0. All of it is then killed, orphans included; the GPUs are waited for; and it is
started again after a pause that doubles. Each incident is one JSON line, on stderr or appended to ``--incidents``.
SIGTERM and Ctrl-C end the command in good order, then whatever is left of it.

Exit status: 0 when the command is done; 1 when the limit of restarts is reached; 2 when it cannot be run;
128 and the number after a signal.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from checkpoint_executor.errors import ConfigError, FatalError
from checkpoint_executor.supervise import (
    RestartPolicy,
    SupervisedCommand,
    UsedBytes,
    append_incident,
    default_used_bytes,
    nvml_used_bytes,
    print_incident,
    soft_used_bytes,
)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    received: list[int] = []
    try:
        engine = build(options)

        def stop(number: int, _: FrameType | None) -> None:
            received.append(number)
            engine.stop(options.grace_s)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        engine.run()
    except ConfigError as error:
        print(f"restart_on_failure: {error}", file=sys.stderr)
        return 2
    except FatalError as error:
        print(f"restart_on_failure: {error}", file=sys.stderr)
        if not received:
            return 1
    return 128 + received[0] if received else 0


def build(options: argparse.Namespace) -> SupervisedCommand:
    readings: dict[str, Callable[[], UsedBytes]] = {
        "auto": default_used_bytes,
        "cuda": lambda: nvml_used_bytes(options.gpus.split(",") if options.gpus else None),
        "soft": lambda: soft_used_bytes(options.soft_root),
        "none": lambda: no_devices,
    }
    return SupervisedCommand(
        options.command,
        health=options.health_url,
        health_timeout_s=options.timeout_s or 60.0,
        probe_interval_s=options.probe_interval_s,
        policy=RestartPolicy(
            max_restarts=options.max_restarts,
            window_s=options.window_s,
            backoff_s=options.backoff_s,
            backoff_max_s=options.backoff_max_s,
            start_s=options.start_timeout_s,
            free_s=options.free_timeout_s,
        ),
        used_bytes=readings[options.device](),
        report=append_incident(options.incidents) if options.incidents else print_incident,
    )


def no_devices() -> dict[str, int]:
    """There is no device memory to wait for."""
    return {}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    default = RestartPolicy()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition(":\n")[0] + ". See docs/operations.md.",
        usage="%(prog)s [options] -- COMMAND...",
    )
    parser.add_argument("--health-url", help="answers with a status below 400 while the engine is well")
    parser.add_argument("--timeout-s", type=positive, help="longest time without a good answer (60; needs a URL)")
    parser.add_argument("--start-timeout-s", type=positive, default=default.start_s, help="until its first good answer")
    parser.add_argument("--probe-interval-s", type=positive, default=1.0)
    parser.add_argument("--max-restarts", type=count, default=default.max_restarts, help="within the window")
    parser.add_argument("--window-s", type=positive, default=default.window_s)
    parser.add_argument("--backoff-s", type=positive, default=default.backoff_s, help="before the first; doubles")
    parser.add_argument("--backoff-max-s", type=positive, default=default.backoff_max_s)
    parser.add_argument("--free-timeout-s", type=positive, default=default.free_s, help="for device memory to be free")
    parser.add_argument("--grace-s", type=positive, default=10.0, help="between SIGTERM and SIGKILL when stopped")
    parser.add_argument("--incidents", metavar="FILE", help="append incidents here")
    parser.add_argument("--device", choices=("auto", "cuda", "soft", "none"), default="auto", help="memory to wait for")
    parser.add_argument("--gpus", metavar="LIST", help="indices or UUIDs; by default CUDA_VISIBLE_DEVICES, or all")
    parser.add_argument("--soft-root", metavar="FOLDER", help="of the software devices")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("there is no COMMAND; put it behind --")
    if options.timeout_s is not None and options.health_url is None:
        parser.error("--timeout-s needs --health-url: without it there is nothing to time")
    for name, given, device in (("--gpus", options.gpus, "cuda"), ("--soft-root", options.soft_root, "soft")):
        if given and options.device not in ("auto", device):
            parser.error(f"{name} cannot be used with --device {options.device}: it chooses {device} devices")
    if options.gpus and options.soft_root:
        parser.error("--gpus and --soft-root are of different devices; name one")
    options.device = "cuda" if options.gpus else "soft" if options.soft_root else options.device
    if options.incidents and not Path(options.incidents).absolute().parent.is_dir():
        parser.error(f"--incidents {options.incidents}: there is no such folder")
    return options


def count(text: str) -> int:
    """How many times."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def positive(text: str) -> float:
    """A number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
