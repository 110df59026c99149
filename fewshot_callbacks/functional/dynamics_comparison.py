"""`compare_dynamics`: two runs compared by the measures of their steps, with the tests of the distance-ratio paper."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional.dynamics import DynamicsHistory, without_nan
from fewshot_callbacks.system.extras import required_extra
from fewshot_callbacks.system.terminal import as_text

if TYPE_CHECKING:
    from rich.table import Table


# The four measures that the paper compares -> the values of a good step.
RATIOS: dict[str, Literal["above 1", "below 1"] | None]
RATIOS = {"norm_ratio": None, "con_alpha": "below 1", "div_alpha": "above 1", "con_div": "below 1"}

# The paper prints p-values below this in bold.
SIGNIFICANT = 0.01

# With fewer measured steps, a comparison is hardly informative.
FEW = 20

TITLES = {"norm_ratio": "norm ratio", "con_alpha": "con-alpha", "div_alpha": "div-alpha", "con_div": "con-div"}


@equal_with_nan
@dataclass(frozen=True)
class MeasureComparison:
    """One measure of the steps of two runs.

    Attributes:
        geometric_means: Geometric mean of the values of each run; NaN for a run without a value.
        good_shares: Share of good steps of each run, in [0, 1]: con-alpha < 1, div-alpha > 1, con-div < 1. None for phi,
            because its values are neither good nor bad.
        steps: Number of steps of each run for which the measure is defined.
        mann_whitney_p: P-value of a two-sided Mann-Whitney U test of the values; NaN if a run has no value.
        fisher_p: P-value of a two-sided Fisher's exact test of the numbers of good steps; None for phi.
    """

    geometric_means: tuple[float, float]
    good_shares: tuple[float, float] | None
    steps: tuple[int, int]
    mann_whitney_p: float
    fisher_p: float | None


@dataclass(frozen=True)
class DynamicsComparison:
    """The result of `compare_dynamics`: how the steps of two runs differ; `print` shows the paper's table.

    Attributes:
        names: Names of the runs.
        measures: Name -> comparison of the measures `norm_ratio`, `con_alpha`, `div_alpha` and `con_div`.

    Examples:
        >>> from fewshot_callbacks.functional.dynamics import StepDynamics
        >>> steps = tuple(StepDynamics(1.0, 0.9 + i / 100, 0.9, 1.1) for i in range(9))
        >>> history = DynamicsHistory(tuple(range(9)), steps)
        >>> compare_dynamics(history, history, names=("first", "second")).measures["con_div"].steps
        (9, 9)
    """

    names: tuple[str, str]
    measures: dict[str, MeasureComparison]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN becomes None."""
        stored: dict[str, Any] = without_nan(asdict(self))
        return stored

    def table(self) -> Table:
        """Return a rich table with the columns of the paper. P-values below 0.01 are bold with a star."""
        with required_extra("cli", "DynamicsComparison.table"):
            from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - only for those who print
            from rich.table import Table  # noqa: PLC0415

        steps = [next(iter(self.measures.values())).steps[run] for run in (0, 1)]
        advice = ""
        if min(steps) < FEW:
            advice = ". These are few steps for a comparison, so measure more often (every_n_steps)"
        table = Table(
            box=SIMPLE_HEAD,
            pad_edge=False,
            caption=(
                f"{steps[0]:,} and {steps[1]:,} measured steps. Geometric means; share of good steps: con-alpha < 1, "
                f"div-alpha > 1, con-div < 1. * p < {SIGNIFICANT}" + advice
            ),
        )
        table.add_column("", no_wrap=True)
        for name in self.names:
            table.add_column(as_text(name).append("\nmean"), justify="right", no_wrap=True)
            table.add_column("\ngood", justify="right", no_wrap=True)
        table.add_column("Mann-\nWhitney p", justify="right", no_wrap=True)
        table.add_column("Fisher's\nexact p", justify="right", no_wrap=True)
        for name, measure in self.measures.items():
            shares = ["", ""]
            if measure.good_shares is not None:
                shares = [f"{share:.5f}" for share in measure.good_shares]
            cells = []
            for mean, share in zip(measure.geometric_means, shares, strict=True):
                cells += [f"{mean:.5f}", share]
            table.add_row(TITLES[name], *cells, p_value(measure.mann_whitney_p), p_value(measure.fisher_p))
        return table

    def __str__(self) -> str:
        with required_extra("cli", "print(compare_dynamics(...))"):
            from rich.console import Console  # noqa: PLC0415 - only for those who print

        console = Console(width=80, no_color=True, force_terminal=False, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def compare_dynamics(
    run_a: DynamicsHistory | str | Path, run_b: DynamicsHistory | str | Path, *, names: tuple[str, str] = ("A", "B")
) -> DynamicsComparison:
    """Return the comparison of two runs by the measures of their steps, with the tests of the paper.

    Args:
        run_a: The history of the first run: `TrainingDynamicsMonitor.history`, or the path or URL of the file that the
            monitor wrote.
        run_b: The history of the second run, in either form.
        names: Names of the runs, for the table.

    Returns:
        Geometric means, shares of good steps and p-values of each measure. Like the paper, the tests treat the steps of a
        run as independent. Neighbouring steps are not quite independent, and one run does not show how much another seed
        would differ.

    Raises:
        ValueError: If a run has no measured steps, or if the runs have different centrings.
        FileNotFoundError: If a file does not exist.

    References:
        Kim, Parviainen, Malde, "Distance-Ratio-Based Formulation for Metric Learning", tables 3 to 10.
        Mann, Whitney, "On a test of whether one of two random variables is stochastically larger than the other", 1947.

    Examples:
        >>> from fewshot_callbacks.functional.dynamics import StepDynamics
        >>> scaled = DynamicsHistory(tuple(range(9)), tuple(StepDynamics(1.1, 0.5 + i / 100, 1.0, 1.1) for i in range(9)))
        >>> moved = DynamicsHistory(tuple(range(9)), tuple(StepDynamics(1.0, 0.9 + i / 100, 0.9, 1.1) for i in range(9)))
        >>> comparison = compare_dynamics(scaled, moved, names=("softmax", "DR"))
        >>> comparison.measures["div_alpha"].good_shares, comparison.measures["norm_ratio"].mann_whitney_p < 0.01
        ((0.0, 1.0), True)
    """
    first = run_a if isinstance(run_a, DynamicsHistory) else DynamicsHistory.load(run_a)
    second = run_b if isinstance(run_b, DynamicsHistory) else DynamicsHistory.load(run_b)
    for name, run in zip(names, (first, second), strict=True):
        if len(run) == 0:
            raise InputError(
                f"compare_dynamics: run {name!r} has no measured step. Add TrainingDynamicsMonitor to the Trainer, with an "
                "every_n_steps below the number of optimiser steps."
            )
    if first.centering != second.centering:
        raise InputError(
            f"compare_dynamics: run {names[0]!r} was centred by {first.centering!r} and run {names[1]!r} by "
            f"{second.centering!r}, so their values cannot be compared. Measure both with the same centering."
        )
    return DynamicsComparison(names, {name: _compared(first, second, name) for name in RATIOS})


def _compared(first: DynamicsHistory, second: DynamicsHistory, name: str) -> MeasureComparison:
    """Return the comparison of one measure."""
    from scipy.stats import fisher_exact, mannwhitneyu  # noqa: PLC0415 - half a second that only a comparison needs

    runs = [run.values(name) for run in (first, second)]
    a, b = (values[values.isfinite()] for values in runs)
    has_values = len(a) > 0 and len(b) > 0
    mann_whitney = math.nan
    if has_values:
        mann_whitney = float(mannwhitneyu(a.numpy(), b.numpy(), alternative="two-sided").pvalue)
    shares = None
    fisher = None
    if RATIOS[name] is not None:
        good_a = _good_steps(a, name)
        good_b = _good_steps(b, name)
        shares = (_share(good_a, len(a)), _share(good_b, len(b)))
        table = [[good_a, len(a) - good_a], [good_b, len(b) - good_b]]
        fisher = float(fisher_exact(table).pvalue) if has_values else math.nan
    return MeasureComparison(
        geometric_means=(float(a.log().mean().exp()), float(b.log().mean().exp())),
        good_shares=shares,
        steps=(len(a), len(b)),
        mann_whitney_p=mann_whitney,
        fisher_p=fisher,
    )


def _good_steps(values: Float[Tensor, "steps"], name: str) -> int:
    """Return the number of good values of a measure."""
    return int((values < 1).sum() if RATIOS[name] == "below 1" else (values > 1).sum())


def _share(count: int, total: int) -> float:
    """Return count / total; NaN if the total is 0."""
    return count / total if total else math.nan


def p_value(p: float | None) -> str:
    """Return a p-value as the paper prints it: five decimals or a power of ten, with a star if it is significant.

    Examples:
        >>> p_value(0.61722), p_value(0.00244), p_value(3.2e-11), p_value(None), p_value(0.0)
        ('0.61722', '[bold]0.00244*[/]', '[bold]<1e-10*[/]', '', '[bold]<1e-300*[/]')
    """
    if p is None:
        return ""
    if math.isnan(p):
        return "nan"
    if p >= 1e-4:
        text = f"{p:.5f}"
    else:
        exponent = -300 if p == 0 else math.ceil(math.log10(p))
        text = f"<1e{exponent}"
    return f"[bold]{text}*[/]" if p < SIGNIFICANT else text
