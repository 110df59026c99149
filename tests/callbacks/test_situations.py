"""One real Trainer per way of running it: the logged values equal the values by hand, and the right readers see them."""

import csv
import math
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingSource,
    KnnMonitor,
    RetrievalMonitor,
    TrainingDynamicsMonitor,
)
from fewshot_callbacks.callbacks import retrieval as retrieval_module
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks._sides import Side
from fewshot_callbacks.functional import evaluate_retrieval, generalization_gap
from tests.callbacks.models import (
    KEYS,
    SHOTS,
    TRAINING,
    VALIDATION,
    Embeds,
    EveryBatch,
    EveryEpoch,
    Labelled,
    Net,
    Returns,
    SaidBefore,
    Scripted,
    Stream,
    close,
    count_hooks,
    episodes,
    expected_metrics,
    expected_ratios,
    expected_ratios_of_batches,
    gap_monitor,
    items,
    loader,
    log_of_validation,
    logged_by,
    messages_of,
    retrieval,
    scripted,
    trainer,
    with_prefix,
)
from tests.messages import missing_facts, refused, warned

Embedding = Callable[[Tensor], Tensor]


def of_set(embeddings: Tensor, labels: Tensor, end: str = "") -> dict[str, float]:
    """What the monitors of a set must log."""
    return with_prefix(expected_metrics(embeddings, labels) | expected_ratios(embeddings, labels), end=end)


def everything(embed: Embedding, seen: int = 36, gap: bool = True) -> dict[str, float]:
    """What the monitors must log of the first so many validation items, with the gap or without."""
    points, labels = (part[:seen] for part in VALIDATION.tensors)
    pairs = (embed(TRAINING.tensors[0]), TRAINING.tensors[1]), (embed(points), labels)
    if not gap:
        return of_set(*pairs[1])
    reports = [evaluate_retrieval(*pair, label_groups=3, metrics=("grouped_recall@1", "recall@1")) for pair in pairs]
    return with_prefix(generalization_gap(*reports).metrics(), "gap") | of_set(*pairs[1])


def near(values: dict[str, float]) -> Any:
    """The gap is the difference of two values that were rounded."""
    return close(values, abs=1e-6)


def embedding(net: Net) -> Embedding:
    """How a module embeds without a Trainer."""
    return lambda points: net.by_hand(TensorDataset(points, points))[0]


class ByHand(Callback):
    """At the end of each validation: what is logged, and what the weights of that moment give without a Trainer."""

    def __init__(self, seen: int = 36, gap: bool = True) -> None:
        self.seen, self.gap = seen, gap
        self.logged: list[dict[str, float]] = []
        self.expected: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            assert isinstance(pl_module, Net)
            self.logged.append(logged_by(trainer))
            self.expected.append(everything(embedding(pl_module), self.seen, self.gap))


def monitors(**settings: Any) -> tuple[Callback, ...]:
    return retrieval(**settings), DiscriminantRatioMonitor(**settings), gap_monitor(**settings)


@pytest.mark.filterwarnings("ignore:.*overfit_batches", "ignore:.*items_per_class=", r"ignore:.*\d+ of \d+ queries")
@pytest.mark.parametrize(
    ("settings", "seen", "validations"),
    [
        ({"num_sanity_val_steps": -1, "accumulate_grad_batches": 3, "inference_mode": False}, 36, 2),
        ({"val_check_interval": 2}, 36, 4),
        ({"val_check_interval": 0.5, "limit_val_batches": 1}, 11, 4),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 0.5}, 22, 2),
        ({"stream": True}, 36, 2),
        ({"overfit_batches": 0.5}, 22, 2),
        ({"check_val_every_n_epoch": 2}, 36, 1),
        ({"fast_dev_run": True}, 11, 1),
        ({"fast_dev_run": 2, "stream": True}, 22, 1),
    ],
    ids=str,
)
def test_each_validation_measures_its_items_with_its_weights(settings: dict, seen: int, validations: int) -> None:
    """Also inside an epoch, and of data sets without a length."""
    inside = "val_check_interval" in settings
    by_hand = ByHand(seen, gap=not inside)
    chosen = {"max_epochs": 2} | {name: value for name, value in settings.items() if name != "stream"}
    loaders = [DataLoader(Stream(data), 11) if "stream" in settings else loader(data) for data in (items(), VALIDATION)]
    trainer(*monitors()[: 2 if inside else 3], by_hand, **chosen).fit(Embeds(), *loaders)
    assert len(by_hand.logged) == validations
    for logged, expected in zip(by_hand.logged, by_hand.expected, strict=True):
        assert logged == near(expected)
    assert len({expected["val/J"] for expected in by_hand.expected}) == validations


