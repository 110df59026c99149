"""ProtoNet trains, evaluates on a fixed list of episodes, and leaves no trace; on two processes, too."""

import copy
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.data.samplers import EpisodicBatchSampler
from fewshot_callbacks.functional.episodes import EpisodeAccuracy, EpisodeList, sample_episodes
from fewshot_callbacks.protonet import (
    DistanceRatioHead,
    EpisodeProtocol,
    ProtoNet,
    SoftmaxHead,
    SupportClassifier,
    evaluate_episodes,
    prototypes,
)
from fewshot_callbacks.protonet.evaluation import batch_norm_of_the_batch, query_hits
from fewshot_callbacks.protonet.module import ExponentWatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),  # many tests here train or evaluate, not both
]

PROTOCOL = EpisodeProtocol(ways=3, shots=2, queries=4, episodes=20, seed=5)
SIZES = {"ways": 3, "shots": 2, "queries": 4}
CLASSES, PER_CLASS = 4, 9
KEYS = {
    "accuracy",
    "accuracy_std",
    "accuracy_ci95",
    "accuracy_ci95_open",
    "episodes",
    "episodes_hash",
    "batch_statistics",
}


class Small(nn.Module):
    """A backbone with everything that an evaluation could disturb: batch norm, dropout, a frozen part."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Dropout(0.2))
        self.last = nn.Sequential(nn.Linear(12, dim), nn.BatchNorm1d(dim))

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.last(self.layers(images))
        return embeddings


def dataset(noise: float = 1.0, classes: int = CLASSES, per_class: int = PER_CLASS, size: int = 4) -> TensorDataset:
    """Images of classes that differ in their mean image; labels are neither 0 ... C-1 nor sorted."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(classes).repeat(per_class)
    means = torch.randn(classes, 1, size, size, generator=generator)
    images = means[labels] + noise * torch.randn(len(labels), 1, size, size, generator=generator)
    return TensorDataset(images, 10 * labels - 7)


def images_loader(data: TensorDataset | None = None, batch_size: int = 5) -> DataLoader[Any]:
    return DataLoader(dataset() if data is None else data, batch_size=batch_size)


def episodes_loader(
    data: TensorDataset | None = None, fixed: bool = True, episodes: int = 20, **sizes: int
) -> DataLoader[Any]:
    data = dataset() if data is None else data
    sampler = EpisodicBatchSampler(data.tensors[1], **(SIZES | sizes), episodes=episodes, seed=5, fixed=fixed)
    return DataLoader(data, batch_sampler=sampler)


def model(**kwargs: Any) -> ProtoNet:
    return ProtoNet(**({"backbone": Small(), "evaluation": PROTOCOL, "shots": 2} | kwargs))


def trainer(**kwargs: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**(quiet | {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1} | kwargs))


def trained(net: ProtoNet, loader: DataLoader[Any] | None = None) -> ProtoNet:
    """After a few steps, so that running statistics say something."""
    trainer(max_steps=3).fit(net, episodes_loader(fixed=False) if loader is None else loader)
    return net


