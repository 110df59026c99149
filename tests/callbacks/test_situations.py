"""One real Trainer for each way of running one, and each logged value beside one that was computed by hand."""

from __future__ import annotations

import csv
import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, TrainingDynamicsMonitor
from fewshot_callbacks.functional import discriminant_ratio, evaluate_retrieval, generalization_gap
from tests.callbacks.models import (
    KEYS,
    SHOTS,
    TRAINING,
    VALIDATION,
    Embeds,
    EveryBatch,
    Labelled,
    Net,
    episodes,
    gap_monitor,
    items,
    loader,
    logged_by,
    measured,
    retrieval,
    said,
    trainer,
)
from tests.functional.variance import logged_by_definition

Embedding = Callable[[Tensor], Tensor]


def of_set(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """What the monitors of a set must log, without the prefix."""
    ratios = {"J": float(discriminant_ratio(embeddings, labels))} | logged_by_definition(embeddings, labels)
    return measured(embeddings, labels) | ratios


def gap_of(embed: Embedding, seen: int = 36) -> dict[str, float]:
    """What the gap monitor must log of the first so many validation items."""
    points, labels = (part[:seen] for part in VALIDATION.tensors)
    pairs = (embed(TRAINING.tensors[0]), TRAINING.tensors[1]), (embed(points), labels)
    reports = [evaluate_retrieval(*pair, label_groups=3, metrics=("grouped_recall@1", "recall@1")) for pair in pairs]
    return {f"gap/{name}": value for name, value in generalization_gap(*reports).metrics().items()}


def set_alone(embed: Embedding, seen: int = 36) -> dict[str, float]:
    """What the monitors of a set must log of the first so many validation items."""
    points, labels = (part[:seen] for part in VALIDATION.tensors)
    return {f"val/{name}": value for name, value in of_set(embed(points), labels).items()}


def everything(embed: Embedding, seen: int = 36) -> dict[str, float]:
    """What all three monitors must log of the first so many validation items."""
    return set_alone(embed, seen) | gap_of(embed, seen)


def close(values: dict[str, float]) -> Any:
    return pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True)


def in_batches(embed: Embedding) -> Embedding:
    """Rounds as a pass over batches of eleven does."""
    return lambda points: torch.cat([embed(part) for part in points.split(11)])


class ByHand(Callback):
    """At the end of each validation: what is logged, and what the weights of that moment give without a Trainer."""

    def __init__(self, seen: int = 36, expect: Callable[..., dict[str, float]] = everything) -> None:
        self.seen, self.expect = seen, expect
        self.logged: list[dict[str, float]] = []
        self.expected: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            assert isinstance(pl_module, Net)
            self.logged.append(logged_by(trainer))
            self.expected.append(
                self.expect(lambda points: pl_module.by_hand(TensorDataset(points, points))[0], self.seen)
            )


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


def monitors(**settings: Any) -> tuple[Callback, ...]:
    return retrieval(**settings), DiscriminantRatioMonitor(**settings), gap_monitor(**settings)


# ------------------------------------------------------------------------------------------------- when Lightning validates


@pytest.mark.filterwarnings("ignore:.*overfit_batches", "ignore:.*items each", "ignore:.*have no match")
@pytest.mark.parametrize(
    ("settings", "seen", "validations"),
    [
        ({"num_sanity_val_steps": -1}, 36, 2),
        ({"val_check_interval": 2}, 36, 4),
        ({"val_check_interval": 0.5}, 36, 4),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, 36, 2),
        ({"stream": True}, 36, 2),
        ({"stream": True, "limit_val_batches": 2}, 22, 2),
        ({"limit_val_batches": 1}, 11, 2),
        ({"limit_val_batches": 0.5}, 22, 2),
        ({"overfit_batches": 0.5}, 22, 2),
        ({"check_val_every_n_epoch": 2}, 36, 1),
        ({"accumulate_grad_batches": 3}, 36, 2),
        ({"fast_dev_run": True}, 11, 1),
        ({"fast_dev_run": 2}, 22, 1),
        ({"inference_mode": False}, 36, 2),
    ],
    ids=str,
)
def test_each_validation_measures_its_items_with_its_weights(
    settings: dict[str, Any], seen: int, validations: int
) -> None:
    """Also inside an epoch, and of data sets without a length."""
    inside = "val_check_interval" in settings
    by_hand = ByHand(seen, set_alone if inside else everything)
    chosen = {"max_epochs": 2} | {name: value for name, value in settings.items() if name != "stream"}
    loaders = [DataLoader(Stream(data), 11) if "stream" in settings else loader(data) for data in (items(), VALIDATION)]
    trainer(*monitors()[: 2 if inside else 3], by_hand, **chosen).fit(Embeds(), *loaders)
    assert len(by_hand.logged) == validations
    for logged, expected in zip(by_hand.logged, by_hand.expected, strict=True):
        assert logged == close(expected)
    assert len({expected["val/J"] for expected in by_hand.expected}) == validations


