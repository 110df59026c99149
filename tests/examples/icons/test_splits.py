"""Icons: which pictures count, splits by name and by artist, a cache that heals, what is said where themes are missing."""

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
from icons.drawing import DrawnIcons, draw_file, draw_icons
from icons.files import find_themes
from PIL import Image

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.data.dataset import split_of
from tests.cli.words import QUIET
from tests.cli.words import TINY as TINY_RUN
from tests.examples.icon_trees import SVG, draw, many, picture, theme

SMALL = {"size": 8, "min_families": 2}


def load_splits(**settings: object) -> dict[str, IconThemes]:
    icons = IconThemes(**settings)
    return {split: icons.with_split(split) for split in icons.splits}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight artists who each draw forty names."""
    return many(tmp_path_factory.mktemp("themes"), names=40, families=8, side=8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEWSHOT_CALLBACKS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    assert drawn is not None
    assert drawn.shape == (4, 8, 8)
    assert (drawn[3] > 0).any(1).nonzero()[0].tolist() == [2, 3, 4, 5]
    assert drawn[:3, 3, 3].tolist() == [10, 200, 30]
    assert not drawn[:, 0].any()
    draw(tmp_path / "same.png", 5, side=8)
    exact = draw_file(tmp_path / "same.png", 8)
    visible = np.asarray(picture(5, 8)).transpose(2, 0, 1) * (np.asarray(picture(5, 8))[..., 3] > 0)
    assert exact is not None
    assert np.array_equal(exact, visible)


def test_a_vector_is_drawn_at_any_size(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    half = '<rect width="4" height="8" fill="#ff0000"/>'
    (tmp_path / "a.svg").write_text(SVG.format(side=8, content=half))
    for size in (8, 10, 32):
        drawn = draw_file(tmp_path / "a.svg", size)
        assert drawn is not None
        assert drawn[:, 1, 1].tolist() == pytest.approx([255, 0, 0, 255], abs=1)
        assert drawn[3, 1, size - 2] <= 1  # the resampling may leave a trace
    (tmp_path / "wide.svg").write_text(SVG.format(side=8, content=half).replace('0 0 8 8"', '0 0 8 4"'))
    wide = draw_file(tmp_path / "wide.svg", 16)
    assert wide is not None
    assert (wide[3] > 128).any(1).nonzero()[0].tolist() == list(range(4, 12))


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
@pytest.mark.parametrize("content", [b"no image", None])
def test_a_broken_file_is_no_picture(tmp_path: Path, name: str, content: bytes | None) -> None:
    if name.endswith("svg"):
        pytest.importorskip("resvg_py")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert draw_file(tmp_path / name, 8) is None


def of_rules(root: Path, min_families: int = 2) -> DrawnIcons:
    return draw_icons(find_themes([root]), 8, min_families, symbolic=False)


def pictures_of(drawn: DrawnIcons) -> dict[str, list[str]]:
    found = defaultdict(list)
    for name, family in zip(drawn.classes.tolist(), drawn.families.tolist(), strict=True):
        found[drawn.names[name]].append(drawn.family_names[family])
    return dict(found)


def artists(root: Path, number: int) -> list[Path]:
    return [theme(root, f"A{i}", {"icons": {"Size": 8, "Context": "Actions"}}) / "icons" for i in range(number)]


def test_a_link_and_equal_pixels_are_no_classes_of_their_own(tmp_path: Path) -> None:
    for i, folder in enumerate(artists(tmp_path, 3)):
        draw(folder / "edit-cut.png", i, 8)
        (folder / "gtk-cut.png").symlink_to("edit-cut.png")
        draw(folder / "cut.png", i, 8)  # a copy, not a link
        draw(folder / "paste.png", 10 + i, 8)
    drawn = of_rules(tmp_path)
    assert pictures_of(drawn) == {"cut": ["A0", "A1", "A2"], "paste": ["A0", "A1", "A2"]}
    assert drawn.counts["aliases"] == 2
    assert drawn.contexts == ("Actions", "Actions")


def test_broken_empty_and_one_coloured_pictures_are_counted_and_left_out(tmp_path: Path) -> None:
    folders = artists(tmp_path, 5)
    for i, folder in enumerate(folders):
        draw(folder / "cut.png", i, 8)
        draw(folder / "rare.png", i, 8) if i == 0 else None
    (folders[0] / "cut.png").write_bytes(b"broken")
    Image.new("RGBA", (8, 8)).save(folders[1] / "cut.png")
    Image.new("RGBA", (8, 8), (9, 9, 9, 255)).save(folders[2] / "cut.png")
    drawn = of_rules(tmp_path)
    assert pictures_of(drawn) == {"cut": ["A3", "A4"]}
    counted = {rule: drawn.counts[rule] for rule in ("names", "rare", "candidates", "broken", "empty", "one_colour")}
    assert counted == {"names": 2, "rare": 1, "candidates": 5, "broken": 1, "empty": 1, "one_colour": 1}
    assert pictures_of(draw_icons(find_themes([tmp_path]), 8, 2, symbolic=True)) == {"cut": ["A2", "A3", "A4"]}


def test_near_copies_are_those_that_a_double_loop_finds() -> None:
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
    expected = [
        [i, j]
        for i in range(40)
        for j in range(i + 1, 40)
        if (flat[i] - flat[j]).square().sum() <= NEAR_COPY * max(flat[i].square().sum(), flat[j].square().sum())
    ]
    assert [0, 30] in expected
    assert [20, 21] in expected
    assert 3 < len(expected) < 12
    assert near_copies(images).tolist() == expected
    assert near_copies(images[:0]).shape == (0, 2)


def test_splits_by_class_share_no_name_and_hold_all_pictures(tree: Path, cache: Path) -> None:
    splits = load_splits(**SMALL, roots=[tree])
    names = [set(of.class_names) for of in splits.values()]
    assert sum(map(len, names)) == len(set.union(*names)) == 40
    assert sum(map(len, splits.values())) == 40 * 8
    for split, of in splits.items():
        assert all(split_of(name, 0, 0.2, 0.25) == split for name in of.class_names)
        assert of.labels.bincount().tolist() == [8] * len(of.class_names)
        assert torch.equal(of.labels, of.labels.sort().values)


@pytest.mark.parametrize("by", ["themes", "both"])
def test_splits_by_themes_share_no_artist(tree: Path, cache: Path, by: str) -> None:
    splits = load_splits(**SMALL, roots=[tree], by=by, min_images=2)
    families_of = [set(of.families.tolist()) for of in splits.values()]
    assert sum(map(len, families_of)) == len(set.union(*families_of)) == 8
    assert [len(of) for of in families_of] == [4, 2, 2]
    names = [set(of.class_names) for of in splits.values()]
    assert names[0] == names[1] == names[2] if by == "themes" else not names[0] & names[1] | names[1] & names[2]
    for of in splits.values():
        assert of.labels.bincount().min() >= 2


def test_artists_who_drew_on_each_other_stay_in_one_split(tmp_path: Path, cache: Path) -> None:
    many(tmp_path / "t", names=30, families=8)
    for name in range(10):  # Artist7 copies a third of Artist0's, but for one corner
        image = picture(name).copy()
        image.putpixel((0, 0), (255, 0, 10, 255))
        image.save(tmp_path / "t" / "Artist7" / "icons" / f"name-{name}.png")
    drawn = load_drawing(size=16, min_families=2, roots=[tmp_path / "t"])
    assert drawn.counts["copies"] == 20
    assert drawn.circles == (0, 1, 2, 3, 4, 5, 6, 0)
    for seed in range(12):
        splits = load_splits(
            size=16, min_families=2, roots=[tmp_path / "t"], by="themes", min_images=2, split_seed=seed
        )
        assert [{0, 7} <= set(of.families.tolist()) for of in splits.values()].count(True) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 6}, "size is 6; .* Use an even size >= 8"),
        ({"size": 9}, "size is 9"),
        ({"min_families": 1}, "min_families is 1; .* Use min_families >= 2"),
        ({"min_images": 1}, "min_images is 1"),
        ({"by": "artist"}, "cannot be split by 'artist'. Use 'classes', 'themes' or 'both'"),
        ({"val_share": 0.5, "test_share": 0.5}, "Use positive shares whose sum is below 1"),
        ({"val_share": 0}, "val_share is 0"),
    ],
)
def test_wrong_settings_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        IconThemes(**options)


def test_icons_are_kept_until_a_file_is_replaced(tmp_path: Path, cache: Path) -> None:
    root = many(tmp_path / "t", names=3, families=2)
    first, again = (load_drawing(**SMALL, roots=[root]) for _ in range(2))
    (file,) = cache.iterdir()
    assert file == cache_file(installed_themes([root]), 8, 2)
    assert first.hash == again.hash
    draw(tmp_path / "new.png", 77)
    (tmp_path / "new.png").replace(root / "Artist0" / "icons" / "name-1.png")
    assert load_drawing(**SMALL, roots=[root]).hash != first.hash
    assert len(list(cache.iterdir())) == 2


def test_too_few_themes_are_told_with_the_lines_to_install_them(tmp_path: Path, cache: Path, installed: Path) -> None:
    many(installed, names=3, families=5)
    with pytest.raises(ValueError, match=r"5 families .* 6 or more[\s\S]*apt-get install -y[\s\S]*dnf install"):
        IconThemes("train")
    many(tmp_path / "more", names=1, families=1)
    (tmp_path / "more" / "Artist0").rename(installed / "Sixth")
    with pytest.raises(ValueError, match=r"3 names .* \(min_families\); .* 100 or more[\s\S]*apt-get install -y"):
        IconThemes("train", min_families=2)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        IconThemes("train", roots=[tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="0 families"):
        IconThemes("train", roots=[tmp_path / "more"])


def test_the_command_prints_tables_and_writes_a_sheet(
    tree: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sheet = tmp_path / "sheet.png"
    words = ["--size", "8", "--min-families", "2", "--roots", str(tree), "--sheet", str(sheet)]
    assert command_line.main(words) == 0
    printed = capsys.readouterr().out
    drawn = load_drawing(**SMALL, roots=[tree])
    for expected in ("Artist0", "320 images of 40 classes", drawn.hash, "one colour", "both"):
        assert expected in printed
    with Image.open(sheet) as page:
        assert page.size[0] > 300
    assert command_line.main([*words[:-3], str(tmp_path / "nowhere")]) == 1
    assert "There is no folder" in capsys.readouterr().err


def test_items_lie_on_white_and_batches_are_items_stacked(tree: Path, cache: Path) -> None:
    test = load_splits(**SMALL, roots=[tree])["test"]
    images, labels = test.batch([5, 0, 11])
    assert images.dtype == torch.float32
    for position, index in enumerate((5, 0, 11)):
        image, label = test[index]
        assert torch.equal(image, images[position])
        assert label == labels[position] == test.labels[index]
        paper = Image.new("RGBA", (8, 8), (255, 255, 255, 255))
        icon = Image.fromarray(np.ascontiguousarray(test.images[index].permute(1, 2, 0).numpy()), "RGBA")
        expected = np.asarray(Image.alpha_composite(paper, icon))[..., :3].transpose(2, 0, 1) / 255
        assert np.abs(image.numpy() - expected).max() < 1.5 / 255
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
    first = IconAugmentation(seed=1)(images, positions)
    torch.manual_seed(5)
    assert torch.equal(first, IconAugmentation(seed=1)(images, positions))
    assert not torch.equal(first, IconAugmentation(seed=2)(images, positions))
    assert not torch.equal(first, IconAugmentation(seed=1)(images, positions.flip(0)))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning: of the checkpoint that is tested
def test_a_configuration_trains_and_is_tested(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(installed, names=120, families=6, side=16)
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(Path(icons.__file__).with_name("protonet_dr.yaml")), *TINY_RUN, *QUIET]
    assert main(["fit", *words]) == 0
    (best,) = tmp_path.glob("runs/**/best.ckpt")
    assert main(["test", *words, "--ckpt_path", str(best)]) == 0
