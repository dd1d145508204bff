"""A soak's record: lines of JSON while it runs, one file of JSON in the end.

A line is written and flushed for each iteration, so that a kill loses nothing that was done, whatever the length of the
run. :func:`finish` makes the final file of the lines, after the run or after its death.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.soaking.drift import Bound, judge, warm_up

__all__ = ["Journal", "bounds", "finish", "read"]

MIB = 1 << 20

#: Slopes that are let pass, for 100 iterations. At 1,000 sleeps a day a process may so grow by 10 MiB a day, the use of
#: a GPU (which NVML reads in steps of 2 MiB) by 40 MiB, and 10 files may stay open. The software device is exact:
#: nothing may change there.
RSS_BOUND_BYTES = 1 * MIB
DEVICE_BOUND_BYTES = 4 * MIB
FILES_BOUND = 1.0
#: By how much the probe may become slower from the first iteration that is judged to the last, as a part of its median.
PROBE_BOUND = 0.5


class Journal:
    """Appends to the file of lines. A context manager.

    Args:
        path: of the lines; what was there is overwritten. header: the run, without its iterations.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._write(header)

    def iteration(self, record: dict[str, Any]) -> None:
        self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        # In one piece and at once: what the kernel has survives this process.
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the iterations. A last line that was cut off by a kill is left out.

    Raises:
        ValueError: not a soak's lines.
    """
    with path.open() as file:
        lines = [_line(line) for line in file]
    if not lines or lines[0] is None or lines[0].get("kind") != "soak":
        raise ValueError(f"{path} does not hold the lines of a soak")
    return lines[0], [line for line in lines[1:] if line is not None]


def _line(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def finish(lines: Path, target: Path | None) -> dict[str, Any]:
    """Judge the run; with a ``target``, write the final file and remove the lines.

    Raises:
        ValueError: not a soak's lines. OSError: the file cannot be written; the lines stay.
    """
    header, iterations = read(lines)
    wanted = header.pop("wanted_iterations")
    slopes = dict(_slopes(header["device"], iterations))
    mismatches = sum(not each["identical"] for each in iterations)
    failed = sum(each["burst_failed"] + ("stopped" in each) for each in iterations)
    problems = []
    if len(iterations) < wanted:
        problems.append(f"only {len(iterations)} of {wanted} iterations were done")
    if mismatches:
        first = next(each["number"] for each in iterations if not each["identical"])
        problems.append(f"{mismatches} probes differ from iteration 0's, the first in iteration {first}")
    if failed:
        reasons = [reason for each in iterations for reason in each.get("failures", [])]
        problems.append(f"{failed} requests failed: {'; '.join(reasons[:3])}")
    for name, slope in slopes.items():
        if not slope["ok"]:
            problems.append(
                f"{name} drifts by {slope['per_100']:.4g} ± {slope['standard_error']:.2g} {slope['unit']} in 100 "
                f"iterations; {slope['bound']:.4g} are let pass"
            )
    result = {
        **header,
        "iterations": iterations,
        "warm_up_iterations": warm_up(len(iterations)),
        "slopes": slopes,
        "mismatches": mismatches,
        "failed_requests": failed,
        "problems": problems,
        "ok": not problems,
    }
    if target is not None:
        new = target.with_name(f"{target.name}.new")
        new.write_text(json.dumps(result) + "\n")
        os.replace(new, target)
        lines.unlink()
    return result


def bounds(device: str) -> dict[str, Bound]:
    """The bounds by the name of the figure; those of the probe's time are of its median, over the run.

    What a software device computes with are the host's cores, which others use too: there the probe is held to the
    CPU time that it takes, and how long that lasts is only recorded.
    """
    exact = device == "soft"
    on_device = Bound(0 if exact else DEVICE_BOUND_BYTES, "bytes", both_ways=True, exact=exact)
    return {
        "device_awake_bytes": on_device,
        "device_asleep_bytes": on_device,
        "rss_bytes": Bound(RSS_BOUND_BYTES, "bytes"),
        "open_files": Bound(FILES_BOUND, "files"),
        "probe_cpu_s" if exact else "probe_s": Bound(PROBE_BOUND, "s"),
    }


def _slopes(device: str, iterations: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    # What broke off has no readings.
    kept = [each for each in iterations[warm_up(len(iterations)) :] if "stopped" not in each]
    if not kept:
        return
    for figure, bound in bounds(device).items():
        series: dict[str, list[float]] = {}
        for each in kept:
            found = each[figure]
            if isinstance(found, list):
                found = {f"rank {rank}": value for rank, value in enumerate(found)}
            elif not isinstance(found, dict):
                found = {"": found}
            for name, value in found.items():
                series.setdefault(f"{figure} {name}".strip(), []).append(value)
        for name, values in series.items():
            yield name, judge(values, _of_median(values) if figure.startswith("probe") else bound)._asdict()
    if "probe_s" not in bounds(device):
        values = [each["probe_s"] for each in kept]
        yield "probe_s", {**judge(values, _of_median(values))._asdict(), "judged": False, "ok": True}


def _of_median(values: list[float]) -> Bound:
    return Bound(PROBE_BOUND * statistics.median(values) * 100 / len(values), "s")
