"""Monitors that share validation items: the items are read and stored once, and each monitor logs the usual values."""

import copy
import gc
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    KnnMonitor,
    Monitor,
    RetrievalMonitor,
)
from fewshot_callbacks.callbacks import EmbeddedSet
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore
from fewshot_callbacks.metrics.item_batch import ItemBatch
from tests.callbacks import monitor_jobs
from tests.callbacks.models import (
    TRAINING,
    VALIDATION,
    Embeds,
    Labelled,
    Net,
    Returns,
    close,
    count_hooks,
    expected_metrics,
    gap_monitor,
    items,
    loader,
    log_of_validation,
    messages_of,
    retrieval,
    trainer,
    with_prefix,
)
from tests.callbacks.silhouette import SilhouetteMonitor
from tests.gloo_processes import answers
from tests.messages import missing_facts, refused, warned

pytestmark = pytest.mark.filterwarnings(r"ignore:.*\d+ of \d+ queries")

QUERIES, GALLERY = items(), items(per_class=4, seed=4)
Made = Callable[[EmbeddingSource], Sequence[Callback]]


class Keeps(Monitor):
    """Records its arguments, with only weak references to large ones."""

    names = ("items",)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.held: list[weakref.ref[Tensor]] = []
        self.addresses: list[tuple[int, ...]] = []

    def measure(self, items: EmbeddedSet) -> dict[str, int]:
        sides = [side.embeddings for side in (items.queries, items.gallery) if side is not None]
        self.held += map(weakref.ref, sides)
        self.addresses.append(tuple(side.data_ptr() for side in sides))
        return {"items": len(items.embeddings)}


