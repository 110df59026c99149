"""The list of metrics: each is explained where users look, and one more takes what CONTRIBUTING.md says."""

import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from fewshot_callbacks.cli.options import evaluate
from fewshot_callbacks.functional import DEFAULT_METRICS, METRICS, asked_metric, evaluate_retrieval
from fewshot_callbacks.functional.retrieval import rank_metrics, registry

ROOT = Path(__file__).parents[3]
EXAMPLE = {"k": "K", "p": "0.95", "divisor": "min"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.pattern)
def test_each_metric_has_its_row_and_its_sentence(metric):
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    key = metric.pattern.format(**EXAMPLE | {"p": {"f": "0.001", "o": "0.1"}.get(metric.pattern[0], "0.95")})
    assert re.search(rf"^\|[^|]*`{re.escape(key)}`", page, re.MULTILINE)
    asked = asked_metric(key.replace("K", "3"))
    assert asked.metric is metric
    assert asked.meaning.endswith(".")
    assert "{" not in asked.meaning


def test_values_lie_in_their_ranges():
    keys = [metric.pattern.format(k=2, p=0.5, divisor="min") for metric in METRICS]
    keys.remove("grouped_recall@2_miss")  # counts otherwise than grouped_recall@2
    report = evaluate_retrieval(torch.randn(100, 4), torch.arange(100) % 25, metrics=keys)
    for key, value in report.metrics().items():
        low, high = asked_metric(key).metric.range or (-torch.inf, torch.inf)
        assert low <= value <= high, key


def test_the_example_of_a_new_metric_works(monkeypatch):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Example: add a metric")[2].partition("\n## ")[0]
    formula, entry, test = (dedent(block) for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    with monkeypatch.context() as patch:
        patch.setattr(rank_metrics, "f1_at_k", None, raising=False)
        exec(formula, vars(rank_metrics))
        patch.setattr(registry, "METRICS", (*METRICS, eval(entry.strip(), vars(registry))))
        exec(test, {"torch": torch, "evaluate_retrieval": evaluate_retrieval})


def test_a_report_knows_which_values_it_holds():
    report = evaluate_retrieval(torch.eye(4), [0, 0, 1, 1], metrics=("mAP", "recall@1"))
    assert "recall@1" in report
    assert "recall@5" not in report
    assert 0 not in report


def test_the_help_of_the_command_names_every_metric_and_the_usual_ones():
    """It reads the source of the registry, to be there without torch."""
    words = " ".join(evaluate().format_help().split())
    for metric in METRICS:
        assert metric.pattern in words
    assert f"(default: {' '.join(DEFAULT_METRICS)})" in words
