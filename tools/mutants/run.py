"""Do the tests notice a mistake? Put mistakes into `engine`, `functional` and `callbacks`, one at a time, and run the tests.

    python tools/mutants/run.py --sample 300 --seed 0

A mutant is the package with one operator, comparison, number, condition, loop, decorator or call changed, as cosmic-ray
does it. It is killed if a test fails. There are thousands, so a sample is drawn: of each file its share, by the seed. What
is no mutant is written at `Excluded`; the table and the survivors, with the reasons in `survivors.toml`, are
printed at the end. `tools/mutants/README.md` has the figures.

How a mutant is run. The working tree is copied to `.mutants/tree`, and only there is anything changed. Torch and Lightning
are imported once; each mutant is tried by a fork of that process, which then imports the package. Once, all tests run with
their coverage recorded, so that a mutant meets the tests that run its line: first those of the file's own test file, then
the others, quick ones first, until `--budget` seconds are full. What is found is kept in `.mutants`; a call that was
interrupted is resumed. A folder of records that contains other files is refused, and only copies are removed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import importlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from working_tree import copy_working_tree, open_state

ROOT = Path(__file__).parents[2]
REASONS = Path(__file__).parent / "survivors.toml"
PACKAGES = ("fewshot_callbacks/engine", "fewshot_callbacks/functional", "fewshot_callbacks/callbacks")
TESTS = (
    "tests/test_defaults.py",
    *(f"tests/{part}" for part in ("distributed", "engine", "functional", "callbacks", "metrics")),
)
ENGINE = "fewshot_callbacks/engine"
KERNELS = {
    f"{ENGINE}/{name}.py": f"{ENGINE}/{name}.py" for name in ("collecting", "device", "nearest", "relevance")
} | {
    f"{ENGINE}/counting.py": f"{ENGINE}/ranks.py",
    f"{ENGINE}/exact.py": f"{ENGINE}/vectors.py",
}
"""Files with compiled functions, of which coverage sees nothing, and the file whose lines call them."""

HARMLESS = ("equivalent", "speed", "bound", "text")
"""Kinds of survivors that change no result; see `tools/mutants/README.md`."""

FOR_ALL = ("tests/test_defaults",)
"""Tests that look at all files without running their lines."""

UNSEEN = {"/callbacks/": "tests/callbacks/test_distributed.py"}
"""Tests that start other processes, which coverage does not look into, and the folder that they test."""

MEMORY = 24 * 2**30
"""Addresses of a mutant, in bytes: one that asks for more is killed by a MemoryError."""


# ---------------------------------------------------------------------------------------------------------- the mutants


class RemoveCall(Operator):
    """Leaves out a call that is a whole statement: `hook.remove()`, `self.store.reset()`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.children[0].type == "atom_expr":
            last = node.children[0].children[-1]
            if last.type == "trailer" and last.children[0].value == "(":
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = parso.parse(node.children[0].get_first_leaf().prefix + "pass")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class ReplaceAugmented(Operator):
    """`+=` becomes `-=`, and so on."""

    TABLE = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", "//=": "*="}  # noqa: RUF012

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "operator" and node.value in self.TABLE:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = self.TABLE[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


# one mistake for each operator, the nearest; cosmic-ray knows eleven for a plus, of which most only raise a TypeError
_BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div", "Mod_Div", "Pow_Mul", "LShift_RShift")
_BINARY += ("RShift_LShift", "BitAnd_BitOr", "BitOr_BitAnd", "BitXor_BitAnd")
_COMPARISONS = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
_OTHERS = ("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd")
_OTHERS += ("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer")
_OTHERS += ("RemoveDecorator", "ZeroIterationForLoop", "ReplaceUnaryOperator_Delete_Not")
_OTHERS += ("ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Invert")

OPERATORS: dict[str, Operator] = {
    name: get_operator(f"core/{name}")()
    for name in (
        *(f"ReplaceBinaryOperator_{pair}" for pair in _BINARY),
        *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISONS),
        *_OTHERS,
    )
} | {"RemoveCall": RemoveCall(), "ReplaceAugmented": ReplaceAugmented()}


