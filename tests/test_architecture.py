"""Doors and budgets of the house: imports run one way between layers and inside the engine, which stays small."""

import ast
import functools
import io
import itertools
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "fewshot_callbacks", ROOT / "tests"
TEST_FILES = sorted(TESTS.rglob("test_*.py"))

BELOW = {
    "distributed": set(),
    "engine": {"distributed"},
    "functional": {"engine", "distributed"},
    "losses": {"functional"},
    "metrics": {"functional", "distributed"},
    "plots": {"functional"},
    "report": {"plots", "functional"},
    "data": {"functional"},
    "protonet": {"metrics", "losses", "functional", "distributed"},
    "callbacks": {"report", "plots", "metrics", "functional", "distributed", "protonet"},
    "cli": {"callbacks", "report", "plots", "protonet", "data", "losses", "metrics", "functional", "distributed"},
}
"""Layer -> the layers that it may import."""


@functools.cache
def nodes(file, *kinds):
    """All nodes of these kinds of a file, or all of them."""
    every = tuple(ast.walk(ast.parse(file.read_text()))) if not kinds else nodes(file)
    return [node for node in every if not kinds or isinstance(node, kinds)]


def imports():
    """(file, layer of the file, imported module) of every import of the package in itself."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).parts[0]
        modules = [node.module or "" for node in nodes(file, ast.ImportFrom)]
        modules += [alias.name for node in nodes(file, ast.Import) for alias in node.names]
        # `from fewshot_callbacks.engine import device` imports a module, too
        modules += [
            f"{node.module}.{alias.name}"
            for node in nodes(file, ast.ImportFrom)
            if (node.module or "").startswith("fewshot_callbacks.")
            for alias in node.names
            if (PACKAGE.parent / node.module.replace(".", "/") / f"{alias.name}.py").is_file()
        ]
        for module in modules:
            if module.startswith("fewshot_callbacks.") and name in BELOW and module.split(".")[1] in BELOW:
                yield file.relative_to(PACKAGE), name, module.removeprefix("fewshot_callbacks.")


def test_every_folder_is_a_layer():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(BELOW)


def test_imports_point_down():
    wrong = [
        f"{file} imports {module}"
        for file, layer, module in imports()
        if (target := module.split(".")[0]) != layer and target not in BELOW[layer]
    ]
    assert not wrong


@pytest.mark.parametrize("layer", ["distributed", "engine", "functional", "losses", "plots", "report"])
def test_the_maths_knows_no_lightning(layer):
    for file in (PACKAGE / layer).rglob("*.py"):
        assert "lightning" not in {(node.module or "").split(".")[0] for node in nodes(file, ast.ImportFrom)}, file


def test_no_test_imports_a_test():
    """What tests have in common stands in modules of its own."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {node.module}"
        for file in TESTS.rglob("*.py")
        for node in nodes(file, ast.ImportFrom)
        if (node.module or "").startswith("tests.")
        if any(part.startswith("test_") for part in [*node.module.split("."), *(alias.name for alias in node.names)])
    ]
    assert not wrong


def test_every_test_file_says_what_it_holds():
    assert [file for file in TEST_FILES if not ast.get_docstring(nodes(file)[0])] == []


ENGINE = PACKAGE / "engine"
LINE = (
    *("options", "compiled", "layout", "exact", "relevance", "counting", "device", "candidate_buffer", "vectors"),
    *("chunks", "observers", "backends", "tiles", "thresholds", "ranks"),
    *("pooled", "distinct", "precision", "evaluation", "nearest"),
)
"""The modules of the engine in an order in which each imports those before it alone: so it can be read."""

MOST_ARGUMENTS_OF_A_LOOP, MOST_LINES_OF_A_FUNCTION, FEWEST_COMMENTS = 10, 60, 0.06

DECORATORS = {"kernel", "inlined", "always_inlined", "any_order"}
"""Of the functions that are compiled."""


@functools.cache
def lines_of(file):
    """Numbers of the lines with code (no blank lines, no comments, no docstrings), and of those with a comment."""
    code, comments, docstrings = set(), set(), set()
    for node in nodes(file, ast.Module, ast.ClassDef, ast.FunctionDef):
        if ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - docstrings, comments


def functions_in(files):
    """(file, function, its lines of code) of every function and method."""
    for file in files:
        for node in nodes(file, ast.FunctionDef):
            yield file.stem, node, sum(node.lineno <= line <= node.end_lineno for line in lines_of(file)[0])


def test_modules_of_the_engine_form_a_line():
    assert {file.stem for file in ENGINE.rglob("*.py")} - {"__init__"} == set(LINE)
    wrong = [
        f"{file} imports {module}"
        for file, layer, module in imports()
        if layer == "engine" and module.startswith("engine.")
        if LINE.index(module.split(".")[1]) >= LINE.index(file.stem)
    ]
    assert not wrong


def test_nobody_imports_what_is_private_to_a_module_of_the_engine():
    wrong = [
        f"{file.relative_to(ROOT)} imports {alias.name} from {node.module}"
        for file in [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py"), *ROOT.glob("benchmarks/*.py")]
        for node in nodes(file, ast.ImportFrom)
        if (node.module or "").startswith("fewshot_callbacks.engine")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not wrong


def test_functions_are_short_and_comments_are_there():
    files = list(PACKAGE.rglob("*.py"))
    assert [node.name for _, node, lines in functions_in(files) if lines > MOST_LINES_OF_A_FUNCTION] == []
    code, comments = (sum(len(lines_of(file)[which]) for file in files) for which in (0, 1))
    assert comments / code >= FEWEST_COMMENTS


def test_compiled_loops_have_few_arguments():
    compiled = [
        (file, node)
        for file, node, _ in functions_in(ENGINE.glob("*.py"))
        if DECORATORS & {ast.unparse(decorator) for decorator in node.decorator_list}
    ]
    assert len(compiled) > 20
    assert not [f"{file}.{node.name}" for file, node in compiled if len(node.args.args) > MOST_ARGUMENTS_OF_A_LOOP]


def test_the_engine_says_why():
    """Each module says what it is for; each number that somebody chose has its reason beside it."""
    without = []
    for file in (ENGINE / f"{name}.py" for name in LINE):
        lines, module = file.read_text().split("\n"), nodes(file)[0]
        body = module.body
        assert ast.get_docstring(module), file
        for node, following in itertools.pairwise([*body, None]):
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            numbers = [value for value in constants if type(value) in (int, float)]
            if not isinstance(node, ast.Assign) or not numbers or not ast.unparse(node.targets[0]).isupper():
                continue
            said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not said and "#" not in lines[node.lineno - 1] and not lines[node.lineno - 2].startswith("#"):
                without.append(f"{file.stem}: {lines[node.lineno - 1]}")
    assert not without
