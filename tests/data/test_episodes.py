"""The batch sampler: same episodes for any workers and ranks, fresh ones at each epoch, also after a resume."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.data import EpisodicBatchSampler
from fewshot_callbacks.functional.episodes import sample_episodes
from tests.data.trees import pretend

LABELS = torch.tensor([3, 1, 4, 1, 5]).repeat(12)  # 12 images of 3, 4, 5 and 24 of 1
SIZES = {"ways": 3, "shots": 2, "queries": 4}


def loader(**settings: int) -> DataLoader[tuple[Tensor, ...]]:
    sampler = EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=2, **settings)
    return DataLoader(TensorDataset(torch.arange(60), LABELS), batch_sampler=sampler)


def test_batches_are_class_major_with_support_first() -> None:
    sampler = EpisodicBatchSampler(LABELS, **SIZES, episodes=5, fixed=True, seed=7)
    expected = sample_episodes(LABELS, **SIZES, episodes=5, seed=7)
    batches = list(sampler)
    assert batches == [episode.flatten().tolist() for episode in expected.indices]
    assert sampler.hash == sampler.episode_list.hash == expected.hash
    for batch in batches:
        labels = LABELS[batch].reshape(3, 6)
        assert (labels == labels[:, :1]).all()


def test_fixed_episodes_are_the_same_at_every_epoch_for_any_number_of_workers() -> None:
    sampler = EpisodicBatchSampler(LABELS, **SIZES, episodes=5, fixed=True)
    seen = []
    for workers in (0, 2):
        batches = DataLoader(TensorDataset(torch.arange(60)), batch_sampler=sampler, num_workers=workers)
        seen += [[batch.tolist() for (batch,) in batches] for _ in range(2)]
        sampler.set_epoch(9)
    assert all(epoch == seen[0] for epoch in seen)


def test_training_episodes_are_fresh_at_each_epoch_and_a_function_of_seed_and_epoch() -> None:
    one, same, other = (EpisodicBatchSampler(LABELS, **SIZES, episodes=5, seed=seed) for seed in (0, 0, 1))
    epochs = [list(one) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    torch.manual_seed(99)
    workers = DataLoader(TensorDataset(torch.arange(60)), batch_sampler=same, num_workers=2)
    assert [[batch.tolist() for (batch,) in workers] for _ in range(3)] == epochs
    assert list(other) != epochs[0]
    one.set_epoch(1)
    assert one.episode_list.indices.flatten(1).tolist() == epochs[1]
    assert list(one) == epochs[1]
    assert list(one) == epochs[2]
    assert list(EpisodicBatchSampler(LABELS, **SIZES, episodes=5, epoch=2)) == epochs[2]


def test_wrong_settings_fail_in_the_constructor() -> None:
    with pytest.raises(ValueError, match=r"class 'three' has 12, the smallest of 3 classes"):
        EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=15, episodes=5, class_names={3: "three"})
    with pytest.raises(ValueError, match=r"5-way episodes need 5 classes; the labels hold 4"):
        EpisodicBatchSampler(LABELS, ways=5, shots=1, queries=1, episodes=5)
    with pytest.raises(ValueError, match=r"5 episodes do not make a batch of 6\. Use episodes >= 6"):
        EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=1, episodes=5, episodes_per_batch=6)
    with pytest.raises(ValueError, match=r"episodes_per_batch is 0"):
        EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=1, episodes=5, episodes_per_batch=0)


@pytest.mark.parametrize("fixed", [True, False])
def test_several_episodes_in_a_batch_are_those_of_the_list(fixed: bool) -> None:
    sampler = EpisodicBatchSampler(LABELS, **SIZES, episodes=7, fixed=fixed, episodes_per_batch=3)
    episodes = sampler.episode_list.indices.flatten(1)
    assert len(sampler) == 2  # the seventh is left out
    assert list(sampler) == [episodes[:3].flatten().tolist(), episodes[3:6].flatten().tolist()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("fixed", [True, False])
def test_ranks_share_the_episodes(monkeypatch: pytest.MonkeyPatch, world_size: int, fixed: bool) -> None:
    shares = []
    for rank in range(world_size):
        pretend(monkeypatch, rank, world_size)
        sampler = EpisodicBatchSampler(LABELS, **SIZES, episodes=7, fixed=fixed)
        everything = sampler.episode_list.indices.flatten(1).tolist()
        share = list(sampler)
        assert len(share) == len(sampler)
        assert share == everything[rank::world_size][: len(share)]
        shares.append(share)
    lengths = [len(share) for share in shares]
    if fixed:
        assert sum(lengths) == 7
        assert max(lengths) - min(lengths) <= 1
    else:
        assert set(lengths) == {7 // world_size}


def test_training_needs_an_episode_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, 8)
    sampler = EpisodicBatchSampler(LABELS, **SIZES, episodes=7)
    with pytest.raises(ValueError, match=r"7 episodes per epoch leave some of the 8 processes without one. .* >= 8"):
        len(sampler)
    sampler = EpisodicBatchSampler(LABELS, **SIZES, episodes=12, episodes_per_batch=2)
    with pytest.raises(ValueError, match=r"12 episodes .* of the 8 processes without a batch of 2. .* >= 16"):
        len(sampler)


class Writer(LightningModule):
    """Leaves what its process has seen in a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.weight = folder, torch.nn.Parameter(torch.zeros(1))
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": []}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen["train"].append(batch[0].tolist())
        return self.weight.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def validation_step(self, batch, batch_idx):
        self.seen["val"].append(batch[0].tolist())

    def on_fit_end(self):
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.seen))


@pytest.mark.skipif(sys.platform != "linux", reason="torch survives a fork on Linux alone")
def test_two_processes_of_a_trainer_split_the_episodes_and_repeat_none(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    processes = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_fork"}
    Trainer(**quiet, **processes, enable_checkpointing=False, max_epochs=2, num_sanity_val_steps=0).fit(
        Writer(tmp_path), loader(episodes=7), loader(episodes=6, fixed=True)
    )
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))

    expected = EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=2, episodes=7)
    for epoch in range(2):
        episodes = list(expected)
        assert zero["train"][3 * epoch : 3 * epoch + 3] == episodes[0:6:2]
        assert one["train"][3 * epoch : 3 * epoch + 3] == episodes[1:6:2]
    assert len(zero["train"]) == len(one["train"]) == 6

    fixed = list(EpisodicBatchSampler(LABELS, ways=2, shots=1, queries=2, episodes=6, fixed=True))
    assert zero["val"] == fixed[0::2] * 2
    assert one["val"] == fixed[1::2] * 2
    assert set(Counter(map(tuple, zero["val"] + one["val"])).values()) == {2}  # once in each of the two epochs
