"""ProtoNet trains, evaluates on a fixed list of episodes, and leaves no trace; on two processes, too."""

import copy
import math
import sys
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.data.samplers import EpisodicBatchSampler
from fewshot_callbacks.functional.episode_accuracy import EpisodeAccuracy
from fewshot_callbacks.functional.episodes import sample_episodes
from fewshot_callbacks.protonet import DistanceRatioHead, EpisodeProtocol, ProtoNet, SoftmaxHead, SupportClassifier
from fewshot_callbacks.protonet.evaluation import batch_norm_of_the_batch, evaluate_episodes, query_hits
from fewshot_callbacks.protonet.module import ExponentWatch
from tests.callbacks import models
from tests.messages import missing_facts, refused, warned

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")  # many train or evaluate, not both

SIZES = {"ways": 3, "shots": 2, "queries": 4}
FIXED = {**SIZES, "episodes": 20, "seed": 5}
PROTOCOL = EpisodeProtocol(**FIXED)
TRANSDUCTIVE = {"evaluation_batches": "episodes", "batch_statistics": True}
KEYS = {"accuracy", "accuracy_std", "accuracy_ci95", "accuracy_ci95_open"}


class Small(nn.Module):
    """A backbone with everything that an evaluation could disturb: batch norm, dropout, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Dropout(0.2))
        self.last = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.layers(images))


def dataset(noise: float = 1.0, classes: int = 4, per_class: int = 9, size: int = 4) -> TensorDataset:
    """Images of classes that differ in their mean image; labels are neither 0 ... C-1 nor sorted."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(classes).repeat(per_class)
    means = torch.randn(classes, 1, size, size, generator=generator)
    images = means[labels] + noise * torch.randn(len(labels), 1, size, size, generator=generator)
    return TensorDataset(images, 10 * labels - 7)


DATA = dataset()
IMAGES, LABELS = DATA.tensors


def images_loader(data: TensorDataset = DATA, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, **({"batch_size": 5} | settings))


def episodes_loader(data: TensorDataset = DATA, fixed: bool = True, **sizes: int) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=EpisodicBatchSampler(data.tensors[1], **(FIXED | sizes), fixed=fixed))


def model(**settings: Any) -> ProtoNet:
    return ProtoNet(**({"backbone": Small(), "evaluation": PROTOCOL, "shots": 2} | settings))


def trainer(*callbacks: Callback, **settings: Any) -> Trainer:
    return models.trainer(*callbacks, **({"num_sanity_val_steps": 2} | settings))


def trained(net: ProtoNet) -> ProtoNet:
    """After a few steps, so that running statistics say something."""
    trainer(max_steps=3).fit(net, episodes_loader(fixed=False))
    return net


def evaluated(net: ProtoNet, loaders: Any, stage: str = "test", **settings: Any) -> dict[str, float]:
    """What is logged of the first loader."""
    run = trainer(**settings)
    return (run.test if stage == "test" else run.validate)(net, loaders, verbose=False)[0]


def test_it_learns_and_a_checkpoint_of_a_named_backbone_rebuilds_everything(tmp_path: Any) -> None:
    data = dataset(noise=1.5, classes=8, per_class=12, size=16)
    net, run = model(backbone="conv4", head="dr", in_channels=1, learning_rate=2e-3), trainer(max_steps=25)
    run.fit(net, episodes_loader(data, fixed=False, episodes=25))
    run.save_checkpoint(tmp_path / "net.ckpt")
    plain = torch.load(tmp_path / "net.ckpt", weights_only=True)["hyper_parameters"]
    assert plain["evaluation"] == FIXED
    loaded = ProtoNet.load_from_checkpoint(tmp_path / "net.ckpt")
    assert (loaded.evaluation, loaded.shots, loaded.learning_rate) == (PROTOCOL, 2, 2e-3)
    assert loaded.head.log_rho.item() != 2.0
    for each in (net, loaded):
        evaluated(each, images_loader(data, batch_size=64))
    result = net.evaluation_results["test"]
    assert result.mean > 0.9 > 1 / 3 + 5 * result.ci95
    assert loaded.evaluation_results == net.evaluation_results


