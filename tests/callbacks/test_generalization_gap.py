"""GeneralizationGapMonitor: its values equal the functions, training is not disturbed, the time limit is kept."""

import math
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
    log_of_validation,
    messages_of,
    trainer,
)
from tests.messages import missing_facts, refused, warned


def expected(net: Net, some: Any = slice(None), some_val: Any = slice(None), **settings: Any) -> dict[str, float]:
    settings = {"label_groups": 3, "metrics": ("grouped_recall@1", "recall@1")} | settings
    reports = [
        evaluate_retrieval(*(part[chosen] for part in net.by_hand(data)), **settings)
        for data, chosen in ((TRAINING, some), (VALIDATION, some_val))
    ]
    return {f"gap/{name}": value for name, value in generalization_gap(*reports).metrics().items()}


def test_what_is_logged_is_what_the_functions_say() -> None:
    net, monitor = Embeds(), gap_monitor(bank=DataLoader(Labelled(TRAINING), batch_size=47))
    logged = log_of_validation(monitor, net)
    assert 0 < logged.pop("gap/share_of_time") < 1
    assert set(logged) == KEYS
    assert logged == close(expected(net))
    assert monitor.gap is not None
    assert monitor.gap.classes == (6, 6)


def test_settings_are_handed_on_and_a_seeded_subset_is_read_and_nothing_else() -> None:
    net, data = Embeds(), Labelled(TRAINING)
    settings = {"label_groups": 2, "similarity": "euclidean", "ties": "optimistic", "seed": 5}
    monitor = gap_monitor(bank=data, classes=4, items_per_class=3, prefix="over", **settings)
    logged = log_of_validation(monitor, net)
    chosen, some_val = class_subset(TRAINING.tensors[1], 4, 3, 5), class_subset(VALIDATION.tensors[1], None, 3, 5)
    assert sorted(data.read) == chosen.tolist()
    logged.pop("over/share_of_time")
    wanted = expected(net, chosen, some_val, **settings)
    assert logged == close({key.replace("gap/", "over/"): value for key, value in wanted.items()})


class Thawed(Net):
    """Its encoder is given the points."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Identity()


class Maps(Net):
    """Its forward gives a mapping."""

    def forward(self, points: Tensor) -> Any:
        return {"embeddings": self.embed(points)}


class Data(LightningDataModule):
    """Knows the training set."""

    def training_data_for_evaluation(self) -> Any:
        return Labelled(TRAINING, "labels")

    def val_dataloader(self) -> Any:
        return loader(VALIDATION)


class Table:
    """Stands for a data set of Hugging Face: rows are mappings, a name gives a column."""

    def __init__(self, data: TensorDataset) -> None:
        self.columns = {"image": data.tensors[0], "label": data.tensors[1]}
        self.column_names = list(self.columns)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key].tolist()
        self.read.append(key)
        return {name: column[key] for name, column in self.columns.items()}


def embed_either(module: Any, batch: Any) -> Any:
    """Of a table, or of a pair."""
    return (module(batch["image"]), batch["label"]) if isinstance(batch, dict) else (module(batch[0]), batch[1])


def assert_that_of(net: Net, logged: Any) -> None:
    assert {key: float(logged[key]) for key in KEYS} == close(expected(net))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Embeds, {"source": "encoder", "embed": lambda module, batch: module(batch[0])}),
        (Thawed, {"source": "encoder"}),
        (Thawed, {"embed": "encoder"}),
        (Net, {"embed": lambda module, batch: (module.embed(batch[0]), batch[1])}),
        (Maps, {}),
    ],
)
def test_each_way_to_embed_gives_the_same_gap(make: Callable[[], Net], settings: dict[str, Any]) -> None:
    net = make()
    assert_that_of(net, log_of_validation(gap_monitor(**settings), net))


@pytest.mark.parametrize(
    ("data", "embed"),
    [
        (ConcatDataset([Subset(TRAINING, range(20)), Subset(TRAINING, range(20, len(TRAINING)))]), None),
        (Table(TRAINING), None),  # the only entry beside the label is what the module is called with
        (Subset(Table(TRAINING), range(len(TRAINING))), embed_either),
        (lambda run: Labelled(TRAINING), None),
    ],
    ids=["parts", "mappings", "subset of a table", "function"],
)
def test_a_bank_of_any_kind_gives_the_same_gap(data: Any, embed: Any) -> None:
    net = Embeds()
    settings = {"labels": lambda batch: batch["label"] if isinstance(batch, dict) else batch[1]}
    assert_that_of(net, log_of_validation(gap_monitor(bank=data, embed=embed, **settings), net))


class Counted(TensorDataset):
    """Counts what is read."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(int(index))
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("of", "parts"),
    [
        (Counted, lambda data: data),
        (Labelled, lambda data: data),
        (Table, lambda data: data),
        (Counted, lambda data: Subset(data, range(len(data)))),
        (Labelled, lambda data: Subset(data, range(len(data)))),
        (Table, lambda data: Subset(data, range(len(data)))),
        (Counted, lambda data: ConcatDataset([Subset(data, range(20)), Subset(data, range(20, len(data)))])),
        (Labelled, lambda data: ConcatDataset([Subset(data, range(20)), Subset(data, range(20, len(data)))])),
    ],
    ids=["tensors", "attribute", "table", *(f"subset of {kind}" for kind in ("tensors", "attribute", "table")),
         "parts of tensors", "parts of attribute"],
)  # fmt: skip
def test_labels_of_a_bank_are_found_without_reading_an_item(of: Any, parts: Any) -> None:
    """Only the items that are drawn are read, each once; and their labels are the right ones."""
    net, data = Embeds(), Counted(*TRAINING.tensors) if of is Counted else of(TRAINING)
    chosen, of_validation = class_subset(TRAINING.tensors[1], 4, 3, 0), class_subset(VALIDATION.tensors[1], None, 3, 0)
    settings = {"classes": 4, "items_per_class": 3, "label_groups": 2, "embed": embed_either}
    labels = {"labels": lambda batch: batch["label"] if isinstance(batch, dict) else batch[1]}
    logged = log_of_validation(gap_monitor(bank=parts(data), **settings, **labels), net)
    assert sorted(data.read) == chosen.tolist()
    logged.pop("gap/share_of_time")
    assert logged == close(expected(net, chosen, of_validation, label_groups=2))


