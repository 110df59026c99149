"""The LightningDataModule of every data set: which batches its splits are served in."""

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
# The settings of episodes and batches that need a number of classes, or of images in each class.
SIZES = ("ways", "shots", "queries", "classes_per_batch", "items_per_class")
DEFAULT_TRAINING = Episodes()
DEFAULT_PROTOCOL = EpisodeProtocol()


class FewShotDataModule(LightningDataModule):
    """Episodes or class-balanced batches of a data set to train on; each image once, or fixed episodes, to evaluate on.

    Batches are tuples: images (float, images x channels x height x width) and labels (int64, 0 ... C-1 in the split). A
    training batch is one episode, class by class, each class's support first, or `episodes_per_batch` of them.

    With several processes, Lightning deals the images of an evaluation out and repeats a few (fewer than there are
    processes) to make the shares equal; episodes are never repeated.

    Args:
        dataset: The data set; which of its splits it holds does not matter.
        train: The batches to train on: `Episodes(20, 1)` or `ClassBalanced(64, 4)`.
        evaluation: Sizes, number and seed of the fixed episodes to validate and test on.
        val_episodes: Number of fixed episodes of the validation; as many as of the test by default.
        episodic_evaluation: Serve these episodes, instead of each image once. A model that evaluates with batch
            statistics needs it; `ProtoNet` draws the episodes itself, among the embeddings of the images.
        augment: Whether training images are augmented, as the data set does it; if not, they are served as for an
            evaluation.
        batch_size: Images in an evaluation batch.
        num_workers: Worker processes of each loader; 0 is usually fastest where the images are in memory.
        seed: Seed of the training batches, and of an augmentation that does not draw from PyTorch's random state.

    Raises:
        ValueError: A number is out of range. Whether the classes suffice is checked when a loader is made, or by `check`.

    Examples:
        >>> from fewshot_callbacks.data import Glyphs
        >>> data = FewShotDataModule(Glyphs(), train=Episodes(ways=5, shots=1, queries=4, episodes=2))
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> tuple(images.shape), labels.unique().numel()
        ((25, 1, 32, 32), 5)
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
        # Plain values can be loaded anywhere. They share one name, since the model has an `evaluation`, too.
        self.save_hyperparameters({"data": settings})
        # The splits are cached: a user's data set may read its lists again for each.
        self._splits: dict[Split, FewShotDataset] = {}
        self._augmented_batches = 0

    def images(self, split: Split) -> FewShotDataset:
        """Return the images of a split as its loader serves them: the training images are augmented.

        Args:
            split: "train", "val" or "test".

        Returns:
            The data set, with `labels` and `class_names`.

        Raises:
            ValueError: If there is no such split; the message says why.
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
        """Refuse splits whose classes do not suffice for their episodes or batches.

        Args:
            splits: "train", "val" or "test"; by default all. A validation split that is left out by choice is not checked.

        Raises:
            ValueError: A class is too small; the message names each such split, the class, and options that would fit.
        """
        problems = []
        for split in splits or SPLITS:
            problem = self._problem(split) if split in self.dataset.splits else None
            if problem is not None:
                problems.append(problem)
        if problems:
            raise InputError(" ".join(problems))

    def _problem(self, split: Split) -> str | None:
        """Return why the classes of a split do not suffice for its episodes or batches; None if they do."""
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
            problem = f"The {split} classes do not suffice for the requested {noun} ({options}): {error}"
            if split != "val" or len(dataset.class_names) >= sizes["ways"]:
                return problem
            larger = ", ".join(f"{name}={size}" for name, size in sizes.items())
            return (
                f"{problem} Validation and test have the sizes of one evaluation=EpisodeProtocol(...). For a test with more "
                f"than the validation has, train with smaller sizes, and give evaluation=EpisodeProtocol({larger}) to data "
                "and model of the test alone (fewshot test --data.evaluation.ways ...)."
            )
        return None

    def setup(self, stage: str) -> None:
        """Restart the random numbers of the augmentation in a fit; a resumed fit then loads its state."""
        if stage == "fit":
            self._augmented_batches = 0

    def train_dataloader(self) -> Loader:
        """Serve fresh episodes or class-balanced batches in each epoch, a function of (seed, epoch)."""
        dataset = self.images("train")
        sampler = self.train.make_batch_sampler(dataset, self.seed, coming_epoch(self.trainer))
        return self._loader(dataset, batch_sampler=sampler)

    def val_dataloader(self) -> Loader | list[Loader]:
        """Serve each validation image once, in order; with `episodic_evaluation`, fixed episodes.

        Without a validation split it is an empty list, which Lightning skips.
        """
        if "val" not in self.dataset.splits:
            return []
        return self._evaluation_loader("val", self.val_episodes)

    def test_dataloader(self) -> Loader:
        """Serve each test image once, in order; with `episodic_evaluation`, fixed episodes."""
        return self._evaluation_loader("test", self.evaluation.episodes)

    def training_data_for_evaluation(self) -> Loader:
        """Serve each training image once, in order and not augmented, as evaluation images are served.

        `GeneralizationGapMonitor` draws its training classes from it.
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
            persistent_workers=self.num_workers > 0,  # each worker caches the images that it has decoded
            # PyTorch warns of pinned memory without an accelerator.
            pin_memory=torch.cuda.is_available(),
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Let the data set augment a training batch on the device of the training; leave every other batch as it is.

        The random numbers depend on the seed, the rank and the number of batches so far, which are in checkpoints. They
        depend neither on workers nor on global random state.
        """
        if not (self.augment and self.trainer is not None and self.trainer.training):
            return batch
        images, labels = batch
        seed = mixed_seed(self.seed, self.trainer.global_rank, self._augmented_batches)
        self._augmented_batches += 1
        # A generator on the CPU draws the same numbers for every kind of device.
        return self.dataset.augment_batch(images, torch.Generator().manual_seed(seed)), labels

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that have been augmented, so that a resumed run continues from there."""
        return {"augmented_batches": self._augmented_batches}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the random numbers of the augmentation from a checkpoint."""
        self._augmented_batches = state_dict["augmented_batches"]


def as_tuple(items: list[tuple[Tensor, int]]) -> Batch:
    """Collate as PyTorch does, but into a tuple."""
    images, labels = default_collate(items)
    return images, labels


def coming_epoch(trainer: Trainer | None) -> int:
    """Return the number of the next training epoch, which is not 0 in a resumed run.

    Lightning passes the same number to `set_epoch`, but too late for workers, which fetch their first batches as soon as the
    loader is made. `trainer.current_epoch` is one too small after a checkpoint of the end of an epoch.
    """
    if trainer is None:
        return 0
    processed: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]  # declared too wide
    return processed
