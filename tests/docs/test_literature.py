"""The page of the literature: each claim has a verdict, and its evidence is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import check_command
from tests.docs.tables import ROOT, names_of_tests, rows

RESEARCH = ROOT / "docs" / "research"
SOURCES = (
    *("The note on metrics and their feasibility", "The note on hashing", "Grouped Recall@K", "The distance ratio"),
    "Average precision as a loss, and of binary codes",
)


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page.read_text(encoding="utf-8")
    [opening] = re.findall(rf"^(#+) {re.escape(title)}$", text, re.M)
    below = text.split(f"\n{opening} {title}\n")[1]
    return re.split(rf"^#{{1,{len(opening)}}} ", below, flags=re.M)[0]


def check_evidence(cell: str, page: Path) -> int:
    """Check that each test, file and command of a cell is there, and return how many there are."""
    tests = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", cell)
    for file, name in tests:
        assert name in names_of_tests(file), f"{file} has no {name}"
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]+)?\)", cell)
    assert [path for path in links if not (page.parent / path).is_file()] == []
    commands = re.findall(r"`(python [^`]+)`", cell)
    for command in commands:
        check_command(command.split())
    return len(tests) + len(links) + len(commands)


@pytest.mark.parametrize("title", SOURCES)
def test_every_claim_has_a_verdict_and_evidence_that_is_there(title: str) -> None:
    for claim, where, done, verdict in rows(section(RESEARCH / "literature.md", title)):
        assert claim, where
        assert re.match(r"\*\*(seen|differs|not clear|not tried)\*\*", verdict), (claim, verdict)
        assert check_evidence(done, RESEARCH / "literature.md") or verdict.startswith("**not tried**"), claim


@pytest.mark.parametrize("page", ["../metrics/grouped_recall.md", "feasibility.md", "average_precision_loss.md"])
def test_the_evidence_of_the_pages_is_there(page: str) -> None:
    for cells in rows((RESEARCH / page).read_text(encoding="utf-8")):
        check_evidence(" ".join(cells), RESEARCH / page)
