"""The bank of KnnMonitor, ProbeMonitor and GeneralizationGapMonitor: it is what its loader gives, each item once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fewshot_callbacks import EmbeddingSource, GeneralizationGapMonitor, KnnMonitor, ProbeMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import (
    class_subset,
    evaluate_retrieval,
    generalization_gap,
    knn_accuracy,
    linear_probe,
)
from tests.callbacks import bank_jobs
from tests.callbacks.models import (
    TRAINING,
    VALIDATION,
    Embeds,
    Stream,
    close,
    loader,
    log_of_validation,
    trainer,
)
from tests.gloo_processes import answers
from tests.messages import missing_facts, refused, warned

TRAIN = torch.randperm(len(TRAINING), generator=torch.Generator().manual_seed(6))[:26].sort().values
POINTS, LABELS = TRAINING.tensors


class WithoutLabels(Dataset[Any]):
    """Items whose labels only reading them tells, as in some data sets of torchvision."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return POINTS[index], LABELS[index]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(len(LABELS))


class OfUnknownLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(TRAIN.tolist())


class Underestimated(OfUnknownLength):
    """Says a length that is too small, as samplers of buckets may."""

    def __len__(self) -> int:
        return 3


class OfSomeSizes(Sampler[list[int]]):
    """Batches of one size after another."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        parts = TRAIN.split([1, 5, len(TRAIN) - 6])
        return iter([part.tolist() for part in parts])


class Table(Dataset[Any]):
    """Takes a list of indices, as a data set of Hugging Face does."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return POINTS[indices], LABELS[indices]


class Prefetching(DataLoader[Any]):
    """Changes what it gives, as loaders that prefetch to a device do."""

    def __iter__(self) -> Any:
        for points, labels in super().__iter__():
            yield points[::2], labels[::2]


