"""What the data modules share: episodes or balanced batches to train on, splits or fixed episodes to evaluate on."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from fewshot_callbacks.data.class_balanced import ClassBalancedBatchSampler, check_batch_sizes
from fewshot_callbacks.data.episodes import EpisodicBatchSampler
from fewshot_callbacks.functional.episodes import ClassNames, check_episode_sizes

Split = Literal["train", "val", "test"]
Batch = tuple[Float[Tensor, "images channels height width"], Int[Tensor, "images"]]


@dataclass(frozen=True, eq=False)
class LabelledSplit:
    """A data set whose `__getitems__` gives whole batches, and the labels that episodes are drawn from."""

    dataset: Dataset[tuple[Tensor, int]]
    labels: Int[Tensor, "items"]
    class_names: ClassNames


def as_it_is(batch: Any) -> Any:
    """The `collate_fn` of a data set that hands out whole batches."""
    return batch


def coming_epoch(trainer: Trainer | None) -> int:
    """The training epoch that comes next: not 0 where a run is resumed.

    It is the number that Lightning hands to `set_epoch` a little later, and too late for workers, which fetch their
    first batches as soon as the loader is made. `trainer.current_epoch` is one behind after a checkpoint of the end of
    an epoch.
    """
    if trainer is None:
        return 0
    processed: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # declared too wide
    return processed


class EpisodicDataModule(LightningDataModule):
    """Base: subclasses say what a split is (`_split`), this class says which batches it is served in.

    Batches are tuples: images (float, images x channels x height x width) and labels (int64, 0 ... C-1 in the split).
    """

    def __init__(
        self,
        *,
        ways: int,
        shots: int,
        queries: int,
        episodes: int,
        episodes_per_batch: int,
        classes_per_batch: int | None,
        items_per_class: int,
        batch_size: int,
        seed: int,
        num_workers: int,
        episodic_evaluation: bool,
        test_ways: int,
        test_shots: int,
        test_queries: int,
        test_episodes: int,
        test_seed: int,
        val_episodes: int | None,
    ) -> None:
        super().__init__()
        check_episode_sizes(
            ways=ways, shots=shots, queries=queries, episodes=episodes, episodes_per_batch=episodes_per_batch
        )
        if classes_per_batch is not None:
            check_batch_sizes(classes_per_batch, items_per_class)
        val_episodes = test_episodes if val_episodes is None else val_episodes
        check_episode_sizes(
            test_ways=test_ways,
            test_shots=test_shots,
            test_queries=test_queries,
            test_episodes=test_episodes,
            val_episodes=val_episodes,
        )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}. Use batch_size >= 1.")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}. Use 0 to load in the main process.")
        self.ways = ways
        self.shots = shots
        self.queries = queries
        self.episodes = episodes
        self.episodes_per_batch = episodes_per_batch
        self.classes_per_batch = classes_per_batch
        self.items_per_class = items_per_class
        self.batch_size = batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.episodic_evaluation = episodic_evaluation
        self.test_ways = test_ways
        self.test_shots = test_shots
        self.test_queries = test_queries
        self.test_episodes = test_episodes
        self.test_seed = test_seed
        self.val_episodes = val_episodes

    @abstractmethod
    def _split(self, name: Split) -> LabelledSplit:
        """The data set and the labels of a split, loaded if they are not yet."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """`episodes` fresh episodes per epoch, or class-balanced batches, a function of (seed, epoch)."""
        split = self._split("train")
        if self.classes_per_batch is not None:
            balanced = ClassBalancedBatchSampler(
                split.labels,
                classes_per_batch=self.classes_per_batch,
                items_per_class=self.items_per_class,
                batches=self.episodes,
                seed=self.seed,
                class_names=split.class_names,
                epoch=coming_epoch(self.trainer),
            )
            return self._batch_loader(split, balanced)
        sampler = EpisodicBatchSampler(
            split.labels,
            ways=self.ways,
            shots=self.shots,
            queries=self.queries,
            episodes=self.episodes,
            episodes_per_batch=self.episodes_per_batch,
            seed=self.seed,
            class_names=split.class_names,
            epoch=coming_epoch(self.trainer),
        )
        return self._batch_loader(split, sampler)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]] | list[DataLoader[tuple[Tensor, int]]]:
        """Each validation image once, in order; with `episodic_evaluation`, fixed episodes.

        With several processes, Lightning deals the images out and repeats a few (fewer than there are processes) to
        make the shares equal; episodes are never repeated.
        """
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Each test image once, in order; with `episodic_evaluation`, fixed episodes. See `val_dataloader`."""
        return self._evaluation_loader("test")

    def training_data_for_evaluation(self) -> DataLoader[tuple[Tensor, int]]:
        """Each training image once, in order, as evaluation images are served: not augmented.

        `GeneralizationGapMonitor` draws its training classes from it.
        """
        return self._image_loader(self._plain_training_split())

    def _plain_training_split(self) -> LabelledSplit:
        """The training split without augmentation."""
        return self._split("train")

    def _image_loader(self, split: LabelledSplit) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            split.dataset,
            batch_size=self.batch_size,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def _evaluation_loader(self, name: Split) -> DataLoader[tuple[Tensor, int]]:
        split = self._split(name)
        if not self.episodic_evaluation:
            return self._image_loader(split)
        sampler = EpisodicBatchSampler(
            split.labels,
            ways=self.test_ways,
            shots=self.test_shots,
            queries=self.test_queries,
            episodes=self.val_episodes if name == "val" else self.test_episodes,
            seed=self.test_seed,
            fixed=True,
            class_names=split.class_names,
        )
        return self._batch_loader(split, sampler)

    def _batch_loader(self, split: LabelledSplit, sampler: BatchSampler) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            split.dataset,
            batch_sampler=sampler,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