def are_free(monitor: Keeps) -> bool:
    gc.collect()
    assert monitor.held
    return all(reference() is None for reference in monitor.held)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of items of each batch that is kept."""
    counts: list[int] = []
    add = EmbeddingStore.add

    def counting(self: EmbeddingStore, batch: ItemBatch) -> None:
        counts.append(len(batch))
        add(self, batch)

    monkeypatch.setattr(EmbeddingStore, "add", counting)
    return counts


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[EmbeddingStore]]:
    """Weak references to the stores in which batches are kept, one for each batch."""
    references: list[weakref.ref[EmbeddingStore]] = []
    add = EmbeddingStore.add

    def watched(self: EmbeddingStore, batch: ItemBatch) -> None:
        references.append(weakref.ref(self))
        add(self, batch)

    monkeypatch.setattr(EmbeddingStore, "add", watched)
    return references


# ------------------------------------------------------------------------------------- the same values, in every order


def flags(net: Returns, points: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"embeddings": net(points), "labels": labels, "is_gallery": torch.arange(len(points)) % 2 == 0}


def cameras(net: Returns, points: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"embeddings": net(points), "labels": labels, "camera": (points[:, 1] > 0).long()}


def numbered(net: Returns, points: Tensor, labels: Tensor, ids: Tensor) -> dict[str, Any]:
    return {"embeddings": net(points), "labels": labels, "id": ids}


def two_encoders(net: Returns, points: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"a_embeds": points, "b_embeds": points.roll(1, dims=1)}


def with_repeats() -> TensorDataset:
    """The queries, the first five of them twice, and the index of each."""
    points, labels = QUERIES.tensors
    return TensorDataset(torch.cat([points, points[:5]]), torch.cat([labels, labels[:5]]), torch.arange(41) % 36)


def three(source: EmbeddingSource) -> Sequence[Callback]:
    return [retrieval(source=source), KnnMonitor(2, "self", source=source), SilhouetteMonitor(source=source)]


def all_kinds(source: EmbeddingSource) -> Sequence[Callback]:
    return [
        EmbeddingHealthMonitor(source=source, k=3),
        DiscriminantRatioMonitor(source=source),
        gap_monitor(source=source, bank=TRAINING_DATA),
    ]


def with_gallery(gallery: Any) -> Made:
    return lambda source: [
        retrieval(source=source, gallery=gallery),
        retrieval(source=source, name="all"),
        KnnMonitor(2, "gallery", source=source, gallery=gallery),
    ]


def with_groups(source: EmbeddingSource) -> Sequence[Callback]:
    return [
        retrieval(source=source, groups="camera"),
        retrieval(source=source, name="all"),
        KnnMonitor(2, "self", source=source),
    ]


def of_encoders(source: EmbeddingSource) -> Sequence[Callback]:
    return [retrieval(source=source), KnnMonitor(1, "gallery", source=source)]


TRAINING_DATA = Labelled(TRAINING)
PLAIN = EmbeddingSource("encoder")
SITUATIONS: dict[str, tuple[Made, EmbeddingSource, Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]] = {
    "a submodule": (three, PLAIN, Net, lambda: loader(QUERIES), {}),
    "keys": (three, EmbeddingSource(), Net, lambda: loader(QUERIES), {}),
    "embed": (three, EmbeddingSource(embed="encoder"), Net, lambda: loader(QUERIES), {}),
    "health, ratio, gap": (all_kinds, EmbeddingSource(), Embeds, lambda: loader(QUERIES), {}),
    "several loaders": (three, PLAIN, Net, lambda: [loader(QUERIES), loader(GALLERY)], {}),
    "a gallery loader": (with_gallery(1), PLAIN, Net, lambda: [loader(QUERIES), loader(GALLERY)], {}),
    "a flag": (with_gallery("is_gallery"), PLAIN, lambda: Returns(flags), lambda: loader(QUERIES), {}),
    "two encoders": (
        of_encoders, EmbeddingSource(("a_embeds", "b_embeds")), lambda: Returns(two_encoders), lambda: loader(QUERIES), {}
    ),
    "repeated ids": (three, EmbeddingSource(ids="id"), lambda: Returns(numbered), lambda: loader(with_repeats()), {}),
    "groups": (with_groups, PLAIN, lambda: Returns(cameras), lambda: loader(QUERIES), {}),
    "fewer batches": (three, PLAIN, Net, lambda: loader(QUERIES), {"limit_val_batches": 2}),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_each_logs_what_it_logs_alone_in_every_order(situation: str) -> None:
    make, source, module, loaders, settings = SITUATIONS[situation]
    torch.manual_seed(0)
    net = module()

    def logged(*monitors: Callback) -> dict[str, float]:
        values = log_of_validation(monitors, net, loaders(), **settings)
        return {key: value for key, value in values.items() if key != "gap/share_of_time"}

    alone = [logged(monitor) for monitor in make(source)]
    assert all(alone)
    for count in (2, 3):
        for order in itertools.permutations(range(len(alone)), count):
            monitors = make(source)
            together = logged(*(monitors[index] for index in order))
            assert together == close(
                {key: value for index in order for key, value in alone[index].items()}, rel=0, abs=0
            )


@pytest.mark.parametrize("flagged", [False, True])
def test_what_is_spilled_is_logged_alike_and_leaves_no_file(flagged: bool, tmp_path: Path) -> None:
    net = Returns(flags)
    make = with_gallery("is_gallery") if flagged else three
    kept = log_of_validation(tuple(make(EmbeddingSource("encoder"))), net, loader(QUERIES))
    spilled = log_of_validation(tuple(make(EmbeddingSource("encoder", spill_to=tmp_path))), net, loader(QUERIES))
    assert spilled == kept
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_monitors_log_the_same_on_any_number_of_processes(processes: int, gloo_folder: Path) -> None:
    """Nor does an earlier run. The trials of two loaders are those that one process has found, to the last bit."""
    [one] = answers(gloo_folder, monitor_jobs.__name__, 1)
    for seen in answers(gloo_folder, monitor_jobs.__name__, processes):
        for name in ("forwards", "backwards", "again"):
            assert seen[name] == seen["alone"]
        assert seen == one


# ---------------------------------------------------------------------------------------------- read once, and held once


def test_each_batch_is_read_once() -> None:
    read: list[int] = []

    def find(outputs: Any, batch: Any) -> Any:
        read.append(len(batch[1]))
        return outputs["embeddings"], batch[1]

    log_of_validation(tuple(three(EmbeddingSource(find))), Net(), loader(QUERIES))
    assert read == [11, 11, 11, 3]


def test_each_batch_is_embedded_once() -> None:
    embedded: list[int] = []

    def embed(module: Net, batch: Any) -> Tensor:
        embedded.append(len(batch[1]))
        return module.embed(batch[0])

    log_of_validation(tuple(three(EmbeddingSource(embed=embed))), Net(), loader(QUERIES))
    assert embedded == [11, 11, 11, 3]


def test_monitors_of_one_source_hold_one_copy(stored: list[int]) -> None:
    monitors = [Keeps(name=name, source="encoder") for name in "ab"]
    log_of_validation((monitors[0], retrieval(source=PLAIN), monitors[1]), Net(), [loader(QUERIES), loader(GALLERY)])
    assert sum(stored) == len(QUERIES) + len(GALLERY)
    assert monitors[0].addresses == monitors[1].addresses
    assert len(set(monitors[0].addresses)) == 2


def test_a_gallery_is_held_once() -> None:
    monitors = [Keeps(name=name, gallery="is_gallery") for name in "ab"]
    log_of_validation(tuple(monitors), Returns(flags), loader(QUERIES))
    assert monitors[0].addresses == monitors[1].addresses
    assert all(map(are_free, monitors))


class Watches(Callback):
    """Sees after the monitors before it whether the embeddings still live."""

    def __init__(self, monitor: Keeps) -> None:
        self.monitor = monitor
        self.seen: list[bool] = []

    def on_validation_epoch_end(self, *_: Any) -> None:
        self.seen.append(are_free(self.monitor))


def test_what_is_held_is_free_with_the_last_that_needs_it() -> None:
    keeps = Keeps()
    before, after = Watches(keeps), Watches(keeps)
    log_of_validation((keeps, before, KnnMonitor(2, "self"), after, DiscriminantRatioMonitor()), Net(), loader(QUERIES))
    assert (before.seen, after.seen) == ([False], [True])
    assert are_free(keeps)


def test_a_monitor_of_single_batches_makes_nobody_keep_them(stored: list[int]) -> None:
    monitors = retrieval(loaders=0), DiscriminantRatioMonitor()
    logged = log_of_validation(monitors, Net(), [loader(QUERIES), loader(GALLERY)])
    assert sum(stored) == len(QUERIES)
    assert "val/J/dataloader_idx_1" in logged


def test_training_items_are_embedded_once() -> None:
    net, data = Embeds(), Labelled(TRAINING)
    monitors = KnnMonitor(2, data), gap_monitor(bank=data), KnnMonitor(3, data, name="more")
    together = log_of_validation(monitors, net, loader(VALIDATION))
    assert sorted(data.read) == list(range(len(TRAINING)))
    alone: dict[str, float] = {}
    for monitor in (KnnMonitor(2, data), gap_monitor(bank=data), KnnMonitor(3, data, name="more")):
        alone |= log_of_validation(monitor, net, loader(VALIDATION))
    for logged in (together, alone):
        del logged["gap/share_of_time"]
    assert together == alone


# --------------------------------------------------------------------------------------------- one run, and the next


def test_a_training_with_a_sanity_check_and_the_trainer_once_more() -> None:
    net, monitors = Net(), three(PLAIN)
    run = trainer(*monitors, num_sanity_val_steps=1, limit_val_batches=2, max_epochs=2)
    run.fit(net, loader(), [loader(QUERIES), loader(GALLERY)])
    for number, data in enumerate((QUERIES, GALLERY)):
        seen = TensorDataset(*(part[:22] for part in data.tensors))
        for key, value in with_prefix(expected_metrics(*net.by_hand(seen)), end=f"/dataloader_idx_{number}").items():
            assert float(run.callback_metrics[key]) == pytest.approx(value, rel=1e-5)
        assert f"val/silhouette/dataloader_idx_{number}" in run.callback_metrics
    run.validate(net, loader(GALLERY), verbose=False)
    seen = TensorDataset(*(part[:22] for part in GALLERY.tensors))
    expected = with_prefix(expected_metrics(*net.by_hand(seen)))
    assert {key: float(run.callback_metrics[key]) for key in expected} == close(expected)


class AfterSanityCheck(Callback):
    """Sees whether the stores of the sanity check still live."""

    def __init__(self, held: list[weakref.ref[EmbeddingStore]]) -> None:
        self.held = held
        self.are_free: list[bool] = []

    def on_sanity_check_end(self, *_: Any) -> None:
        gc.collect()
        self.are_free.append(bool(self.held) and all(reference() is None for reference in self.held))


def test_nothing_is_held_after_the_sanity_check(stores: list[weakref.ref[EmbeddingStore]]) -> None:
    after = AfterSanityCheck(stores)
    trainer(*three(PLAIN), after, num_sanity_val_steps=1).fit(Net(), loader(), loader(QUERIES))
    assert after.are_free == [True]


def test_a_monitor_serves_two_trainers() -> None:
    net, monitors = Net(), three(PLAIN)
    wanted = log_of_validation(tuple(three(PLAIN)), net, loader(QUERIES))
    log_of_validation((monitors[0], Keeps(source=PLAIN)), net, loader(GALLERY))
    assert log_of_validation(tuple(monitors[::-1]), net, loader(QUERIES)) == wanted


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda monitors: pickle.loads(pickle.dumps(monitors))])
def test_copies_of_monitors_share_embeddings_before_and_after_a_run(copied: Any) -> None:
    net = Net()
    monitors = [retrieval(source=PLAIN), Keeps(source=PLAIN), Keeps(source=PLAIN, name="more")]
    for _ in range(2):
        again = copied(monitors)
        assert log_of_validation(tuple(again), net, loader(QUERIES))["val/mAP"] > 0
        assert again[1].addresses[-1] == again[2].addresses[-1]
        log_of_validation(tuple(monitors), net, loader(QUERIES))
        for keeps in monitors[1:]:
            keeps.held, keeps.addresses = [], []


class Interrupted(Net):
    """Ends in the middle of its validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if batch_idx == 2:
            raise KeyboardInterrupt
        return super().validation_step(batch, batch_idx)


