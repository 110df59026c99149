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

# figures that need the scores of all pairs
PAIR_FIGURES = ("score_histograms", "precision_recall", "error_tradeoff")
FIGURES = (*PAIR_FIGURES, "recall_at_k", "weakest_classes", "confused_classes")
# Confused classes are counted among the first neighbours of at most this number of queries.
SAMPLED_QUERIES = 1000


class ScorePlots(PictureCallback):
    """Draws the scores of all pairs, curves with operating points, the weakest classes and the most confused classes.

    It needs a `RetrievalMonitor` in the same Trainer, and draws from its report. It sends these figures to every
    logger, at the same step as the metrics. Without a logger they are files in `pictures/`.

    - `val/score_histograms`: distributions of the scores of relevant and irrelevant pairs, with the thresholds
    - `val/precision_recall`: pooled precision over pooled recall, with the operating points
    - `val/error_tradeoff`: false non-match rate over false match rate (DET curve), with the operating points
    - `val/recall_at_k`: recall@k over the values of k that the monitor evaluates
    - `val/weakest_classes`: the classes with the lowest mean average precision
    - `val/confused_classes`: the pairs of classes that are confused most often, counted among the first neighbours of
      at most 1,000 queries

    The operating points are metrics of the monitor: the best F1 or its `threshold`, `recall@precision` and `fnmr@fmr`.
    The first three figures need a metric over all pairs. If the monitor has none, as by default for several labels per
    item, they are left out with a warning. Nothing is drawn in the sanity check. An error never ends the run.

    Examples:
        >>> from pathlib import Path
        >>> import torch
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        >>> loader = DataLoader(TensorDataset(items, torch.arange(12) // 3), batch_size=4)
        >>> plots = ScorePlots(["precision_recall", "weakest_classes"])
        >>> callbacks = [RetrievalMonitor(source="encoder"), plots]
        >>> from tempfile import TemporaryDirectory
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> with TemporaryDirectory() as folder:
        ...     trainer = Trainer(callbacks=callbacks, accelerator="cpu", default_root_dir=folder, **options)
        ...     _ = trainer.validate(Model(), loader, verbose=False)
        ...     sorted(path.name for path in Path(folder, "pictures/val").iterdir())
        ['precision_recall', 'weakest_classes']

    Args:
        figures: Names of the figures, from the list above. By default all.
        k: Number of neighbours of each query among which confused classes are counted, at least 1.
        every_n_epochs: Draw in at most one of this number of epochs, beginning with the first.
        names: Names of the classes: a mapping from labels, or a list for the labels 0, 1, 2, ... By default the data
            set's attribute `classes`, or the labels themselves.
        max_share: Skip epochs until all pictures and reports together have taken at most this fraction of the run time,
            in (0, 1). The first second never counts. None skips no epoch. `pictures/share_of_time` logs the fraction.
        prefix: Draw only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a
            `RetrievalMonitor` with a name. By default all sets.

    Raises:
        ValueError: If a figure is unknown, or a setting is out of range.
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
        """Return name -> figure. Confused classes are counted now; figures are drawn when a logger needs them."""
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
        """Return name -> figure for the figures that need all pairs. Warn if the report has no scores of pairs."""
        if report.pooled is None:
            missing = [name for name in PAIR_FIGURES if name in self.figures]
            if missing:
                self._policy.warn(
                    f"ScorePlots leaves out {', '.join(missing)} of {where}, because its RetrievalMonitor has no metric "
                    "over all pairs. Add one, RetrievalMonitor(metrics=(..., 'pair_f1')), or leave these names out of "
                    "figures.",
                    "no pairs",
                )
            return {}
        counts = report.pair_counts
        marks, error_marks = operating_marks(report)
        # With a larger error of the area, the four decimals in the legend would be wrong.
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
        """Return the pairs of classes that are confused among the first neighbours of a sample of queries."""
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
    """Return name of a curve -> k -> recall, for the kinds of recall in the report."""
    curves = {
        "recall@k": report.at("recall@{k}"),
        "share of relevant items found": report.at("ir_recall@{k}"),
        "grouped recall@k": report.at("grouped_recall@{k}"),
    }
    return {name: curve for name, curve in curves.items() if curve}