class Excluded(ast.NodeVisitor):
    """The places where a change alters no result: annotations, `if TYPE_CHECKING`, texts, and numba settings.

    Texts are all strings, including the expressions in their braces, and all arguments of exceptions and warnings. For numba
    these are the settings (`cache`, `nogil`, ...) and the decorators: without one a kernel is slow or does not compile.
    """

    def __init__(self, source: str) -> None:
        self.lines = [line.encode() for line in source.splitlines()]
        self.spans: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.visit(ast.parse(source))

    def __contains__(self, position: tuple[int, int]) -> bool:
        return any(start <= position < end for start, end in self.spans)

    def _add(self, node: ast.AST | None) -> None:
        if isinstance(node, ast.expr | ast.stmt):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            self.spans.append((self._characters(*start), self._characters(*end)))

    def _characters(self, line: int, offset: int) -> tuple[int, int]:
        return line, len(self.lines[line - 1][:offset].decode())

    def _add_arguments(self, call: ast.Call) -> None:
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            self._add(argument)

    def visit_arg(self, node: ast.arg) -> None:
        self._add(node.annotation)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._add(node.returns)
        for decorator in node.decorator_list:
            if any(word in ast.unparse(decorator) for word in ("numba", "kernel", "inlined", "any_order")):
                start, end = (decorator.lineno, 0), (decorator.lineno + 1, 0)
                self.spans.append((start, end))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._add(node.annotation)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            self._add(node)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._add(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            self._add_arguments(node.exc)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith((".warn", "_warn", "njit")):
            self._add_arguments(node)
        self.generic_visit(node)


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    path: str
    line: int
    column: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """The place of the mistake, and its number among the mistakes of that place."""
        return f"{self.path}:{self.line}:{self.column} {self.operator} {self.occurrence}"


def mutants_of(path: str, source: str) -> list[tuple[str, int, tuple[int, int]]]:
    """Return the operator, occurrence and position of all mistakes in a file."""
    excluded = Excluded(source)
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name, operator in OPERATORS.items():
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        found += [(name, i, start) for i, start in enumerate(positions) if start not in excluded]
    return sorted(found, key=lambda site: (site[2], site[0], site[1]))


def mutated(source: str, operator: str, occurrence: int) -> str:
    """Return the text of the file with that mistake."""
    code = mutate_code(source, OPERATORS[operator], occurrence)
    assert code is not None
    return str(code)


def draw(
    root: Path, sample: int, seed: int, only: Sequence[str], each: int | None = None
) -> tuple[list[Mutant], dict[str, int]]:
    """Return the sample, and the number of mutants per file.

    Each file gets its share, by largest remainders, and at least one; or `each` mutants, if that is given. A larger sample
    with the same seed contains the smaller one.
    """
    paths = sorted(str(file.relative_to(root)) for package in PACKAGES for file in (root / package).rglob("*.py"))
    sources = {path: (root / path).read_text() for path in paths}
    sites = {path: mutants_of(path, source) for path, source in sources.items()}
    totals = {path: len(found) for path, found in sites.items() if found}
    exact = {path: sample * total / sum(totals.values()) for path, total in totals.items()}
    counts = {path: max(1, math.floor(share)) for path, share in exact.items()}
    for path in sorted(exact, key=lambda path: math.floor(exact[path]) - exact[path]):
        if sum(counts.values()) < sample:
            counts[path] += 1
    mutants = []
    for path, share in counts.items():
        if not any(part in path for part in only):
            continue
        count = share if each is None else each
        order = list(sites[path])
        random.Random(f"{seed} {path}").shuffle(order)
        lines = sources[path].splitlines()
        # cosmic-ray takes the star before keyword-only arguments for a product
        order = [site for site in order if lines[site[2][0] - 1][site[2][1] :][:2] != "*,"]
        for operator, occurrence, (line, column) in order[:count]:
            before, after = difference(sources[path], mutated(sources[path], operator, occurrence))
            mutants.append(Mutant(path, line, column, operator, occurrence, before, after))
    return mutants, totals


def difference(source: str, other: str) -> tuple[str, str]:
    """Return the first line that differs, from both texts."""
    for before, after in zip(source.splitlines(), other.splitlines(), strict=False):
        if before != after:
            return before.strip(), after.strip()
    raise ValueError("the mutant is the original")


# ------------------------------------------------------------------------------------------------------------ the tests


@dataclass
class TestMap:
    """The seconds of each test, and the tests that run each line."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[int]]]  # path -> line -> tests, by their place in `seconds`

    @property
    def files(self) -> set[str]:
        """The test files of the map."""
        return {test.split("::")[0] for test in self.seconds}

    def covering(self, path: str, line: int) -> set[str]:
        """Return the tests that run the line; if none is known (a constant, a kernel), the tests that run the file.

        If only a few test files were run, without coverage, return all of their tests.
        """
        if not self.lines:
            return set(self.seconds)
        lines = self.lines.get(KERNELS.get(path, path), {})
        places = set(lines.get(str(line), ())) if KERNELS.get(path, path) == path else set()
        names = list(self.seconds)
        return {names[place] for place in places or {place for some in lines.values() for place in some}}


def own_tests(path: str) -> list[str]:
    """Return the prefix of a file's tests. Tests mirror the package; a file without tests has the tests of its folder."""
    file = Path("tests", *Path(path).parts[1:])
    own = file.with_name(f"test_{file.stem.lstrip('_')}")
    return [*FOR_ALL, str(own if (ROOT / f"{own}.py").exists() else own.with_name("test_"))]


class Recorder:
    """A pytest plugin that records the outcome of each test, and the first test that failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.errors: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.errors.append((crash.message if crash else str(report.longrepr)).split("\n")[0][:160])


class Chooser(Recorder):
    """A pytest plugin: only these tests and those that are not on the map, in this order; `only`: how their names begin."""

    def __init__(self, order: list[str], known: dict[str, float], only: Sequence[str]) -> None:
        super().__init__()
        self.only = tuple(only) or ("",)
        self.place, self.known = {test: place for place, test in enumerate(order)}, known
        self.chosen = 0

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        chosen = [
            item
            for item in items
            if item.nodeid in self.place or (item.nodeid not in self.known and item.nodeid.startswith(self.only))
        ]
        items[:] = sorted(chosen, key=lambda item: self.place.get(item.nodeid, -1))
        self.chosen = len(items)


def choose_tests(mutant: Mutant, tests: TestMap, budget: float) -> tuple[list[str], int]:
    """Return the tests that run the line, in the order of trying, and the number of tests beyond the budget."""
    own = (*own_tests(mutant.path), mutant.path)
    covering = sorted(
        tests.covering(mutant.path, mutant.line),
        key=lambda test: (not test.startswith(own), tests.seconds.get(test, 0.0), test),
    )
    total, chosen = 0.0, []
    for test in covering:
        if total + tests.seconds.get(test, 0.0) <= budget or not chosen:
            chosen.append(test)
            total += tests.seconds.get(test, 0.0)
    left_out = len(covering) - len(chosen)
    unseen = tuple(begin for folder, begin in UNSEEN.items() if folder in mutant.path)
    chosen += [test for test in tests.seconds if test.startswith(unseen) and test not in chosen]
    return chosen, left_out


def files_of(tests: list[str], mutant: Mutant, root: Path, only: Collection[str] = ()) -> list[str]:
    """Where these tests are, and all test files of the mutant's own; of these only some, where that is said."""
    own = set()
    for prefix in own_tests(mutant.path):
        own |= {str(file.relative_to(root)) for file in (root / prefix).parent.glob(f"{Path(prefix).name}*.py")}
    return sorted({test.split("::")[0] for test in tests} | (own & set(only) if only else own))


# ------------------------------------------------------------------------------------------------------------- the runs


def preload() -> None:
    """Import what every test run imports, but nothing of the package."""
    for name in ("beartype", "hypothesis", "jaxtyping", "lightning.pytorch", "numba", "pytest", "scipy.stats"):
        importlib.import_module(name)
    for name in ("torch", "torchmetrics", "torchvision"):
        importlib.import_module(name)
    assert not any(name.startswith("fewshot_callbacks") for name in sys.modules)


def in_fork(work: Callable[[], Any], seconds: float, log: Path) -> tuple[str, Any]:
    """Run the work in a fork, and return ("done", its result), ("timed out", None) or ("died", the signal or status)."""
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            answer = work()
            result.write_text(json.dumps(answer))
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        os._exit(0)
    status = None
    try:
        waited, last = 0.0, time.monotonic()
        while status is None and waited < seconds:
            now = time.monotonic()
            waited, last = waited + min(now - last, 1.0), now  # the time that a machine sleeps does not count
            pid, code = os.waitpid(child, os.WNOHANG)
            if pid:
                status = code
            else:
                time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # also ends the processes that it started
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status is None:
        return "timed out", None
    return ("done", json.loads(result.read_text())) if result.exists() else ("died", status)


def _enter(folder: Path, *, unchanged: bool) -> None:
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    if not unchanged:  # two mutants with the same second and size would look the same
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _interpret_kernels() -> None:
    """Run kernels as plain Python: as in compiled ones, integers overflow and 1 / 0 is infinite without a warning."""
    import numba  # noqa: PLC0415 - preloaded

    os.environ["NUMBA_DISABLE_JIT"], numba.config.DISABLE_JIT = "1", 1


def _pytest(*arguments: str, plugin: Recorder) -> int:
    import hypothesis  # noqa: PLC0415 - preloaded
    import pytest  # noqa: PLC0415

    # hypothesis always draws the same, sets no deadline and does not simplify what it finds; what is preloaded cannot be
    # rewritten, nor need it be
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("ci"), phases=phases)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=mutants",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    if os.environ.get("NUMBA_DISABLE_JIT"):
        options += ["-W", "ignore::RuntimeWarning"]
    return int(pytest.main([*options, *arguments], plugins=[plugin]))


