"""Where embeddings and labels are found: outputs, batches, submodules, views; and the messages if they are not found."""

import math
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import EmbeddingSource
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, GeneralizationGapMonitor, KnnMonitor
from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError
from fewshot_callbacks.callbacks._embedding_reader import EmbeddingReader
from fewshot_callbacks.functional import evaluate_retrieval
from tests.callbacks.models import (
    DIM,
    TRAINING,
    VALIDATION,
    Embeds,
    EveryBatch,
    EveryEpoch,
    Labelled,
    Net,
    Returns,
    close,
    count_hooks,
    expected_metrics,
    expected_ratios,
    items,
    loader,
    log_of_validation,
    messages_of,
    retrieval,
    trainer,
    with_prefix,
)
from tests.messages import missing_facts, refused, warned

E, L = torch.randn(4, 3), torch.tensor([5, 5, 9, 9])


def reader(source: Any = ("embeddings", "labels"), labels: Any = None) -> EmbeddingReader:
    return EmbeddingReader(EmbeddingSource(source, labels=labels), "Monitor")


class Tower(nn.Module):
    """Returns an output object that contains the embeddings, as transformers do."""

    def forward(self, z: Tensor) -> Any:
        return {"pooler_output": z, "states": SimpleNamespace(hidden=(-z, z))}


class Towers(Returns):
    """Has layers behind its encoder."""

    def __init__(self, returns: Callable[..., Any]) -> None:
        super().__init__(returns)
        self.tower, self.recurrent = Tower(), nn.LSTM(DIM, 2)
        # ends as torchvision's ResNet does before it flattens, and one layer earlier
        self.avgpool = nn.Unflatten(1, (-1, 1, 1))
        self.features = nn.Sequential(nn.Unflatten(1, (-1, 1, 1)), nn.UpsamplingNearest2d(2))


@pytest.mark.parametrize(
    ("returns", "settings"),
    [
        (lambda net, x, y: {"embeddings": net(x)}, {}),
        (lambda net, x, y: {"z": net(x), "y": y, "embeddings": x[:1], "labels": -y}, {"source": ("z", "y")}),
        (lambda net, x, y: {"embeddings": net(x).tolist(), "labels": y[:, None].tolist()}, {}),
        (lambda net, x, y: {"embeddings": net(x).numpy(), "labels": y[:, None].numpy()}, {}),
        (lambda net, x, y: (net(x), y), {"source": lambda outputs, batch: outputs}),
        (lambda net, x, y: net(x), {"source": lambda outputs, batch: (outputs, batch[1])}),
        (lambda net, x, y: {"embeddings": net(x)}, {"labels": lambda batch: batch[1]}),
        (lambda net, x, y: [net(x), None][1], {"source": "encoder"}),
        (lambda net, x, y: net(x).sum(), {"source": "encoder.3", "labels": 1}),
        (lambda net, x, y: (net(x[:1]), net(x[1:])), {"source": "encoder"}),
        (lambda net, x, y: net.avgpool(net(x)), {"source": "avgpool"}),
        (lambda net, x, y: net.tower(net(x)), {"source": "tower:pooler_output"}),
        (lambda net, x, y: net.tower(net(x)), {"source": "tower:states.hidden.1"}),
    ],
)
def test_every_source_gives_the_same_values(returns: Any, settings: dict[str, Any]) -> None:
    net = Towers(returns)
    assert log_of_validation(retrieval(**settings), net) == close(
        with_prefix(expected_metrics(*net.by_hand(VALIDATION)))
    )
    assert count_hooks(net) == 0


def draws(net: Net, batch: Any) -> Tensor:
    """Embeds with a random number from PyTorch, that changes nothing."""
    return net.embed(batch[0]) + 0 * torch.rand(())


@pytest.mark.parametrize(
    "embed", [lambda net, batch: net(batch[0]), lambda net, batch: (net(batch[0]), batch[1]), "whole", draws]
)
def test_the_monitor_embeds_batches_itself_and_leaves_no_trace(embed: Any) -> None:
    net = Returns(lambda net, x, y: torch.rand(1))  # validates something else; nothing of it is an embedding
    net.whole = nn.Sequential(net.frozen, net.encoder)
    torch.manual_seed(3)
    logged = log_of_validation(retrieval(source=EmbeddingSource(embed=embed)), net)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert log_of_validation((), net) == {}
    assert torch.rand(1).equal(after)
    assert logged == close(with_prefix(expected_metrics(*net.by_hand(VALIDATION))))


