"""What is relevant: labels as strings, several labels of an item, two encoders, and candidates that are ignored."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fewshot_callbacks import DEFAULT_METRICS, EpisodicBatchSampler, TrainingDynamicsMonitor
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, EmbeddingSource, RetrievalMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import evaluate_retrieval
from tests.callbacks.models import (
    FEATURES,
    LABELS,
    Net,
    Returns,
    close,
    expected_metrics,
    gap_monitor,
    items,
    loader,
    log_of_validation,
    messages_of,
    multi_label_items,
    number_of_unmatched,
    retrieval,
    trainer,
    with_prefix,
)
from tests.messages import missing_facts, refused, warned

pytestmark = pytest.mark.filterwarnings(r"ignore:.*\d+ of \d+ queries")

WORDS = {-7: "heron", 3: "", 13: "owl", 23: "Ünal", 33: "owl 2", 43: "9"}
"""Of the labels of `items`; in another order than these."""


class Worded(Dataset[Any]):
    """The items with words for labels; a loader makes a tuple of them."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data
        self.labels = [WORDS[int(label)] for label in data.tensors[1]]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index][0], self.labels[index]


class Formed(Net):
    """Hands on the labels in the form that it is told."""

    def __init__(self, form: Callable[[Any], Any] = lambda labels: labels) -> None:
        super().__init__()
        self.form = form

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        embeddings = self.embed(batch[0])
        return {"loss": embeddings.square().mean(), "embeddings": embeddings, "labels": self.form(batch[1])}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": self.embed(batch[0]), "labels": self.form(batch[1])}


def worded() -> DataLoader[Any]:
    return DataLoader(Worded(items()), batch_size=11)


def numbers(data: TensorDataset) -> TensorDataset:
    """The same items, labelled by the places of their words, sorted."""
    places = sorted(WORDS.values())
    return TensorDataset(data.tensors[0], torch.tensor([places.index(word) for word in Worded(data).labels]))


def seeded() -> Formed:
    torch.manual_seed(0)
    return Formed()


FORMS: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda labels: labels,
    "as collated": lambda labels: labels,
    "array": np.array,
    "objects": lambda labels: np.array(labels, object),
    "column": lambda labels: [[word] for word in labels],
}


def test_words_as_labels_give_what_numbers_give() -> None:
    class Forms(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"embeddings": self.embed(batch[0]), "labels": [*FORMS.values()][dataloader_idx](batch[1])}

    monitor = retrieval(label_groups=2, metrics=(*DEFAULT_METRICS, "macro_mAP"))
    loaders = {name: worded() for name in FORMS} | {"numbers": loader(numbers(items()))}
    logged = log_of_validation((monitor, DiscriminantRatioMonitor()), Forms(), loaders)
    for name in FORMS:
        report = monitor.reports[f"/{name}"]
        assert report == monitor.reports["/numbers"]
        assert report.label_names == (None if name == "numbers" else tuple(sorted(WORDS.values())))
        for key in ("mAP", "J", "variance_ratio_low", "grouped_recall@1"):
            assert logged[f"val/{key}/{name}"] == pytest.approx(logged[f"val/{key}/numbers"], rel=1e-12)


def test_labels_may_be_words_of_the_batch() -> None:
    """Also ids as strings, and the flag of a gallery in a list."""
    source = EmbeddingSource("encoder", labels=1, ids=lambda outputs, batch: [f"{point[0]}.png" for point in batch[0]])
    net, monitor = (
        Returns(lambda net, x, y: net(x)),
        retrieval(source=source, gallery=lambda outputs, batch: (batch[0][:, 0] > 0.3).tolist()),
    )
    logged = log_of_validation(monitor, net, worded())
    embeddings, labels = net.by_hand(numbers(items()))
    chosen = items().tensors[0][:, 0] > 0.3
    assert logged == close(
        with_prefix(expected_metrics(embeddings[~chosen], labels[~chosen], embeddings[chosen], labels[chosen]))
    )
    assert monitor.report is not None
    assert monitor.report.label_names == tuple(sorted(WORDS.values()))


