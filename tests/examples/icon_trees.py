"""Small trees of icon themes that the tests make."""

from pathlib import Path

import numpy as np
from PIL import Image

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}">{content}</svg>'


def theme(root: Path, name: str, folders: dict[str, dict[str, object]], inherits: tuple[str, ...] = ()) -> Path:
    """A theme with an `index.theme` and empty folders; each folder is described by its keys, such as Size."""
    home = root / name
    home.mkdir(parents=True)
    lines = ["[Icon Theme]", f"Name={name}", f"Inherits={','.join(inherits)}", f"Directories={','.join(folders)}"]
    for path, keys in folders.items():
        (home / path).mkdir(parents=True)
        lines += ["", f"[{path}]", *(f"{key}={value}" for key, value in keys.items())]
    (home / "index.theme").write_text("\n".join(lines) + "\n")
    return home


def picture(seed: int, side: int = 16) -> Image.Image:
    """Coloured blocks, a few of them transparent; another seed gives another picture."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    blocks[..., 3] = np.where(blocks[..., 3] < 64, 0, 255)
    blocks[0, 0], blocks[3, 3] = (255, 0, 0, 255), (0, 0, 255, 255)  # never of one colour
    return Image.fromarray(np.ascontiguousarray(blocks), "RGBA").resize((side, side), Image.Resampling.NEAREST)


def draw(file: Path, seed: int, side: int = 16) -> None:
    """A picture as a PNG."""
    picture(seed, side).save(file)


def many(root: Path, names: int, families: int, side: int = 16) -> Path:
    """Themes that each draw all names: Artist-0, ..., with icons name-0, ..., no two of them alike."""
    for family in range(families):
        folder = theme(root, f"Artist{family}", {"icons": {"Size": side, "Context": "Actions"}}) / "icons"
        for name in range(names):
            draw(folder / f"name-{name}.png", 1000 * family + name, side)
    return root
