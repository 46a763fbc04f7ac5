# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages that lie outside ``docs`` are part of the site too, and links to them lead there.

In the repository `docs/index.md` links to `../CONTRIBUTING.md`; mkdocs knows only what lies below ``docs``. A link to
a file there that is no page becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/online_serving/README.md",
    "examples/offline_inference/README.md",
)
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point every link at where its target lies in the site."""
    name = page.file.src_uri
    return relinked(markdown, (ROOT if name in OUTSIDE else DOCS) / name, name.count("/"))


def relinked(markdown: str, source: Path, depth: int) -> str:
    """``markdown`` of the file ``source``, which lies ``depth`` folders deep in the site, with the site's links."""

    def moved(link: re.Match[str]) -> str:
        text, path, fragment = link.groups()
        target = (source.parent / path).resolve()
        if target.suffix != ".md" and not target.is_relative_to(DOCS) and target.exists():
            return text
        for root in (DOCS, ROOT):
            if target.is_relative_to(root):
                return f"[{text}]({'../' * depth}{target.relative_to(root).as_posix()}{fragment or ''})"
        return link[0]

    return LINK.sub(moved, markdown)
