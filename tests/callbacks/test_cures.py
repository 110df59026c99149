"""Each line that a message suggests, written into the situation that it is about, gives the right values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fewshot_callbacks.callbacks import EmbeddingSource, KnnMonitor, ProbeMonitor, RetrievalMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS
from fewshot_callbacks.functional import knn_accuracy
from fewshot_callbacks.settings import UnknownSettingError
from tests.callbacks.models import (
    CLASSES,
    DIM,
    FEATURES,
    TRAINING,
    VALIDATION,
    Embeds,
    Labelled,
    expected_metrics,
    gap_monitor,
    log_of_validation,
    messages_of,
)
from tests.messages import missing_facts, refused, warned

POINTS, LABELS = VALIDATION.tensors
BANK_POINTS, BANK_LABELS = TRAINING.tensors


class Own(LightningModule):
    """Somebody's module: `forward` gives logits, and the embedding is the output of `encoder`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder = nn.Linear(FEATURES, DIM)
        self.towers = nn.ModuleList([nn.Linear(FEATURES, DIM)])
        self.classifier = nn.Linear(DIM, CLASSES)

    def forward(self, points: Any) -> Tensor:
        return self.classifier(self.encoder(points))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self(inputs_of(batch))


def inputs_of(batch: Any) -> Tensor:
    inputs = batch["image"] if isinstance(batch, dict) else batch[0]
    return inputs[0] if isinstance(inputs, list) else inputs


class Forwards(Own):
    """Calls `forward` of its encoder, which runs no hooks."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.classifier(self.encoder.forward(inputs_of(batch)))


class ReturnsOtherKeys(Own):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embedding": self.encoder(inputs_of(batch)), "label": batch[1]}


class Pooled(nn.Module):
    """Returns an object with several entries."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, points: Tensor) -> Any:
        return {"hidden": points[:, :, None], "pooler_output": self.encoder(points)}


class WithObject(Own):
    def __init__(self) -> None:
        super().__init__()
        self.pooled = Pooled(self.encoder)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.pooled(inputs_of(batch))


class TwoViews(Own):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        for view in (inputs_of(batch), 2 * inputs_of(batch)):
            self(view)


class Tower(Own):
    """The embedding is the output of a submodule whose name is no identifier of Python."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.towers[0](inputs_of(batch))


class Rows(Dataset[Any]):
    """Items in a layout of one's own."""

    def __init__(
        self, make: Callable[[Tensor, int, int], Any], points: Tensor = POINTS, labels: Tensor = LABELS
    ) -> None:
        self.make, self.points, self.labels = make, points, labels.tolist()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.points[index], self.labels[index], index)


def pairs(point: Tensor, label: int, index: int) -> Any:
    return point, label


def triples(point: Tensor, label: int, index: int) -> Any:
    return point, torch.rand(3), label


def mappings(point: Tensor, label: int, index: int) -> Any:
    return {"image": point, "weight": 1.5, "species": f"species {label}", "path": f"{index}.png"}


def labelled_mappings(point: Tensor, label: int, index: int) -> Any:
    return {"path": f"{index}.png", "image": point, "label": label}


def views(point: Tensor, label: int, index: int) -> Any:
    return [point, 2 * point], label


def suggested(message: str) -> Any:
    """Return the source that a message suggests last."""
    start = message.rindex("source=") + len("source=")
    for stop in range(len(message), start, -1):
        try:
            code = eval(message[start:stop], {"EmbeddingSource": EmbeddingSource})
        except (NameError, SyntaxError):
            continue
        if isinstance(code, str | EmbeddingSource) or (isinstance(code, tuple) and len(code) == 2):
            return code
    raise AssertionError(f"no code in {message[start:]!r}")


def message_of(monitor: Any, net: LightningModule, rows: Dataset[Any]) -> str:
    with pytest.raises(UsageError) as raised:
        log_of_validation(monitor, net, DataLoader(rows, 11))
    return str(raised.value)


def embedded(net: Own, points: Tensor) -> Tensor:
    with torch.no_grad():
        return (net.towers[0] if isinstance(net, Tower) else net.encoder)(points)


