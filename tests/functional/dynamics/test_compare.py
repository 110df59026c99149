"""The comparison of two training dynamics against the definitions of its tests, and its table."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from fewshot_callbacks.functional import DynamicsHistory, StepDynamics, compare_dynamics
from fewshot_callbacks.functional.dynamics_comparison import p_value
from tests.messages import missing_facts, refused


def history(values: list[tuple[float, float, float, float]], **settings: str) -> DynamicsHistory:
    """Of (alpha, phi, psi_con, psi_div)."""
    return DynamicsHistory(tuple(range(len(values))), tuple(StepDynamics(*row) for row in values), **settings)  # type: ignore[arg-type]


def drawn(steps: int, seed: int, good: float) -> DynamicsHistory:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(steps, 4, generator=generator, dtype=torch.float64)
    return history(
        [(1.0, float(0.5 + r[0] / 2), float(1.1 - 0.2 * good * r[1]), float(0.9 + 0.2 * good * r[2])) for r in rows]
    )


def slow_mann_whitney(a: list[float], b: list[float]) -> float:
    """Two-sided p over all ways to deal the values out."""
    pooled, middle = a + b, len(a) * len(b) / 2

    def apart(deal: tuple[int, ...]) -> float:
        rest = [value for i, value in enumerate(pooled) if i not in deal]
        return abs(sum((pooled[i] > y) + 0.5 * (pooled[i] == y) for i in deal for y in rest) - middle)

    deals = list(itertools.combinations(range(len(pooled)), len(a)))
    return sum(apart(deal) >= apart(deals[0]) - 1e-12 for deal in deals) / len(deals)


def slow_fisher(good: list[int], bad: list[int]) -> float:
    """Two-sided: all tables of the same margins that are no more likely than the one seen."""
    n, total = (good[0] + bad[0], good[1] + bad[1]), sum(good)

    def chance(x: int) -> float:
        return math.comb(n[0], x) * math.comb(n[1], total - x) / math.comb(sum(n), total)

    possible = [chance(x) for x in range(max(0, total - n[1]), min(n[0], total) + 1)]
    return sum(p for p in possible if p <= chance(good[0]) * (1 + 1e-7))


def test_equals_the_definitions_step_by_step() -> None:
    a, b = drawn(5, 1, 0.9), drawn(6, 2, 1.2)
    for name, measure in compare_dynamics(a, b).measures.items():
        values = [run.values(name).tolist() for run in (a, b)]
        assert measure.geometric_means == pytest.approx(tuple(math.prod(v) ** (1 / len(v)) for v in values))
        assert measure.mann_whitney_p == pytest.approx(slow_mann_whitney(*values), rel=1e-6)
        assert measure.steps == (5, 6)
        if name == "norm_ratio":
            assert (measure.good_shares, measure.fisher_p) == (None, None)
            continue
        good = [sum(x > 1 if name == "div_alpha" else x < 1 for x in v) for v in values]
        assert measure.good_shares == pytest.approx((good[0] / 5, good[1] / 6))
        assert measure.fisher_p == pytest.approx(slow_fisher(good, [5 - good[0], 6 - good[1]]))


def test_steps_without_a_value_are_left_out_and_counted() -> None:
    a = history([(1.0, math.nan, 0.9, 1.1), (1.0, 0.5, 0.9, 1.1), (-1.0, 0.7, 0.9, 1.1)])
    measures = compare_dynamics(a, drawn(3, 0, 1.0)).measures
    assert [measures[name].steps for name in ("norm_ratio", "con_alpha", "con_div")] == [(2, 3), (2, 3), (3, 3)]
    comparison = compare_dynamics(history([(1.0, math.nan, 0.9, 1.1)]), drawn(3, 0, 1.0))
    assert math.isnan(comparison.measures["norm_ratio"].mann_whitney_p)
    stored = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert stored["measures"]["norm_ratio"]["mann_whitney_p"] is None


def test_files_are_read(tmp_path: Path) -> None:
    drawn(9, 3, 1.0).save(tmp_path / "a.json")
    drawn(9, 4, 1.0).save(tmp_path / "b.json")
    expected = compare_dynamics(drawn(9, 3, 1.0), drawn(9, 4, 1.0), names=("one", "two"))
    assert compare_dynamics(tmp_path / "a.json", str(tmp_path / "b.json"), names=("one", "two")) == expected


def test_the_printed_table_has_the_columns_of_the_paper() -> None:
    text = str(compare_dynamics(drawn(300, 1, 0.8), drawn(300, 2, 1.4), names=("softmax", "[/]")))  # no markup
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines[:3]).split()) == "softmax [/] Mann- Fisher's mean good mean good Whitney p exact p"
    rows = {line.split()[0]: line for line in lines if ("." in line and "-" in line) or "norm" in line}
    assert list(rows)[:4] == ["norm", "con-alpha", "div-alpha", "con-div"]
    assert "<1e-" in rows["div-alpha"]
    assert "*" in rows["div-alpha"]
    assert not missing_facts(text, ("300 and 300", "steps"))
    for steps in (19, 20):
        said = "every_n_steps" in str(compare_dynamics(drawn(steps, 1, 1.0), drawn(300, 2, 1.0)))
        assert said is (steps == 19)


def test_p_values_are_shown_as_in_the_paper() -> None:
    shown = [p_value(p) for p in (0.01, 0.00999, 1e-4, 9.9e-5)]
    assert shown == ["0.01000", "[bold]0.00999*[/]", "[bold]0.00010*[/]", "[bold]<1e-4*[/]"]


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with refused(ValueError, "'B'", "step", "TrainingDynamicsMonitor", "every_n_steps"):
        compare_dynamics(drawn(3, 0, 1.0), DynamicsHistory())
    row = [(1.0, 0.5, 0.9, 1.1)]
    with refused(ValueError, "'A'", "'points'", "'B'", "'coordinates'", "centering"):
        compare_dynamics(history(row), history(row, centering="coordinates"))
