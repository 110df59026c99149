"""Icons: which pictures count, splits by name and by artist, a cache that repairs itself, and errors for missing themes."""

from collections import defaultdict
from pathlib import Path

import icons
import numpy as np
import pytest
import torch
from icons import IconThemes
from icons import __main__ as command_line
from icons.augmentation import IconAugmentation, on_white
from icons.cache import cache_file, installed_themes, load_drawing
from icons.copies import NEAR_COPY, near_copies
from icons.drawing import draw_file, draw_icons
from icons.files import find_themes
from PIL import Image

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.data.dataset import split_of
from tests.cli.command_options import QUIET
from tests.cli.command_options import TINY as TINY_RUN
from tests.examples.icon_trees import SVG, artists, many, picture
from tests.integration_packages import integration
from tests.messages import refused

SMALL = {"size": 8, "min_families": 2}


def load_splits(**settings: object) -> dict[str, IconThemes]:
    icons = IconThemes(**SMALL, **settings)
    return {split: icons.with_split(split) for split in icons.splits}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight artists who each draw forty names."""
    return many(tmp_path_factory.mktemp("themes"), names=40, families=8)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a machine without themes would have them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "usr"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    return tmp_path / "usr" / "icons"


def test_a_png_is_scaled_into_the_middle_of_the_square(tmp_path: Path) -> None:
    Image.new("RGBA", (20, 10), (10, 200, 30, 255)).save(tmp_path / "wide.png")
    drawn = draw_file(tmp_path / "wide.png", 8)
    assert drawn.shape == (4, 8, 8)
    assert (drawn[3] > 0).any(1).nonzero()[0].tolist() == [2, 3, 4, 5]
    assert drawn[:3, 3, 3].tolist() == [10, 200, 30]
    assert not drawn[:, 0].any()
    picture(5).save(tmp_path / "same.png")
    pixels = np.asarray(picture(5)).transpose(2, 0, 1)
    assert np.array_equal(draw_file(tmp_path / "same.png", 8), pixels * (pixels[3] > 0))


def test_a_vector_is_drawn_at_any_size(tmp_path: Path) -> None:
    integration("resvg_py")
    half = SVG.format(side=8, content='<rect width="4" height="8" fill="#ff0000"/>')
    (tmp_path / "a.svg").write_text(half)
    for size in (8, 10):
        drawn = draw_file(tmp_path / "a.svg", size)
        assert drawn[:, 1, 1].tolist() == pytest.approx([255, 0, 0, 255], abs=1)
        assert drawn[3, 1, size - 2] <= 1  # the resampling may leave a trace
    (tmp_path / "wide.svg").write_text(half.replace('0 0 8 8"', '0 0 8 4"'))
    wide = draw_file(tmp_path / "wide.svg", 16)
    assert (wide[3] > 128).any(1).nonzero()[0].tolist() == list(range(4, 12))


@pytest.mark.parametrize("name", ["a.png", "a.svg", "missing.png"])
def test_a_broken_file_is_no_picture(tmp_path: Path, name: str) -> None:
    for broken in ("a.png", "a.svg"):
        (tmp_path / broken).write_bytes(b"no image")
    assert draw_file(tmp_path / name, 8) is None


def pictures_of(root: Path, symbolic: bool = False) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The artists of each class that counts, and what each rule left out."""
    drawn, found = draw_icons(find_themes([root]), **SMALL, symbolic=symbolic), defaultdict(list)
    for name, family in zip(drawn.classes.tolist(), drawn.families.tolist(), strict=True):
        found[drawn.names[name]].append(drawn.family_names[family].removeprefix("Artist"))
    assert set(drawn.contexts) == {"Actions"}
    return {name: "".join(families) for name, families in found.items()}, drawn.counts


def test_a_link_and_equal_pixels_are_no_classes_of_their_own(tmp_path: Path) -> None:
    for i, folder in enumerate(artists(tmp_path, 3)):
        picture(i).save(folder / "edit-cut.png")
        (folder / "gtk-cut.png").symlink_to("edit-cut.png")
        picture(i).save(folder / "cut.png")  # a copy, not a link
        picture(10 + i).save(folder / "paste.png")
    found, counts = pictures_of(tmp_path)
    assert found == {"cut": "012", "paste": "012"}
    assert counts["aliases"] == 2


