"""Which icons are nearly the same drawing, and which families of themes drew on each other."""

from collections import Counter

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn.functional import avg_pool2d

NEAR_COPY = 0.01  # of the energy, as for the look-alikes among the glyphs
RELATED = 0.1  # two families with this fraction of near-copies among their common classes form one circle of artists
ROWS = 512  # compared with all others at a time, to bound the memory


def near_copies(images: UInt8[Tensor, "images 4 size size"]) -> Int[Tensor, "pairs 2"]:
    """Return all pairs of images with a summed squared difference of at most 1 % of the larger image's energy.

    The comparison uses integers: colours premultiplied with alpha and rounded. Halved sums over 2 x 2 pixels are never
    further apart than the images (Cauchy-Schwarz), so a float32 product of these small vectors finds the candidate pairs.

    Args:
        images: Red, green, blue and alpha; height and width are even.

    Returns:
        Positions of the two images of each pair, the smaller one first, in ascending order.

    Examples:
        >>> images = torch.randint(0, 255, (3, 4, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
        >>> images[2] = images[0]
        >>> images[2, 0, 0, 0] ^= 1
        >>> near_copies(images).tolist()
        [[0, 2]]
    """
    if len(images) == 0:
        return torch.zeros(0, 2, dtype=torch.int64)
    colours, alpha = images[:, :3].long(), images[:, 3:].long()
    premultiplied = torch.cat([(2 * colours * alpha + 255) // 510, alpha], dim=1)  # (images, 4, size, size)
    pixels = premultiplied.flatten(1)
    energy = pixels.square().sum(dim=1)
    blocks = 2 * avg_pool2d(premultiplied.float(), 2).flatten(1)  # (images, size * size)
    lengths = blocks.square().sum(dim=1)
    found = []
    for start in range(0, len(images), ROWS):
        some = slice(start, start + ROWS)
        apart = lengths[some, None] + lengths[None] - 2 * blocks[some] @ blocks.T  # (rows, images)
        larger = torch.maximum(energy[some, None], energy[None]).float()
        # Twice the bound: room for the rounding of the product.
        one, other = (apart <= 2 * NEAR_COPY * larger).nonzero().unbind(1)
        pairs = torch.stack([one + start, other], dim=1)[one + start < other]
        difference = (pixels[pairs[:, 0]] - pixels[pairs[:, 1]]).square().sum(dim=1)
        close = difference * round(1 / NEAR_COPY) <= torch.maximum(energy[pairs[:, 0]], energy[pairs[:, 1]])
        found.append(pairs[close])
    return torch.cat(found)


def circles(
    classes: Int[Tensor, "images"], families: Int[Tensor, "images"], pairs: Int[Tensor, "pairs 2"], family_count: int
) -> tuple[int, ...]:
    """Return which families drew on each other: at least a tenth of their common classes are near-copies.

    Args:
        classes: Class of each image.
        families: Family of each image.
        pairs: See `near_copies`.
        family_count: The number of families.

    Returns:
        For each family, the first family of its circle; its own number if it drew on no other family.
    """
    same_class = pairs[classes[pairs[:, 0]] == classes[pairs[:, 1]]]
    copied = Counter(tuple(sorted(pair)) for pair in families[same_class].tolist())
    held = [set(classes[families == family].tolist()) for family in range(family_count)]
    circle = list(range(family_count))
    for (one, other), number in sorted(copied.items()):
        if number >= RELATED * len(held[one] & held[other]):
            first, second = sorted((circle[one], circle[other]))
            circle = [first if family == second else family for family in circle]
    return tuple(circle)
