"""What counts as a mistake, and that a sample repeats itself."""

import ast

import pytest

from tests.scripts import ROOT, loaded

pytest.importorskip("cosmic_ray", reason="comes with the extra `mutants`")

SOURCE = '''
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 1 + 2

@_kernel
def half(α: int | None = 4, *, names: list[int] = ()) -> int | None:
    """One 1 + 1."""
    if α == 0:
        raise ValueError(f"{α + 1} of {2}", 3)
    names.clear()
    total = "β" * α
    total += "γ"
    return total
'''


@pytest.fixture(scope="module")
def mutants():
    with loaded("tools/mutants/run.py") as module:
        yield module


def test_annotations_texts_and_decorators_of_numba_are_left_alone(mutants):
    found = [
        mutants.difference(SOURCE, mutants.mutated(SOURCE, operator, occurrence))
        for operator, occurrence, _ in mutants.mutants_of("half.py", SOURCE)
    ]
    assert {after.replace(" ", "") for _, after in found} == {
        "defhalf(α:int|None=5,*,names:list[int]=())->int|None:",
        "defhalf(α:int|None=3,*,names:list[int]=())->int|None:",
        "defhalf(α:int|None=4,/,names:list[int]=())->int|None:",  # not drawn: see `draw`
        *("ifα!=0:", "ifnotα==0:", "ifα==1:", "ifα==-1:"),
        *("pass", 'total="β"/α', 'total-="γ"'),
    }


def test_a_sample_repeats_itself_and_each_mutant_is_python(mutants):
    drawn, totals = mutants.draw(ROOT, 80, 3, ["functional/r"])
    assert drawn == mutants.draw(ROOT, 80, 3, ["functional/r"])[0]
    assert {mutant.path for mutant in drawn} == {path for path in totals if "functional/r" in path}
    larger = mutants.draw(ROOT, 200, 3, ["functional/r"])[0]
    assert set(drawn) < set(larger)
    assert set(drawn) != set(mutants.draw(ROOT, 80, 4, ["functional/r"])[0])
    for mutant in drawn:
        ast.parse(mutants.mutated((ROOT / mutant.path).read_text(), mutant.operator, mutant.occurrence))


def test_every_reason_is_of_a_known_kind(mutants):
    assert {entry["kind"] for entry in mutants.read_reasons()} <= {*mutants.HARMLESS, "gap"}


def test_the_interval_of_a_share(mutants):
    assert mutants.wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-3)


def test_a_file_first_meets_the_tests_of_its_name(mutants):
    for file, own in (
        ("callbacks/retrieval", "callbacks/test_retrieval"),
        ("functional/_reading", "functional/test_reading"),
        ("functional/nothing", "functional/test_"),
    ):
        assert mutants.own_tests(f"fewshot_callbacks/{file}.py") == [*mutants.FOR_ALL, f"tests/{own}"]
