"""Histograms of pair scores, curves with operating points, and the weakest classes, in every logger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from matplotlib.figure import Figure

from fewshot_callbacks.callbacks._conduct import check_at_least
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._pictures import PictureCallback
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, Names
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional.means import class_means
from fewshot_callbacks.functional.retrieval import RetrievalReport
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
from fewshot_callbacks.trainer.lightning import Trainer

# Figures that need the scores of all pairs.
PAIR_FIGURES = ("score_histograms", "precision_recall", "error_tradeoff")
FIGURES = (*PAIR_FIGURES, "recall_at_k", "weakest_classes", "confused_classes")
# Largest number of queries among whose first neighbours confused classes are counted.
SAMPLED_QUERIES = 1000


class ScorePlots(PictureCallback):
    """Draws the scores of relevant and irrelevant pairs, curves with operating points, and the weakest classes.

    After each evaluation of a `RetrievalMonitor`, it uses the monitor's report and sends these figures to every logger
    of the Trainer, at the same step as the metrics:

    - `val/score_histograms`: the distributions of the scores of relevant and of irrelevant pairs, with the thresholds;
    - `val/precision_recall`: pooled precision over pooled recall, with the operating points;
    - `val/error_tradeoff`: the false non-match rate over the false match rate (DET curve), with the operating points;
    - `val/recall_at_k`: recall@k over the values of k that the monitor evaluates;
    - `val/weakest_classes`: the classes with the lowest mean average precision;
    - `val/confused_classes`: the pairs of classes that are confused most often, counted among the first neighbours of
      at most 1,000 queries.

    The operating points come from the monitor's settings: the best F1 or a threshold, `recall@precision` and
    `fnmr@fmr`; where it asks for no metric of all pairs together, as by default for targets with several labels, the first
    three figures are left out, with a warning. Nothing is drawn in the sanity check, and an error never ends the run.

    Args:
        figures: Names of the figures to draw, from the list above; by default all.
        k: Number of neighbours of each query among which confused classes are counted, at least 1.
        every_n_epochs: Draw at most in one of this number of epochs, beginning with the first.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the data
            set's attribute `classes`, or the labels themselves.
        max_share: Skip epochs until all pictures together have taken at most this share of the run time, in (0, 1);
            None never skips an epoch. None is skipped before they have taken a second.
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
            raise InputError(
                f"ScorePlots(figures={figures!r}): the figures are {', '.join(FIGURES)}. Pass a list of these names."
            )
        check_at_least(1, "ScorePlots", k=k)
        self.figures = tuple(figures)
        self.k = k

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Count confused classes; the figures are drawn when a logger wants them."""
        model = self._model(evaluated)
        report = evaluated.report
        where = evaluated.title
        drawings: dict[str, Callable[[], Figure]] = {
            "recall_at_k": lambda: recall_at_k_curve(_recalls(report), f"{where}: recall@k"),
            **self._pair_drawings(report, where),
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

    def _pair_drawings(self, report: RetrievalReport, where: str) -> dict[str, Callable[[], Figure]]:
        """Return name -> drawing of the figures that need all pairs; warn if the report has no scores of pairs."""
        if report.pooled is None:
            missing = [name for name in PAIR_FIGURES if name in self.figures]
            if missing:
                self._policy.warn(
                    f"ScorePlots leaves out {', '.join(missing)} of {where}, since its RetrievalMonitor asks for no metric "
                    "of all pairs. Ask for one, RetrievalMonitor(metrics=(..., 'pair_f1')), or leave these names out of "
                    "figures.",
                    "no pairs",
                )
            return {}
        counts = report.pair_counts
        marks, error_marks = operating_marks(report)
        # The legend shows four decimals, and a larger error of the area would make them wrong.
        area = report.auc_pr.value if report.auc_pr.error < 5e-5 else None
        drawings: dict[str, Callable[[], Figure]] = {}
        if counts.relevant:
            chance = counts.relevant / (counts.relevant + counts.irrelevant)
            drawings["score_histograms"] = lambda: score_histograms(counts, marks, f"{where}: scores of all pairs")
            drawings["precision_recall"] = lambda: precision_recall_curve(
                counts.recall, counts.precision, marks, f"{where}: precision and recall", area=area, chance=chance
            )
        if counts.relevant and counts.irrelevant:
            drawings["error_tradeoff"] = lambda: error_tradeoff_curve(
                counts.false_match_rate, counts.false_non_match_rate, error_marks, f"{where}: detection error trade-off"
            )
        return drawings

    def _confusions(self, model: Model) -> list[Confusion]:
        """Count items of another class among the first neighbours of a sample of queries."""
        queries = model.queries
        codes = as_labels(queries.labels, "labels", "ScorePlots").codes.numpy()
        sample = sample_of_classes(codes, SAMPLED_QUERIES)
        pairs = confusions(model.nearest(sample, self.k), queries.labels, model.searched.labels)
        return [
            Confusion(queries.label(query_label), queries.label(item_label), count)
            for (query_label, item_label), count in pairs.items()
        ]


def _class_scores(model: Model) -> list[ClassScore]:
    """Return the mean average precision of each class that has a query with a match."""
    report = model.report
    codes, means, counts = class_means(report.per_query["mAP"], report.query_labels)
    labels = codes.tolist()
    if report.label_names is not None:
        labels = [report.label_names[code] for code in labels]
    return [
        ClassScore(model.queries.label(label), mean, count)
        for label, mean, count in zip(labels, means.tolist(), counts.tolist(), strict=True)
    ]


def _recalls(report: RetrievalReport) -> dict[str, dict[int, float]]:
    """Return name of a curve -> recall by k, for the kinds of recall that the report has."""
    curves = {
        "recall@k": report.at("recall@{k}"),
        "share of relevant items found": report.at("ir_recall@{k}"),
        "grouped recall@k": report.at("grouped_recall@{k}"),
    }
    return {name: curve for name, curve in curves.items() if curve}
