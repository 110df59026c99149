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


def write_tree(root: Path) -> Path:
    """200 classes of two images: the class is the red of the first and the green of the second. No list is sorted."""
    folder = root / "CUB_200_2011"
    paths, labels = [], []
    for i in reversed(range(200)):
        for j in range(2):
            draw(folder / "images" / CLASSES[i] / f"Bird_{j}.jpg", (i, 0, 0) if j == 0 else (0, i, 0))
            paths.append(f"{len(paths) + 1} {CLASSES[i]}/Bird_{j}.jpg")
            labels.append(f"{len(paths)} {i + 1}")
    write_lists(folder, paths, labels)
    return root


CLASSES = [f"{i + 1:03}.Bird_{(i * 77) % 200:03}" for i in range(200)]


def write_lists(folder: Path, paths: list[str], labels: list[str]) -> None:
    (folder / "classes.txt").write_text("".join(f"{i + 1} {name}\n" for i, name in enumerate(CLASSES)))
    (folder / "images.txt").write_text("\n".join(paths) + "\n")
    (folder / "image_class_labels.txt").write_text("\n".join(reversed(labels)) + "\n")
