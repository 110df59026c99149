"""The benchmark runs, counts operations as they are counted by hand, and its slow ways give our values."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fewshot_callbacks import discriminant_ratio, evaluate_retrieval

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def feasibility():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_feasibility", BENCHMARKS / "feasibility.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_feasibility"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))
    del sys.modules["benchmark_feasibility"]


@pytest.mark.parametrize(
    ("run", "operations"),
    [
        (lambda x: x + x, 12),
        (lambda x: x.sum(), 12),
        (lambda x: x.T @ x, 2 * 4 * 3 * 4),
        (lambda x: x.view(-1)[3:].clone(), 0),
        (lambda x: torch.zeros(2, 4).index_add_(0, torch.tensor([0, 1, 1]), x), 12),
        (lambda x: (x > 0).sum(), 0),
    ],
)
def test_operations_are_those_counted_by_hand(feasibility, run, operations):
    embeddings = torch.randn(3, 4)
    with feasibility.CountOperations() as counter:
        run(embeddings)
    assert counter.operations == operations


def test_j_costs_as_many_operations_as_there_are_components_and_not_their_square(feasibility):
    def count(items, dim):
        with feasibility.CountOperations() as counter:
            discriminant_ratio(torch.randn(items, dim), torch.arange(items) % 8)
        return counter.operations

    assert count(128, 512) < 16 * 128 * 512
    assert count(128, 1024) == pytest.approx(2 * count(128, 512), rel=0.02)
    assert count(256, 512) == pytest.approx(2 * count(128, 512), rel=0.02)


def test_the_slow_ways_give_our_values(feasibility):
    embeddings, labels = feasibility.make(200, 16, "middling")
    assert float(feasibility.by_scatter_matrices(embeddings, labels)) == pytest.approx(
        float(discriminant_ratio(embeddings, labels)), rel=1e-5
    )
    assert feasibility.whole_matrix(embeddings, labels) == pytest.approx(
        evaluate_retrieval(embeddings, labels).mAP, abs=1e-6
    )


def test_all_tables(feasibility, capsys):
    assert feasibility.main(["--batch", "16", "--dim", "8", "--items", "300"]) == 0
    printed = capsys.readouterr().out
    assert "| A, N = 158,652 | 25,170,457,104 |" in printed
    assert sum(line.startswith("| B, N = 31,730") for line in printed.splitlines()) in {1, 2}