# --------------------------------------------------------------------------------------------------- what is validated


def test_a_combined_loader_in_sequence_is_several_sets() -> None:
    net, other = Embeds(), items(per_class=4, seed=4)
    run = trainer(retrieval(), DiscriminantRatioMonitor(), gap_monitor(val_loader="second"))
    run.validate(
        net, CombinedLoader({"first": loader(other), "second": loader(VALIDATION)}, "sequential"), verbose=False
    )
    expected = {
        f"val/{name}/{end}": value
        for end, data in (("first", other), ("second", VALIDATION))
        for name, value in of_set(*net.by_hand(data)).items()
    }
    expected |= gap_of(lambda points: net.by_hand(TensorDataset(points, points))[0])
    assert logged_by(run) == close(expected)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_a_combined_loader_that_draws_from_several_is_one_set(mode: str) -> None:
    class First(Net):
        """Embeds the first of two batches, as long as there is one."""

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch["first"], batch_idx)

    net = First()
    run = trainer(retrieval(), DiscriminantRatioMonitor())
    second = loader(items(per_class=4, seed=4))  # three batches, the other has four
    run.validate(net, CombinedLoader({"first": loader(VALIDATION), "second": second}, mode), verbose=False)
    seen = 33 if mode == "min_size" else 36
    points, labels = (part[:seen] for part in VALIDATION.tensors)
    expected = of_set(*net.by_hand(TensorDataset(points, labels)))
    assert logged_by(run) == close({f"val/{name}": value for name, value in expected.items()})


# ------------------------------------------------------------------------------------------------ precision and modules


