"""``checkpoint-executor report``: the pictures, the page, and what becomes of files that are no recorded runs."""

from __future__ import annotations

import html.parser
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_executor import cli, recorded, report_command, report_page, report_pictures
from checkpoint_executor.recorded import Run
from tests.support import recorded_runs as runs

_REPOSITORY = Path(__file__).resolve().parents[2]

#: The fonts are read anew in each process, and a machine of two busy cores takes its time.
pytestmark = pytest.mark.timeout(240)

MIB = 1 << 20


def read(document: Any, source: str = "run.json") -> Run:
    return recorded.read(source, json.dumps(document).encode())


def write(folder: Path, **documents: Any) -> list[str]:
    paths = []
    for name, document in documents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document))
        paths.append(str(path))
    return paths


def pixels(png: bytes) -> tuple[tuple[int, int], set[tuple[int, ...]]]:
    """Size, and the colours that cover more than a few pixels."""
    from PIL import Image

    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    converted = image.convert("RGB")
    found = converted.getcolors(1 << 24)
    assert found is not None
    return converted.size, {colour for count, colour in found if count > 50 and isinstance(colour, tuple)}


def near(colours: set[tuple[int, ...]], wanted: str) -> bool:
    """Whether a colour is there; the palette moves it a little."""
    exact = [int(wanted[at : at + 2], 16) for at in (1, 3, 5)]
    return any(sum(abs(a - b) for a, b in zip(colour, exact, strict=True)) < 18 for colour in colours)


# -- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "document", "colours"),
    [
        (report_pictures.memory_by_step, runs.attribution, ["#1f4e8c", "#8db7e3", "#a62b40"]),
        (report_pictures.timeline, runs.demo, ["#c0392b", "#1f4e8c"]),
        (report_pictures.timeline, runs.part, ["#c0392b", "#1f4e8c"]),
        (report_pictures.cycle_times, runs.table, ["#1f4e8c", "#d1701a"]),
        (report_pictures.ways, runs.ways, ["#1f4e8c", "#d1701a"]),
        (report_pictures.ways, runs.arms, ["#1f4e8c", "#d1701a"]),
        (report_pictures.drift, lambda: {**runs.soak(100), "warm_up_iterations": 25}, ["#1f4e8c", "#d1701a"]),
    ],
)
def test_a_picture_shows_what_it_is_about(
    draw: Callable[[Run], bytes], document: Callable[[], Any], colours: list[str]
) -> None:
    png = draw(read(document()))
    (width, height), found = pixels(png)
    assert 700 <= width <= 1600
    assert 300 <= height <= 1400
    assert len(png) < 150_000
    assert near(found, "#ffffff")
    assert [colour for colour in colours if not near(found, colour)] == []


def test_runs_are_compared_in_one_picture() -> None:
    stock, ours = read(runs.part(stock=True)), read(runs.part())
    (_, two), colours = pixels(report_pictures.comparison([stock, ours]))
    assert near(colours, "#1f4e8c")
    (_, four), _ = pixels(report_pictures.comparison([stock, ours] * 2))
    assert four > two


def test_the_remainder_is_drawn_also_where_it_is_negative() -> None:
    for remainder in (900 * MIB, -900 * MIB):
        _, colours = pixels(report_pictures.memory_by_step(read(runs.attribution(1, remainder=remainder))))
        assert near(colours, report_pictures.KIND_COLOURS["remainder"]), remainder


def test_a_kind_that_nobody_knows_is_drawn() -> None:
    document = runs.attribution(1)
    for step in document["cycles"][-1]["steps"]:
        step["ranks"][0]["kinds"]["novelty"] = 800 * MIB
        step["ranks"][0]["device_used_bytes"] += 800 * MIB
    _, colours = pixels(report_pictures.memory_by_step(read(document)))
    assert near(colours, "#8a8f94")


@pytest.mark.parametrize("ranks", [1, 8, 40])
def test_lanes_fit_whatever_the_number_of_ranks(ranks: int) -> None:
    (_, height), _ = pixels(report_pictures.timeline(read(runs.demo(ranks))))
    assert height < 1600


def test_a_long_soak_of_many_ranks_is_drawn() -> None:
    png = report_pictures.drift(read(runs.soak(iterations=300, ranks=8)))
    pixels(png)
    assert len(png) < 150_000


def test_a_timeline_is_of_the_median_whole_cycle_unless_one_is_named() -> None:
    document = runs.demo(cycles=5)
    for cycle, seconds in zip(document["cycles"], (9.0, 3.0, 1.0, 2.0, 0.1), strict=True):
        cycle["sleep_s"] = seconds
    run = read(document)
    # The first and the one by tag do not count.
    assert report_pictures._typical(run, None).sleep_s == 2.0
    assert report_pictures._typical(run, 5).partial
    with pytest.raises(ValueError, match="no stages of a cycle 6"):
        report_pictures.timeline(run, 6)


