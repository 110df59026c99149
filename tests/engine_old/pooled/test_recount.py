"""Every road to a report gives the same report: rungs, kernels, budgets, threads; and the bounds that this rests on."""

import math

import numpy as np
import pytest
import torch

from fewshot_callbacks.engine.cpu import count_kernels as compiled
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.functional.retrieval.threshold_rules import PooledRequest
from tests.cases import made
from tests.engine.cases import ALL, KINDS, POOLED, SIMILARITIES, engine, pooled_case, prepared, vectors
from tests.engine.oracles import (
    RUNGS,
    all_pairs,
    check_decisions,
    counted,
    expected,
)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("precision", RUNGS)
@pytest.mark.parametrize("dim", [3])
def test_keys_at_the_bounds_of_a_rung(precision, similarity, dim):
    # one threshold, and candidates whose distance to it is the error of the precision, a little more and a little less
    step = torch.tensor([0.0, 1e-9, 0.25, 0.5, 0.9, 0.99, 0.999999, 1.0, 1.000001, 1.01, 1.1, 1.5, 2.0, 2.1, 4.0])
    step = torch.cat([-step.flip(0), step]).double().repeat(3)
    queries = torch.zeros(4, dim, dtype=torch.float64)
    queries[:, 0] = 1

    def gallery(error):
        value = torch.cat([torch.tensor([0.5, 0.5, 0.125], dtype=torch.float64), 0.5 + error * step])
        items = torch.zeros(len(value), dim, dtype=torch.float64)
        items[:, 0], items[:, 1] = value, (1 - value * value).clamp(min=0).sqrt()
        return items.float() if similarity != "dot" else items

    error = 0.0
    for _ in range(2):  # the error depends on the data a little
        tiles = ScoreTiles.from_rows(queries.to(gallery(error).dtype), gallery(error), similarity)
        error = float(tiles.error(torch.arange(1), RUNGS[precision])[0])
        error = min(error, 0.1) if similarity != "euclidean" else min(error / 2, 0.1)
    items = gallery(error)
    case = {
        "queries": queries.to(items.dtype), "query_labels": torch.tensor([0, 0, 0, 1]), "similarity": similarity,
        "gallery": items, "gallery_labels": torch.cat([torch.tensor([0, 1, 0]), torch.full((len(step),), 2)]),
    }  # fmt: skip
    by_keys = expected(case)
    for kernel in ("compiled", "pytorch"):
        for forced in (precision, "bfloat16"):
            with engine(kernel, forced):
                assert counted(case) == by_keys
                request = PooledRequest((0.2,), (-math.inf, math.inf), (), (0.1,), equal_error_rate=True)
                check_decisions(case, request)


