"""The printed table and the JSON of a benchmark are equal and include the machine, so that a page can be made from files."""

import json
import sys

import pytest
import torch

from tests.integration_packages import integration
from tests.messages import missing_facts
from tests.scripts import imported_script

COMMANDS = {
    "health": "--items 600 --dim 8 --turns 1",
    "knn": "--gallery 200 100 --queries 20 --dim 8 --classes 5 --equal 60 --k 3",
    "near_duplicates": "--items 200 300 --dim 8 --rounds 2 --near-collapsed 40 --threads 1",
    "repeated": "--items 200 --dim 8 --per-class 10",
    "search_quality": "--items 2000 --queries 100 --classes 60 --k 5 --lists 2",
    "trials": "--trials 2000 --identities 50",
}
"""benchmark -> options with which it takes a second"""
NEEDS = {"search_quality": "faiss"}
"""benchmark -> the library that it needs"""


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_file_holds_what_is_printed(name, monkeypatch, capsys, tmp_path):
    if name in NEEDS:
        integration(NEEDS[name])
    file = tmp_path / "table.json"
    with imported_script(f"benchmarks/{name}.py") as benchmark:
        from _results import Column, describe, markdown

        monkeypatch.setattr(sys, "argv", [f"{name}.py", *COMMANDS[name].split(), "--json", str(file)])
        benchmark.main()
        kept = json.loads(file.read_text(encoding="utf-8"))
        table = markdown([Column(*column) for column in kept["columns"]], kept["rows"])
        assert capsys.readouterr().out.endswith(f"{describe(kept['machine'])}\n\n{table}\n")
    titles = [title for title, _ in kept["columns"]]
    assert len(set(titles)) == len(titles)
    assert len(kept["rows"]) > 1


@pytest.mark.parametrize(("name", "cure"), [("trials", "--coverage"), ("variance_ratio", "--cost")])
def test_a_table_that_is_no_cost_has_no_file(name, cure, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--coverage", "--json", "table.json"])
    with imported_script(f"benchmarks/{name}.py") as benchmark, pytest.raises(SystemExit):
        benchmark.main()
    assert missing_facts(capsys.readouterr().err.partition("error: ")[2], ("--json", cure)) == []