class Batches:
    """Gives batches, and is no DataLoader."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(POINTS[part], LABELS[part]) for part in TRAIN.split(5)])


def of(indices: Tensor) -> TensorDataset:
    return TensorDataset(POINTS[indices], LABELS[indices])


ALL = torch.arange(len(LABELS))
BANKS: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "a data set": (WithoutLabels, ALL),
    "a subset": (lambda: Subset(WithoutLabels(), TRAIN.tolist()), TRAIN),
    "a random subset": (lambda: DataLoader(WithoutLabels(), 7, sampler=SubsetRandomSampler(TRAIN.tolist())), TRAIN),
    "a list as sampler": (lambda: DataLoader(WithoutLabels(), 7, sampler=TRAIN.tolist()), TRAIN),
    "shuffled": (lambda: DataLoader(WithoutLabels(), 7, shuffle=True), ALL),
    "drop_last": (lambda: DataLoader(WithoutLabels(), 7, drop_last=True), ALL[: len(ALL) // 7 * 7]),
    "a sampler without a length": (lambda: DataLoader(WithoutLabels(), 7, sampler=OfUnknownLength()), TRAIN),
    "a length that is too small": (lambda: DataLoader(WithoutLabels(), 7, sampler=Underestimated()), TRAIN),
    "batches of several sizes": (lambda: DataLoader(WithoutLabels(), batch_sampler=OfSomeSizes()), TRAIN),
    "batches as samples": (
        lambda: DataLoader(Table(), sampler=BatchSampler(SequentialSampler(Table()), 16, False), batch_size=None),
        ALL,
    ),
    "each index twice": (lambda: DataLoader(WithoutLabels(), 5, sampler=[*TRAIN.tolist(), *TRAIN.tolist()]), TRAIN),
    "a stream": (lambda: DataLoader(Stream(of(TRAIN)), 5), TRAIN),
    "a stream without a loader": (lambda: Stream(of(TRAIN)), TRAIN),
    "a loader of one's own": (lambda: Prefetching(WithoutLabels(), batch_size=2), ALL[::2]),
    "an iterable": (lambda: lambda run: Batches(), TRAIN),
    "a function": (lambda: lambda run: DataLoader(WithoutLabels(), 7, sampler=TRAIN.tolist()), TRAIN),
}


@pytest.mark.parametrize("bank", BANKS)
def test_a_bank_is_what_its_loader_gives(bank: str) -> None:
    """Seen red: only the data set of a loader was taken, and its labels had to be known beforehand."""
    make, indices = BANKS[bank]
    net = Embeds()
    monitors = (
        KnnMonitor(3, make()),
        ProbeMonitor(make()),
        GeneralizationGapMonitor(bank=make(), classes=None, label_groups=3, max_share=None),
    )
    logged = log_of_validation(monitors, net)
    training = net.by_hand(of(indices))
    queries = net.by_hand(VALIDATION)
    votes = knn_accuracy(*queries, *training, k=3)
    assert logged["val/knn@3"] == pytest.approx(votes.values["knn@3"])
    probe = linear_probe(*queries, *training)
    assert logged["val/probe"] == pytest.approx(probe.values["probe"])
    settings = {"label_groups": 3, "metrics": ("grouped_recall@1", "recall@1")}
    gap = generalization_gap(evaluate_retrieval(*training, **settings), evaluate_retrieval(*queries, **settings))
    assert logged["gap/recall@1"] == pytest.approx(gap.metrics()["recall@1"])


@pytest.mark.parametrize("replacement", [True, False])
def test_a_bank_of_drawn_items_has_each_drawn_item_once(replacement: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(len(LABELS), generator=generator)
    sampler = WeightedRandomSampler(weights.tolist(), 30, replacement, generator)
    drawn = torch.tensor(sorted(set(sampler)))
    generator.manual_seed(1)
    torch.rand(len(LABELS), generator=generator)
    net = Embeds()
    logged = log_of_validation(KnnMonitor(3, DataLoader(WithoutLabels(), 7, sampler=sampler)), net)
    votes = knn_accuracy(*net.by_hand(VALIDATION), *net.by_hand(of(drawn)), k=3)
    assert logged["val/knn@3"] == pytest.approx(votes.values["knn@3"])


class Labelled(WithoutLabels):
    """Has labels, by which classes can be drawn, and keeps what was read."""

    labels = LABELS.tolist()

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.add(index)
        return super().__getitem__(index)


def test_classes_are_drawn_from_the_items_of_the_sampler() -> None:
    """Seen red: they were drawn from all items of the data set."""
    data = Labelled()
    bank = DataLoader(data, 7, sampler=SubsetRandomSampler(TRAIN.tolist()))
    monitor = GeneralizationGapMonitor(bank=bank, classes=4, items_per_class=3, label_groups=2, max_share=None, seed=3)
    log_of_validation(monitor, Embeds())
    drawn = TRAIN[class_subset(LABELS[TRAIN], 4, 3, seed=3)]
    assert sorted(data.read) == sorted(drawn.tolist())


@pytest.mark.parametrize(
    ("bank", "facts"),
    [
        (lambda: DataLoader(WithoutLabels(), 7, sampler=Endless()), ("bank", "Endless", len(LABELS))),
        (lambda: iter([(POINTS, LABELS)]), ("bank", "list_iterator")),
        (lambda: 3, ("bank", "an int")),
    ],
)
def test_a_bank_that_cannot_be_read_to_its_end_is_refused(bank: Callable[[], Any], facts: tuple[Any, ...]) -> None:
    with refused(UsageError, "KnnMonitor", *facts):
        log_of_validation(KnnMonitor(3, lambda run: bank()), Embeds())


def test_classes_cannot_be_drawn_from_a_stream() -> None:
    monitor = GeneralizationGapMonitor(bank=Stream(TRAINING), classes=4, label_groups=2)
    with refused(UsageError, "bank (Stream)", "classes=None"):
        log_of_validation(monitor, Embeds())
    monitor = GeneralizationGapMonitor(bank=Batches(), classes=4, label_groups=2)
    with refused(UsageError, "bank (Batches)", "classes=None"):
        log_of_validation(monitor, Embeds())


class Broken(WithoutLabels):
    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(f"{index}.png")


class Pointless(WithoutLabels):
    def __getitem__(self, index: int) -> Any:
        return [POINTS[index]]


@pytest.mark.parametrize(
    ("monitor", "facts"),
    [
        (KnnMonitor(3, Broken()), ("KnnMonitor", "bank", "FileNotFoundError", "0.png")),
        (ProbeMonitor(Broken()), ("ProbeMonitor", "bank", "FileNotFoundError", "0.png")),
        (
            ProbeMonitor(Pointless()),
            ("ProbeMonitor(bank=...)", "'labels'", "list", 1, "source=EmbeddingSource(labels=function)"),
        ),
    ],
)
def test_a_bank_that_no_epoch_mends_ends_the_run_at_its_sanity_check(monitor: Any, facts: tuple[Any, ...]) -> None:
    """Seen red: every epoch logged NaN."""
    run = trainer(monitor, num_sanity_val_steps=1, max_epochs=2)
    with refused(UsageError, *facts):
        run.fit(Embeds(), loader(TRAINING), loader(VALIDATION))
    assert run.global_step == 0


def test_the_training_loader_as_bank_changes_nothing_in_the_training() -> None:
    """Also in the middle of an epoch, with workers that persist and with a generator of its own."""
    trained: list[list[Tensor]] = []
    for with_monitor in (True, False):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(4)
        train = DataLoader(
            TRAINING, 5, shuffle=True, generator=generator, num_workers=1, persistent_workers=True, drop_last=True
        )
        net = Embeds()
        monitors = [KnnMonitor(3, train)] if with_monitor else []
        run = trainer(*monitors, max_epochs=2, val_check_interval=3, num_sanity_val_steps=1)
        run.fit(net, train, loader(VALIDATION))
        trained.append([*net.state_dict().values(), generator.get_state(), torch.get_rng_state()])
    assert all(one.equal(other) for one, other in zip(*trained, strict=True))


# ------------------------------------------------------------------------------------------------------------------- ids


class Named(Dataset[Any]):
    """Points with labels and the name of each item."""

    def __init__(self, rows: Tensor, points: Tensor = POINTS, labels: Tensor = LABELS) -> None:
        self.rows, self.points, self.labels = rows, points, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        row = int(self.rows[index])
        return self.points[row], self.labels[row], f"{row}.png"


class NamedNet(Embeds):
    """Its batches have names."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.embed(batch[0])


