"""Glyphs: distinct classes, unseen scripts, a cache that heals, an augmentation that repeats."""

import itertools
import unicodedata
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import pytest
import torch

from fewshot_callbacks.data import Glyphs, augment_glyphs, glyphs
from fewshot_callbacks.data.glyphs import SCRIPTS_OF, DrawnGlyphs, _look_alikes, cache_file, load_drawing
from tests.messages import warned


@pytest.fixture(scope="module")
def splits() -> dict[str, Glyphs]:
    return {split: Glyphs(split) for split in SCRIPTS_OF}


def test_splits_are_disjoint_in_characters_scripts_and_images(splits: dict[str, Glyphs]) -> None:
    owners = defaultdict(set)
    for name, glyph_set in splits.items():
        for image, label in zip(glyph_set.images.numpy(), glyph_set.labels.tolist(), strict=True):
            owners[image.tobytes()].add(glyph_set.class_names[label])
        assert set(glyph_set.scripts) == set(SCRIPTS_OF[name])
        assert [glyphs.script_of(c) for c in glyph_set.class_names] == list(glyph_set.scripts)
    assert max(map(len, owners.values())) == 1
    characters = [set(glyph_set.class_names) for glyph_set in splits.values()]
    assert sum(map(len, characters)) == len(set.union(*characters))
    for word in ("GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN"):
        assert not any(word in unicodedata.name(c) for c in splits["train"].class_names)
    # look-alikes are settled for the first script: Greek Alpha and Omicron, Cyrillic A, O, es and ie, ef of Phi
    assert [{"A", "O", "c", "e"} <= characters[0], "Φ" in characters[1]] == [True, True]
    assert not set("\u0391\u039f\u0410\u041e\u0441\u0435") & set.union(*characters)


def test_images_have_ink_in_the_middle_and_paper_around_it(splits: dict[str, Glyphs]) -> None:
    images = torch.cat([glyph_set.images for glyph_set in splits.values()])[:, 0]
    assert images.flatten(1).amax(1).min() > 40  # no image is empty
    assert images[:, 0].max() == images[:, -1].max() == images[:, :, 0].max() == images[:, :, -1].max() == 0
    for ink in (images.amax(1), images.amax(2)):  # from the first to the last column (row) with ink
        first, last = (ink > 0).int().argmax(1), 31 - (ink > 0).flip(1).int().argmax(1)
        assert ((first + last) - 31).abs().max() <= 2


def test_look_alikes_are_all_pairs_whose_difference_is_small() -> None:
    glyph_set = Glyphs("val")
    of_face = glyph_set.images[glyph_set.faces == 0, 0].numpy()[:60]
    drawings = {chr(number): image for number, image in enumerate(of_face)}
    drawings["x"], drawings["y"] = of_face[5].copy(), of_face[9].copy()
    drawings["y"][16, 16] ^= 7  # nearly the same
    drawings["z"] = (of_face[5] * 0.91).astype(of_face.dtype)  # 0.8 % of the squared ink away
    pixels = {name: image.astype(float) for name, image in drawings.items()}
    expected = [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(pixels.items(), 2)
        if ((a - b) ** 2).sum() <= 0.01 * max((a**2).sum(), (b**2).sum())
    ]
    assert {(chr(5), "x"), (chr(9), "y"), (chr(5), "z")} <= set(expected)
    assert _look_alikes(drawings) == expected
    assert _look_alikes({}) == []


def test_items_are_floats_and_batches_are_items_stacked(splits: dict[str, Glyphs]) -> None:
    glyph_set, chosen = splits["test"], [5, 0, 700]
    images, labels = glyph_set.batch(chosen)
    torch.testing.assert_close(images, glyph_set.images[chosen] / 255, rtol=0, atol=0)
    assert torch.equal(labels, glyph_set.labels[chosen])
    torch.testing.assert_close(glyph_set[700], (images[2], int(labels[2])), rtol=0, atol=0)
    assert glyph_set.batch([])[0].shape == (0, 1, 32, 32)