@pytest.mark.parametrize("monitor", [RetrievalMonitor, DiscriminantRatioMonitor])
def test_batches_of_words_and_of_integers_in_one_set_end_the_run(monitor: Any) -> None:
    net = Formed(lambda labels: list(labels) if len(labels) < 11 else torch.arange(len(labels)))
    facts = "labels", "integers", "strings", "list(map(str, map(int, labels)))"
    with refused(UsageError, monitor.__name__, *facts) as error:
        log_of_validation(monitor(), net, worded())
    assert "EmbeddingStore" not in str(error.value)
    with warned(UserWarning, *facts) as caught:
        logged = log_of_validation(monitor(strict=False), net, worded())
    assert len(messages_of(caught, *facts)) == 1
    assert math.isnan(logged["val/mAP" if monitor is RetrievalMonitor else "val/J"])


def test_queries_of_words_and_a_gallery_of_integers_end_the_run() -> None:
    net = Returns(lambda net, x, y: {"embeddings": net(x), "labels": y})
    cure = "list(map(str, map(int, gallery_labels)))"
    with refused(UsageError, "query_labels", "strings", "gallery_labels", "integers", cure):
        log_of_validation(RetrievalMonitor(gallery=1), net, [worded(), loader(numbers(items()))])


@pytest.mark.parametrize("missing", [None, math.nan])
def test_labels_that_are_missing_end_the_run(missing: Any) -> None:
    net = Formed(lambda labels: [missing, *labels[1:]])
    with refused(ValueError, "labels", "validation_step", "list", 1, 11, missing, 0) as caught:
        trainer(retrieval(), num_sanity_val_steps=1).fit(net, worded(), worded())
    assert str(caught.value).count("RetrievalMonitor:") == 1


def test_several_monitors_need_labels_together() -> None:
    net = Formed(lambda labels: torch.linspace(0, 1, len(labels)))
    with refused(UsageError, "They need") as caught:
        log_of_validation((retrieval(), DiscriminantRatioMonitor()), net, worded())
    assert str(caught.value).count("RetrievalMonitor and DiscriminantRatioMonitor:") == 1


@pytest.mark.parametrize(
    ("argument", "groups", "facts"),
    [
        ("groups", lambda outputs, batch: torch.ones(3, dtype=torch.int64), ("11 embeddings", "3 groups")),
        (
            "groups",
            lambda outputs, batch: torch.ones(len(batch[0]), 2).long(),
            ("one group", "(11, 2)", "groups[:, 0]"),
        ),
        ("ids", lambda outputs, batch: torch.ones(3, dtype=torch.int64), ("11 embeddings", "3 ids")),
        ("ids", lambda outputs, batch: torch.ones(len(batch[0]), 2).long(), ("one id", "(11, 2)", "ids[:, 0]")),
    ],
)
def test_wrong_ids_and_groups_are_called_what_they_are(argument: str, groups: Any, facts: tuple[Any, ...]) -> None:
    settings = {"groups": groups} if argument == "groups" else {"source": EmbeddingSource(ids=groups)}
    with refused(UsageError, "RetrievalMonitor", argument, *facts) as caught:
        log_of_validation(retrieval(**settings), Net(), loader(numbers(items())))
    other = "ids" if argument == "groups" else "groups"
    assert missing_facts(str(caught.value), (other, "label", "labels", "evaluate_retrieval")) == [
        *(other, "label", "labels", "evaluate_retrieval")
    ]
    assert str(caught.value).count("RetrievalMonitor") == 2  # the other is the hint on strict


def test_the_gap_of_words_is_that_of_their_numbers() -> None:
    def run(training: Any, data: DataLoader[Any]) -> dict[str, float]:
        monitor = gap_monitor(bank=training, embed=lambda module, batch: module.embed(batch[0]))
        logged = log_of_validation(monitor, seeded(), data)
        return {name: value for name, value in logged.items() if name != "gap/share_of_time"}

    expected = run(numbers(items(seed=4)), loader(numbers(items())))
    assert run(Worded(items(seed=4)), worded()) == pytest.approx(expected, rel=1e-12)
    assert not math.isnan(expected["gap/grouped_recall@1"])


