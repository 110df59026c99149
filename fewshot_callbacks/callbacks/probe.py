"""A linear classifier, or a linear regression, on the embedding at the end of every validation and test."""

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

# Beginnings of the names of values of a regression.
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
    """Logs how well a linear classifier on the embedding does, as `val/probe`, or a linear regression, as `val/probe_r2`.

    The probe is fitted in closed form on a bank of labelled items, and evaluated on the validation set; see `linear_probe`.
    Nothing is drawn at random and no step is iterated, so that values of two epochs only differ by the embedding.

    Where labels name classes, `val/probe` is the accuracy, `val/probe_top5` counts an item as right if its class is among
    the five with the highest scores (of more than five classes), and `val/probe_leave_one_out` is the accuracy of bank
    items that are left out one by one. Labels that are floating-point numbers are the targets of a regression, with
    `val/probe_r2`, `val/probe_spearman` and `val/probe_r2_leave_one_out`, means over the targets.

    Args:
        bank: What the probe is fitted on: a data set, a loader or a stream with the transforms of an evaluation, or a
            function of the Trainer that returns one. `train` is the result of `training_data_for_evaluation()` of the
            Trainer's data module, which the data modules of this package have. The bank has the items that its loader
            gives, each once; they are embedded once in each validation, after its first batch, for all monitors that
            compare with them. `gallery` is the gallery of the set.
        groups: Entries of the step's output or of the batch, such as `"patient"`, whose items resemble each other. The
            strength of the penalty is then chosen by predictions of each group of the bank by the fit without it, which are
            also logged, as `val/probe_leave_group_out`; intervals are over groups. A bank of training items finds them in
            its batches.
        strengths: Strengths of the penalty that are tried, see `linear_probe`.
        confidence: Confidence level of the intervals in `reports`, in (0, 1).
        source: See `RetrievalMonitor`.
        gallery: See there.
        loaders: See there.
        name: See there.
        prog_bar: Show the first of the values in the progress bar.
        strict: Which errors end the run, see `RetrievalMonitor`.

    Attributes:
        reports: The latest `ProbeReport` of each set, by the suffix of its keys (`""` for a single loader), after the
            direction of two encoders.

    Raises:
        ValueError: If `bank` is another word.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ProbeMonitor(source="encoder")], logger=False, accelerator="cpu")
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
        # The first report shows whether labels are classes or targets; most are classes.
        return self._latest_names or ("probe", "probe_leave_one_out")

    def _keys(self, trainer: Trainer) -> Mapping[str, Any]:
        """Return all keys that a report may have: before the first report it is not known which."""
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
                "ProbeMonitor(bank='gallery'): this set has no gallery. Pass gallery=..., or bank='train' with training "
                "data."
            )
        self._check_watched_keys(trainer)

    def _check_watched_keys(self, trainer: Trainer) -> None:
        """Check that a watched value of a classifier, or of a regression, has labels of that kind.

        Raises:
            UsageError: If not; the message names the existing key.
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
                    "the labels are floating-point numbers, the targets of a regression"
                    if has_targets
                    else "the labels name classes"
                )
                fix = "Pass labels.long() if they name classes" if has_targets else "Pass labels.float() for targets"
                raise UsageError(
                    f"ProbeMonitor never logs {key}, for which a checkpoint, an early stopping or a scheduler waits, since "
                    f"{fact}. {fix}, or let it wait for {other_key}."
                )

    def _measure_set(self, trainer: Trainer, set_name: str, measured_set: MeasuredSet) -> Mapping[str, float]:
        """Return the values of the probe, by name. *Collective*."""
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
        """Return NaN for each watched value that the report does not have, and warn of it once."""
        names = [name for name in self._awaited(trainer, measured_set, self._better) if name not in report.values]
        for name in names:
            key = self._key("val", measured_set.direction, name) + measured_set.suffix
            reason = "there are no groups" if name.endswith("group_out") else "there are at most five classes"
            self._policy.warn(f"{key} is NaN, since {reason}. (Shown once.)", kind=key)
        return dict.fromkeys(names, math.nan)


def _labels_or_targets(labels: Any) -> Any:
    """Return labels as they are, and the targets of a regression as a tensor, as `linear_probe` takes both."""
    return labels.values if labels.are_targets else labels
