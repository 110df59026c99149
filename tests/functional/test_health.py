"""Numbers of an embedding without a ranking: against loops, under changes that must not matter, and where undefined."""

import itertools
import math
import re
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fewshot_callbacks.functional import Moments, Share, _health_numbers, embedding_health, health, moments
from tests.messages import missing_facts, refused
from tests.thread_processes import in_threads

NUMBERS = ["rankme", "effective_rank", "spectral_decay", "uniformity", "nc1", "cdnv", "alignment"]
NUMBERS += ["hubness", "antihubs", "intrinsic_dimension"]


def test_each_number_is_declared_once_with_what_is_better() -> None:
    assert health.names_of(labels=True, k=2) == NUMBERS
    assert health.names_of(labels=False, k=None) == NUMBERS[:4]
    higher = ["rankme", "effective_rank"]
    lower = ["uniformity", "nc1", "cdnv", "alignment", "hubness", "antihubs"]
    neither = dict.fromkeys(["spectral_decay", "intrinsic_dimension"])
    assert health.better_values() == dict.fromkeys(higher, "higher") | dict.fromkeys(lower, "lower") | neither


def items(number: int = 90, dim: int = 12, classes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes of different sizes and widths, far from the origin."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (number,), generator=generator) * 3 - 5
    labels[:2] = labels[2]
    centres = torch.randn(30, dim, generator=generator)
    points = centres[labels] + (0.2 + 0.1 * labels.abs())[:, None] * torch.randn(number, dim, generator=generator)
    return points + 3, labels


def entropy_rank(values: Any, floor: float) -> float:
    shares = [value / sum(values) + floor for value in values]
    return math.exp(-sum(share * math.log(share) for share in shares))


def by_definition(points: Tensor, labels: Tensor, k: int) -> dict[str, float]:
    """Loops over items, classes and pairs, in NumPy."""
    x, y = points.double().numpy(), labels.numpy()
    of = {c: x[y == c] for c in sorted(set(y.tolist())) if (y == c).sum() > 1}
    eigenvalues = np.linalg.eigvalsh(np.cov(x.T))[::-1]
    found = {
        "rankme": entropy_rank(np.linalg.svd(x, compute_uv=False), 1e-7),
        "effective_rank": entropy_rank(eigenvalues, 0.0),
        "spectral_decay": -stats.linregress(np.log(np.arange(3, len(eigenvalues) + 1)), np.log(eigenvalues[2:])).slope,
    }
    kept = np.concatenate(list(of.values()))
    within = sum(np.outer(row - part.mean(0), row - part.mean(0)) for part in of.values() for row in part) / len(kept)
    apart = [part.mean(0) - kept.mean(0) for part in of.values()]
    between = sum(np.outer(mean, mean) for mean in apart) / len(of)
    found["nc1"] = np.trace(within @ np.linalg.pinv(between, rcond=1e-10)) / len(of)
    variance = {c: np.mean([((row - part.mean(0)) ** 2).sum() for row in part]) for c, part in of.items()}
    found["cdnv"] = np.mean([
        (variance[a] + variance[b]) / (2 * ((of[a].mean(0) - of[b].mean(0)) ** 2).sum())
        for a, b in itertools.combinations(of, 2)
    ])  # fmt: skip
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = list(itertools.combinations(range(len(x)), 2))
    found["alignment"] = np.mean([((unit[a] - unit[b]) ** 2).sum() for a, b in pairs if y[a] == y[b]])
    found["uniformity"] = math.log(np.mean([math.exp(-2 * ((unit[a] - unit[b]) ** 2).sum()) for a, b in pairs]))
    return found | of_neighbours(x, k)


def of_neighbours(x: Any, k: int) -> dict[str, float]:
    """Places are given from the nearest on; those who are equally near share what is left."""
    often, ratios = np.zeros(len(x)), []
    for query in range(len(x)):
        distances = {other: math.dist(x[query], x[other]) for other in range(len(x)) if other != query}
        left = float(k)
        for distance in sorted(set(distances.values())):
            tied = [other for other, at in distances.items() if at == distance]
            often[tied] += min(1.0, left / len(tied))
            left = max(0.0, left - len(tied))
        first, second = sorted(distances.values())[:2]
        ratios += [math.log(second / first)] if first > 0 else []
    dimension = (len(ratios) - 1) / sum(ratios) if sum(ratios) else math.nan
    return {"hubness": stats.skew(often), "antihubs": np.mean(often == 0), "intrinsic_dimension": dimension}


@pytest.mark.parametrize(
    "case", ["float32", "float64", "float16", "duplicates", "lattice", "a class of one", "in parts"]
)
def test_each_number_is_that_of_its_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points, labels = items()
    if case.startswith("float"):
        points = points.to(getattr(torch, case))
    if case == "duplicates":  # more of them than places
        points[10:22] = points[10]
        points[30:32] = points[30]
    if case == "lattice":  # many are equally near
        points = (points * 2).round()
    if case == "in parts":
        for module in (moments, _health_numbers):
            monkeypatch.setattr(module, "TILE", 16)
        monkeypatch.setattr(_health_numbers, "CLASSES_AT_ONCE", 2)
    if case == "a class of one":
        labels[5] = 99
    found = embedding_health(points, labels, k=5)
    assert found.metrics() == pytest.approx(by_definition(points, labels, 5), rel=1e-6, abs=1e-9)
    assert list(found.metrics()) == NUMBERS
    assert found.uniformity_interval.low == found.uniformity == found.uniformity_interval.high


def test_who_is_equally_near_is_found_beyond_the_list() -> None:
    """The corners of a simplex, one of them moved outwards: all the others share their places."""
    points = torch.eye(300, dtype=torch.float64)
    points[7] *= 3
    found = embedding_health(points, k=4)
    expected = of_neighbours(points.numpy(), 4)
    assert found.hubness == pytest.approx(expected["hubness"])
    assert found.antihubs == 1 / 300


def test_turning_scaling_and_shuffling_change_nothing() -> None:
    points, labels = items()
    turn, order = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q, torch.randperm(len(points))
    whole, expected = points.double(), embedding_health(points.double(), labels).metrics()
    up_to_the_largest = whole * (torch.finfo(torch.float64).max / whole.abs().max())
    for changed in (whole @ turn, whole * 1e-200, whole * 3e250, up_to_the_largest):
        assert embedding_health(changed, labels).metrics() == pytest.approx(expected, rel=1e-6)
    assert embedding_health(whole[order], labels[order]).metrics() == pytest.approx(expected, rel=1e-9)
    words = [f"class {label}" for label in labels.tolist()]
    assert embedding_health(whole, words).metrics() == pytest.approx(expected, rel=1e-12)
    lengths = torch.rand(len(points), 1, dtype=torch.float64) + 0.5
    unit = embedding_health(whole, labels, normalize=True).metrics()
    assert unit == pytest.approx(embedding_health(whole * lengths, labels, normalize=True).metrics(), rel=1e-6)
    assert unit["effective_rank"] != pytest.approx(expected["effective_rank"], rel=1e-3)


def test_several_processes_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_health_numbers, "SAMPLE", 40)
    points, labels = items()
    expected = embedding_health(points, labels)
    some = torch.arange(len(points)) % 2  # the last has none

    def answer(processes: Any) -> Any:
        mine = (some == processes.rank).nonzero().flatten()
        return embedding_health(points[mine], labels[mine], share=Share(processes, mine))

    for found in in_threads(3, answer):
        assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-9)
        assert found.hubs == expected.hubs
        assert found.uniformity_interval == pytest.approx(expected.uniformity_interval)


