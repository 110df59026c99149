"""An MkDocs hook for pages outside of docs/, and for links that leave it.

Every page must also work in the repository, so its links are repository paths: `../CONTRIBUTING.md`. On the site, such a
link leads to the page that shows this file if there is one, and otherwise to the file in the repository. As long as
pyproject.toml has no repository address, only the text of the link is shown.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "index.md": "README.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "research/icons.md": "examples/icons/README.md",
}
"""Page of the site -> file of the repository that it shows."""

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")
"""A Markdown link to a file: words, path and anchor."""

BADGES = re.compile(r"^\[!\[[^\]]*\]\(https?:.+\n\n", re.MULTILINE)
"""A line of badges, which come from other hosts. The site fetches nothing from another host."""

WITHOUT_NAVIGATION = ("index.md", "research/guarantees.md")
"""Pages without the left column: the start page is the only page of its tab, and the tables of guarantees are wide."""

TEST = re.compile(r"`(tests/[^`]+)::(\w+)`")
"""A test of a guarantee, in the last column of a table. Its name is longer than the guarantee: on the site it is a link."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the addresses of the site and the repository from pyproject.toml, if it has them."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    config.site_url = urls.get("Documentation")
    config.repo_url = urls.get("Repository")
    if config.repo_url:
        config.repo_name = "/".join(config.repo_url.split("/")[-2:])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/."""
    for page, path in OUTSIDE.items():
        if (ROOT / path).exists():
            files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Let links lead to pages of the site, or to files of the repository."""
    here = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    shown = {path: page for page, path in OUTSIDE.items()}

    def link_on_site(match: re.Match[str]) -> str:
        words = LINK.sub(link_on_site, match[1])  # a picture that is a link
        path, anchor = match[2], match[3] or ""
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        if in_repository in shown:
            on_site = shown[in_repository]
        elif in_repository.startswith("docs/"):
            on_site = in_repository.removeprefix("docs/")
        elif not (ROOT / in_repository).exists():
            return match[0]  # MkDocs reports that there is no such file
        elif config.repo_url:
            kind = "tree" if (ROOT / in_repository).is_dir() else "blob"
            return f"[{words}]({config.repo_url}/{kind}/main/{in_repository}{anchor})"
        else:
            return words
        return f"[{words}]({posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    if page.file.src_uri in WITHOUT_NAVIGATION:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri == "research/guarantees.md":
        markdown = TEST.sub(lambda match: _link_to_test(config, *match.groups()), markdown)
    return LINK.sub(link_on_site, BADGES.sub("", markdown))


def _link_to_test(config: MkDocsConfig, path: str, test: str) -> str:
    """Return a link to a test in the repository, which shows the path and the name of the test under the pointer."""
    if not config.repo_url:
        return f'<abbr title="{path}::{test}">test</abbr>'
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.lstrip().startswith(f"def {test}("))
    return f'[test]({config.repo_url}/blob/main/{path}#L{line} "{path}::{test}")'
