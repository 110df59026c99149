"""`evaluate_identification`: is a probe in the gallery, and as whom? Open-set identification, 1:N."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._reading import default_mode, numbered, read_labels
from fewshot_callbacks.functional.neighbours import compared_sets, nearest
from fewshot_callbacks.functional.retrieval.registry import Metric, asked_metrics
from fewshot_callbacks.functional.retrieval.report import Values, note_of_rates, or_none
from fewshot_callbacks.functional.statistics import Interval, clustered_mean_interval, exact_mean
from fewshot_callbacks.functional.verification.scores import scores_of_pairs
from fewshot_callbacks.settings import Similarity

_CALL = "evaluate_identification"
_NO_OTHERS = ("No probe is non-mated, so that no threshold follows from a false positive rate: these values are NaN.",)
# Pairs of a probe and an item of its label that are scored at once.
STRIPE = 2**20


class _Probes(NamedTuple):
    """What identification needs to know of the probes."""

    own: Float[Tensor, "mated"]
    """the best score with an item of the probe's label"""
    first: Float[Tensor, "mated k"]
    """scores of the nearest items, whoever they are; NaN where there are no more"""
    beyond: Int[Tensor, "mated"]
    """items that score as the last of these and are not among them"""
    equal: Int[Tensor, "mated"]
    """items of the probe's label that have its best score"""
    others: Float[Tensor, "others"]
    """the best score of each non-mated probe, ascending"""

    def found(self, k: int) -> Float[Tensor, "mated"]:
        """Return the probability that an item of the label is among the first k, over the orders of equal scores."""
        above = (self.first > self.own[:, None]).sum(1)
        tied = (self.first == self.own[:, None]).sum(1)
        tied += torch.where(self.own == self.first[:, -1], self.beyond, 0)
        missed = torch.ones(len(self.own), dtype=torch.float64)
        room = (k - above).clamp(min=0)
        # each of the places that are left goes to an item of another label: hypergeometric
        for place in range(k):
            left = tied - place
            other = (left - self.equal).clamp(min=0).double() / left.clamp(min=1)  # integers divide to float32
            missed = torch.where(place < room, missed * other, missed)
        return 1 - missed

    def threshold(self, rate: float) -> float:
        """Return the lowest best score, of any probe, that keeps a false positive rate; infinite if there is none."""
        scores = torch.cat([self.own, self.others]).unique()
        reached = len(self.others) - torch.searchsorted(self.others, scores)
        kept = scores[reached.double() / len(self.others) <= rate]
        return float(kept[0]) if len(kept) else math.inf


IDENTIFICATION_METRICS = (
    Metric(
        "tpir@fpir{p}",
        "pairs",
        None,
        "Mated probes whose first candidate is theirs and accepted, where at most {p} of the others are.",
    ),
    Metric(
        "tpir@fpir{p}_rank{k}",
        "pairs",
        None,
        "Mated probes with theirs among the first {k} candidates and accepted, where at most {p} of the others are.",
    ),
    Metric("recall@{k}", "pairs", None, "Mated probes with an item of their label among the first {k}, at any score."),
)
"""What `evaluate_identification` can be asked for."""

DEFAULT_IDENTIFICATION_METRICS = ("tpir@fpir0.1", "tpir@fpir0.01", "recall@1")
"""What it reports unless `metrics` says otherwise."""


