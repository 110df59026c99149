"""ProbeMonitor on real Trainers: what it logs is what `linear_probe` gives of the same embeddings."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fewshot_callbacks import EmbeddingSource, KnnMonitor, ProbeMonitor, RetrievalMonitor, knn_accuracy, linear_probe
from fewshot_callbacks.callbacks._conduct import UsageError
from tests.callbacks.models import (
    TRAINING,
    VALIDATION,
    Embeds,
    Labelled,
    Returns,
    close,
    items,
    loader,
    log_of_validation,
    messages_of,
    retrieval,
    trainer,
    with_prefix,
)
from tests.messages import refused, warned

QUERIES, GALLERY = items(seed=11), items(per_class=8, seed=12)


def test_the_training_set_is_the_bank_and_is_embedded_once_for_all() -> None:
    data = Labelled(TRAINING)
    passes: list[int] = []

    class Counts(Embeds):
        def forward(self, points: Tensor) -> Tensor:
            passes.append(len(points))
            return super().forward(points)

    net = Counts()
    monitors = ProbeMonitor(data), KnnMonitor(5, data), retrieval()
    logged = log_of_validation(monitors, net, loader(QUERIES))
    embedded = sum(passes)
    expected = linear_probe(*net.by_hand(QUERIES), *net.by_hand(TRAINING))
    votes = knn_accuracy(*net.by_hand(QUERIES), *net.by_hand(TRAINING), k=5)
    probe = {key: value for key, value in logged.items() if "probe" in key}
    assert probe == close(with_prefix(expected.values))
    assert {key: value for key, value in logged.items() if "knn" in key} == close(with_prefix(votes.values))
    # The training items once; the first batch a second time for each similarity, to see that it is embedded alike.
    assert embedded == len(TRAINING) + 2 * 11
    assert monitors[0].reports[""].strength == expected.strength


@pytest.mark.filterwarnings("ignore:.*strongest")
def test_a_gallery_may_be_the_bank() -> None:
    net = Embeds()
    monitor = ProbeMonitor("gallery", gallery=1, strengths=(0.01, 1.0), confidence=0.9)
    logged = log_of_validation(monitor, net, [loader(QUERIES), loader(GALLERY)])
    sides = (*net.by_hand(QUERIES), *net.by_hand(GALLERY))
    expected = linear_probe(*sides, strengths=(0.01, 1.0), confidence=0.9)
    assert logged == close(with_prefix(expected.values))
    assert monitor.reports[""].intervals.keys() == expected.intervals.keys()


class Patients(Dataset[Any]):
    """Items with a class, an age and a patient, as mappings."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # No patient of one set is in the other.
        self.patients = torch.arange(count) // 3 + 100 * seed
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        noise = torch.randn(count, 6, generator=generator)
        self.points = (
            noise + torch.eye(6)[self.labels] + torch.randn(count, 6, generator=generator)[torch.arange(count) // 3]
        )
        self.ages = 40 + 10 * self.points[:, 0] + torch.randn(count, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "points": self.points[index],
            "label": self.labels[index],
            "age": self.ages[index],
            "patient": f"patient {int(self.patients[index])}",
        }


class OfPatients(Returns):
    """Embeds the points of a mapping as they are."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def forward(self, batch: Any) -> Tensor:
        return batch["points"]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": batch["points"]}


def of_patients(labels: str) -> EmbeddingSource:
    return EmbeddingSource(("embeddings", "labels"), labels=labels, embed=lambda module, batch: batch["points"])


def test_groups_are_left_out_together() -> None:
    queries, bank = Patients(30, seed=1), Patients(60, seed=2)
    monitor = ProbeMonitor(bank, groups="patient", source=of_patients("label"))
    logged = log_of_validation(monitor, OfPatients(), DataLoader(queries, batch_size=8))
    expected = linear_probe(
        queries.points,
        queries.labels,
        bank.points,
        bank.labels,
        query_groups=queries.patients,
        gallery_groups=bank.patients,
    )
    assert "probe_leave_group_out" in expected.values
    assert logged == close(with_prefix(expected.values))


def test_labels_that_are_numbers_are_targets() -> None:
    queries, bank = Patients(30, seed=1), Patients(60, seed=2)
    monitor = ProbeMonitor(bank, source=of_patients("age"))
    logged = log_of_validation(monitor, OfPatients(), DataLoader(queries, batch_size=8))
    expected = linear_probe(queries.points, queries.ages, bank.points, bank.ages)
    assert expected.values["probe_r2"] > 0.5
    assert logged == close(with_prefix(expected.values))


def test_targets_are_refused_by_the_monitors_that_need_classes_alone() -> None:
    queries, bank = Patients(30, seed=1), Patients(60, seed=2)
    source = of_patients("age")
    monitors = ProbeMonitor(bank, source=source), RetrievalMonitor(source=source, strict=False)
    with warned(UserWarning, "val/mAP", "NaN", "RetrievalMonitor", "integer", "torch.float32") as caught:
        logged = log_of_validation(monitors, OfPatients(), DataLoader(queries, batch_size=8))
    [message] = messages_of(caught, "val/mAP")
    assert "ProbeMonitor" not in message
    assert message.count("RetrievalMonitor:") == 1
    assert logged["val/probe_r2"] > 0.5
    assert math.isnan(logged["val/mAP"])
    with refused(UsageError, "RetrievalMonitor", "integer", "torch.float32"):
        log_of_validation(RetrievalMonitor(source=source), OfPatients(), DataLoader(queries, batch_size=8))


def test_a_bank_without_the_classes_of_the_set_is_said() -> None:
    other = TensorDataset(TRAINING.tensors[0], TRAINING.tensors[1] + 1)
    with warned(UserWarning, "val/probe", "NaN", "ProbeMonitor") as caught:
        logged = log_of_validation((ProbeMonitor(Labelled(other)), retrieval()), Embeds(), loader(VALIDATION))
    assert len(messages_of(caught)) == 1
    assert math.isnan(logged["val/probe"])
    assert logged["val/mAP"] > 0


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"bank": "self"}, ("ProbeMonitor(bank='self')", "'train'", "'gallery'", "data set", "loader")),
        ({"name": "/"}, ("ProbeMonitor(name='/')", "val/mAP")),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, Any], facts: tuple[str, ...]) -> None:
    with refused(ValueError, *facts):
        ProbeMonitor(**settings)


def test_what_cannot_be_fitted_on_is_said() -> None:
    with refused(UsageError, "ProbeMonitor", "bank=...", "training_data_for_evaluation()"):
        trainer(ProbeMonitor()).validate(Embeds(), loader(), verbose=False)
    with refused(UsageError, "ProbeMonitor(bank='gallery')", "gallery=..."):
        log_of_validation(ProbeMonitor("gallery"), Embeds(), loader())


@pytest.mark.filterwarnings("ignore:.*are NaN")
def test_a_checkpoint_that_waits_for_a_value_outlives_a_failure(tmp_path: Path) -> None:
    """Before the first report it is not known that there will be this value."""
    waits = ModelCheckpoint(tmp_path, monitor="val/probe_top5", mode="max")
    other = TensorDataset(TRAINING.tensors[0], TRAINING.tensors[1] + 1)
    run = trainer(ProbeMonitor(Labelled(other)), waits)
    run.fit(Embeds(), loader(), loader(VALIDATION))
    assert run.callback_metrics["val/probe_top5"].isnan()


# ------------------------------------------------------------------------------------- floats are targets, in every batch


def with_floats(targets: Tensor, data: TensorDataset = TRAINING) -> TensorDataset:
    return TensorDataset(data.tensors[0], targets)


def binary_targets(items: int, seed: int) -> Tensor:
    """Two targets of each item; those of the first and of the last eleven items are zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.rand(items, 2, generator=generator)
    targets[:11] = targets[:11].round()
    targets[-11:] = targets[-11:].round()
    return targets


@pytest.mark.filterwarnings("ignore:.*strongest")
@pytest.mark.parametrize("batch_size", [11, 1])
def test_a_batch_of_zeros_and_ones_decides_nothing(batch_size: int) -> None:
    """Seen red: the first batch made label sets of the targets, and the run ended."""
    net = Embeds()
    bank = with_floats(binary_targets(len(TRAINING), 1))
    queries = with_floats(binary_targets(len(QUERIES), 2), QUERIES)
    logged = log_of_validation(ProbeMonitor(loader(bank, batch_size)), net, loader(queries, batch_size))
    expected = linear_probe(*net.by_hand(queries), *net.by_hand(bank))
    assert logged == close(with_prefix(expected.values))


@pytest.mark.filterwarnings("ignore:.*strongest", r"ignore:.*\d+ of \d+ queries")
def test_zeros_and_ones_are_targets_of_one_monitor_and_label_sets_of_another() -> None:
    net = Embeds()
    bank, queries = (with_floats((torch.rand(len(data), 4) > 0.5).float(), data) for data in (TRAINING, QUERIES))
    monitors = (ProbeMonitor(bank), retrieval())
    logged = log_of_validation(monitors, net, loader(queries))
    probe = linear_probe(*net.by_hand(queries), *net.by_hand(bank))
    assert logged["val/probe_r2"] == pytest.approx(probe.values["probe_r2"])
    alone = log_of_validation(retrieval(), net, loader(queries))
    assert logged["val/mAP"] == alone["val/mAP"]


@pytest.mark.parametrize(
    ("labels", "monitored", "fix"),
    [(torch.Tensor.float, "val/probe", "val/probe_r2"), (torch.Tensor.long, "val/probe_r2", "val/probe")],
)
def test_a_key_of_the_other_kind_of_labels_ends_the_run_at_its_sanity_check(
    tmp_path: Path, labels: Any, monitored: str, fix: str
) -> None:
    """Seen red: Lightning's checkpoint ended the run after an epoch."""
    data = with_floats(labels(TRAINING.tensors[1]))
    checkpoint = ModelCheckpoint(tmp_path, monitor=monitored, mode="max")
    run = trainer(ProbeMonitor(data), checkpoint, num_sanity_val_steps=1)
    with refused(UsageError, "ProbeMonitor", monitored, fix):
        run.fit(Embeds(), loader(TRAINING), loader(data))
    assert run.global_step == 0


@pytest.mark.filterwarnings("ignore:.*copy")
def test_a_value_that_no_report_has_is_nan_with_its_reason(tmp_path: Path) -> None:
    five = TensorDataset(*(tensor[TRAINING.tensors[1] != TRAINING.tensors[1].max()] for tensor in TRAINING.tensors))
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/probe_top5", mode="max")
    run = trainer(ProbeMonitor(five), checkpoint)
    with warned(UserWarning, "val/probe_top5", "NaN"):
        run.fit(Embeds(), loader(five), loader(five))
