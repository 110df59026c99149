"""`RetrievalMonitor(slices=...)` logs the worst slice of each attribute; its report has all of them."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import InputError, RetrievalMonitor, evaluate_retrieval
from tests.callbacks import slice_jobs
from tests.callbacks.models import log_of_validation, messages_of, retrieval, trainer
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


@pytest.mark.parametrize("strict", [None, False])
def test_too_many_slices_cost_only_their_attribute(strict):
    many = TensorDataset(POINTS, LABELS, CODES, torch.arange(len(POINTS)))
    monitor = retrieval(slices={"age": 3, "row": 3, "lens": 2}, metrics="mAP", compare="first", strict=strict)
    with pytest.warns(UserWarning, match="at most 30") as said:
        values = logged(monitor, many)
    for name in ("age", "row"):
        facts = (f"slices['{name}']", f"{len(POINTS)} values", "at most 30", f"val/mAP_worst_{name} is NaN")
        assert len(messages_of(said, *facts)) == 1
        assert math.isnan(values[f"val/mAP_worst_{name}"])
    report = evaluate_retrieval(POINTS, LABELS, metrics="mAP")
    assert values["val/mAP"] == pytest.approx(report.mAP)
    assert values["val/mAP_worst_lens"] == pytest.approx(
        min(float(report.per_query["mAP"][code == CODES].mean()) for code in (0, 1))
    )
    assert list(monitor.report.slices) == ["lens"]


def test_too_many_slices_end_the_run_of_a_strict_monitor():
    many = TensorDataset(POINTS, LABELS, CODES, torch.arange(len(POINTS)))
    with refused(InputError, "RetrievalMonitor", "slices['age']", "at most 30"):
        logged(retrieval(slices={"age": 3}, metrics="mAP", strict=True), many)


class LateMistake(Steps):
    """Its cameras are wrong from a batch on."""

    def __init__(self, first_wrong, wrong):
        super().__init__()
        self.first_wrong = first_wrong
        self.wrong = wrong

    def validation_step(self, batch, batch_idx):
        output = super().validation_step(batch, batch_idx)
        if batch_idx >= self.first_wrong:
            output["camera"] = self.wrong(len(batch[0]))
            if output["camera"] is None:
                del output["camera"]
        return output


MISTAKES = {
    "floats": torch.zeros,
    "2-D": lambda items: torch.zeros(items, 2, dtype=torch.int64),
    "integers": lambda items: list(range(items)),
    "missing": lambda items: None,
    "too few": lambda items: ["roof"] * (items - 1),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_in_a_later_batch_costs_only_its_attribute(mistake):
    monitor = retrieval(slices=("camera", "light"), metrics="mAP")
    steps = LateMistake(5, MISTAKES[mistake])
    with pytest.warns(UserWarning, match="val/mAP_worst_camera is NaN") as said:
        values = log_of_validation(monitor, steps, DataLoader(DATA, batch_size=16))
    assert len(messages_of(said, "RetrievalMonitor", "slices", "val/mAP_worst_camera is NaN")) == 1
    assert values["val/mAP"] == pytest.approx(evaluate_retrieval(POINTS, LABELS, metrics="mAP").mAP)
    assert math.isnan(values["val/mAP_worst_camera"])
    assert not math.isnan(values["val/mAP_worst_light"])
    with refused(InputError, "RetrievalMonitor", "slices"):
        strict = retrieval(slices=("camera", "light"), metrics="mAP", strict=True)
        log_of_validation(strict, steps, DataLoader(DATA, batch_size=16))


@pytest.mark.parametrize(
    ("mistake", "first_wrong"),
    [(name, first) for name in MISTAKES for first in (0, 1) if (name, first) != ("integers", 0)],
)
def test_a_mistake_in_the_sanity_check_ends_the_run_there(mistake, first_wrong):
    class Fitted(LateMistake):
        has_trained = False

        def training_step(self, batch, batch_idx):
            self.has_trained = True

        def configure_optimizers(self):
            return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    steps = Fitted(first_wrong, MISTAKES[mistake])
    loader = DataLoader(DATA, batch_size=16)
    with refused(ValueError, "RetrievalMonitor", "slices"):
        trainer(retrieval(slices="camera", metrics="mAP"), max_epochs=1, num_sanity_val_steps=2).fit(
            steps, loader, loader
        )
    assert not steps.has_trained


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
    first, second = answers(gloo_folder, slice_jobs.__name__, 2)
    assert first[:2] == second[:2] == alone[:2]


def test_a_mistake_of_one_process_costs_only_its_attribute(gloo_folder):
    [(worst, _, alone)] = answers(gloo_folder, slice_jobs.__name__, 1)
    of_processes = [values for _, _, values in answers(gloo_folder, slice_jobs.__name__, 2)]
    assert {name for name, value in alone.items() if math.isnan(value)} == {"val/mAP_worst_many"}
    for values in of_processes:
        wrong = {name for name, value in values.items() if math.isnan(value)}
        assert wrong == {"val/mAP_worst_mixed", "val/mAP_worst_late", "val/mAP_worst_many"}
        assert values["val/mAP"] == alone["val/mAP"]
        assert values["val/mAP_worst_camera"] == worst
