"""Rows in unusual forms: each function takes them with the values that they stand for, or refuses them in words."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fewshot_callbacks import evaluate_retrieval, functional
from fewshot_callbacks.storage.shards import Shards
from tests.functional.calls import CALLS_WITH_LABELS
from tests.integration_packages import integration
from tests.messages import refused

ROWS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).bfloat16().float()
EIGHTHS = ROWS.to(torch.float8_e4m3fn).float()  # numbers that 8 bits hold
LABELS = torch.arange(40) % 4
OF_ROWS = evaluate_retrieval(ROWS, LABELS)
CALLS = {
    name: partial(CALLS_WITH_LABELS[name], labels=LABELS)
    for name in ("evaluate_retrieval", "grouped_recall", "nearest", "suspects", "discriminant_ratio")
} | {
    "variance_ratio": lambda items: functional.variance_ratio(items, LABELS),
    "knn_accuracy": lambda items: functional.knn_accuracy(items, LABELS, k=3).values,
    "near_duplicates": lambda items: functional.near_duplicates(items, min_score=0.5).total,
    "leakage": lambda items: functional.leakage(OF_ROWS, items, items, min_score=0.9).scores,
    "embedding_health": lambda items: functional.embedding_health(items, LABELS),
    "neighbour_overlap": lambda items: functional.neighbour_overlap(items, ROWS[:, :4], k=3).per_item,
    "embedding_movement": lambda items: functional.embedding_movement(items, ROWS[:, :4]),
    "trial_scores": lambda items: functional.trial_scores(items, [0, 1], [4, 6]),
    "linear_probe": lambda items: functional.linear_probe(items, LABELS, items, LABELS).values,
    "identification": lambda items: functional.evaluate_identification(items, LABELS, items, LABELS + 1).values,
    "compression_costs": lambda items: {
        name: variant.report.values
        for name, variant in sorted(
            functional.compression_costs(items, LABELS, dims=[3], metrics="mAP").variants.items()
        )
    },
}


def plain(value):
    if isinstance(value, list):
        return [plain(part) for part in value]
    return repr(value.double().tolist()) if isinstance(value, torch.Tensor) else repr(value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "form",
    [
        lambda rows: torch._neg_view(-rows),
        lambda rows: torch.complex(torch.zeros_like(rows), -rows).conj().imag,
        lambda rows: rows.numpy().astype(integration("ml_dtypes").bfloat16),
        lambda rows: rows.bfloat16(),
    ],
    ids=["negative bit", "imaginary part of a conjugate", "ml_dtypes", "bfloat16"],
)
def test_lazy_signs_and_bfloat16_are_the_numbers_that_they_stand_for(name, form):
    assert plain(CALLS[name](form(ROWS))) == plain(CALLS[name](ROWS))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("of_numpy", [False, True])
def test_floats_of_8_bits_are_taken_as_the_numbers_that_they_are(name, dtype, of_numpy):
    rows = ROWS.to(getattr(torch, dtype))
    form = rows.float().numpy().astype(getattr(integration("ml_dtypes"), dtype)) if of_numpy else rows
    assert plain(CALLS[name](form)) == plain(CALLS[name](rows.float()))


def test_floats_of_8_bits_take_a_byte_before_they_are_coded():
    report = functional.compression_costs(EIGHTHS.to(torch.float8_e4m3fn), LABELS, dims=[3], metrics="mAP")
    assert report.bytes_per_item == 6


def test_floats_of_8_bits_are_read_from_files(tmp_path):
    save_file({"embeddings": ROWS.to(torch.float8_e4m3fn)}, tmp_path / "rows.safetensors")
    shards = Shards(tmp_path / "rows.safetensors")
    assert evaluate_retrieval(shards, LABELS).values == evaluate_retrieval(EIGHTHS, LABELS).values


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_nested_tensors_of_either_layout_are_refused_with_the_way_out(name):
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([*ROWS], layout=layout)
        with pytest.raises(ValueError, match=r"\b(queries|embeddings|first|before)\.to_padded_tensor\(0\.0\)"):
            CALLS[name](nested)


@pytest.mark.parametrize("name", CALLS)
def test_the_advice_for_complex_rows_keeps_both_parts(name):
    with pytest.raises(ValueError, match="view_as_real") as refusal:
        CALLS[name](torch.complex(ROWS, ROWS))
    assert ".float()" not in str(refusal.value)


class Wrong:
    """A source of one's own, whose slices are not what its shape says."""

    dtype = np.dtype(np.float32)

    def __init__(self, shape, rows):
        self.shape, self.rows = shape, rows.numpy()

    def __getitem__(self, rows):
        return self.rows[rows]


@pytest.mark.parametrize("rows", [ROWS[:39], ROWS[:, :5], ROWS[:, 0]], ids=["too few rows", "another dim", "no matrix"])
@pytest.mark.parametrize("memory_mb", [None, 0.05])
@pytest.mark.parametrize("call", [evaluate_retrieval, functional.compression_costs])
def test_a_source_that_gives_other_rows_than_its_shape_says_is_named(rows, memory_mb, call):
    with refused(ValueError, "Wrong", "(40, 6)", tuple(rows.shape)):
        call(Wrong((40, 6), rows), LABELS, memory_mb=memory_mb)


def test_targets_without_a_column_are_refused_with_their_shape():
    with refused(ValueError, "linear_probe", "query_labels", "(40, 0)", "(items, targets)"):
        functional.linear_probe(ROWS, ROWS[:, :0], ROWS, ROWS[:, :0])
