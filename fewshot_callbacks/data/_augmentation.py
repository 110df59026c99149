"""Random movements of a batch of small images, shared by the data sets that hold their images in memory."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample


def move_at_random(
    images: Float[Tensor, "images channels size size"],
    generator: torch.Generator | None,
    *,
    degrees: float,
    shear: float,
    scale: float,
    shift: float,
) -> Float[Tensor, "images channels size size"]:
    """Move each image by its own random affine map, in one resampling; what comes in at the borders is 0.

    Args:
        images: A batch with at least one image.
        generator: Source of the random numbers, drawn on its device; without one, the global one of the images' device.
        degrees: Rotation, uniform in ±degrees.
        shear: Horizontal shear, uniform in ±shear (pixels aside per pixel up).
        scale: Scale, uniform in 1 ± scale.
        shift: Shift along each axis, uniform in ±shift of the image's side.

    Returns:
        Images of the same shape and type.
    """
    source = generator.device if generator is not None else images.device

    def uniform(limit: float) -> Float[Tensor, "images"]:
        return limit * (2 * torch.rand(len(images), generator=generator, device=source) - 1)

    angle, lean, size = torch.deg2rad(uniform(degrees)), uniform(shear), 1 + uniform(scale)
    cos, sin = angle.cos() / size, angle.sin() / size
    # Where each pixel of the result is looked up, in coordinates from -1 to 1: rotation, after shear, after scale.
    across = torch.stack([cos, lean * cos - sin, 2 * uniform(shift)], dim=1)
    down = torch.stack([sin, lean * sin + cos, 2 * uniform(shift)], dim=1)
    theta = torch.stack([across, down], dim=1).to(images)  # (images, 2, 3)
    grid = affine_grid(theta, list(images.shape), align_corners=False)  # (images, size, size, 2)
    return grid_sample(images, grid, padding_mode="zeros", align_corners=False)
