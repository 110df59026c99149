"""The limits of the findings, as the pages for users state them."""

import re
from pathlib import Path

import torch

from fewshot_callbacks import RetrievalPanels, evaluate_retrieval
from fewshot_callbacks.report import ReportItems, ReportSettings, write_report
from fewshot_callbacks.report.findings import CONFUSION_K, SUSPECT_K, WORST_OF_A_CLASS
from tests.messages import missing_facts

ROOT = Path(__file__).parents[2]
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def worst_of_a_class_in(text):
    """The limits that a text states, in words."""
    return set(re.findall(r"at most (\w+) (?:queries )?(?:of a|per) class", " ".join(text.split())))


def test_texts_for_users_state_the_limit_of_the_worst_queries_of_a_class():
    names = ("evaluate/report", "callbacks/pictures")
    pages = [(ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in names]
    for text in (ReportSettings.__doc__, RetrievalPanels.__doc__, *pages):
        assert worst_of_a_class_in(text) == {NUMBERS[WORST_OF_A_CLASS]}


def test_labels_of_a_tensor_are_those_of_a_list(tmp_path):
    labels = torch.arange(60) // 5
    rows = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    report = evaluate_retrieval(rows, labels)
    pages = [
        write_report(tmp_path / f"{number}.html", report, ReportItems(rows, items)).path.read_text()
        for number, items in enumerate((labels, labels.numpy(), labels.tolist()))
    ]
    assert pages[0] == pages[1] == pages[2]


def test_a_report_states_its_limits(tmp_path):
    labels = [n // 5 for n in range(300)]
    rows = torch.nn.functional.one_hot(torch.tensor(labels)) + 0.1 * torch.randn(300, 60)
    labels[5] = 7  # a suspect
    html = write_report(
        tmp_path / "report.html", evaluate_retrieval(rows, labels), ReportItems(rows, labels)
    ).path.read_text()
    assert worst_of_a_class_in(html) == {str(WORST_OF_A_CLASS)}
    assert missing_facts(html, (f"{CONFUSION_K} nearest neighbours", f"{SUSPECT_K} nearest neighbours")) == []