@pytest.mark.parametrize(
    ("make", "source", "layout", "kept"),
    [
        (Forwards, "encoder", pairs, ""),
        (Forwards, EmbeddingSource("encoder", labels=1, spill_to="."), pairs, "spill_to='.'"),
        (ReturnsOtherKeys, STEP_KEYS, pairs, ""),
        (WithObject, "pooled", pairs, ""),
        (WithObject, EmbeddingSource("pooled", labels=1), pairs, "labels=1"),
        (Own, "encoder", triples, "'encoder'"),
        (Own, EmbeddingSource("encoder", ids=0), triples, "ids=0"),
        (Own, "encoder", mappings, "'encoder'"),
        (Own, EmbeddingSource("encoder", labels="specie"), mappings, "'encoder'"),
        (Own, EmbeddingSource(embed="encoder", labels="species"), mappings, "labels='species'"),
        (Own, EmbeddingSource(embed="encoder"), views, ""),
    ],
)
def test_a_suggested_source_measures_the_embedding(make: Any, source: Any, layout: Any, kept: str) -> None:
    """Seen red: a cure for a batch of three named a key, and a cure for a mapping dropped the encoder."""
    net, rows = make(), Rows(layout)
    if isinstance(source, EmbeddingSource) and source.ids == 0:
        source = EmbeddingSource("encoder", ids=lambda outputs, batch: list(range(len(batch[0]))))
        kept = "ids=..."
    message = message_of(RetrievalMonitor(source=source, label_groups=None), net, rows)
    assert kept in message
    if kept == "ids=...":
        return
    logged = log_of_validation(
        RetrievalMonitor(source=suggested(message), label_groups=None), net, DataLoader(rows, 11)
    )
    assert logged["val/mAP"] == pytest.approx(expected_metrics(embedded(net, POINTS), LABELS)["mAP"], rel=1e-6)


@pytest.mark.parametrize("make", [Own, Tower])
@pytest.mark.parametrize("monitor", [KnnMonitor, ProbeMonitor])
def test_a_suggested_way_to_embed_a_bank_embeds_it_as_the_steps_do(make: Any, monitor: Any) -> None:
    """Seen red: the cure measured the logits of `forward`."""
    net = make()
    name = "towers.0" if make is Tower else "encoder"
    queries = Rows(labelled_mappings)
    bank = Rows(labelled_mappings, BANK_POINTS, BANK_LABELS)
    source = EmbeddingSource(name, ids="path")
    settings = {"k": 3} if monitor is KnnMonitor else {}
    # The first message is about the labels, the second about the bank.
    cured = suggested(message_of(monitor(bank=bank, source=source, **settings), net, queries))
    cured = suggested(message_of(monitor(bank=bank, source=cured, **settings), net, queries))
    assert (cured.source, cured.ids) == (name, "path")
    logged = log_of_validation(monitor(bank=bank, source=cured, **settings), net, DataLoader(queries, 11))
    if monitor is KnnMonitor:
        # Queries and bank have ids of the same names: an item does not vote for the query of its name.
        sets = (embedded(net, POINTS), LABELS, embedded(net, BANK_POINTS), BANK_LABELS)
        ids = {"query_ids": [*range(len(POINTS))], "gallery_ids": [*range(len(BANK_POINTS))]}
        assert logged["val/knn@3"] == pytest.approx(knn_accuracy(*sets, k=3, **ids).values["knn@3"])