@pytest.mark.parametrize("name", ["memory_by_step", "timeline", "cycle_times", "ways", "drift"])
def test_a_run_without_the_material_is_refused(name: str) -> None:
    empty = read({**runs.demo(), "cycles": []})
    with pytest.raises(ValueError, match=r"run\.json"):
        getattr(report_pictures, name)(empty)


def test_names_with_dollars_are_no_formulas() -> None:
    document = runs.part()
    document["part"]["model"] = r"$\frac{8b"
    pixels(report_pictures.cycle_times(read(document)))


def test_readings_of_zero_and_none_are_drawn() -> None:
    document = runs.soak(iterations=1, ranks=1)
    iteration = document["iterations"][0]
    iteration.update(burst_s=0, sleep_s=0, wake_s=0, probe_s=0, device_awake_bytes=[], rss_bytes={}, open_files={})
    run = read(document)
    for name in ("drift", "cycle_times"):
        pixels(getattr(report_pictures, name)(run))
    pixels(report_pictures.comparison([run, run]))
    late = runs.soak(iterations=3, ranks=2)
    late["iterations"][2].update(device_awake_bytes=[1], rss_bytes={}, open_files={"parent": 3})
    pixels(report_pictures.drift(read(late)))
    instant = runs.demo()
    for cycle in instant["cycles"]:
        for stage in cycle["stages"]:
            stage.update(wall_s=0, ranks=[0, 0])
    pixels(report_pictures.timeline(read(instant)))


def test_the_settings_of_the_user_are_left_as_they_were() -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 77.0}):
        small = pixels(report_pictures.ways(read(runs.ways())))
        assert matplotlib.rcParams["font.size"] == 77.0
    assert pixels(report_pictures.ways(read(runs.ways()))) == small


# -- the page ------------------------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """Tags that are open, whatever refers to something else, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "style", "onload")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page(*documents: Any, title: str = "Recorded runs") -> _Page:
    return _Page(report_page.render([read(document) for document in documents], [], title))


def test_the_page_says_what_each_run_was_and_what_its_check_rested_on() -> None:
    text = page(runs.demo(), runs.soak(), runs.ways(), runs.attribution()).text
    for expected in (
        "cli.py demo",
        "2026-12-01T09:00:00Z",
        "NVIDIA H200",
        "bits of all logits, SHA-256",
        "the same in 3 of 3",
        "scripts/soak.py --iterations 4",
        "another process held 100 GiB",
        "slope per 100 iterations",
        "driver, first",
        "graph pools",
        "device, as read",
        "host: backup arena",
    ):
        assert expected in text, expected


def test_a_slope_that_drifts_is_said_in_one_unit() -> None:
    text = page(runs.soak()).text
    assert "DRIFTS" in text
    assert re.search(r"rss parent\s*8789\s*0\.9766\s*976\.6\s*KiB", text)


def test_a_slope_of_too_few_readings_has_no_verdict() -> None:
    document = runs.soak()
    for slope in document["slopes"].values():
        slope["judged"] = False
    text = page(document).text
    assert "too few readings" in text
    assert "DRIFTS" not in text


def test_what_lies_within_the_remainder_is_said() -> None:
    document = runs.attribution(1)
    document["cycles"][-1]["steps"][0]["ranks"][0]["unaccounted"] = {"torch": 4 * MIB}
    assert re.search(r"within the remainder: torch\s*4\.00 MiB", page(document).text)


def test_bad_news_are_on_the_page() -> None:
    document = runs.soak()
    document["ok"] = False
    document["iterations"][1]["identical"] = False
    text = page(document).text
    assert "FAILED" in text
    assert "NOT identical" in text
    assert "the same in 3 of 4" in text


def test_hostile_text_stays_text() -> None:
    hostile = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>$title${body}"
    demo = {**runs.demo(), "device_note": hostile, "problems": [hostile], "passed": False, "left_behind": [hostile]}
    demo["environment"] = {"time": hostile, "command": [hostile], "gpus": [hostile], "driver": hostile}
    soak = {**runs.soak(), "device": hostile, "command": [hostile], "when": hostile}
    soak["slopes"] = {hostile: {**soak["slopes"]["sleep_s"], "unit": hostile}}
    attribution = runs.attribution(1)
    for cycle in attribution["cycles"]:
        cycle["steps"][0]["step"] = hostile
        cycle["steps"][0]["ranks"][0]["kinds"][hostile] = 1
        cycle["steps"][0]["ranks"][0]["host"][hostile] = 1
    ways = runs.ways()
    ways["runs"][0]["way"] = hostile
    part = runs.part()
    part["part"].update(model=hostile, name=hostile, backend=hostile)
    documents = [demo, soak, attribution, ways, part]
    found = [recorded.read(f"{hostile}/{at}", json.dumps(document).encode()) for at, document in enumerate(documents)]
    picture = report_page.Picture("p", hostile, hostile, b"png")
    parsed = _Page(report_page.render(found, [(None, picture)], hostile))
    assert "script" not in parsed.tags
    assert parsed.tags.count("img") == 1
    assert hostile in parsed.text
    assert [one for one in parsed.references if not one.startswith(("#run-", "data:image/png;base64,"))] == []