class ValidatesInTraining(Embeds):
    """Stays in training mode in a validation, as a module that draws dropout there does; its step computes nothing."""

    def on_validation_model_eval(self) -> None:
        self.train()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert {module.training for module in self.modules()} == {True}


def test_the_monitor_embeds_in_evaluation_mode_where_the_module_validates_in_training_mode() -> None:
    net = ValidatesInTraining()
    logged = log_of_validation(retrieval(source=EmbeddingSource(embed=lambda net, batch: net(batch[0]))), net)
    assert logged == close(with_prefix(expected_metrics(*net.by_hand(VALIDATION))))


def test_only_the_calls_of_the_expected_step_are_kept() -> None:
    net, listening, points = Net().eval(), reader("encoder"), VALIDATION.tensors[0][:4]
    listening.attach(net)
    listening.attach(net)  # setup runs before each fit, validate and test
    assert count_hooks(net) == 0
    net._current_fx_name = "validation_step"  # as Lightning says what runs
    net.embed(points)  # before the step
    listening.start_capture()
    net.embed(-points)  # an aborted step
    listening.start_capture()
    net.embed(points)
    embeddings, _ = listening.read(None, (points, L), "validation_step")
    assert embeddings.equal(net.embed(points).detach())
    with refused(UsageError, "encoder"):
        listening.read(None, (points, L), "validation_step")  # what it has given since belongs to no step
    listening.detach()
    assert count_hooks(net) == 0


def two_views(x: Tensor) -> list[Tensor]:
    return [x, x.roll(1, dims=1)]


def of_views(net: Net, data: TensorDataset) -> tuple[Tensor, Tensor]:
    points, labels = data.tensors
    return net.by_hand(TensorDataset(torch.cat(two_views(points)), labels.repeat(2)))


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        (lambda net, x, y: net(x), Net.by_hand),
        (lambda net, x, y: net(torch.cat(two_views(x))), of_views),
        (lambda net, x, y: [*map(net, two_views(x))], of_views),
    ],
)
def test_two_views_of_each_item(returns: Any, expected: Any) -> None:
    """In one call of the submodule or in two; and one view, as validation steps have."""
    with refused(ValueError, "EmbeddingSource", "views=0", 1):
        EmbeddingSource("encoder", views=0)
    net, source = Towers(returns), EmbeddingSource("encoder", views=2)
    assert log_of_validation(retrieval(source=source), net) == close(
        with_prefix(expected_metrics(*expected(net, VALIDATION)))
    )


def test_ids_and_a_gallery_flag_of_each_item_hold_for_its_views() -> None:
    net, data = Returns(lambda net, x, y, place: net(torch.cat(two_views(x)))), items()
    numbers, shop = torch.arange(len(data)) % 34, torch.arange(len(data)) % 2 == 0
    for tensor in data.tensors:
        tensor[34:] = tensor[:2]
    source = EmbeddingSource("encoder", labels=1, views=2, ids=lambda outputs, batch: numbers[batch[2]])
    found = retrieval(source=source, gallery=lambda outputs, batch: shop[batch[2]])
    log_of_validation(found, net, DataLoader(TensorDataset(*data.tensors, torch.arange(len(data))), 8))
    embeddings, labels = of_views(net, TensorDataset(*(tensor[:34] for tensor in data.tensors)))  # the others repeat
    shops = shop[:34].repeat(2)
    expected = evaluate_retrieval(embeddings[~shops], labels[~shops], embeddings[shops], labels[shops])
    assert found.report is not None
    assert found.report.values == pytest.approx(expected.values, rel=1e-6)


def test_several_monitors_share_a_source() -> None:
    source, net = EmbeddingSource("encoder", labels=1), Returns(lambda net, x, y: [net(x), None][1])
    monitors = [
        retrieval(source=source),
        retrieval(source=source, name="more"),
        DiscriminantRatioMonitor(source=source),
    ]
    run = trainer(*monitors, max_epochs=2, num_sanity_val_steps=1)
    run.fit(net, loader(), loader())
    assert count_hooks(net) == 0
    sets = net.by_hand(items())
    expected = with_prefix(expected_metrics(*sets) | expected_ratios(*sets)) | with_prefix(
        expected_metrics(*sets), "val/more"
    )
    assert {key: float(run.callback_metrics[key]) for key in expected} == close(expected)


