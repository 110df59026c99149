"""Every code block of README and of the documentation runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from tests.docs import pages
from tests.integration_packages import skipped_without_integrations


def check_shell(example: Example) -> None:
    for words in pages.commands(example.parsed):
        pages.check_command(words)


PARSERS = [PythonCodeBlockParser(), CodeBlockParser(language="bash", evaluator=check_shell), SkipParser()]
"""`<!--- skip: next, "reason" -->` leaves the next block out; `<!--- invisible-code-block: python ... -->` runs unseen."""


@pytest.mark.filterwarnings("ignore")  # what a page shows may warn; that it works is what counts here
@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_users_run_it: Any) -> None:
    # CONTRIBUTING.md has lines of Python for several files: only its commands are checked
    document = Document.parse(str(page), *PARSERS[page.name == "CONTRIBUTING.md" :])
    pages.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    # A page may name another folder, which ends with it.
    monkeypatch.setenv("FEWSHOT_CALLBACKS_CACHE", os.environ.get("FEWSHOT_CALLBACKS_CACHE", ""))
    document.namespace.update(pages.names())
    with skipped_without_integrations():
        for example in document.examples():
            example.evaluate()
