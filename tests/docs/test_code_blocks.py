"""Every Python block of README and of the documentation runs and prints what is shown below it; every command is checked."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from tests.docs import pages
from tests.docs.printed import Printed
from tests.integration_packages import skipped_without_integrations


def check_shell(example: Example) -> None:
    for words in pages.commands(example.parsed):
        pages.check_command(words)


def parsers(page: Path) -> list[Any]:
    """The kinds of blocks of a page.

    `<!--- skip: next, "reason" -->` leaves the next block out; `<!--- invisible-code-block: python ... -->` runs unseen.
    """
    of_commands = [CodeBlockParser(language="bash", evaluator=check_shell), SkipParser()]
    if page.name == "CONTRIBUTING.md":  # it has lines of Python for several files: only its commands are checked
        return of_commands
    printed = Printed()
    python = CodeBlockParser(language="python", evaluator=printed.run)
    return [python, CodeBlockParser(language="text", evaluator=printed.compare), *of_commands]


@pytest.mark.filterwarnings("ignore")  # what a page shows may warn; that it works is what counts here
@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_users_run_it: Any) -> None:
    document = Document.parse(str(page), *parsers(page))
    pages.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    # A page may name another folder, which ends with it.
    monkeypatch.setenv("FEWSHOT_CALLBACKS_CACHE", os.environ.get("FEWSHOT_CALLBACKS_CACHE", ""))
    document.namespace.update(pages.names())
    with skipped_without_integrations():
        for example in document.examples():
            example.evaluate()


def test_commands_without_a_fence_would_run() -> None:
    """Benchmarks, studies and such stand in indented blocks."""
    for page in (pages.ROOT / "README.md", *sorted((pages.ROOT / "docs").rglob("*.md"))):
        for words in pages.indented_commands(page.read_text(encoding="utf-8")):
            pages.check_command(words, runs=False)


@pytest.mark.parametrize(
    "line",
    [
        *("python benchmarks/trials.py --trails 5", "python benchmarks/trails.py", "make figure-of-speed"),
        *("fewshot plan --query 5", "fewshot compare runs --outptu a", "fewshot demo --epoch 1"),
        "fewshot test --config runs/version_0/config.yaml --ckpt_path best.ckpt --model.haed=dr",
    ],
)
def test_a_command_that_would_not_run_is_noticed(line: str) -> None:
    [words] = pages.indented_commands(f"A page:\n\n    {line}\n")
    with pytest.raises(AssertionError):
        pages.check_command(words, runs="test" in words)


# A code block of the site shows this many columns without scrolling.
COLUMNS = 76
# Pages with wider blocks. The list should become empty.
STILL_WIDER = (
    *("docs/api/command_line.md", "docs/evaluate/better.md", "docs/evaluate/export.md", "docs/evaluate/files.md"),
    *("docs/evaluate/large_sets.md", "docs/start/faq.md", "docs/start/install.md", "docs/start/quick_start.md"),
)
SITE = [
    page
    for page in (pages.ROOT / "README.md", *sorted((pages.ROOT / "docs").rglob("*.md")))
    if str(page.relative_to(pages.ROOT)) not in STILL_WIDER
]


def code_lines(text: str) -> Iterator[str]:
    """Yield the lines of the Python and shell blocks of a page, and of the files that the blocks include."""
    fence = r"^(?P<indent> *)```[ {.]*(?:python|bash|sh)\b.*?\n(?P<lines>.*?)^(?P=indent)```"
    for block in re.finditer(fence, text, re.MULTILINE | re.DOTALL):
        for line in textwrap.dedent(block["lines"]).splitlines():
            included = re.fullmatch(r'--8<-- "(.+)"', line)
            if included:
                yield from (pages.ROOT / included[1]).read_text(encoding="utf-8").splitlines()
            else:
                yield line


@pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_code_fits_on_the_page(page: Path) -> None:
    assert [line for line in code_lines(page.read_text(encoding="utf-8")) if len(line) > COLUMNS] == []


def test_lines_of_code_are_found() -> None:
    page = """
```python
first = 1
```

1. A list:

   ```bash
   fewshot demo
   ```

```text
what is printed
```

``` { .sh title="gate.sh" }
--8<-- "examples/recipes/gate.sh"
```
"""
    first, second, *gate = code_lines(page)
    assert (first, second) == ("first = 1", "fewshot demo")
    assert gate == (pages.ROOT / "examples/recipes/gate.sh").read_text(encoding="utf-8").splitlines()
