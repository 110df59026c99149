"""`RetrievalMonitor(dims=..., codes=...)`: the logged values of compressed forms equal `compression_costs`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fewshot_callbacks.callbacks import RetrievalMonitor
from fewshot_callbacks.functional import compression_costs
from tests.callbacks.models import (
    DIM,
    FEATURES,
    Net,
    close,
    expected_metrics,
    items,
    loader,
    log_of_validation,
    messages_of,
    multi_label_items,
    retrieval,
    trainer,
    with_prefix,
)
from tests.callbacks.process_jobs import ReturnedPoints, TwoEncoders
from tests.messages import refused, warned

QUERIES, GALLERY = items(), items(per_class=4, seed=4)
FORMS: dict[str, Any] = {"dims": (2, 4), "codes": ("int8", "binary")}
NAMES = [
    *("dims2", "dims4", "int8", "binary"),
    *("dims2_int8", "dims2_binary", "dims4_int8", "dims4_binary"),
]


@pytest.mark.filterwarnings("ignore:val. . of 5 bits")
def test_what_is_logged_is_what_the_function_says() -> None:
    net, monitor = Net(), retrieval(**FORMS)
    logged = log_of_validation(monitor, net, loader(QUERIES, batch_size=7))
    report = compression_costs(*net.by_hand(QUERIES), **FORMS)
    expected = expected_metrics(*net.by_hand(QUERIES)) | report.metrics()
    assert logged == close(with_prefix(expected))
    keys = {key for key in logged if key.count("/") > 1}
    assert keys == {f"val/{name}/{metric}" for name in NAMES for metric in ("mAP", "recall@1")}
    [compressed] = monitor.compression.values()
    assert compressed.whole == monitor.report
    assert {name: variant.differences for name, variant in compressed.variants.items()} == {
        name: variant.differences for name, variant in report.variants.items()
    }


def test_without_forms_nothing_is_compressed() -> None:
    monitor = retrieval()
    log_of_validation(monitor, Net(), loader(QUERIES))
    assert monitor.compression == {}


@pytest.mark.parametrize(
    ("metrics", "keys"),
    [
        (("mrr", "mAP", "recall@1"), ["mrr", "recall@1"]),
        (("recall@1", "mAP"), ["recall@1"]),
        (("recall@5", "mAP"), ["recall@5"]),
        (("pair_f1",), ["pair_f1"]),
    ],
)
def test_the_first_metric_and_recall_at_1_are_logged(metrics: Any, keys: list[str]) -> None:
    logged = log_of_validation(retrieval(metrics=metrics, dims=2), Net(), loader(QUERIES))
    assert [key for key in logged if "dims2" in key] == [f"val/dims2/{key}" for key in keys]


def test_each_loader_direction_and_name_has_its_own_compressed_values() -> None:
    monitor = RetrievalMonitor(dims=2, name="exact", metrics="mAP")
    logged = log_of_validation(monitor, Net(), [loader(QUERIES), loader(GALLERY)])
    assert [key for key in logged if "dims2" in key] == [
        f"val/exact/dims2/mAP/dataloader_idx_{index}" for index in (0, 1)
    ]
    assert list(monitor.compression) == ["/dataloader_idx_0", "/dataloader_idx_1"]
    both = retrieval(source=("a_embeds", "b_embeds"), codes="binary", metrics="recall@1")
    logged = log_of_validation(both, TwoEncoders(), loader(QUERIES))
    assert [key for key in logged if "binary" in key] == [
        "val/a_to_b/binary/recall@1",
        "val/b_to_a/binary/recall@1",
    ]
    net, searched = Net(), retrieval(gallery=1, dims=2, codes="int8")
    logged = log_of_validation(searched, net, [loader(QUERIES), loader(GALLERY)])
    sets = (*net.by_hand(QUERIES), *net.by_hand(GALLERY))
    expected = compression_costs(*sets, dims=2, codes="int8").metrics()
    assert {key.removeprefix("val/"): logged[key] for key in logged if key.count("/") > 1} == close(expected)


@pytest.mark.filterwarnings(r"ignore:.*\d+ of \d+ queries")
def test_compressed_forms_are_measured_with_several_labels_for_each_item() -> None:
    data = multi_label_items(40)
    logged = log_of_validation(retrieval(dims=3), ReturnedPoints(), loader(data))
    expected = compression_costs(*data.tensors, dims=3, codes=()).metrics()
    assert {key.removeprefix("val/"): logged[key] for key in logged if "dims3" in key} == close(expected)


@pytest.mark.filterwarnings("ignore:val. . of 5 bits")
def test_a_checkpoint_may_wait_for_a_form_and_a_misspelt_key_is_told(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/int8/mAP", mode="max")
    run = trainer(retrieval(codes="int8"), best, max_epochs=1)
    run.fit(Net(), loader(), loader())
    assert best.best_model_score == run.callback_metrics["val/int8/mAP"]
    wrong = ModelCheckpoint(tmp_path / "misspelt", monitor="val/int8/map", mode="max")
    run = trainer(retrieval(codes="int8", strict=True), wrong, max_epochs=1, num_sanity_val_steps=1)
    with refused(ValueError, "ModelCheckpoint", "val/int8/map", "val/int8/mAP"):
        run.fit(Net(), loader(), loader())


def test_more_dimensions_than_there_are_end_the_run_at_the_sanity_check() -> None:
    run = trainer(retrieval(dims=(2, DIM + 1)), max_epochs=1, num_sanity_val_steps=1)
    with refused(ValueError, "RetrievalMonitor", "dims", DIM + 1, DIM):
        run.fit(Net(), loader(), loader())
    assert run.global_step == 0


def test_a_note_on_a_compressed_form_is_said_once() -> None:
    data = items()
    data.tensors[0][:, 0] = 1.0
    facts = "val", 1, FEATURES, "dimensions", "gallery"
    with warned(UserWarning, *facts) as said:
        log_of_validation(retrieval(codes="int8"), ReturnedPoints(), loader(data))
    assert len(messages_of(said, *facts)) == 1


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"dims": 0}, ("dims", 0)),
        ({"codes": "int4"}, ("codes", "'int4'", "'int8'")),
        ({"dims": 2, "similarity": "hamming"}, ("similarity='hamming'", "binary")),
        ({"codes": "int8", "metrics": "pair_f1", "threshold": 0.5}, ("threshold=0.5", "scores")),
    ],
)
def test_wrong_settings_are_refused_by_the_constructor(settings: Any, facts: tuple[Any, ...]) -> None:
    with refused(ValueError, "RetrievalMonitor", *facts):
        RetrievalMonitor(**settings)


def test_a_set_that_cannot_be_evaluated_has_nan_under_all_keys() -> None:
    data = items()
    data.tensors[1][:] = torch.arange(len(data))
    with warned(UserWarning, "val/mAP", "NaN", len(data)):
        logged = log_of_validation(retrieval(codes="binary", metrics="mAP"), Net(), loader(data))
    assert list(logged) == ["val/mAP", "val/binary/mAP"]
    assert all(value != value for value in logged.values())  # noqa: PLR0124 - NaN
