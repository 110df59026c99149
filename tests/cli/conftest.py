"""The commands train on a part of the glyphs here, so that each of them takes seconds."""

import pytest

from fewshot_callbacks.data.glyphs import GlyphSet, load_splits


def first_classes(glyphs: GlyphSet, classes: int) -> GlyphSet:
    keep = glyphs.labels < classes
    return GlyphSet(
        glyphs.images[keep],
        glyphs.labels[keep],
        glyphs.faces[keep],
        glyphs.characters[:classes],
        glyphs.scripts[:classes],
        glyphs.face_names,
    )


@pytest.fixture(scope="module")
def few_glyphs():
    """The whole demo on the first 30 classes of each split."""
    splits = {name: first_classes(glyphs, 30) for name, glyphs in load_splits().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewshot_callbacks.data.glyphs.load_splits", lambda *_: splits)
        yield