def test_a_data_module_may_give_the_training_set() -> None:
    net, run = Embeds(), trainer(gap_monitor(bank="train"))
    run.validate(net, datamodule=Data(), verbose=False)
    assert_that_of(net, run.callback_metrics)


def test_one_of_several_loaders_is_compared() -> None:
    net, loaders = Embeds(), [loader(items(seed=9)), loader(VALIDATION)]
    assert_that_of(net, log_of_validation(gap_monitor(val_loader=1), net, loaders))
    assert_that_of(net, log_of_validation(gap_monitor(val_loader="hard"), net, dict(zip(("easy", "hard"), loaders))))  # noqa: B905
    with warned(UserWarning, "val_loader=2", "'dataloader_idx_0'", "'dataloader_idx_1'", "NaN"):
        logged = log_of_validation(gap_monitor(val_loader=2, strict=False), net, loaders)
    assert all(math.isnan(logged[key]) for key in KEYS)


def test_the_gap_skips_epochs_until_it_takes_less_than_its_share_of_time(monkeypatch, caplog) -> None:
    """3 s are less than 10 % of 33 s, and 6 s of 66 s."""
    now, epochs = [0.0], []
    monkeypatch.setattr("fewshot_callbacks.callbacks._conduct.time.perf_counter", lambda: now[0])

    class TenSeconds(Embeds):
        def on_train_epoch_start(self) -> None:
            now[0] += 10.0

    class Slow(Labelled):
        def __getitem__(self, index: int) -> Any:
            epochs.append(run.current_epoch)
            now[0] += 3 / len(self)
            return super().__getitem__(index)

    run = trainer(gap_monitor(bank=Slow(TRAINING), max_share=0.1), max_epochs=8)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        run.fit(TenSeconds(), loader(TRAINING, batch_size=48), loader(VALIDATION))
    assert Counter(epochs) == dict.fromkeys((0, 2, 5), len(TRAINING))
    facts = "GeneralizationGapMonitor", "3.0 s", "13%", "max_share=None"
    assert len([text for text in caplog.messages if not missing_facts(text, facts)]) == 1
    assert float(run.callback_metrics["gap/share_of_time"]) == pytest.approx(9 / 69)


def test_no_gap_is_measured_in_a_test() -> None:
    assert trainer(gap_monitor()).test(Embeds(), loader(), verbose=False) == [{}]


def test_overfitting_is_said_when_it_begins_and_ends(caplog: Any) -> None:
    def points(noise: float) -> TensorDataset:
        labels, generator = torch.arange(40).repeat_interleave(6), torch.Generator().manual_seed(0)
        return TensorDataset(torch.eye(40, 60)[labels] + noise * torch.randn(240, 60, generator=generator), labels)

    class Fixed(LightningModule):
        def forward(self, x: Tensor) -> Tensor:
            return x

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"embeddings": batch[0], "labels": batch[1]}

    good, bad = points(0.01), points(0.5)
    run = trainer(GeneralizationGapMonitor(bank=lambda _: Labelled(good), max_share=None))
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        for data, count in ((good, 0), (bad, 1), (bad, 1), (good, 2), (good, 2)):
            run.validate(Fixed(), DataLoader(data, batch_size=64), verbose=False)
            said = [text for text in caplog.messages if not missing_facts(text, ("gap", "Grouped Recall@1", 10))]
            assert len(said) == count
    begins, ends = said
    assert missing_facts(begins, ("overfitting", "95%")) == []
    assert missing_facts(ends, ("not significant", "95%")) == []


def test_uneven_classes_are_spoken_of_once() -> None:
    run = trainer(gap_monitor(bank=Labelled(items(per_class=12, seed=1))), max_epochs=2)
    with warned(UserWarning, "gap", "training", "12.0", "validation", "6.0", "items_per_class=6") as caught:
        run.fit(Embeds(), loader(), loader(VALIDATION))
    assert len(messages_of(caught, "items_per_class=6")) == 1


