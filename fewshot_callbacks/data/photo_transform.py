"""From photographs to what a model sees: each image by itself to one size, then the colours of a whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class PhotoTransform:
    """From a list of RGB images to one normalised batch.

    Evaluation images are resized, and their centre is cut out. Augmented ones get a random resized crop, a flip and a
    jitter, drawn from PyTorch's random state in the process that loads them (`seed_everything(seed, workers=True)` makes a
    run repeatable). Flips and colours are changed in the whole batch at once, since many small tensors take longer than
    one large one.

    Args:
        image_size: Height and width of the images that the model sees, in pixels.
        resize: Shorter side of an evaluation image before its centre is cut out, or a pair (height, width) for an image
            of exactly that size, of any original shape; a shorter side of 8/7 of `image_size` by default.
        min_area: Smallest part of the image's area in the random resized crop, in (0, 1].
        flip: Probability of the horizontal flip.
        jitter: Strength of the jitter of brightness, contrast and saturation; 0 for none.
        mean: Mean of each channel, which is subtracted; by default that of ImageNet.
        std: Standard deviation of each channel, by which it is divided.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> images = [Image.new("RGB", (20, 10)), Image.new("RGB", (30, 40))]
        >>> PhotoTransform(image_size=8, mean=(0, 0, 0), std=(1, 1, 1))(images).shape
        torch.Size([2, 3, 8, 8])
        >>> PhotoTransform(flip=2.0)
        Traceback (most recent call last):
        ValueError: flip is 2.0; it is a probability. Use 0 <= flip <= 1.
    """

    image_size: int = 84
    resize: int | tuple[int, int] | None = None
    min_area: float = 0.35
    flip: float = 0.5
    jitter: float = 0.4
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        check_image_size(self.image_size)
        resize = self._resized()
        if (resize if isinstance(resize, int) else min(resize)) < self.image_size:
            raise ValueError(
                f"resize is {resize}, smaller than image_size {self.image_size}, so the centre would be padded with "
                f"black. Use resize >= {self.image_size}."
            )
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area is {self.min_area}; it is a part of the image's area. Use 0 < min_area <= 1.")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip}; it is a probability. Use 0 <= flip <= 1.")
        if self.jitter < 0:
            raise ValueError(f"jitter is {self.jitter}. Use 0 for no colour jitter.")
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; images are divided by it. Use positive numbers.")

    def __call__(self, images: Sequence[Image.Image], augment: bool = False) -> Float[Tensor, "images 3 height width"]:
        """Return the batch.

        Args:
            images: At least one.
            augment: Whether they are training images.
        """
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        to_size = transforms.Compose(self.steps(augment))
        pixels = [np.asarray(to_size(image)) for image in images]  # (height, width, 3), bytes
        if augment and self.flip:
            flips = (torch.rand(len(pixels)) < self.flip).tolist()
            pixels = [image[:, ::-1] if flip else image for image, flip in zip(pixels, flips, strict=True)]
        batch = (
            # Bytes up to here: a quarter of the memory to stack, and a single pass converts and reorders them.
            torch.from_numpy(np.stack(pixels)).movedim(3, 1).to(torch.float32, memory_format=torch.contiguous_format)
        )
        batch.div_(255)
        if augment and self.jitter:
            jitter_colours(batch, self.jitter)
        mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (self.mean, self.std))
        return batch.sub_(mean).div_(std)

    def _resized(self) -> int | tuple[int, int]:
        # 8/7 is 256 to 224, as images of ImageNet are usually resized and cropped.
        return round(self.image_size * 8 / 7) if self.resize is None else self.resize

    def steps(self, augment: bool) -> list[Any]:
        """List the transforms that bring one image to `image_size`."""
        from torchvision import transforms  # noqa: PLC0415 - only images need torchvision

        if augment:
            return [transforms.RandomResizedCrop(self.image_size, scale=(self.min_area, 1.0))]
        return [transforms.Resize(self._resized()), transforms.CenterCrop(self.image_size)]


def check_image_size(image_size: int) -> None:
    """Refuse images without a pixel."""
    if image_size < 1:
        raise ValueError(f"image_size is {image_size}. Use image_size >= 1.")


def jitter_colours(images: Float[Tensor, "images 3 height width"], strength: float) -> None:
    """Change the brightness, the contrast and the saturation of each image at random, in this order and in place.

    Each is scaled by its own factor, uniform in 1 ± strength and at least 0: brightness towards black, contrast
    towards the mean grey of the image, saturation towards the grey of each pixel. Values are cut to [0, 1] after each,
    as Pillow's `ImageEnhance` does.

    Args:
        images: In [0, 1].
        strength: 0 changes nothing.
    """
    # A negative factor would invert the image.
    low, high = max(0.0, 1 - strength), 1 + strength
    brightness, contrast, saturation = low + (high - low) * torch.rand(3, len(images), 1, 1, 1)
    images.mul_(brightness).clamp_(max=1)
    # in place: a batch of 120 images of 84 x 84 takes 10 MB, and each copy as many
    mean_grey = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images.sub_(mean_grey).mul_(contrast).add_(mean_grey).clamp_(0, 1)
    grey = _grey(images)
    images.sub_(grey).mul_(saturation).add_(grey).clamp_(0, 1)


def _grey(images: Float[Tensor, "images 3 height width"]) -> Float[Tensor, "images 1 height width"]:
    """Return the luma of ITU-R BT.601, which is Pillow's grey."""
    red, green, blue = images.split(1, dim=1)
    grey: Tensor = 0.299 * red
    return grey.add_(green, alpha=0.587).add_(blue, alpha=0.114)
