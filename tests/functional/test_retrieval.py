import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import similarity as similarity_module
from fewshot_callbacks.functional.candidates import row_numbers
from fewshot_callbacks.functional.ranking import check_ties
from fewshot_callbacks.functional.retrieval import evaluate_retrieval, metric_names
from fewshot_callbacks.functional.similarity import DOUBLE, EXACT, SINGLE, ScoreTiles
from tests.functional.brute_force import BruteForce

SIMILARITIES = ("cosine", "dot", "euclidean")


@st.composite
def retrieval_cases(draw):
    """Small sets with many ties (few values, few dimensions), singletons, distractors, both forms."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    dim = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["grid", "codes", "real", "offset", "collapsed", "repeated"]))
    classes = draw(st.integers(1, 5))

    def vectors(n: int) -> np.ndarray:
        if kind == "grid":
            return rng.integers(-1, 2, (n, dim)).astype(np.float32)
        if kind == "codes":
            return rng.choice([-1.0, 1.0], (n, dim)).astype(np.float32)
        if kind == "collapsed":
            return np.full((n, dim), 0.3, dtype=np.float32)
        if kind == "repeated":
            return np.tile(rng.normal(size=(2, dim)), (n, 1))[:n].astype(np.float32)
        return (rng.normal(size=(n, dim)) + (1000.0 if kind == "offset" else 0.0)).astype(np.float32)

    n = draw(st.integers(2, 9))
    case = {"queries": vectors(n), "query_labels": rng.integers(0, classes, n) * 2**61 - 5}
    if draw(st.booleans()):
        m = draw(st.integers(1, 9))
        case |= {"gallery": vectors(m), "gallery_labels": rng.integers(0, classes + 1, m) * 2**61 - 5}
        if draw(st.booleans()):
            case |= {"query_ids": rng.integers(0, 6, n), "gallery_ids": rng.integers(0, 6, m)}
        if draw(st.booleans()):
            case |= {"query_groups": rng.integers(0, 6, n), "gallery_groups": rng.integers(0, 6, m)}
    elif draw(st.booleans()):
        case |= {"query_groups": rng.integers(0, 6, n)}
    case["similarity"] = draw(st.sampled_from(SIMILARITIES))
    case["ties"] = draw(st.sampled_from(["expected", "optimistic", "pessimistic"]))
    return case


def evaluate(case, **kwargs):
    case = {key: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for key, value in case.items()}
    return evaluate_retrieval(
        case.pop("queries"), case.pop("query_labels"), recall_k=(1, 2, 5), group_size=None, **case, **kwargs
    )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(retrieval_cases())
def test_equals_brute_force(case):
    expected = BruteForce(**case)
    if not expected.matched:
        with pytest.raises(ValueError, match=r"has .* its class"):
            evaluate(case)
        return
    low, high = (0.0, 1.0) if case["similarity"] == "cosine" else (-math.inf, math.inf)
    report = evaluate(case, precisions=(0.3, 0.75, 1.0))
    assert report.mAP == pytest.approx(expected.mean_average_precision, abs=1e-12)
    assert report.map_at_r == pytest.approx(expected.map_at_r, abs=1e-12)
    assert report.r_precision == pytest.approx(expected.r_precision, abs=1e-12)
    for k in (1, 2, 5):
        assert report.recall_at[k] == pytest.approx(expected.recall_at(k), abs=1e-12)
    assert report.queries_without_match == len(expected.scores) - len(expected.matched)
    assert report.f1 == pytest.approx(expected.best_f1, abs=1e-12)
    for precision, recall in report.recall_at_precision.items():
        assert recall == pytest.approx(expected.recall_at_precision(precision, low, high), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(retrieval_cases(), st.floats(-1, 1))
def test_fixed_threshold(case, threshold):
    expected = BruteForce(**case)
    if expected.matched:
        report = evaluate(case, threshold=threshold)
        found = (report.decision.true_positives, report.decision.false_positives, report.decision.false_negatives)
        if case["similarity"] == "cosine" or not np.isclose(np.concatenate(expected.scores), threshold).any():
            assert found == expected.pooled(threshold)


def made(n=600, classes=40, dim=24, noise=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + noise * torch.randn(n, dim, generator=generator), labels


def fast_reference(embeddings, labels):
    """mAP, Recall@1 and best F1 of a set without ties, by sorting whole rows in float64."""
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    scores = unit @ unit.T
    same = labels[:, None] == labels[None, :]
    scores.fill_diagonal_(-2)
    same.fill_diagonal_(False)
    ranked = same.gather(1, scores.argsort(1, descending=True))
    hits = ranked.double().cumsum(1)
    rank = torch.arange(1, len(labels) + 1)
    average = (hits / rank * ranked).sum(1) / ranked.sum(1)
    off = ~torch.eye(len(labels), dtype=torch.bool)
    pairs, order = same[off], scores[off].argsort(descending=True)
    tp = pairs[order].double().cumsum(0)
    f1 = 2 * tp / (torch.arange(1, len(tp) + 1) + pairs.sum())
    return float(average.mean()), float(ranked[:, 0].double().mean()), float(f1.max())


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0, 100.0])
def test_larger_sets_equal_a_sorted_reference(noise):
    embeddings, labels = made(noise=noise)
    report = evaluate_retrieval(embeddings, labels)
    assert (report.mAP, report.recall_at[1], report.f1) == pytest.approx(fast_reference(embeddings, labels), abs=1e-12)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", ["real", "codes", "collapsed", "repeated", "near-collapsed", "few-classes"])
def test_memory_threads_order_and_scale_change_nothing(similarity, kind):
    embeddings, labels = made(300, 3 if kind == "few-classes" else 20, 16)
    labels[:40] = labels[0]  # classes of different size
    if kind == "codes":
        embeddings = embeddings.sign()
    elif kind == "collapsed":
        embeddings = embeddings[:1].expand(300, -1)
    elif kind == "repeated":
        embeddings = embeddings[torch.arange(300) % 7]
    elif kind == "near-collapsed":
        embeddings = 1 + 1e-4 * embeddings
    options = {"similarity": similarity, "group_size": 3 if kind == "few-classes" else 5, "precisions": (0.5, 0.95)}
    report = evaluate_retrieval(embeddings, labels, **options)
    assert report == evaluate_retrieval(embeddings, labels, memory_mb=0.5, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert report == evaluate_retrieval(embeddings, labels, **options)
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(300)
    shuffled = evaluate_retrieval(embeddings[order], labels[order], **options)
    assert shuffled.metrics() == report.metrics()
    assert shuffled.decision == report.decision
    if similarity != "cosine" or kind == "codes":
        scaled = evaluate_retrieval(embeddings * 4, labels, **options)
        assert scaled.mAP == report.mAP
        assert scaled.f1 == report.f1


def test_collapsed_embeddings_are_at_chance_whatever_the_order():
    labels = torch.arange(10).repeat_interleave(6)
    report = evaluate_retrieval(torch.ones(60, 8), labels, group_size=None)
    n, r = 59, 5
    chance = sum((1 + (i - 1) * (r - 1) / (n - 1)) / i for i in range(1, n + 1)) / n
    assert report.mAP == pytest.approx(chance, abs=1e-12)
    assert report.recall_at[1] == pytest.approx(r / n, abs=1e-12)
    assert "collapsed" in " ".join(report.notes)
    shuffled = evaluate_retrieval(torch.ones(60, 8), labels[torch.randperm(60)], group_size=None)
    assert shuffled.mAP == report.mAP


def test_pooled_recall_where_precision_is_not_monotone():
    # scores 9 8 7 6 5 with relevance 0 1 1 1 0: precision 0, 1/2, 2/3, 3/4, 3/5; the first crossing from above is wrong
    gallery = torch.tensor([[9.0], [8.0], [7.0], [6.0], [5.0]])
    report = evaluate_retrieval(
        torch.ones(1, 1), torch.tensor([1]), gallery, torch.tensor([0, 1, 1, 1, 0]),
        similarity="dot", precisions=(0.75, 0.76), group_size=None,
    )  # fmt: skip
    assert report.recall_at_precision[0.75] == 1.0
    assert report.at_precision[0.75].threshold == 6.0
    assert report.recall_at_precision[0.76] == 0.0
    assert math.isnan(report.at_precision[0.76].threshold)


@pytest.mark.parametrize("capacity_mb", [0.4, 512])
def test_coarse_groups_are_refined_until_exact(capacity_mb):
    embeddings, labels = made(600, 20, 6, noise=2.0)  # 17,000 relevant pairs, more than the small budget holds
    report = evaluate_retrieval(embeddings, labels, memory_mb=capacity_mb, group_size=None, recall_k=(1,))
    assert report.f1 == pytest.approx(fast_reference(embeddings, labels)[2], abs=1e-12)


class TestScores:
    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("scale", [1e-25, 1.0, 1e12])
    def test_error_bound_holds(self, similarity, dtype, scale):
        queries, gallery = torch.randn(40, 48, dtype=dtype) * scale, torch.rand(70, 48, dtype=dtype) * scale
        gallery[:5] = queries[:5]
        gallery[5:10] *= 1e-6
        tiles = ScoreTiles(queries, gallery, similarity)
        rows, columns = torch.arange(40), torch.arange(70)
        keys = tiles.keys(rows, columns)
        for rung in (SINGLE, DOUBLE):
            estimates, error = tiles.tile(rows, columns, rung)
            assert bool(((estimates.double() - keys).abs() <= error[:, None]).all())
            assert bool((error < (1e-3 if rung == SINGLE else 1e-8)).all())

    @pytest.mark.parametrize("similarity", SIMILARITIES)
    def test_keys_equal_the_true_value(self, similarity):
        queries, gallery = torch.randn(6, 33), torch.randn(9, 33)
        tiles = ScoreTiles(queries, gallery, similarity)
        keys = tiles.keys(torch.arange(6), torch.arange(9))
        reference = BruteForce(queries.numpy(), np.zeros(6), gallery.numpy(), np.zeros(9), similarity=similarity).scores
        for i in range(6):
            for j in range(9):
                assert tiles.to_score(float(keys[i, j])) == pytest.approx(reference[i][j], rel=1e-12, abs=1e-12)

    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_keys_are_the_same_bits_by_every_road(self, similarity, dtype):
        queries, gallery = torch.randn(30, 100, dtype=dtype), torch.randn(50, 100, dtype=dtype)
        tiles = ScoreTiles(queries, gallery, similarity)
        rows, columns = torch.arange(30), torch.arange(50)
        whole = tiles.keys(rows, columns)
        assert torch.equal(whole[3:7, 11:12], tiles.keys(rows[3:7], columns[11:12]))
        assert torch.equal(whole, tiles.batched_keys(rows.view(3, 10), columns.expand(3, 50)).flatten(0, 1))
        pairs = torch.cartesian_prod(rows, columns)
        assert torch.equal(whole.flatten(), tiles.pair_keys(pairs[:, 0], pairs[:, 1]))

    def test_rungs_agree_on_counts(self, monkeypatch):
        embeddings, labels = made(200, 10, 12, noise=3.0)
        report = evaluate_retrieval(embeddings, labels)
        for rung in (DOUBLE, EXACT):
            original = similarity_module.ScoreTiles.tile
            monkeypatch.setattr(
                similarity_module.ScoreTiles, "tile", lambda self, r, c, _, up=rung, do=original: do(self, r, c, up)
            )
            assert evaluate_retrieval(embeddings, labels).mAP == report.mAP
            monkeypatch.undo()

    def test_a_zero_vector_is_similar_to_nothing_and_counted(self):
        embeddings, labels = made(60, 6, 8)
        embeddings[3] = 0
        report = evaluate_retrieval(embeddings, labels, group_size=None)
        assert any("1 embeddings have length zero" in note for note in report.notes)
        assert report.queries == 60

    def test_a_loose_matmul_setting_is_put_back_and_changes_nothing(self):
        embeddings, labels = made(100, 10, 64)
        expected = evaluate_retrieval(embeddings, labels)
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            assert evaluate_retrieval(embeddings, labels) == expected
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)


def test_row_numbers_of_equal_rows():
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1e-30]])
    number = row_numbers(rows).tolist()
    assert number[0] == number[1] == number[3]
    assert len(set(number)) == 3


class TestInput:
    def test_accepts_numpy_half_precision_and_any_integers(self):
        embeddings, labels = made(80, 8, 16)
        expected = evaluate_retrieval(embeddings.half().float(), labels)
        assert evaluate_retrieval(embeddings.half(), labels.to(torch.uint8)) == dataclasses.replace(expected)
        from_numpy = evaluate_retrieval(embeddings.half().float().numpy(), (labels - 4 + 2**62).numpy())
        assert from_numpy.mAP == expected.mAP

    def test_gradients_are_left_alone(self):
        embeddings, labels = made(40, 4, 8)
        embeddings.requires_grad_()
        assert evaluate_retrieval(embeddings, labels, group_size=None).mAP > 0
        assert embeddings.grad is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"labels": torch.arange(7)}, r"40 embeddings, but 7 labels. Both must come"),
            ({"embeddings": torch.randn(40)}, r"shape \(items, dim\); got shape \(40,\). For a single item"),
            ({"embeddings": torch.randn(40, 2, 2)}, r"Flatten what belongs to one item: embeddings.flatten\(1\)"),
            ({"embeddings": torch.zeros(40, 2, dtype=torch.long)}, r"floating-point embeddings; got torch.int64"),
            ({"labels": torch.randn(40)}, r"integer labels; got torch.float32.*labels.long\(\)"),
            ({"labels": torch.zeros(40, 3, dtype=torch.long)}, r"one label for each item.*argmax"),
            ({"embeddings": torch.randn(0, 4), "labels": torch.arange(0)}, r"embeddings is empty"),
            (
                {"labels": torch.arange(40)},
                r"none of the 40 queries has another item.*each of the 40 labels occurs once",
            ),
            ({"gallery": torch.randn(3, 8)}, r"gallery without gallery_labels"),
            ({"gallery_labels": torch.arange(3)}, r"gallery_labels without gallery"),
            ({"gallery": torch.randn(3, 9), "gallery_labels": torch.arange(3)}, r"dimension 8, the gallery has 9"),
            (
                {"gallery": torch.randn(3, 8), "gallery_labels": torch.arange(3) + 99},
                r"0 of the queries' 4 labels occur",
            ),
            ({"recall_k": (0,)}, r"recall_k=\(0,\) must hold positive whole numbers"),
            ({"precisions": (95,)}, r"precisions=\(95,\) must lie in \(0, 1\]"),
            ({"memory_mb": 0}, r"memory_mb=0 must be positive"),
            ({"query_ids": torch.arange(40)}, r"ids are for two sets"),
        ],
    )
    def test_refuses_with_fact_and_fix(self, change, message):
        embeddings, labels = made(40, 4, 8)
        with pytest.raises(ValueError, match=message):
            evaluate_retrieval(**({"embeddings": embeddings, "labels": labels} | change))

    def test_refuses_unknown_choices(self):
        with pytest.raises(ValueError, match=r"similarity='cosin' is unknown. Choose one of cosine, dot, euclidean"):
            similarity_module.check_similarity("cosin")
        with pytest.raises(ValueError, match=r"ties='random' is unknown. Choose one of expected"):
            check_ties("random")

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_non_finite_rows_are_counted_and_located(self, bad):
        embeddings, labels = made(40, 4, 8)
        embeddings[[5, 31], 2] = bad
        with pytest.raises(ValueError, match=r"2 of 40 rows of embeddings hold NaN or Inf, the first at index 5"):
            evaluate_retrieval(embeddings, labels)


def test_names_of_metrics_are_those_of_the_report():
    embeddings, labels = made(100, 20, 8)
    report = evaluate_retrieval(embeddings, labels, recall_k=(1, 7), precisions=(0.9,), grouped_k=(1, 2), group_size=5)
    assert tuple(report.metrics()) == metric_names((1, 7), (0.9,), (1, 2), 5)


def test_intervals_hold_their_means():
    report = evaluate_retrieval(*made(600, 40, 8, noise=2.0))
    for name, interval in report.intervals.items():
        assert interval.low < report.metrics()[name] < interval.high


def test_progress_ends_at_the_total():
    seen = []
    evaluate_retrieval(*made(300, 20, 8), progress=lambda done, total: seen.append((done, total)), memory_mb=0.3)
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1][0] == seen[-1][1]
