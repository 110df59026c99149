"""Images of any kind as pictures that matplotlib can show."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

Picture = Float[np.ndarray, "height width channels"]
Scale = float | Sequence[float] | np.ndarray | Tensor

LONGEST = 256  # pixels: more than a panel shows at 200 pixels per inch


def to_picture(image: Any, mean: Scale | None = None, std: Scale | None = None, longest: int = LONGEST) -> Picture:
    """Convert the input image of a network to a picture that can be shown.

    One channel is shown in grey, two as the grey mean of both, three as red, green and blue, four as red, green, blue
    and alpha on white; of more than four, the first three are shown. Integers between 0 and 255 are divided by 255.
    Fractions between 0 and 1 are kept. Other values are stretched so that the smallest becomes black and the largest
    white, or are all mid-grey if they are equal. NaN and infinity are mid-grey.

    Args:
        image: A tensor (channels, height, width) or (height, width); an array (height, width) or (height, width,
            channels), or with the channels first if no other axis can hold the channels; or a Pillow image.
        mean: Mean of the normalisation that is undone, one value or one per channel. The result is clipped to [0, 1],
            or to [0, 255] if a mean is greater than 1.
        std: Standard deviation of that normalisation, in the same form.
        longest: A picture with a longer side is reduced, by averaging squares of pixels.

    Returns:
        (height, width, 1 or 3) float32 values in [0, 1].

    Raises:
        ValueError: If it is not an image, or `mean` or `std` has neither one value nor one per channel.

    Examples:
        >>> import torch
        >>> to_picture(torch.full((1, 2, 2), 51, dtype=torch.uint8))[0, 0], to_picture(torch.rand(7, 8, 9)).shape
        (array([0.2], dtype=float32), (8, 9, 3))
    """
    values, whole = _channels_last(image)
    if mean is not None or std is not None:
        values, top = _denormalised(values, mean, std)
        values = (values / top).clip(0, 1)
    elif whole and values.min() >= 0 and values.max() <= 255:
        values = values / 255
    else:
        values = _stretched(values)
    values = np.nan_to_num(_smaller(values, longest), nan=0.5)
    channels = values.shape[-1]
    if channels == 2:
        values = values.mean(-1, keepdims=True)
    elif channels == 4:
        values = values[..., :3] * values[..., 3:] + 1 - values[..., 3:]
    picture: Picture = values[..., :3].astype(np.float32).clip(0, 1)
    return picture


def _channels_last(image: Any) -> tuple[Float[np.ndarray, "height width channels"], bool]:
    """Values as float64, with NaN for what is not finite, and whether they are integers."""
    first = isinstance(image, Tensor)
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        # By float64, since NumPy has no bfloat16.
        array = (image.double() if image.is_floating_point() else image).numpy()
    else:
        # Numbers of a palette or of another colour space would be shown as if they were red, green and blue.
        if getattr(image, "mode", None) in ("P", "PA", "LA", "CMYK", "YCbCr", "LAB", "HSV"):
            image = image.convert("RGBA" if image.mode in ("P", "PA", "LA") else "RGB")
        array = np.asarray(image)
        first = array.ndim == 3 and array.shape[-1] > 4 and array.shape[0] in (1, 3, 4)
    if array.ndim not in (2, 3) or array.size == 0 or array.dtype.kind not in "biuf":
        raise ValueError(
            f"An image needs the axes height and width, and optionally channels, and must hold numbers; this one has "
            f"the shape "
            f"{tuple(array.shape)} and the type {array.dtype}."
        )
    if array.ndim == 2:
        array = array[..., None]
    elif first:
        array = np.moveaxis(array, 0, -1)
    values = array.astype(np.float64)
    return np.where(np.isfinite(values), values, np.nan), array.dtype.kind in "iu"


def _denormalised(
    values: Float[np.ndarray, "height width channels"], mean: Scale | None, std: Scale | None
) -> tuple[Float[np.ndarray, "height width channels"], float]:
    """Values before the normalisation, and the value of white."""
    shift, scale = (
        np.asarray(default if given is None else given, dtype=np.float64).reshape(-1)
        for given, default in ((mean, 0.0), (std, 1.0))
    )
    for name, given in (("mean", shift), ("std", scale)):
        if len(given) not in (1, values.shape[-1]):
            raise ValueError(f"{name} has {len(given)} values for an image of {values.shape[-1]} channels.")
    return values * scale + shift, 255.0 if shift.max() > 1 else 1.0


def _stretched(values: Float[np.ndarray, "height width channels"]) -> Float[np.ndarray, "height width channels"]:
    """Fractions as they are, other values stretched to 0 ... 1."""
    known = values[~np.isnan(values)]
    if not known.size:
        return values
    low, high = known.min(), known.max()
    if low >= 0 and high <= 1:
        return values
    if low == high:
        return np.full_like(values, 0.5)
    stretched: Float[np.ndarray, "height width channels"] = values / (high - low) - low / (high - low)
    return stretched


def _smaller(values: Float[np.ndarray, "height width channels"], longest: int) -> Float[np.ndarray, "..."]:
    """Means over squares of pixels, the least that make the sides short enough; what is left over is cut off."""
    height, width, channels = values.shape
    step = -(-max(height, width) // longest)
    if step == 1 or min(height, width) < step:
        return values
    cut = values[: height // step * step, : width // step * step]
    small: Float[np.ndarray, "..."] = cut.reshape(height // step, step, width // step, step, channels).mean((1, 3))
    return small