def test_an_interrupt_leaves_nothing_behind(stores: list[weakref.ref[EmbeddingStore]]) -> None:
    net, monitors = Interrupted(), three(PLAIN)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        log_of_validation(tuple(monitors), net, loader(QUERIES))
    gc.collect()
    assert len(stores) == 2
    assert all(reference() is None for reference in stores)
    assert count_hooks(net) == 0
    wanted = log_of_validation(tuple(three(PLAIN)), Net(), loader(QUERIES))
    assert log_of_validation(tuple(monitors), Net(), loader(QUERIES)).keys() == wanted.keys()


class HandsOn(Callback):
    """Somebody's callback that has a monitor inside, and hands its hooks on."""

    def __init__(self, monitor: RetrievalMonitor) -> None:
        for hook in ("setup", "teardown", "on_validation_start", "on_exception"):
            setattr(self, hook, getattr(monitor, hook))
        for event in ("epoch_start", "batch_start", "batch_end", "epoch_end"):
            setattr(self, f"on_validation_{event}", getattr(monitor, f"on_validation_{event}"))


@pytest.mark.parametrize("others", [[], [KnnMonitor(2, "self", source="encoder")]])
def test_a_monitor_works_inside_another_callback(others: list[Callback]) -> None:
    net = Net()
    for _ in range(2):
        logged = log_of_validation((HandsOn(retrieval(source="encoder")), *others), net)
        assert logged["val/mAP"] == log_of_validation(retrieval(source="encoder"), net)["val/mAP"]