class Scaled(Embeds):
    def forward(self, points: Tensor) -> Tensor:
        return 2 * self.embed(points)


def test_embeddings_made_in_another_way_are_refused() -> None:
    assert not math.isnan(log_of_validation(gap_monitor(), Scaled())["gap/recall@1"])  # cosine does not see the length
    with refused(ValueError, "Scaled.forward", "validation_step", 1, "embed=..."):
        log_of_validation(gap_monitor(similarity="dot", strict=True), Scaled())
    with refused(ValueError, "'frozen'", "(11, 12)", "validation_step", "(11, 5)", "embed=..."):
        log_of_validation(gap_monitor(embed="frozen", strict=True), Embeds())


def test_a_mismatch_that_the_sanity_check_finds_stays_one() -> None:
    monitor = gap_monitor(embed=lambda module, batch: batch[0].roll(1, 1)[:, :5], strict=False)
    run = trainer(monitor, num_sanity_val_steps=1, max_epochs=2)
    with warned(UserWarning, "sanity check", "GeneralizationGapMonitor", "embed", "validation_step", "embed=..."):
        run.fit(Embeds(), loader(TRAINING), loader(VALIDATION))
    assert math.isnan(float(run.callback_metrics["gap/recall@1"]))


def labelled(labels: Any) -> Dataset:
    data = Labelled(TRAINING)
    data.labels = labels
    return data


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"bank": "train"}, ("bank=...", "training_data_for_evaluation()")),
        (
            {"bank": TensorDataset(TRAINING.tensors[0]), "classes": 6},
            ("TensorDataset", "labels", "targets", "dataset.labels = [...]"),
        ),
        ({"bank": labelled([1, 2]), "classes": 6}, ("GeneralizationGapMonitor(bank=...)", 48, 2)),
        (
            {"bank": labelled(torch.ones(48)), "classes": 6},
            ("GeneralizationGapMonitor(bank=...)", "integer", "torch.float32", "labels.long()"),
        ),
        (
            {"bank": Subset(labelled(torch.ones(48)), range(48)), "classes": 6},
            ("GeneralizationGapMonitor(bank=...)", "integer", "torch.float32", "labels.long()"),
        ),
        ({"bank": lambda run: 3}, ("bank", "int")),
        ({"label_groups": 5}, ("training", "Grouped Recall", "label_groups=5", 6)),
        ({"embed": lambda module, batch: None}, ("embed", "None", "tensor")),
    ],
)
def test_what_is_wrong_ends_a_strict_run(settings: dict[str, Any], facts: tuple[Any, ...]) -> None:
    with refused(ValueError, *facts):
        log_of_validation(gap_monitor(**settings, strict=True), Embeds())


@pytest.mark.parametrize("word", ["gallery", "self"])
def test_a_word_that_names_no_training_set_is_refused(word: str) -> None:
    with refused(ValueError, f"GeneralizationGapMonitor(bank='{word}')", "'train'", "data set", "loader"):
        gap_monitor(bank=word)


def test_too_few_classes_are_said_with_the_groups_that_were_asked_for() -> None:
    with refused(ValueError, "label_groups=5", 10, 6, "label_groups <= 3") as caught:
        log_of_validation(gap_monitor(label_groups=5, strict=True), Embeds())
    assert "'auto'" not in str(caught.value)
    assert str(caught.value).count("two groups of") == 1


def test_what_is_wrong_is_said_and_the_run_goes_on_if_it_is_not_strict() -> None:
    with warned(UserWarning, "gap/grouped_recall@1", "NaN", "GeneralizationGapMonitor", "bank=..."):
        logged = log_of_validation(gap_monitor(bank="train", strict=False), Embeds())
    assert all(math.isnan(logged[key]) for key in KEYS)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"classes": 15}, ("classes=15", "label_groups=10", "classes >= 20")),
        ({"items_per_class": 0}, ("items_per_class=0", 1)),
        ({"every_n_epochs": 0}, ("every_n_epochs=0", 1)),
        ({"prefix": ""}, ("prefix=''", "'gap'")),
        ({"metrics": "recall@1"}, ("metrics=('recall@1',)", "('grouped_recall@1', 'recall@1')")),
        (
            {"metrics": ("grouped_recall@1", "recall@2")},
            ("metrics=('grouped_recall@1', 'recall@2')", "('grouped_recall@1', 'recall@1')"),
        ),
        ({"label_groups": [[0, 1, 2], [3, 4, 5]]}, ("label_groups=[[0, 1, 2], [3, 4, 5]]", "classes", 10)),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], facts: tuple[Any, ...]) -> None:
    with refused(ValueError, "GeneralizationGapMonitor", *facts):
        GeneralizationGapMonitor(**settings)


def test_two_gap_monitors_in_one_trainer_need_two_prefixes() -> None:
    with refused(ValueError, "GeneralizationGapMonitors", "keys", "prefix='overfitting'"):
        trainer(gap_monitor(), gap_monitor()).validate(Embeds(), loader(VALIDATION), verbose=False)
