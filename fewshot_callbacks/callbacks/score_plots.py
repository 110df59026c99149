"""Histograms of pair scores, curves with operating points, and the weakest classes, in every logger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from fewshot_callbacks.callbacks._conduct import check_at_least
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._pictures import PictureCallback
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, Names
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.functional.statistics import class_means
from fewshot_callbacks.plots.scores import (
    ClassScore,
    Confusion,
    confused_classes,
    error_tradeoff_curve,
    operating_marks,
    precision_recall_curve,
    recall_at_k_curve,
    score_histograms,
    weakest_classes,
)
from fewshot_callbacks.report.findings import Model, confusions, sample_of_classes

# Those of all pairs together.
OF_PAIRS = ("score_histograms", "precision_recall", "error_tradeoff")
FIGURES = (*OF_PAIRS, "recall_at_k", "weakest_classes", "confused_classes")
# Queries, at most, whose first neighbours tell which classes are confused.
ASKED = 1000


class ScorePlots(PictureCallback):
    """Draws the scores of relevant and irrelevant pairs, curves with operating points, and the weakest classes.

    After each evaluation of a `RetrievalMonitor`, whose report it uses, it sends these figures to every logger of the
    Trainer, at the same step as the metrics:

    - `val/score_histograms`: the distributions of the scores of relevant and of irrelevant pairs, with the thresholds;
    - `val/precision_recall`: pooled precision over pooled recall, with the operating points;
    - `val/error_tradeoff`: the false non-match rate over the false match rate (DET curve), with the operating points;
    - `val/recall_at_k`: recall@k over the values of k that the monitor evaluates;
    - `val/weakest_classes`: the classes with the lowest mean average precision;
    - `val/confused_classes`: the pairs of classes that are confused most often, counted among the first neighbours of
      at most 1,000 queries.

    The operating points are those of the monitor's settings: the best F1 or a threshold, `recall@precision` and
    `fnmr@fmr`; where it asks for no metric of all pairs together, as by default for targets with several labels, the first
    three figures are left out, with a warning. Nothing is drawn in the sanity check, and an error never ends the run.

    Args:
        figures: Names of the figures to draw, from the list above; by default all.
        k: Number of neighbours of each query among which confused classes are counted, at least 1.
        every_n_epochs: Draw at most in one of this number of epochs, beginning with the first.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the data
            set's attribute `classes`, or the labels themselves.
        max_share: Skip epochs until all pictures together have taken at most this share of the run time, in (0, 1);
            None never skips an epoch.
        prefix: Draw only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a `RetrievalMonitor`
            with a name; by default all.

    Raises:
        ValueError: If a figure is unknown, or a setting is out of range.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> callbacks = [RetrievalMonitor(metrics=("mAP", "fnmr@fmr0.001")), ScorePlots()]
        >>> trainer = Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        figures: Collection[str] = FIGURES,
        *,
        k: int = 5,
        every_n_epochs: int = 1,
        names: Names | None = None,
        max_share: float | None = 0.05,
        prefix: str | None = None,
    ) -> None:
        super().__init__(every_n_epochs, max_share, prefix, names)
        unknown = [name for name in figures if name not in FIGURES]
        if unknown or isinstance(figures, str):
            raise ValueError(
                f"ScorePlots(figures={figures!r}): the figures are {', '.join(FIGURES)}. Pass a list of these names."
            )
        check_at_least(1, "ScorePlots", k=k)
        self.figures, self.k = tuple(figures), k

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Count confused classes; the figures are drawn when a logger wants them."""
        model, report, where = self._model(evaluated), evaluated.report, evaluated.where
        drawings: dict[str, Callable[[], Figure]] = {
            "recall_at_k": lambda: recall_at_k_curve(_recalls(report), f"{where}: recall@k"),
            **self._of_pairs(report, where),
        }
        if report.classes:
            drawings["weakest_classes"] = lambda: weakest_classes(
                _class_scores(model), f"{where}: the weakest classes", overall=report.mAP
            )
            confused = self._confusions(model) if "confused_classes" in self.figures else []
            if confused:
                title = f"{where}: classes confused in the first {self.k} neighbours"
                drawings["confused_classes"] = lambda: confused_classes(confused, title)
        return {evaluated.key(name): drawings[name] for name in self.figures if name in drawings}

    def _of_pairs(self, report: RetrievalReport, where: str) -> dict[str, Callable[[], Figure]]:
        if report.pooled is None:
            missing = [name for name in OF_PAIRS if name in self.figures]
            if missing:
                self._policy.warn(
                    f"ScorePlots leaves out {', '.join(missing)} of {where}, since its RetrievalMonitor asks for no metric "
                    "of all pairs. Ask for one, RetrievalMonitor(metrics=(..., 'pair_f1')), or leave these names out of "
                    "figures.",
                    "no pairs",
                )
            return {}
        counts, marks, errors = report.pair_counts, *operating_marks(report)
        # The legend shows four decimals: an area that is known less well would show digits that are wrong.
        area = report.auc_pr.value if report.auc_pr.error < 5e-5 else None
        found: dict[str, Callable[[], Figure]] = {}
        if counts.relevant:
            chance = counts.relevant / (counts.relevant + counts.irrelevant)
            found["score_histograms"] = lambda: score_histograms(counts, marks, f"{where}: scores of all pairs")
            found["precision_recall"] = lambda: precision_recall_curve(
                counts.recall, counts.precision, marks, f"{where}: precision and recall", area=area, chance=chance
            )
        if counts.relevant and counts.irrelevant:
            found["error_tradeoff"] = lambda: error_tradeoff_curve(
                counts.false_match_rate, counts.false_non_match_rate, errors, f"{where}: detection error trade-off"
            )
        return found

    def _confusions(self, model: Model) -> list[Confusion]:
        """Count items of another class among the first neighbours of a sample of queries."""
        queries = model.queries
        asked = sample_of_classes(as_labels(queries.labels, "labels", "ScorePlots").codes.numpy(), ASKED)
        pairs = confusions(model.nearest(asked, self.k), queries.labels, model.searched.labels)
        return [Confusion(queries.label(one), queries.label(other), count) for (one, other), count in pairs.items()]


def _class_scores(model: Model) -> list[ClassScore]:
    """Return the mean average precision of each class that has a query with a match."""
    report = model.report
    kinds, means, counts = class_means(report.per_query["mAP"], report.query_labels)
    labels = kinds.tolist() if report.label_names is None else [report.label_names[kind] for kind in kinds.tolist()]
    return [
        ClassScore(model.queries.label(label), mean, count)
        for label, mean, count in zip(labels, means.tolist(), counts.tolist(), strict=True)
    ]


def _recalls(report: RetrievalReport) -> dict[str, dict[int, float]]:
    """Collect recall@k of every kind that the report has."""
    series = {"recall@k": report.at("recall@{k}"), "share of relevant items found": report.at("ir_recall@{k}")}
    series["grouped recall@k"] = report.at("grouped_recall@{k}")
    return {name: values for name, values in series.items() if values}
