"""Score plots hold the report's counts and operating points, and count classes as by hand."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from fewshot_callbacks.callbacks import ScorePlots, score_plots
from fewshot_callbacks.callbacks.score_plots import FIGURES
from fewshot_callbacks.plots.scores import operating_marks
from tests.callbacks.models import items, loader, retrieval, tagged, trainer
from tests.callbacks.pictured import AsGiven, brute_force

DATA = items()
ASKED = {
    "metrics": ("mAP", "recall@1", "recall@3", "recall@5", "recall@precision0.5", "fnmr@fmr0.1"),
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What each function of a figure was given."""
    monkeypatch.chdir(tmp_path)
    seen: dict[str, Any] = {}

    def notes(name: str) -> Any:
        def draw(*given: Any, **more: Any) -> Figure:
            seen[name] = given
            return Figure(figsize=(1, 1), dpi=10)

        return draw

    for name in ("score_histograms", "precision_recall_curve", "error_tradeoff_curve", "recall_at_k_curve"):
        monkeypatch.setattr(score_plots, name, notes(name))
    for name in ("weakest_classes", "confused_classes"):
        monkeypatch.setattr(score_plots, name, notes(name))
    return seen


def test_classes_are_counted_as_by_hand(drawn: dict[str, Any]) -> None:
    monitor = retrieval(**ASKED)
    names = {10 * number - 7: f"kind {number}" for number in range(6)}
    trainer(monitor, ScorePlots(k=3, names=names)).validate(AsGiven(), loader(DATA), verbose=False)
    embeddings, labels = AsGiven().by_hand(DATA)
    scores, relevant, precision = brute_force(embeddings, labels)
    classes = {each.name: each.value for each in drawn["weakest_classes"][0]}
    by_hand = {names[label]: float(precision[labels == label].mean()) for label in labels.unique().tolist()}
    assert classes == pytest.approx(by_hand, rel=1e-6)
    found: Counter[Any] = Counter()
    for query, order in enumerate(scores.argsort(dim=1, descending=True)[:, :3]):
        found.update((names[int(labels[query])], names[int(labels[o])]) for o in order if not relevant[query, o])
    assert {(each.query, each.retrieved): each.count for each in drawn["confused_classes"][0]} == found


def test_operating_points_are_those_of_the_report(drawn: dict[str, Any]) -> None:
    monitor = retrieval(**ASKED)
    trainer(monitor, ScorePlots()).validate(AsGiven(), loader(DATA), verbose=False)
    scores, relevant, _ = brute_force(*AsGiven().by_hand(DATA))
    pairs = ~torch.eye(len(scores), dtype=torch.bool)
    marks, errors = operating_marks(monitor.report)
    assert [mark.name.split(",")[0] for mark in marks] == ["decision", "precision 0.5", "FMR 0.1"]
    for mark, error in zip(marks, errors, strict=True):
        accepted = (scores >= mark.threshold - 1e-9) & pairs
        recall = float((accepted & relevant).sum() / relevant.sum())
        precision = float((accepted & relevant).sum() / accepted.sum())
        false_matches = float((accepted & ~relevant).sum() / (~relevant & pairs).sum())
        assert (mark.x, mark.y) == pytest.approx((recall, precision), rel=1e-6)
        assert (error.x, error.y) == pytest.approx((false_matches, 1 - recall), rel=1e-6)
        assert error.threshold == mark.threshold
    assert drawn["score_histograms"][:2] == (monitor.report.pair_counts, marks)
    assert drawn["error_tradeoff_curve"][2] == errors
    assert drawn["recall_at_k_curve"][0] == {"recall@k": monitor.report.at("recall@{k}")}


def test_the_figures_that_are_asked_for_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(retrieval(**ASKED), ScorePlots()).validate(AsGiven(), loader(DATA), verbose=False)
    assert {path.name for path in Path("pictures/val").iterdir()} == set(FIGURES)
    trainer(retrieval(), ScorePlots(["recall_at_k"])).test(AsGiven(), loader(DATA), verbose=False)
    assert {path.name for path in Path("pictures/test").iterdir()} == {"recall_at_k"}


@pytest.mark.filterwarnings("ignore:.*have no match")
@pytest.mark.parametrize("asked", [{}, {"metrics": ("recall@1", "f1")}])
def test_multi_label_targets_have_no_classes_and_pairs_where_they_are_asked_for(
    drawn: dict[str, Any], asked: Any
) -> None:
    said = (
        nullcontext() if asked else pytest.warns(UserWarning, match=r"leaves out score_histograms, .*=\(\.\.\., 'f1'\)")
    )
    with said:
        trainer(retrieval(**asked), ScorePlots()).validate(AsGiven(), loader(tagged()), verbose=False)
    of_pairs = {"score_histograms", "precision_recall_curve", "error_tradeoff_curve"}
    assert set(drawn) == {"recall_at_k_curve"} | (of_pairs if asked else set())


@pytest.mark.parametrize("settings", [{"figures": ["curve"]}, {"figures": "recall_at_k"}, {"k": 0}])
def test_settings_out_of_range(settings: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ScorePlots(**settings)
