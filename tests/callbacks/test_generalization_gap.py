"""GeneralizationGapMonitor: the values are those of the functions, the training is left alone, the time is kept."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fewshot_callbacks.callbacks import GeneralizationGapMonitor
from fewshot_callbacks.functional import class_subset, evaluate_retrieval, generalization_gap
from tests.callbacks.models import (
    CLASSES,
    KEYS,
    TRAINING,
    VALIDATION,
    Embeds,
    Labelled,
    Net,
    close,
    gap_monitor,
    items,
    loader,
    said,
    trainer,
    validated,
)


def expected(net: Net, some: Any = slice(None), some_val: Any = slice(None), **settings: Any) -> dict[str, float]:
    reports = [
        evaluate_retrieval(
            *(part[chosen] for part in net.by_hand(data)),
            **({"label_groups": 3, "metrics": ("grouped_recall@1", "recall@1")} | settings),
        )
        for data, chosen in ((TRAINING, some), (VALIDATION, some_val))
    ]
    return {f"gap/{name}": value for name, value in generalization_gap(*reports).metrics().items()}


class Thawed(Net):
    """Its encoder is given the points."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Identity()


@pytest.mark.parametrize("batch_size", [1, 47, 64])
def test_what_is_logged_is_what_the_functions_say(batch_size: int) -> None:
    net = Embeds()
    monitor = gap_monitor(training_data=DataLoader(Labelled(TRAINING), batch_size=batch_size))
    logged = validated(monitor, net)
    share = logged.pop("gap/share_of_time")
    assert 0 < share < 1
    assert set(logged) == KEYS
    assert logged == close(expected(net))
    assert monitor.gap is not None
    assert monitor.gap.classes == (CLASSES, CLASSES)


def test_several_ranks_and_settings_are_handed_on() -> None:
    net = Embeds()
    settings = {"label_groups": 2, "similarity": "euclidean", "ties": "optimistic"}
    logged = validated(gap_monitor(metrics=("grouped_recall@1", "recall@1"), seed=4, prefix="over", **settings), net)
    wanted = expected(net, **settings, seed=4)
    assert {key.removeprefix("over/"): value for key, value in logged.items() if "share" not in key} == close(
        {key.removeprefix("gap/"): value for key, value in wanted.items()}
    )


def test_a_seeded_subset_is_read_and_nothing_else() -> None:
    net, data = Embeds(), Labelled(TRAINING)
    monitor = gap_monitor(training_data=data, classes=4, label_groups=2, items_per_class=3, seed=5)
    logged = validated(monitor, net)
    chosen = class_subset(TRAINING.tensors[1], 4, 3, 5)
    assert sorted(data.read) == chosen.tolist()
    some_val = class_subset(VALIDATION.tensors[1], None, 3, 5)
    wanted = expected(net, chosen, some_val, label_groups=2, seed=5)
    assert {key: logged[key] for key in KEYS} == close(wanted)


class Maps(Net):
    """Its forward gives a mapping."""

    def forward(self, points: Tensor) -> Any:
        return {"embeddings": self.embed(points)}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Embeds, {"source": "encoder", "embed": lambda module, batch: module(batch[0])}),
        (Thawed, {"source": "encoder"}),
        (Thawed, {"embed": "encoder"}),
        (Net, {"embed": lambda module, batch: module.embed(batch[0])}),
        (Net, {"embed": lambda module, batch: (module.embed(batch[0]), batch[1])}),
        (Maps, {}),
    ],
)
def test_ways_to_embed(make: Callable[[], Net], settings: dict[str, Any]) -> None:
    net = make()
    logged = validated(gap_monitor(**settings), net)
    assert {key: logged[key] for key in KEYS} == close(expected(net))


def test_a_data_module_may_know_the_training_set() -> None:
    class Data(LightningDataModule):
        def training_data_for_evaluation(self) -> Any:
            return Labelled(TRAINING, "labels")

        def val_dataloader(self) -> Any:
            return loader(VALIDATION)

    net, run = Embeds(), trainer(gap_monitor(training_data=None))
    run.validate(net, datamodule=Data(), verbose=False)
    wanted = expected(net)
    assert {key: float(run.callback_metrics[key]) for key in KEYS} == close(wanted)
    net, run = Embeds(), trainer(gap_monitor(training_data=lambda run: Labelled(TRAINING)))
    run.validate(net, loader(VALIDATION), verbose=False)
    assert {key: float(run.callback_metrics[key]) for key in KEYS} == close(expected(net))


