"""The documents a newcomer reads: the ten lines run, the commands exist, no link is dead."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_executor.coordinator import OWN_STAGES, Stage
from checkpoint_executor.executor import detect_device_kind

_REPOSITORY = Path(__file__).resolve().parents[2]
_DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/what-stays-on-the-gpu.md")


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    text = (_REPOSITORY / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_ten_lines_run_as_they_stand(tmp_path: Path) -> None:
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) == 10
    script = tmp_path / "ten_lines.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        # Software devices of its own: on the shared ones others may be at work.
        env={
            **os.environ,
            "PYTHONPATH": str(_REPOSITORY),
            "CHECKPOINT_EXECUTOR_SOFTGPU_ROOT": str(tmp_path / "devices"),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    device_bytes, weights = done.stdout.splitlines()
    if detect_device_kind() == "soft":
        assert re.fullmatch(r"device bytes: \(0, 0\) \((\d{6,}), \1\)", device_bytes)
    assert weights == "weights: [b'expensive', b'expensive']"


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_every_script_a_document_names_is_there(document: str) -> None:
    named = set(re.findall(r"\bscripts/[\w./-]*\w", (_REPOSITORY / document).read_text()))
    assert [name for name in sorted(named) if not (_REPOSITORY / name).is_file()] == []


def test_the_two_commands_come_first() -> None:
    first, *_ = blocks("README.md", "")
    assert [line.split()[0] for line in first.splitlines()] == ["./scripts/demo", "./scripts/check"]


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_no_link_is_dead(document: str) -> None:
    folder = (_REPOSITORY / document).parent
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (_REPOSITORY / document).read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (folder / target).exists()] == []


def test_the_architecture_page_shows_only_changes_of_phase_that_exist() -> None:
    def edges(document: str) -> set[tuple[str, str]]:
        diagram = next(block for block in blocks(document, "mermaid") if block.startswith("stateDiagram"))
        return set(re.findall(r"^ *(\S+) --> (\w+|\[\*\])", diagram, re.MULTILINE))

    shown = edges("docs/architecture.md")
    assert len(shown) > 10
    assert shown - edges("docs/state-diagrams.md") == set()


def test_the_architecture_page_lists_the_stages_in_their_order() -> None:
    lines = (_REPOSITORY / "docs/architecture.md").read_text().splitlines()
    # Two tables side by side, with an empty column between them.
    rows = [cells for line in lines if len(cells := line.split("|")) == 7 and not cells[3].strip()]
    down, up = ([found[0] for row in rows if (found := re.findall(r"`(\w+)`", row[at]))] for at in (1, 4))

    def names(stages: tuple[Stage, ...]) -> list[str]:
        return [stage.name for stage in stages if not stage.name.startswith("measure_")]

    assert down == names(OWN_STAGES.down)
    assert up == names(OWN_STAGES.up)
