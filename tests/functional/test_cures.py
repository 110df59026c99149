"""Each piece of code that a message suggests, written in place of what was given, leads to the right value."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fewshot_callbacks.data.samplers import ClassBalancedBatchSampler, EpisodicBatchSampler
from fewshot_callbacks.functional import (
    discriminant_ratio,
    embedding_health,
    evaluate_retrieval,
    evaluate_trials,
    grouped_recall,
    knn_accuracy,
    linear_probe,
    near_duplicates,
    nearest,
)
from fewshot_callbacks.functional.episodes import sample_episodes
from fewshot_callbacks.metrics import DiscriminantRatio, RetrievalEvaluation
from tests.integration_packages import is_missing
from tests.messages import missing_facts, refused

torch.manual_seed(0)
ITEMS = 24
POINTS = torch.randn(ITEMS, 4)
LABELS = torch.arange(ITEMS) % 4
WORDS = list(map(str, LABELS.tolist()))
INTEGERS = torch.randint(-99, 99, (ITEMS, 4))
COMPLEX = torch.complex(POINTS, POINTS.flip(0))
PARTS = torch.stack([COMPLEX.real, COMPLEX.imag], dim=2).reshape(ITEMS, 8)
BITS = np.random.default_rng(0).integers(0, 2, (ITEMS, 16))
BYTES = (BITS.reshape(ITEMS, 2, 8) * 2 ** np.arange(7, -1, -1)).sum(axis=2).astype(np.uint8)
DIRTY = torch.where((torch.arange(ITEMS) == 3)[:, None], torch.nan, POINTS)
WITHOUT_3 = torch.arange(ITEMS) != 3
MASKED = np.ma.masked_array(POINTS.numpy(), mask=DIRTY.isnan().numpy())


def mean_precision(points: Any, labels: Any, gallery: Any = None, gallery_labels: Any = None, **settings: Any) -> float:
    """Return mAP from every pair: a query is no candidate for itself.

    No case has equal scores; codes, which have, are compared with a call on the bits.
    """
    rows = torch.nn.functional.normalize(torch.as_tensor(points).double(), dim=1)
    others = rows if gallery is None else torch.nn.functional.normalize(torch.as_tensor(gallery).double(), dim=1)
    other_labels = labels if gallery is None else gallery_labels
    precisions = []
    for query, label in enumerate(labels):
        order = (others @ rows[query]).argsort(descending=True).tolist()
        hits = [other_labels[item] == label for item in order if gallery is not None or item != query]
        ranks = [rank for rank, hit in enumerate(hits, 1) if hit]
        precisions.append(np.mean([number / rank for number, rank in enumerate(ranks, 1)]))
    return float(np.mean(precisions))


def map_of(
    queries: Any, query_labels: Any = LABELS, gallery: Any = None, gallery_labels: Any = None, **more: Any
) -> float:
    settings = {"metrics": ("mAP",), "label_groups": None} | more
    return evaluate_retrieval(queries, query_labels, gallery, gallery_labels, **settings).values["mAP"]


def of_bits(queries: Any) -> float:
    return map_of(queries, similarity="hamming")


def metric_map(embeddings: Any, labels: Any = LABELS) -> float:
    metric = RetrievalEvaluation(metrics=("mAP",), label_groups=None)
    metric.update(embeddings, labels)
    return metric.compute()["mAP"].item()


def metric_j(embeddings: Any, labels: Any = LABELS) -> float:
    metric = DiscriminantRatio()
    metric.update(embeddings, labels)
    return metric.compute().item()


def j_by_hand(points: torch.Tensor) -> float:
    """Return between-class over within-class scatter from the definition."""
    rows = points.double()
    means = {label: rows[label == LABELS].mean(0) for label in set(LABELS.tolist())}
    between = sum((label == LABELS).sum() * (mean - rows.mean(0)).square().sum() for label, mean in means.items())
    within = sum((row - means[int(label)]).square().sum() for row, label in zip(rows, LABELS, strict=True))
    return float(between / within)


def knn(queries: Any, query_labels: Any = LABELS, **more: Any) -> float:
    return knn_accuracy(queries, query_labels, k=3, temperature=None, **more).values["knn@3"]


def knn_by_hand(points: Any, labels: Any = LABELS) -> float:
    """Return the share of right votes of three neighbours: classes that tie share the hit."""
    rows = torch.nn.functional.normalize(torch.as_tensor(points).double(), dim=1)
    scores = (rows @ rows.T).fill_diagonal_(-torch.inf)
    labels = torch.as_tensor(labels).tolist()
    hits = []
    for label, neighbours in zip(labels, scores.topk(3, dim=1).indices, strict=True):
        votes = [labels[item] for item in neighbours.tolist()]
        winners = [word for word in dict.fromkeys(votes) if votes.count(word) == max(map(votes.count, votes))]
        hits.append((label in winners) / len(winners))
    return float(np.mean(hits))


def probe(queries: Any, query_labels: Any = LABELS, **more: Any) -> float:
    gallery = {"gallery": POINTS, "gallery_labels": LABELS} | more
    return linear_probe(queries, query_labels, **gallery).values["probe"]


def first_neighbours(queries: Any) -> list[int]:
    return nearest(queries, k=1).indices.flatten().tolist()


def j(embeddings: Any, labels: Any = LABELS) -> float:
    return discriminant_ratio(embeddings, labels).item()


def rank(embeddings: Any) -> float:
    return embedding_health(embeddings, k=None).effective_rank


def drawn(labels: Any) -> Any:
    return sample_episodes(labels, ways=2, shots=1, queries=2, episodes=3).indices


class Cure(NamedTuple):
    function: Callable[..., Any]
    argument: str
    given: Any
    pattern: str
    expected: Callable[[], Any]
    others: dict[str, Any] = {}  # noqa: RUF012


def forms(rows: torch.Tensor) -> list[Any]:
    """Return the same rows as a tensor, an array, a list, a list of tensors and one of arrays."""
    return [rows, rows.numpy(), rows.tolist(), list(rows), list(rows.numpy())]


def of_pandas(kind: str, values: Any) -> list[Any]:
    """The values as pandas holds them; none where it is not installed."""
    return [] if is_missing("pandas") else [getattr(import_module("pandas"), kind)(values)]


def cures() -> Iterator[Cure]:
    floats, flat, real, dense = (
        r"(\S+\.float\(\))",
        r"(\S+\.flatten\(1\))",
        r"(torch\.view_as_real\S+\.flatten\(1\))",
        r"(\S+\.to_\w+\([\d.]*\))",
    )
    column_of_each, whole_numbers, one_hot_column = r"(\S+\[:, None\])", r"(\S+\.long\(\))", r"(\S+\.argmax\(dim=1\))"
    strings = r"(list\(map\(str, (?:map\(int, )?[\w.()]+\))"
    cube = POINTS.reshape(ITEMS, 2, 2)
    for integers, complexes, cubes in zip(forms(INTEGERS), forms(COMPLEX), forms(cube), strict=True):
        yield Cure(map_of, "queries", integers, floats, lambda: mean_precision(INTEGERS, LABELS))
        yield Cure(knn, "queries", integers, floats, lambda: knn_by_hand(INTEGERS))
        yield Cure(j, "embeddings", integers, floats, lambda: j_by_hand(INTEGERS))
        yield Cure(metric_map, "embeddings", integers, floats, lambda: mean_precision(INTEGERS, LABELS))
        yield Cure(metric_j, "embeddings", integers, floats, lambda: j_by_hand(INTEGERS))
        yield Cure(map_of, "queries", complexes, real, lambda: mean_precision(PARTS, LABELS))
        yield Cure(metric_j, "embeddings", complexes, real, lambda: j_by_hand(PARTS))
        yield Cure(map_of, "queries", cubes, flat, lambda: mean_precision(POINTS, LABELS))
        yield Cure(j, "embeddings", cubes, flat, lambda: j_by_hand(POINTS))
        yield Cure(metric_map, "embeddings", cubes, flat, lambda: mean_precision(POINTS, LABELS))
        yield Cure(knn, "queries", cubes, flat, lambda: knn_by_hand(POINTS))
    yield Cure(
        probe, "gallery", INTEGERS.numpy(), floats, lambda: probe(POINTS, gallery=INTEGERS.float()), {"queries": POINTS}
    )
    yield Cure(rank, "embeddings", INTEGERS.numpy(), floats, lambda: rank(INTEGERS.float()))
    column = POINTS[:, 0]
    for numbers in forms(column)[:3]:
        yield Cure(first_neighbours, "queries", numbers, column_of_each, lambda: first_neighbours(column[:, None]))
        yield Cure(j, "embeddings", numbers, column_of_each, lambda: j_by_hand(column[:, None]))
    yield Cure(map_of, "queries", POINTS.to_sparse(), dense, lambda: mean_precision(POINTS, LABELS))
    yield Cure(
        map_of, "query_labels", LABELS.to_sparse(), dense, lambda: mean_precision(POINTS, LABELS), {"queries": POINTS}
    )
    nested = torch.nested.nested_tensor(list(POINTS), layout=torch.jagged)
    yield Cure(map_of, "queries", nested, dense, lambda: mean_precision(POINTS, LABELS))

    # Labels: the values are those of the integers.
    whole, one_hot = LABELS.float(), torch.eye(4)[LABELS].long()
    for numbers, rows in zip(forms(whole)[:3], forms(one_hot)[:3], strict=True):
        yield Cure(map_of, "query_labels", numbers, whole_numbers, lambda: map_of(POINTS), {"queries": POINTS})
        yield Cure(drawn, "labels", numbers, whole_numbers, lambda: drawn(LABELS))
        yield Cure(knn, "query_labels", rows, one_hot_column, lambda: knn_by_hand(POINTS), {"queries": POINTS})
        yield Cure(j, "labels", rows, one_hot_column, lambda: j_by_hand(POINTS), {"embeddings": POINTS})
    for series in of_pandas("Series", whole.numpy()):
        yield Cure(j, "labels", series, whole_numbers, lambda: j_by_hand(POINTS), {"embeddings": POINTS})
    for halves in forms(whole / 2 + 0.25)[:3]:
        yield Cure(knn, "query_labels", halves, strings, lambda: knn_by_hand(POINTS), {"queries": POINTS})
    cube_of_labels, pairs = LABELS[:, None, None], np.array([[word, "x"] for word in WORDS])
    for labels in forms(cube_of_labels)[:2]:
        yield Cure(knn, "query_labels", labels, r"(\S+\.flatten\(\))", lambda: knn_by_hand(POINTS), {"queries": POINTS})
    for table in (pairs, *of_pandas("DataFrame", pairs)):
        yield Cure(knn, "query_labels", table, r"(\S+\[:, 0\])", lambda: knn_by_hand(POINTS), {"queries": POINTS})
    mixed = [label if label else "0" for label in LABELS.tolist()]
    for labels in (mixed, np.array(mixed, dtype=object), [2**70 + label for label in LABELS.tolist()]):
        yield Cure(j, "labels", labels, strings, lambda: j_by_hand(POINTS), {"embeddings": POINTS})
    for large in (LABELS.numpy().astype(np.uint64) + 2**63, torch.from_numpy(LABELS.numpy().astype(np.uint64) + 2**63)):
        yield Cure(j, "labels", large, strings, lambda: j_by_hand(POINTS), {"embeddings": POINTS})
    latin = np.array([f"é{word}".encode("latin-1") for word in WORDS])
    yield Cure(
        j, "labels", latin, r"(np\.char\.decode\(\w+, '[\w-]+'\))", lambda: j_by_hand(POINTS), {"embeddings": POINTS}
    )

    # One of two arguments as integers, the other as words: those of the integers become words.
    gallery = {"gallery": POINTS.flip(0), "gallery_labels": WORDS[::-1]}
    expected = {"gallery": POINTS.flip(0), "gallery_labels": LABELS.flip(0)}
    for function in (map_of, knn):
        for labels in (LABELS, LABELS.numpy(), LABELS.tolist(), *of_pandas("Series", LABELS.numpy())):
            yield Cure(
                function, "query_labels", labels, strings,
                partial(function, POINTS, LABELS, **expected), {"queries": POINTS} | gallery,
            )  # fmt: skip
    words = {"queries": POINTS, "query_labels": WORDS, "gallery": POINTS.flip(0)}
    yield Cure(
        map_of,
        "gallery_labels",
        LABELS.flip(0),
        strings,
        lambda: map_of(POINTS, LABELS, **expected),
        words,
    )
    groups = {"queries": POINTS, "query_labels": WORDS}
    yield Cure(
        grouped, "label_groups", [[0, 1], [2, 3]], r"(\[list\(map.+?\])",
        lambda: grouped(POINTS, LABELS, label_groups=[[0, 1], [2, 3]]), groups,
    )  # fmt: skip

    # Codes.
    numbers = BITS * 5 - 2
    for values in (torch.from_numpy(numbers).float(), numbers, numbers.tolist(), np.where(BITS, 1, -1) * (numbers > 9)):
        if np.any(np.asarray(values)):
            yield Cure(of_bits, "queries", values, r"(\S+ > 0)\b", lambda: of_bits(BITS))
    signed = (BYTES ^ 128).view(np.int8)
    for packed in (BYTES, torch.from_numpy(BYTES), signed, torch.from_numpy(signed)):
        yield Cure(of_bits, "queries", packed, r"(np\.unpackbits.+?axis=1\))", lambda: of_bits(BITS))
    yield Cure(
        of_bits, "queries", MASKED > 0, r"(\S+\.filled\(0\))", lambda: of_bits(np.where(DIRTY.isnan(), 0, POINTS > 0))
    )


def grouped(queries: Any, query_labels: Any, label_groups: Any) -> float:
    return grouped_recall(queries, query_labels, label_groups=label_groups).at[1]


def message_of(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r"\w") as raised:
        function(**arguments)
    return str(raised.value)


def evaluated(code: str, arguments: dict[str, Any]) -> Any:
    return eval(code, {"np": np, "torch": torch} | arguments)


@pytest.mark.parametrize(
    "cure", cures(), ids=lambda cure: f"{cure.function.__name__}-{cure.argument}-{type(cure.given).__name__}"
)
def test_a_suggested_expression_gives_the_right_value(cure: Cure) -> None:
    """Seen red: `float`, `long`, `argmax` and `flatten(1)` were suggested for arrays and lists, which have none of them."""
    arguments = cure.others | {cure.argument: cure.given}
    message = message_of(cure.function, arguments)
    found = re.search(cure.pattern, message)
    assert found, message
    cured = evaluated(found[1], arguments)
    value = cure.function(**(arguments | {cure.argument: cured}))
    expected = cure.expected()
    if isinstance(expected, float):
        assert value == pytest.approx(expected, rel=1e-5), message
    else:
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected)), message


KEEP = r"keep = (\S.+?(?:dim|axis)=1\)).+?(\S+\[keep\])"


@pytest.mark.parametrize("queries", forms(DIRTY)[:3], ids=lambda rows: type(rows).__name__)
@pytest.mark.parametrize("function", [map_of, knn])
def test_items_that_are_dropped_as_suggested_leave_the_others(function: Any, queries: Any) -> None:
    message = message_of(function, {"queries": queries})
    keep, rows = re.findall(KEEP, message)[0]
    kept = evaluated(keep, {"queries": queries})
    cured = evaluated(rows, {"queries": queries, "keep": kept})
    by_hand = mean_precision if function is map_of else knn_by_hand
    assert function(cured, LABELS[kept]) == pytest.approx(by_hand(POINTS[WITHOUT_3], LABELS[WITHOUT_3]))


@pytest.mark.parametrize("queries", [MASKED, [*MASKED]], ids=["array", "list"])
def test_masked_items_are_dropped_or_filled_as_suggested(queries: Any) -> None:
    """Seen red: a list of masked rows has no mask, so that nothing was dropped."""
    message = message_of(map_of, {"queries": queries})
    if stack := re.search(r"queries = (\S+\))", message):
        queries = evaluated(stack[1], {"queries": queries})
    keep, rows, filled = re.findall(rf"{KEEP}.+?(\S+\.filled\(0\))", message)[0]
    kept = evaluated(keep, {"queries": queries})
    cured = evaluated(rows, {"queries": queries, "keep": kept})
    assert map_of(cured, LABELS[kept]) == pytest.approx(mean_precision(POINTS[WITHOUT_3], LABELS[WITHOUT_3]))
    assert map_of(evaluated(filled, {"queries": queries})) == map_of(torch.where(DIRTY.isnan(), 0.0, POINTS))


def test_a_missing_label_is_no_class() -> None:
    """Seen red: the suggested `long` made the smallest integer of a NaN."""
    message = message_of(knn, {"queries": POINTS, "query_labels": torch.where(WITHOUT_3, LABELS, torch.nan)})
    assert not missing_facts(message, (1, 24, "index 3")), message
    assert "long()" not in message


def packed_note(rows: Any) -> list[str]:
    [note] = [
        note for note in evaluate_retrieval(rows, torch.arange(256) % 4, label_groups=None).notes if "unpack" in note
    ]
    return re.findall(r"np\.unpackbits\(.+?, axis=1\)", note)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_bytes_that_are_compared_as_numbers_are_unpacked_as_suggested(dtype: Any) -> None:
    """Seen red: the rows are floats, of which NumPy unpacks none."""
    bits = np.random.default_rng(1).integers(0, 2, (256, 64))
    packed = np.packbits(bits, axis=1)
    given = torch.from_numpy(packed if dtype is np.uint8 else (packed ^ 128).view(np.int8)).float()
    code = packed_note(given)[0 if dtype is np.uint8 else 1]
    assert np.array_equal(evaluated(code, {"queries": given}), bits)


MANY = {"queries": POINTS, "query_labels": LABELS, "label_groups": None}
EPISODES = {"labels": LABELS, "ways": 2, "shots": 1, "queries": 2, "episodes": 3}
BATCHES = {"labels": LABELS, "classes_per_batch": 2, "items_per_class": 2}
TRIALS = {"scores": [0.9, 0.8, 0.2, 0.1], "same": [1, 0, 1, 0]}
PROBE = {"queries": POINTS, "query_labels": LABELS, "gallery": POINTS, "gallery_labels": LABELS}
# What is given wrongly, the cure as the message writes it, and as the arguments that it is.
SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
    (evaluate_retrieval, MANY, {"metrics": ()}, ("metrics=('mAP',)",), {"metrics": ("mAP",)}),
    (evaluate_retrieval, MANY, {"metrics": ("map",)}, ("'mAP'",), {"metrics": ("mAP",)}),
    (evaluate_retrieval, MANY, {"metrics": ("recall@k",)}, ("'recall@1'",), {"metrics": ("recall@1",)}),
    (evaluate_retrieval, MANY, {"metrics": ("ndcg@0",)}, ("'ndcg@1'",), {"metrics": ("ndcg@1",)}),
    (evaluate_retrieval, MANY, {"threshold_bounds": (1, 0)}, ("(0.0, 1.0)",), {"threshold_bounds": (0.0, 1.0)}),
    (evaluate_retrieval, MANY, {"confidence": 95}, (0.95,), {"confidence": 0.95}),
    (evaluate_retrieval, MANY, {"seed": -1.5}, (0,), {"seed": 0}),
    (evaluate_retrieval, MANY, {"device": "gpu"}, ("'cpu'",), {"device": "cpu"}),
    (evaluate_retrieval, MANY, {"memory_mb": 0}, (512,), {"memory_mb": 512}),
    (knn_accuracy, MANY, {"k": 0}, ("(10, 20)",), {"k": (10, 20)}),
    (knn_accuracy, MANY, {"temperature": 0}, (0.07,), {"temperature": 0.07}),
    (linear_probe, PROBE, {"strengths": 0}, ("(0.001, 0.1, 10)",), {"strengths": (0.001, 0.1, 10)}),
    (nearest, MANY, {"k": 0}, (10,), {"k": 10}),
    (nearest, MANY, {"query_indices": 3}, ("[0, 5]",), {"query_indices": [0, 5]}),
    (near_duplicates, MANY, {"min_score": 2}, (0.98,), {"min_score": 0.98}),
    (embedding_health, {"embeddings": POINTS}, {"k": 1}, (10,), {"k": 10}),
    (evaluate_trials, TRIALS, {"metrics": "eer"}, ("metrics=('eer',)",), {"metrics": ("eer",)}),
    (evaluate_trials, TRIALS, {"metrics": ()}, ("metrics=('eer',)",), {"metrics": ("eer",)}),
    (evaluate_trials, TRIALS, {"miss_cost": 0}, (1.0,), {"miss_cost": 1.0}),
    (evaluate_trials, TRIALS, {"metrics": ("tar@fmr0.1",)}, ("'tar@far0.1'",), {"metrics": ("tar@far0.1",)}),
    (sample_episodes, EPISODES, {"ways": 9}, ("ways <= 4",), {"ways": 4}),
    (sample_episodes, EPISODES, {"queries": 15}, ("queries <= 5",), {"queries": 5}),
    (sample_episodes, EPISODES, {"shots": 6}, ("shots 1", "queries <= 5"), {"shots": 1, "queries": 5}),
    (sample_episodes, EPISODES, {"shots": 0}, ("shots >= 1",), {"shots": 1}),
    (EpisodicBatchSampler, EPISODES, {"episodes_per_batch": 5}, ("episodes >= 5",), {"episodes": 5}),
    (EpisodicBatchSampler, EPISODES, {"ways": 5}, ("ways <= 4",), {"ways": 4}),
    (ClassBalancedBatchSampler, BATCHES, {"classes_per_batch": 9}, ("classes_per_batch <= 4",), {"classes_per_batch": 4}),
    (ClassBalancedBatchSampler, BATCHES, {"items_per_class": 9}, ("items_per_class <= 6",), {"items_per_class": 6}),
    (ClassBalancedBatchSampler, BATCHES, {"items_per_class": 1}, ("items_per_class >= 2",), {"items_per_class": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "good", "wrong", "facts", "cure"), SETTINGS)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_suggested_setting_is_accepted(
    function: Callable[..., Any],
    good: dict[str, Any],
    wrong: dict[str, Any],
    facts: tuple[Any, ...],
    cure: dict[str, Any],
) -> None:
    if function in (knn_accuracy, nearest, near_duplicates):
        good = {name: value for name, value in good.items() if name == "queries" or function is knn_accuracy}
        good.pop("label_groups", None)
    with refused(ValueError, *facts):
        function(**(good | wrong))
    function(**(good | wrong | cure))


@pytest.mark.parametrize(("labels", "groups"), [(LABELS, 50), (torch.arange(24) % 6, 20), (torch.arange(24) % 3, 2)])
def test_groups_that_are_suggested_are_measured(labels: Any, groups: int) -> None:
    [note] = [note for note in evaluate_retrieval(POINTS, labels, label_groups=groups).notes if "label_groups" in note]
    _, suggested = re.findall(r"label_groups(?: <= |=)(\d+|None)", note)
    cured = evaluate_retrieval(POINTS, labels, label_groups=evaluated(suggested, {}))
    assert not [note for note in cured.notes if "Grouped" in note]
    assert ("grouped_recall@1" in cured.values) == (suggested != "None")
