"""Lays icons on paper, and moves them at random while a network trains."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.data import augment_glyphs

Background = Literal["white", "random"]


def on_white(images: Float[Tensor, "images 4 size size"]) -> Float[Tensor, "images 3 size size"]:
    """Lay icons on white paper.

    Args:
        images: Red, green, blue (not premultiplied) and alpha, in [0, 1].

    Returns:
        Red, green and blue, in [0, 1].

    Examples:
        >>> on_white(torch.tensor([1.0, 0.0, 0.0, 0.25]).reshape(1, 4, 1, 1)).flatten().tolist()
        [1.0, 0.75, 0.75]
    """
    return images[:, :3] * images[:, 3:] + (1 - images[:, 3:])


@dataclass(frozen=True)
class IconAugmentation:
    """Moves the icons of a batch at random and lays them on paper; a function of the seed and the batch's positions.

    Workers, global random state and earlier batches do not matter. Icons are never mirrored: undo would become redo.

    Args:
        seed: Seed of the random numbers.
        background: "white", or "random": for each image one colour, uniform among all.
        degrees: Rotation, uniform in ±degrees.
        shear: Horizontal shear, uniform in ±shear.
        scale: Scale, uniform in 1 ± scale.
        shift: Shift along each axis, uniform in ±shift of the image's side.

    Raises:
        ValueError: `background` is neither.

    Examples:
        >>> augment = IconAugmentation(seed=0, background="random")
        >>> paper = augment(torch.zeros(2, 4, 8, 8), torch.tensor([3, 5]))
        >>> tuple(paper.shape), bool((paper[0] == paper[1]).all())
        ((2, 3, 8, 8), False)
        >>> torch.equal(paper, augment(torch.zeros(2, 4, 8, 8), torch.tensor([3, 5])))
        True
    """

    seed: int = 0
    background: Background = "white"
    degrees: float = 10.0
    shear: float = 0.15
    scale: float = 0.1
    shift: float = 2 / 32

    def __post_init__(self) -> None:
        if self.background not in ("white", "random"):
            raise ValueError(f"There is no background {self.background!r}. Use 'white' or 'random'.")

    def __call__(
        self, images: Float[Tensor, "images 4 size size"], positions: Int[Tensor, "images"]
    ) -> Float[Tensor, "images 3 size size"]:
        """Augmented icons.

        Args:
            images: Red, green, blue (not premultiplied) and alpha, in [0, 1].
            positions: Indices of the images in their data set.

        Returns:
            Red, green and blue, in [0, 1].
        """
        if len(images) == 0:
            return images[:, :3]
        words = f"{self.seed} {positions.tolist()}"
        seed = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little", signed=True)
        generator = torch.Generator().manual_seed(seed)
        alpha = images[:, 3:]
        premultiplied = torch.cat([images[:, :3] * alpha, alpha], dim=1)
        limits = {"degrees": self.degrees, "shear": self.shear, "scale": self.scale, "shift": self.shift}
        moved = augment_glyphs(premultiplied, generator, **limits, noise=0.0)
        paper = torch.ones(len(images), 3, 1, 1)
        if self.background == "random":
            paper = torch.rand(len(images), 3, 1, 1, generator=generator)
        return (moved[:, :3] + (1 - moved[:, 3:]) * paper).clamp(0, 1)