def test_a_sample_holds_the_uniformity_of_all_and_not_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    points, labels = items(600)
    exact = embedding_health(points, labels, k=None).uniformity
    monkeypatch.setattr(_health_numbers, "SAMPLE", 100)
    found = embedding_health(points, k=None)
    low, high = found.uniformity_interval
    assert low < found.uniformity < high
    assert low < exact < high
    assert high - low < 0.5
    assert embedding_health(points.flip(0), k=None).uniformity == pytest.approx(found.uniformity, rel=1e-9)
    held = 0
    for seed in range(30):
        draw, ends = items(600, seed=seed)[0], []
        for sample in (600, 100):
            monkeypatch.setattr(_health_numbers, "SAMPLE", sample)
            ends.append(embedding_health(draw, k=None).uniformity_interval)
        held += ends[1].low <= ends[0].low <= ends[1].high
    assert held >= 26  # 95 % of 30 are 28.5; fewer than 26 have a probability of 2 %


def test_moments_merge_in_any_order_and_an_offset_costs_no_digit() -> None:
    points = items()[0].double()
    parts = [Moments.of(part + 1e6) for part in points.split(13)]
    for order in (parts, parts[::-1]):
        merged = reduce(Moments.merge, order)
        torch.testing.assert_close(merged.scatter, torch.cov(points.T) * (len(points) - 1), rtol=1e-8, atol=1e-8)


