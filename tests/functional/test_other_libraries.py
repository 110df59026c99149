"""Arrays of other libraries: those that are exchanged by DLPack, and bfloat16, which NumPy does not have."""

import numpy as np
import pytest
import torch

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.functional import (
    discriminant_ratio,
    embedding_health,
    knn_accuracy,
    linear_probe,
    near_duplicates,
    nearest,
    suspects,
)
from fewshot_callbacks.metrics import RetrievalEvaluation
from tests.integration_packages import integration
from tests.messages import refused

ROWS = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
LABELS = np.arange(60) % 6
HALF = torch.tensor(ROWS).bfloat16()


def updated(rows, labels):
    metric = RetrievalEvaluation()
    metric.update(rows, labels)
    return metric.compute()["mAP"].item()


FUNCTIONS = {
    "evaluate_retrieval": evaluate_retrieval,
    "gallery": lambda rows, labels: evaluate_retrieval(rows[:30], labels[:30], rows[30:], labels[30:]),
    "nearest": lambda rows, labels: nearest(rows, k=2).indices.tolist(),
    "near_duplicates": lambda rows, labels: str(near_duplicates(rows)),
    "suspects": lambda rows, labels: str(suspects(rows, labels)),
    "discriminant_ratio": lambda rows, labels: discriminant_ratio(rows, labels).item(),
    "embedding_health": lambda rows, labels: str(embedding_health(rows, labels)),
    "knn_accuracy": lambda rows, labels: str(knn_accuracy(rows, labels, rows, labels, k=3)),
    "linear_probe": lambda rows, labels: str(linear_probe(rows, labels, rows, labels)),
    "metric": updated,
}


class DeviceArray:
    """An array as CuPy has them: exchanged by DLPack, and never converted to NumPy unasked."""

    def __init__(self, tensor, *, is_reachable=True):
        self.tensor = tensor
        self.is_reachable = is_reachable
        self.shape = tuple(tensor.shape)
        self.ndim = tensor.ndim
        self.size = tensor.numel()
        self.dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))

    def __len__(self):
        return len(self.tensor)

    def __iter__(self):
        return (DeviceArray(row, is_reachable=self.is_reachable) for row in self.tensor)

    def __getitem__(self, rows):
        return DeviceArray(self.tensor[rows], is_reachable=self.is_reachable)

    def item(self):
        return self.tensor.item()

    @property
    def __cuda_array_interface__(self):
        if self.is_reachable:
            raise AttributeError("the memory of this stand-in is main memory")
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (0, False), "version": 3}

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **settings):
        if not self.is_reachable:
            raise BufferError("the device is not reached")
        return self.tensor.__dlpack__(**settings)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arrays_that_are_exchanged_by_dlpack_are_read(function):
    expected = FUNCTIONS[function](ROWS, LABELS)
    arrays = DeviceArray(torch.tensor(ROWS)), DeviceArray(torch.tensor(LABELS))
    assert FUNCTIONS[function](*arrays) == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")
@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_arrays_of_a_gpu_are_read(function, library):
    as_array = torch.Tensor.cuda if library == "torch" else pytest.importorskip("cupy").asarray
    expected = FUNCTIONS[function](torch.tensor(ROWS).cuda(), LABELS)
    rows = as_array(torch.tensor(ROWS))
    labels = as_array(torch.tensor(LABELS))
    assert FUNCTIONS[function](rows, labels) == expected
    assert FUNCTIONS[function](list(rows), list(labels)) == expected
    if function != "discriminant_ratio":  # computed where the rows are
        assert expected == FUNCTIONS[function](ROWS, LABELS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_array_on_a_device_that_is_not_reached_is_refused_with_the_fix(function):
    array = DeviceArray(torch.tensor(ROWS), is_reachable=False)
    with refused(ValueError, "DeviceArray", "PyTorch", "cupy.asnumpy(array)", "numpy.asarray(array)"):
        FUNCTIONS[function](array, LABELS)


def test_lists_of_such_rows_and_labels():
    rows = list(DeviceArray(torch.tensor(ROWS)))
    labels = list(DeviceArray(torch.tensor(LABELS)))
    assert evaluate_retrieval(rows, labels) == evaluate_retrieval(ROWS, LABELS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bfloat16_of_ml_dtypes_is_that_of_pytorch(function):
    bfloat16 = integration("ml_dtypes").bfloat16
    expected = FUNCTIONS[function](HALF, LABELS)
    rows = ROWS.astype(bfloat16)
    assert FUNCTIONS[function](rows, LABELS) == expected
    reversed_rows = rows[::-1]
    reversed_rows.flags.writeable = False
    assert FUNCTIONS[function](reversed_rows, LABELS[::-1]) == FUNCTIONS[function](HALF.flip(0), LABELS[::-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_arrays_of_jax(function, dtype):
    jnp = integration("jax.numpy")
    rows = jnp.asarray(ROWS, dtype=dtype)
    expected = FUNCTIONS[function](torch.tensor(ROWS).to(getattr(torch, dtype)), LABELS)
    assert FUNCTIONS[function](rows, jnp.asarray(LABELS)) == expected
    assert FUNCTIONS[function](list(rows), list(jnp.asarray(LABELS))) == expected
