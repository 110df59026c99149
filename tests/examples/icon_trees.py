"""Small trees of icon themes that the tests make."""

from pathlib import Path

import numpy as np
from PIL import Image

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}">{content}</svg>'


def theme(root: Path, name: str, folders: dict[str, dict[str, object]], inherits: tuple[str, ...] = ()) -> Path:
    """A theme with an `index.theme` and empty folders; each folder is described by its keys, such as Size."""
    home = root / name
    lines = ["[Icon Theme]", f"Name={name}", f"Inherits={','.join(inherits)}", f"Directories={','.join(folders)}"]
    for path, keys in folders.items():
        (home / path).mkdir(parents=True)
        lines += [f"[{path}]", *(f"{key}={value}" for key, value in keys.items())]
    (home / "index.theme").write_text("\n".join(lines))
    return home


def picture(seed: int, side: int = 8) -> Image.Image:
    """Coloured blocks, a few of them transparent; another seed gives another picture."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    blocks[..., 3] = np.where(blocks[..., 3] < 64, 0, 255)
    blocks[0, 0], blocks[3, 3] = (255, 0, 0, 255), (0, 0, 255, 255)  # never of one colour
    return Image.fromarray(blocks, "RGBA").resize((side, side), Image.Resampling.NEAREST)


def artists(root: Path, families: int, side: int = 8) -> list[Path]:
    """Themes of artists, Artist0, ..., each with an empty folder of icons; these folders."""
    keys = {"icons": {"Size": side, "Context": "Actions"}}
    return [theme(root, f"Artist{family}", keys) / "icons" for family in range(families)]


def many(root: Path, names: int, families: int, side: int = 8) -> Path:
    """Artists who each draw all names: icons name-0, ..., no two of them alike."""
    for family, folder in enumerate(artists(root, families, side)):
        for name in range(names):
            picture(1000 * family + name, side).save(folder / f"name-{name}.png")
    return root
