"""A linear classifier or regression on the embedding, at the end of every validation and test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fewshot_callbacks.callbacks._bank_items import BankData, BankWord
from fewshot_callbacks.callbacks._bank_monitor import BankMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._evaluation import Loaders
from fewshot_callbacks.callbacks._sides import MeasuredSet
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS, EmbeddingSource, Entry, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional._probe_classification import COPIES_REMEDY, NO_MATCH_REMEDY, ONE_CLASS_REMEDY
from fewshot_callbacks.functional._probe_inputs import ONE_GROUP_REMEDY
from fewshot_callbacks.functional._probe_regression import INTEGERS_REMEDY, ONE_ITEM_REMEDY
from fewshot_callbacks.functional._reading import named, reworded
from fewshot_callbacks.functional.linear_probe import DEFAULT_STRENGTHS, ProbeReport, linear_probe
from fewshot_callbacks.functional.retrieval import Share
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.trainer.lightning import Trainer

# First parts of the names of regression values.
REGRESSION = ("probe_r2", "probe_spearman")
# Sentence of `linear_probe` -> the same advice in the arguments of this monitor. Whole sentences come first.
_REMEDIES = {
    ONE_CLASS_REMEDY: "Pass bank=... with several classes.",
    NO_MATCH_REMEDY: "Pass bank=... with the labels of this set, written in the same way.",
    ONE_ITEM_REMEDY: "Pass a larger bank=...",
    ONE_GROUP_REMEDY: "Pass bank=... with several groups, or no groups=, which leaves out single items.",
    INTEGERS_REMEDY: "If they are classes, make the labels integers: labels.long().",
    COPIES_REMEDY: "remove the items of this set from the bank",
    "the gallery": "the bank",
    "gallery item": "bank item",
    "gallery label": "bank label",
}


class ProbeMonitor(BankMonitor):
    """Logs how well a linear classifier, or a linear regression, works on your embeddings.

    The probe is fitted in closed form on a bank of labelled items, and evaluated on the validation set (see
    `linear_probe`). It has no random part and no iterations, so two epochs differ only by the embedding. It logs these
    keys, for which higher is better. A test logs them with `test/`.

    - `val/probe`: accuracy
    - `val/probe_top5`: fraction of items whose class is among the five highest scores; only with more than five classes
    - `val/probe_leave_one_out`: accuracy on the bank items, each predicted by a fit without it

    If the labels are floating-point numbers, they are regression targets. The keys are then `val/probe_r2`,
    `val/probe_spearman` and `val/probe_r2_leave_one_out`, which are means over the targets.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.tensor([[0.0], [2.0], [7.0], [8.0], [9.0], [11.0]])  # an item of class 0 is at 7
        >>> loader = DataLoader(TensorDataset(items, torch.tensor([0, 0, 0, 1, 1, 1])), batch_size=3)
        >>> bank = TensorDataset(torch.tensor([[-1.0], [1.0], [10.0], [12.0]]), torch.tensor([0, 0, 1, 1]))
        >>> monitor = ProbeMonitor(bank, source="encoder")
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> trainer = Trainer(callbacks=[monitor], accelerator="cpu", **options)
        >>> _ = trainer.validate(Model(), loader, verbose=False)
        >>> {key: round(value.item(), 4) for key, value in trainer.callback_metrics.items()}
        {'val/probe': 0.8333, 'val/probe_leave_one_out': 1.0}

    Args:
        bank: The items that the probe is fitted on: a data set, a loader or a stream with evaluation transforms, or a
            function of the Trainer that returns one of them. `train` calls `training_data_for_evaluation()` of the
            Trainer's data module, which the data modules of this package have. Bank items are embedded once in each
            validation, after its first batch, for all monitors that use them. Each item counts once. `gallery` is the
            gallery of the set.
        groups: Entries of the step's output or of the batch, such as `"patient"`, that name a group of similar items.
            The strength of the penalty is then chosen by predicting each group of the bank with a fit without it. This
            accuracy is logged as `val/probe_leave_group_out`, and intervals are over groups. Batches of the bank need
            the same entries.
        strengths: Strengths of the penalty that are tried. See `linear_probe`.
        confidence: Confidence level of the intervals in `reports`, in (0, 1).
        source: Where embeddings come from: the name of a submodule, such as `"encoder"`, whose output is the embedding;
            two keys of the mapping that the step returns (default `("embeddings", "labels")`); a function of (outputs,
            batch) that returns (embeddings, labels); or an `EmbeddingSource`, which also names labels and ids. Monitors
            with equal sources share one copy of the embeddings.
        gallery: Index or name of the loader with the gallery. If no loader has that name: an entry of the step's output
            or of the batch, or a function of (outputs, batch), with a boolean for each item that is True for gallery
            items.
        loaders: Index or name of the loader that is measured, or several of them, such as `("retrieval",)` if the steps
            of another loader give no embeddings. By default all loaders are measured. With only one measured loader,
            its name is not part of the keys.
        name: Part of the keys between the stage and the metric: `t2i` gives `val/t2i/probe`. Several monitors of this
            kind in one Trainer need different names.
        prog_bar: Show the first of the values in the progress bar.
        strict: Which errors end the run. None: only a mistake in the settings or in the output of a step does, if
            possible in the sanity check. Any other error, such as NaN in one batch, becomes a warning, and the values
            are NaN. True: every error ends the run. False: none does.

    Attributes:
        reports: The latest `ProbeReport` of each set. The key is `""` for a single loader, otherwise the end of its
            logged keys; with two encoders it begins with their direction, such as `"image_to_text"`.

    Raises:
        ValueError: If `bank` is an unknown word.
    """

    _better = dict.fromkeys(
        (
            *("probe", "probe_top5", "probe_leave_one_out", "probe_leave_group_out"),
            *("probe_r2", "probe_spearman", "probe_r2_leave_one_out", "probe_r2_leave_group_out"),
        ),
        "higher",
    )

    def __init__(
        self,
        bank: BankWord | BankData = "train",
        *,
        groups: Sequence[Entry] | Entry | None = None,
        strengths: float | Sequence[float] = DEFAULT_STRENGTHS,
        confidence: float = 0.95,
        source: EmbeddingSource | Source | NoFile = STEP_KEYS,
        gallery: int | Entry | None = None,
        loaders: Loaders | None = None,
        name: str | None = None,
        prog_bar: bool = False,
        strict: bool | None = None,
    ) -> None:
        super().__init__(
            bank,
            ("train", "gallery"),
            "dot",
            source=source,
            gallery=gallery,
            loaders=loaders,
            name=name,
            prog_bar=prog_bar,
            strict=strict,
            groups=groups,
            takes_targets=True,
        )
        self.strengths = strengths
        self.confidence = confidence
        # names of the values of the latest report
        self._latest_names: Sequence[str] = ()
        self.reports: dict[str, ProbeReport] = {}

    def _names(self) -> Sequence[str]:
        # Before the first report the kind of labels is unknown. Most are classes.
        return self._latest_names or ("probe", "probe_leave_one_out")

    def _keys(self, trainer: Trainer) -> Mapping[str, Any]:
        """Return all keys that a report may have; before the first report, its keys are unknown."""
        keys: dict[str, Any] = {}
        for direction, suffix, _ in self._sets(trainer):
            for name, better in self._better.items():
                keys[self._key("val", direction, name) + suffix] = better
        return keys

    def _names_of_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Sequence[str]:
        return list(dict.fromkeys([*self._names(), *self._awaited(trainer, measured_set, self._better)]))

    def _check(self, trainer: Trainer) -> None:
        super()._check(trainer)
        if self.bank == "gallery" and self.gallery is None and not self._collection.has_two_encoders:
            raise UsageError(
                "ProbeMonitor(bank='gallery'): this set has no gallery. Pass gallery=..., or training data as bank."
            )
        self._check_watched_keys(trainer)

    def _check_watched_keys(self, trainer: Trainer) -> None:
        """Check that the labels are of the kind that a monitored key needs: classes or regression targets.

        Raises:
            UsageError: If not. The message names the existing key.
        """
        if not self._collection.batches:
            return
        has_targets = self._collection.labels.has_targets
        for measured_set in self._sets(trainer):
            for name in self._awaited(trainer, measured_set, self._better):
                if name.startswith(REGRESSION) == has_targets:
                    continue
                key, other_key = (
                    self._key("val", measured_set.direction, wanted) + measured_set.suffix
                    for wanted in (name, "probe_r2" if has_targets else "probe")
                )
                fact = (
                    "the labels are floating-point numbers, which are regression targets"
                    if has_targets
                    else "the labels name classes"
                )
                fix = "Pass labels.long() if they name classes" if has_targets else "Pass labels.float() for targets"
                raise UsageError(
                    f"ProbeMonitor never logs {key}, because {fact}, but a checkpoint, early stopping or a scheduler "
                    f"monitors it. {fix}, or monitor {other_key}."
                )

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return name -> value. *Collective*."""
        sides = measured_set.sides
        bank = self._bank_shard(trainer, sides)
        assert bank is not None
        queries = self._shard(sides[0])
        groups: dict[str, Any] = (
            {} if self._groups is None else {"query_groups": queries.groups, "gallery_groups": bank.groups}
        )
        with named(self._policy.owner, "linear_probe", _REMEDIES):
            report = linear_probe(
                queries.embeddings,
                _labels_or_targets(queries.labels),
                bank.embeddings,
                _labels_or_targets(bank.labels),
                strengths=self.strengths,
                confidence=self.confidence,
                share=Share(all_processes(), queries.places, bank.places),
                **groups,
            )
        self.reports[measured_set.direction + measured_set.suffix] = report
        self._latest_names = tuple(report.values)
        self._tell([reworded(note, _REMEDIES) for note in report.notes], f"{set_name}, probe")
        return report.values | self._undefined(trainer, measured_set, report)

    def _undefined(self, trainer: Trainer, measured_set: MeasuredSet, report: ProbeReport) -> dict[str, float]:
        """Return NaN for each monitored value that the report lacks, and warn of it once."""
        names = [name for name in self._awaited(trainer, measured_set, self._better) if name not in report.values]
        for name in names:
            key = self._key("val", measured_set.direction, name) + measured_set.suffix
            reason = "there are no groups" if name.endswith("group_out") else "there are at most five classes"
            self._policy.warn(f"{key} is NaN, because {reason}. (Shown once.)", kind=key)
        return dict.fromkeys(names, math.nan)


def _labels_or_targets(labels: Any) -> Any:
    """Return labels unchanged, and regression targets as the tensor that `linear_probe` takes."""
    return labels.values if labels.are_targets else labels
