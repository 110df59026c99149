"""The benchmark runs, counts operations as they are counted by hand, and its slow ways give our values."""

import pytest
import torch

from fewshot_callbacks import discriminant_ratio, evaluate_retrieval
from tests.scripts import imported_script


@pytest.fixture(scope="module")
def feasibility():
    with imported_script("benchmarks/feasibility.py") as module:
        yield module


@pytest.mark.parametrize(("items", "dim", "classes"), [(64, 128, 32), (128, 64, 4), (24, 8, 5)])
def test_the_kernel_of_j_does_as_many_operations_as_the_formula_says(feasibility, items, dim, classes):
    embeddings = torch.randn(items, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(items) % classes
    with feasibility.CountOperations() as counter:
        counted = discriminant_ratio(embeddings, labels)
    assert counter.operations == feasibility.operations_of_j(items, dim, classes)
    assert counter.operations == 6 * items * dim + 14 * classes * dim + 3 * items + classes + 11
    # what was counted is J, and the compiled kernel is back afterwards
    torch.testing.assert_close(counted, discriminant_ratio(embeddings, labels))


def test_the_slow_ways_give_our_values_in_all_tables(feasibility, capsys):
    embeddings, labels = feasibility.make(200, 16, "middling")
    j = pytest.approx(float(discriminant_ratio(embeddings, labels)), rel=1e-5)
    assert float(feasibility.by_scatter_matrices(embeddings, labels)) == j
    mean_average_precision = pytest.approx(evaluate_retrieval(embeddings, labels).mAP, abs=1e-6)
    assert feasibility.whole_matrix(embeddings, labels) == mean_average_precision
    assert feasibility.main(["--batch", "16", "--dim", "8", "--items", "300"]) == 0
    printed = capsys.readouterr().out
    assert "| A, N = 158,652 | 25,170,457,104 |" in printed
    assert sum(line.startswith("| B, N = 31,730") for line in printed.splitlines()) in {1, 2}