class HalfInTheStep(Embeds):
    """Validates in half precision by itself, whatever the Trainer does."""

    def embed(self, points: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=not self.training):
            return super().embed(points)


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@pytest.mark.parametrize(
    ("precision", "autocast", "dtype"),
    [
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("16-mixed", torch.bfloat16, torch.float32),  # on the CPU Lightning takes the other half precision
        ("bf16-true", None, torch.bfloat16),
        ("16-true", None, torch.float16),
        ("64-true", None, torch.float64),
        ("fp16 in the step", torch.float16, torch.float32),
        ("a module in float64", None, torch.float64),
    ],
)
def test_embeddings_of_any_precision(precision: str, autocast: torch.dtype | None, dtype: torch.dtype) -> None:
    net = HalfInTheStep() if "step" in precision else Embeds()
    data, settings = [TRAINING, VALIDATION], {} if " " in precision else {"precision": precision}
    if "module" in precision:
        net = net.double()
        data = [TensorDataset(part.tensors[0].double(), part.tensors[1]) for part in data]
    batches, embedded = EveryBatch(), set()

    def noted(module: Embeds, batch: Any) -> Tensor:
        embeddings = module(batch[0])
        embedded.add(embeddings.dtype)
        return embeddings

    gap = gap_monitor(training_data=DataLoader(Labelled(data[0]), batch_size=11), embed=noted)
    run = trainer(retrieval(), DiscriminantRatioMonitor(), gap, batches, **settings)
    run.fit(net, loader(data[0]), loader(data[1]))
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    net.eval()

    def embed(points: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            return net.embed(points.to(dtype))

    assert embedded == {embed(VALIDATION.tensors[0]).dtype} == {autocast or dtype}
    assert logged_by(run) == close(everything(in_batches(embed)))
    assert batches.logged == pytest.approx(
        [float(discriminant_ratio(step["embeddings"], step["labels"])) for step in batches.outputs]
    )


class WithGradient(Embeds):
    @torch.enable_grad()
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        outputs = super().validation_step(batch, batch_idx)
        assert outputs["embeddings"].requires_grad
        return outputs


@pytest.mark.parametrize("source", [("embeddings", "labels"), "encoder"])
def test_embeddings_that_require_a_gradient_are_kept_without_it(source: Any) -> None:
    net, watched = WithGradient(), monitors(source=source)[:2]
    held: list[bool] = []

    class Watch(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            [store] = watched[0]._parts.stores.values()  # type: ignore[attr-defined]
            [moments] = watched[1]._moments.values()  # type: ignore[attr-defined]
            held.extend(batch.embeddings.requires_grad for batch in store._batches)
            held.append(moments.means.requires_grad)

    run = trainer(*watched, gap_monitor(source=source, embed=lambda m, b: m(b[0])), Watch(), inference_mode=False)
    run.fit(net, loader(), loader(VALIDATION))
    assert logged_by(run) == close(everything(lambda points: net.by_hand(TensorDataset(points, points))[0]))
    assert len(held) == 1 + 2 + 3 + 4 + 4
    assert not any(held)


# ------------------------------------------------------------------------------------------------------ compiled modules


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("what", "source", "backend"),
    [
        ("module", "encoder", "eager"),
        ("wrapped submodule", "encoder", "aot_eager"),
        ("submodule in place", "encoder", "eager"),
    ],
)
def test_a_compiled_module(what: str, source: Any, backend: str) -> None:
    net = Embeds()
    given = torch.compile(net, backend=backend) if what == "module" else net
    if what == "wrapped submodule":
        net.encoder = torch.compile(net.encoder, backend=backend)  # type: ignore[assignment]
    elif what == "submodule in place":
        net.encoder.compile(backend=backend)
    batches = EveryBatch()
    run = trainer(retrieval(source=source), DiscriminantRatioMonitor(source=source), gap_monitor(), batches)
    run.fit(given, loader(), loader(VALIDATION))

    def expected() -> dict[str, float]:
        return everything(lambda points: net.by_hand(TensorDataset(points, points))[0])

    assert logged_by(run) == close(expected())
    assert batches.logged == pytest.approx(
        [float(discriminant_ratio(step["embeddings"], step["labels"])) for step in batches.outputs]
    )
    again = trainer(retrieval(source=source))
    again.validate(given, loader(VALIDATION), verbose=False)
    assert again.callback_metrics["val/mAP"] == pytest.approx(expected()["val/mAP"], rel=1e-5)


class InEpisodes(Embeds):
    shots = SHOTS


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
@pytest.mark.parametrize("where", ["module", "encoder"])
def test_the_dynamics_of_a_compiled_module_are_those_of_a_plain_one(where: str) -> None:
    histories = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = InEpisodes()
        net.encoder[2].p = 0.0  # each backend draws dropout in its own order
        if compiled and where == "encoder":
            net.encoder = torch.compile(net.encoder, backend="aot_eager")  # type: ignore[assignment]
        monitor = TrainingDynamicsMonitor(every_n_steps=2, strict=True)
        given = torch.compile(net, backend="aot_eager") if compiled and where == "module" else net
        trainer(monitor).fit(given, episodes())
        histories.append(monitor.history)
    assert histories[0].steps == histories[1].steps == (2, 4, 6, 8)
    for name in ("alpha", "norm_ratio", "psi_con", "psi_div"):
        torch.testing.assert_close(histories[0].values(name), histories[1].values(name), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_fresh_compiler")
def test_code_that_was_compiled_before_a_monitor_listened_is_said_to_pass_it_by() -> None:
    net = Net()
    given = torch.compile(net, backend="eager")
    trainer().validate(given, loader(), verbose=False)
    with pytest.warns(
        UserWarning, match="did not call the submodule 'encoder'.*was compiled before.*compiler.reset"
    ) as w:
        trainer(retrieval(source="encoder", strict=False)).validate(given, loader(), verbose=False)
    assert len(said(w)) == 1
    torch.compiler.reset()  # as the message says
    [logged] = trainer(retrieval(source="encoder")).validate(given, loader(), verbose=False)
    assert logged == close({f"val/{name}": value for name, value in measured(*net.by_hand(items())).items()})


# ----------------------------------------------------------------------------------------------------- batches and labels

NUMBERS = {
    torch.int64: (2**62, 2**62 + 1, -(2**62), -1, 0, 7),
    torch.int32: (2**31 - 1, -(2**31), 2**24, 2**24 + 1, -1, 0),
    torch.int16: (2**15 - 1, -(2**15), 256, 0, -1, 1),
    torch.int8: (127, -128, 1, 0, -1, 64),
    torch.uint8: (255, 0, 128, 127, 1, 2),
    torch.bool: (1, 0, 0, 1, 1, 0),
}


class Renumbered(Net):
    """Its steps return labels of another type, under other numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.numbers = torch.tensor(NUMBERS[dtype], dtype=torch.int64).to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) | {"labels": self.numbers[(batch[1] + 7) // 10]}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx) | {"labels": self.numbers[(batch[1] + 7) // 10]}


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    net, batches = Renumbered(dtype), EveryBatch()
    run = trainer(retrieval(), DiscriminantRatioMonitor(), batches)
    run.fit(net, loader(), loader())
    embeddings, labels = net.by_hand(items())
    names = [NUMBERS[dtype].index(number) for number in NUMBERS[dtype]]  # by the first class of that number
    classes = torch.tensor(names)[(labels + 7) // 10]
    assert logged_by(run) == close({f"val/{name}": value for name, value in of_set(embeddings, classes).items()})
    one_by_one = [
        torch.tensor([names[NUMBERS[dtype].index(int(label))] for label in step["labels"]]) for step in batches.outputs
    ]
    assert batches.logged == pytest.approx(
        [float(discriminant_ratio(s["embeddings"], y)) for s, y in zip(batches.outputs, one_by_one, strict=True)]
    )


def test_labels_without_values_are_nan_and_one_warning_for_each_monitor() -> None:
    class Meta(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch, batch_idx) | {"labels": batch[1].to("meta")}

    run = trainer(retrieval(), DiscriminantRatioMonitor(), max_epochs=2)
    with pytest.warns(UserWarning, match="is a meta tensor") as warned:
        run.fit(Meta(), loader(), loader())
    of_map, of_j = sorted(said(warned), reverse=True)
    assert (
        "val/mAP and the other values of this set are NaN. RetrievalMonitor, validation_step: labels is a meta tensor"
        in of_map
    )
    assert (
        "val/J and the other values of this set are NaN. DiscriminantRatioMonitor, validation_step: labels is a meta tensor"
        in of_j
    )
    assert all(math.isnan(value) for value in logged_by(run).values())


@dataclass
class Batch:
    points: Tensor
    labels: Tensor


Named = namedtuple("Named", ["points", "labels"])


class Takes(Embeds):
    """Knows where its batches keep their parts; its steps return no labels."""

    def __init__(self, points_of: Callable[[Any], Tensor], labels_of: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.points_of, self.labels_of = points_of, labels_of

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step((self.points_of(batch), self.labels_of(batch)), batch_idx)
        return {"loss": outputs["loss"], "embeddings": outputs["embeddings"]}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": self.embed(self.points_of(batch))}


@pytest.mark.parametrize(
    ("make", "points_of", "labels_of", "labels"),
    [
        (lambda x, y: (x, y), lambda b: b[0], lambda b: b[1], None),
        (lambda x, y: (y, x, x), lambda b: b[2], lambda b: b[0], 0),
        (Named, attrgetter("points"), attrgetter("labels"), None),
        (lambda x, y: {"points": x, "labels": y}, lambda b: b["points"], lambda b: b["labels"], None),
        (lambda x, y: {"x": x, "y": y}, lambda b: b["x"], lambda b: b["y"], "y"),
        (lambda x, y: {"in": {"x": x}, "of": [y]}, lambda b: b["in"]["x"], lambda b: b["of"][0], lambda b: b["of"][0]),
        (Batch, attrgetter("points"), attrgetter("labels"), attrgetter("labels")),
    ],
    ids=["pair", "position", "named tuple", "mapping", "key", "nested", "dataclass"],
)
def test_batches_of_any_kind(make: Any, points_of: Any, labels_of: Any, labels: Any) -> None:
    def collate(rows: list[tuple[Tensor, Tensor]]) -> Any:
        return make(*(torch.stack(part) for part in zip(*rows, strict=True)))

    def batches_of(data: TensorDataset) -> DataLoader[Any]:
        return DataLoader(data, batch_size=11, collate_fn=collate)

    net, batches = Takes(points_of, labels_of), EveryBatch()
    gap = gap_monitor(
        training_data=batches_of(TRAINING),
        labels=labels,
        embed=lambda module, batch: module.embed(points_of(batch)),
    )
    run = trainer(retrieval(labels=labels), DiscriminantRatioMonitor(labels=labels), gap, batches)
    run.fit(net, batches_of(TRAINING), batches_of(VALIDATION))
    assert logged_by(run) == close(everything(lambda points: net.by_hand(TensorDataset(points, points))[0]))
    expected = zip((step["embeddings"] for step in batches.outputs), TRAINING.tensors[1].split(11), strict=True)
    assert batches.logged == pytest.approx([float(discriminant_ratio(*pair)) for pair in expected])


# -------------------------------------------------------------------------------------------------------------- loggers


@pytest.mark.parametrize("kinds", [(), (CSVLogger,), (CSVLogger, TensorBoardLogger)])
def test_every_logger_holds_every_value(kinds: tuple[type, ...], tmp_path: Path) -> None:
    loggers = [kind(tmp_path, name=kind.__name__) for kind in kinds]
    by_hand, batches = ByHand(), EveryBatch()
    run = trainer(*monitors(), by_hand, batches, max_epochs=2, logger=loggers, log_every_n_steps=1)
    run.fit(Embeds(), loader(), loader(VALIDATION))
    keys = [*KEYS, "val/mAP", "val/recall@1", "val/precision", "val/J"]
    assert by_hand.logged[0] == close(by_hand.expected[0])
    every = [float(discriminant_ratio(step["embeddings"], step["labels"])) for step in batches.outputs]
    for logger in loggers:
        assert logger.log_dir is not None
        written = in_csv(logger.log_dir) if isinstance(logger, CSVLogger) else in_events(logger.log_dir)
        for key in keys:
            assert written[key] == pytest.approx([by_hand.expected[i][key] for i in range(2)], rel=1e-5, abs=1e-6)
        assert written["train/J"][:3] == pytest.approx(every[:3], rel=1e-5)


def in_csv(folder: str) -> dict[str, list[float]]:
    with (Path(folder) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows if row[key]] for key in rows[0]}


def in_events(folder: str) -> dict[str, list[float]]:
    events = EventAccumulator(folder).Reload()
    return {key: [event.value for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


# ------------------------------------------------------------------------------------------------------------- resuming


class Steady(Embeds):
    """Draws dropout by the number of the step alone, and has an optimiser with a state: a resumed run can be the same."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*ended before the epoch ended", "ignore:.*callbacks used to create the checkpoint")
def test_a_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """From the end of an epoch, from a validation inside it, and from between two validations."""
    points, labels = items().tensors
    data = TensorDataset(points.repeat(4, 1), labels.repeat(4))  # four equal batches: a resumed epoch begins anew

    def run(*more: Callback, **settings: Any) -> tuple[ByHand, EveryBatch]:
        torch.manual_seed(0)
        seen, batches = ByHand(expect=set_alone), EveryBatch()
        made = trainer(*monitors()[:2], seen, batches, *more, max_epochs=3, val_check_interval=2)
        made.fit(Steady(), loader(data, batch_size=36), loader(VALIDATION), **settings)
        return seen, batches

    whole, steps = run(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    assert whole.logged == [close(values) for values in whole.expected]
    for step in (4, 2, 3):
        resumed, rest = run(ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        count = len(resumed.logged)
        assert (count, len(whole.logged)) == (6 - step // 2, 6)
        assert resumed.logged == [close(values) for values in whole.logged[-count:]]
        assert rest.logged == pytest.approx(steps.logged[step:])