@pytest.mark.parametrize(("representation", "episodes"), [("mean", 1), ("nearest", 1), ("mean", 3)])
def test_a_training_step_is_the_cross_entropy_of_the_queries(representation: Any, episodes: int) -> None:
    net = model(backbone=nn.Flatten(), head="dr", representation=representation, episodes_per_batch=episodes)
    order = torch.cat([torch.randperm(len(LABELS)) for _ in range(episodes)])  # rows come in any order
    losses, hits = [], []
    for chosen in order.chunk(episodes):
        x, labels = IMAGES[chosen].flatten(1).double(), LABELS[chosen]
        rows = [(labels == c).nonzero().flatten() for c in labels.unique()]
        support = [x[own[:2]].mean(0, keepdim=True) if representation == "mean" else x[own[:2]] for own in rows]
        for position, own in enumerate(rows):
            for row in own[2:]:
                distances = torch.stack([(x[row] - points).square().sum(1).min() for points in support])
                logits = -math.exp(2.0) / 2 * (distances + 1e-10).log()
                losses.append(-logits.log_softmax(0)[position].item())
                hits.append(float(logits.argmax() == position))
    run = trainer(max_steps=1)
    run.fit(net, images_loader(TensorDataset(IMAGES[order], LABELS[order]), batch_size=len(order)))
    expected = {"loss": sum(losses) / len(losses), "accuracy": sum(hits) / len(hits), "rho": math.exp(2.0)}
    logged = {name: float(run.callback_metrics[f"train/{name}"]) for name in expected}
    assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("value", "rho", "last"), [(90.0, "inf", 3), (-math.inf, "0.0", 3), (math.nan, "nan", 20)])