# ---------------------------------------------------------------------------------------------------------------- errors


def test_a_missing_entry_is_the_error_of_the_monitor_that_asks_for_it() -> None:
    net = Net()
    bad = retrieval(groups="nowhere", strict=False, name="bad")
    with warned(UserWarning, "val/bad/mAP", "NaN", "RetrievalMonitor(groups='nowhere')") as caught:
        logged = log_of_validation((bad, KnnMonitor(2, "self"), retrieval()), net, loader(QUERIES))
    assert len(messages_of(caught)) == 1
    assert "KnnMonitor" not in messages_of(caught)[0]
    assert math.isnan(logged["val/bad/mAP"])
    alone = log_of_validation((KnnMonitor(2, "self"), retrieval()), net, loader(QUERIES))
    assert {key: logged[key] for key in alone} == alone


def mixed(net: Returns, points: Tensor, labels: Tensor) -> dict[str, Any]:
    """Cameras that are integers in the full batches, and words in the last one."""
    camera = labels % 2
    return {
        "embeddings": net(points),
        "labels": labels,
        "camera": camera if len(points) > 3 else list(map(str, camera.tolist())),
    }


def test_groups_of_two_forms_are_the_error_of_the_monitor_that_asks_for_them() -> None:
    bad = retrieval(groups="camera", strict=False, name="bad")
    with warned(UserWarning, "val/bad/mAP", "NaN", "groups", "integers", "strings") as caught:
        logged = log_of_validation((bad, retrieval()), Returns(mixed), loader(QUERIES))
    assert len(messages_of(caught)) == 1
    assert math.isnan(logged["val/bad/mAP"])
    assert logged["val/mAP"] > 0


class Fails(Monitor):
    names = ("fails",)

    def measure(self, items: EmbeddedSet) -> dict[str, float]:
        raise ArithmeticError("no such number")


