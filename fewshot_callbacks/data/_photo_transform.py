"""From photographs to what a model sees: each image by itself to one size, then the colours of a whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class PhotoTransform:
    """From a list of RGB images to one normalised batch.

    Flips and colours are changed in the whole batch at once, since many small tensors take longer than one large one.

    Attributes:
        to_size: From an image to an image of the size that the model sees.
        mean: Mean of each channel, which is subtracted.
        std: Standard deviation of each channel, by which it is divided.
        flip: Probability of the horizontal flip.
        jitter: Strength of `jitter_colours`.
    """

    to_size: Callable[[Image.Image], Image.Image]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: float = 0.0
    jitter: float = 0.0

    def __call__(self, images: Sequence[Image.Image]) -> Float[Tensor, "images 3 height width"]:
        """Return the batch; what is random is drawn from PyTorch's global random state."""
        pixels = [np.asarray(self.to_size(image)) for image in images]  # (height, width, 3), bytes
        if self.flip:
            flips = (torch.rand(len(pixels)) < self.flip).tolist()
            pixels = [image[:, ::-1] if flip else image for image, flip in zip(pixels, flips, strict=True)]
        batch = (
            torch.from_numpy(np.stack(pixels)).movedim(3, 1).to(torch.float32, memory_format=torch.contiguous_format)
        )
        batch.div_(255)
        if self.jitter:
            jitter_colours(batch, self.jitter)
        mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (self.mean, self.std))
        return batch.sub_(mean).div_(std)


def jitter_colours(images: Float[Tensor, "images 3 height width"], strength: float) -> None:
    """Change the brightness, the contrast and the saturation of each image at random, in this order and in place.

    Each is scaled by its own factor, uniform in 1 ± strength and at least 0: brightness towards black, contrast
    towards the mean grey of the image, saturation towards the grey of each pixel. Values are cut to [0, 1] after each,
    as Pillow's `ImageEnhance` does.

    Args:
        images: In [0, 1].
        strength: 0 changes nothing.
    """
    low, high = max(0.0, 1 - strength), 1 + strength
    brightness, contrast, saturation = low + (high - low) * torch.rand(3, len(images), 1, 1, 1)
    images.mul_(brightness).clamp_(max=1)
    mean_grey = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images.sub_(mean_grey).mul_(contrast).add_(mean_grey).clamp_(0, 1)
    grey = _grey(images)
    images.sub_(grey).mul_(saturation).add_(grey).clamp_(0, 1)


def _grey(images: Float[Tensor, "images 3 height width"]) -> Float[Tensor, "images 1 height width"]:
    """Return the luma of ITU-R BT.601, which is Pillow's grey."""
    red, green, blue = images.split(1, dim=1)
    grey: Tensor = 0.299 * red
    return grey.add_(green, alpha=0.587).add_(blue, alpha=0.114)