def test_a_rho_that_is_not_finite_stops_the_training(value: float, rho: str, last: int) -> None:
    class Diverge(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == last:
                pl_module.head.log_rho.data.fill_(value)

    facts = ("rho", rho, f"step {last}", 7.389, f"step {last - 1}", "learning rate", "gradient_clip_val=1.0")
    with refused(ValueError, *facts):
        trainer(Diverge()).fit(model(head="dr", learning_rate=1e-9), episodes_loader(fixed=False))


def test_a_watch_that_looks_at_every_fourth_step_names_the_right_step() -> None:
    watch, head = ExponentWatch(interval=4), DistanceRatioHead()
    for step in range(2):
        watch.see(step, head)
    head.log_rho.data.fill_(99.0)
    watch.see(2, head)
    with refused(ValueError, "rho", "inf", "step 2", "step 1"):
        watch.see(3, head)


def test_new_classes_are_learned_from_a_few_images_represented_as_in_training() -> None:
    net = trained(model(representation="nearest")).train()
    before = copy.deepcopy(net.state_dict())
    support = (LABELS[:, None] == LABELS).tril().sum(1) <= 3  # the first three of each class
    classifier = net.support_classifier(IMAGES[support], LABELS[support])
    found = torch.cat([classifier.probabilities(image[None]) for image in IMAGES[~support]])  # each by itself
    assert all(part.training for part in net.modules())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    embeddings = net.eval()(IMAGES).detach()
    by_hand = SupportClassifier(net.head, "nearest").fit(embeddings[support], LABELS[support])
    torch.testing.assert_close(found, by_hand.probabilities(embeddings[~support]), rtol=0, atol=1e-6)


def test_steps_hand_embeddings_to_callbacks() -> None:
    class Recorder(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
            assert outputs.keys() == {"loss", "embeddings", "labels"}
            assert outputs["embeddings"].shape == (3 * 6, 6)
            assert not outputs["embeddings"].requires_grad

        def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
            validated.append(outputs)

    validated, net, run = [], model(), trainer(Recorder(), max_steps=2, num_sanity_val_steps=0)
    run.fit(net, episodes_loader(fixed=False, episodes=2), images_loader())
    for found in (validated, run.predict(net, images_loader())):
        assert all(outputs.keys() == {"embeddings", "labels"} for outputs in found)
        assert torch.cat([outputs["labels"] for outputs in found]).equal(LABELS)
        assert found[0]["embeddings"].shape == (5, 6)


def test_batches_that_are_no_episode_and_outputs_that_are_no_embeddings_are_refused() -> None:
    with refused(ValueError, "ProtoNet", "a training batch", 5, "EpisodicBatchSampler", "shots=2"):
        trainer(max_steps=1).fit(model(), images_loader())
    with refused(ValueError, "ProtoNet", "Identity", "(2, 1, 4, 4)", "(images, dim)", "nn.Flatten()"):
        model(backbone=nn.Identity())(torch.zeros(2, 1, 4, 4))
    net = model(evaluation_batches="episodes")
    with refused(ValueError, "evaluation", "4 classes", "2 + 4", "3-way", "2-shot"):
        evaluated(net, episodes_loader(ways=4))
    with refused(ValueError, "ProtoNet", "an evaluation batch", 5, "EpisodicBatchSampler", "shots=2"):
        evaluated(net, images_loader())


@pytest.mark.parametrize(
    ("head", "stage", "number", "representation"), [("softmax", "val", 15, "nearest"), ("dr", "test", 20, "mean")]
)
def test_embedding_each_image_once_equals_forwarding_each_episode(
    head, stage, number, representation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow road: every episode on its own through the network, one query at a time."""
    monkeypatch.setattr("fewshot_callbacks.protonet.evaluation.NUMBERS_AT_ONCE", 500)  # four episodes in a piece
    net = trained(model(head=head, representation=representation, val_episodes=15))
    logged = evaluated(net, images_loader(), stage)
    episodes, accuracies = sample_episodes(LABELS, **(FIXED | {"episodes": number})), []
    net.eval()
    for episode in episodes.indices:
        embedded = net.backbone(IMAGES[episode.flatten()]).detach().double().unflatten(0, (3, 6))
        support = [row[:2].mean(0, keepdim=True) if representation == "mean" else row[:2] for row in embedded]
        hits = [
            min(range(3), key=lambda c: float((query - support[c]).norm(dim=1).min())) == way
            for way, row in enumerate(embedded)
            for query in row[2:]
        ]
        accuracies.append(sum(hits) / len(hits))
    result, values = net.evaluation_results[stage], torch.tensor(accuracies, dtype=torch.float64)
    assert 0.4 < result.mean < 1.0  # neither chance nor certain: the comparison says something
    expected = {"accuracy": values.mean().item(), "accuracy_std": values.std().item()}
    expected["accuracy_ci95"] = 1.96 * expected["accuracy_std"] / math.sqrt(number)
    assert (result.mean, result.std, result.ci95) == pytest.approx(tuple(expected.values()), abs=1e-12)
    assert (result.n, result.ways, result.shots, result.queries) == (number, 3, 2, 4)
    assert result.episodes_hash == episodes.hash
    assert logged.keys() == {f"{stage}/{key}" for key in KEYS}
    assert {key: logged[f"{stage}/{key}"] for key in expected} == pytest.approx(expected)


def test_batches_of_episodes_give_the_result_of_batches_of_images_and_a_limit_names_the_first_episodes() -> None:
    net, loader = trained(model(representation="nearest")), episodes_loader()
    evaluated(net, images_loader())
    net.evaluation_batches = "episodes"
    logged = evaluated(net, loader, "val")
    assert net.evaluation_results["val"] == net.evaluation_results["test"]
    assert logged.keys() == {f"val/{key}" for key in KEYS}
    evaluated(net, loader, limit_test_batches=6)
    result = net.evaluation_results["test"]
    assert (result.n, result.episodes_hash) == (6, loader.batch_sampler.episode_list.first(6).hash)
    net.batch_statistics = True
    transductive = evaluated(net, loader, "val")
    assert transductive["val/accuracy"] != logged["val/accuracy"]
    assert net.evaluation_results["val"].batch_statistics


@pytest.mark.parametrize("settings", [{}, TRANSDUCTIVE], ids=["images", "episodes"])
def test_evaluation_leaves_no_trace(settings: dict[str, Any]) -> None:
    def state(net: LightningModule) -> dict[str, Any]:
        modes, buffers = [part.training for part in net.modules()], len(list(net.buffers()))
        return {**copy.deepcopy(net.state_dict()), "random": torch.get_rng_state(), "modes": [*modes, buffers]}

    class Watch(Callback):
        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if pl_module.batch_statistics:
                pl_module.backbone.last.train()  # someone's own mixture of modes
            self.before = state(pl_module)

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.after = state(pl_module)

    net, watch = trained(model(**settings)), Watch()
    trainer(watch).validate(net, episodes_loader() if settings else images_loader(), verbose=False)
    torch.testing.assert_close(watch.after, watch.before, rtol=0, atol=0)


def test_each_loader_has_its_own_results() -> None:
    net, good, bad = trained(model()), images_loader(dataset(noise=0.1)), images_loader(dataset(noise=30.0))
    logged = evaluated(net, [good, bad])
    assert logged.keys() == {f"test/{key}/dataloader_idx_{i}" for key in KEYS for i in (0, 1)}
    results = net.evaluation_results
    assert results.keys() == {"test/dataloader_idx_0", "test/dataloader_idx_1"}
    assert results["test/dataloader_idx_0"].mean == 1.0
    assert results["test/dataloader_idx_1"].mean < 0.6
    evaluated(net, bad)
    assert net.evaluation_results["test"] == results["test/dataloader_idx_1"]


def test_the_sanity_check_is_silent_and_changes_nothing() -> None:
    class Watch(Callback):
        def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen = dict(trainer.callback_metrics), dict(pl_module.evaluation_results)

    watch, net = Watch(), model()
    trainer(watch, max_steps=1).fit(net, episodes_loader(fixed=False, episodes=1), images_loader())
    assert watch.seen == ({}, {})
    assert net.evaluation_results["val"].n == 20


def test_a_set_that_is_cut_short_gives_nan_and_one_warning_in_every_fit() -> None:
    net = model()
    net.evaluation_results["val"] = EpisodeAccuracy(0.5, 0.1, 0.1, 20, 3, 2, 4, "an earlier one")
    for _ in range(2):  # Python itself shows the same words of the same line once in a process
        run = trainer(max_epochs=2, num_sanity_val_steps=0, limit_val_batches=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            run.fit(net, episodes_loader(fixed=False, episodes=1), images_loader())
        [ours] = [str(w.message) for w in caught if "val/accuracy" in str(w.message)]
        assert missing_facts(ours, ("NaN", 6, "class")) == []
    logged = {key: float(value) for key, value in run.callback_metrics.items() if key.startswith("val/")}
    assert logged == pytest.approx({f"val/{key}": math.nan for key in KEYS}, nan_ok=True)
    assert net.evaluation_results == {}  # nothing stale


@pytest.mark.parametrize(("mode", "loader"), [("images", images_loader), ("episodes", episodes_loader)])
def test_embeddings_that_are_not_finite_give_nan(mode: Any, loader: Any) -> None:
    images = IMAGES.clone()
    images[3] = math.nan
    facts = ("evaluate_episodes",) if mode == "images" else ("ProtoNet", "evaluation batch 3")
    with warned(UserWarning, "test/accuracy", "NaN", "embeddings", "Inf", *facts) as caught:
        logged = evaluated(model(evaluation_batches=mode), loader(TensorDataset(images, LABELS)))
    assert not [one for one in caught if "percentages" in str(one.message)]
    assert math.isnan(logged["test/accuracy"])


def test_the_progress_bar_shows_one_value_of_training_and_one_of_validation() -> None:
    run = trainer(max_epochs=1)
    run.fit(model(), episodes_loader(fixed=False), images_loader())
    assert set(run.progress_bar_metrics) == {"train/loss", "val/accuracy"}
    assert "train/accuracy" in run.logged_metrics


def collated(batch: list[Any]) -> tuple[Tensor, Any]:
    """Labels are strings in the batches that hold an odd number of images, integers in the others."""
    images, labels = zip(*batch, strict=True)
    is_odd = len(batch) % 2 == 1
    return torch.stack(images), [str(int(label)) for label in labels] if is_odd else torch.stack(labels)


def mixed_loader() -> DataLoader[Any]:
    """Three batches of 12, 12 and 11 images."""
    return DataLoader(TensorDataset(IMAGES[:35], LABELS[:35]), batch_size=12, collate_fn=collated)


def test_strings_and_integers_in_one_validation_give_nan_and_one_warning() -> None:
    net = model()
    with warned(UserWarning, "val/accuracy", "NaN", "labels", "integers", "strings") as caught:
        trainer(max_epochs=2).fit(net, episodes_loader(fixed=False), mixed_loader())
    assert len([one for one in caught if "val/accuracy" in str(one.message)]) == 1
    assert math.isnan(net.trainer.callback_metrics["val/accuracy"])
    assert net.trainer.current_epoch == 2
    assert evaluated(net, images_loader())["test/accuracy"] > 0  # a later set is another one


def test_labels_that_are_missing_end_the_run() -> None:
    loader = DataLoader(DATA, batch_size=12, collate_fn=lambda batch: (torch.stack([x for x, _ in batch]), [None] * 12))
    with refused(ValueError, "ProtoNet", 12, "labels", "None"):
        evaluated(model(), loader)


def test_episodes_without_a_list_have_no_hash() -> None:
    rows = torch.cat([(c == LABELS).nonzero().flatten()[:6] for c in LABELS.unique()[:3]])
    net = model(evaluation_batches="episodes")
    evaluated(net, images_loader(TensorDataset(IMAGES[rows], LABELS[rows]), batch_size=18))
    result = net.evaluation_results["test"]
    assert (result.episodes_hash, result.n) == ("unknown", 1)


def test_the_episodes_are_named_once_and_again_where_they_change(caplog: pytest.LogCaptureFixture) -> None:
    """As values of each epoch they were flat lines among the charts."""
    for logger in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):  # whatever another test has set
        caplog.set_level("INFO", logger=logger)
    net = model(val_episodes=7)
    episodes = sample_episodes(LABELS, **(FIXED | {"episodes": 7}))
    run = trainer(max_epochs=3, num_sanity_val_steps=0)
    run.fit(net, episodes_loader(fixed=False, episodes=1), images_loader())
    [named] = [record.getMessage() for record in caplog.records if "2-shot" in record.getMessage()]
    assert missing_facts(named, ("val", 7, "3-way", episodes.hash)) == []
    [reason] = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert missing_facts(reason, ("accuracy_ci95_open", 4, "classes")) == []
    assert math.isnan(run.callback_metrics["val/accuracy_ci95_open"])
    constant = {"episodes", "episodes_hash", "batch_statistics"}
    assert not {key for key in run.callback_metrics if key.split("/")[1] in constant}
    caplog.clear()
    evaluated(net, images_loader(), "test")
    [named] = [record.getMessage() for record in caplog.records if "2-shot" in record.getMessage()]
    assert missing_facts(named, ("test", 20, "3-way", sample_episodes(LABELS, **FIXED).hash)) == []


def test_batch_statistics_normalise_with_the_episode_and_are_restored() -> None:
    net, images = trained(model()).eval(), torch.randn(9, 1, 4, 4)
    before = copy.deepcopy(net.state_dict())
    with batch_norm_of_the_batch(net.backbone):
        embeddings = net(images)
    expected = images.flatten(1)
    for linear, norm in (net.backbone.layers[1:3], net.backbone.last):
        raw = linear(expected)
        expected = (raw - raw.mean(0)) / (raw.var(0, correction=0) + norm.eps).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5)  # and no dropout
    assert not torch.allclose(embeddings, net(images), atol=1e-2)
    with refused(ValueError, 1, "channel"), batch_norm_of_the_batch(net.train()):
        net(images[:1])
    assert all(part.training for part in net.modules())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_hits_share_ties_and_keep_nan() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], [3.0, 3.0, 3.0], [1.0, 2.0, 2.0], [math.nan, 1.0, 0.0]])
    hits = query_hits(torch.stack([-logits, logits]), torch.tensor([1, 2, 0, 1]))
    assert hits[1].tolist() == pytest.approx([1.0, 1 / 3, 0.0, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("labels", "facts"),
    [
        (LABELS.sort().values, (7, "episodes", "class")),
        ((LABELS + 7) // 10 % 3, (7, "episodes", "class")),  # a class twice in an episode
        (LABELS[:20], (20, "images")),
    ],
    ids=["mixed", "twice", "fewer"],
)
def test_an_episode_list_of_other_labels_is_refused(labels: Tensor, facts: tuple[Any, ...]) -> None:
    episodes = sample_episodes(LABELS, **SIZES, episodes=7)
    with refused(ValueError, "sample_episodes(labels, ...)", *facts):
        evaluate_episodes(torch.randn(len(labels), 5), labels, SoftmaxHead(), episodes)


def test_a_resumed_training_equals_one_that_was_not_stopped_and_modules_are_passed_again(tmp_path: Any) -> None:
    def modules() -> dict[str, nn.Module]:
        return {"backbone": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16)), "head": SoftmaxHead()}

    def fit(epochs: int, checkpoint: Any = None) -> ProtoNet:
        seed_everything(1, verbose=False)
        net, run = model(**modules()), trainer(max_epochs=epochs)
        run.fit(net, episodes_loader(fixed=False, episodes=3), images_loader(), ckpt_path=checkpoint)
        run.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        assert "train/rho" not in run.callback_metrics
        return net

    whole, _, resumed = fit(2), fit(1), fit(2, tmp_path / "1.ckpt")
    assert resumed.evaluation_results == whole.evaluation_results
    assert whole.hparams.keys().isdisjoint({"backbone", "head"})
    for net in (resumed, ProtoNet.load_from_checkpoint(tmp_path / "2.ckpt", **modules())):
        torch.testing.assert_close(net.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The state dict in .* contains no parameters")
def test_command_line_configures_and_reloads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr("sys.argv", ["fewshot"])
    sizes = [f"--model.evaluation.{name}={size}" for name, size in SIZES.items()]
    arguments = ["--model.backbone.class_path=torch.nn.Flatten", "--model.head=softmax", *sizes]
    net = LightningCLI(ProtoNet, run=False, args=arguments, save_config_callback=None).model
    run = trainer()
    run.validate(net, images_loader(), verbose=False)
    run.save_checkpoint(tmp_path / "net.ckpt")
    for each in (net, ProtoNet.load_from_checkpoint(tmp_path / "net.ckpt")):
        assert isinstance(each.backbone, nn.Flatten)
        assert each.evaluation == EpisodeProtocol(**SIZES)


@pytest.mark.skipif(sys.platform != "linux", reason="torch survives a fork on Linux alone")
@pytest.mark.filterwarnings("ignore:.*sync_dist=True")  # the accuracy is that of all processes before it is logged
@pytest.mark.filterwarnings("ignore:.*evaluated exactly once")  # which is what is tested
@pytest.mark.parametrize(("mode", "make"), [("images", images_loader), ("episodes", episodes_loader)])
def test_two_processes_give_the_result_of_one(mode: Any, make: Any) -> None:
    # An episodic sampler deals its list to the ranks itself; images are dealt by the sampler that Lightning puts in.
    data = dataset(classes=5, per_class=7)  # 35 images: one rank gets a repeated one
    net, loader = trained(model(evaluation_batches=mode)), make(data)
    one = evaluated(net, loader)
    two = evaluated(net, loader, strategy="ddp_fork", devices=2, use_distributed_sampler=mode == "images")
    assert one == pytest.approx(two, rel=0, abs=0, nan_ok=True)  # five classes are too few for the open interval