def test_two_views_are_measured_as_suggested() -> None:
    net, rows = TwoViews(), Rows(pairs)
    message = message_of(RetrievalMonitor(source="encoder", label_groups=None), net, rows)
    logged = log_of_validation(
        RetrievalMonitor(source=suggested(message), label_groups=None), net, DataLoader(rows, 40)
    )
    both = torch.cat([embedded(net, POINTS), embedded(net, 2 * POINTS)])
    assert logged["val/mAP"] == pytest.approx(expected_metrics(both, LABELS.repeat(2))["mAP"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"ids": "path"}, EmbeddingSource("encoder", ids="path")),
        ({"query_ids": 2}, EmbeddingSource("encoder", ids=2)),
        ({"labels": "species"}, EmbeddingSource("encoder", labels="species")),
        ({"query_labels": LABELS}, EmbeddingSource("encoder", labels="label")),
        ({"embed": "encoder"}, EmbeddingSource("encoder", embed="encoder")),
        ({"views": 2}, EmbeddingSource("encoder", views=2)),
        ({"spill_to": "."}, EmbeddingSource("encoder", spill_to=".")),
    ],
)
def test_an_argument_of_a_source_that_a_monitor_is_given_is_written_into_its_source(
    arguments: dict[str, Any], expected: EmbeddingSource
) -> None:
    """Seen red: the suggestion dropped the encoder that the user had named."""
    with pytest.raises(UnknownSettingError) as raised:
        RetrievalMonitor(source="encoder", **arguments)
    message = str(raised.value)
    assert missing_facts(message, ("RetrievalMonitor", *arguments)) == []
    assert suggested(message) == expected


def test_the_warning_of_repeated_items_keeps_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    net, rows = Own(), Rows(mappings)
    source = EmbeddingSource("encoder", labels="species")
    monkeypatch.setattr("fewshot_callbacks.callbacks._collection.process_count", lambda: 2)
    facts = 36, "loader", 0
    with warned(UserWarning, *facts) as caught:
        log_of_validation(RetrievalMonitor(source=source, label_groups=None), net, DataLoader(rows, 11))
    [message] = messages_of(caught, *facts)
    assert suggested(message) == EmbeddingSource("encoder", labels="species", ids="key")


def with_labels(labels: Tensor) -> Labelled:
    return Labelled(TensorDataset(BANK_POINTS, labels))


OTHER_CLASSES = with_labels(BANK_LABELS + 1000)


@pytest.mark.parametrize(
    ("monitor", "facts"),
    [
        (KnnMonitor(3, OTHER_CLASSES, strict=True), ("KnnMonitor", 36, "bank=...", "bank='self'")),
        (ProbeMonitor(OTHER_CLASSES, strict=True), ("ProbeMonitor", 36, "bank=...")),
        (ProbeMonitor(with_labels(BANK_LABELS * 0), strict=True), ("ProbeMonitor", 48, "label 0", "bank=...")),
        (
            gap_monitor(label_groups=5, strict=True),
            ("GeneralizationGapMonitor", "training", "bank=...", 10, 6, "label_groups <= 3"),
        ),
    ],
)
def test_an_error_of_a_function_names_the_arguments_of_the_monitor(monitor: Any, facts: tuple[Any, ...]) -> None:
    """Seen red: users of monitors were told to pass a gallery, and to evaluate both reports again."""
    with refused(ValueError, *facts) as caught:
        log_of_validation(monitor, Embeds())
    message = str(caught.value)
    assert not [word for word in ("gallery", "queries=", "query_labels", "report") if word in message], message


def test_without_a_match_the_set_itself_may_be_the_bank() -> None:
    with refused(ValueError, "KnnMonitor", "bank='self'"):
        log_of_validation(KnnMonitor(3, OTHER_CLASSES, strict=True), Embeds())
    net = Embeds()
    logged = log_of_validation(KnnMonitor(3, "self", strict=True), net)
    assert logged["val/knn@3"] == pytest.approx(knn_accuracy(*net.by_hand(VALIDATION), k=3).values["knn@3"])
    without_match = TensorDataset(POINTS[:2], torch.arange(2))
    with refused(ValueError, "KnnMonitor", 2, "bank=...") as caught:
        log_of_validation(KnnMonitor(1, "self", strict=True), Embeds(), DataLoader(without_match, 2))
    assert "'self'" not in str(caught.value)


def test_a_note_of_a_function_names_the_arguments_of_the_monitor() -> None:
    """Seen red: the warning asked for a larger gallery."""
    with warned(UserWarning, "val", "knn@49", "NaN", 48, "bank=...") as caught:
        log_of_validation(KnnMonitor(49, Labelled(TRAINING)), Embeds())
    [message] = messages_of(caught, "knn@49")
    assert "gallery" not in message