def test_one_of_several_loaders() -> None:
    net = Embeds()
    loaders = [loader(items(seed=9)), loader(VALIDATION)]
    for which, given in (
        (1, loaders),
        ("dataloader_idx_1", loaders),
        ("hard", {"easy": loaders[0], "hard": loaders[1]}),
    ):
        logged = validated(gap_monitor(val_loader=which), net, given)
        assert {key: logged[key] for key in KEYS} == close(expected(net))
    with pytest.warns(UserWarning, match=r"val_loader=2\): there is no such loader; there are 'dataloader_idx_0'"):
        logged = validated(gap_monitor(val_loader=2, strict=False), net, loaders)
    assert all(math.isnan(logged[key]) for key in KEYS)


class Table:
    """Stands for a data set of Hugging Face: rows are mappings, a name gives a column."""

    def __init__(self, data: TensorDataset) -> None:
        self.columns = {"image": data.tensors[0], "label": data.tensors[1]}
        self.column_names = list(self.columns)

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key].tolist()
        return {name: column[key] for name, column in self.columns.items()}


def embed_either(module: Any, batch: Any) -> Any:
    """Of a table, or of a pair."""
    return (module(batch["image"]), batch["label"]) if isinstance(batch, dict) else (module(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("data", "embed"),
    [
        (TRAINING, None),
        (ConcatDataset([Subset(TRAINING, range(20)), Subset(TRAINING, range(20, len(TRAINING)))]), None),
        (Subset(ConcatDataset([TRAINING, VALIDATION]), range(len(TRAINING))), None),
        (Table(TRAINING), embed_either),
        (Table(TRAINING), None),  # the only entry beside the label is what the module is called with
        (Subset(Table(TRAINING), range(len(TRAINING))), embed_either),
    ],
    ids=["tensors", "parts", "subset of parts", "table", "mappings", "subset of a table"],
)
def test_training_data_of_any_kind(data: Any, embed: Any) -> None:
    net = Embeds()
    settings = {"labels": lambda batch: batch["label"] if isinstance(batch, dict) else batch[1]}
    logged = validated(gap_monitor(training_data=data, embed=embed, **settings), net)
    assert {key: logged[key] for key in KEYS} == close(expected(net))


# -------------------------------------------------------------------------------------------------------------- when


class Slow(Labelled):
    """Training data that notes in which epoch it is read, and takes 3 seconds."""

    def __init__(self, epoch: Callable[[], int], now: list[float]) -> None:
        super().__init__(TRAINING)
        self.epoch, self.now, self.epochs = epoch, now, Counter[int]()

    def __getitem__(self, index: int) -> Any:
        self.epochs[self.epoch()] += 1
        self.now[0] += 3 / len(self)
        return super().__getitem__(index)


@pytest.mark.parametrize(("every", "epochs"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_every_so_many_epochs(every: int, epochs: list[int]) -> None:
    data = Slow(lambda: run.current_epoch, [0.0])
    run = trainer(
        gap_monitor(training_data=data, every_n_epochs=every),
        max_epochs=4,
        num_sanity_val_steps=1,
        val_check_interval=0.5,
    )
    run.fit(Embeds(), loader(TRAINING), loader(VALIDATION))
    assert data.epochs == {epoch: 2 * len(data) for epoch in epochs}  # both validations of the epoch


def test_it_is_put_off_until_it_is_cheap_enough(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("fewshot_callbacks.callbacks._conduct.time.perf_counter", lambda: now[0])

    class TenSeconds(Embeds):
        def on_train_epoch_start(self) -> None:
            now[0] += 10.0

    data = Slow(lambda: run.current_epoch, now)
    # 3 s are less than 10 % of 33 s, and 6 s of 66 s
    run = trainer(gap_monitor(training_data=data, max_share=0.1), max_epochs=8)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        run.fit(TenSeconds(), loader(TRAINING), loader(VALIDATION))
    assert list(data.epochs) == [0, 2, 5]
    assert caplog.text.count("this has taken 3.0 s, 13% of the time; epochs are skipped until") == 1
    assert float(run.callback_metrics["gap/share_of_time"]) == pytest.approx(9 / 69)


def test_a_test_is_left_alone() -> None:
    assert trainer(gap_monitor()).test(Embeds(), loader(), verbose=False) == [{}]


# ------------------------------------------------------------------------------------------------------------- in words


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_overfitting_is_said_when_it_begins_and_ends(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    centres = torch.eye(40, 60)

    def points(noise: float) -> TensorDataset:
        labels = torch.arange(40).repeat_interleave(6)
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(centres[labels] + noise * torch.randn(240, 60, generator=generator), labels)

    class Fixed(LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            return x

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"embeddings": batch[0], "labels": batch[1]}

    good, bad = points(0.01), points(0.5)
    monitor = GeneralizationGapMonitor(training_data=lambda _: Labelled(good), max_share=None)
    run = trainer(monitor)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        for data, count in ((bad, 1), (bad, 1), (good, 2), (good, 2)):
            run.validate(Fixed(), DataLoader(data, batch_size=64), verbose=False)
            assert caplog.text.count("Grouped Recall@1 among 10 classes") == count
    assert "is beyond its 95% interval: overfitting" in caplog.text
    assert "within chance" in caplog.text


def test_uneven_classes_are_spoken_of_once() -> None:
    run = trainer(gap_monitor(training_data=Labelled(items(per_class=12, seed=1))), max_epochs=2)
    with pytest.warns(UserWarning, match="items each") as caught:
        run.fit(Embeds(), loader(), loader(VALIDATION))
    notes = [words for words in said(caught) if "items each" in words]
    assert len(notes) == 1
    assert "training classes hold 12.0 items each, validation classes 6.0" in notes[0]
    assert "items_per_class=6" in notes[0]


# ------------------------------------------------------------------------------------------------------------ bad input


class Scaled(Embeds):
    factor = 2.0

    def forward(self, points: Tensor) -> Tensor:
        return self.factor * self.embed(points)


def rolled(module: Any, batch: Any) -> Tensor:
    points: Tensor = batch[0]
    return points.roll(1, 1)[:, :5]


def test_embeddings_made_in_another_way_are_refused() -> None:
    assert not math.isnan(validated(gap_monitor(), Scaled())["gap/recall@1"])  # cosine does not see the length
    with pytest.raises(
        ValueError, match=r"Scaled.forward gives other embeddings than validation_step .*up to 1 of their"
    ):
        validated(gap_monitor(similarity="dot", strict=True), Scaled())
    with pytest.warns(UserWarning, match=r"gap/grouped_recall@1 and the other values of the gap are NaN.*Pass embed="):
        assert math.isnan(validated(gap_monitor(embed=rolled, strict=False), Embeds())["gap/recall@1"])
    with pytest.raises(ValueError, match=r"gives embeddings of shape \(11, 12\) for a batch of which .* \(11, 5\)"):
        validated(gap_monitor(embed="frozen", strict=True), Embeds())


def test_a_mismatch_that_the_sanity_check_finds_stays_one() -> None:
    run = trainer(gap_monitor(embed=rolled, strict=False), num_sanity_val_steps=1, max_epochs=2)
    with pytest.warns(UserWarning, match="gives other embeddings than validation_step"):
        run.fit(Embeds(), loader(TRAINING), loader(VALIDATION))
    assert math.isnan(float(run.callback_metrics["gap/recall@1"]))


def labelled(labels: Any) -> Dataset:
    data = Labelled(TRAINING)
    data.labels = labels
    return data


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"training_data": None}, "has no training set: pass training_data"),
        ({"training_data": TensorDataset(TRAINING.tensors[0])}, "TensorDataset has neither labels nor targets"),
        (
            {"training_data": labelled([1, 2])},
            "48 items, but 2 labels of training_data. Both must come",
        ),
        ({"training_data": labelled(torch.ones(48))}, "needs integer labels of training_data; got torch.float32"),
        ({"training_data": lambda run: 3}, "training_data gave a int"),
        ({"label_groups": 5}, "has no Grouped Recall"),
        ({"embed": lambda module, batch: None}, "the embeddings of embed are None"),
    ],
)
def test_what_is_wrong_is_said_and_the_fit_goes_on(settings: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(words)):
        logged = validated(gap_monitor(**settings, strict=False), Embeds())
    assert all(math.isnan(logged[key]) for key in KEYS)
    with pytest.raises(ValueError, match=re.escape(words)):
        validated(gap_monitor(**settings, strict=True), Embeds())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes": 15}, "classes=15 make fewer than two groups of label_groups=10"),
        ({"items_per_class": 0}, "items_per_class=0) must be at least 1"),
        ({"every_n_epochs": 0}, "every_n_epochs=0) must be at least 1"),
        ({"max_share": 1.5}, "max_share=1.5) is not a share between 0 and 1"),
        ({"prefix": ""}, "the keys need a first part"),
        ({"metrics": ()}, "metrics are empty"),
        ({"metrics": "recall@1"}, "a gap is one of Grouped Recall@k, with Recall@k of the same k beside it"),
        ({"metrics": ("grouped_recall@1", "recall@2")}, "Pass keys such as ('grouped_recall@1', 'recall@1')"),
        ({"label_groups": [[0, 1, 2], [3, 4, 5]]}, "cannot hold the classes of both sets"),
        ({"metrics": ("grouped_recall@10",)}, "the ranks of Grouped Recall, (10,), must lie below label_groups=10"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        GeneralizationGapMonitor(**settings)


def test_two_in_one_trainer_need_two_prefixes() -> None:
    with pytest.raises(ValueError, match=r"would log under the same keys, .*Give them different prefixes"):
        trainer(gap_monitor(), gap_monitor()).validate(Embeds(), loader(VALIDATION), verbose=False)