def test_what_cannot_be_computed_is_nan_with_the_reason() -> None:
    points, labels = items()
    of_one = {*NUMBERS} - {"rankme"}
    for given, expected, facts in (
        ((points, 0 * labels), {"nc1", "cdnv"}, ("nc1", "cdnv", "NaN", "one class")),
        ((points, torch.arange(90)), {"nc1", "cdnv", "alignment"}, ("alignment", "NaN", "two items")),
        ((points[:1], labels[:1]), of_one, ("hubness", "NaN", "10 neighbours", "1 item")),
        (
            (torch.ones(20, 12), labels[:20]),
            of_one - {"uniformity", "alignment", "antihubs"},
            ("effective_rank", "NaN", "embeddings", "equal", "nc1", "cdnv", "mean"),
        ),
        ((points, labels), set(), ()),
    ):
        found = embedding_health(*given)
        assert {name for name, value in found.metrics().items() if math.isnan(value)} == expected
        assert not missing_facts(" ".join(found.notes), facts), found.notes
        assert bool(found.notes) is bool(facts)
    mirrored = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1], [3, 1], [3, 2]])
    found = embedding_health(mirrored, torch.arange(6) // 2, k=None)
    assert math.isinf(found.cdnv)
    assert not missing_facts(found.notes[-1], ("cdnv", "infinite", "mean")), found.notes
    assert "hubness" not in found.metrics()


def test_a_collapse_is_said_with_its_number_and_nothing_else_is() -> None:
    points, labels = items()
    assert embedding_health(points, labels).collapse is None
    point = str(embedding_health(1e-9 * points.double() + 1).collapse)
    assert not missing_facts(point, ("collapsed", "point", "90 items")), point
    assert re.search(r"\b\d\.\de-\d\d\b", point), point
    line = torch.randn(90, 1) @ torch.randn(1, 64) + 0.01 * torch.randn(90, 64)
    shown = str(embedding_health(line))
    assert not missing_facts(shown, ("collapsed", "directions")), shown
    assert re.search(r"\bRankMe\D+1\.\d\d\b", shown), shown
    assert embedding_health(line, torch.arange(90) % 10).collapse is None  # ten classes need no more
    assert embedding_health(line, torch.arange(90) % 11).collapse is not None
    assert embedding_health(line[:49]).collapse is None
    assert embedding_health(torch.randn(90, 64) + 30).collapse is None  # a mean far off


DEGENERATE = {
    "one item": (torch.randn(1, 4), [0], 10),
    "equal items": (torch.ones(12, 4), [0, 1] * 6, 3),
    "zeros": (torch.zeros(12, 4), [0, 1] * 6, 3),
    "each class a point": (torch.eye(4).repeat(5, 1), torch.arange(20) % 4, 3),
    "two classes one point": (torch.eye(2).repeat_interleave(6, dim=0), [0, 0, 0, 1, 1, 1, *[2] * 6], 3),
    "as many neighbours as items": (torch.randn(10, 4), torch.arange(10) % 2, 10),
    "one item of each class": (torch.randn(12, 4), torch.arange(12), 3),
    "one class": (torch.randn(12, 4), [0] * 12, 3),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_a_number_that_is_not_there_is_named_by_a_note(name):
    rows, labels, k = DEGENERATE[name]
    found = embedding_health(rows, labels, k=k)
    missing = [key for key, value in found.metrics().items() if not math.isfinite(value)]
    assert missing
    for key in missing:
        assert any(key in note.partition(":")[0] for note in found.notes), (key, found.notes)
    assert all(value >= 0 for value in (found.nc1, found.cdnv) if not math.isnan(value))
    assert "-0" not in f"{found.nc1:g}"


@pytest.mark.parametrize("step", [1e-4, 1e-7, 1e-10])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_class_means_that_differ_by_little_differ(step, offset):
    """Of two classes near each other and one far away: by the definition, from distances in fractions."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-8, 9, (20, 3), generator=generator).double() * step
    rows = torch.cat([noise, noise + torch.tensor([step, 0, 0]), noise + 5.0]) + offset
    labels = torch.arange(60) // 20
    exact = [[Fraction(value) for value in row] for row in rows.tolist()]
    means = [[sum(column) / 20 for column in zip(*exact[n : n + 20], strict=True)] for n in (0, 20, 40)]

    def squared(one, other):
        return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))

    of = [sum(squared(row, mean) for row in exact[n : n + 20]) / 20 for n, mean in zip((0, 20, 40), means, strict=True)]
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = sum((of[i] + of[j]) / (2 * squared(means[i], means[j])) for i, j in pairs) / len(pairs)
    found = embedding_health(rows, labels, k=None)
    assert found.cdnv == pytest.approx(float(expected), rel=1e-3 if offset else 1e-4)


def test_two_classes_of_the_same_items_have_the_same_mean_in_any_order():
    rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double() / 3 + 7
    found = embedding_health(torch.cat([rows, rows.flip(0), rows + 1]), torch.arange(90) // 30, k=None)
    assert found.cdnv == math.inf
    assert not all(missing_facts(note, ("cdnv", "infinite", "mean")) for note in found.notes), found.notes


def test_processes_that_all_hold_nothing_are_told_the_shape() -> None:
    nothing = torch.empty(0, 3)
    for outcome in in_threads(2, lambda processes: embedding_health(nothing, share=Share(processes))):
        with refused(ValueError, "embedding_health", "embeddings", "(0, 3)", "process"):
            raise outcome
