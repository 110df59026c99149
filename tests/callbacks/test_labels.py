"""Labels as words, lists, arrays and columns in the batches of a real Trainer: the values are those of their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fewshot_callbacks import DEFAULT_METRICS, EpisodicBatchSampler, TrainingDynamicsMonitor
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor
from tests.callbacks.models import Net, gap_monitor, items, loader, logged_by, measured, retrieval, said, trainer

WORDS = {-7: "heron", 3: "", 13: "owl", 23: "Ünal", 33: "owl 2", 43: "9"}
"""Of the labels of `items`; in another order than these."""


def word_of(label: Any) -> str:
    return WORDS[int(label)]


class Worded(Dataset[Any]):
    """The items with words for labels; a loader makes a tuple of them."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data
        self.labels = [word_of(label) for label in data.tensors[1]]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index][0], self.labels[index]


class WordedNet(Net):
    """Hands on the labels as they came, or in the form that it is told."""

    def __init__(self, form: Callable[[Any], Any] = lambda labels: labels) -> None:
        super().__init__()
        self.form = form

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        embeddings = self.embed(batch[0])
        return {"loss": embeddings.square().mean(), "embeddings": embeddings, "labels": self.form(batch[1])}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": self.embed(batch[0]), "labels": self.form(batch[1])}


def worded(data: TensorDataset | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Worded(items() if data is None else data), batch_size=11, **options)


def numbers(data: TensorDataset) -> TensorDataset:
    """The same items, labelled by the places of their words, sorted."""
    places = sorted(WORDS.values())
    return TensorDataset(data.tensors[0], torch.tensor([places.index(word_of(label)) for label in data.tensors[1]]))


def seeded(**options: Any) -> WordedNet:
    torch.manual_seed(0)
    return WordedNet(**options)


FORMS: dict[str, Callable[[Any], Any]] = {
    "as collated": lambda labels: labels,
    "list": list,
    "array": np.array,
    "objects": lambda labels: np.array(labels, object),
    "column": lambda labels: [[word] for word in labels],
}


@pytest.mark.parametrize("form", FORMS)
def test_words_in_the_output_or_the_batch(form: str) -> None:
    settings = {"label_groups": 2, "metrics": (*DEFAULT_METRICS, "macro_mAP")}

    def run(data: DataLoader[Any], **options: Any) -> tuple[dict[str, float], Any]:
        monitor = retrieval(**settings)
        fit = trainer(monitor, DiscriminantRatioMonitor(), max_epochs=2)
        fit.fit(seeded(**options), data, data)
        return logged_by(fit), monitor.report

    expected, of_numbers = run(loader(numbers(items())))
    found, report = run(worded(), form=FORMS[form])
    assert found == pytest.approx(expected, rel=1e-12)
    assert report == of_numbers
    assert report.label_names == tuple(sorted(WORDS.values()))


