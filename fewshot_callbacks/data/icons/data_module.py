"""The icons as a LightningDataModule."""

from dataclasses import replace
from functools import partial

from fewshot_callbacks.data._episodic import EpisodicDataModule, LabelledSplit, Split
from fewshot_callbacks.data.icons.augmentation import Background, IconAugmentation
from fewshot_callbacks.data.icons.splits import IconThemes, SplitBy, check_settings, load_splits


class IconThemesDataModule(EpisodicDataModule):
    """The icons as episodes to train on and as whole splits, or fixed episodes, to evaluate on.

    Batches are tuples (images, labels): float images (images, 3, size, size) in [0, 1], int64 labels 0 ... C-1 of the
    split. A training batch is one episode, class by class, each class's support first. Evaluation images lie on white.

    Args:
        split: "classes" (validate and test on names never seen), "themes" (on the same names, drawn by artists never
            seen) or "both".
        ways: Classes in a training episode.
        shots: Support images of each class.
        queries: Query images of each class; without it up to 5, as many as the smallest class allows: shots + queries is
            at most `min_families` with `split="classes"`, else `min_images`.
        episodes: Training episodes in an epoch, over all processes.
        episodes_per_batch: Training episodes in a batch; ProtoNet takes the same number.
        classes_per_batch: Train on batches of so many classes (`ClassBalancedBatchSampler`) instead of episodes, of
            which `episodes` then counts those of an epoch.
        items_per_class: Images of each class in such a batch.
        batch_size: Images in an evaluation batch.
        augment: Whether training batches are augmented; see `IconAugmentation`.
        background: Of augmented training images: "white", or "random" for a colour of each image's own.
        size: Height and width of the images, in pixels.
        min_families: A name with fewer pictures is no class.
        min_images: Where families are split, a class with fewer images inside a split is left out of it.
        split_seed: Of the split.
        val_share: Share of the classes, and of the families, that are validated on.
        test_share: Share that is tested on.
        symbolic: Whether symbolic icons and those of one colour count.
        roots: Folders that hold themes, instead of those of the specification.
        seed: Of the training episodes and the augmentation.
        num_workers: Worker processes of each loader; the images are in memory, so 0 is usually fastest.
        episodic_evaluation: Validate and test on fixed episodes instead of on each image once. A model that evaluates
            with batch statistics needs it.
        test_ways: Classes in an evaluation episode.
        test_shots: Support images of each class in an evaluation episode.
        test_queries: Query images of each class in an evaluation episode; without it as `queries`.
        test_episodes: Length of the fixed lists.
        test_seed: Of the fixed lists.
        val_episodes: Length of the list of the validation, where it is not `test_episodes`.

    Raises:
        ValueError: A setting is out of range, or the classes are too small for the episodes. Themes are looked for in
            `prepare_data`: too few of them are a ValueError that says which packages hold some.

    Example:
        >>> IconThemesDataModule(shots=1).queries, IconThemesDataModule(split="themes").test_queries
        (5, 2)
        >>> IconThemesDataModule(shots=5, queries=5)
        Traceback (most recent call last):
        ValueError: 5 shots and 5 queries need 10 images per class; the smallest class may have 6 (min_families).
        Use fewer of them, or min_families=10.
    """

    in_channels: int = 3

    def __init__(
        self,
        *,
        split: SplitBy = "classes",
        ways: int = 20,
        shots: int = 1,
        queries: int | None = None,
        episodes: int = 100,
        episodes_per_batch: int = 1,
        classes_per_batch: int | None = None,
        items_per_class: int = 4,
        batch_size: int = 512,
        augment: bool = True,
        background: Background = "white",
        size: int = 32,
        min_families: int = 6,
        min_images: int = 3,
        split_seed: int = 0,
        val_share: float = 0.2,
        test_share: float = 0.25,
        symbolic: bool = False,
        roots: list[str] | None = None,
        seed: int = 0,
        num_workers: int = 0,
        episodic_evaluation: bool = False,
        test_ways: int = 5,
        test_shots: int = 1,
        test_queries: int | None = None,
        test_episodes: int = 600,
        test_seed: int = 0,
        val_episodes: int | None = None,
    ) -> None:
        check_settings(size, min_families, split, val_share, test_share, min_images)
        smallest, option = (min_families, "min_families") if split == "classes" else (min_images, "min_images")
        super().__init__(
            ways=ways,
            shots=shots,
            queries=_queries(shots, queries, smallest, option, ""),
            episodes=episodes,
            episodes_per_batch=episodes_per_batch,
            classes_per_batch=classes_per_batch,
            items_per_class=items_per_class,
            batch_size=batch_size,
            seed=seed,
            num_workers=num_workers,
            episodic_evaluation=episodic_evaluation,
            test_ways=test_ways,
            test_shots=test_shots,
            test_queries=_queries(test_shots, test_queries, smallest, option, "test_"),
            test_episodes=test_episodes,
            test_seed=test_seed,
            val_episodes=val_episodes,
        )
        self.save_hyperparameters()
        self.augmentation = IconAugmentation(seed, background) if augment else None
        self._load = partial(
            load_splits,
            size,
            min_families,
            by=split,
            split_seed=split_seed,
            val_share=val_share,
            test_share=test_share,
            min_images=min_images,
            symbolic=symbolic,
            roots=roots,
        )
        self._splits: dict[Split, IconThemes] | None = None

    @property
    def num_classes(self) -> int:
        """Classes to train on; loads the icons if they are not yet."""
        return len(self.icons("train").names)

    def icons(self, split: Split) -> IconThemes:
        """A split, loaded if it is not yet.

        Args:
            split: "train", "val" or "test".

        Returns:
            The whole split, not augmented.

        Raises:
            ValueError: Too few themes are installed; says which packages hold some.
        """
        if self._splits is None:
            self._splits = self._load()
        return self._splits[split]

    def prepare_data(self) -> None:
        """Fill the cache, on one process."""
        self.icons("train")

    def setup(self, stage: str) -> None:
        """Load the splits, which are the same for each stage."""
        self.icons("train")

    def _split(self, name: Split) -> LabelledSplit:
        icons = self.icons(name)
        return _labelled(replace(icons, augmentation=self.augmentation) if name == "train" else icons)

    def _plain_training_split(self) -> LabelledSplit:
        return _labelled(self.icons("train"))


def _labelled(icons: IconThemes) -> LabelledSplit:
    return LabelledSplit(icons, icons.labels, icons.names)


def _queries(shots: int, queries: int | None, smallest: int, option: str, prefix: str) -> int:
    """The number of queries: as asked for, or what the smallest class allows, at most 5."""
    wanted = min(5, smallest - shots) if queries is None else queries
    if shots >= 1 and (wanted < 1 or shots + wanted > smallest):
        wanted = max(wanted, 1)
        raise ValueError(
            f"{shots} {prefix}shots and {wanted} {prefix}queries need {shots + wanted} images per class; the smallest class "
            f"may have {smallest} ({option}). Use fewer of them, or {option}={shots + wanted}."
        )
    return wanted
