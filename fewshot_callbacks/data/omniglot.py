"""Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each, in the split of Lake et al. (2015)."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from PIL import ImageOps

from fewshot_callbacks.data._episodic import Split
from fewshot_callbacks.data._images import (
    BatchTransform,
    ForEach,
    ImageDataModule,
    ImageFileSet,
    check_no_split_is_empty,
    named,
    required,
)
from fewshot_callbacks.data._settings import with_settings

FOLDER = "omniglot-py"
BACKGROUND, EVALUATION = "images_background", "images_evaluation"
SOURCE = (
    "images_background.zip and images_evaluation.zip from the folder python of https://github.com/brendenlake/omniglot"
)
CHARACTERS: Mapping[str, int] = {BACKGROUND: 964, EVALUATION: 659}
DRAWINGS = 20  # of each character
VALIDATION_ALPHABETS = ("Armenian", "Korean", "N_Ko", "Tagalog", "Tifinagh")


@with_settings
class OmniglotDataModule(ImageDataModule):
    """Omniglot as it is published: the background set to train on, the evaluation set to test on.

    `root` holds the two archives unpacked, in the layout of torchvision:

        omniglot-py/images_background/Korean/character01/0542_01.png     964 characters of 30 alphabets
        omniglot-py/images_evaluation/Tibetan/character01/1567_01.png    659 characters of 20 alphabets

    The authors publish no validation set. Whole alphabets of the background set are held out for it: by default
    Armenian, Korean, N_Ko, Tagalog and Tifinagh, 186 characters of scripts without a near relative in the set, which
    leaves 778 to train on. The split of Vinyals et al. (2016), which divides alphabets, is different.

    A class is a character, named `Korean/character01`; labels are in the order of these names, not in that of the file
    system. The archives themselves are needed only to unpack them. `download=True` downloads them if a folder is
    missing, and checks them against torchvision's checksums.

    Batches are tuples (images, labels): float images (images, 1, image_size, image_size) in [0, 1], ink 1 on paper 0;
    int64 labels 0 ... C-1 of the split. A training batch is one episode, class by class, each class's support first.
    Nothing is augmented: a mirrored character would be another character.

    Args:
        root: The folder that holds `omniglot-py`.
        val_alphabets: Alphabets of the background set that are used for validation instead of training; empty for no
            validation.
        download: Download and unpack what is missing, on one process, before the first stage (`prepare_data`).
        partial: Accept an incomplete set.

    Raises:
        ValueError: A setting is out of range. The files are checked in `setup`: a missing folder is a
            FileNotFoundError; other numbers of characters or drawings, or an unknown alphabet, a ValueError.

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
        ...     data = OmniglotDataModule(root, val_alphabets=("Korean",), partial=True)
        ...     images, labels = data.images("val").__getitems__([0])
        >>> data.images("train").class_names, data.images("val").class_names
        (('Greek/character01',), ('Korean/character01',))
        >>> tuple(images.shape), images.max().item()  # white paper is 0
        ((1, 1, 28, 28), 0.0)
    """

    in_channels: ClassVar[int] = 1

    image_size: int = 28
    val_alphabets: tuple[str, ...] = VALIDATION_ALPHABETS
    download: bool = False
    partial: bool = False

    def prepare_data(self) -> None:
        """With `download`, fetch and unpack the archives whose folder is missing."""
        if not self.download:
            return
        from torchvision.datasets import Omniglot  # noqa: PLC0415 - only images need torchvision
        from torchvision.datasets.utils import download_and_extract_archive  # noqa: PLC0415

        for name in (BACKGROUND, EVALUATION):
            if not (self._root / FOLDER / name).is_dir():
                download_and_extract_archive(
                    f"{Omniglot.download_url_prefix}/{name}.zip",
                    str(self._root / FOLDER),
                    filename=f"{name}.zip",
                    md5=Omniglot.zips_md5[name],
                )

    def _transform(self, *, augment: bool) -> BatchTransform:
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        size = (self.image_size, self.image_size)
        return ForEach(transforms.Compose([ImageOps.invert, transforms.Resize(size), transforms.ToTensor()]))

    def _why_no_validation(self) -> str | None:
        return None if self.val_alphabets else "val_alphabets is empty. Name alphabets of the background set."

    def _listed(self) -> dict[Split, ImageFileSet]:
        background, evaluation = (self._characters(name) for name in (BACKGROUND, EVALUATION))
        alphabets = sorted({character.partition("/")[0] for character in background})
        unknown = sorted(set(self.val_alphabets) - set(alphabets))
        if unknown:
            raise ValueError(
                f"val_alphabets has {unknown[0]!r}, which is not an alphabet of the background set. Choose among "
                f"{', '.join(alphabets)}."
            )
        splits: dict[Split, dict[str, list[Path]]] = {"train": {}, "val": {}, "test": evaluation}
        for character, drawings in background.items():
            held_out = character.partition("/")[0] in self.val_alphabets
            splits["val" if held_out else "train"][character] = drawings
        wanted = {
            split: len(characters) for split, characters in splits.items() if split != "val" or self.val_alphabets
        }
        check_no_split_is_empty(wanted, self._root / FOLDER, "Hold out fewer alphabets, or unpack all of the set.")
        return {
            split: ImageFileSet(
                [drawing for drawings in characters.values() for drawing in drawings],
                [character for character, drawings in characters.items() for _ in drawings],
                "L",
            )
            for split, characters in splits.items()
        }

    def _characters(self, name: str) -> dict[str, list[Path]]:
        """The drawings of each character, both in the order of their names."""
        fix = f"Unpack {SOURCE} into {self._root / FOLDER}"
        folder = required(
            self._root / FOLDER / name, f"{fix}, or pass download=True, and call prepare_data() where no Trainer does."
        )
        found = {
            f"{alphabet.name}/{character.name}": sorted(character.glob("*.png"))
            for alphabet in sorted(entry for entry in folder.iterdir() if entry.is_dir())
            for character in sorted(entry for entry in alphabet.iterdir() if entry.is_dir())
        }
        characters = {character: drawings for character, drawings in found.items() if drawings}
        if not self.partial:
            fix += " again, or pass partial=True to use what is there."
            incomplete = [character for character, drawings in found.items() if len(drawings) != DRAWINGS]
            if len(found) != CHARACTERS[name]:
                raise ValueError(f"{folder} holds {len(found)} characters; published are {CHARACTERS[name]}. {fix}")
            if incomplete:
                raise ValueError(
                    f"{named(incomplete, 'class')} of {len(found)} in {folder} without exactly {DRAWINGS} drawings; the "
                    f"first has {len(found[incomplete[0]])}. {fix}"
                )
        return characters