def test_training_dynamics_of_words_are_those_of_their_numbers() -> None:
    def run(data: Dataset[Any], labels: Any) -> Any:
        monitor = TrainingDynamicsMonitor(
            every_n_steps=1,
            shots=1,
            source=EmbeddingSource(embed=lambda module, batch: module.encoder(module.frozen(batch[0]))),
            strict=True,
        )
        sampler = EpisodicBatchSampler(labels, ways=3, shots=1, queries=2, episodes=4)
        trainer(monitor).fit(seeded(), DataLoader(data, batch_sampler=sampler), worded())
        return monitor.history.to_dict()

    training = numbers(items())
    expected = run(training, training.tensors[1].tolist())
    found = run(Worded(items()), Worded(items()).labels)
    assert len(found["steps"]) == 4
    for name, values in expected.items():
        # words sort their classes in another order, and so do sums
        same = pytest.approx(values, rel=1e-12) if name in ("alpha", "norm_ratio", "psi_con", "psi_div") else values
        assert found[name] == same


def of_targets(net: Net, *data: TensorDataset, end: str = "") -> Any:
    """What must be logged of queries, and of a gallery if there is one."""
    report = evaluate_retrieval(*(tensor for part in data for tensor in net.by_hand(part)))
    return close(with_prefix(report.metrics() | number_of_unmatched(report), end=end))


@pytest.mark.parametrize("form", [lambda targets: targets, Tensor.float, Tensor.bool])
def test_multi_label_targets_of_any_number_type(form: Callable[[Tensor], Any]) -> None:
    """And what cannot be measured is NaN under the same keys."""
    net, monitor = Formed(form), RetrievalMonitor()
    logged = log_of_validation(monitor, net, loader(multi_label_items()))
    assert logged == of_targets(net, multi_label_items())
    assert {"val/mAP", "val/map@r", "val/r_precision", "val/recall@1", "val/ndcg@10"} < set(logged)
    assert "val/pair_f1" not in logged
    net.encoder[0].weight.data.fill_(torch.nan)
    with warned(UserWarning, "val/mAP", "NaN", "queries", 40, 0):
        failed = log_of_validation(RetrievalMonitor(), net, loader(multi_label_items()))
    assert failed.keys() == logged.keys() - {"val/queries_without_match"}
    assert all(map(math.isnan, failed.values()))