def map_tests(folder: Path, log: Path) -> TestMap:
    """Run all tests with their coverage recorded."""

    def work() -> Any:
        _enter(folder, unchanged=True)
        _pytest("tests/engine/test_ranks.py", "tests/engine/test_codes.py", plugin=Recorder())  # compiles

    def recorded() -> Any:
        _enter(folder, unchanged=True)
        recorder = Recorder()
        options = ["--cov=fewshot_callbacks", "--cov-context=test", "--cov-report="]
        status = _pytest(*options, *TESTS, *PACKAGES, plugin=recorder)
        return {"status": status, "seconds": recorder.seconds, "failed": recorder.failed}

    in_fork(work, 1800, log)
    outcome, answer = in_fork(recorded, 3600, log)
    if outcome != "done" or answer["failed"] or answer["status"]:
        sys.exit(f"The tests must pass before anything is changed: {answer}\n{log.read_text()[-3000:]}")
    return TestMap(answer["seconds"], read_coverage(folder, list(answer["seconds"])))


def time_tests(folder: Path, log: Path, files: Sequence[str], *, interpreted: bool) -> TestMap:
    """Run some test files, and record the seconds of each test; tests that only compiled kernels pass are left out."""

    def work() -> Any:
        _enter(folder, unchanged=True)
        if interpreted:
            _interpret_kernels()
        recorder = Recorder()
        _pytest(*files, plugin=recorder)
        return {"seconds": recorder.seconds, "failed": recorder.failed}

    outcome, answer = in_fork(work, 3600, log)
    if outcome != "done" or (answer["failed"] and not interpreted):
        sys.exit(f"The tests must pass before anything is changed: {answer}\n{log.read_text()[-3000:]}")
    return TestMap(answer["seconds"] | dict.fromkeys(answer["failed"], math.inf), {})