Pair = namedtuple("Pair", ["images", "classes"])


@pytest.mark.parametrize(
    ("labels", "outputs", "batch"),
    [
        (None, {"labels": L}, (E, -L)),  # the step knows best
        (None, {"labels": L}, {"labels": -L}),
        (None, {}, Pair(E, L)),
        (None, {}, {"image": E, "labels": L}),
        ("class", {"labels": -L}, {"class": L}),  # what was asked for comes first
        (-1, {"labels": -L}, (E, E, L)),
        (lambda batch: batch["deep"].labels, {"labels": -L}, {"deep": SimpleNamespace(labels=L)}),
    ],
)
def test_labels_are_found(labels: Any, outputs: dict[str, Tensor], batch: Any) -> None:
    _, found = reader(labels=labels).read({"embeddings": E} | outputs, batch, "validation_step")
    assert found.codes.equal(L)


@pytest.mark.parametrize(
    ("settings", "outputs", "batch", "facts"),
    [
        ({}, {"loss": 1, "z": E}, L, ("step", "'loss'", "'z'", "'embeddings'", '"embeddings": embeddings',
         "source=('other', 'keys')", "source=lambda outputs, batch:", "source='name.of.a.submodule'")),
        ({}, {}, L, ("step", "mapping", "none", "'embeddings'")),
        ({}, (E, L), L, ("step", "tuple", 2, "'embeddings'")),
        ({}, E, L, ("step", "(4, 3)", "torch.float32", "'embeddings'")),
        ({}, {"embedding": E, "label": L}, L, ("step", "'embeddings'", "source=('embedding', 'label')")),
        ({}, {"emb": E}, L, ("step", "'embeddings'", "source=('emb', 'labels')")),
        ({"source": lambda *_: E}, E, L, ("source", "(4, 3)", "(embeddings, labels)")),
        ({"source": lambda *_: (E, L, L)}, E, L, ("source", "tuple", 3, "(embeddings, labels)")),
        ({"source": lambda *both: both[0]["z"]}, {}, L, ("source", "KeyError", "'z'", "step", "mapping")),
        ({}, {"embeddings": E}, (E, E, L), ("step", "'labels'", "tuple", 3, "source=EmbeddingSource(labels=2)")),
        ({}, {"embeddings": E}, "ab", ("step", "'labels'", "str")),
        ({}, {"embeddings": E}, (E, E + 1), ("step", "'labels'", "views")),
        ({"labels": "y"}, {"embeddings": E}, {"x": E}, ("labels='y'", "batch", "mapping", "'x'", "'y'")),
        ({"labels": 2}, {"embeddings": E}, (E, L), ("labels=2", "batch", "tuple", 2)),
        ({"labels": "y"}, {"embeddings": E}, (E, L), ("labels='y'", "batch", "tuple", 2, "'y'")),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_the_argument_that_fixes_it(
    settings: dict[str, Any], outputs: Any, batch: Any, facts: tuple[Any, ...]
) -> None:
    with refused(UsageError, "Monitor", *facts):
        reader(**settings).read(outputs, batch, "step")


@pytest.mark.parametrize(
    ("embeddings", "labels", "facts"),
    [
        (list("abcd"), L, ("embeddings", "list", 4, "tensor", "strings", "'a'")),
        (None, L, ("embeddings", "None", "tensor")),
        (E, ["a", "b", "a", None], ("labels", "list", 1, 4, "None", 3)),
        (E, ["a", "b", "a", 1], ("labels", "'a'", 0, 1, 3, "list(map(str, labels))")),
        (E.reshape(2, 3, 2), L[:2], ("embeddings", "(2, 3, 2)", "embeddings.flatten(1)")),
        (E[0], L, ("embeddings", "(3,)", "floating-point", "(items, dim)")),
        (E.long(), L, ("embeddings", "torch.int64", "floating-point", "(items, dim)")),
        (E, L[:3], (4, "embeddings", 3, "labels")),
        (E, L[:, None].expand(4, 2), ("labels", "(4, 2)", "labels.argmax(dim=1)")),
        (E, L.float(), ("labels", "torch.float32", "integer", "labels.long()")),
    ],
)
def test_what_is_no_embedding_or_label_is_named(embeddings: Any, labels: Any, facts: tuple[Any, ...]) -> None:
    with refused(ValueError, "test_step", *facts):
        reader().read({"embeddings": embeddings, "labels": labels}, None, "test_step")


@pytest.mark.parametrize(
    ("returns", "source", "facts"),
    [
        (lambda net, x, y: (net(x[:1]), net(x[:2])), "encoder", ("'encoder'", "1, 2", 11)),
        (lambda net, x, y: [*map(net, two_views(x))], "encoder", ("source=EmbeddingSource('encoder', views=2)",)),
        (lambda net, x, y: net.recurrent(net(x)), "recurrent", ("'recurrent'", "tuple", 2, "tensor")),
        (
            lambda net, x, y: net.features(net(x)),
            "features",
            ("embeddings", "(11, 5, 2, 2)", "torch.float32", "(items, dim)", "pooling"),
        ),
        (
            lambda net, x, y: net.tower(net(x)),
            "tower",
            ("'tower'", "'pooler_output'", "'states'", "tensor", "source='tower:pooler_output'"),
        ),
        (
            lambda net, x, y: net.tower(net(x)),
            "tower:pooled",
            ("'tower:pooled'", "'pooler_output'", "'states'", "'pooled'"),
        ),
    ],
)
def test_outputs_of_a_submodule_that_are_no_embeddings_are_refused_with_the_fix(
    returns: Any, source: str, facts: tuple[Any, ...]
) -> None:
    net = Towers(returns)
    with refused(UsageError, "RetrievalMonitor", *facts):
        log_of_validation(retrieval(source=source), net)
    assert count_hooks(net) == 0


@pytest.mark.parametrize(("name", "near"), [("encder", ("encoder",)), ("zzz:z", ("frozen", "encoder", "classifier"))])
def test_an_unknown_submodule_ends_the_fit_before_it_starts(name: str, near: tuple[str, ...]) -> None:
    for argument in ("source", "embed"):
        with refused(ValueError, f"{argument}='{name}'", "Net", "submodule", *near):
            log_of_validation(retrieval(**{argument: name}), Net())


class OnlyLoss(Net):
    """As most modules are written: its steps return a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.embed(batch[0]).sum()


class Unlabelled(Net):
    """Is given no labels in a validation."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if self.training else batch[:1]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": self.embed(batch[0])}


MISTAKES: list[tuple[Callable[[], Net], Callable[..., Any], tuple[str, ...]]] = [
    (OnlyLoss, retrieval, ("RetrievalMonitor", "validation_step", "tensor", "'embeddings'")),
    (
        Net,
        partial(retrieval, source=EmbeddingSource(labels="species")),
        ("RetrievalMonitor", "labels='species'", "batch", "list", "2"),
    ),
    (Unlabelled, retrieval, ("RetrievalMonitor", "validation_step", "'labels'")),
    (Net, partial(retrieval, gallery="shop"), ("RetrievalMonitor", "gallery='shop'", "batch")),
    (Net, partial(retrieval, gallery=3), ("RetrievalMonitor", "gallery=3", "'dataloader_idx_0'")),
    (
        partial(Returns, lambda *_: 0),
        partial(retrieval, source="encoder"),
        ("RetrievalMonitor", "validation_step", "'encoder'", "encoder(x)"),
    ),
    (OnlyLoss, DiscriminantRatioMonitor, ("DiscriminantRatioMonitor", "'embeddings'")),
    (
        Net,
        partial(
            GeneralizationGapMonitor,
            source=EmbeddingSource(("embeddings", "labels"), embed=lambda net, batch: net.embed(batch[0])),
        ),
        ("GeneralizationGapMonitor", "bank=..."),
    ),
    (
        Net,
        GeneralizationGapMonitor,
        ("Net", "forward", "source=EmbeddingSource(embed='name.of.a.submodule')"),
    ),
    (Embeds, KnnMonitor, ("KnnMonitor", "bank=...")),
    (
        Net,
        partial(KnnMonitor, bank=Labelled(TRAINING)),
        ("KnnMonitor", "Net", "forward", "source=EmbeddingSource(embed='name.of.a.submodule')"),
    ),
]


@pytest.mark.parametrize(
    ("net", "monitor", "facts", "sanity"),
    [(*mistake, 1) for mistake in MISTAKES] + [(*MISTAKES[place], 0) for place in (0, 2, 4, 6, 7)],
)
def test_a_mistake_that_cannot_heal_ends_the_fit_at_its_first_sign(
    net: Any, monitor: Any, facts: tuple[str, ...], sanity: int
) -> None:
    trained = EveryBatch()
    run = trainer(monitor(), trained, num_sanity_val_steps=sanity, max_epochs=3)
    with refused(UsageError, *facts, "strict=False", "NaN"):
        run.fit(net(), loader(), loader())
    assert len(trained.outputs) == (0 if sanity or monitor is DiscriminantRatioMonitor else 4)
    if sanity:
        patient = trainer(monitor(strict=False), num_sanity_val_steps=sanity)
        with warned(UserWarning, *facts):
            patient.fit(net(), loader(), loader())
        assert patient.global_step == 4


def test_a_step_that_has_given_embeddings_before_may_give_them_again() -> None:
    """The second validation has none, as a step has that skips what has diverged."""
    forgets, epochs = (
        Returns(lambda net, x, y: None if net.current_epoch == 1 else {"embeddings": net(x)}),
        EveryEpoch(),
    )
    with warned(UserWarning, "val/mAP", "NaN", "validation_step", "'embeddings'"):
        trainer(retrieval(), epochs, max_epochs=3).fit(forgets, loader(), loader())
    assert [math.isnan(value) for value in epochs.values] == [False, True, False]


class Skips(Net):
    """Skips every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 == 0 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_first_training_batch_that_lightning_skips_may_be_followed_by_others() -> None:
    """Where Lightning skips nothing, since the step is optimised by hand, it is a mistake."""
    facts, batches = ("DiscriminantRatioMonitor", "training_step", "mapping", "none", "'embeddings'"), EveryBatch()
    with warned(UserWarning, "train/J", "NaN", *facts):
        trainer(DiscriminantRatioMonitor(), batches).fit(Skips(), loader(), loader())
    assert [math.isnan(value) for value in batches.logged] == [True, False, True, False]
    by_hand = Skips()
    by_hand.automatic_optimization = False
    with refused(UsageError, *facts):
        trainer(DiscriminantRatioMonitor()).fit(by_hand, loader(), loader())


def test_an_error_is_said_once_and_another_again() -> None:
    policy, rows = FailurePolicy("Monitor", strict=False), [ValueError(f"rows {n} to 8 are NaN.") for n in (3, 5)]
    errors = [*rows, RuntimeError("out of memory"), KeyError(), rows[0]]
    with warned(UserWarning, "val/J") as caught:
        assert not any(policy.handle(error, "val/J is NaN.") for error in errors)
    told = "rows 3 to 8 are NaN.", "RuntimeError: out of memory", "KeyError: KeyError"
    for message, words in zip(messages_of(caught), told, strict=True):
        assert missing_facts(message, ("val/J is NaN.", words, "Monitor(strict=True)")) == []


@pytest.mark.parametrize("same_monitor", [True, False])
def test_a_second_fit_in_one_process_warns_again(same_monitor: bool) -> None:
    """With Python's own filter, which shows a warning once for each place in the code."""
    data = TensorDataset(items().tensors[0] * math.nan, items().tensors[1])
    monitors, told = (), []
    for _ in range(2):
        monitors = (same_monitor and monitors) or (retrieval(), DiscriminantRatioMonitor())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            trainer(*monitors, max_epochs=2).fit(Net(), loader(), loader(data))
        told.append([text for text in messages_of(caught) if "NaN" in text])
    assert len(told[0]) == 2
    assert told[0] == told[1]


CHANNELS_FIRST, CHANNELS_LAST = "embeddings.mean(dim=(2, 3))", "embeddings.mean(dim=(1, 2))"


@pytest.mark.parametrize(
    ("shape", "pooled"),
    [
        ((3, 8, 7, 7), [CHANNELS_FIRST]),
        ((3, 7, 7, 8), [CHANNELS_LAST]),
        ((3, 7, 7, 7), [CHANNELS_FIRST, CHANNELS_LAST]),
        ((3, 8, 7, 5), [CHANNELS_FIRST, CHANNELS_LAST]),
    ],
)
def test_a_feature_map_is_pooled_over_its_places(shape: tuple[int, ...], pooled: list[str]) -> None:
    """Those of Swin have their channels last."""
    with pytest.raises(UsageError) as raised:
        reader().read({"embeddings": torch.zeros(shape), "labels": torch.zeros(3).long()}, None, "test_step")
    message = str(raised.value)
    assert missing_facts(message, ("test_step", shape, "embeddings.flatten(1)")) == []
    assert [code for code in (CHANNELS_FIRST, CHANNELS_LAST) if not missing_facts(message, (code,))] == pooled