def test_a_combined_loader_in_sequence_is_several_sets() -> None:
    net, other = Embeds(), items(per_class=4, seed=4)
    loaders = CombinedLoader({"first": loader(other), "second": loader(VALIDATION)}, "sequential")
    logged = log_of_validation((*monitors()[:2], gap_monitor(val_loader="second")), net, loaders)
    gap = {key: value for key, value in everything(embedding(net)).items() if key.startswith("gap")}
    sets = of_set(*net.by_hand(other), end="/first") | of_set(*net.by_hand(VALIDATION), end="/second")
    assert logged.pop("gap/share_of_time") > 0
    assert logged == near(sets | gap)


@pytest.mark.parametrize(("mode", "seen"), [("min_size", 33), ("max_size", 36)])
def test_a_combined_loader_that_draws_from_several_is_one_set(mode: str, seen: int) -> None:
    class First(Net):
        """Embeds the first of two batches, as long as there is one."""

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch["first"], batch_idx)

    net, second = First(), loader(items(per_class=4, seed=4))  # three batches, the other has four
    logged = log_of_validation(
        monitors()[:2], net, CombinedLoader({"first": loader(VALIDATION), "second": second}, mode)
    )
    assert logged == near(everything(embedding(net), seen, gap=False))


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
def test_embeddings_of_any_precision_are_measured(
    precision: str, autocast: torch.dtype | None, dtype: torch.dtype
) -> None:
    net = HalfInTheStep() if "step" in precision else Embeds()
    data, settings = [TRAINING, VALIDATION], {} if " " in precision else {"precision": precision}
    if "module" in precision:
        net = net.double()
        data = [TensorDataset(part.tensors[0].double(), part.tensors[1]) for part in data]
    batches, embedded, kept = EveryBatch(), set(), set()

    class Looks(Callback):
        def on_validation_epoch_end(self, *_: Any) -> None:
            store = pair[0]._collection._items.store(Side(0))  # type: ignore[attr-defined]
            kept.add(store.shard().embeddings.dtype)

    def noted(module: Embeds, batch: Any) -> Tensor:
        embeddings = module(batch[0])
        embedded.add(embeddings.dtype)
        return embeddings

    gap = gap_monitor(bank=DataLoader(Labelled(data[0]), batch_size=11), embed=noted)
    pair = monitors()[:2]
    run = trainer(Looks(), *pair, gap, batches, **settings)
    run.fit(net, loader(data[0]), loader(data[1]))
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}
    net.eval()

    def embed(points: Tensor) -> Tensor:  # rounds as a pass over batches of eleven does
        with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            return torch.cat([net.embed(part.to(dtype)) for part in points.split(11)])

    assert kept == embedded == {embed(VALIDATION.tensors[0]).dtype} == {autocast or dtype}
    assert logged_by(run) == near(everything(embed))
    assert batches.logged == pytest.approx(expected_ratios_of_batches(batches))


class WithGradient(Embeds):
    @torch.enable_grad()
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        outputs = super().validation_step(batch, batch_idx)
        assert outputs["embeddings"].requires_grad
        return outputs


