# SPDX-License-Identifier: Apache-2.0
"""What the project's pages hold: fenced blocks with their marks, links, headings, code within the text."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"(?:^<!-- test: (?P<mark>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: Where it is.
        line: Line of its first line of text.
        language: As the fence says.
        mark: What the comment before it asks the tests for.
        text: What is between the fences.
    """

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    """The page's path within the project."""
    return str(page.relative_to(ROOT))


def pages() -> list[Path]:
    """Every page of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of ``page``, or those in one language."""
    text = page.read_text()
    found = [
        Block(page, text.count("\n", 0, match.start("text")) + 1, match["language"], match["mark"] or "", match["text"])
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def all_blocks(language: str) -> list[Block]:
    """The blocks of every page in one language."""
    return [block for page in pages() for block in blocks(page, language)]


def prose(page: Path) -> str:
    """The page without its blocks and comments, on one line for each paragraph."""
    text = _COMMENT.sub("", _FENCE.sub("", page.read_text()))
    return re.sub(r"(?<=\S)\n[ \t]*(?=[^\s|#>*-])", " ", text)


def codes(page: Path) -> list[str]:
    """Every piece of code within the text and the tables of ``page``."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: Path) -> list[str]:
    """Where the links of ``page`` lead, those to other sites left out."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not link.startswith(("http:", "https:"))]


def anchors(page: Path) -> set[str]:
    """The fragments by which the headings of ``page`` are reached."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block as words, comments left out and continued lines joined."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words