def test_an_error_of_measure_is_nan_and_a_warning_and_the_others_go_on() -> None:
    net = Net()
    with warned(UserWarning, "val/fails", "NaN", "ArithmeticError: no such number", "Fails(strict=True)"):
        logged = log_of_validation((Fails(), *three(EmbeddingSource())), net, loader(QUERIES))
    assert math.isnan(logged.pop("val/fails"))
    assert logged == log_of_validation(tuple(three(EmbeddingSource())), net, loader(QUERIES))


def test_strict_ends_the_run_and_the_same_monitors_serve_again() -> None:
    net, keeps = Net(), Keeps(source="encoder")
    with refused(ArithmeticError, "no such number"):
        log_of_validation((keeps, Fails(source="encoder", strict=True), retrieval(source="encoder")), net)
    assert are_free(keeps)
    assert count_hooks(net) == 0
    assert log_of_validation((keeps, retrieval(source="encoder")), net, loader(QUERIES))["val/items"] == len(QUERIES)


def only_first_has_labels(net: Returns, points: Tensor, *labels: Tensor) -> dict[str, Any]:
    return {"embeddings": net(points)} | ({"labels": labels[0]} if labels else {})


def test_a_loader_that_others_alone_read_is_no_error() -> None:
    """Not in the sanity check, where there are no values, either."""
    net = Returns(only_first_has_labels)
    unlabelled = loader(TensorDataset(GALLERY.tensors[0]))
    monitors = retrieval(loaders=0), EmbeddingHealthMonitor()
    run = trainer(*monitors, num_sanity_val_steps=1)
    run.fit(net, loader(), [loader(QUERIES), unlabelled])
    assert float(run.callback_metrics["val/mAP"]) > 0
    assert "val/rankme/dataloader_idx_1" in run.callback_metrics


def test_a_message_names_the_monitors_that_asked() -> None:
    none = Returns(lambda net, points, labels: {"loss": points.sum()})
    with refused(UsageError, "RetrievalMonitor", "KnnMonitor", "validation_step", "'embeddings'"):
        log_of_validation((retrieval(), KnnMonitor(2, "self")), none)
    unlabelled = Returns(lambda net, points: {"embeddings": net(points)})
    with pytest.raises(UsageError) as raised:
        log_of_validation((Keeps(), retrieval()), unlabelled, loader(TensorDataset(QUERIES.tensors[0])))
    message = str(raised.value)
    assert missing_facts(message, ("RetrievalMonitor", "validation_step", "'labels'")) == []
    assert Keeps.__name__ not in message


@pytest.mark.parametrize(
    ("one", "other", "facts"),
    [
        (EmbeddingSource(labels=1), "encoder", None),
        (EmbeddingSource("encoder", labels=1), "encoder", ("source=EmbeddingSource('encoder', labels=1)",
         "source=EmbeddingSource('encoder')")),
        (EmbeddingSource("encoder", ids=monitor_jobs.paths), "encoder", ("ids=paths",)),
        ("encoder", EmbeddingSource("encoder"), None),
        (
            EmbeddingSource(labels=lambda batch: batch[1]),
            EmbeddingSource(labels=lambda batch: batch[1]),
            ("functions", "object"),
        ),
    ],
)  # fmt: skip
def test_what_keeps_monitors_apart_is_said_once(
    one: Any, other: Any, facts: tuple[str, ...] | None, caplog: Any
) -> None:
    monitors = retrieval(source=one), KnnMonitor(2, "self", source=other), SilhouetteMonitor(source=other)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        run = trainer(*monitors, max_epochs=2)
        run.fit(Net(), loader(), loader(QUERIES))
    said = [text for text in caplog.messages if not missing_facts(text, ("KnnMonitor", "copy"))]
    assert len(said) == (facts is not None)
    if facts is not None:
        assert missing_facts(said[0], ("RetrievalMonitor", *facts)) == []


def test_sources_in_a_configuration_are_equal_if_their_arguments_are() -> None:
    parser = ArgumentParser()
    parser.add_argument("--monitors", type=list[Callback])
    source = {"source": ["embeddings", "labels"], "labels": "species", "ids": "path"}
    monitors = [
        {"class_path": "fewshot_callbacks.RetrievalMonitor", "init_args": {"source": source}},
        {"class_path": "fewshot_callbacks.KnnMonitor", "init_args": {"bank": "self", "source": source}},
        {"class_path": "fewshot_callbacks.DiscriminantRatioMonitor", "init_args": {"source": "encoder"}},
    ]
    made = parser.instantiate_classes(parser.parse_object({"monitors": monitors})).monitors
    assert made[0].source == made[1].source == EmbeddingSource(labels="species", ids="path")
    assert made[2].source == EmbeddingSource("encoder")


