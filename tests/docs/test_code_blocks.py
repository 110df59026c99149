"""Every code block of README and of the documentation runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

import fewshot_callbacks.callbacks
import fewshot_callbacks.data
from tests.docs import pages


def check_shell(example: Example) -> None:
    for words in pages.commands(example.parsed):
        pages.check_command(words)


PARSERS = [
    PythonCodeBlockParser(),
    CodeBlockParser(language="bash", evaluator=check_shell),
    SkipParser(),
]
"""`<!--- skip: next, "reason" -->` leaves the next block out; `<!--- invisible-code-block: python ... -->` runs unseen."""

OF_LINES_TO_INSERT = ("CONTRIBUTING.md",)
"""Pages whose Python is lines for several files: only their commands are checked."""


@pytest.mark.filterwarnings("ignore")  # what a page shows may warn; that it works is what counts here
@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_users_run_it: Any) -> None:
    document = Document.parse(str(page), *PARSERS[page.name in OF_LINES_TO_INSERT :])
    examples = list(document.examples())
    if not examples:
        return
    pages.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    document.namespace.update(pages.names())
    for example in examples:
        example.evaluate()


def test_every_language_is_checked() -> None:
    """A block of a language that nobody runs would be a promise that nobody holds."""
    known = {"python", "bash", "", "text", "mermaid", "yaml", "toml", "console"}
    for page in pages.PAGES:
        fences = [line.strip() for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("```")]
        for opening in fences[::2]:
            language = opening.strip("`").partition(" ")
            assert language[0] in known, f"{page}: {opening}"


def test_code_of_the_first_pages_is_not_cut() -> None:
    """At 1,280 pixels the site shows 78 characters of a line of code."""
    for page in (pages.ROOT / "docs" / "start").glob("*.md"):
        for block in re.findall(r"```\w+\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            assert not [line for line in block.splitlines() if len(line) > 78], page


def test_the_page_of_the_callbacks_has_all_of_them_the_main_one_first() -> None:
    listed = re.findall(r"^        - (\w+)$", (pages.ROOT / "docs/api/callbacks.md").read_text(encoding="utf-8"), re.M)
    assert listed[0] == "RetrievalMonitor"
    assert set(listed) == set(fewshot_callbacks.callbacks.__all__)
    assert len(set(listed)) == len(listed)


def test_the_notebook_imports_what_a_page_documents() -> None:
    documented = {
        module
        for page in (pages.ROOT / "docs" / "api").glob("*.md")
        for module in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M)
    }
    notebook = nbformat.read(pages.ROOT / "examples" / "colab.ipynb", as_version=4)
    imported = {
        module
        for cell in notebook.cells
        for module in re.findall(r"^(?:from|import) (fewshot_callbacks[\w.]*)", cell.source, re.M)
    }
    assert imported <= documented | {"fewshot_callbacks"}


def test_the_example_of_a_data_set_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader and its test, as CONTRIBUTING.md shows them."""
    page = (pages.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example = page.partition("## Example: add a reader of a data set")[2].partition("## Commits")[0]
    reader, test = (textwrap.dedent(block) for block in re.findall(r"( {3}```python\n.*?)```", example, re.DOTALL))
    names: dict[str, Any] = {}
    exec(reader.removeprefix("```python\n"), names)
    monkeypatch.setattr(fewshot_callbacks.data, "StanfordProducts", names["StanfordProducts"], raising=False)
    exec(test.removeprefix("```python\n").replace("@pytest.fixture\n", ""), names)
    names["test_the_split_is_the_published_one"](names["root"](tmp_path))
    names["test_what_is_missing_is_named"](tmp_path / "nowhere")
