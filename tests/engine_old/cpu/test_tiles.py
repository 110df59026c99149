"""The compiled kernel against the reference, and both against keys that are compared one by one."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fewshot_callbacks.engine.cpu import count_kernels as compiled
from fewshot_callbacks.engine.cpu.exact_kernels import MEMBERS
from fewshot_callbacks.engine.duplicates import row_numbers
from fewshot_callbacks.engine.open_pass import open_pass
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.scores.products import ScoreTiles
from tests.engine.cases import (
    ALL,
    KINDS,
    SIMILARITIES,
    cases,
    engine,
    engines,
    labels_of,
    prepared,
    report,
    vectors,
)
from tests.engine.oracles import counted, expected


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines())
def test_counts_are_those_of_the_keys(case, setting):
    by_keys = expected(case)
    with engine(**setting):
        assert counted(case) == by_keys
    with engine("pytorch", **setting):
        assert counted(case) == by_keys


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines())
def test_reports_are_those_of_the_reference(case, setting):
    def outcome(kernel, **setting):
        with engine(kernel, **setting):
            try:
                return report(case, threshold=None)
            except ValueError as error:
                return str(error)

    assert outcome("compiled", **setting) == outcome("pytorch")


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_many_panels_threads_and_rungs_count_alike(kind, similarity):
    case = {
        "queries": torch.from_numpy(vectors(kind, 80, 24).astype(np.float32)),
        "query_labels": torch.from_numpy(labels_of("uneven", 80)),
        "similarity": similarity,
    }
    by_keys = expected(case)
    for precision, threads, layout in (
        ("bfloat16", 3, (20, 20, ALL)),
        ("float32", 3, (20, 20, ALL)),
        ("float64", 2, (20, 20, ALL)),
        ("bfloat16", 2, (32, 33, 45)),
        ("float32", 3, (32, 33, 45)),
        (None, 2, (40, 40, ALL)),
    ):
        with engine(precision=precision, layout=layout, part_rows=13, threads=threads, pilot=True):
            assert counted(case) == by_keys


@pytest.mark.parametrize("kind", ["real", "grid"])
@pytest.mark.parametrize("both", [True, False])
def test_borders_of_runs_and_parts_are_crossed(kind, both):
    # tiles wider than two runs of 256 columns, parts of 256 rows, and spans that begin and end inside
    case = {
        "queries": torch.from_numpy(vectors(kind, 700, 6).astype(np.float32)),
        "query_labels": torch.from_numpy(labels_of("uneven", 700)),
        "similarity": "cosine",
    }
    by_keys = expected(case)
    for precision in ("bfloat16", "float32", "float64"):
        with engine(precision=precision, layout=(600, 600, ALL if both else 600)):
            assert counted(case) == by_keys


@pytest.mark.parametrize("relevant", [126, 127, 128, 257])
def test_many_relevant_items(relevant):
    # tables hold numbers of thresholds in as few bits as they need
    generator = torch.Generator().manual_seed(relevant)
    labels = torch.arange(2 * relevant + 2) % 2
    queries = torch.randn(len(labels), 4, generator=generator) + 0.3 * labels[:, None]
    case = {"queries": queries, "query_labels": labels, "similarity": "cosine"}
    by_keys = expected(case)
    for precision in ("bfloat16", "float32", "float64"):
        with engine(precision=precision, layout=(200, 200, ALL)):
            assert counted(case) == by_keys


def test_more_relevant_items_than_16_bits_hold_in_one_list_of_edges():
    labels = torch.arange(600) % 3
    queries = torch.randn(600, 3) + 0.5 * labels[:, None]
    case = {"queries": queries, "query_labels": labels, "similarity": "euclidean"}
    with engine("pytorch"):
        of_reference = report(case)
    with engine(layout=(128, 128, ALL), threads=2):
        assert report(case) == of_reference


@pytest.mark.parametrize("kernel", ["compiled", "pytorch"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
def test_queries_that_are_alone_do_not_hide_others(kernel, precision):
    # a query without a match has no threshold; the pair still counts for the item on its other side
    labels = torch.cat([torch.arange(40), torch.arange(100, 110).repeat(4)])
    queries = torch.randn(80, 8)
    case = {"queries": queries, "query_labels": labels, "similarity": "cosine"}
    by_keys = expected(case)
    for layout in ((16, 16, ALL), (100, 100, ALL), (16, 16, 30)):
        with engine(kernel, precision, layout=layout):
            assert counted(case) == by_keys


class TestKeys:
    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("dim", [1, 2, 130, 257])
    def test_are_the_same_bits(self, similarity, dtype, dim):
        for kind in KINDS:
            queries, gallery = (
                torch.from_numpy(vectors(kind, n, dim, gallery=n == 23).astype(dtype)) for n in (17, 23)
            )
            tiles = ScoreTiles.from_rows(queries, gallery, similarity)
            rows, columns = (
                grid.flatten() for grid in torch.meshgrid(torch.arange(17), torch.arange(23), indexing="ij")
            )
            out = np.empty(len(rows))
            compiled.pair_scores(tiles.pairs(), rows.numpy(), columns.numpy(), out)
            whole = tiles.exact_scores(torch.arange(17), torch.arange(23))
            assert torch.equal(whole.flatten(), torch.from_numpy(out)), kind
            with engine_options(kernel="pytorch"):
                plain = ScoreTiles.from_rows(queries, gallery, similarity)
            assert torch.equal(plain.exact_scores(torch.arange(17), torch.arange(23)), whole), kind

    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_of_a_class_are_the_same_bits(self, similarity, dtype):
        for kind in KINDS:
            labels = torch.from_numpy(labels_of("uneven", 60))
            queries = torch.from_numpy(vectors(kind, 60, 20).astype(dtype))
            case = {"queries": queries, "query_labels": labels, "similarity": similarity}
            for two in (False, True):
                if two:
                    case |= {"gallery": queries.flip(0).clone(), "gallery_labels": labels.flip(0)}
                tiles, candidates = prepared(case)
                start, stop = (candidates.gallery_start[candidates.query_class + more] for more in (0, 1))
                for part in (slice(0, 60), slice(20, 41)):
                    rows = candidates.query_order[part]
                    keys = np.empty((len(rows), int((stop - start)[part].max())))
                    compiled.class_scores(
                        tiles.pairs(), rows.numpy(), part.start, start[part].numpy(), stop[part].numpy(),
                        candidates.gallery_order.numpy(), not two, keys,
                    )  # fmt: skip
                    for r, row in enumerate(rows):
                        place = torch.arange(int(start[part][r]), int(stop[part][r]))
                        wanted = tiles.exact_scores(row[None], candidates.gallery_order[place])[0]
                        if not two:
                            wanted[place == part.start + r] = torch.inf
                        assert keys[r, : len(place)].tolist() == wanted.tolist()
                        assert np.all(keys[r, len(place) :] == np.inf)

    @pytest.mark.parametrize("classes", [1, 2])
    def test_of_a_class_larger_than_what_is_scored_at_a_time(self, classes):
        n = 2 * MEMBERS + 70
        queries, labels = torch.randn(classes * n, 8), torch.arange(classes * n) % classes
        tiles, candidates = prepared({"queries": queries, "query_labels": labels, "similarity": "cosine"})
        walk, order = open_pass(tiles, candidates, 10**8), candidates.query_order
        own = candidates.query_class[:, None] != candidates.query_class
        keys = tiles.exact_scores(order, order).masked_fill(own | torch.eye(len(order), dtype=torch.bool), torch.inf)
        for part in (slice(0, classes * n), slice(100, 500)):
            wanted = keys[part].sort(dim=1).values[:, : n - 1]
            for first in (part.start, None):
                assert torch.equal(walk.thresholds.local.of(order[part], candidates.query_class[part], first), wanted)

    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("dim", [1, 2, 130, 257])
    def test_rest_on_the_same_scales_and_squares(self, similarity, dtype, dim):
        for kind in KINDS:
            queries, gallery = (torch.from_numpy(vectors(kind, n, dim, n).astype(dtype)) for n in (31, 40))
            one = ScoreTiles.from_rows(queries, gallery, similarity)
            with engine_options(kernel="pytorch"):
                other = ScoreTiles.from_rows(queries, gallery, similarity)
            assert one.compiled is not None
            assert other.compiled is None
            for side in ("query_vectors", "gallery_vectors"):
                for name in ("scale", "square", "norm", "square_low"):
                    found, wanted = (getattr(getattr(tiles, side), name) for tiles in (one, other))
                    assert torch.equal(found, wanted), (kind, side, name)

    @pytest.mark.parametrize("scale", [1e-310, 5e-324 * 2**40, 1e300])
    @pytest.mark.parametrize("similarity", SIMILARITIES)
    def test_hold_at_the_ends_of_float64(self, scale, similarity):
        queries = torch.from_numpy(vectors("real", 40, 8) * scale)
        case = {"queries": queries, "query_labels": torch.arange(40) % 8, "similarity": similarity}
        by_keys = expected(case)
        for kernel in ("compiled", "pytorch"):
            for precision in ("bfloat16", "float32", "float64"):
                with engine(kernel, precision, layout=(16, 16, ALL)):
                    assert counted(case) == by_keys


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rows_have_the_same_numbers_by_both_roads(dtype):
    for kind in KINDS:
        rows = torch.from_numpy(vectors(kind, 300, 3).astype(dtype))
        numbers = row_numbers(rows)
        with engine_options(kernel="pytorch"):
            assert torch.equal(row_numbers(rows), numbers)
        assert torch.equal(numbers[:, None] == numbers[None, :], (rows[:, None] == rows[None, :]).all(dim=2)), kind
