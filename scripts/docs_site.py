"""Hook of mkdocs.yml: README.md becomes the first page of the documentation site, and each file
outside docs/ that a page links becomes a page, so that links work without a repository to point to.
"""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
# A relative link: its text, its target and its anchor.
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")
ROW = re.compile(r"^\|.*", re.MULTILINE)  # of a table
CODE = re.compile(r"`[^`]*`")
LANGUAGES = {".patch": "diff", ".py": "python", ".sh": "bash"}  # others are named as their suffix


def page_of(file: Path) -> str:
    """Where the site has a file of the repository, relative to docs/."""
    if file == README:
        return "index.md"
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = file.relative_to(ROOT).as_posix()
    return name if file.suffix == ".md" else f"{name}.md"


def targets_of(file: Path) -> set[Path]:
    """The files that a page links."""
    links = LINK.findall(file.read_text("utf-8"))
    targets = {(file.parent / target).resolve() for _, target, _ in links}
    return {target for target in targets if target.is_file()}


def files_outside() -> set[Path]:
    """README.md, and all files outside docs/ that pages link."""
    ahead = {README, *DOCS.rglob("*.md")}
    known: set[Path] = set()
    while ahead:
        file = ahead.pop()
        known.add(file)
        if file.suffix == ".md":
            ahead |= targets_of(file) - known
    return {file for file in known if not file.is_relative_to(DOCS)}


def with_site_links(markdown: str, file: Path) -> str:
    """The text of a page with its links pointing to where the site has their targets. The site has
    no folders; of a link to one, the text remains."""
    here = Path(page_of(file)).parent

    def moved(link: re.Match[str]) -> str:
        text, name, anchor = link.groups("")
        target = (file.parent / name).resolve()
        if target.is_dir():
            return text
        if target.is_file():
            return f"[{text}]({relpath(page_of(target), here)}{anchor})"
        return link[0]

    return LINK.sub(moved, markdown)


def with_plain_pipes(markdown: str) -> str:
    r"""The text with `|` for `\|` in the code of tables. GitHub needs the backslash there, and
    MkDocs shows it."""

    def plain(row: re.Match[str]) -> str:
        return CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0])

    return ROW.sub(plain, markdown)


def page_outside(file: Path) -> str:
    """Markdown of a page outside docs/, in which other files are code blocks."""
    text = file.read_text("utf-8")
    if file.suffix == ".md":
        return with_plain_pipes(with_site_links(text, file))
    language = LANGUAGES.get(file.suffix, file.suffix.removeprefix("."))
    fence = "`" * 8  # longer than any in a file
    return f"# {file.relative_to(ROOT)}\n\n{fence}{language}\n{text}\n{fence}\n"


# What MkDocs calls


def on_files(files: Files, config: MkDocsConfig) -> Files:
    # Here, because tests use this module without mkdocs.
    from mkdocs.structure.files import File, InclusionLevel

    for file in sorted(files_outside()):
        files.append(
            File.generated(
                config,
                page_of(file),
                content=page_outside(file),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by:
        return markdown
    return with_plain_pipes(with_site_links(markdown, DOCS / page.file.src_uri))
