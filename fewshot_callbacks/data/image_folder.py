"""Your own images: folders, one per class."""

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

# Mirrored logos, words and signs are different, and the contents of the folder are unknown.
_TRANSFORM = PhotoTransform(flip=0.0)


class ImageFolder(ImageSet):
    """Your own images: `root/train/class/*.jpg`, `root/val/...` and `root/test/...`, with different classes in each.

    Or `root/class/*.jpg` alone: with `val_share` and `test_share` the classes are split by a seeded draw, and `split=None`
    takes all of them as one set.

    Validation: the folder `val_folder` must exist. If there is none, pass `val_folder=None`: Lightning then skips
    validation, with a message that its length is zero. Test images are never used for validation unless you pass
    `val_folder="test"`; a checkpoint chosen on them is chosen on the test set.

    Args:
        root: The folder that holds the splits.
        split: "train", "val" or "test"; None for all classes of a folder that is not split.
        transform: What the model sees of an image. By default training images are not mirrored, since logos, words and signs
            are others then; for photographs pass `PhotoTransform(flip=0.5)`.
        train_folder: The folder of the training classes, inside `root`.
        val_folder: The folder of the validation classes; None for no validation.
        test_folder: The folder of the test classes.
        val_share: Where `root` holds the classes themselves: the share of them to validate on; 0 for no validation.
        test_share: The share of the classes to test on; 0 where the three folders hold the splits.
        split_seed: Seed of that split. The classes are sorted by the SHA-256 of the seed and their names: the first are
            for the test, the next for the validation.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.
        background: The colour behind what is transparent, by name or as "#rrggbb".

    Raises:
        FileNotFoundError: A folder is missing.
        ValueError: There is no class, a class without images, or one that two splits share; a link leads to a folder that
            is read already; or a setting is out of range.

    Examples:
        >>> ImageFolder("birds", val_folder=None)
        Traceback (most recent call last):
        FileNotFoundError: There is no folder birds. It should hold the folders 'train' and 'test'.
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
            # Otherwise `train`, `val` and `test` would silently be taken for three classes.
            if {train_folder, test_folder} <= {item.class_name for item in listed}:
                raise InputError(
                    f"{root} holds the folders {train_folder!r} and {test_folder!r}: it is split already. Leave out "
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
    """List the folder of each split, and refuse classes that are in two splits."""
    _check_folders(root, folders)
    # Validation on the test images is an explicit choice, and shares all their classes.
    compared: list[Split] = [split for split in folders if split != "val" or folders["val"] != folders["test"]]
    for first, second in itertools.combinations(compared, 2):
        if (root / folders[first]).samefile(root / folders[second]):
            raise InputError(
                f"{first}_folder={folders[first]!r} and {second}_folder={folders[second]!r} are one folder of {root}; "
                "few-shot evaluation needs classes that were never seen. Name a folder of its own for each."
            )
    items = {split: _listed_classes(root / name) for split, name in folders.items()}
    refuse_shared(
        [(repr(folders[split]), {item.class_name for item in items[split]}) for split in compared],
        "; few-shot evaluation needs classes that were never seen. Keep each class in one split.",
    )
    return items


def _check_folders(root: Path, folders: Mapping[Split, str]) -> None:
    """Refuse a missing folder; if `root` seems to contain the classes themselves, the message names the shares."""
    if not root.is_dir():
        *first_names, last_name = map(repr, dict.fromkeys(folders.values()))
        raise FileNotFoundError(
            f"There is no folder {root}. It should hold the folders {', '.join(first_names)} and {last_name}."
        )
    for split, name in folders.items():
        if (root / name).is_dir():
            continue
        without_validation = " or val_folder=None for no validation" if split == "val" else ""
        other_folders = {folder.name for folder in list_folders(root)} - set(folders.values())
        shares = ""
        if len(other_folders) >= len(folders):
            shares = (
                f" To split the {counted(len(other_folders), 'folder')} in it as classes, pass val_share=0.2 and "
                "test_share=0.2 (--data.dataset.val_share 0.2 --data.dataset.test_share 0.2)."
            )
        purpose = "" if name == split else f" for {split}"
        raise FileNotFoundError(
            f"{root} holds no folder {name!r}{purpose}. Make it, or pass {split}_folder=...{without_validation}.{shares}"
        )


def _drawn_splits(
    items: Sequence[ImageItem], root: Path, val_share: float, test_share: float, seed: int
) -> dict[Split, list[ImageItem]]:
    """Split the classes by their shares; each split with a share above 0 has at least one class."""
    # Each name is drawn separately, so that adding or removing a class moves few other classes.
    classes = sorted({item.class_name for item in items}, key=lambda name: seeded_draw(name, seed))
    test_count = max(1, round(test_share * len(classes)))
    val_count = max(1, round(val_share * len(classes))) if val_share else 0
    held_out = test_count + val_count
    if held_out >= len(classes):
        raise InputError(
            f"{root} holds {counted(len(classes), 'class')}; val_share {val_share:g} and test_share {test_share:g} leave "
            "none to train on. Use smaller shares, or add classes."
        )
    classes_of: dict[Split, set[str]] = {"train": set(classes[held_out:]), "test": set(classes[:test_count])}
    if val_count:
        classes_of["val"] = set(classes[test_count:held_out])
    rank_zero_info(
        f"{root}: {counted(len(classes), 'class')}, of which {len(classes_of['train']):,} to train, {val_count:,} to "
        f"validate and {test_count:,} to test on (split_seed {seed})."
    )
    return {split: [item for item in items if item.class_name in names] for split, names in classes_of.items()}


def _listed_classes(root: Path) -> list[ImageItem]:
    """List the images of a folder, with the class of each, and print other contents of the folder."""
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root}. It should hold one folder of images per class.")
    of_systems = Counter[str]()
    folders = list_folders(root, of_systems)
    if not folders:
        raise InputError(f"{root} holds no class: no folder is in it. Put the images of each class in a folder there.")
    listing = list_images(folders, root)
    listing.of_systems.update(of_systems)
    empty = [folder.name for folder, files in zip(folders, listing.of_folders, strict=True) if not files]
    if empty:
        raise InputError(
            f"{count_and_names(empty, 'class')} of {len(folders)} in {root} without an image. Add images "
            f"({', '.join(ENDINGS)}) or remove the folder{'s' if len(empty) > 1 else ''}."
        )
    skipped = listing.describe_skipped()
    if skipped:
        rank_zero_info(f"{root}: {skipped}. Images end in {', '.join(ENDINGS)}.")
    items = []
    for folder, files in zip(folders, listing.of_folders, strict=True):
        # A class has one name, whichever form of Unicode a disk or an archive uses.
        class_name = composed_form(folder.name)
        items += [ImageItem(file, class_name) for file in files]
    return items