class NamedStream(IterableDataset[Any]):
    def __init__(self, rows: Tensor) -> None:
        self.items = Named(rows)

    def __iter__(self) -> Iterator[Any]:
        return (self.items[index] for index in range(len(self.items)))


TWICE = torch.cat([ALL, ALL[::2]])


@pytest.mark.filterwarnings("ignore:.*20 of 20 queries")  # they are in the bank
@pytest.mark.parametrize("bank", [Named(TWICE), NamedStream(TWICE)], ids=["data set", "stream"])
def test_with_ids_an_item_of_a_bank_counts_once_and_does_not_vote_for_itself(bank: Any) -> None:
    """Seen red: a bank read no ids."""
    net = NamedNet()
    source = EmbeddingSource("encoder", embed=lambda net, batch: net(batch[0]), labels=1, ids=2)
    queries = DataLoader(Named(ALL[:20]), 11)
    logged = log_of_validation((KnnMonitor(3, bank, source=source), ProbeMonitor(bank, source=source)), net, queries)
    embeddings, labels = net.by_hand(TRAINING)
    right = 0
    similarities = torch.nn.functional.normalize(embeddings) @ torch.nn.functional.normalize(embeddings).T
    for query in range(20):
        others = similarities[query].clone()
        others[query] = -2
        nearest = others.topk(3).indices
        votes = torch.zeros(100).index_add(0, labels[nearest] + 10, (others[nearest] / 0.07).exp())
        right += int(votes.argmax() - 10 == labels[query])
    assert logged["val/knn@3"] == pytest.approx(right / 20)
    expected = linear_probe(embeddings[:20], labels[:20], embeddings, labels)
    assert logged["val/probe_leave_one_out"] == pytest.approx(expected.values["probe_leave_one_out"])


def test_where_a_bank_has_no_ids_a_note_says_that_queries_find_themselves() -> None:
    source = EmbeddingSource("encoder", embed=lambda net, batch: net(batch[0]), labels=1, ids=2)
    net = NamedNet()
    with warned(UserWarning, "val", "knn", 20, "query_ids=", "gallery_ids="):
        logged = log_of_validation(KnnMonitor(3, TRAINING, source=source), net, DataLoader(Named(ALL[:20]), 11))
    votes = knn_accuracy(*(part[:20] for part in net.by_hand(TRAINING)), *net.by_hand(TRAINING), k=3)
    assert logged == close({f"val/{name}": value for name, value in votes.values.items()})


# ------------------------------------------------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def alone(gloo_folder: Path) -> dict[str, Any]:
    [seen] = answers(gloo_folder, bank_jobs.__name__, 1)
    return seen["ddp"]


@pytest.fixture(scope="module")
def ranks(gloo_folder: Path) -> list[dict[str, Any]]:
    return answers(gloo_folder, bank_jobs.__name__, 2)


@pytest.mark.parametrize("how", ["ddp", "shuffled", "own part", "stream", "tensor parallel", "sharded"])
def test_a_bank_on_several_processes_is_that_of_one(
    alone: dict[str, Any], ranks: list[dict[str, Any]], how: str
) -> None:
    """Seen red: the processes of a tensor-parallel group embedded different items, and sharded ones waited for ever."""
    expected = {key: value for key, value in alone.items() if key != "said"}
    assert expected["val/knn@5"] < 1
    for seen in ranks:
        assert seen[how].pop("said") == []
        assert seen[how] == close(expected, rel=1e-4)


def test_a_stream_that_every_process_reads_needs_ids(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert missing_facts(seen["stream without ids"], ("bank", 2, "ids='key'")) == []