class Pen:
    """Stands for `draw_glyphs`: a tiny drawing, and how often it was made."""

    drawn = 0

    def __call__(self, size: int, min_faces: int) -> DrawnGlyphs:
        self.drawn += 1
        images = torch.arange(3 * size * size, dtype=torch.uint8).reshape(3, 1, size, size)
        classes, faces = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
        return DrawnGlyphs(images, classes, faces, ("a", "ж"), ("Latin", "Cyrillic"), (0, 1, 2, 3, 4, 5))


@pytest.fixture
def pen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pen:
    monkeypatch.setenv("FEWSHOT_CALLBACKS_CACHE", str(tmp_path / "deep" / "cache"))
    pen = Pen()
    monkeypatch.setattr(glyphs, "draw_glyphs", pen)
    return pen


def test_glyphs_are_drawn_once_and_then_read_from_the_cache(pen: Pen, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = load_drawing(), load_drawing()
    assert pen.drawn == 1
    assert torch.equal(first.images, second.images)
    assert first.characters == second.characters
    assert list(cache_file().parent.iterdir()) == [cache_file()]  # no temporary file is left
    load_drawing(size=16)
    load_drawing(min_faces=12)
    monkeypatch.setattr(glyphs, "VERSION", 99)
    load_drawing()
    monkeypatch.setattr(mpl, "__version__", "0.0")
    load_drawing()
    assert pen.drawn == 5  # the cache depends on all of these


@pytest.mark.parametrize("damage", ["half", "other content"])
def test_a_damaged_cache_is_drawn_again(pen: Pen, damage: str) -> None:
    first, file = load_drawing(), cache_file()
    if damage == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        torch.save({"images": torch.zeros(3)}, file)
    with warned(UserWarning, "glyph cache", file):
        assert torch.equal(load_drawing().images, first.images)
    assert torch.equal(load_drawing().images, first.images)  # healed: no warning any more
    assert pen.drawn == 2


def test_a_folder_that_cannot_be_written_is_only_a_warning(pen: Pen, monkeypatch) -> None:
    def full(content: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with warned(UserWarning, cache_file().parent, "No space left", "FEWSHOT_CALLBACKS_CACHE"):
        assert len(load_drawing().images) == 3
    assert list(cache_file().parent.iterdir()) == []


def test_augmentation_repeats_with_its_generator_and_leaves_the_global_state_alone() -> None:
    images = Glyphs("val").batch(range(40))[0]
    state = torch.get_rng_state()
    one, two, other = (augment_glyphs(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert (one.shape, one.min() >= 0, one.max() <= 1) == (images.shape, True, True)
    assert not torch.equal(augment_glyphs(images), augment_glyphs(images))  # of the global state
    assert augment_glyphs(images[:0]).shape == (0, 1, 32, 32)


def test_augmentation_moves_by_no_more_than_it_says() -> None:
    images = torch.zeros(200, 1, 33, 33)
    images[:, :, 16, 16] = 1
    still = {"degrees": 0.0, "shear": 0.0, "scale": 0.0, "shift": 0.0, "noise": 0.0}
    moved = augment_glyphs(images, **{**still, "shift": 3 / 33})
    centre = (moved[:, 0] * torch.arange(33.0)).sum((1, 2)) / moved.sum((1, 2, 3)) - 16  # in pixels, across
    assert centre.abs().max() <= 3.01
    assert centre.max() > 2
    assert centre.min() < -2
    noisy = augment_glyphs(torch.full((4, 1, 64, 64), 0.5), **{**still, "noise": 0.1})
    assert (noisy - 0.5).std() == pytest.approx(0.1, rel=0.1)
    bar = torch.zeros(100, 1, 33, 33)
    bar[:, :, 4:29, 16] = 1
    turned = augment_glyphs(bar, **{**still, "degrees": 90.0})
    assert turned.sum((1, 2, 3)).std() < 3  # the ink stays, the direction does not
    assert turned[:, 0, 16, 4].max() > 0.2


def test_the_numbers_in_the_documentation_are_those_of_the_data(splits: dict[str, Glyphs]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "research" / "glyphs.md").read_text()
    for name, glyph_set in splits.items():
        assert f"| **{name}** | | **{len(glyph_set.class_names):,}** | **{len(glyph_set):,}** |" in page