def test_words_in_the_batch_alone() -> None:
    class Plain(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.embed(batch["points"]).sum()

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {"points": torch.stack([row[0] for row in rows]), "species": [row[1] for row in rows]}

    monitor, net = retrieval(source="encoder", labels="species"), Plain()
    [logged] = trainer(monitor).validate(net, worded(collate_fn=collate), verbose=False)
    expected = measured(*net.by_hand(numbers(items())))
    assert logged == pytest.approx({f"val/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert monitor.report is not None
    assert monitor.report.label_names is not None


def test_gallery_and_ids_as_words() -> None:
    class Split(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            start = 11 * batch_idx
            names = [f"{number}.png" for number in range(start, start + len(batch[1]))]
            flags = [number % 2 == 0 for number in range(start, start + len(batch[1]))]
            return {"embeddings": self.embed(batch[0]), "labels": batch[1], "gallery": flags, "names": names}

    torch.manual_seed(0)
    net, monitor = Split(), retrieval(gallery="gallery", ids="names")
    [logged] = trainer(monitor).validate(net, worded(), verbose=False)
    embeddings, labels = net.by_hand(numbers(items()))
    of_gallery = torch.arange(len(labels)) % 2 == 0
    expected = measured(embeddings[~of_gallery], labels[~of_gallery], embeddings[of_gallery], labels[of_gallery])
    assert logged == pytest.approx({f"val/{name}": value for name, value in expected.items()}, rel=1e-5)


def test_one_loader_with_words_and_one_with_integers() -> None:
    net, monitor = seeded(), retrieval()
    trainer(monitor).validate(net, [worded(), loader()], verbose=False)
    first, second = monitor.reports.values()
    assert first == second
    assert first.label_names is not None
    assert second.label_names is None


def test_batches_of_words_and_of_integers_in_one_set_are_nan_and_one_warning() -> None:
    class Mixed(WordedNet):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            labels = list(batch[1]) if batch_idx else torch.arange(len(batch[1]))
            return {"embeddings": self.embed(batch[0]), "labels": labels}

    with pytest.warns(UserWarning, match="the labels so far are integers, those of this batch words") as warned:
        [logged] = trainer(retrieval(), DiscriminantRatioMonitor()).validate(Mixed(), worded(), verbose=False)
    assert len([text for text in said(warned) if "labels so far" in text]) == 2  # of each monitor
    assert math.isnan(logged["val/mAP"])
    assert math.isnan(logged["val/J"])


@pytest.mark.parametrize("form", [Tensor.tolist, Tensor.numpy])
def test_embeddings_as_arrays_and_lists_and_labels_of_a_column(form: Callable[[Tensor], Any]) -> None:
    class Arrays(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"embeddings": form(self.embed(batch[0])), "labels": form(batch[1][:, None])}

    net = Arrays()
    [logged] = trainer(retrieval(), DiscriminantRatioMonitor()).validate(net, loader(), verbose=False)
    expected = measured(*net.by_hand(items()))
    assert logged["val/mAP"] == pytest.approx(expected["mAP"], rel=1e-5)
    assert logged["val/J"] > 0


def test_the_gap_of_words_is_that_of_their_numbers() -> None:
    def run(training: Any, data: DataLoader[Any]) -> dict[str, float]:
        monitor = gap_monitor(training_data=training, embed=lambda module, batch: module.embed(batch[0]))
        [logged] = trainer(monitor).validate(seeded(), data, verbose=False)
        return {name: value for name, value in logged.items() if name != "gap/share_of_time"}

    data = numbers(items(seed=4))
    expected = run(data, loader(numbers(items())))
    assert run(Worded(items(seed=4)), worded()) == pytest.approx(expected, rel=1e-12)
    assert not math.isnan(expected["gap/grouped_recall@1"])


def test_training_dynamics_of_episodes_of_words() -> None:
    def run(data: Dataset[Any], labels: Any) -> Any:
        monitor = TrainingDynamicsMonitor(
            every_n_steps=1, shots=1, embed=lambda module, batch: module.encoder(module.frozen(batch[0])), strict=True
        )
        sampler = EpisodicBatchSampler(labels, ways=3, shots=1, queries=2, episodes=4)
        trainer(monitor).fit(seeded(), DataLoader(data, batch_sampler=sampler), worded())
        return monitor.history

    training = numbers(items())
    expected = run(training, training.tensors[1].tolist())
    found = run(Worded(items()), Worded(items()).labels)
    assert len(found) == 4
    for name, values in expected.to_dict().items():
        # words sort their classes in another order, and so do sums
        same = pytest.approx(values, rel=1e-12) if name in ("alpha", "norm_ratio", "psi_con", "psi_div") else values
        assert found.to_dict()[name] == same


def test_labels_that_are_missing_end_the_run() -> None:
    net = seeded(form=lambda labels: [None, *labels[1:]])
    with pytest.raises(ValueError, match=r"the labels of validation_step are a list of 11.*1 of 11 labels is missing"):
        trainer(retrieval(), num_sanity_val_steps=1).fit(net, worded(), worded())
