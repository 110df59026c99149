"""Sentences printed during training differ between machines; they have the form that their page shows."""

import contextlib
import io
import re

import pytest

from tests.docs.pages import ROOT
from tests.docs.printed import form_of, numbers_in

# A training is not the same on every machine: what the values of its validations may differ by.
TRAINING = 0.03


def blocks(page, language):
    """The blocks of a language in a page."""
    text = (ROOT / "docs" / "evaluate" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def printed_by(code):
    """What a block of Python prints."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        exec(compile(code, "block", "exec"), {"__name__": "block"})
    return screen.getvalue()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_users_run_it")
def test_a_training_prints_sentences_and_values_like_those_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = blocks("better.md", "text")[0].splitlines()
    printed = [line.strip() for line in printed_by(blocks("better.md", "python")[0]).splitlines() if "val: " in line]
    assert len(printed) == len(shown)
    forms = {re.sub(r"at [\d.]+%", "at #%", form_of(line)) for line in shown}
    for line, other in zip(printed, shown, strict=True):
        # Near the border of chance, another machine may come to the other verdict.
        assert re.sub(r"at [\d.]+%", "at #%", form_of(line)) in forms
        of_line, of_other = (numbers_in(sentence.partition(" at ")[0]) for sentence in (line, other))
        assert of_line == pytest.approx(of_other, abs=TRAINING), (line, other)
    assert form_of(printed[0]) == form_of(shown[0])
