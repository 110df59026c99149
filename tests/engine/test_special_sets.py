"""Repeated rows, few bits, and rows that are all but equal: what makes them fast or hard changes no value."""

import numpy as np
import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.distinct import has_few
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.operating_points import PooledRequest
from tests.cases import sampled_product
from tests.engine.cases import PRECISIONS, SIMILARITIES
from tests.engine.oracles import counted, evaluated, prepared, scores_of, truth_of
from tests.reports import assert_same

MORE_METRICS = ("auc_pr", "recall@precision0.05", "recall@precision0.3", "fnmr@fmr0.01", "fnmr@fmr0.1", "eer")
EVERYTHING = {"metrics": (*DEFAULT_METRICS, *MORE_METRICS), "label_groups": 3, "threshold": 0.5}


def rows_of(kind, n, seed=0):
    """Rows of which at most an eighth differ; a few are zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 6, generator=generator)
    return {
        "ten times": rows[: n // 10].repeat(10, 1),
        "scaled": rows[: n // 16].repeat(16, 1) * 2.0 ** (torch.arange(n) // (n // 16) % 2)[:, None],
        "equal": rows[:1].expand(n, 6).contiguous(),
        "two": rows[torch.randint(2, (n,), generator=generator)],
        "zeros": torch.where(torch.arange(n)[:, None] % 2 > 0, rows[:1], 0.0),
        "bits": torch.randint(0, 2, (n, 4), generator=generator),
    }[kind]


SETS = ("ten times", "scaled", "equal", "two", "zeros", "bits")


@pytest.mark.parametrize(
    ("kind", "similarity", "two"), sampled_product(SETS, (*SIMILARITIES, "hamming"), [False, True], count=20)
)
def test_few_distinct_rows_have_the_report_of_the_ordinary_road(kind, similarity, two):
    """Groups of one item each exclude nobody but the item itself: with them, pairs are counted one by one."""
    if similarity == "hamming" and kind != "bits":
        pytest.skip("no codes")
    rows, labels = rows_of(kind, 320), torch.arange(320) * 7 % 11
    rows = rows if similarity == "hamming" else rows.float()
    sets, groups = {"embeddings": rows, "labels": labels}, {"query_groups": torch.arange(320)}
    if two:
        more = rows_of(kind, 160, int(kind not in ("two", "bits"))).to(rows.dtype)
        sets |= {"gallery": more, "gallery_labels": torch.arange(160) % 13}
        groups["gallery_groups"] = torch.arange(1000, 1160)
    options = EVERYTHING | {"similarity": similarity}
    assert_same(evaluate_retrieval(**sets, **groups, **options), evaluate_retrieval(**sets, **options))


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", SETS)
def test_counts_and_ranks_of_few_distinct_rows(kind, similarity):
    case = {"queries": rows_of(kind, 320).float(), "query_labels": torch.arange(320) % 11, "similarity": similarity}
    assert has_few(*prepared(case), 10**7)
    assert not has_few(*prepared(case | {"query_groups": torch.arange(320)}), 10**7)  # which the test above relies on
    truth, by_score = truth_of(case).counts(), scores_of(case)
    every = np.unique(by_score.scores)
    every = np.unique([np.nextafter(every, -9), every, np.nextafter(every, 9)])
    negatives = by_score.negatives
    for batch in (None, 500):
        assert counted(case, batch=batch) == truth
        with evaluated(case, PooledRequest(), batch=batch) as (done, _):
            for bound in done.negatives.bounds(every):
                assert np.array_equal(bound, len(negatives) - np.searchsorted(negatives, every))
            assert (done.negatives.total, done.negatives.passes) == (len(negatives), 1)


def test_where_their_scores_do_not_fit_they_are_counted_one_by_one():
    case = {"queries": rows_of("ten times", 320), "query_labels": torch.arange(320) % 11, "similarity": "cosine"}
    assert not has_few(*prepared(case), 10**4)
    assert counted(case, memory=10**4) == counted(case)


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
@pytest.mark.parametrize(
    ("noise", "dtype"), [(1e-4, np.float32), (1e-7, np.float32), (1e-9, np.float64), (1e-15, np.float64)]
)
def test_rows_that_are_all_but_equal(noise, dtype, precision):
    """So many that a sample chooses the precision: most estimates are too close to thresholds."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy((rng.normal(size=(1, 5)) + noise * rng.normal(size=(530, 5))).astype(dtype))
    case = {"queries": rows, "query_labels": torch.arange(530) % 90, "similarity": "cosine"}
    truth = scores_of(case).counts()
    assert counted(case, precision=precision) == truth
    assert precision is not None or counted(case, request=PooledRequest((0.5,))) == truth