def test_broken_empty_and_one_coloured_pictures_are_counted_and_left_out(tmp_path: Path) -> None:
    folders = artists(tmp_path, 5)
    for i, folder in enumerate(folders):
        picture(i).save(folder / "cut.png")
    picture(0).save(folders[0] / "rare.png")
    (folders[0] / "cut.png").write_bytes(b"broken")
    Image.new("RGBA", (8, 8)).save(folders[1] / "cut.png")
    Image.new("RGBA", (8, 8), (9, 9, 9, 255)).save(folders[2] / "cut.png")
    found, counts = pictures_of(tmp_path)
    assert found == {"cut": "34"}
    expected = {"names": 2, "rare": 1, "candidates": 5, "broken": 1, "empty": 1, "one_colour": 1}
    assert {rule: counts[rule] for rule in expected} == expected
    assert pictures_of(tmp_path, symbolic=True)[0] == {"cut": "234"}


def test_near_copies_are_the_close_ones_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 4, 8, 8), generator=generator).byte()
    for i in range(10):
        images[30 + i] = images[i]
        images[30 + i, :, : i // 2, 0] ^= 63
    images[5] = 0
    images[20] = torch.tensor([200, 100, 50, 255])[:, None, None]  # pooled, these two are as far apart as they are
    images[21] = torch.tensor([215, 115, 65, 255])[:, None, None]
    colours, alpha = images[:, :3].double(), images[:, 3:].double()
    flat = torch.cat([(colours * alpha / 255).round(), alpha], dim=1).flatten(1)
    apart, energy = (flat[:, None] - flat).square().sum(2), flat.square().sum(1)
    expected = (apart <= NEAR_COPY * torch.maximum(energy[:, None], energy)).triu(1).nonzero().tolist()
    assert [[0, 30] in expected, [20, 21] in expected, 3 < len(expected) < 12] == [True] * 3
    assert near_copies(images).tolist() == expected
    assert near_copies(images[:0]).shape == (0, 2)


@pytest.mark.parametrize(("by", "families"), [("classes", [8, 8, 8]), ("themes", [4, 2, 2]), ("both", [4, 2, 2])])
def test_splits_share_no_name_or_no_artist_or_neither(tree: Path, by: str, families: list[int]) -> None:
    splits = load_splits(roots=[tree], by=by, min_images=2)
    names, artists = (
        [set(of.class_names) for of in splits.values()],
        [set(of.families.tolist()) for of in splits.values()],
    )
    assert [len(of) for of in artists] == families
    assert len(set.union(*artists)) == 8
    assert len(set.union(*names)) == 40
    for split, of in splits.items():
        counts = of.labels.bincount()
        assert torch.equal(of.labels, torch.arange(len(counts)).repeat_interleave(counts))
        assert len(counts) == len(of.class_names)
        assert counts.min() >= (8 if by == "classes" else 2)
        assert by == "themes" or all(split_of(name, 0, 0.2, 0.25) == split for name in of.class_names)


def test_artists_who_drew_on_each_other_stay_in_one_split(tmp_path: Path) -> None:
    root = many(tmp_path / "t", names=30, families=8)
    for name in range(10):  # Artist7 copies a third of Artist0's, but for one pixel of 64
        image = picture(name)
        image.putpixel((0, 0), (255, 0, 10, 255))
        image.save(root / "Artist7" / "icons" / f"name-{name}.png")
    drawn = load_drawing(**SMALL, roots=[root])
    assert drawn.counts["copies"] == 20
    assert drawn.circles == (0, 1, 2, 3, 4, 5, 6, 0)
    for seed in range(8):
        splits = load_splits(roots=[root], by="themes", min_images=2, split_seed=seed)
        assert [{0, 7} <= set(of.families.tolist()) for of in splits.values()].count(True) == 1


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"size": 6}, (6, "even", "size >= 8")),
        ({"size": 9}, (9, "even", "size >= 8")),
        ({"min_families": 1}, (1, "min_families >= 2")),
        ({"min_images": 1}, (1, "min_images >= 2")),
        ({"by": "artist"}, ("'artist'", "'classes'", "'themes'", "'both'")),
        ({"val_share": 0.5, "test_share": 0.5}, ("val_share", "test_share", 0.5, "positive", "sum", 1)),
    ],
)
def test_wrong_settings_are_refused(options: dict, facts: tuple) -> None:
    with refused(ValueError, *facts):
        IconThemes(**options)