# ----------------------------------------------------------------------------------------------------- a monitor of your own


def test_the_silhouette_is_that_of_its_definition() -> None:
    net, monitor = Net(), SilhouetteMonitor(worst=2)
    logged = log_of_validation(monitor, net, loader(QUERIES))
    embeddings, labels = net.by_hand(QUERIES)
    rows = torch.nn.functional.normalize(embeddings.double(), dim=1)
    means = {int(label): rows[labels == label].mean(dim=0) for label in labels.unique()}
    values: dict[int, list[float]] = {label: [] for label in means}
    for row, label in zip(rows, labels.tolist(), strict=True):
        own = float((row - means[label]).norm())
        others = min(float((row - mean).norm()) for other, mean in means.items() if other != label)
        values[label].append((others - own) / max(others, own))
    of_classes = {label: sum(silhouettes) / len(silhouettes) for label, silhouettes in values.items()}
    mean = sum(map(sum, values.values())) / len(labels)
    assert logged == close(with_prefix({"silhouette": mean, "silhouette_of_worst_class": min(of_classes.values())}))
    assert monitor.worst_classes == sorted(of_classes, key=of_classes.__getitem__)[:2]


def test_a_monitor_of_ones_own_is_at_most_fifty_lines() -> None:
    lines = Path(__file__).with_name("silhouette.py").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 50


class Whole(Monitor):
    """Keeps what it was given."""

    def measure(self, items: EmbeddedSet) -> dict[str, Any]:
        self.items = items
        return {"items": len(items.embeddings)}


def test_measure_is_given_embeddings_labels_ids_and_gallery() -> None:
    net = Returns(
        lambda net, points, labels: {
            "embeddings": net(points),
            "labels": [f"bird {label}" for label in labels.tolist()],
        }
    )
    monitor = Whole(source=EmbeddingSource(ids=monitor_jobs.paths), gallery=1)
    logged = log_of_validation(
        monitor, net, [loader(QUERIES), loader(TensorDataset(*(part[:4] for part in QUERIES.tensors)))]
    )
    given = monitor.items
    assert logged == {"val/items": 36.0}
    assert given.embeddings.equal(net.by_hand(QUERIES)[0]) or torch.allclose(given.embeddings, net.by_hand(QUERIES)[0])
    assert given.labels == [f"bird {label}" for label in QUERIES.tensors[1].tolist()]
    assert given.ids == [f"folder/{index:02}.png" for index in range(36)]
    assert given.gallery is not None
    assert len(given.gallery.embeddings) == 4
    assert (given.stage, given.suffix, given.epoch) == ("val", "", 0)


def test_a_monitor_of_ones_own_needs_no_labels() -> None:
    monitor = Whole()
    log_of_validation(
        monitor, Returns(lambda net, points: {"embeddings": net(points)}), loader(TensorDataset(QUERIES.tensors[0]))
    )
    assert (list(monitor.items.labels), monitor.items.ids, len(monitor.items.embeddings)) == ([], None, 36)


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        (0.5, ("float", "name -> number")),
        ({"other": 1}, ("'value'", "names")),
        ({"value": torch.zeros(2)}, ("Tensor", "'value'", "number")),
    ],
)
def test_what_measure_must_not_return_is_said_and_nan(result: Any, facts: tuple[str, ...]) -> None:
    class Returning(Monitor):
        names = ("value",)

        def measure(self, items: EmbeddedSet) -> Any:
            return result

    with warned(UserWarning, "val/value", "NaN", "Returning.measure", *facts):
        assert math.isnan(log_of_validation(Returning(), Net())["val/value"])


def test_a_monitor_without_names_logs_what_it_measures() -> None:
    assert log_of_validation(Whole(name="mine"), Net(), loader(QUERIES)) == {"val/mine/items": 36.0}


def test_a_checkpoint_whose_mode_says_otherwise_is_a_warning(tmp_path: Path) -> None:
    worst = ModelCheckpoint(tmp_path, monitor="val/silhouette", mode="min")
    facts = "ModelCheckpoint(monitor='val/silhouette', mode='min')", "higher", "mode='max'"
    with warned(UserWarning, *facts):
        trainer(SilhouetteMonitor(), worst).fit(Net(), loader(), loader(QUERIES))