def read_coverage(folder: Path, names: list[str]) -> dict[str, dict[str, list[int]]]:
    """Path -> line -> tests, by their place among the names."""
    from coverage import CoverageData  # noqa: PLC0415 - only where tests are mapped

    data = CoverageData(str(folder / ".coverage"))
    data.read()
    place = {name: number for number, name in enumerate(names)}
    lines: dict[str, dict[str, list[int]]] = {}
    for file in data.measured_files():
        path = str(Path(file).relative_to(folder))
        if path.startswith(PACKAGES):
            contexts = {
                line: {name.split("|")[0] for name in some} for line, some in data.contexts_by_lineno(file).items()
            }
            lines[path] = {
                str(line): sorted(place[name] for name in some & place.keys()) for line, some in contexts.items()
            }
    return lines


def try_mutant(
    mutant: Mutant, folder: Path, tests: TestMap, log: Path, options: argparse.Namespace, *, control: bool = False
) -> Any:
    """Return the verdict of the tests on a mutant."""
    file = folder / mutant.path
    source, stamp = file.read_text(), file.stat()
    kernel = mutant.path in KERNELS and not control and not options.interpreted
    cache = folder / ".numba_of_mutant"
    chosen, left_out = choose_tests(mutant, tests, options.budget)
    files = files_of(chosen, mutant, folder, tests.files if options.tests else ())

    def work() -> Any:
        _enter(folder, unchanged=control)
        if options.interpreted:
            _interpret_kernels()
        elif kernel:  # the compiled original stays where it is
            import numba  # noqa: PLC0415 - preloaded

            os.environ["NUMBA_CACHE_DIR"] = numba.config.CACHE_DIR = str(cache)
        chooser = Chooser(chosen, tests.seconds, options.tests)
        status = _pytest("-x", *files, plugin=chooser)
        return {"status": status, "failed": chooser.failed, "errors": chooser.errors, "chosen": chooser.chosen}

    start = time.monotonic()
    try:
        if not control:
            file.write_text(mutated(source, mutant.operator, mutant.occurrence))
        outcome, answer = in_fork(work, 60 + 3 * options.budget + (90 if kernel else 0), log)
    finally:
        file.write_text(source)
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(folder / ".hypothesis", ignore_errors=True)
    record = {"seconds": round(time.monotonic() - start, 1), "left_out": left_out, "by": ""}
    if outcome == "timed out":
        return record | {"outcome": "timed out"}
    if outcome == "died":
        return record | {"outcome": "killed", "by": f"the process ended with status {answer}"}
    if answer["status"] == 0:
        return record | {"outcome": "survived", "by": f"{answer['chosen']} tests passed"}
    if answer["status"] == 5:  # pytest chose no test
        return record | {"outcome": "survived", "by": "no test runs this line"}
    by, error = (*answer["failed"], "the import fails")[0], (*answer["errors"], "")[0]
    return record | {"outcome": "killed", "by": by, "error": error}


