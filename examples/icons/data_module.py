"""The icons as a LightningDataModule."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from fewshot_callbacks.data._episodic import EpisodicDataModule, LabelledSplit, Split
from fewshot_callbacks.data._settings import with_settings
from icons.augmentation import Background, IconAugmentation
from icons.splits import IconThemes, SplitBy, check_settings, load_splits

if TYPE_CHECKING:
    Chosen = int  # what is found in the attribute: `_complete_settings` has put a number there
else:
    Chosen = int | None  # what may be given


@with_settings
class IconThemesDataModule(EpisodicDataModule):
    """The icons: episodes for training; whole splits, or fixed episodes, for evaluation.

    Batches are tuples (images, labels): float images (images, 3, size, size) in [0, 1], int64 labels 0 ... C-1 of the
    split. A training batch is one episode, class by class, each class's support first. Evaluation images lie on white.

    Args:
        split: "classes" (validate and test on names never seen), "themes" (on the same names, drawn by artists never
            seen) or "both".
        queries: Query images of each class; by default up to 5, as many as the smallest class allows: shots + queries is
            at most `min_families` with `split="classes"`, else `min_images`.
        test_queries: Query images of each class in an evaluation episode; by default as `queries`.
        seed: Seed of the training episodes and the augmentation.
        num_workers: Worker processes of each loader; the images are in memory, so 0 is usually fastest.
        augment: Whether training batches are augmented; see `IconAugmentation`.
        background: Background of augmented training images: "white", or "random" for a random colour of each.
        size: Height and width of the images, in pixels.
        min_families: A name with fewer pictures is not a class.
        min_images: Where families are split, a class with fewer images inside a split is left out of it.
        split_seed: Seed of the split.
        val_share: Share of the classes, and of the families, for validation.
        test_share: Share of the classes, and of the families, for the test.
        symbolic: Whether symbolic icons and those of one colour count.
        roots: Folders that hold themes, instead of those of the specification.

    Raises:
        ValueError: A setting is out of range, or the classes are too small for the episodes. Themes are searched in
            `prepare_data`: if there are too few, it raises a ValueError that names packages with themes.

    Examples:
        >>> IconThemesDataModule(shots=1).queries, IconThemesDataModule(split="themes").test_queries
        (5, 2)
        >>> IconThemesDataModule(shots=5, queries=5)
        Traceback (most recent call last):
        ValueError: 5 shots and 5 queries need 10 images per class; the smallest class may have 6 (min_families).
        Use fewer of them, or min_families=10.
    """

    in_channels: ClassVar[int] = 3

    queries: Chosen = None  # type: ignore[assignment]
    test_queries: Chosen = None  # type: ignore[assignment]
    batch_size: int = 512
    split: SplitBy = "classes"
    augment: bool = True
    background: Background = "white"
    size: int = 32
    min_families: int = 6
    min_images: int = 3
    split_seed: int = 0
    val_share: float = 0.2
    test_share: float = 0.25
    symbolic: bool = False
    roots: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self.size, self.min_families, self.split, self.val_share, self.test_share, self.min_images)
        super().__post_init__()
        self.augmentation = IconAugmentation(self.seed, self.background) if self.augment else None
        self._splits: dict[Split, IconThemes] | None = None

    def _complete_settings(self) -> None:
        super()._complete_settings()
        by_classes = self.split == "classes"
        smallest, option = (self.min_families, "min_families") if by_classes else (self.min_images, "min_images")
        self.queries = _queries(self.shots, self.queries, smallest, option, "")
        self.test_queries = _queries(self.test_shots, self.test_queries, smallest, option, "test_")

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
            self._splits = load_splits(
                self.size,
                self.min_families,
                by=self.split,
                split_seed=self.split_seed,
                val_share=self.val_share,
                test_share=self.test_share,
                min_images=self.min_images,
                symbolic=self.symbolic,
                roots=self.roots,
            )
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
