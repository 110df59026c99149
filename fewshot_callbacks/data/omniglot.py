"""Omniglot: 1,623 handwritten characters from 50 alphabets, 20 drawings each, in the split of Lake et al. (2015)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial as partial_of
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from fewshot_callbacks.data.dataset import Split
from fewshot_callbacks.data.image_set import (
    ImageItem,
    ImageSet,
    check_image_size,
    check_no_split_is_empty,
    count_and_names,
    required,
)
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.images import list_entries, list_folders, refuse_second_links
from fewshot_callbacks.files.names import composed_form, describe_system_names
from fewshot_callbacks.trainer.lightning import rank_zero_info

FOLDER = "omniglot-py"
BACKGROUND = "images_background"
EVALUATION = "images_evaluation"
ARCHIVE = (
    "images_background.zip and images_evaluation.zip from the folder python of https://github.com/brendenlake/omniglot"
)
# The published numbers of characters: a copy with other numbers is incomplete.
CHARACTERS: Mapping[str, int] = {BACKGROUND: 964, EVALUATION: 659}
DRAWINGS = 20  # per character
VALIDATION_ALPHABETS = ("Armenian", "Korean", "N_Ko", "Tagalog", "Tifinagh")


class Omniglot(ImageSet):
    """The Omniglot data set of handwritten characters: the background set for training, the evaluation set for test.

    `root` contains the two unpacked archives, in the layout of torchvision:

        omniglot-py/images_background/Korean/character01/0542_01.png     964 characters of 30 alphabets
        omniglot-py/images_evaluation/Tibetan/character01/1567_01.png    659 characters of 20 alphabets

    The authors publish no validation set. Here, whole alphabets of the background set are used for validation. The default
    is Armenian, Korean, N_Ko, Tagalog and Tifinagh: 186 characters in scripts that have no close relative in the set. The
    other 778 characters are for training. This is not the split of Vinyals et al. (2016), which divides alphabets.

    A class is a character, with a name such as `Korean/character01`. Labels follow the order of these names. You can delete
    the archives once they are unpacked. `download=True` downloads an archive if its folder is missing, and verifies it
    with torchvision's checksums.

    Images are float (1, image_size, image_size) in [0, 1]; ink is 1, paper is 0. Images are not augmented, because a
    mirrored character is a different character.

    Args:
        root: The folder that contains `omniglot-py`.
        split: "train", "val" or "test".
        image_size: Height and width of the images, in pixels.
        val_alphabets: Alphabets of the background set for validation instead of training; empty for no validation.
        download: Download and unpack missing archives. Processes that start together, as with `torchrun`, would each
            download them: create the data set once beforehand.
        partial: Accept an incomplete set.
        memory_mb: Memory for the decoded images of a split, in MB; see `ImageSet`.

    Raises:
        FileNotFoundError: A folder is missing.
        ValueError: The numbers of characters or drawings differ from the published numbers, an alphabet is unknown, or a
            setting is out of range.

    References:
        Lake, Salakhutdinov, Tenenbaum, "Human-level concept learning through probabilistic program induction",
        Science 350(6266), 2015.

    Examples:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for place in ("images_background/Greek", "images_background/Korean", "images_evaluation/Tibetan"):
        ...         folder = Path(root) / "omniglot-py" / place / "character01"
        ...         folder.mkdir(parents=True)
        ...         Image.new("1", (105, 105), color=1).save(folder / "0001_01.png")
        ...     drawings = Omniglot(root, "val", val_alphabets=("Korean",), partial=True)
        ...     images, labels = drawings.batch([0])
        >>> drawings.with_split("train").class_names, drawings.class_names
        (('Greek/character01',), ('Korean/character01',))
        >>> tuple(images.shape), images.max().item()  # white paper is 0
        ((1, 1, 28, 28), 0.0)
    """

    in_channels: ClassVar[int] = 1

    def __init__(
        self,
        root: str | Path,
        split: Split = "train",
        *,
        image_size: int = 28,
        val_alphabets: tuple[str, ...] = VALIDATION_ALPHABETS,
        download: bool = False,
        partial: bool = False,
        memory_mb: float = 512,
    ) -> None:
        check_image_size(image_size)
        folder = Path(root) / FOLDER
        if download:
            _download(folder)
        background = _drawings(folder, BACKGROUND, partial=partial)
        evaluation = _drawings(folder, EVALUATION, partial=partial)
        alphabets = sorted({_alphabet(drawing) for drawing in background})
        unknown = sorted(set(val_alphabets) - set(alphabets))
        if unknown:
            raise InputError(
                f"val_alphabets contains {unknown[0]!r}, which is not in the background set. Choose from "
                f"{', '.join(alphabets)}."
            )
        items: dict[Split, list[ImageItem]] = {
            "train": [drawing for drawing in background if _alphabet(drawing) not in val_alphabets],
            "val": [drawing for drawing in background if _alphabet(drawing) in val_alphabets],
            "test": evaluation,
        }
        if not val_alphabets:
            del items["val"]
        check_no_split_is_empty(items, folder, "Hold out fewer alphabets (val_alphabets), or unpack the complete set.")
        super().__init__(
            items,
            split,
            partial_of(ink_on_paper, image_size),
            memory_mb=memory_mb,
            mode="L",
            no_validation="val_alphabets is empty. Name alphabets of the background set.",
        )


def ink_on_paper(
    size: int, pictures: Sequence[Image.Image], augment: bool = False
) -> Float[Tensor, "images 1 size size"]:
    """Return black-on-white drawings as one batch in which ink is 1 and paper is 0; `augment` has no effect."""
    from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

    # Paper is 0, so that zero padding and shifts add paper.
    to_ink = transforms.Compose([ImageOps.invert, transforms.Resize((size, size)), transforms.ToTensor()])
    return torch.stack([to_ink(picture) for picture in pictures])


def _download(folder: Path) -> None:
    """Download and unpack the archives if their folders are missing."""
    from torchvision.datasets import Omniglot as Published  # noqa: PLC0415 - only images need torchvision
    from torchvision.datasets.utils import download_and_extract_archive  # noqa: PLC0415

    # torchvision's Omniglot class would not unpack an archive that has already been downloaded.
    for name in (BACKGROUND, EVALUATION):
        if not (folder / name).is_dir():
            archive = f"{name}.zip"
            address = f"{Published.download_url_prefix}/{archive}"
            download_and_extract_archive(address, str(folder), filename=archive, md5=Published.zips_md5[name])


def _alphabet(drawing: ImageItem) -> str:
    return drawing.class_name.partition("/")[0]


def _drawings(parent: Path, name: str, *, partial: bool) -> list[ImageItem]:
    """Return the drawings of one of the two sets, in the order of character and file names."""
    fix = f"Unpack {ARCHIVE} into {parent}"
    folder = required(parent / name, f"{fix}, or pass download=True.")
    of_systems = Counter[str]()
    files_of: dict[str, list[Path]] = {}
    for alphabet in list_folders(folder, of_systems):
        for character in list_folders(alphabet, of_systems):
            files_of[composed_form(f"{alphabet.name}/{character.name}")] = [
                character / entry.name
                for entry in list_entries(character, of_systems)
                if entry.name.lower().endswith(".png")
            ]
    refuse_second_links([file for files in files_of.values() for file in files])
    if of_systems:
        rank_zero_info(f"{folder}: {describe_system_names(of_systems)}.")
    if not partial:
        _check_complete(files_of, folder, CHARACTERS[name], f"{fix} again, or pass partial=True to use this set.")
    return [ImageItem(file, character) for character, files in files_of.items() for file in files]


def _check_complete(files_of: Mapping[str, Sequence[Path]], folder: Path, characters: int, fix: str) -> None:
    """Raise an error if the numbers of characters or of drawings per character differ from the published numbers."""
    if len(files_of) != characters:
        raise InputError(f"{folder} contains {len(files_of)} characters instead of {characters}. {fix}")
    incomplete = [character for character, files in files_of.items() if len(files) != DRAWINGS]
    if incomplete:
        raise InputError(
            f"{folder} contains {count_and_names(incomplete, 'class')}, out of {len(files_of)}, without exactly "
            f"{DRAWINGS} drawings: the first has {len(files_of[incomplete[0]])}. {fix}"
        )