# ----------------------------------------------------------------------------------------------------------- the report


def wilson(killed: int, drawn: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % interval of a proportion."""
    share = killed / drawn
    centre = share + z * z / (2 * drawn)
    half = z * math.sqrt(share * (1 - share) / drawn + z * z / (4 * drawn * drawn))
    return (centre - half) / (1 + z * z / drawn), (centre + half) / (1 + z * z / drawn)


def read_reasons() -> list[dict[str, str]]:
    """Return the reasons of the reviewed survivors."""
    return tomllib.loads(REASONS.read_text())["survivor"] if REASONS.exists() else []


def reason_of(mutant: Mutant, reasons: list[dict[str, str]]) -> str:
    """Return the reason why a reviewed mutant survives."""
    for entry in reasons:
        if (entry["path"], entry["before"], entry["after"]) == (mutant.path, mutant.before, mutant.after):
            return f"{entry['kind']}: {entry['reason']}"
    return "not yet looked at"


def report(tried: list[tuple[Mutant, dict[str, Any]]], totals: dict[str, int]) -> str:
    """Return the table and the survivors."""
    reasons = read_reasons()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, record in tried:
        counts[mutant.path][record["outcome"]] += 1
    lines = ["| file | mutants | drawn | killed | timed out | survived |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    whole: Counter[str] = Counter()
    for path, count in sorted(counts.items()):
        whole += count
        numbers = (totals[path], count.total(), count["killed"], count["timed out"], count["survived"])
        lines.append(f"| {path.removeprefix('fewshot_callbacks/')} | " + " | ".join(map(str, numbers)) + " |")
    numbers = (sum(totals.values()), whole.total(), whole["killed"], whole["timed out"], whole["survived"])
    lines.append("| **all** | " + " | ".join(f"**{number:,}**" for number in numbers) + " |")
    dead = whole["killed"] + whole["timed out"]
    low, high = wilson(dead, whole.total())
    lines += [
        "",
        f"{dead} of {whole.total()} killed: {dead / whole.total():.1%} (95 % interval {low:.1%} to {high:.1%}).",
        "",
    ]
    survivors = [mutant for mutant, record in tried if record["outcome"] == "survived"]
    kinds = Counter(reason_of(mutant, reasons).split(":")[0] for mutant in survivors)
    changing = whole.total() - sum(kinds[kind] for kind in HARMLESS)
    low, high = wilson(dead, changing)
    lines += [f"Of the {changing} that change a result: {dead / changing:.1%} ({low:.1%} to {high:.1%}).", ""]
    lines += ["Survivors: " + ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()) + ".", ""]
    for mutant in survivors:
        place = f"{mutant.path.removeprefix('fewshot_callbacks/')}:{mutant.line}"
        lines += [f"- `{place}` `{mutant.before}` → `{mutant.after}`", f"  {reason_of(mutant, reasons)}"]
    return "\n".join(lines)


def digest(root: Path, *folders: str) -> str:
    """Return the hash of all Python files in these folders."""
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def settings(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="only files whose path contains this, or one of these")
    parser.add_argument("--each", type=int, help="draw so many of each file instead of its share of --sample")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=[],
        metavar="FILE",
        help="only tests of these files, or these tests, without coverage",
    )
    parser.add_argument("--interpreted", action="store_true", help="kernels as plain Python, for --tests of small data")
    parser.add_argument(
        "--budget", type=float, default=30, help="seconds of tests for one mutant, by their recorded times"
    )
    parser.add_argument("--later", default=" ", help="try files whose path contains this last, such as kernels")
    parser.add_argument("--controls", type=int, default=5, help="places of the sample that are first tried unchanged")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time; the next call resumes")
    parser.add_argument("--state", type=Path, default=ROOT / ".mutants", help="folder of the records")
    parser.add_argument(
        "--again",
        choices=["survived", "open", "timed out", "all"],
        help="try these once more; open: survivors that change a result",
    )
    parser.add_argument("--keep-map", action="store_true", help="do not map the tests anew though they have changed")
    parser.add_argument("--list", action="store_true", help="print the sample and try nothing")
    parser.add_argument("--report", action="store_true", help="print what is known of the sample and try nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Draw the mutants, try them, and print the report."""
    options = settings(arguments)
    if options.list or options.report:
        mutants, totals = draw(ROOT, options.sample, options.seed, options.only, options.each)
    else:
        open_state(options.state)
        lock = (options.state / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two at a time would change one tree
        except BlockingIOError:
            sys.exit(f"Another run uses {options.state}. Wait for it, or pass another --state.")
        copy_working_tree(ROOT, options.state)
        mutants, totals = draw(options.state / "tree", options.sample, options.seed, options.only, options.each)
    if options.list:
        print("\n".join(f"{m.path}:{m.line} {m.operator}\n  {m.before}\n  {m.after}" for m in mutants))
        return 0
    hashes = {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16] for path in totals}
    keys = {mutant: f"{hashes[mutant.path]} {mutant.name}" for mutant in mutants}
    records_file = options.state / "records.json"
    records = json.loads(records_file.read_text()) if records_file.exists() else {}
    if not options.report:
        try_all(keys, records, records_file, options)
    tried = [(mutant, records[key]) for mutant, key in keys.items() if key in records]
    if tried:
        print(report(tried, totals))
    return 0


def try_all(keys: dict[Mutant, str], records: dict[str, Any], file: Path, options: argparse.Namespace) -> None:
    """Try those mutants of which nothing is known, and keep what is found after each."""
    began, reasons = time.monotonic(), read_reasons()
    wanted = [
        mutant for mutant, key in keys.items()
        if key not in records or options.again in ("all", records[key]["outcome"])
        or (options.again == "open" and records[key]["outcome"] == "survived"
            and not reason_of(mutant, reasons).startswith(HARMLESS))
    ]  # fmt: skip
    if not wanted:
        return
    random.Random(options.seed).shuffle(wanted)  # a random order, so that the results are a sample when the time is up
    wanted.sort(key=lambda mutant: (keys[mutant] not in records, options.later in mutant.path))
    folder, log = options.state.resolve() / "tree", options.state.resolve() / "log.txt"
    preload()
    tests = load_map(folder, log, options)
    for mutant in wanted[: options.controls]:
        record = try_mutant(mutant, folder, tests, log, options, control=True)
        if record["outcome"] != "survived":
            sys.exit(f"{mutant.name}: the tests fail without a mutant: {record}\n{log.read_text()}")
    for number, mutant in enumerate(wanted, 1):
        if time.monotonic() - began > 60 * options.minutes:
            print(f"Stopped; {len(wanted) - number + 1} of the sample are still to be tried.")
            break
        record = try_mutant(mutant, folder, tests, log, options)
        records[keys[mutant]] = asdict(mutant) | record
        file.write_text(json.dumps(records, indent=1))
        print(f"{number}/{len(wanted)} {record['outcome']:9} {record['seconds']:6.1f} s  {mutant.name}", flush=True)
        if not record.get("error", "assert").startswith(("assert", "AssertionError")):
            print(f"    {record['error']}", flush=True)
        if record["outcome"] != "killed":
            print(f"    {mutant.before}\n    {mutant.after}", flush=True)


def load_map(folder: Path, log: Path, options: argparse.Namespace) -> TestMap:
    """Return the saved map of the tests, or a new one."""
    few = [*sorted(options.tests), *["interpreted"] * options.interpreted]
    file = options.state / f"tests{hashlib.sha256(' '.join(few).encode()).hexdigest()[:8] if few else ''}.json"
    state = digest(folder, *PACKAGES, "tests")
    if file.exists():
        kept = json.loads(file.read_text())
        if options.keep_map or kept["state"] == state:
            return TestMap(kept["seconds"], kept["lines"])
    if options.tests:
        print("Running these tests, once.", flush=True)
        tests = time_tests(folder, log, options.tests, interpreted=options.interpreted)
    else:
        print("Running all tests with their coverage, once.", flush=True)
        tests = map_tests(folder, log)
    file.write_text(json.dumps({"state": state, "seconds": tests.seconds, "lines": tests.lines}))
    return tests


if __name__ == "__main__":
    sys.exit(main())
