"""Two encoders in both directions, several captions an image, and candidates that are ignored, on a real Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.callbacks import RetrievalMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import evaluate_retrieval
from tests.callbacks.models import trainer

ITEMS, DIM, CAPTIONS = 23, 4, 3
METRICS = ("mAP", "recall@1", "recall@5")
BOTH = ("image_embeds", "text_embeds")


def pairs() -> TensorDataset:
    """Images, three captions each, a number for each image, and its photographer."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ITEMS, DIM, generator=generator)
    captions = images[:, None] + torch.randn(ITEMS, CAPTIONS, DIM, generator=generator)
    return TensorDataset(images, captions, torch.arange(ITEMS) * 3 - 7, torch.arange(ITEMS) % 4)


class Clip(LightningModule):
    def __init__(self, captions: int = 1) -> None:
        super().__init__()
        self.captions = captions

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        images, captions, number, photographer = batch
        return {
            "image_embeds": images,
            "text_embeds": captions[:, : self.captions].flatten(0, 1),
            "image": number,
            "image_of_caption": number.repeat_interleave(self.captions),
            "photographer": photographer,
        }


def both_ways(texts: Tensor, of_texts: Tensor, **groups: Any) -> dict[str, float]:
    images, _, number, _ = pairs().tensors
    sides = (images, number), (texts, of_texts)
    values = {}
    for name, (query, searched) in {"image_to_text": sides, "text_to_image": sides[::-1]}.items():
        report = evaluate_retrieval(*query, *searched, metrics=METRICS, **groups)
        values |= {f"val/{name}/{key}": pytest.approx(value, rel=1e-5) for key, value in report.metrics().items()}
        values[f"val/{name}/queries_without_match"] = report.queries_without_match
    return values


def validated(monitor: RetrievalMonitor, net: LightningModule, data: TensorDataset | None = None) -> dict[str, float]:
    run = trainer(monitor)
    run.validate(net, DataLoader(pairs() if data is None else data, batch_size=5), verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items()}


def test_rows_belong_together() -> None:
    monitor = RetrievalMonitor(source=BOTH, metrics=METRICS)
    _, captions, number, _ = pairs().tensors
    assert validated(monitor, Clip()) == both_ways(captions[:, 0], number)
    assert monitor.reports.keys() == {"image_to_text", "text_to_image"}
    named = validated(RetrievalMonitor(source=BOTH, metrics="mAP", name="clip"), Clip())
    assert {"val/clip/image_to_text/mAP", "val/clip/text_to_image/mAP"} < named.keys()


def test_several_captions_of_an_image() -> None:
    _, captions, number, _ = pairs().tensors
    monitor = RetrievalMonitor(source=BOTH, labels=("image", "image_of_caption"), metrics=METRICS)
    expected = both_ways(captions.flatten(0, 1), number.repeat_interleave(CAPTIONS))
    assert validated(monitor, Clip(CAPTIONS)) == expected
    with pytest.raises(UsageError, match=r"gave 5 and 15 embeddings. Say which belong together: labels=\('image_id'"):
        validated(RetrievalMonitor(source=BOTH, metrics=METRICS), Clip(CAPTIONS))


def test_images_that_come_with_each_of_their_captions_count_once() -> None:
    images, captions, number, photographer = pairs().tensors
    order = torch.arange(ITEMS).repeat_interleave(CAPTIONS)
    data = TensorDataset(images[order], captions.flatten(0, 1)[:, None], number[order], photographer[order])
    ids = ("image", lambda outputs, batch: [str(text.tolist()) for text in batch[1]])
    monitor = RetrievalMonitor(source=BOTH, labels=("image", "image_of_caption"), ids=ids, metrics=METRICS)
    expected = both_ways(captions.flatten(0, 1), number.repeat_interleave(CAPTIONS))
    assert validated(monitor, Clip(), data) == expected


def test_a_flag_beside_two_encoders_is_refused() -> None:
    with pytest.raises(UsageError, match=r"two encoders are queries and gallery of each other\. Leave out gallery"):
        validated(RetrievalMonitor(source=BOTH, gallery="image"), Clip())


class Person(LightningModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        points, person, camera = batch
        return {
            "embeddings": points,
            "labels": person,
            "person": person,
            "camera": [f"cam {c}" for c in camera.tolist()],
        }


def people(seed: int, count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, DIM, generator=generator),
        torch.randint(0, 5, (count,), generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


@pytest.mark.parametrize("two", [False, True])
def test_candidates_of_the_same_person_and_camera_are_ignored(two: bool) -> None:
    sets = [people(0), people(1, 30)][: 1 + two]
    arguments: list[Tensor] = []
    groups: dict[str, Tensor] = {}
    for name, data in zip(("query_groups", "gallery_groups"), sets, strict=False):
        points, person, camera = data.tensors
        arguments += [points, person]
        groups[name] = person * 10 + camera
    report = evaluate_retrieval(*arguments, metrics=(*METRICS, "minp"), **groups)
    monitor = RetrievalMonitor(exclude=("person", "camera"), gallery=1 if two else None, metrics=(*METRICS, "minp"))
    run = trainer(monitor)
    run.validate(Person(), [DataLoader(data, batch_size=9) for data in sets], verbose=False)
    assert {f"val/{key}": value for key, value in report.metrics().items()} == pytest.approx(
        {key: float(value) for key, value in run.callback_metrics.items() if "without" not in key}, rel=1e-5
    )
    ignored = evaluate_retrieval(*arguments, metrics=METRICS)
    assert ignored.mAP != report.mAP


@pytest.mark.parametrize(
    ("exclude", "words"),
    [
        (
            "lens",
            r"RetrievalMonitor\(exclude='lens'\): neither what the step returned .* nor the batch .* has that entry",
        ),
        (("person", "camera", "few"), r"the entries \('person', 'camera', 'few'\) of exclude have \[9, 9, 2\] values"),
        (lambda outputs, batch: [1, 2], "exclude gave a list of 2; expected an integer or a word for each of the 9"),
    ],
)
def test_what_exclude_cannot_read_ends_the_run(exclude: Any, words: str) -> None:
    class Few(Person):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
            return super().validation_step(batch, batch_idx) | {"few": [1, 2]}

    with pytest.raises(UsageError, match=words):
        trainer(RetrievalMonitor(exclude=exclude)).validate(Few(), DataLoader(people(0), batch_size=9), verbose=False)


def test_soft_labels_under_the_usual_keys_are_no_second_encoder() -> None:
    class Mixed(LightningModule):
        def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            return {"embeddings": batch[0], "labels": batch[0].softmax(dim=1)}

    with pytest.raises(UsageError, match="entries are neither 0 nor 1"):
        validated(RetrievalMonitor(), Mixed())
