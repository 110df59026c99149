"""The compiled kernel against the reference, and both against keys that are compared one by one."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.candidates import find_candidates
from fewshot_callbacks.engine.cpu import count_kernels as compiled
from fewshot_callbacks.engine.cpu.exact_kernels import MEMBERS
from fewshot_callbacks.engine.duplicates import row_numbers
from fewshot_callbacks.engine.open_pass import open_pass
from fewshot_callbacks.engine.options import Layout, engine_options
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval

SIMILARITIES = ("cosine", "dot", "euclidean")
ALL = 10**6


PRECISIONS = {"bfloat16": Precision.HALF, "float32": Precision.FLOAT32, "float64": Precision.FLOAT64}


def engine(kernel="compiled", precision=None, *, layout=None, part_rows=256, threads=1, pilot=False, **options):
    """Send small data along the roads of large data.

    Args:
        kernel: see `EngineOptions`.
        precision: of the first products.
        layout: rows of a block, columns of a block, and queries whose counters are held at once.
        part_rows: rows of a block whose scores are made at once.
        threads: so many, however little there is to do.
        pilot: choose the precision and what is collected from a sample, however little there is to do.
        options: others of `EngineOptions`.
    """
    if pilot:
        options["pilot_pairs"] = 0
    return engine_options(
        kernel=kernel,
        first_precision=None if precision is None else PRECISIONS[precision],
        layout=None if layout is None else Layout(*layout, bytes=0),
        tile_rows=part_rows,
        threads=threads,
        threaded_from=0,
        **options,
    )


@st.composite
def engines(draw):
    """Settings of `engine` that are all to give the same."""
    rows = draw(st.sampled_from([16, 17, 64, 300]))
    return {
        "precision": draw(st.sampled_from([None, "bfloat16", "float32", "float64"])),
        "layout": (rows, rows if draw(st.booleans()) else 40, draw(st.sampled_from([ALL, ALL, 23]))),
        "part_rows": draw(st.sampled_from([5, 16, 256])),
        "threads": draw(st.sampled_from([1, 2, 3])),
        "pilot": draw(st.booleans()),
    }


def vectors(kind, n, dim, seed=0, *, gallery=False):
    """Rows that are hard on an engine: they tie, vanish, cancel or span all magnitudes."""
    rng = np.random.default_rng(2 * seed + gallery)
    normal = rng.normal(size=(n, dim))
    if kind == "grid":
        normal = rng.integers(-1, 2, (n, dim))
    elif kind == "codes":
        normal = rng.choice([-1.0, 1.0], (n, dim))
    elif kind == "equal":
        normal = np.full((n, dim), 0.3)
    elif kind == "repeated":
        normal = np.random.default_rng(seed).normal(size=(7, dim))[rng.integers(0, 7, n)]
    elif kind == "some-equal":
        normal[::9] = normal[0]
    elif kind == "denormal":
        normal = rng.integers(-3, 4, (n, dim)) * 1e-40
    elif kind == "negative-zero":
        normal = rng.choice([0.0, -0.0, 1.0], (n, dim))
    elif kind == "negative":  # with two sets every product is negative
        normal = np.abs(normal) * (-1 if gallery else 1)
    elif kind == "zeros":
        normal[rng.random(n) < 0.4] = 0
    elif kind == "mixed":
        normal = normal * 10.0 ** rng.uniform(-6, 6, (n, 1))
    elif kind == "spiked":  # one component beside which all others are rounded away
        normal[np.arange(n), rng.integers(0, dim, n)] = 1e7
    elif kind == "offset":
        normal = normal + 1000
    elif kind == "near-collapsed":
        normal = np.random.default_rng(seed).normal(size=(1, dim)) + 1.5e-4 * normal
        normal = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    elif kind == "tiny":
        normal = normal * 1e-30
    return normal


KINDS = (
    "real", "grid", "codes", "equal", "repeated", "some-equal", "denormal", "negative-zero", "negative", "zeros", "mixed",
    "spiked", "offset", "near-collapsed", "tiny",
)  # fmt: skip


def labels_of(kind, n, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "one-class":
        return np.zeros(n, np.int64)
    if kind == "one-pair":  # all others are alone
        return np.maximum(np.arange(n), 1)
    if kind == "pairs":
        return np.arange(n) // 2
    if kind == "all-but-one":
        return (np.arange(n) == n - 1).astype(np.int64)
    if kind == "uneven":  # with some that are alone
        return np.minimum(rng.geometric(0.2, n), 30) * np.where(rng.random(n) < 0.1, rng.integers(50, 10**6, n), 1)
    return rng.integers(0, 6, n)


LABELS = ("one-class", "one-pair", "pairs", "all-but-one", "uneven", "few")


@st.composite
def cases(draw):
    seed, kind, of_labels = draw(st.integers(0, 2**31)), draw(st.sampled_from(KINDS)), draw(st.sampled_from(LABELS))
    n, dim = draw(st.integers(2, 90)), draw(st.sampled_from([1, 2, 3, 16, 130]))
    dtype = draw(st.sampled_from([np.float32, np.float32, np.float64]))
    rng = np.random.default_rng(seed)
    case = {
        "queries": vectors(kind, n, dim, seed).astype(dtype),
        "query_labels": labels_of(of_labels, n, seed),
        "similarity": draw(st.sampled_from(SIMILARITIES)),
    }
    form = draw(st.sampled_from(["one", "one", "one-with-groups", "two", "two-with-ids", "two-with-both"]))
    if form == "one-with-groups":
        case["query_groups"] = rng.integers(0, 20, n)
    if form.startswith("two"):
        m = draw(st.sampled_from([1, 2, 33, 90]))
        case["gallery"] = vectors(kind, m, dim, seed, gallery=True).astype(dtype)
        case["gallery_labels"] = labels_of(of_labels, m, seed + 1)
        if form != "two":
            case |= {"query_ids": rng.integers(0, 2 * n, n), "gallery_ids": rng.integers(0, 2 * n, m)}
        if form == "two-with-both":
            case |= {"query_groups": rng.integers(0, 20, n), "gallery_groups": rng.integers(0, 20, m)}
    return {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in case.items()}


def prepared(case):
    """Tiles and candidates of a case."""
    same = "gallery" not in case
    queries, labels = case["queries"], case["query_labels"]
    items, item_labels = (queries, labels) if same else (case["gallery"], case["gallery_labels"])
    codes = {name: case.get(name) for name in ("query_ids", "gallery_ids", "query_groups", "gallery_groups")}
    if same:
        codes["gallery_groups"] = codes["query_groups"]
    return ScoreTiles.from_rows(queries, items, case["similarity"]), find_candidates(
        labels, item_labels, same_set=same, **codes
    )


TABLES = ("negatives_above", "negatives_tied", "relevant_above", "relevant_tied", "place_in_tie")


def counted(case, look=None):
    """For each query the rows of all `RankBlock`s."""
    tiles, candidates = prepared(case)
    done = []
    walk = open_pass(tiles, candidates, 10**8, progress=lambda *pairs: done.append(pairs))
    found = {}
    for block in walk.run(look):
        for row, query in enumerate(block.queries.tolist()):
            assert query not in found
            assert int(block.valid[row].sum()) == int(block.relevant[row])
            found[query] = [getattr(block, name)[row][block.valid[row]].tolist() for name in TABLES]
    assert done[-1] == (candidates.pairs, candidates.pairs)
    return found


def pair_keys(case):
    """The keys of all pairs by the road that is proved elsewhere, who is relevant, and who is a candidate at all."""
    with engine_options(kernel="pytorch"):
        tiles, candidates = prepared(case)
        rows, columns = torch.arange(len(tiles.queries)), torch.arange(len(tiles.gallery))
        keys = tiles.exact_scores(rows, columns).numpy()
    wanted = ~candidates.excluded(rows[:, None], columns[None, :]).numpy()
    item_labels = case.get("gallery_labels", case["query_labels"])
    return keys, (case["query_labels"][:, None] == item_labels[None, :]).numpy(), wanted


def expected(case):
    """`counted`, by comparing keys."""
    found = {}
    for query, (keys, relevant, wanted) in enumerate(zip(*pair_keys(case), strict=True)):
        own, others = np.sort(keys[relevant & wanted]), keys[~relevant & wanted]
        found[query] = [
            [int((others > key).sum()) for key in own],
            [int((others == key).sum()) for key in own],
            [int((own > key).sum()) for key in own],
            [int((own == key).sum()) for key in own],
            [int((own[:place] == key).sum()) + 1 for place, key in enumerate(own)],
        ]
    return found


def report(case, **options):
    case = dict(case)
    options = {"recall_k": (1, 2, 5), "group_size": None, "precisions": (0.3, 0.75, 1.0), "ties": "expected"} | options
    return evaluate_retrieval(case.pop("queries"), case.pop("query_labels"), **case, **options)


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
