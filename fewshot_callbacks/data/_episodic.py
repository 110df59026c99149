"""What the data modules share: episodes or balanced batches to train on, splits or fixed episodes to evaluate on."""

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from fewshot_callbacks.data._settings import with_settings
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
    """The `collate_fn` of a data set that returns whole batches."""
    return batch


def seeded_draw(name: str, seed: int) -> float:
    """Draw a number in [0, 1): the first 8 bytes of SHA-256 of "seed name", read as a fraction."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") / 2**64


def split_of(name: str, seed: int, val_share: float, test_share: float) -> Split:
    """Draw a class into a split: a function of its name and the seed alone, on every machine.

    Args:
        name: Name of the class.
        seed: Another seed is another draw.
        val_share: Share of the classes to validate on, on average.
        test_share: Share of the classes to test on, on average.

    Returns:
        "test" where `seeded_draw` is below `test_share`, "val" for the next `val_share`, "train" for the rest.

    Examples:
        >>> [split_of(name, 0, 0.2, 0.25) for name in ("edit-cut", "firefox", "weather-snow")]
        ['test', 'train', 'val']
    """
    draw = seeded_draw(name, seed)
    if draw < test_share:
        return "test"
    return "val" if draw < test_share + val_share else "train"


def coming_epoch(trainer: Trainer | None) -> int:
    """The training epoch that comes next: not 0 where a run is resumed.

    It is the number that Lightning hands to `set_epoch` a little later, and too late for workers, which fetch their
    first batches as soon as the loader is made. `trainer.current_epoch` is one too small after a checkpoint of the end of
    an epoch.
    """
    if trainer is None:
        return 0
    processed: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # declared too wide
    return processed


@with_settings
class TrainingBatches:
    """The training batches: episodes, or class-balanced batches.

    Args:
        ways: Classes in a training episode.
        shots: Support images of each class.
        queries: Query images of each class.
        episodes: Training episodes in an epoch, over all processes.
        episodes_per_batch: Training episodes in a batch; ProtoNet takes the same number.
        classes_per_batch: Train on batches of this many classes (`ClassBalancedBatchSampler`) instead of episodes;
            `episodes` is then the number of these batches in an epoch.
        items_per_class: Images of each class in such a batch.
        seed: Seed of the training episodes.
    """

    ways: int = 20
    shots: int = 1
    queries: int = 5
    episodes: int = 100
    episodes_per_batch: int = 1
    classes_per_batch: int | None = None
    items_per_class: int = 4
    seed: int = 0

    def _check_training_batches(self) -> None:
        check_episode_sizes(
            ways=self.ways,
            shots=self.shots,
            queries=self.queries,
            episodes=self.episodes,
            episodes_per_batch=self.episodes_per_batch,
        )
        if self.classes_per_batch is not None:
            check_batch_sizes(self.classes_per_batch, self.items_per_class)

    def _training_sampler(self, split: LabelledSplit, epoch: int) -> BatchSampler:
        if self.classes_per_batch is not None:
            return ClassBalancedBatchSampler(
                split.labels,
                classes_per_batch=self.classes_per_batch,
                items_per_class=self.items_per_class,
                batches=self.episodes,
                seed=self.seed,
                class_names=split.class_names,
                epoch=epoch,
            )
        return EpisodicBatchSampler(
            split.labels,
            ways=self.ways,
            shots=self.shots,
            queries=self.queries,
            episodes=self.episodes,
            episodes_per_batch=self.episodes_per_batch,
            seed=self.seed,
            class_names=split.class_names,
            epoch=epoch,
        )


@with_settings
class EvaluationEpisodes:
    """The fixed episodes to validate and test on.

    Args:
        episodic_evaluation: Validate and test on fixed episodes instead of on each image once. A model that evaluates
            with batch statistics needs it.
        test_ways: Classes in an evaluation episode.
        test_shots: Support images of each class in an evaluation episode.
        test_queries: Query images of each class in an evaluation episode.
        test_episodes: Number of fixed episodes.
        test_seed: Seed of the fixed episodes.
        val_episodes: Number of fixed episodes of the validation; `test_episodes` by default.
    """

    episodic_evaluation: bool = False
    test_ways: int = 5
    test_shots: int = 1
    test_queries: int = 15
    test_episodes: int = 600
    test_seed: int = 0
    val_episodes: int | None = None

    def _check_evaluation_episodes(self) -> None:
        check_episode_sizes(
            test_ways=self.test_ways,
            test_shots=self.test_shots,
            test_queries=self.test_queries,
            test_episodes=self.test_episodes,
            val_episodes=self._number_of_episodes("val"),
        )

    def _number_of_episodes(self, name: Split) -> int:
        return self.test_episodes if name == "test" or self.val_episodes is None else self.val_episodes

    def _evaluation_sampler(self, name: Split, split: LabelledSplit) -> EpisodicBatchSampler:
        return EpisodicBatchSampler(
            split.labels,
            ways=self.test_ways,
            shots=self.test_shots,
            queries=self.test_queries,
            episodes=self._number_of_episodes(name),
            seed=self.test_seed,
            fixed=True,
            class_names=split.class_names,
        )


@with_settings
class EpisodicDataModule(EvaluationEpisodes, TrainingBatches, LightningDataModule):
    """Base: subclasses say what a split is (`_split`), this class says which batches it is served in.

    Batches are tuples: images (float, images x channels x height x width) and labels (int64, 0 ... C-1 in the split).

    A subclass adds settings as this class does (`with_settings`). One that defines `__init__` passes what it adds to
    `save_hyperparameters` as a dict, since Lightning saves the fields of a dataclass alone.

    Args:
        batch_size: Images in an evaluation batch.
        num_workers: Worker processes of each loader.
    """

    batch_size: int = 128
    num_workers: int = 0

    def __post_init__(self) -> None:
        """Check the settings, and keep them as they were given for checkpoints and loggers."""
        LightningDataModule.__init__(self)
        self.save_hyperparameters()
        self._complete_settings()
        self._check_training_batches()
        self._check_evaluation_episodes()
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}. Use batch_size >= 1.")
        if self.num_workers < 0:
            raise ValueError(f"num_workers is {self.num_workers}. Use 0 to load in the main process.")

    def _complete_settings(self) -> None:
        """Give a value to each setting whose default follows from others, before the checks."""
        if self.val_episodes is None:
            self.val_episodes = self.test_episodes

    @abstractmethod
    def _split(self, name: Split) -> LabelledSplit:
        """The data set and the labels of a split, loaded if they are not yet."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """`episodes` fresh episodes per epoch, or class-balanced batches, a function of (seed, epoch)."""
        split = self._split("train")
        return self._loader(split, batch_sampler=self._training_sampler(split, coming_epoch(self.trainer)))

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
        return self._loader(self._plain_training_split(), batch_size=self.batch_size)

    def _plain_training_split(self) -> LabelledSplit:
        """The training split without augmentation."""
        return self._split("train")

    def _evaluation_loader(self, name: Split) -> DataLoader[tuple[Tensor, int]]:
        split = self._split(name)
        if not self.episodic_evaluation:
            return self._loader(split, batch_size=self.batch_size)
        return self._loader(split, batch_sampler=self._evaluation_sampler(name, split))

    def _loader(self, split: LabelledSplit, **batches: Any) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            split.dataset,
            **batches,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