@pytest.mark.parametrize("source", [("embeddings", "labels"), "encoder"])
def test_embeddings_are_kept_without_their_gradient_and_dropped_when_they_are_measured(source: Any) -> None:
    net, watched = WithGradient(), monitors(source=source)[:2]
    held: list[int] = []

    class Watch(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            store = watched[0]._collection._items.store(Side(0))  # type: ignore[attr-defined]
            [moments] = watched[1]._moments.values()  # type: ignore[attr-defined]
            assert not moments.means.requires_grad
            assert not store.shard().embeddings.requires_grad
            held.append(len(store))

        def on_validation_end(self, *_: Any) -> None:
            collection = watched[0]._collection  # type: ignore[attr-defined]
            held.append(len(collection._items) + len(watched[1]._moments))  # type: ignore[attr-defined]

    gap = gap_monitor(source=source, embed=lambda m, b: m(b[0]))
    logged = log_of_validation((*watched, gap, Watch()), net, inference_mode=False)
    assert logged.pop("gap/share_of_time") > 0
    assert logged == near(everything(embedding(net)))
    assert held == [11, 22, 33, 36, 0]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("what", ["module", "wrapped submodule", "submodule in place"])
def test_a_compiled_module_is_measured_as_a_plain_one(what: str) -> None:
    net = Embeds()
    given = torch.compile(net, backend="eager") if what == "module" else net
    if what == "wrapped submodule":
        net.encoder = torch.compile(net.encoder, backend="aot_eager")  # type: ignore[assignment]
    elif what == "submodule in place":
        net.encoder.compile(backend="eager")
    batches, of_source = EveryBatch(), (retrieval(source="encoder"), DiscriminantRatioMonitor(source="encoder"))
    run = trainer(*of_source, gap_monitor(), batches)
    run.fit(given, loader(), loader(VALIDATION))
    expected = everything(embedding(net))
    assert logged_by(run) == near(expected)
    assert batches.logged == pytest.approx(expected_ratios_of_batches(batches))
    assert log_of_validation(of_source[0], given)["val/mAP"] == pytest.approx(
        expected["val/mAP"], rel=1e-5
    )  # and again


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_the_dynamics_of_a_compiled_module_are_those_of_a_plain_one() -> None:
    histories = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Embeds()
        net.shots = SHOTS
        net.encoder[2].p = 0.0  # each backend draws dropout in its own order
        monitor = TrainingDynamicsMonitor(every_n_steps=2, strict=True)
        trainer(monitor).fit(torch.compile(net, backend="aot_eager") if compiled else net, episodes())
        histories.append(monitor.history)
    assert histories[0].steps == histories[1].steps == (2, 4, 6, 8)
    for name in ("alpha", "norm_ratio", "psi_con", "psi_div"):
        torch.testing.assert_close(histories[0].values(name), histories[1].values(name), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_fresh_compiler")
def test_code_that_was_compiled_before_a_monitor_listened_is_said_to_pass_it_by() -> None:
    net = Net()
    given = torch.compile(net, backend="eager")
    trainer().validate(given, loader(), verbose=False)
    facts = "RetrievalMonitor", "validation_step", "'encoder'", "compiled", "torch.compiler.reset()"
    with warned(UserWarning, *facts) as caught:
        log_of_validation(retrieval(source="encoder", strict=False), given)
    assert len(messages_of(caught)) == 1
    torch.compiler.reset()  # as the message asks
    assert log_of_validation(retrieval(source="encoder"), given) == close(
        with_prefix(expected_metrics(*net.by_hand(VALIDATION)))
    )


@pytest.mark.filterwarnings("ignore:.*needs three; the set has 2")  # of bool
def test_labels_of_any_integer_type_are_told_apart() -> None:
    (points, labels), net = VALIDATION.tensors, Net()
    numbers = {
        torch.int64: [2**62, 2**62 + 1, -(2**62), -1, 0, 7],
        torch.int32: [2**31 - 1, -(2**31), 2**24, 2**24 + 1, -1, 0],
        torch.int16: [2**15 - 1, -(2**15), 256, 0, -1, 1],
        torch.int8: [127, -128, 1, 0, -1, 64],
        torch.uint8: [255, 0, 128, 127, 1, 2],
        torch.bool: [1, 0, 0, 1, 1, 0],
    }
    loaders, expected = {}, {}
    for dtype, each in numbers.items():
        loaders[str(dtype)] = loader(TensorDataset(points, torch.tensor(each).to(dtype)[(labels + 7) // 10]))
        same = torch.tensor([each.index(number) for number in each])[(labels + 7) // 10]
        expected |= of_set(*net.by_hand(TensorDataset(points, same)), end=f"/{dtype}")
    assert log_of_validation(monitors()[:2], net, loaders) == near(expected)


def test_labels_without_values_are_nan_and_one_warning_for_each_monitor() -> None:
    net = Returns(lambda net, x, y: {"embeddings": net(x), "labels": y.to("meta")})
    run = trainer(*monitors()[:2], max_epochs=2)
    facts = "NaN", "RetrievalMonitor", "DiscriminantRatioMonitor", "validation_step", "labels", "meta"
    with warned(UserWarning, *facts) as caught:
        run.fit(net, loader(), loader())
    of_j, of_map = sorted(messages_of(caught))
    assert missing_facts(of_j, ("val/J", *facts)) == missing_facts(of_map, ("val/mAP", *facts)) == []
    assert all(math.isnan(value) for value in logged_by(run).values())


@pytest.mark.parametrize("kinds", [(), ("csv",), ("events",), ("csv", "events")], ids="+".join)
def test_every_logger_holds_every_value(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """No logger, a file of tables, TensorBoard, or both: the values are those that other callbacks see."""
    made = {"csv": CSVLogger(tmp_path, name="csv"), "events": TensorBoardLogger(tmp_path, name="events")}
    loggers = [made[kind] for kind in kinds]
    by_hand, batches = ByHand(), EveryBatch()
    run = trainer(*monitors(), by_hand, batches, max_epochs=2, logger=loggers or False, log_every_n_steps=1)
    run.fit(Embeds(), loader(), loader(VALIDATION))
    assert by_hand.logged == [near(values) for values in by_hand.expected]
    assert batches.logged == pytest.approx(expected_ratios_of_batches(batches), rel=1e-5)
    written = {}
    if "csv" in kinds:
        with (Path(made["csv"].log_dir) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        written["csv"] = {key: [float(row[key]) for row in rows if row[key]] for key in rows[0]}
    if "events" in kinds:
        events = EventAccumulator(made["events"].log_dir).Reload()
        scalars = events.Tags()["scalars"]
        written["events"] = {key: [event.value for event in events.Scalars(key)] for key in scalars}
    assert tuple(written) == kinds
    for values in written.values():
        for key in (*KEYS, "val/mAP", "val/recall@1", "val/pair_precision", "val/J"):
            assert values[key] == pytest.approx([by_hand.expected[i][key] for i in range(2)], rel=1e-5, abs=1e-6)
        assert values["train/J"] == pytest.approx(expected_ratios_of_batches(batches), rel=1e-5)


class Steady(Embeds):
    """Draws dropout by the number of the step alone, and has an optimiser with a state: a resumed run can be the same."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*ended before the epoch ended", "ignore:.*callbacks used to create the checkpoint")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_a_resumed_run_logs_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """From the end of an epoch, from a validation inside it, and from between two; and checkpoints know the best."""
    points, labels = items().tensors
    data = TensorDataset(points.repeat(4, 1), labels.repeat(4))  # four equal batches: a resumed epoch begins anew

    def run(*more: Callback, **settings: Any) -> tuple[ByHand, EveryBatch, float]:
        torch.manual_seed(0)
        best = ModelCheckpoint(tmp_path / "best", monitor="val/J", mode="max")
        seen, batches = ByHand(gap=False), EveryBatch()
        monitors = retrieval(), DiscriminantRatioMonitor(every_n_steps=3)
        made = trainer(*monitors, seen, batches, best, *more, max_epochs=2, val_check_interval=2)
        made.fit(Steady(), loader(data, batch_size=36), loader(VALIDATION), **settings)
        return seen, batches, float(best.best_model_score)

    whole, steps, best = run(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    assert whole.logged == [near(values) for values in whole.expected]
    assert best == pytest.approx(max(values["val/J"] for values in whole.logged))
    for step in (4, 2, 3):
        resumed, rest, best = run(ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        reached = [values["val/J"] for i, values in enumerate(whole.logged) if 2 * (i + 1) != step]
        assert best == pytest.approx(max(reached))  # of what has been validated before and since
        count = len(resumed.logged)
        assert (count, len(whole.logged)) == (4 - step // 2, 4)
        assert resumed.logged == [near(values) for values in whole.logged[-count:]]
        due = [number for number in range(step + 1, 9) if number % 3 == 0]  # every third batch, counted over both runs
        assert due
        measured = [rest.logged[number - step - 1] for number in due]
        assert measured == pytest.approx([steps.logged[number - 1] for number in due])


def quality_to_map(quality: float) -> float:
    points, labels = items().tensors
    return expected_metrics(scripted(points, labels, quality), labels)["mAP"]


def is_clean(net: Net, *monitors: Any) -> bool:
    """No hook, no embeddings, nothing expected."""
    return count_hooks(net) == 0 and not any(
        monitor._collection.reader.capture.calls
        or monitor._own_errors
        or monitor._collection._items
        or getattr(monitor, "_moments", None)
        for monitor in monitors
    )


QUALITY = [0.0, 0.6, 4.0, 0.3]
MAPS = [quality_to_map(quality) for quality in QUALITY]


@pytest.mark.parametrize("monitor_last", [True, False])
def test_checkpoints_keep_the_best_epoch_and_a_fit_stops_after_it(tmp_path: Path, monitor_last: bool) -> None:
    best, epochs = ModelCheckpoint(tmp_path, monitor="val/mAP", mode="max", filename="{epoch}"), EveryEpoch()
    stopping = EarlyStopping("val/mAP", mode="max", patience=1)
    callbacks = [best, stopping, retrieval(), epochs] if monitor_last else [retrieval(), best, stopping, epochs]
    trainer(*callbacks, max_epochs=5).fit(Scripted([*QUALITY, 0.3]), loader(), loader())
    assert stopping.stopped_epoch == 3
    assert epochs.values == pytest.approx(MAPS, rel=1e-6)
    assert Path(best.best_model_path).name == "epoch=2.ckpt"
    assert float(best.best_model_score) == 1.0


def test_validate_and_test_after_fit_look_at_the_loaders_they_are_given() -> None:
    net, other = Net(), items(per_class=4, seed=4)
    monitors = retrieval(), DiscriminantRatioMonitor()
    run = trainer(*monitors)
    run.fit(net, loader(), [loader(), loader()])
    assert "val/mAP/dataloader_idx_1" in run.callback_metrics
    [values] = run.validate(net, loader(other), verbose=False)
    [tested] = run.test(net, loader(other), verbose=False)
    expected = expected_metrics(*net.by_hand(other)) | expected_ratios(*net.by_hand(other))
    assert values == close(with_prefix(expected))
    assert tested == close(with_prefix(expected, "test"))
    assert set(monitors[0].reports) == {""}
    assert is_clean(net, *monitors)


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
@pytest.mark.parametrize("settings", [{}, {"limit_val_batches": 0}], ids=str)
def test_a_monitor_that_is_never_validated_does_no_harm(settings: dict[str, Any]) -> None:
    net = Net()
    monitors = RetrievalMonitor(source="encoder"), DiscriminantRatioMonitor(source="encoder", every_n_steps=None)
    held: list[bool] = []

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            collections = [monitor._collection for monitor in monitors]
            readers = [*(collection.reader for collection in collections), monitors[1]._training_reader]
            held.append(any(reader.capture.calls for reader in readers) or any(one._items for one in collections))

    run = trainer(*monitors, Watch(), **settings)
    run.fit(net, loader(), loader() if settings else None)
    assert held == [False] * 4
    assert not [key for key in run.callback_metrics if key.startswith("val/")]
    assert is_clean(net, *monitors)


@pytest.mark.parametrize("steps", [2, -1])
def test_the_sanity_check_measures_nothing(steps: int) -> None:
    epochs = EveryEpoch()
    seen: list[set[str]] = []

    class AtStart(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append({*trainer.callback_metrics, *trainer.progress_bar_metrics, *monitors[0].reports})

    monitors = retrieval(), DiscriminantRatioMonitor()
    trainer(*monitors, epochs, AtStart(), num_sanity_val_steps=steps).fit(Scripted([0.6]), loader(), loader())
    assert seen == [set()]
    assert epochs.values == pytest.approx([quality_to_map(0.6)])  # and nothing of the sanity check is left in it


@pytest.mark.parametrize("monitor", [retrieval, DiscriminantRatioMonitor])
def test_the_sanity_check_shows_what_cannot_be_measured_and_says_it_once(monitor: Callable[..., Any]) -> None:
    useless = Returns(lambda net, x, y: {"loss": x.mean()})
    facts = "sanity check", type(monitor()).__name__, "validation_step", "'loss'", "'embeddings'"
    with warned(UserWarning, *facts) as caught:
        trainer(monitor(strict=False), num_sanity_val_steps=1, max_epochs=2).fit(useless, loader(), loader())
    assert len(messages_of(caught)) == 1


def test_a_submodule_that_cannot_be_read_fills_no_memory_while_training() -> None:
    """After a failed validation nobody reads what the submodule returns in the steps of the training."""
    net, monitor = Net(), retrieval(source=EmbeddingSource("encoder", labels="nowhere"), strict=False)
    kept: list[Any] = []
    net.classifier.register_forward_pre_hook(lambda *_: kept.append(count_hooks(net)))
    with warned(UserWarning, "val/mAP", "NaN", "labels='nowhere'", "batch", "list", 2):
        trainer(monitor, max_epochs=2).fit(net, loader(), loader())
    assert kept == [0] * 8


def test_an_interrupted_evaluation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    net, monitors = Net(), (retrieval(source="encoder"), DiscriminantRatioMonitor(source="encoder"))
    run, ctrl_c = trainer(*monitors), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(retrieval_module, "evaluate_retrieval", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit):
        run.fit(net, loader(), loader())
    signal.signal(signal.SIGINT, ctrl_c)  # which Lightning ignores once it has seen one
    assert is_clean(net, *monitors)
    monkeypatch.undo()
    [logged] = run.validate(net, loader(), verbose=False)  # and both can be used again
    assert logged["val/mAP"] == pytest.approx(expected_metrics(*net.by_hand(items()))["mAP"], rel=1e-5)


def test_a_validation_drops_what_an_aborted_one_has_left() -> None:
    """The error is caught inside the run: no hook tells the monitors of it."""
    net, monitors = Net(), (retrieval(source="encoder"), KnnMonitor(1, "self", source="encoder"))
    errors = [RuntimeError("no memory")]

    class Aborts(Callback):
        def on_validation_batch_start(self, _: Any, __: Any, ___: Any, batch_idx: int, *____: Any) -> None:
            if batch_idx == 1 and errors:
                raise errors.pop()

    run = trainer(*monitors, Aborts())
    validate = run.validate_loop.run

    def validate_twice() -> Any:
        with pytest.raises(RuntimeError, match="no memory"):
            validate()
        return validate()

    run.validate_loop.run = validate_twice  # type: ignore[method-assign]
    run.validate(net, loader(), verbose=False)
    assert float(run.callback_metrics["val/mAP"]) == near(expected_metrics(*net.by_hand(items()))["mAP"])
    assert is_clean(net, *monitors)


def test_an_unexpected_error_of_the_evaluation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = MemoryError("cannot allocate 12 GiB")
    monkeypatch.setattr(retrieval_module, "evaluate_retrieval", mock.Mock(side_effect=error))
    run = trainer(retrieval())
    with warned(UserWarning, "val/mAP", "NaN", "MemoryError: cannot allocate 12 GiB"):
        run.fit(Net(), loader(), loader())
    assert math.isnan(run.callback_metrics["val/mAP"])


@pytest.mark.parametrize(
    ("kind", "key", "names", "meant"),
    [
        (ModelCheckpoint, "val/map", (), "val/mAP"),
        (EarlyStopping, "val/recall_1", (), "val/recall@1"),
        ("ReduceLROnPlateau", "val/j", (), "val/J"),
        (ModelCheckpoint, "val/mAP", ("sketches", "photos"), "val/mAP/photos"),
        (EarlyStopping, "val/mAP/dataloader_idx_0", (), "val/mAP"),
    ],
)
@pytest.mark.parametrize("strict", [None, True])
def test_a_misspelt_key_is_told_at_the_sanity_check(
    kind: Any, key: str, names: tuple[str, ...], meant: str, strict: bool | None, tmp_path: Path
) -> None:
    """A warning, since training may log the key; an error if the monitor is strict, in any place of the list."""
    waiting, net, batches, before = [], Net(), EveryBatch(), SaidBefore()
    if isinstance(kind, str):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = {"scheduler": getattr(torch.optim.lr_scheduler, kind)(optimizer), "monitor": key}
        net.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": scheduler}
    else:
        waiting = [kind(monitor=key)]
    monitors = DiscriminantRatioMonitor(), retrieval(strict=strict)
    run = trainer(*waiting, *monitors, batches, before, default_root_dir=tmp_path, num_sanity_val_steps=1)
    facts = f"{getattr(kind, '__name__', kind)}(monitor={key!r})", "Did you mean", repr(meant)
    validation = {name: loader() for name in names} or loader()
    if strict:
        with refused(UsageError, *facts):
            run.fit(net, loader(), validation)
        assert not batches.outputs
        return
    refusal_of_lightning = pytest.raises((MisconfigurationException, RuntimeError), match=re.escape(key))
    with warnings.catch_warnings(record=True) as before.caught, refusal_of_lightning:
        warnings.simplefilter("always")
        run.fit(net, loader(), validation)
    assert batches.outputs
    [words] = [words for words in before.said if "Did you mean" in words]
    assert missing_facts(words, facts) == []
    assert len(messages_of(before.caught, "Did you mean")) == 1


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.filterwarnings(r"ignore:ModelCheckpoint\(monitor='val/map'\)")
def test_a_key_that_the_module_logs_itself_is_its_own_affair(sanity_steps: int, tmp_path: Path) -> None:
    class Loud(Net):
        """Logs a key of its own that looks like one of the monitor's."""

        def on_validation_epoch_end(self) -> None:
            self.log("val/map", 0.5)

    best = ModelCheckpoint(tmp_path, monitor="val/map", mode="max")
    trainer(best, retrieval(), num_sanity_val_steps=sanity_steps).fit(Loud(), loader(), loader())
    assert best.best_model_score == 0.5


@pytest.mark.parametrize(("key", "meant"), [("val/map", "val/mAP"), ("val/grouped_recal", "val/grouped_recall@1")])
@pytest.mark.parametrize("strict", [None, True])
def test_what_may_still_be_logged_is_a_warning(key: str, meant: str, strict: bool | None) -> None:
    """Without a sanity check nobody knows what the module logs; a key that is only similar may be another callback's."""
    early = EarlyStopping(monitor=key, strict=False)
    facts = f"EarlyStopping(monitor='{key}')", f"'{meant}'"
    before = SaidBefore()
    run = trainer(early, retrieval(label_groups=3, strict=strict), before, num_sanity_val_steps=int(key != "val/map"))
    with warned(UserWarning, *facts) as before.caught:
        run.fit(Net(), loader(), loader())
    [said] = before.said
    assert missing_facts(said, facts) == []


def test_keys_that_exist_or_that_nobody_knows_pass_in_silence() -> None:
    keys = "val/mAP", "val/J", "val/variance_ratio_low", "train/J", "val/loss", "val/acc", "val/auc", "val/top1"
    waiting = [EarlyStopping(monitor=key, mode="max", strict=False) for key in keys]
    waiting.append(EarlyStopping(monitor="gap/recall@1", strict=False))
    run = trainer(*waiting, retrieval(), DiscriminantRatioMonitor(), gap_monitor(), num_sanity_val_steps=1)
    run.fit(Embeds(), loader(), loader())  # warnings are errors here


def test_a_metric_that_needs_more_classes_has_no_key_and_one_notice() -> None:
    """Also where a later validation fails; NaN in every table would say nothing."""
    run = trainer(RetrievalMonitor(label_groups=10), max_epochs=3)
    facts = "val", "Grouped Recall", "label_groups=10", 20, 6, "label_groups <= 3"
    with warned(UserWarning, "val/mAP", "NaN"), warned(UserWarning, *facts) as caught:
        run.fit(Scripted([0.6, 0.6, math.nan]), loader(), loader())
    assert len(messages_of(caught, "Grouped Recall")) == 1
    assert not [key for key in run.callback_metrics if "grouped" in key]
    assert math.isnan(run.callback_metrics["val/mAP"])


def test_by_default_few_classes_have_no_grouped_recall_and_no_notice() -> None:
    run = trainer(RetrievalMonitor())
    run.fit(Net(), loader(), loader())  # warnings are errors here
    assert not [key for key in run.callback_metrics if "grouped" in key]
    assert float(run.callback_metrics["val/mAP"]) > 0


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "EarlyStopping", "ReduceLROnPlateau"])
def test_who_monitors_a_metric_that_needs_more_classes_is_told(kind: str, tmp_path: Path) -> None:
    net, key = Net(), "val/grouped_recall@1"
    best = ModelCheckpoint(tmp_path, monitor=key, mode="max")
    waiting = {"ModelCheckpoint": [best], "EarlyStopping": [EarlyStopping(monitor=key, mode="max")]}.get(kind, [])
    if not waiting:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scheduler = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max"), "monitor": key}
        net.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": scheduler}  # type: ignore[method-assign]
    with refused(UsageError, f"{kind}(monitor='{key}')", "classes", 20, 6, "label_groups") as caught:
        trainer(*waiting, RetrievalMonitor()).fit(net, loader(), loader())
    assert str(caught.value).count("RetrievalMonitor(strict=False)") == 1
    run = trainer(best, RetrievalMonitor(strict=False))
    with warned(UserWarning, key, "NaN", f"ModelCheckpoint(monitor='{key}')", "classes", 20, 6):
        run.fit(Net(), loader(), loader())
    assert math.isnan(run.callback_metrics["val/grouped_recall@1"])