def test_multi_label_targets_of_two_loaders_and_of_a_gallery() -> None:
    net, other = Formed(), multi_label_items(25, seed=1)
    loaders = [loader(multi_label_items()), loader(other)]
    logged = log_of_validation(RetrievalMonitor(), net, loaders)
    for end, data in (("/dataloader_idx_0", multi_label_items()), ("/dataloader_idx_1", other)):
        assert {key: value for key, value in logged.items() if key.endswith(end)} == of_targets(net, data, end=end)
    assert log_of_validation(RetrievalMonitor(gallery=1), net, loaders) == of_targets(net, multi_label_items(), other)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"metrics": (*DEFAULT_METRICS, "macro_mAP")}, ("grouped_recall@1", "macro_mAP")),
        ({"label_groups": [[0, 1], [2, 3]]}, ("label_groups",)),
    ],
)
def test_settings_for_one_label_each_end_the_fit_at_the_sanity_check(
    settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    run = trainer(RetrievalMonitor(**settings), num_sanity_val_steps=1)
    with refused(UsageError, "RetrievalMonitor", *names, "several labels"):
        run.fit(Formed(), loader(), loader(multi_label_items()))
    assert run.global_step == 0


@pytest.mark.parametrize(
    ("form", "facts"),
    [
        (lambda y: y * 0.5, ("(11, 5)", 0, 1)),
        (lambda y: y[:, : 5 if len(y) == 11 else 3], (3, 5)),
        (lambda y: y[:, 0] if len(y) < 11 else y, ("integers", 5)),
    ],
)
def test_targets_that_cannot_be_read_end_the_run_with_what_they_should_be(form: Any, facts: tuple[Any, ...]) -> None:
    with refused(UsageError, "RetrievalMonitor", "validation_step", "labels", *facts):
        log_of_validation(RetrievalMonitor(), Formed(form), loader(multi_label_items()))
    with refused(UsageError, "DiscriminantRatioMonitor", "labels", 5):  # takes none at all
        log_of_validation(DiscriminantRatioMonitor(), Formed(), loader(multi_label_items()))


def test_a_loader_whose_items_share_no_label_is_nan_and_the_other_is_measured() -> None:
    monitor, lone = RetrievalMonitor(), TensorDataset(torch.randn(3, FEATURES), torch.eye(3, LABELS))
    run = trainer(monitor, max_epochs=2)
    facts = "val/mAP/dataloader_idx_1", "NaN", "queries", 3
    with warned(UserWarning, *facts) as caught:
        run.fit(Formed(), loader(), [loader(multi_label_items()), loader(lone)])
    assert len(messages_of(caught, *facts)) == 1
    assert set(monitor.reports) == {"/dataloader_idx_0"}
    assert run.callback_metrics["val/mAP/dataloader_idx_1"].isnan()


ITEMS, DIM, CAPTIONS = 23, 4, 3
METRICS = ("mAP", "recall@1", "recall@5", "minp")
BOTH = ("image_embeds", "text_embeds")


def clip(captions: int = 1) -> Returns:
    return Returns(
        lambda net, images, texts, number: {
            "image_embeds": images,
            "text_embeds": texts[:, :captions].flatten(0, 1),
            "image": number,
            "image_of_caption": number.repeat_interleave(captions),
        }
    )


def pairs() -> TensorDataset:
    """Images, three captions each, and a number for each image."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ITEMS, DIM, generator=generator)
    captions = images[:, None] + torch.randn(ITEMS, CAPTIONS, DIM, generator=generator)
    return TensorDataset(images, captions, torch.arange(ITEMS) * 3 - 7)


def logged_of(monitor: RetrievalMonitor, net: Returns, data: TensorDataset | None = None) -> dict[str, float]:
    return log_of_validation(monitor, net, DataLoader(pairs() if data is None else data, batch_size=5))


def both_ways(texts: Tensor, of_texts: Tensor) -> Any:
    images, _, number = pairs().tensors
    sides = (images, number), (texts, of_texts)
    values = {}
    for name, (query, searched) in {"image_to_text": sides, "text_to_image": sides[::-1]}.items():
        report = evaluate_retrieval(*query, *searched, metrics=METRICS)
        values |= with_prefix(report.metrics() | number_of_unmatched(report), f"val/{name}")
    return close(values)


def test_images_and_texts_belong_together_row_by_row() -> None:
    monitor = RetrievalMonitor(source=BOTH, metrics=METRICS)
    _, captions, number = pairs().tensors
    assert logged_of(monitor, clip()) == both_ways(captions[:, 0], number)
    assert monitor.reports.keys() == {"image_to_text", "text_to_image"}
    named = logged_of(RetrievalMonitor(source=BOTH, metrics="mAP", name="clip"), clip())
    assert named.keys() == {"val/clip/image_to_text/mAP", "val/clip/text_to_image/mAP"}
    with refused(UsageError, "RetrievalMonitor(gallery='image')", "encoders"):
        logged_of(RetrievalMonitor(source=BOTH, gallery="image"), clip())


def test_an_image_with_several_captions_counts_once() -> None:
    """Also where the images come with each of their captions, and count once."""
    images, captions, number = pairs().tensors
    by_image = EmbeddingSource(BOTH, labels=("image", "image_of_caption"))
    expected = both_ways(captions.flatten(0, 1), number.repeat_interleave(CAPTIONS))
    assert logged_of(RetrievalMonitor(source=by_image, metrics=METRICS), clip(CAPTIONS)) == expected
    order = torch.arange(ITEMS).repeat_interleave(CAPTIONS)
    repeated = TensorDataset(images[order], captions.flatten(0, 1)[:, None], number[order])
    ids = ("image", lambda outputs, batch: [str(text.tolist()) for text in batch[1]])
    counted_once = RetrievalMonitor(source=replace(by_image, ids=ids), metrics=METRICS)
    assert logged_of(counted_once, clip(), repeated) == expected
    with refused(UsageError, "validation_step", 5, 15, "labels=('image_id', 'image_of_caption')"):
        logged_of(RetrievalMonitor(source=BOTH), clip(CAPTIONS))


def test_soft_labels_under_the_usual_keys_are_no_second_encoder() -> None:
    net = Returns(lambda net, x, *_: {"embeddings": x, "labels": x.softmax(dim=1)})
    with refused(UsageError, "RetrievalMonitor", "labels", "(5, 4)", 20, 0, 1):
        logged_of(RetrievalMonitor(), net)


def of_person(net: Returns, points: Tensor, person: Tensor, camera: Tensor) -> dict[str, Any]:
    cameras = [f"cam {c}" for c in camera.tolist()]
    return {"embeddings": points, "labels": person, "person": person, "camera": cameras, "few": [1, 2]}


def people(seed: int, count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    persons, cameras = (torch.randint(0, most, (count,), generator=generator) for most in (5, 3))
    return TensorDataset(torch.randn(count, DIM, generator=generator), persons, cameras)


@pytest.mark.parametrize(
    "groups", [("person", "camera"), (1, 2), [1, "camera"], ("person", lambda outputs, batch: batch[2])]
)
@pytest.mark.parametrize("two", [False, True])
def test_candidates_of_the_same_person_and_camera_are_ignored(two: bool, groups: Any) -> None:
    sets = [people(0), people(1, 30)][: 1 + two]
    arguments = [tensor for data in sets for tensor in data.tensors[:2]]
    of_sets = [data.tensors[1] * 10 + data.tensors[2] for data in sets]
    groups_of_sets = dict(zip(("query_groups", "gallery_groups"), of_sets, strict=False))
    report = evaluate_retrieval(*arguments, metrics=METRICS, **groups_of_sets)
    monitor = RetrievalMonitor(groups=groups, gallery=1 if two else None, metrics=METRICS)
    logged = log_of_validation(monitor, Returns(of_person), [DataLoader(data, batch_size=9) for data in sets])
    assert logged == close(with_prefix(report.metrics() | number_of_unmatched(report)))
    assert evaluate_retrieval(*arguments, metrics=METRICS).mAP != report.mAP


@pytest.mark.parametrize(
    ("groups", "facts"),
    [
        (3, ("groups=3", "batch", "list", "(outputs, batch)")),
        ((1, 7), ("groups=7", "batch", "list", 3)),
        ("lens", ("groups='lens'", "'person'", "'camera'", "batch", "list", 3)),
        (("person", "camera", "few"), ("groups", "('person', 'camera', 'few')", "[9, 9, 2]")),
        (lambda outputs, batch: [1, 2], ("groups", "list", 2, 9)),
    ],
)
def test_what_groups_cannot_read_ends_the_run(groups: Any, facts: tuple[Any, ...]) -> None:
    with refused(UsageError, "RetrievalMonitor", *facts):
        log_of_validation(RetrievalMonitor(groups=groups), Returns(of_person), DataLoader(people(0), batch_size=9))


def test_groups_and_ids_may_be_positions_of_the_batch() -> None:
    """As `labels=1`."""
    data = people(0)
    points, person, camera = data.tensors
    report = evaluate_retrieval(points, person, query_groups=camera, metrics=METRICS)
    repeated = TensorDataset(*(torch.cat([part, part[:9]]) for part in (*data.tensors, torch.arange(40))))
    net = Returns(lambda net, points, person, *_: {"embeddings": points, "labels": person})
    logged = log_of_validation(
        RetrievalMonitor(groups=2, source=EmbeddingSource(ids=3), metrics=METRICS),
        net,
        DataLoader(repeated, batch_size=9),
    )
    assert logged == close(with_prefix(report.metrics() | number_of_unmatched(report)))
