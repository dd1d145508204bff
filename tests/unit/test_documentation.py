"""The documentation as a site, and its pictures: links right in both places, pictures of the files they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import draw_pictures, site_hook

_REPOSITORY = Path(__file__).resolve().parents[2]
_DOCS = _REPOSITORY / "docs"


def rewritten(markdown: str, path: str = "docs/page.md", at: str = "page.md") -> str:
    """With every target at ``SITE/`` and its own name; what is called "gone" is nowhere."""
    return site_hook.rewritten(markdown, path, lambda target: None if "gone" in target else f"SITE/{target}", at)


# -- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[a](../SECURITY.md)", "[a](SITE/SECURITY.md)"),
        ("[a](../SECURITY.md#part)", "[a](SITE/SECURITY.md#part)"),
        ("![a](pictures/a.png)", "![a](SITE/docs/pictures/a.png)"),
        ("[`code.py`](../code.py) and [b](b.md)", "[`code.py`](SITE/code.py) and [b](SITE/docs/b.md)"),
        ("[[#5]](../a.py)", "[[#5]](SITE/a.py)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("[a](mailto:a@example.org)", "[a](mailto:a@example.org)"),
        ("[a](/absolute)", "[a](/absolute)"),
        ("[a](gone.md)", "[a](gone.md)"),
        ("[a](../../elsewhere.md)", "[a](../../elsewhere.md)"),
        ("`[a](b.md)`", "`[a](b.md)`"),
        ("a lone ` and [a](b.md)\n\n`x`", "a lone ` and [a](SITE/docs/b.md)\n\n`x`"),
        ("```\n[a](b.md)\n```\n[a](b.md)\n", "```\n[a](b.md)\n```\n[a](SITE/docs/b.md)\n"),
        ("~~~~\n~~~\n[a](b.md)\n~~~~\n", "~~~~\n~~~\n[a](b.md)\n~~~~\n"),
    ],
)
def test_links_point_to_where_the_site_has_their_targets(before: str, after: str) -> None:
    assert rewritten(before) == after


def test_a_link_is_relative_to_the_page_it_is_on() -> None:
    assert rewritten("[a](b.md)", "docs/deep/page.md", "deep/page.md") == "[a](../SITE/docs/deep/b.md)"


def test_what_a_document_links_to_is_found() -> None:
    text = "[a](../x.py) [b](c.md#d) [e](https://example.org) `[f](g.md)` [h](gone.md)"
    assert site_hook.linked(text, "docs/page.md") == ["x.py", "docs/c.md", "docs/gone.md"]


# -- pictures ------------------------------------------------------------------------------------


def test_the_pictures_are_drawn_from_the_committed_files() -> None:
    assert draw_pictures.problems() == []


def test_every_picture_is_on_a_page_and_small() -> None:
    text = "".join(path.read_text() for path in _DOCS.glob("*.md"))
    shown = set(re.findall(r"!\[[^\]]+\]\(pictures/([\w.-]+)\.png\)", text))
    assert shown == {picture.name for picture in draw_pictures.PICTURES}
    for path in (_DOCS / "pictures").glob("*.png"):
        assert path.stat().st_size < draw_pictures.MAX_BYTES, path


def test_a_picture_of_other_files_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = draw_pictures.PICTURES
    out = tmp_path / "pictures"
    out.mkdir()
    monkeypatch.setattr(draw_pictures, "ROOT", tmp_path)
    monkeypatch.setattr(draw_pictures, "OUT", out)
    monkeypatch.setattr(draw_pictures, "PICTURES", (first,))
    assert draw_pictures.problems() == [f"pictures/{first.name}.png is missing"]
    (out / f"{first.name}.png").write_bytes(b"of something else")
    (out / "stranger.png").write_bytes(b"")
    assert draw_pictures.problems() == [
        f"pictures/{first.name}.png was drawn from other raw files",
        "pictures/stranger.png is drawn by nothing",
    ]
    assert draw_pictures.main([]) == 0
    assert draw_pictures.problems() == []
    assert draw_pictures.main(["--check"]) == 0


def test_every_raw_file_that_the_page_names_is_there() -> None:
    text = (_DOCS / "what-stays-on-the-gpu.md").read_text()
    named = re.findall(r"\]\((measurements/[^)#]+)", text)
    assert len(named) > 10
    assert [name for name in named if not (_DOCS / name).exists()] == []
