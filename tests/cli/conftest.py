"""The commands train on a part of the glyphs here, so that each of them takes seconds."""

import pytest
import torch

from fewshot_callbacks.data.glyphs import SCRIPTS_OF, DrawnGlyphs, load_drawing


def first_classes(drawn: DrawnGlyphs, number: int) -> DrawnGlyphs:
    """The first classes of each split."""
    kept: list[int] = []
    for scripts in SCRIPTS_OF.values():
        kept += [c for c, script in enumerate(drawn.scripts) if script in scripts][:number]
    kept.sort()
    items = torch.isin(drawn.classes, torch.tensor(kept))
    return DrawnGlyphs(
        drawn.images[items],
        torch.searchsorted(torch.tensor(kept), drawn.classes[items]),
        drawn.faces[items],
        tuple(drawn.characters[c] for c in kept),
        tuple(drawn.scripts[c] for c in kept),
        drawn.look_alikes,
    )


@pytest.fixture(scope="module")
def few_glyphs():
    """The whole demo on the first 30 classes of each split."""
    drawn = first_classes(load_drawing(), 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewshot_callbacks.data.glyphs.load_drawing", lambda *_: drawn)
        yield
