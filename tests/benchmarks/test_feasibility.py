"""The benchmark runs, counts operations as they are counted by hand, and its slow ways give our values."""

import pytest
import torch

from fewshot_callbacks import discriminant_ratio, evaluate_retrieval
from tests.scripts import loaded


@pytest.fixture(scope="module")
def feasibility():
    with loaded("benchmarks/feasibility.py") as module:
        yield module


@pytest.mark.parametrize(
    ("run", "operations"),
    [
        (lambda x: x + x, 12),
        (lambda x: x.sum(), 12),
        (lambda x: x.T @ x, 2 * 4 * 3 * 4),
        (lambda x: x.view(-1)[3:].clone(), 0),
        (lambda x: torch.zeros(2, 4).index_add_(0, torch.tensor([0, 1, 1]), x), 12),
        (lambda x: (x > 0).sum(), 0),
        (lambda x: x @ torch.ones(4), 2 * 3 * 4),
        (torch.linalg.vector_norm, 2 * 12),
    ],
)
def test_operations_are_those_counted_by_hand(feasibility, run, operations):
    embeddings = torch.randn(3, 4)
    with feasibility.CountOperations() as counter:
        run(embeddings)
    assert counter.operations == operations


def test_numbers_of_a_kernel_count_what_is_done_with_them(feasibility):
    counter = feasibility.CountOperations()
    number = feasibility.counting_float(counter)
    a, b = number(3.0), number(2.0)
    assert (1 + a - b) * 2 / (4 / b) ** 2 == 1.0
    assert counter.operations == 6
    assert a > b
    assert max(a, b) == 3.0
    assert counter.operations == 6
    total = 0.0
    total += a  # what begins as a plain number counts from the first operation on
    assert isinstance(total, number)
    assert counter.operations == 7


SHAPES = [(128, 512, 32), (128, 256, 32), (64, 512, 32), (128, 512, 4), (24, 8, 5)]


@pytest.mark.parametrize(("items", "dim", "classes"), SHAPES)
def test_the_kernel_of_j_does_as_many_operations_as_the_formula_says(feasibility, items, dim, classes):
    embeddings = torch.randn(items, dim, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(items) % classes
    with feasibility.CountOperations() as counter:
        counted = discriminant_ratio(embeddings, labels)
    assert counter.operations == feasibility.operations_of_j(items, dim, classes)
    assert counter.operations == 6 * items * dim + 14 * classes * dim + 3 * items + classes + 11
    # what was counted is J, and the compiled kernel is back afterwards
    torch.testing.assert_close(counted, discriminant_ratio(embeddings, labels))


def test_classes_of_one_item_have_no_mean_to_divide(feasibility):
    embeddings, labels = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 3])
    with feasibility.CountOperations() as counter:
        discriminant_ratio(embeddings, labels)
    assert counter.operations == feasibility.operations_of_j(6, 4, classes=4, alone=2)


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
