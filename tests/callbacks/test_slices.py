"""`RetrievalMonitor(slices=...)` logs the worst slice of each attribute; its report has all of them."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import InputError, RetrievalMonitor, evaluate_retrieval
from tests.callbacks import slice_jobs
from tests.callbacks.models import log_of_validation, messages_of, retrieval
from tests.gloo_processes import answers
from tests.messages import refused

CAMERAS = ("roof", "door")
LABELS = torch.arange(120) % 30
CODES = torch.arange(120) // 7 % 2
NOISE = torch.randn(120, 30, generator=torch.Generator().manual_seed(0))
POINTS = torch.eye(30)[LABELS] + (0.2 + 0.3 * CODES[:, None]) * NOISE
IS_GALLERY = torch.arange(120) // 30 % 2 == 0
DATA = TensorDataset(POINTS, LABELS, CODES, IS_GALLERY)


class Steps(LightningModule):
    def validation_step(self, batch, batch_idx):
        points, labels, codes, is_gallery = batch
        return {
            "embeddings": points,
            "labels": labels,
            "camera": [CAMERAS[code] for code in codes.tolist()],
            "light": 1 - codes,
            "is_gallery": is_gallery,
        }


def logged(monitor, data=DATA, **settings):
    return log_of_validation(monitor, Steps(), DataLoader(data, batch_size=16), **settings)


def words(codes):
    return [CAMERAS[code] for code in codes.tolist()]


@pytest.mark.parametrize(
    ("slices", "names"),
    [
        ("camera", ["camera"]),
        (["camera", "light"], ["camera", "light"]),
        ({"lens": "light"}, ["lens"]),
        ({"lens": 2}, ["lens"]),
        ({"lens": lambda outputs, batch: outputs["camera"]}, ["lens"]),
    ],
)
def test_the_worst_slice_is_logged(slices, names):
    monitor = retrieval(slices=slices, metrics=("pair_f1", "recall@1", "mAP"))
    values = logged(monitor)
    assert set(values) == {"val/pair_f1", "val/recall@1", "val/mAP", *(f"val/recall@1_worst_{name}" for name in names)}
    recall = monitor.report.per_query["recall@1"]
    expected = min(float(recall[code == CODES].mean()) for code in (0, 1))
    for name in names:
        assert values[f"val/recall@1_worst_{name}"] == pytest.approx(expected, abs=1e-6)
        assert len(monitor.report.of_slices(name, "mAP")) == 2
    assert evaluate_retrieval(POINTS, LABELS, metrics="recall@1").values["recall@1"] == pytest.approx(
        values["val/recall@1"]
    )


def test_slices_are_those_of_the_queries():
    monitor = retrieval(slices="camera", metrics="mAP", gallery="is_gallery")
    logged(monitor)
    queries = (POINTS[~IS_GALLERY], LABELS[~IS_GALLERY], POINTS[IS_GALLERY], LABELS[IS_GALLERY])
    report = evaluate_retrieval(*queries, slices={"camera": words(CODES[~IS_GALLERY])}, metrics="mAP")
    assert monitor.report.of_slices("camera") == report.of_slices("camera")


def test_other_settings_go_with_slices():
    monitor = retrieval(slices="camera", groups="is_gallery", dims=8, metrics="mAP", name="shops")
    values = logged(monitor)
    report = evaluate_retrieval(
        POINTS, LABELS, query_groups=IS_GALLERY.long(), slices={"camera": words(CODES)}, metrics="mAP"
    )
    slices = report.of_slices("camera")
    assert values["val/shops/mAP_worst_camera"] == pytest.approx(slices[slices.worst].value)
    assert "val/shops/dims8/mAP" in values


def test_too_many_slices_are_a_warning():
    many = TensorDataset(POINTS, LABELS, CODES, torch.arange(len(POINTS)))
    monitor = retrieval(slices={"age": 3}, metrics="mAP")
    with pytest.warns(UserWarning, match="values of this set are NaN") as said:
        values = logged(monitor, many)
    assert len(messages_of(said, "slices['age']", f"{len(POINTS)} values", "at most 30", "val/mAP", "NaN")) == 1
    assert all(math.isnan(value) for value in values.values())


def test_an_entry_that_is_not_there_ends_the_run():
    with refused(ValueError, "RetrievalMonitor(slices='lens')", "'camera'"):
        logged(retrieval(slices="lens"))


def test_other_slices_are_refused():
    with refused(InputError, "RetrievalMonitor(slices=2)", "{'camera': 2}"):
        RetrievalMonitor(slices=2)
    with refused(InputError, "RetrievalMonitor(slices=...)", "each query", "metrics"):
        RetrievalMonitor(slices="camera", metrics="pair_f1")


def test_two_processes_log_what_one_does(gloo_folder):
    [alone] = answers(gloo_folder, slice_jobs.__name__, 1)
    assert set(alone[1]["camera"]["mAP"]) == set(slice_jobs.CAMERAS)
    assert answers(gloo_folder, slice_jobs.__name__, 2) == [alone, alone]
