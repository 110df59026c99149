"""What pages show below their code is what the code prints."""

import contextlib
import io
import re
import shlex
from itertools import zip_longest

import pytest

from fewshot_callbacks.cli.main import main
from tests.docs.pages import ROOT

NUMBER = re.compile(r"[+-]?\d+\.\d+")
# Digits that rounding may change.
ROUNDING = 2e-4
# A training is not the same on every machine: what the values of its validations may differ by.
TRAINING = 0.03


def blocks(page, language):
    """The blocks of a language in a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def printed_by(code):
    """What a block of Python prints."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        exec(compile(code, "block", "exec"), {"__name__": "block"})
    return screen.getvalue()


def numbers_in(text):
    return [float(number) for number in NUMBER.findall(text)]


def form_of(line):
    """A line without its numbers, and with single spaces."""
    return " ".join(NUMBER.sub("#", line).split())


def differences(printed, shown):
    """The pairs of lines that differ in more than rounding."""
    pairs = zip_longest(printed.splitlines(), shown.splitlines(), fillvalue="")
    return [
        (line, other)
        for line, other in pairs
        if form_of(line) != form_of(other) or numbers_in(line) != pytest.approx(numbers_in(other), abs=ROUNDING)
    ]


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


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("page", "block", "output"),
    [
        ("better.md", 1, 1),
        ("embedding_health.md", 1, 0),
        ("large_sets.md", 0, 0),
        ("recipes/compare_models.md", 0, 0),
        ("recipes/compare_models.md", 1, 1),
    ],
)
def test_tables_are_those_that_the_code_prints(page, block, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert differences(printed_by(blocks(page, "python")[block]), blocks(page, "text")[output]) == []


@pytest.mark.usefixtures("as_users_run_it")
def test_the_classes_that_are_needed_are_those_that_the_code_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, slices, needed = blocks("better.md", "python")
    shown = blocks("better.md", "text")[3]
    printed = printed_by(slices + needed).splitlines()[-len(shown.splitlines()) :]
    assert differences("\n".join(printed), shown) == []


@pytest.mark.usefixtures("as_users_run_it")
def test_the_lines_of_the_gate_are_those_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed_by(blocks("better.md", "python")[1])  # writes the files
    command, dots, *shown = blocks("better.md", "text")[2].splitlines()
    assert dots == "..."
    assert main(shlex.split(command.removeprefix("$ fewshot "))) == 3
    printed = capsys.readouterr().err.splitlines()
    assert differences("\n".join(printed), "\n".join(shown)) == []
