"""I/O. ``checkpoint-executor report``: recorded runs in, a page and pictures out.

Reads, draws and writes, in that order: a file that cannot be read and a picture that cannot be drawn are known before
anything is written. What is written appears whole or not at all, each file under its own name only when all of them lie
beside it complete.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from checkpoint_executor.recorded import Run, UnreadableRunError, read_all

__all__ = ["add_arguments", "load", "run", "write_all"]

PAGE_NAME = "report.html"

_OK, _FAILED, _USAGE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of ``report``."""
    parser.description = (
        "Turn recorded runs into a page (report.html, pictures inside, no network) and PNGs: GPU memory by step, "
        "stages by rank, seconds by cycle, drift. A file is told by its content: the JSON of demo --json, of "
        "bench_gpu.py, of bench_cycle.py --arms, of gpu_vllm.py, of an attribution or a soak, or a "
        "CHECKPOINT_EXECUTOR_LOG. Exit status: 0 written, 1 it could not be written, 2 a file is no recorded run, or "
        "matplotlib is missing."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a recorded run")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where to write; made if it is not there"
    )
    parser.add_argument("--title", default="Recorded runs", help="of the page (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from checkpoint_executor import report_page, report_pictures

    out: Path = args.out
    try:
        report_pictures.require_matplotlib()
        runs = [run for path in args.files for run in load(path)]
    except (UnreadableRunError, report_pictures.MissingMatplotlibError) as error:
        return _say(str(error), _USAGE)
    pictures = report_pictures.pictures_of(runs)
    page = report_page.render(runs, pictures, args.title)
    contents = {f"{picture.name}.png": picture.png for _, picture in pictures}
    try:
        write_all(out, {**contents, PAGE_NAME: page.encode()})
    except OSError as error:
        return _say(f"{out}: nothing was written: {error.strerror or error}", _FAILED)
    print(out / PAGE_NAME)  # noqa: T201 - the result
    return _OK


def load(path: Path) -> tuple[Run, ...]:
    """The recorded runs in a file.

    Raises:
        UnreadableRunError: it cannot be read, or is no recorded run.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableRunError(f"{path}: it cannot be read: {error.strerror or error}") from None
    return read_all(str(path), data)


def write_all(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files into a folder, made if it is not there. The last appears last; other files are left alone.

    Raises:
        OSError: it did not work. No file was changed, unless it was a rename that failed, within one folder.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as name:
            beside = Path(name)
            for file, content in contents.items():
                if (folder / file).is_dir():
                    raise IsADirectoryError(f"{folder / file} is a directory")
                (beside / file).write_bytes(content)
            for file in contents:
                os.replace(beside / file, folder / file)
    except OSError:
        if made:
            # Empty, unless it was the renames that failed.
            try:
                folder.rmdir()
            except OSError:
                pass
        raise


def _say(problem: str, status: int) -> int:
    print(f"checkpoint-executor report: {problem}", file=sys.stderr)  # noqa: T201 - for a person
    return status