@dataclass(frozen=True)
class IdentificationReport(Values):
    """The result of `evaluate_identification`."""

    known: ClassVar = IDENTIFICATION_METRICS

    values: dict[str, float]
    """metric -> value, in the order of `metrics`; NaN where no probe is non-mated, and a note says so"""
    thresholds: dict[str, float]
    """metric -> the score from which its best candidate is accepted; infinite where none may be"""
    intervals: dict[str, Interval]
    """metric -> confidence interval of its mean over mated probes, robust to the dependence of probes of one identity; the
    threshold and the gallery are taken as given"""
    confidence: float
    """confidence level of the intervals"""
    mated: int
    """probes with an item of their label in the gallery"""
    non_mated: int
    """probes without one"""
    gallery: int
    """number of gallery items"""
    identities: int
    """distinct labels of the gallery"""
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    per_probe: dict[str, Float[Tensor, "probes"]] = field(compare=False, repr=False)
    """metric -> its value for each probe; NaN for non-mated ones"""

    def __str__(self) -> str:
        """Return the values of `metrics`, one in a line with its interval, and the notes."""
        probes = f"{self.mated:,} mated and {self.non_mated:,} non-mated probes"
        head = f"{probes}, {self.gallery:,} gallery items of {self.identities:,} identities"
        return "\n".join([head, *self.lines(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (what is not finite becomes None)."""
        return self.tables() | {
            "thresholds": {name: or_none(value) for name, value in self.thresholds.items()},
            **{name: getattr(self, name) for name in ("mated", "non_mated", "gallery", "identities")},
            "notes": list(self.notes),
        }


@default_mode()
def evaluate_identification(
    probes: Any,
    labels: Any,
    gallery: Any,
    gallery_labels: Any,
    *,
    metrics: Sequence[str] = DEFAULT_IDENTIFICATION_METRICS,
    similarity: Similarity = "cosine",
    confidence: float = 0.95,
    memory_mb: float | None = None,
) -> IdentificationReport:
    """Evaluate open-set identification: who is a probe, if it is anyone of the gallery?

    A probe is mated if the gallery has an item of its label. FPIR(t) is the share of non-mated probes whose best candidate
    scores t or more. TPIR(t, r) is the share of mated probes that have an item of their label among the first r candidates,
    with a score of t or more (ISO/IEC 19795-1; the 1:N tests of NIST's FRVT). All scores are exact, and no matrix of them is
    made.

    - `tpir@fpir0.01`: TPIR at rank 1, at the lowest threshold whose FPIR is at most 0.01.
    - `tpir@fpir0.01_rank20`: the same within the first 20.
    - `recall@20`: TPIR within the first 20 without a threshold.

    Args:
        probes: (probes, dim) finite floating-point rows.
        labels: (probes,) identity of each, integers or strings.
        gallery: (gallery, dim) enrolled items, one or several of each identity.
        gallery_labels: (gallery,) their identities.
        metrics: What is reported, by key.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        confidence: Confidence level of the intervals, in (0, 1).
        memory_mb: Bound on the memory of the search, in MB; None is 512.

    Returns:
        A frozen report, with values in [0, 1]. Of equal scores it holds the mean over all orders.

    Raises:
        ValueError: If shapes or types do not fit, embeddings hold NaN or Inf, no probe is mated, or there is no such metric.

    Examples:
        >>> import torch
        >>> gallery, probes = torch.eye(4), torch.eye(4) + 0.1
        >>> report = evaluate_identification(probes, ["a", "b", "c", "x"], gallery, ["a", "b", "c", "d"])
        >>> report["recall@1"], report["tpir@fpir0.1"], report.non_mated
        (1.0, 0.0, 1)
    """
    asked = asked_metrics(_CALL, metrics, IDENTIFICATION_METRICS)
    rows, items = compared_sets(_CALL, ("probes", "gallery"), probes, gallery, similarity)
    assert items is not None
    read = {
        "labels": read_labels(labels, len(rows), "labels", "probes", _CALL),
        "gallery_labels": read_labels(gallery_labels, len(items), "gallery_labels", "gallery items", _CALL),
    }
    (of_probes, of_items), _ = numbered(_CALL, read)
    mated = torch.isin(of_probes, of_items)
    if not bool(mated.any()):
        raise ValueError(
            f"{_CALL}: none of the {len(rows)} probes has an item of its label in the gallery, so nobody can be identified. "
            "Pass labels of both in one form, and enrol items of some of the probes' labels."
        )
    most = max([one.parameters.get("k", 1) for one in asked], default=1)
    near = nearest(rows, gallery=items, k=min(most, len(items)), similarity=similarity, memory_mb=memory_mb)
    own, equal = _own_scores(rows[mated], of_probes[mated], items, of_items, similarity)
    others = near.scores[~mated, 0].sort().values
    known = _Probes(own, near.scores[mated], near.left_out[mated], equal, others)
    values, thresholds, intervals, per_probe = {}, {}, {}, {}
    for one in asked:
        found = known.found(min(one.parameters.get("k", 1), len(items)))
        if "p" in one.parameters:
            thresholds[one.key] = known.threshold(one.parameters["p"]) if len(others) else math.nan
            found = found * (own >= thresholds[one.key]) if len(others) else torch.full_like(found, math.nan)
        values[one.key] = exact_mean(found)
        intervals[one.key] = clustered_mean_interval(found, of_probes[mated], confidence)
        per_probe[one.key] = torch.full((len(rows),), math.nan, dtype=torch.float64).masked_scatter(mated, found)
    rates = [one.parameters["p"] for one in asked if "p" in one.parameters]
    return IdentificationReport(
        values=values,
        thresholds=thresholds,
        intervals=intervals,
        confidence=confidence,
        mated=len(own),
        non_mated=len(others),
        gallery=len(items),
        identities=len(of_items.unique()),
        notes=_NO_OTHERS
        if rates and not len(others)
        else note_of_rates("positive", rates, len(others), "non-mated probes"),
        per_probe=per_probe,
    )


def _own_scores(
    probes: Float[Tensor, "mated dim"],
    labels: Int[Tensor, "mated"],
    gallery: Float[Tensor, "gallery dim"],
    gallery_labels: Int[Tensor, "gallery"],
    similarity: Similarity,
) -> tuple[Float[Tensor, "mated"], Int[Tensor, "mated"]]:
    """Return the best score of each probe with an item of its label, and how many such items have it."""
    order = gallery_labels.argsort(stable=True)
    sorted_labels = gallery_labels[order]
    start = torch.searchsorted(sorted_labels, labels)
    count = torch.searchsorted(sorted_labels, labels, right=True) - start
    with computing() as threads:
        # inside: what is made under `torch.inference_mode` cannot be written to here
        best, equal = torch.empty(len(labels), dtype=torch.float64), torch.empty(len(labels), dtype=torch.int64)
        vectors = Vectors(probes, gallery, similarity, threads=threads)
        for some in torch.arange(len(labels)).split(max(1, STRIPE // int(count.max()))):
            place = torch.arange(len(some)).repeat_interleave(count[some])
            within = torch.arange(len(place)) - (count[some].cumsum(0) - count[some])[place]
            scores = scores_of_pairs(vectors, some[place], order[start[some][place] + within])
            best[some] = torch.full_like(best[some], -math.inf).scatter_reduce(0, place, scores, "amax")
            equal[some] = torch.zeros_like(some).index_add(0, place, (scores == best[some][place]).long())
    return best, equal
