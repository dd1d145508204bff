"""A hook of mkdocs: makes links that are right on GitHub right in the site as well.

Pages of ``docs/`` link to files outside it (``../SECURITY.md``, ``../workers/protocols.py``) and to folders of raw
results, as GitHub shows them. mkdocs knows neither. For each file or folder that a page links to, the site gets a page:
a document is rendered, with its own links treated in the same way; any other text is shown as it is; a folder is
listed. README.md is the front page. A link to something that does not exist is left as it is, and mkdocs, which checks
every link and anchor, fails on it.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]

#: Where pages of files outside docs/ go, under their own path.
SOURCE = "source"

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
#: Within one paragraph.
_CODE = re.compile(r"(`+)(?!`)(?:(?!\n\s*\n).)*?(?<!`)\1(?!`)", re.DOTALL)
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")

#: Languages that the highlighter knows by another name than the ending; what is not here is told by its ending.
_LANGUAGES = {"": "text", ".txt": "text", ".sh": "bash", ".py": "python", ".yml": "yaml", ".md": "markdown"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of everything that is linked to, starting from README.md and the pages that are there."""
    added = _Pages(files, config)
    added.add_document("README.md", "index.md")
    for file in list(files.documentation_pages()):
        if file.abs_src_path is not None:
            added.follow(Path(file.abs_src_path).read_text(), _repository_path(file, config))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page of ``docs/`` to where the site has their targets."""
    file = page.file
    if file.abs_src_path is None:
        return markdown  # made here, and right already
    path = _repository_path(file, config)
    return rewritten(markdown, path, lambda target: _uri(target, files, config), file.src_uri)


class _Pages:
    """Adds pages to the files of a site, each once."""

    def __init__(self, files: Files, config: MkDocsConfig) -> None:
        self._files = files
        self._config = config

    def follow(self, markdown: str, path: str) -> None:
        """Add what a document links to. ``path`` is the document's, from the repository's root."""
        for target in linked(markdown, path):
            uri = _uri(target, self._files, self._config)
            there = REPOSITORY / target
            if uri is None or self._files.get_file_from_path(uri) is not None or not there.exists():
                continue
            if there.is_dir():
                self._add_linking(_listing(there, target), f"{target}/contents.md", uri)
            elif there.suffix == ".md":
                self.add_document(target, uri)
            else:
                self._add(uri, _source(there, target))

    def add_document(self, target: str, uri: str) -> None:
        """Add a document from outside ``docs/``, and what it links to."""
        self._add_linking((REPOSITORY / target).read_text(), target, uri)

    def _add_linking(self, markdown: str, path: str, uri: str) -> None:
        # A place holder first: documents link to each other in circles.
        file = self._add(uri, markdown)
        self.follow(markdown, path)
        self._files.remove(file)
        self._add(uri, rewritten(markdown, path, lambda target: _uri(target, self._files, self._config), uri))

    def _add(self, uri: str, markdown: str) -> File:
        # In no menu, and that is on purpose.
        level = InclusionLevel.INCLUDED if uri == "index.md" else InclusionLevel.NOT_IN_NAV
        file = File.generated(self._config, uri, content=markdown, inclusion=level)
        self._files.append(file)
        return file


def linked(markdown: str, path: str) -> list[str]:
    """Files and folders that a document links to, from the repository's root. Nothing outside it, no addresses."""
    found: list[str] = []

    def note(target: str) -> None:
        found.append(target)

    rewritten(markdown, path, note, ".")
    return found


def rewritten(markdown: str, path: str, uri_of: Callable[[str], str | None], at: str) -> str:
    """The document with every link to a file of the repository replaced by one to where the site has it.

    Args:
        markdown: the document. path: its own, from the repository's root.
        uri_of: where the site has a file or folder of the repository; None leaves the link as it is.
        at: where the site has the document itself.
    """

    def link(match: re.Match[str]) -> str:
        address, hash_sign, anchor = match[2].partition("#")
        if not address or re.match(r"[a-z][a-z0-9+.-]*:|/", address):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), address))
        if target.startswith(".."):
            return match[0]
        uri = uri_of(target)
        if uri is None:
            return match[0]
        relative = posixpath.relpath(uri, posixpath.dirname(at) or ".")
        return f"{match[1]}{relative}{hash_sign}{anchor}{match[3]}"

    def outside_code(text: str) -> str:
        parts, end = [], 0
        for code in _CODE.finditer(text):
            # A link's own text may be code: such a link is still one.
            parts.append((text[end : code.start()], code[0]))
            end = code.end()
        if not parts:
            return _LINK.sub(link, text)
        # Code is taken out, so that brackets in it are no links, and put back.
        kept = [code for _, code in parts]
        bare = "".join(f"{before}\0{number}\0" for number, (before, _) in enumerate(parts)) + text[end:]
        return re.sub("\0(\\d+)\0", lambda found: kept[int(found[1])], _LINK.sub(link, bare))

    out: list[str] = []
    plain: list[str] = []
    fence = ""
    for line in markdown.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            out.append(line)
            if mark and mark[1].startswith(fence) and not line.strip(" `~\n"):
                fence = ""
        elif mark:
            out += [outside_code("".join(plain)), line]
            plain, fence = [], mark[1]
        else:
            plain.append(line)
    return "".join([*out, outside_code("".join(plain))])


def _uri(target: str, files: Files, config: MkDocsConfig) -> str | None:
    """Where the site has a file or folder of the repository; None where it has none and shall have none."""
    there = REPOSITORY / target
    if not there.exists():
        return None
    docs = Path(config.docs_dir).resolve()
    inside = there.resolve().is_relative_to(docs)
    name = there.resolve().relative_to(docs).as_posix() if inside else target
    if inside and there.is_file():
        return name
    if target == "README.md":
        return "index.md"
    if there.is_dir():
        readme = posixpath.join(name, "README.md")
        if inside and files.get_file_from_path(readme) is not None:
            return readme
        return posixpath.normpath(posixpath.join(name if inside else f"{SOURCE}/{name}", "contents.md"))
    return f"{SOURCE}/{name}" if there.suffix == ".md" else f"{SOURCE}/{name}.md"


def _repository_path(file: File, config: MkDocsConfig) -> str:
    folder = Path(os.path.relpath(config.docs_dir, REPOSITORY)).as_posix()
    return posixpath.join(folder, file.src_uri)


def _listing(folder: Path, target: str) -> str:
    lines = [f"# {target}", ""]
    entries = sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name))
    lines += [f"- [{path.name}{'/' if path.is_dir() else ''}]({path.name})" for path in entries if path.name[0] != "."]
    return "\n".join(lines) + "\n"


def _source(path: Path, target: str) -> str:
    text = path.read_text()
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    first = text.partition("\n")[0]
    language = "bash" if first.startswith("#!") and "bash" in first else None
    if language is None:
        suffix = PurePosixPath(target).suffix
        language = _LANGUAGES.get(suffix, suffix.removeprefix(".") or "text")
    return f"# {target}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
