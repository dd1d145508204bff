#!/usr/bin/env python3
"""Draws the pictures of ``docs/pictures/`` from the raw files committed under ``docs/measurements/``.

    python scripts/draw_pictures.py            # draw them all
    python scripts/draw_pictures.py --check    # exit 1 if one is missing, too many, or of other raw files

Each picture carries the hash of the raw files that it was drawn from, and that is what is compared: the pixels differ
with the version of matplotlib and its fonts. Needs the extra ``report``; ``--check`` does not.

A new picture is a line in ``PICTURES``.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation

from msgspec import Struct  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from checkpoint_executor import recorded, report_pictures  # noqa: E402
from checkpoint_executor.recorded import Run  # noqa: E402

MEASUREMENTS = ROOT / "docs" / "measurements"
OUT = ROOT / "docs" / "pictures"

#: A documentation page is no place for large files.
MAX_BYTES = 150_000


class Picture(Struct, frozen=True):
    """A picture of the documentation.

    Attributes:
        name: of its file, without ending. draw: makes the PNG of the runs.
        files: raw files below docs/measurements; of a file about all parts of gpu_vllm.py, "all.json#PART".
        names: what the runs are called in it, where their own names do not tell them apart.
    """

    name: str
    draw: Callable[[Sequence[Run]], bytes]
    files: tuple[str, ...]
    names: tuple[str, ...] = ()


def one(draw: Callable[[Run], bytes]) -> Callable[[Sequence[Run]], bytes]:
    """A picture of a single run."""

    def drawn(runs: Sequence[Run]) -> bytes:
        (run,) = runs
        return draw(run)

    return drawn


ONE, TWO, SOFT = "2026-11-30-h200", "2026-11-30-two-h200s", "2026-11-30-software-device"
LATER = "2026-12-01-h200"
SIZES = (1, 8, 16, 32)

PICTURES = (
    Picture("ways-16gib-tp1", one(report_pictures.ways), (f"{ONE}/tp1/ways.json",)),
    Picture("arms-16gib-tp1", one(report_pictures.ways), (f"{LATER}/arms/arms-own-16gib-tp1.json",)),
    Picture("arms-vllm-0.6b-tp1", one(report_pictures.ways), (f"{LATER}/arms/arms-vllm-0.6b-tp1.json",)),
    Picture(
        "by-size-tp1",
        report_pictures.comparison,
        tuple(f"{ONE}/tp1/table-suspend-tp1-{gib}gib.json" for gib in SIZES),
        tuple(f"{gib} GiB of weights, TP=1" for gib in SIZES),
    ),
    Picture(
        "by-size-tp2",
        report_pictures.comparison,
        (
            *(f"{TWO}/tp1/table-suspend-tp1-{gib}gib.json" for gib in (1, 16)),
            *(f"{TWO}/table-suspend-tp2-{gib}gib.json" for gib in SIZES),
        ),
        (
            *(f"{gib} GiB of weights, TP=1" for gib in (1, 16)),
            *(f"{gib} GiB of weights a rank, TP=2" for gib in SIZES),
        ),
    ),
    Picture("timeline-16gib-tp1", one(report_pictures.timeline), (f"{ONE}/tp1/table-suspend-tp1-16gib.json",)),
    Picture("timeline-16gib-tp2", one(report_pictures.timeline), (f"{TWO}/table-suspend-tp2-16gib.json",)),
    Picture("cycles-demo-tp2", one(report_pictures.cycle_times), (f"{TWO}/demo-tp2.json",)),
    Picture("memory-by-step-tp1", one(report_pictures.memory_by_step), (f"{LATER}/local-memory/attribution-tp1.json",)),
    Picture(
        "memory-by-step-tp2", one(report_pictures.memory_by_step), (f"{TWO}/attribution/attribution-tp2-16gib.json",)
    ),
    Picture(
        "memory-by-step-vllm-8b-tp1",
        one(report_pictures.memory_by_step),
        (f"{LATER}/vllm/present/memory-8b-tp1.cycles.jsonl",),
        ("vLLM 0.33.0, Qwen3 8B dimensions, TP=1",),
    ),
    Picture(
        "vllm-stock-and-ours",
        report_pictures.comparison,
        (
            f"{TWO}/vllm/first/all-0.6b-tp1.json#stock-0.6b-tp1",
            f"{TWO}/vllm/second/all-0.6b-tp1.json#ours-0.6b-tp1",
            f"{TWO}/vllm/third/all-8b-tp1.json#stock-8b-tp1",
            f"{TWO}/vllm/third/all-8b-tp1.json#ours-8b-tp1",
            f"{TWO}/vllm/second/all-tp2.json#ours-0.6b-tp2",
            f"{TWO}/vllm/second/all-tp2.json#stock-8b-tp2",
            f"{TWO}/vllm/second/all-tp2.json#ours-8b-tp2",
        ),
        (
            "stock, 0.6B, TP=1",
            "ours, 0.6B, TP=1",
            "stock, 8B, TP=1",
            "ours, 8B, TP=1",
            "ours, 0.6B, TP=2",
            "stock, 8B, TP=2",
            "ours, 8B, TP=2",
        ),
    ),
    Picture("drift-software-device", one(report_pictures.drift), (f"{SOFT}/soak.json",)),
    Picture("drift-h200-tp1", one(report_pictures.drift), (f"{LATER}/soak/soak-tp1.json",)),
    Picture(
        "timeline-vllm-8b-tp1",
        one(report_pictures.timeline),
        (f"{LATER}/local-memory/8b-tp1-given-back.cycles.jsonl",),
        ("vLLM 0.33.0, Qwen3 8B dimensions, TP=1",),
    ),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation from the committed raw files.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a picture is missing or stale; write nothing")
    options = parser.parse_args(arguments)
    if options.check:
        found = problems()
        for problem in found:
            print(f"{problem}: run python scripts/draw_pictures.py", file=sys.stderr)
        return 1 if found else 0
    OUT.mkdir(exist_ok=True)
    for picture in PICTURES:
        data = drawn(picture)
        if len(data) > MAX_BYTES:
            print(f"{picture.name}: {len(data)} bytes, more than {MAX_BYTES}", file=sys.stderr)
            return 1
        (OUT / f"{picture.name}.png").write_bytes(data)
        print(f"{OUT.relative_to(ROOT)}/{picture.name}.png: {len(data) >> 10} KiB")
    for path in strangers():
        path.unlink()
        print(f"{path.relative_to(ROOT)}: removed")
    return 0


def problems() -> list[str]:
    """What is wrong with the pictures as they lie there, one line each."""
    found = []
    for picture in PICTURES:
        path = OUT / f"{picture.name}.png"
        if not path.is_file():
            found.append(f"{path.relative_to(ROOT)} is missing")
        elif sources(picture).encode() not in path.read_bytes():
            found.append(f"{path.relative_to(ROOT)} was drawn from other raw files")
    return found + [f"{path.relative_to(ROOT)} is drawn by nothing" for path in strangers()]


def strangers() -> list[Path]:
    """Pictures that are not in the list."""
    return [path for path in sorted(OUT.glob("*.png")) if path.stem not in {picture.name for picture in PICTURES}]


def drawn(picture: Picture) -> bytes:
    """The PNG, with the hash of its sources in it."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    runs = [run(file) for file in picture.files]
    if picture.names:
        runs = [replace(found, name=name) for found, name in zip(runs, picture.names, strict=True)]
    text = PngInfo()
    text.add_text("Sources", sources(picture))
    buffer = io.BytesIO()
    Image.open(io.BytesIO(picture.draw(runs))).save(buffer, format="png", optimize=True, pnginfo=text)
    return buffer.getvalue()


def run(file: str) -> Run:
    """The run in a raw file."""
    path = file.partition("#")[0]
    (found,) = [one for one in recorded.read_all(path, (MEASUREMENTS / path).read_bytes()) if one.source == file]
    return found


def sources(picture: Picture) -> str:
    """A hash of the raw files' names and contents."""
    digest = hashlib.sha256()
    for file in picture.files:
        content = (MEASUREMENTS / file.partition("#")[0]).read_bytes()
        digest.update(f"{file}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
