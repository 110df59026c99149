"""Your own images, in one folder per class."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fewshot_callbacks.data.dataset import Split, seeded_draw
from fewshot_callbacks.data.image_set import (
    ImageItem,
    ImageSet,
    PhotoTransform,
    check_shares,
    count_and_names,
    refuse_shared,
)
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.images import ENDINGS, list_folders, list_images
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.system.words import counted
from fewshot_callbacks.trainer.lightning import rank_zero_info

# A mirrored logo, word or sign is a different class, and the contents of the folder are unknown.
_TRANSFORM = PhotoTransform(flip=0.0)


class ImageFolder(ImageSet):
    """Your own images, in one folder per class.

    Two layouts are accepted:

    - `root/train/class/*.jpg`, `root/val/class/*.jpg` and `root/test/class/*.jpg`, with different classes in each split.
    - `root/class/*.jpg`. A seeded draw splits the classes if you pass `val_share` and `test_share`. All classes are one
      set if you pass `split=None`.

    The folder `val_folder` must exist. If you have no validation images, pass `val_folder=None`: Lightning then skips
    validation, with a message that the loader's length is zero. Test images are used for validation only if you pass
    `val_folder="test"`; the best checkpoint is then chosen on the test set.

    Args:
        root: The folder that contains the splits or the classes.
        split: "train", "val" or "test"; None for all classes of a folder that is not split.
        transform: How images are resized, augmented and normalised. By default training images are not mirrored, because
            a mirrored logo, word or sign is a different class. For photographs pass `PhotoTransform(flip=0.5)`.
        train_folder: Name of the training folder in `root`.
        val_folder: Name of the validation folder; None for no validation.
        test_folder: Name of the test folder.
        val_share: Fraction of validation classes if `root` contains the classes; 0 for no validation.
        test_share: Fraction of test classes if `root` contains the classes; 0 if `root` contains the splits.
        split_seed: Seed of the draw. The classes are sorted by the SHA-256 of the seed and their names. The first classes
            are for test, the next for validation.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.
        background: Colour behind transparent pixels, by name or as "#rrggbb".

    Raises:
        FileNotFoundError: A folder is missing.
        ValueError: There is no class, a class has no images, two splits share a class, two links lead to the same folder,
            or a setting is out of range.

    Examples:
        >>> ImageFolder("birds", val_folder=None)
        Traceback (most recent call last):
        FileNotFoundError: There is no folder birds. Create it, with the folders 'train' and 'test' in it.
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("heron", "owl"):
        ...         (Path(root) / name).mkdir()
        ...         Image.new("RGB", (4, 4)).save(Path(root) / name / "1.png")
        ...     folder = ImageFolder(root, split=None)
        ...     images, labels = folder.batch([1, 0])
        >>> folder.class_names, tuple(images.shape), labels.tolist()
        (('heron', 'owl'), (2, 3, 84, 84), [1, 0])
    """

    def __init__(
        self,
        root: str | Path,
        split: Split | None = "train",
        *,
        transform: PhotoTransform = _TRANSFORM,
        train_folder: str = "train",
        val_folder: str | None = "val",
        test_folder: str = "test",
        val_share: float = 0.0,
        test_share: float = 0.0,
        split_seed: int = 0,
        memory_mb: float = 512,
        background: str = "white",
    ) -> None:
        root = Path(root)
        folders: dict[Split, str | None] = {"train": train_folder, "val": val_folder, "test": test_folder}
        items: Mapping[Split, Sequence[ImageItem]]
        if split is None:
            items = {"train": _listed_classes(root)}
        elif val_share or test_share:
            check_shares(val_share, test_share)
            listed = _listed_classes(root)
            # Otherwise `train`, `val` and `test` would silently become three classes.
            if {train_folder, test_folder} <= {item.class_name for item in listed}:
                raise InputError(
                    f"{root} is already split: it contains the folders {train_folder!r} and {test_folder!r}. Leave out "
                    "val_share and test_share."
                )
            items = _drawn_splits(listed, root, val_share, test_share, split_seed)
        else:
            items = _split_folders(root, {name: folder for name, folder in folders.items() if folder is not None})
        no_validation = (
            "val_share is 0. Use a positive share." if test_share else "val_folder is None. Name its folder."
        )
        super().__init__(
            items,
            split or "train",
            transform,
            memory_mb=memory_mb,
            background=background,
            no_validation=no_validation,
        )


def _split_folders(root: Path, folders: Mapping[Split, str]) -> dict[Split, list[ImageItem]]:
    """Return the images of each split; raise an error if two splits share a class."""
    _check_folders(root, folders)
    # Validation on the test images is an explicit choice, so these two splits may share their classes.
    compared: list[Split] = [split for split in folders if split != "val" or folders["val"] != folders["test"]]
    for first, second in itertools.combinations(compared, 2):
        if (root / folders[first]).samefile(root / folders[second]):
            raise InputError(
                f"{first}_folder={folders[first]!r} and {second}_folder={folders[second]!r} are one folder of {root}, but "
                "few-shot evaluation needs unseen classes. Name a different folder for each split."
            )
    items = {split: _listed_classes(root / name) for split, name in folders.items()}
    refuse_shared(
        [(repr(folders[split]), {item.class_name for item in items[split]}) for split in compared],
        ", but few-shot evaluation needs unseen classes. Keep each class in one split.",
    )
    return items


def _check_folders(root: Path, folders: Mapping[Split, str]) -> None:
    """Raise an error if a folder is missing; if `root` seems to contain the classes, the message explains the shares."""
    if not root.is_dir():
        *first_names, last_name = map(repr, dict.fromkeys(folders.values()))
        raise FileNotFoundError(
            f"There is no folder {root}. Create it, with the folders {', '.join(first_names)} and {last_name} in it."
        )
    for split, name in folders.items():
        if (root / name).is_dir():
            continue
        without_validation = " or val_folder=None for no validation" if split == "val" else ""
        other_folders = {folder.name for folder in list_folders(root)} - set(folders.values())
        shares = ""
        if len(other_folders) >= len(folders):
            shares = (
                f" To split the classes in {counted(len(other_folders), 'folder')} there, pass val_share=0.2 and "
                "test_share=0.2 (--data.dataset.val_share 0.2 --data.dataset.test_share 0.2)."
            )
        purpose = "" if name == split else f" for {split}"
        raise FileNotFoundError(
            f"{root} contains no folder {name!r}{purpose}. Create it, or pass "
            f"{split}_folder=...{without_validation}.{shares}"
        )


def _drawn_splits(
    items: Sequence[ImageItem], root: Path, val_share: float, test_share: float, seed: int
) -> dict[Split, list[ImageItem]]:
    """Return the images of each split; each split with a share above 0 has at least one class."""
    # Each class has its own draw, so adding or removing a class moves few other classes.
    classes = sorted({item.class_name for item in items}, key=lambda name: seeded_draw(name, seed))
    test_count = max(1, round(test_share * len(classes)))
    val_count = max(1, round(val_share * len(classes))) if val_share else 0
    held_out = test_count + val_count
    if held_out >= len(classes):
        raise InputError(
            f"{root} contains {counted(len(classes), 'class')}, so val_share {val_share:g} and test_share {test_share:g} "
            "leave no class to train on. Use smaller shares, or add classes."
        )
    classes_of: dict[Split, set[str]] = {"train": set(classes[held_out:]), "test": set(classes[:test_count])}
    if val_count:
        classes_of["val"] = set(classes[test_count:held_out])
    rank_zero_info(
        f"{root}: {counted(len(classes), 'class')}, split into {len(classes_of['train']):,} for training, {val_count:,} "
        f"for validation and {test_count:,} for test (split_seed {seed})."
    )
    return {split: [item for item in items if item.class_name in names] for split, names in classes_of.items()}


def _listed_classes(root: Path) -> list[ImageItem]:
    """Return the images of a folder with their classes, and print which files were skipped."""
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root}. Create it, with one folder of images per class.")
    of_systems = Counter[str]()
    folders = list_folders(root, of_systems)
    if not folders:
        raise InputError(f"{root} contains no folders. Put the images of each class into a folder there.")
    listing = list_images(folders, root)
    listing.of_systems.update(of_systems)
    empty = [folder.name for folder, files in zip(folders, listing.of_folders, strict=True) if not files]
    if empty:
        raise InputError(
            f"{root}: there is no image of {count_and_names(empty, 'class')}, out of {len(folders)}. Add images "
            f"({', '.join(ENDINGS)}) or remove the folder{'s' if len(empty) > 1 else ''}."
        )
    skipped = listing.describe_skipped()
    if skipped:
        rank_zero_info(f"{root}: {skipped}. Images end in {', '.join(ENDINGS)}.")
    items = []
    for folder, files in zip(folders, listing.of_folders, strict=True):
        # A class has the same name in every Unicode form that a disk or an archive may use.
        class_name = composed_form(folder.name)
        items += [ImageItem(file, class_name) for file in files]
    return items