class TestBounds:
    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("kernel", ["compiled", "pytorch"])
    @pytest.mark.parametrize("dim", [1, 2, 130])
    def test_no_estimate_is_off_by_more(self, similarity, dtype, kernel, dim):
        rows, columns = torch.arange(23), torch.arange(31)
        for kind in (*KINDS, "cancelling"):
            if kind == "cancelling":  # x . y = 0, by terms of the largest size
                left, right = np.ones((23, dim)), np.ones((31, dim))
                right[:, : dim // 2] = -1
                left, right = left * vectors("real", 1, dim), right * vectors("real", 31, 1) / vectors("real", 1, dim)
            else:
                left, right = vectors(kind, 23, dim), vectors(kind, 31, dim, gallery=True)
            with engine_options(kernel=kernel):
                tiles = ScoreTiles.from_rows(
                    *(torch.from_numpy(side.astype(dtype)) for side in (left, right)), similarity
                )
            keys = tiles.exact_scores(rows, columns)
            for precision in RUNGS.values():
                estimates, error = tiles.tile(rows, columns, precision)
                distance = (estimates.double() - keys).abs()
                assert bool((distance <= error[:, None]).all()), (kind, precision)
                assert bool((distance <= tiles.error(columns, precision, of_query=False)).all()), (kind, precision)
                assert float(error.max()) <= tiles.largest_error(precision)
            left, right = (
                tiles.operand(rows, Precision.FLOAT32, of_query=True),
                tiles.operand(columns, Precision.FLOAT32, of_query=False),
            )
            distance = (left.double() @ right.double().T - keys).abs()
            assert bool((distance <= tiles.error(rows, Precision.FLOAT64_OF_FLOAT32)[:, None]).all()), kind
            assert bool((distance <= tiles.error(columns, Precision.FLOAT64_OF_FLOAT32, of_query=False)).all()), kind
            estimates, _ = tiles.tile(rows, columns, Precision.HALF)
            low = tiles.half_low(keys.flatten(), rows.repeat_interleave(31), of_query=True)
            assert bool((low.view(23, 31) <= estimates).all()), kind
            low = tiles.half_low(keys.T.flatten(), columns.repeat_interleave(23), of_query=False)
            assert bool((low.view(31, 23) <= estimates.T).all()), kind

    @pytest.mark.parametrize("similarity", SIMILARITIES)
    def test_single_products_of_the_kernel_keep_the_bound_of_float64(self, similarity):
        for kind in KINDS:
            for dtype in (np.float32, np.float64):
                left, right = vectors(kind, 11, 70), vectors(kind, 13, 70, gallery=True)
                tiles = ScoreTiles.from_rows(
                    *(torch.from_numpy(side.astype(dtype)) for side in (left, right)), similarity
                )
                keys = tiles.exact_scores(torch.arange(11), torch.arange(13))
                pairs = tiles.pairs()
                for i in range(11):
                    for j in range(13):
                        estimate, error = compiled.close_score(pairs, i, j)
                        assert abs(estimate - float(keys[i, j])) <= error, kind

    def test_where_nothing_is_asked_nothing_comes_near(self):
        tiles = ScoreTiles.from_rows(torch.randn(5, 8), torch.randn(6, 8), "cosine")
        asked = torch.tensor([math.inf, -math.inf, 0.5, 0.0, -0.0], dtype=torch.float64)
        low = tiles.half_low(asked, torch.arange(5), of_query=True)
        assert low[:2].tolist() == [math.inf, -math.inf]
        assert bool((low[2:] < asked[2:]).all())


# Pooled operating points, by their definitions: all pairs are held, every threshold is tried.


def request_for(case, **changes):
    positives, negatives = all_pairs(case)
    tiles = prepared(case)[0]
    some = np.concatenate(
        [np.quantile(part, [0.0, 0.3, 0.9, 1.0], method="nearest") for part in (positives, negatives)]
    )
    thresholds = (*tuple(tiles.to_user_score(float(key)) for key in some), 0.3)
    bounds = (0.0, 1.0) if case["similarity"] == "cosine" else (-math.inf, math.inf)
    settings = {
        "precisions": (0.05, 0.3, 0.75, 1.0), "bounds": bounds, "thresholds": thresholds,
        "false_match_rates": (0.0, 0.001, 0.01, 0.1, 1.0), "equal_error_rate": True,
    }  # fmt: skip
    return PooledRequest(**(settings | changes))


class TestDecisions:
    @pytest.mark.parametrize(
        ("kind", "similarity"),
        [(kind, "cosine") for kind in POOLED]
        + [(kind, other) for kind in ("few-values", "mixed", "codes") for other in ("dot", "euclidean")],
    )
    def test_are_those_of_all_pairs(self, kind, similarity):
        case = pooled_case(kind, similarity)
        request = request_for(case)
        for setting in (
            {},
            {"pilot": True, "layout": (64, 64, ALL)},
            {"precision": "bfloat16", "pilot": True, "layout": (64, 64, 90)},
            {"precision": "float64"},
            {"kernel": "pytorch"},
            {"kernel": "pytorch", "precision": "bfloat16", "layout": (64, 64, 90)},
        ):
            with engine(**setting):
                check_decisions(case, request, capacity=400)

    @pytest.mark.parametrize("kernel", ["compiled", "pytorch"])
    @pytest.mark.parametrize("bins", [4, 32])
    @pytest.mark.parametrize("block", [ALL, 60])
    def test_are_refined_until_every_point_is_a_single_key(self, kernel, bins, block):
        case = pooled_case("hard", "cosine", 200, 3)  # 13,000 relevant pairs, and 1,000 edges at a time
        with engine(kernel, layout=(64, 64, block), bins=bins):
            found, _ = check_decisions(case, request_for(case), capacity=100)
        assert found.passes >= 3

    @pytest.mark.parametrize("precision", [None, "bfloat16", "float32", "float64"])
    def test_collected_keys_save_the_second_walk(self, precision):
        case = pooled_case("separated", "cosine", 260, 10)
        request = request_for(
            case, thresholds=(), equal_error_rate=False, false_match_rates=(0.001,), precisions=(0.95,)
        )
        with engine(precision=precision, pilot=True, layout=(64, 64, ALL), collected_share=0.3):
            found, first = check_decisions(case, request, capacity=100_000)
        assert math.isfinite(first.bounds.highest.cut)
        assert found.passes == 1

    @pytest.mark.parametrize("listed", [1, 40, 300])
    def test_relevant_keys_above_those_that_are_listed_are_counted(self, listed):
        listed_bytes = 10**8 // listed  # of 10**8 that are free at most
        case = pooled_case("separated", "cosine", 260, 10)
        request = request_for(case, thresholds=(), false_match_rates=(0.001, 0.01))
        with engine(
            precision="float32", pilot=True, layout=(64, 64, ALL), collected_share=0.3, listed_bytes=listed_bytes
        ):
            _, first = check_decisions(case, request, capacity=100_000)
        listed = first.listed_bins()
        assert math.isfinite(first.bounds.highest.cut)
        assert first.bounds.positives[first.bounds.complete_from :][~listed[first.bounds.complete_from :]].sum() > 0

    @pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
    @pytest.mark.parametrize("precision", ["bfloat16", "float32"])
    @pytest.mark.parametrize("kind", ["hard", "few-values"])
    def test_a_sample_that_was_wrong_costs_time_alone(self, kind, precision, share):
        # more keys reach the expected cut than can be held: it rises, or all are given up
        case = pooled_case(kind, "cosine")
        cut = float(np.quantile(all_pairs(case)[1], 1 - share))

        class Wrong(PooledCounts):
            def expect(self, record, rows, columns):
                super().expect(record, rows, columns)
                self.forecast = self.forecast._replace(cut=cut, floor=min(cut, self.forecast.floor))

        for capacity in (20, 1500):
            with engine(precision=precision, pilot=True, threads=2, layout=(32, 32, ALL)):
                check_decisions(case, request_for(case), capacity, Wrong)

    @pytest.mark.parametrize("kind", ["hard", "few-values", "near-collapsed"])
    def test_a_range_that_was_too_narrow_costs_time_alone(self, kind):
        case, ranges = pooled_case(kind, "cosine"), []

        class Narrow(PooledCounts):
            def zoom(self, low, high):
                ranges.append((low, high))
                super().zoom(low + 0.45 * (high - low), low + 0.5 * (high - low))

        for capacity in (20, 1500):
            with engine(precision="float64", pilot=True, threads=2, layout=(32, 32, ALL)):
                check_decisions(case, request_for(case), capacity, Narrow)
        assert len(ranges) == 2

    def test_a_threshold_below_the_range_of_the_sample_accepts_the_negatives_there(self):
        """The sample held no negative, so all of them lie below the first cell, and so does the threshold."""
        queries = torch.nn.functional.normalize(torch.randn(40, 12) * 0.1 + torch.eye(12)[0], dim=1)
        queries[0] *= -1
        case = {"queries": queries, "query_labels": torch.arange(40).clamp(max=1), "similarity": "cosine"}
        positives, negatives = all_pairs(case)
        assert negatives.max() < positives.min() - 0.5

        class Positives(PooledCounts):
            def zoom(self, low, high):
                super().zoom(float(positives.min()), high)

        request = PooledRequest((0.5,), thresholds=(-1.0, float(np.median(negatives)), 0.0))
        with engine(precision="float64", pilot=True, layout=(64, 64, ALL)):
            found, first = check_decisions(case, request, observer=Positives)
        assert first.bounds.negatives[1:].sum() == 0
        assert found.at_threshold[-1.0].false_positives == len(negatives)

    def test_near_collapsed_data_needs_one_walk(self):
        case = pooled_case("near-collapsed", "cosine", 300, 10)
        case["queries"] = torch.nn.functional.normalize(
            torch.ones(1, 12) + 2e-4 * torch.nn.functional.normalize(made(300, 10, 12, noise=0.5)[0], dim=1), dim=1
        )
        with engine(precision="float64", pilot=True, layout=(64, 64, ALL), collected_share=0.3):
            found, first = check_decisions(case, PooledRequest((0.5,)), capacity=100_000)
        assert first.bounds.grid.bins > 100  # where the whole range has 30,000 for keys that are 1e-7 apart
        assert first.bounds.grid.scale > 1e9
        assert found.passes == 1

    @pytest.mark.parametrize("kind", ["hard", "few-values", "near-collapsed"])
    @pytest.mark.parametrize("kernel", ["compiled", "pytorch"])
    def test_where_negatives_cannot_be_collected_the_counts_at_each_score_are_bounded_closely(self, kernel, kind):
        case = pooled_case(kind, "cosine", 300, 10)
        case["query_labels"] = case["query_labels"][torch.randperm(300, generator=torch.Generator().manual_seed(1))]
        request = PooledRequest((0.2,), equal_error_rate=True, false_match_rates=(0.3,))
        with engine(kernel, precision="float32", pilot=True, layout=(64, 64, ALL), collected_share=0.01):
            _, first = check_decisions(case, request)
        assert (first.bounds.grid.blur > 0.01) == (kernel == "compiled")  # finer bins
        positives, negatives = (np.sort(scores) for scores in all_pairs(case))
        exact = len(negatives) - np.searchsorted(negatives, positives)
        fewest, most = first.bounds.at(positives)
        assert np.all((fewest <= exact) & (exact <= most))
        grid = first.bounds.grid
        reach = first.bounds.error + (1 + 2 * grid.blur) / grid.scale
        within = np.searchsorted(negatives, positives + 2 * reach) - np.searchsorted(negatives, positives - 2 * reach)
        assert np.all(most - fewest <= within)
        listed = first.bins(first.bins())
        inside = listed.low == listed.high
        assert inside.any()
        assert np.array_equal(listed.tp[inside], len(positives) - np.searchsorted(positives, listed.low[inside]))
        assert listed.positives.sum() == len(positives)

    @pytest.mark.parametrize("bounds", [(0.3, 0.35), (0.999, 1.0), (-1.0, -0.5), (0.4, 0.4)])
    def test_bounds_of_thresholds(self, bounds):
        case = pooled_case("hard", "cosine")
        for kernel in ("compiled", "pytorch"):
            with engine(kernel):
                check_decisions(case, request_for(case, bounds=bounds, precisions=(0.05, 0.11, 0.2, 0.9)))

    def test_one_class_has_no_negatives(self):
        case = {
            "queries": torch.randn(30, 4),
            "query_labels": torch.zeros(30, dtype=torch.int64),
            "similarity": "cosine",
        }
        for kernel in ("compiled", "pytorch"):
            with engine(kernel):
                found, _ = check_decisions(case, PooledRequest((0.9,), false_match_rates=(0.1,), equal_error_rate=True))
        assert found.best_f1.f1 == 1
        assert math.isnan(found.equal_error_rate)


@pytest.mark.parametrize("precision", RUNGS)
def test_negative_products(precision):
    generator = torch.Generator().manual_seed(0)
    queries, gallery = (torch.rand(60, 8, generator=generator) + 0.1 for _ in range(2))
    case = {
        "queries": queries, "query_labels": torch.arange(60) % 6, "similarity": "dot",
        "gallery": -gallery, "gallery_labels": torch.arange(60) % 5,
    }  # fmt: skip
    by_keys = expected(case)
    with engine(precision=precision, layout=(16, 16, ALL), pilot=True):
        assert counted(case) == by_keys
        check_decisions(case, request_for(case))
