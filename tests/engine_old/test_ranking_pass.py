"""Every kernel, precision, layout, number of threads and budget gives one report."""

import pytest
import torch

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import made, sampled_product
from tests.engine.cases import ALL, PRECISIONS, SIMILARITIES, engine, vectors


def hard_data(kind, n=160):
    labels = torch.arange(n) % 20
    labels[:30] = labels[0]
    if kind in ("separated", "hard"):
        return made(n, 20, 24, noise=0.3 if kind == "separated" else 4.0)[0], labels
    if kind == "collapsed":
        return torch.ones(n, 24), labels
    embeddings = torch.from_numpy(vectors({"random": "real"}.get(kind, kind), n, 24))
    return embeddings.float(), labels


@pytest.mark.parametrize(
    ("kind", "similarity"),
    sampled_product(
        ["random", "separated", "hard", "codes", "repeated", "near-collapsed", "collapsed"], SIMILARITIES, count=9
    ),
)
def test_all_roads_give_one_report(kind, similarity):
    embeddings, labels = hard_data(kind)

    def of(kernel="compiled", precision=None, memory_mb=512, **setting):
        with engine(kernel, precision, **setting):
            return evaluate_retrieval(
                embeddings, labels, similarity=similarity, precisions=(0.2, 0.9), group_size=5, memory_mb=memory_mb
            )

    first = of("pytorch")
    for precision in PRECISIONS:
        assert of(precision=precision) == first
        assert of("pytorch", precision) == first
        assert of(precision=precision, threads=2, layout=(64, 64, ALL), pilot=True) == first
        assert of(precision=precision, threads=3, layout=(64, 48, 100), part_rows=20) == first
    assert of(memory_mb=0.5) == first
    assert of(pilot=True) == first


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_powers_of_two_and_order_change_nothing(similarity, precision):
    embeddings, labels = made(150, 10, 16, noise=1.5)
    plain = evaluate_retrieval(embeddings, labels, similarity=similarity, group_size=None)
    order = torch.randperm(150)
    for power in (-90, -3, 0, 40):
        with engine_options(first_precision=PRECISIONS[precision]):
            other = evaluate_retrieval(
                torch.ldexp(embeddings, torch.tensor(power))[order],
                labels[order],
                similarity=similarity,
                group_size=None,
            )
        ranked = (other.mAP, other.map_at_r, other.recall_at, other.decision.true_positives, other.decision.f1)
        assert ranked == (plain.mAP, plain.map_at_r, plain.recall_at, plain.decision.true_positives, plain.decision.f1)
        factor = {"cosine": 1.0, "dot": 4.0**power, "euclidean": 2.0**power}[similarity]
        assert other.threshold == plain.threshold * factor