class Recorder(Callback):
    """What a monitoring callback is handed."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Any]] = {"train": [], "val": []}
        self.logged: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.outputs["train"].append(outputs)
        self.logged.append(dict(trainer.callback_metrics))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.outputs["val"].append(outputs)


# --- training


def test_it_learns() -> None:
    data = dataset(noise=1.5, classes=8, per_class=20, size=16)
    net = ProtoNet("conv4", "softmax", in_channels=1, evaluation=PROTOCOL, shots=2)
    recorder = Recorder()
    trainer(max_steps=40, callbacks=[recorder]).fit(net, episodes_loader(data, fixed=False, episodes=40))
    losses = [logged["train/loss"].item() for logged in recorder.logged]
    assert "train/rho" not in recorder.logged[0]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    trainer().test(net, images_loader(data, batch_size=64), verbose=False)
    result = net.evaluation_results["test"]
    assert result.mean > 0.9 > 1 / 3 + 5 * result.ci95


@pytest.mark.parametrize("representation", ["mean", "nearest"])
def test_a_training_step_is_the_cross_entropy_of_the_queries(representation: Any) -> None:
    net = model(backbone=nn.Flatten(), head="dr", representation=representation)
    images, labels = dataset().tensors
    order = torch.randperm(len(labels))  # rows come in any order
    images, labels = images[order], labels[order]
    losses, hits, x = [], [], images.flatten(1).double()
    rows = [(labels == c).nonzero().flatten() for c in labels.unique()]
    support = [x[own[:2]].mean(0, keepdim=True) if representation == "mean" else x[own[:2]] for own in rows]
    for position, own in enumerate(rows):
        for row in own[2:]:
            distances = torch.stack([(x[row] - points).square().sum(1).min() for points in support])
            logits = -math.exp(2.0) / 2 * (distances + 1e-10).log()
            losses.append(-logits.log_softmax(0)[position].item())
            hits.append(float(logits.argmax() == position))
    recorder = Recorder()
    loader = DataLoader(TensorDataset(images, labels), batch_size=len(labels))
    trainer(max_steps=1, callbacks=[recorder]).fit(net, loader)
    assert recorder.logged[0]["train/loss"].item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert recorder.logged[0]["train/accuracy"].item() == pytest.approx(sum(hits) / len(hits))
    assert recorder.logged[0]["train/rho"].item() == pytest.approx(math.exp(2.0), rel=1e-5)


def test_several_episodes_in_a_batch_give_the_mean_of_their_losses() -> None:
    data = dataset()
    sampler = EpisodicBatchSampler(data.tensors[1], **SIZES, episodes=6, seed=5, fixed=True)
    together = EpisodicBatchSampler(data.tensors[1], **SIZES, episodes=6, seed=5, fixed=True, episodes_per_batch=3)

    def logged(batches: EpisodicBatchSampler, episodes: int, rate: float) -> list[dict[str, Tensor]]:
        recorder = Recorder()
        net = model(
            backbone=nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
            episodes_per_batch=episodes,
            learning_rate=rate,
        )
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))
        trainer(callbacks=[recorder]).fit(net, DataLoader(data, batch_sampler=batches))
        return recorder.logged

    singles, triples = logged(sampler, 1, 1e-12), logged(together, 3, 1e-12)  # too small a step to see
    assert (len(singles), len(triples)) == (6, 2)
    for metric in ("train/loss", "train/accuracy"):
        means = [sum(float(one[metric]) for one in singles[i : i + 3]) / 3 for i in (0, 3)]
        assert [float(three[metric]) for three in triples] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "words", "last"), [(90.0, "inf", 3), (math.nan, "nan", 3), (-math.inf, "0.0", 3), (math.nan, "nan", 20)]
)
def test_an_exponent_that_is_no_number_stops_the_training(value: float, words: str, last: int) -> None:
    class Diverge(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == last:
                pl_module.head.log_rho.data.fill_(value)  # type: ignore[operator,union-attr]

    net = model(head="dr", learning_rate=1e-9)
    with pytest.raises(
        ValueError, match=rf"became {words} at step {last} .*last finite value was 7.389, at step {last - 1}\. .*lower"
    ):
        trainer(callbacks=[Diverge()]).fit(net, episodes_loader(fixed=False))


def test_where_the_exponent_is_looked_at_now_and_then_the_step_is_right() -> None:
    watch, head = ExponentWatch(interval=4), DistanceRatioHead()
    for step in range(2):
        watch.see(step, head)
    head.log_rho.data.fill_(99.0)
    watch.see(2, head)
    with pytest.raises(ValueError, match=r"became inf at step 2 .* at step 1"):
        watch.see(3, head)


def test_new_classes_are_learned_from_a_few_images() -> None:
    net = trained(model())
    images, labels = dataset(noise=0.05).tensors
    net.train()
    before = copy.deepcopy(net.state_dict())
    classifier = net.support_classifier(images[:8], labels[:8])
    for image, label in zip(
        images[8:], labels[8:], strict=True
    ):  # one at a time: in training mode each would be its mean
        assert classifier.predict(image[None]).tolist() == [int(label)]
    assert all(part.training for part in net.modules())
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())


def test_new_classes_are_represented_as_in_training() -> None:
    net = model(representation="nearest").eval()
    images, labels = dataset().tensors
    support = (labels[:, None] == labels).tril().sum(1) <= 3  # the first three of each class
    found = net.support_classifier(images[support], labels[support]).probabilities(images[~support])
    with torch.no_grad():
        embeddings = net(images)
    by_hand = SupportClassifier(net.head, "nearest").fit(embeddings[support], labels[support])
    assert found.allclose(by_hand.probabilities(embeddings[~support]), atol=1e-6)


def test_steps_hand_embeddings_to_callbacks() -> None:
    recorder, net = Recorder(), model()
    run = trainer(max_steps=2, callbacks=[recorder], num_sanity_val_steps=0)
    run.fit(net, episodes_loader(fixed=False, episodes=2), images_loader())
    for outputs in recorder.outputs["train"]:
        assert outputs.keys() == {"loss", "embeddings", "labels"}
        assert outputs["embeddings"].shape == (3 * 6, 6)
        assert not outputs["embeddings"].requires_grad
    assert all(outputs.keys() == {"embeddings", "labels"} for outputs in recorder.outputs["val"])
    seen = torch.cat([outputs["labels"] for outputs in recorder.outputs["val"]])
    assert seen.equal(dataset().tensors[1])


def test_a_training_batch_that_is_no_episode_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"(?s)training batch of 5 images is not an episode of 2 support .*EpisodicBatchSampler with shots",
    ):
        trainer(max_steps=1).fit(model(), images_loader())


def test_a_backbone_that_gives_feature_maps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Identity gave shape \(2, 1, 4, 4\) for 2 images; .* End the backbone with"):
        model(backbone=nn.Identity())(torch.zeros(2, 1, 4, 4))


# --- evaluation


def forward_each_episode(net: ProtoNet, data: TensorDataset, representation: str) -> tuple[list[float], EpisodeList]:
    """The slow road: every episode on its own through the network, one query at a time."""
    images, labels = data.tensors
    episodes = sample_episodes(labels, ways=3, shots=2, queries=4, episodes=20, seed=5)
    net.eval()
    accuracies = []
    with torch.no_grad():
        for episode in episodes.indices:
            embedded = net.backbone(images[episode.flatten()]).double().unflatten(0, (3, 6))
            support = [row[:2].mean(0, keepdim=True) if representation == "mean" else row[:2] for row in embedded]
            hits = [
                min(range(3), key=lambda c: float((query - support[c]).norm(dim=1).min())) == way
                for way, row in enumerate(embedded)
                for query in row[2:]
            ]
            accuracies.append(sum(hits) / len(hits))
    return accuracies, episodes


@pytest.mark.parametrize(
    ("head", "stage", "representation"),
    [("softmax", "val", "mean"), ("dr", "test", "mean"), ("softmax", "test", "nearest"), ("dr", "val", "nearest")],
)
def test_embedding_each_image_once_equals_forwarding_each_episode(head: Any, stage: str, representation: Any) -> None:
    net, run = trained(model(head=head, representation=representation)), trainer()
    evaluate = run.validate if stage == "val" else run.test
    (logged,) = evaluate(net, images_loader(), verbose=False)
    accuracies, episodes = forward_each_episode(net, dataset(), representation)
    values = torch.tensor(accuracies, dtype=torch.float64)
    result = net.evaluation_results[stage]
    assert 0.4 < result.mean < 1.0  # neither chance nor certain: the comparison says something
    assert result.mean == pytest.approx(values.mean().item(), abs=1e-12)
    assert result.std == pytest.approx(values.std().item(), abs=1e-12)
    assert result.ci95 == pytest.approx(1.96 * values.std().item() / math.sqrt(20), abs=1e-12)
    assert (result.n, result.ways, result.shots, result.queries) == (20, 3, 2, 4)
    assert result.episodes_hash == episodes.hash
    assert logged.keys() == {f"{stage}/{key}" for key in KEYS}
    assert logged[f"{stage}/accuracy"] == pytest.approx(result.mean)
    assert logged[f"{stage}/accuracy_std"] == pytest.approx(result.std)
    assert logged[f"{stage}/accuracy_ci95"] == pytest.approx(result.ci95)
    assert logged[f"{stage}/episodes"] == 20
    assert logged[f"{stage}/episodes_hash"] == int(episodes.hash[:6], 16)
    assert logged[f"{stage}/batch_statistics"] == 0


@pytest.mark.parametrize("given", [None, 7, 50])
def test_a_validation_has_its_own_number_of_episodes(given: int | None) -> None:
    net, data = trained(model(validation_episodes=given)), dataset()
    sizes = {**SIZES, "seed": PROTOCOL.seed}
    for evaluate, stage, episodes in (("validate", "val", given or 20), ("test", "test", 20)):
        getattr(trainer(), evaluate)(net, images_loader(data), verbose=False)
        expected = sample_episodes(data.tensors[1], **sizes, episodes=episodes)
        assert net.evaluation_results[stage].n == episodes
        assert net.evaluation_results[stage].episodes_hash == expected.hash


def test_whole_episodes_give_what_images_give_and_a_limit_names_its_own() -> None:
    net, loader = trained(model(representation="nearest")), episodes_loader()
    trainer().test(net, images_loader(), verbose=False)
    net.evaluation_batches = "episodes"
    (logged,) = trainer().validate(net, loader, verbose=False)
    assert net.evaluation_results["val"] == net.evaluation_results["test"]
    assert logged.keys() == {f"val/{key}" for key in KEYS}
    trainer(limit_test_batches=6).test(net, loader, verbose=False)
    result = net.evaluation_results["test"]
    assert result.n == 6
    assert result.episodes_hash == loader.batch_sampler.episode_list.first(6).hash  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled")
def test_a_shuffled_loader_shows_in_the_hash() -> None:
    net = model()
    hashes = set()
    for _ in range(2):
        trainer().validate(net, DataLoader(dataset(), batch_size=5, shuffle=True), verbose=False)
        hashes.add(net.evaluation_results["val"].episodes_hash)
    assert len(hashes) == 2


@pytest.mark.parametrize("settings", [{}, {"evaluation_batches": "episodes", "batch_statistics": True}])
def test_evaluation_leaves_no_trace(settings: dict[str, Any]) -> None:
    class Watch(Callback):
        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if pl_module.batch_statistics:
                pl_module.backbone.last.train()  # someone's own mixture of modes
            self.before = self.state(pl_module)

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.after = self.state(pl_module)

        @staticmethod
        def state(net: LightningModule) -> tuple[dict[str, Tensor], list[bool], Tensor, int]:
            buffers = sum(1 for _ in net.buffers())
            return copy.deepcopy(net.state_dict()), [m.training for m in net.modules()], torch.get_rng_state(), buffers

    net, watch = trained(model(**settings)), Watch()
    trainer(callbacks=[watch]).validate(net, episodes_loader() if settings else images_loader(), verbose=False)
    weights, modes, random, buffers = watch.before
    weights_after, modes_after, random_after, buffers_after = watch.after
    assert weights.keys() == weights_after.keys()
    assert all(weights[name].equal(weights_after[name]) for name in weights)
    assert modes == modes_after
    assert random.equal(random_after)
    assert buffers == buffers_after


def test_results_belong_to_their_loader() -> None:
    net, good, bad = trained(model()), dataset(noise=0.1), dataset(noise=30.0)
    (first, _) = trainer().test(net, [images_loader(good), images_loader(bad)], verbose=False)
    assert {f"test/{key}/dataloader_idx_{i}" for key in KEYS for i in (0, 1)} == first.keys()
    results = net.evaluation_results
    assert results.keys() == {"test/dataloader_idx_0", "test/dataloader_idx_1"}
    assert results["test/dataloader_idx_0"].mean == 1.0
    assert results["test/dataloader_idx_1"].mean < 0.6
    trainer().test(net, images_loader(bad), verbose=False)
    assert net.evaluation_results["test"] == results["test/dataloader_idx_1"]


def test_validate_after_fit_names_its_own_episodes() -> None:
    net, run = model(evaluation_batches="episodes"), trainer()
    run.fit(net, episodes_loader(fixed=False, episodes=1), episodes_loader(episodes=7))
    seen_in_fit = net.evaluation_results["val"]
    other = episodes_loader(episodes=9)
    run.validate(net, other, verbose=False)
    assert (seen_in_fit.n, net.evaluation_results["val"].n) == (7, 9)
    assert net.evaluation_results["val"].episodes_hash == other.batch_sampler.hash  # type: ignore[union-attr]


def test_the_sanity_check_is_silent_and_changes_nothing() -> None:
    class Watch(Callback):
        def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen = dict(trainer.callback_metrics), dict(pl_module.evaluation_results)

    watch, net = Watch(), model()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = trainer(max_steps=1, num_sanity_val_steps=1, callbacks=[watch])
        run.fit(net, episodes_loader(fixed=False, episodes=1), images_loader())
    assert watch.seen == ({}, {})
    assert net.evaluation_results["val"].n == 20


@pytest.mark.parametrize("cut", [{"limit_val_batches": 1}, {"fast_dev_run": True}])
def test_a_set_that_is_cut_short_gives_nan_and_one_warning_in_every_fit(cut: dict[str, Any]) -> None:
    net = model()
    net.evaluation_results["val"] = EpisodeAccuracy(0.5, 0.1, 0.1, 20, 3, 2, 4, "an earlier one")
    for _ in range(2):  # Python itself shows the same words of the same line once in a process
        run = trainer(max_epochs=2, num_sanity_val_steps=0, **cut)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            run.fit(net, episodes_loader(fixed=False, episodes=1), images_loader())
        [ours] = [str(w.message) for w in caught if "val/accuracy is NaN" in str(w.message)]
        assert "needs 6 images per class" in ours
    assert {key for key in run.callback_metrics if key.startswith("val/")} == {f"val/{key}" for key in KEYS}
    assert all(run.callback_metrics[f"val/{key}"].isnan() for key in KEYS - {"episodes", "batch_statistics"})
    assert run.callback_metrics["val/episodes"] == 0
    assert net.evaluation_results == {}  # nothing stale


@pytest.mark.parametrize("mode", ["images", "episodes"])
def test_embeddings_that_are_not_finite_give_nan(mode: Any) -> None:
    images, labels = dataset().tensors
    images[3] = math.nan
    loader = (images_loader if mode == "images" else episodes_loader)(TensorDataset(images, labels))
    with pytest.warns(UserWarning, match=r"test/accuracy is NaN, because nothing could be evaluated\. .*NaN"):
        (logged,) = trainer().test(model(evaluation_batches=mode), loader, verbose=False)
    assert math.isnan(logged["test/accuracy"])


def test_episodes_without_a_list_have_no_hash() -> None:
    images, labels = dataset().tensors
    rows = torch.cat([(labels == c).nonzero().flatten()[:6] for c in labels.unique()[:3]])
    loader = DataLoader(TensorDataset(images[rows], labels[rows]), batch_size=18)
    net = model(evaluation_batches="episodes")
    (logged,) = trainer().test(net, loader, verbose=False)
    assert net.evaluation_results["test"].episodes_hash == "unknown"
    assert math.isnan(logged["test/episodes_hash"])
    assert logged["test/episodes"] == 1


def test_episodes_of_other_sizes_than_the_protocol_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 4 classes with 2 \+ 4 images; the protocol is 3-way 2-shot with 4"):
        trainer().test(model(evaluation_batches="episodes"), episodes_loader(ways=4), verbose=False)
    with pytest.raises(
        ValueError, match="evaluation batch of 5 images is not an episode of 2 support images per class"
    ):
        trainer().test(model(evaluation_batches="episodes"), images_loader(), verbose=False)


def test_batch_statistics_change_the_result_and_are_logged() -> None:
    weights = trained(model()).state_dict()
    logged = {}
    for flag in (False, True):
        net = model(evaluation_batches="episodes", batch_statistics=flag)
        net.load_state_dict(weights)
        (logged[flag],) = trainer().test(net, episodes_loader(), verbose=False)
        assert logged[flag]["test/batch_statistics"] == float(flag)
        assert net.evaluation_results["test"].batch_statistics is flag
    assert logged[False]["test/accuracy"] != logged[True]["test/accuracy"]
    assert logged[False]["test/episodes_hash"] == logged[True]["test/episodes_hash"]


def test_batch_statistics_normalise_with_the_episode() -> None:
    net, images = trained(model()), torch.randn(9, 1, 4, 4)
    net.eval()
    with batch_norm_of_the_batch(net.backbone):
        embeddings = net(images)
    first, norm = net.backbone.layers[1](images.flatten(1)), net.backbone.layers[2]
    first = (first - first.mean(0)) / (first.var(0, correction=0) + norm.eps).sqrt() * norm.weight + norm.bias
    second, norm = net.backbone.last[0](first), net.backbone.last[1]
    second = (second - second.mean(0)) / (second.var(0, correction=0) + norm.eps).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(embeddings, second, rtol=1e-4, atol=1e-5)  # and no dropout
    assert not torch.allclose(embeddings, net(images), atol=1e-2)


def test_batch_norms_are_restored_after_an_exception() -> None:
    norm = nn.BatchNorm1d(2)
    mean, var = norm.running_mean, norm.running_var
    with pytest.raises(ValueError, match="more than 1 value per channel"), batch_norm_of_the_batch(norm):
        norm(torch.randn(1, 2))
    assert norm.running_mean is mean
    assert norm.running_var is var
    assert norm.training
    assert norm.num_batches_tracked == 0
    assert mean is not None
    assert mean.eq(0).all()


def test_mixed_precision_evaluates_the_same_episodes() -> None:
    net = trained(model())
    (logged,) = trainer(precision="bf16-mixed").test(net, images_loader(), verbose=False)
    expected = sample_episodes(dataset().tensors[1], ways=3, shots=2, queries=4, episodes=20, seed=5).hash
    assert logged["test/episodes_hash"] == int(expected[:6], 16)
    assert logged["test/accuracy"] > 0.4


def test_predictions_are_embeddings_with_labels() -> None:
    outputs = trainer().predict(model(), images_loader())
    assert outputs is not None
    assert torch.cat([batch["labels"] for batch in outputs]).equal(dataset().tensors[1])  # type: ignore[call-overload, index]
    assert outputs[0]["embeddings"].shape == (5, 6)  # type: ignore[call-overload, index]


# --- the pure functions


def test_hits_share_ties_and_keep_nan() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], [3.0, 3.0, 3.0], [1.0, 2.0, 2.0], [math.nan, 1.0, 0.0]])
    hits = query_hits(logits, torch.tensor([1, 2, 0, 1]))
    assert hits[:3].tolist() == pytest.approx([1.0, 1 / 3, 0.0])
    assert hits[3].isnan()
    batch = query_hits(torch.stack([logits, -logits]), torch.tensor([1, 2, 0, 1]))
    torch.testing.assert_close(batch[0], hits, equal_nan=True)


@pytest.mark.parametrize("numbers_at_once", [1, 500])
def test_pieces_do_not_matter(numbers_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fewshot_callbacks.protonet.evaluation.NUMBERS_AT_ONCE", numbers_at_once)
    labels = torch.arange(4).repeat(9)
    episodes = sample_episodes(labels, ways=3, shots=2, queries=4, episodes=7)
    embeddings = torch.randn(36, 5, dtype=torch.float64) + labels[:, None]
    expected = []
    for episode in episodes.indices:
        images = embeddings[episode]
        logits = DistanceRatioHead()(images[:, 2:].flatten(0, 1), prototypes(images[:, :2]))
        expected.append((logits.argmax(1) == torch.arange(3).repeat_interleave(4)).double().mean().item())
    result = evaluate_episodes(embeddings, labels, DistanceRatioHead(), episodes)
    assert result.mean == pytest.approx(sum(expected) / 7, abs=1e-12)
    assert not math.isnan(result.std)


def test_an_episode_list_of_other_labels_is_refused() -> None:
    labels = torch.arange(4).repeat(9)
    episodes = sample_episodes(labels, ways=3, shots=2, queries=4, episodes=7)
    score: Callable[[Tensor], EpisodeAccuracy] = lambda other: evaluate_episodes(  # noqa: E731
        torch.randn(len(other), 5), other, SoftmaxHead(), episodes
    )
    with pytest.raises(ValueError, match=r"drawn for other labels: in 7 of its 7 episodes a class mixes labels"):
        score(labels.sort().values)
    with pytest.raises(ValueError, match=r"drawn for other labels: in \d of its 7 episodes"):
        score(labels % 3)  # a class twice in an episode
    with pytest.raises(ValueError, match=r"names the images \d+ to \d+; there are 20 images"):
        score(labels[:20])
    with pytest.raises(ValueError, match="hold NaN or Inf"):
        evaluate_episodes(torch.full((36, 5), math.inf), labels, SoftmaxHead(), episodes)


@pytest.mark.parametrize(("field", "value"), [("ways", 1), ("shots", 0), ("queries", 0), ("episodes", 0), ("seed", -1)])
def test_a_protocol_refuses_small_numbers(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"EpisodeProtocol\({field}={value}\): use {field} >= {value + 1}"):
        EpisodeProtocol(**{field: value})


# --- construction, checkpoints, configuration


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shots": 0}, r"shots=0: .* Use shots >= 1"),
        ({"episodes_per_batch": 0}, r"episodes_per_batch=0: a batch needs at least one episode"),
        ({"learning_rate": 0.0}, r"learning_rate=0.0: Adam needs a positive step"),
        ({"batch_statistics": True}, r"a batch is not an episode\. Use evaluation_batches='episodes'"),
        (
            {"batch_statistics": True, "evaluation_batches": "episodes", "backbone": nn.Flatten()},
            r"batch norm, and Flatten has none\. Use batch_statistics=False",
        ),
        ({"in_channels": 0, "backbone": "conv4"}, "in_channels=0"),
    ],
)
def test_wrong_settings_fail_in_the_constructor(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**settings)


def test_a_checkpoint_of_a_named_backbone_rebuilds_everything(tmp_path: Any) -> None:
    data = dataset(size=16)
    net = ProtoNet("conv4", "dr", in_channels=1, shots=2, learning_rate=0.01, evaluation=PROTOCOL)
    run = trainer(max_steps=2)
    run.fit(net, episodes_loader(data, fixed=False))
    run.save_checkpoint(tmp_path / "net.ckpt")
    plain = torch.load(tmp_path / "net.ckpt", weights_only=True)["hyper_parameters"]
    assert plain["evaluation"] == {"ways": 3, "shots": 2, "queries": 4, "episodes": 20, "seed": 5}
    loaded = ProtoNet.load_from_checkpoint(tmp_path / "net.ckpt")
    assert (loaded.evaluation, loaded.shots, loaded.learning_rate) == (PROTOCOL, 2, 0.01)
    assert loaded.head.log_rho.item() != 2.0
    for each in (net, loaded):
        trainer().test(each, images_loader(data), verbose=False)
    assert loaded.evaluation_results == net.evaluation_results


def test_a_checkpoint_of_a_module_takes_the_module_again(tmp_path: Any) -> None:
    net = trained(model(head=SoftmaxHead()))
    run = trainer(max_steps=1)
    run.fit(net, episodes_loader(fixed=False))
    run.save_checkpoint(tmp_path / "net.ckpt")
    assert net.hparams.keys().isdisjoint({"backbone", "head"})
    loaded = ProtoNet.load_from_checkpoint(tmp_path / "net.ckpt", backbone=Small(), head=SoftmaxHead())
    assert all(value.equal(net.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_resuming_goes_on_where_it_stopped(tmp_path: Any) -> None:
    def fit(epochs: int, checkpoint: Any = None) -> ProtoNet:
        seed_everything(1, verbose=False)
        net = model(backbone=nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4)))
        run = trainer(max_epochs=epochs)
        run.fit(net, episodes_loader(fixed=False, episodes=3), images_loader(), ckpt_path=checkpoint)
        run.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return net

    whole = fit(2)
    fit(1)
    resumed = fit(2, tmp_path / "1.ckpt")
    assert resumed.evaluation_results == whole.evaluation_results
    assert all(value.equal(whole.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_command_line_configures_and_reloads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr("sys.argv", ["fewshot"])
    arguments = [
        "--model.backbone.class_path=torch.nn.Flatten",
        "--model.head=softmax",
        "--model.evaluation.ways=3",
        "--model.evaluation.shots=2",
        "--model.evaluation.queries=4",
    ]
    cli = LightningCLI(ProtoNet, run=False, args=arguments, save_config_callback=None)
    assert isinstance(cli.model.backbone, nn.Flatten)
    assert cli.model.evaluation == EpisodeProtocol(ways=3, shots=2, queries=4)
    net = cli.model
    run = trainer(max_steps=1)
    run.validate(net, images_loader(), verbose=False)
    run.save_checkpoint(tmp_path / "net.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without parameters
        loaded = ProtoNet.load_from_checkpoint(tmp_path / "net.ckpt")
    assert isinstance(loaded.backbone, nn.Flatten)
    assert loaded.evaluation == net.evaluation


# --- two processes


@pytest.mark.skipif(sys.platform != "linux", reason="torch survives a fork on Linux alone")
@pytest.mark.filterwarnings("ignore:.*sync_dist=True")  # the accuracy is that of all processes before it is logged
@pytest.mark.filterwarnings("ignore:.*evaluated exactly once")  # which is what is tested
@pytest.mark.parametrize("mode", ["images", "episodes"])
def test_two_processes_give_what_one_gives(mode: Any) -> None:
    # An episodic sampler deals its list to the ranks itself; images are dealt by the sampler that Lightning puts in.
    data = dataset(classes=5, per_class=7)  # 35 images: one rank gets a repeated one
    loader = (images_loader if mode == "images" else episodes_loader)(data)
    net = model(evaluation_batches=mode)
    trained(net, episodes_loader(data, fixed=False))
    (one,) = trainer().test(net, loader, verbose=False)
    (two,) = trainer(strategy="ddp_fork", devices=2, use_distributed_sampler=mode == "images").test(
        net, loader, verbose=False
    )
    assert one == pytest.approx(two, rel=0, abs=0, nan_ok=True)  # five classes are too few for the open interval
