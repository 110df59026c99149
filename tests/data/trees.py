"""What the tests of the readers share: tiny images and settings for tiny episodes."""

from pathlib import Path

from PIL import Image

SMALL = {"image_size": 8, "ways": 2, "shots": 1, "queries": 1, "episodes": 2, "batch_size": 7}
SMALL = {**SMALL, "test_ways": 2, "test_shots": 1, "test_queries": 1, "test_episodes": 3}
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "augment": False}


def draw(file: Path, colour: tuple[int, int, int] = (0, 0, 0), size: tuple[int, int] = (12, 10)) -> None:
    """An image of one colour, in a folder that is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)
