"""Small pictures of items, as a browser takes them from inside the file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from fewshot_callbacks._image_files import to_8_bits
from fewshot_callbacks.report.items import Items

# Characters of an item that is a text.
LONGEST_TEXT = 160
# Number of a set, and the index of an item in it.
Key = tuple[int, int]


@dataclass
class Thumbnails:
    """What is shown of items, within a number of bytes.

    Attributes:
        sets: The sets of items.
        side: Pixels of the longer side.
        room: Bytes that all may take together.
    """

    sets: Sequence[Items]
    side: int
    room: int
    # name of an item -> its picture as a data URI
    images: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    # a sentence for each item that could not be shown
    failures: list[str] = field(default_factory=list)
    # items for which there was no room
    left_out: int = 0

    def add(self, keys: Iterable[Key]) -> None:
        """Add items, the most important ones first."""
        for number, index in dict.fromkeys(keys):
            items, name = self.sets[number], name_of((number, index))
            if items.picture is None or name in self.images or name in self.texts:
                continue
            if self.room <= 0:
                self.left_out += 1
                continue
            try:
                shown = items.picture(index)
                content = shown[:LONGEST_TEXT] if isinstance(shown, str) else data_uri(shown, self.side)
            except Exception as error:  # one image must not take the others with it
                # between the characters that give a name a direction of its own
                file = f" (\u2068{items.files[index]}\u2069)" if items.files is not None else ""
                self.failures.append(f"{items.name} {index}{file}: {type(error).__name__}: {error}")
                continue
            # With the quotes, the colon and the comma around them.
            self.room -= len(content) + len(name) + 8
            if self.room <= 0:
                self.left_out += 1
                continue
            (self.texts if isinstance(shown, str) else self.images)[name] = content


def name_of(key: Key) -> str:
    """Name an item in the file.

    Examples:
        >>> name_of((0, 12)), name_of((1, 3))
        ('0-12', '1-3')
    """
    return f"{key[0]}-{key[1]}"


def data_uri(shown: object, side: int) -> str:
    """Encode an image as WebP, without loss where it is small.

    Args:
        shown: An image of Pillow, a tensor or an array.
        side: Pixels of the longer side, if it is larger.
    """
    if isinstance(shown, Image.Image) and shown.mode not in ("I", "F"):
        image = to_8_bits(shown)
        # A palette may have a transparent colour without having an alpha channel.
        image = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
        if image.mode == "RGBA":
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    else:
        from fewshot_callbacks.plots import to_picture  # noqa: PLC0415 - matplotlib, which files of images do not need

        picture = to_picture(shown, longest=max(256, side))
        values = np.rint(255 * picture).astype(np.uint8)
        image = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values).convert("RGB")
    image.thumbnail((side, side))
    content = io.BytesIO()
    image.save(content, "WEBP", lossless=max(image.size) <= 48, quality=72, method=2)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
