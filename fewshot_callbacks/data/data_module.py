"""The LightningDataModule that makes training and evaluation batches from any data set."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from fewshot_callbacks.data.dataset import SPLITS, Batch, FewShotDataset, Split
from fewshot_callbacks.data.samplers import (
    ClassBalanced,
    Episodes,
    EpisodicBatchSampler,
    check_class_balance,
    mixed_seed,
)
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.episodes import EpisodeProtocol, check_classes_suffice, check_episode_sizes
from fewshot_callbacks.trainer.lightning import LightningDataModule, Trainer
from fewshot_callbacks.trainer.warning import warn_of_other_package

Loader = DataLoader[tuple[Tensor, int]]
# The settings that require a number of classes, or a number of images per class.
SIZES = ("ways", "shots", "queries", "classes_per_batch", "items_per_class")
DEFAULT_TRAINING = Episodes()
DEFAULT_PROTOCOL = EpisodeProtocol()


class FewShotDataModule(LightningDataModule):
    """LightningDataModule of a few-shot data set.

    You train on episodes or class-balanced batches. You evaluate on each image once, or on fixed episodes.

    A batch is a tuple (images, labels): images are float (images, channels, height, width), labels are int64 (images,)
    and run from 0 to C - 1 in each split. A training batch is one episode, or `episodes_per_batch` episodes. An episode
    is ordered by class, and the support images of a class come before its query images.

    With several processes, Lightning distributes the evaluation images and repeats a few of them (fewer than the number
    of processes), so that all processes have the same number. Episodes are never repeated.

    Args:
        dataset: The data set, with any of its splits selected.
        train: The training batches: `Episodes(20, 1)` or `ClassBalanced(64, 4)`.
        evaluation: Sizes, number and seed of the fixed episodes for validation and test.
        val_episodes: Number of fixed validation episodes; by default the number of test episodes.
        episodic_evaluation: Serve the fixed episodes instead of each image once. A model that evaluates with batch
            statistics needs this. `ProtoNet` does not: it draws the episodes from the embeddings of the images.
        augment: Whether to augment the training images with the data set's augmentation.
        batch_size: Images per evaluation batch.
        num_workers: Worker processes per loader. 0 is usually fastest if the images are in memory.
        seed: Seed of the training batches, and of an augmentation that does not use PyTorch's random state.

    Raises:
        ValueError: A number is out of range. `check`, or the first call that makes a loader, checks that there are enough
            classes and images.

    Examples:
        >>> from fewshot_callbacks.data import Glyphs
        >>> data = FewShotDataModule(Glyphs(), train=Episodes(ways=5, shots=1, queries=4, episodes=2))
        >>> images, labels = next(iter(data.train_dataloader()))  # 5 classes with 1 + 4 images each
        >>> images.shape
        torch.Size([25, 1, 32, 32])
        >>> labels.bincount()[labels.unique()].tolist()
        [5, 5, 5, 5, 5]
    """

    def __init__(
        self,
        dataset: FewShotDataset,
        *,
        train: Episodes | ClassBalanced = DEFAULT_TRAINING,
        evaluation: EpisodeProtocol = DEFAULT_PROTOCOL,
        val_episodes: int | None = None,
        episodic_evaluation: bool = False,
        augment: bool = True,
        batch_size: int = 128,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        warn_of_other_package("FewShotDataModule")
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}. Use batch_size >= 1.")
        if num_workers < 0:
            raise InputError(f"num_workers is {num_workers}. Use 0 to load in the main process.")
        self.dataset = dataset
        self.train = train
        self.evaluation = evaluation
        self.val_episodes = evaluation.episodes if val_episodes is None else val_episodes
        check_episode_sizes(val_episodes=self.val_episodes)
        self.episodic_evaluation = episodic_evaluation
        self.augment = augment
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        settings = {
            "dataset": type(dataset).__name__,
            "train": asdict(train),
            "evaluation": asdict(evaluation),
            "val_episodes": self.val_episodes,
            "episodic_evaluation": episodic_evaluation,
            "augment": augment,
            "batch_size": batch_size,
            "num_workers": num_workers,
            "seed": seed,
        }
        # Plain values can be loaded anywhere. One common key avoids a clash: the model also has an `evaluation`.
        self.save_hyperparameters({"data": settings})
        # The splits are cached, because a user's data set may read its lists again in `with_split`.
        self._splits: dict[Split, FewShotDataset] = {}
        self._augmented_batches = 0

    def images(self, split: Split) -> FewShotDataset:
        """Return the data set of a split as its loader serves it; the training images are augmented.

        Args:
            split: "train", "val" or "test".

        Raises:
            ValueError: There is no such split; the message gives the reason.
        """
        dataset = self._not_augmented(split)
        if split == "train" and self.augment:
            return dataset.augmented(self.seed)
        return dataset

    def _not_augmented(self, split: Split) -> FewShotDataset:
        if split not in self._splits:
            self._splits[split] = self.dataset.with_split(split)
        return self._splits[split]

    def check(self, *splits: Split) -> None:
        """Raise an error if a split has too few classes or images for its episodes or batches.

        Args:
            splits: "train", "val" or "test"; by default all splits of the data set.

        Raises:
            ValueError: There are too few classes, or a class has too few images. The message names each such split, the
                class, and sizes that fit.
        """
        problems = []
        for split in splits or SPLITS:
            problem = self._problem(split) if split in self.dataset.splits else None
            if problem is not None:
                problems.append(problem)
        if problems:
            raise InputError(" ".join(problems))

    def _problem(self, split: Split) -> str | None:
        """Return why a split has too few classes or images; None if it has enough."""
        dataset = self._not_augmented(split)
        batches = self.train if split == "train" else self.evaluation
        prefix = "--data.train." if split == "train" else "--data.evaluation."
        sizes = {name: getattr(batches, name) for name in SIZES if hasattr(batches, name)}
        is_balanced = isinstance(batches, ClassBalanced)
        check: Callable[..., None] = check_class_balance if is_balanced else check_classes_suffice
        try:
            check(dataset.labels, **sizes, class_names=dataset.class_names, prefix=prefix)
        except ValueError as error:
            options = ", ".join(f"{prefix}{name} {size}" for name, size in sizes.items())
            noun = "batches" if is_balanced else "episodes"
            problem = f"The {split} split is too small for the requested {noun} ({options}): {error}"
            if split != "val" or len(dataset.class_names) >= sizes["ways"]:
                return problem
            larger = ", ".join(f"{name}={size}" for name, size in sizes.items())
            return (
                f"{problem} Validation and test share the sizes of evaluation=EpisodeProtocol(...). To test with more ways "
                f"than there are validation classes, train with smaller sizes, and pass "
                f"evaluation=EpisodeProtocol({larger}) to data and model only for the test (fewshot test "
                "--data.evaluation.ways ...)."
            )
        return None

    def setup(self, stage: str) -> None:
        """Restart the augmentation's random numbers at the start of a fit. A resumed fit then loads its own state."""
        if stage == "fit":
            self._augmented_batches = 0

    def train_dataloader(self) -> Loader:
        """Return a loader of new episodes or class-balanced batches in each epoch, a function of (seed, epoch)."""
        dataset = self.images("train")
        sampler = self.train.make_batch_sampler(dataset, self.seed, coming_epoch(self.trainer))
        return self._loader(dataset, batch_sampler=sampler)

    def val_dataloader(self) -> Loader | list[Loader]:
        """Return a loader of each validation image once, in order; of fixed episodes with `episodic_evaluation`.

        Without a validation split, return an empty list: Lightning then skips validation.
        """
        if "val" not in self.dataset.splits:
            return []
        return self._evaluation_loader("val", self.val_episodes)

    def test_dataloader(self) -> Loader:
        """Return a loader of each test image once, in order; of fixed episodes with `episodic_evaluation`."""
        return self._evaluation_loader("test", self.evaluation.episodes)

    def training_data_for_evaluation(self) -> Loader:
        """Return a loader of each training image once, in order and without augmentation.

        `GeneralizationGapMonitor` draws its training classes from this loader.
        """
        return self._loader(self._not_augmented("train"), batch_size=self.batch_size)

    def _evaluation_loader(self, split: Split, episodes: int) -> Loader:
        dataset = self._not_augmented(split)
        if not self.episodic_evaluation:
            return self._loader(dataset, batch_size=self.batch_size)
        sizes = asdict(self.evaluation) | {"episodes": episodes}
        sampler = EpisodicBatchSampler(dataset.labels, **sizes, fixed=True, class_names=dataset.class_names)
        return self._loader(dataset, batch_sampler=sampler)

    def _loader(self, dataset: FewShotDataset, **batches: Any) -> Loader:
        return DataLoader(
            dataset,
            **batches,
            collate_fn=as_tuple,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,  # each worker caches its decoded images
            # PyTorch warns about pinned memory if there is no accelerator.
            pin_memory=torch.cuda.is_available(),
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Return a training batch augmented by the data set, on the training device; any other batch unchanged.

        The random numbers depend on the seed, the rank and the number of batches so far (a checkpoint stores this
        number). They depend neither on workers nor on global random state.
        """
        if not (self.augment and self.trainer is not None and self.trainer.training):
            return batch
        images, labels = batch
        seed = mixed_seed(self.seed, self.trainer.global_rank, self._augmented_batches)
        self._augmented_batches += 1
        # A generator on the CPU draws the same numbers for every kind of device.
        return self.dataset.augment_batch(images, torch.Generator().manual_seed(seed)), labels

    def state_dict(self) -> dict[str, Any]:
        """Return the number of augmented batches so far, so that a resumed run draws the next random numbers."""
        return {"augmented_batches": self._augmented_batches}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume the augmentation's random numbers from a checkpoint."""
        self._augmented_batches = state_dict["augmented_batches"]


def as_tuple(items: list[tuple[Tensor, int]]) -> Batch:
    """Return the items collated as PyTorch does, but as a tuple instead of a list."""
    images, labels = default_collate(items)
    return images, labels


def coming_epoch(trainer: Trainer | None) -> int:
    """Return the number of the next training epoch; it is not 0 in a resumed run.

    Lightning calls `set_epoch` too late: workers fetch their first batches as soon as the loader is made.
    `trainer.current_epoch` is one too small if the checkpoint was saved at the end of an epoch.
    """
    if trainer is None:
        return 0
    processed: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # declared too wide
    return processed
