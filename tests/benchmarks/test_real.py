"""The benchmark runs, and prints which package a set needs."""

import pytest
import torch

from tests.messages import missing_facts
from tests.scripts import imported_script


@pytest.fixture(scope="module")
def real():
    with imported_script("benchmarks/real.py") as module:
        yield module


def test_a_missing_package_is_named_and_the_rest_goes_on(real, monkeypatch, capsys, tmp_path):
    two_classes = real.RealSet(torch.eye(4).repeat(20, 1), torch.arange(80) % 4)
    source = type(real.SOURCES["files"])
    monkeypatch.setitem(real.SOURCES, "absent", source("a file", ("no_such_module",), (), "pip install it", None))
    monkeypatch.setitem(real.SOURCES, "present", source("a vector", (), (), "", lambda items: two_classes))
    words = ["--items", "80", "--rounds", "1", "--threads", "1", "--cache", str(tmp_path)]
    assert real.main(["--sets", "absent", "present", *words]) == 0
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if "absent" in line]
    assert missing_facts(line, ("a file", "no_such_module", "pip install it")) == []
    (row,) = [line for line in printed.splitlines() if "present" in line]
    assert row.split(" | ")[:8] == ["| present", "80", "4", "4", "20", "20", "1.000", "1.000"]


def test_sizes_that_fit_no_set_are_refused(real, capsys):
    with pytest.raises(SystemExit):
        real.main(["--sets", "files", "glyphs", "voices", "--items", "20", "30"])
    assert missing_facts(capsys.readouterr().err.partition("error: ")[2], ("--items", 2, 3)) == []


@pytest.mark.parametrize("name", ["voices", "files", "paragraphs"])
def test_a_set_has_unit_vectors_of_classes_of_two_items_or_more(real, tmp_path, name):
    missing = real.SOURCES[name].missing()
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    made = real.load(name, 200, tmp_path)
    assert len(made.embeddings) == len(made.labels) <= 200
    assert made.labels.unique(return_counts=True)[1].min() >= 2
    torch.testing.assert_close(made.embeddings.norm(dim=1), torch.ones(len(made.labels)))
    again = real.load(name, 200, tmp_path)  # from the cache
    assert torch.equal(made.embeddings, again.embeddings)


def test_copies_are_counted_with_their_originals(real):
    assert real.share_of_copies(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])) == 0.5
