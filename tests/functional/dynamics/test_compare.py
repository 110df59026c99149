"""The comparison of two training dynamics against the definitions of its tests, and its table."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from fewshot_callbacks.functional import DynamicsHistory, StepDynamics, compare_dynamics
from fewshot_callbacks.functional.dynamics import p_value


def history(values: list[tuple[float, float, float, float]], **settings: str) -> DynamicsHistory:
    """Of (alpha, phi, psi_con, psi_div)."""
    return DynamicsHistory(tuple(range(len(values))), tuple(StepDynamics(*row) for row in values), **settings)  # type: ignore[arg-type]


def drawn(steps: int, seed: int, good: float) -> DynamicsHistory:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(steps, 4, generator=generator, dtype=torch.float64)
    return history(
        [(1.0, float(0.5 + r[0] / 2), float(1.1 - 0.2 * good * r[1]), float(0.9 + 0.2 * good * r[2])) for r in rows]
    )


def slow_mann_whitney_exact(a: list[float], b: list[float]) -> float:
    """Two-sided p over all ways to deal the values out."""

    def u(first: tuple[float, ...], second: list[float]) -> float:
        return sum((x > y) + 0.5 * (x == y) for x in first for y in second)

    pooled, n = a + b, len(a)
    middle = n * len(b) / 2
    seen = abs(u(tuple(a), b) - middle)
    deals = list(itertools.combinations(range(len(pooled)), n))
    extreme = 0
    for deal in deals:
        rest = [pooled[i] for i in range(len(pooled)) if i not in deal]
        extreme += abs(u(tuple(pooled[i] for i in deal), rest) - middle) >= seen - 1e-12
    return extreme / len(deals)


def slow_fisher(good: tuple[int, int], bad: tuple[int, int]) -> float:
    """Two-sided: all tables of the same margins that are no more likely than the one seen."""
    n = good[0] + bad[0], good[1] + bad[1]
    total = sum(good)

    def chance(x: int) -> float:
        return math.comb(n[0], x) * math.comb(n[1], total - x) / math.comb(sum(n), total)

    seen = chance(good[0])
    possible = range(max(0, total - n[1]), min(n[0], total) + 1)
    return sum(chance(x) for x in possible if chance(x) <= seen * (1 + 1e-7))


def test_equals_the_definitions_step_by_step() -> None:
    a, b = drawn(5, 1, 0.9), drawn(6, 2, 1.2)
    comparison = compare_dynamics(a, b)
    for name, measure in comparison.measures.items():
        values = [run.values(name).tolist() for run in (a, b)]
        means = tuple(math.prod(v) ** (1 / len(v)) for v in values)
        assert measure.geometric_means == pytest.approx(means)
        assert measure.mann_whitney_p == pytest.approx(slow_mann_whitney_exact(*values), rel=1e-6)
        assert measure.steps == (5, 6)
        if name == "norm_ratio":
            assert measure.good_shares is None
            assert measure.fisher_p is None
            continue
        good = tuple(sum(x > 1 if name == "div_alpha" else x < 1 for x in v) for v in values)
        bad = (5 - good[0], 6 - good[1])
        assert measure.good_shares == pytest.approx((good[0] / 5, good[1] / 6))
        assert measure.fisher_p == pytest.approx(slow_fisher(good, bad))  # type: ignore[arg-type]


def test_steps_without_a_value_are_left_out_and_counted() -> None:
    a = history([(1.0, math.nan, 0.9, 1.1), (1.0, 0.5, 0.9, 1.1), (-1.0, 0.7, 0.9, 1.1)])
    comparison = compare_dynamics(a, drawn(3, 0, 1.0))
    assert comparison.measures["norm_ratio"].steps == (2, 3)
    assert comparison.measures["con_alpha"].steps == (2, 3)
    assert comparison.measures["con_div"].steps == (3, 3)


def test_a_run_without_any_value_has_nan_and_null() -> None:
    comparison = compare_dynamics(history([(1.0, math.nan, 0.9, 1.1)]), drawn(3, 0, 1.0))
    assert math.isnan(comparison.measures["norm_ratio"].mann_whitney_p)
    stored = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert stored["measures"]["norm_ratio"]["mann_whitney_p"] is None
    assert stored["measures"]["con_div"]["steps"] == [1, 3]


def test_files_are_read(tmp_path: Path) -> None:
    drawn(9, 3, 1.0).save(tmp_path / "a.json")
    drawn(9, 4, 1.0).save(tmp_path / "b.json")
    expected = compare_dynamics(drawn(9, 3, 1.0), drawn(9, 4, 1.0), names=("one", "two"))
    assert compare_dynamics(tmp_path / "a.json", str(tmp_path / "b.json"), names=("one", "two")) == expected


def test_the_printed_table_has_the_columns_of_the_paper() -> None:
    text = str(compare_dynamics(drawn(300, 1, 0.8), drawn(300, 2, 1.4), names=("softmax", "DR")))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = " ".join(lines[:3]).split()
    assert " ".join(words) == ("softmax DR Mann- Fisher's mean good mean good Whitney p exact p")
    rows = {line.split()[0]: line for line in lines if ("." in line and "-" in line) or "norm" in line}
    assert list(rows)[:4] == ["norm", "con-alpha", "div-alpha", "con-div"]
    assert "<1e-" in rows["div-alpha"]
    assert "*" in rows["div-alpha"]
    assert "300 and 300 measured steps" in text


@pytest.mark.parametrize(
    ("p", "shown"),
    [
        (1.0, "1.00000"),
        (0.01, "0.01000"),
        (0.00999, "[bold]0.00999*[/]"),
        (1e-4, "[bold]0.00010*[/]"),
        (9.9e-5, "[bold]<1e-4*[/]"),
    ],
)
def test_p_values_are_shown_as_in_the_paper(p: float, shown: str) -> None:
    assert p_value(p) == shown


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"run 'B' has no measured step\. Attach TrainingDynamicsMonitor"):
        compare_dynamics(drawn(3, 0, 1.0), DynamicsHistory())
    row = [(1.0, 0.5, 0.9, 1.1)]
    with pytest.raises(ValueError, match=r"run 'A' was centred by 'points' and run 'B' by 'coordinates'"):
        compare_dynamics(history(row), history(row, centering="coordinates"))


def test_few_steps_are_said_to_show_little() -> None:
    assert "These are few steps" in str(compare_dynamics(drawn(19, 1, 1.0), drawn(300, 2, 1.0)))
    assert "These are few steps" not in str(compare_dynamics(drawn(20, 1, 1.0), drawn(300, 2, 1.0)))


def test_names_of_runs_are_no_markup() -> None:
    table = str(compare_dynamics(drawn(9, 0, 1.0), drawn(9, 1, 1.0), names=("[/]", "[x]")))
    assert "[/]" in table
    assert "[x]" in table