def test_icons_are_kept_until_a_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = many(tmp_path / "t", names=3, families=2), tmp_path / "cache"
    monkeypatch.setenv("FEWSHOT_CALLBACKS_CACHE", str(cache))
    first, again = (load_drawing(**SMALL, roots=[root]) for _ in range(2))
    assert list(cache.iterdir()) == [cache_file(installed_themes([root]), 8, 2)]
    assert first.hash == again.hash
    picture(77).save(tmp_path / "new.png")
    (tmp_path / "new.png").replace(root / "Artist0" / "icons" / "name-1.png")
    assert load_drawing(**SMALL, roots=[root]).hash != first.hash
    assert len(list(cache.iterdir())) == 2


def test_too_few_themes_are_told_with_the_lines_to_install_them(tmp_path: Path, installed: Path) -> None:
    many(installed, names=3, families=5)
    with refused(ValueError, "5 families", 6, "apt-get install -y", "dnf install"):
        IconThemes("train")
    (many(tmp_path / "more", names=1, families=1) / "Artist0").rename(installed / "Sixth")
    with refused(ValueError, "3 names", "2 families", "min_families", 100, "apt-get install -y"):
        IconThemes("train", min_families=2)
    with refused(FileNotFoundError, tmp_path / "nowhere", "/usr/share/icons"):
        IconThemes("train", roots=[tmp_path / "nowhere"])
    with refused(ValueError, "0 families", "apt-get install -y"):
        IconThemes("train", roots=[tmp_path])


def test_the_command_prints_tables_and_writes_a_sheet(tree: Path, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--size", "8", "--min-families", "2", "--sheet", str(tmp_path / "sheet.png"), "--roots"]
    assert command_line.main([*words, str(tree)]) == 0
    printed = capsys.readouterr().out
    expected = ("Artist0", "320 images of 40 classes", load_drawing(**SMALL, roots=[tree]).hash, "one colour", "both")
    assert [word for word in expected if word not in printed] == []
    with Image.open(tmp_path / "sheet.png") as page:
        assert page.size[0] > 300
    assert command_line.main([*words, str(tmp_path / "nowhere")]) == 1
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_items_lie_on_white_and_batches_are_items_stacked(tree: Path) -> None:
    test, chosen = load_splits(roots=[tree])["test"], [5, 0, 11]
    images, labels = test.batch(chosen)
    assert torch.equal(labels, test.labels[chosen])
    for position, index in enumerate(chosen):
        assert torch.equal(test[index][0], images[position])
        icon = Image.fromarray(np.ascontiguousarray(test.images[index].permute(1, 2, 0).numpy()), "RGBA")
        expected = np.asarray(Image.alpha_composite(Image.new("RGBA", (8, 8), "white"), icon))[..., :3] / 255
        assert np.abs(images[position].permute(1, 2, 0).numpy() - expected).max() < 1.5 / 255
    assert test.batch([])[0].shape == (0, 3, 8, 8)


def test_an_augmentation_moves_by_seed_and_position_and_lays_the_icon_on_its_paper() -> None:
    images = torch.rand(5, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)
    still = {"degrees": 0.0, "shear": 0.0, "scale": 0.0, "shift": 0.0}
    assert torch.allclose(IconAugmentation(**still)(images, positions), on_white(images), atol=1e-5)
    coloured = IconAugmentation(background="random", **still)(images, positions)
    paper = (coloured - images[:, :3] * images[:, 3:]) / (1 - images[:, 3:])
    assert paper.flatten(2).std(2).max() < 1e-2  # one colour for each image
    assert paper.mean((2, 3)).std() > 0.1
    given = ((1, positions), (1, positions), (2, positions), (1, positions.flip(0)))
    first, *others = (IconAugmentation(seed=seed)(images, order) for seed, order in given)
    assert [torch.equal(first, other) for other in others] == [True, False, False]


def test_the_configuration_of_the_icons_trains(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(installed, names=100, families=6, side=16)
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", str(Path(icons.__file__).with_name("protonet_dr.yaml")), *TINY_RUN, *QUIET]) == 0
    assert len(list(tmp_path.glob("runs/**/best.ckpt"))) == 1