def test_many_rows_are_shortened_and_say_so() -> None:
    parsed = page(runs.soak(iterations=500))
    assert parsed.tags.count("tr") < 100
    assert "461 more" in parsed.text


# -- the command ---------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, demo=runs.demo(), soak=runs.soak(), memory=runs.attribution())
    out = tmp_path / "new" / "report"
    assert cli.main(["report", *files, "--out", str(out), "--title", "Mine & yours"]) == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n"
    names = {path.name for path in out.iterdir()}
    assert names == {
        "report.html",
        "comparison.png",
        "01-timeline.png",
        "01-cycles.png",
        "02-cycles.png",
        "02-drift.png",
        "03-memory.png",
    }
    text = (out / "report.html").read_text()
    parsed = _Page(text)
    assert parsed.tags.count("img") == len(names) - 1
    # Self-contained: nothing is fetched, and nothing runs.
    assert [one for one in parsed.references if not one.startswith(("#run-", "data:image/png;base64,"))] == []
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)
    assert "prefers-color-scheme: dark" in text
    assert "Mine & yours" in parsed.text
    for path in out.glob("*.png"):
        _, colours = pixels(path.read_bytes())
        assert len(colours) > 3, path


def test_a_report_is_written_over_an_older_one(tmp_path: Path) -> None:
    (file,) = write(tmp_path, ways=runs.ways())
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("old")
    (out / "mine.txt").write_text("kept")
    assert cli.main(["report", file, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["01-ways.png", "mine.txt", "report.html"]
    assert "old" not in (out / "report.html").read_text()[:3]


@pytest.mark.parametrize("content", [None, "", "{", '{"mode": 1}', '{"kind": "soak", "iterations": 3}'])
def test_a_file_that_is_no_run_is_named_and_nothing_is_written(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path, demo=runs.demo())
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    out = tmp_path / "out"
    assert cli.main(["report", *good, str(bad), "--out", str(out)]) == cli.EXIT_USAGE
    out_text, error = capsys.readouterr()
    assert out_text == ""
    assert error.startswith(f"checkpoint-executor report: {bad}: ")
    assert not out.exists()


def test_a_directory_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == cli.EXIT_USAGE
    assert "it cannot be read: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["run.json"], ["--out", "there"]])
def test_wrong_arguments_end_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", *arguments])
    assert ended.value.code == cli.EXIT_USAGE


def test_an_out_that_is_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = write(tmp_path, ways=runs.ways())
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert cli.main(["report", file, "--out", str(taken)]) == cli.EXIT_FAILED
    assert f"{taken}: nothing was written: " in capsys.readouterr().err
    assert taken.read_text() == "mine"


def test_what_cannot_be_written_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.name == "b":
            raise OSError(28, "No space left on device")
        return whole(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    old = tmp_path / "old"
    old.mkdir()
    (old / "a").write_text("before")
    for folder in (old, tmp_path / "new"):
        with pytest.raises(OSError, match="No space left"):
            report_command.write_all(folder, {"a": b"after", "b": b"never"})
    assert [path.name for path in old.iterdir()] == ["a"]
    assert (old / "a").read_text() == "before"
    assert not (tmp_path / "new").exists()
    (old / "c").mkdir()
    with pytest.raises(IsADirectoryError):
        report_command.write_all(old, {"a": b"after", "c": b"never"})
    assert (old / "a").read_text() == "before"


def test_a_missing_matplotlib_is_said_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    (file,) = write(tmp_path, demo=runs.demo())
    assert cli.main(["report", file, "--out", str(tmp_path / "out")]) == cli.EXIT_USAGE
    assert "pip install 'checkpoint-executor[report]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_line_imports_matplotlib_only_to_draw() -> None:
    code = (
        "import sys\nfrom checkpoint_executor import cli\n"
        "try:\n    cli.main(['report', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "from checkpoint_executor import report_pictures, report_page\n"
        "print(sorted({'matplotlib', 'PIL', 'numpy', 'torch', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--out DIR" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
