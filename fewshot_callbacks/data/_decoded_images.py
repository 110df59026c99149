"""Decoded images, kept in memory so that a file is read once and not in each epoch."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from torch.utils.data import get_worker_info


class DecodedImages:
    """Images by their number, kept as long as they fit; those that come later are read at each access.

    Args:
        memory_mb: Memory for their pixels, in MB. The workers of a loader share it equally.
        items: Number of the images, for the message that they do not fit.
    """

    def __init__(self, memory_mb: float, items: int) -> None:
        self.memory_mb = memory_mb
        self.items = items
        self._images: dict[int, Image.Image] = {}
        self._bytes = 0
        # Nobody who asked for none has to be told that they do not fit.
        self._full = memory_mb == 0

    def get(self, index: int, read: Callable[[int], Image.Image]) -> Image.Image:
        """Return an image; it is read where it is not kept."""
        image = self._images.get(index)
        if image is None:
            image = read(index)
            if not self._full:
                self._keep(index, image)
        return image

    def _keep(self, index: int, image: Image.Image) -> None:
        worker = get_worker_info()
        size = image.width * image.height * (1 if image.mode == "L" else 4)  # Pillow's RGB takes 4 bytes a pixel
        if self._bytes + size <= self.memory_mb * 1e6 / (worker.num_workers if worker else 1):
            self._images[index] = image
            self._bytes += size
            return
        self._full = True
        # The workers of a loader would each say it, and again whenever they are started.
        if worker is None:
            rank_zero_info(
                f"{len(self._images):,} of {self.items:,} images fill memory_mb = {self.memory_mb:g} once they are "
                f"decoded; the others are decoded at each access. Use a larger memory_mb, or num_workers to decode them in "
                f"other processes."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the images out: a spawned worker reads its part itself."""
        return self.__dict__ | {"_images": {}, "_bytes": 0}
