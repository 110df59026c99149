"""Doors of the house: imports run one way between layers and inside the engine; functions are short, loops take little."""

import ast
import functools
import io
import itertools
import tokenize
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.docs.tables import names_of_tests, rows

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "fewshot_callbacks", ROOT / "tests"
TEST_FILES = sorted(TESTS.rglob("test_*.py"))

BELOW = {
    "errors": set(),
    "settings": set(),
    "system": set(),
    "distributed": set(),
    "files": {"system", "distributed"},
    "storage": {"files", "system"},
    "engine": {"settings", "storage", "files", "distributed", "system"},
    "functional": {"settings", "engine", "storage", "files", "distributed", "system"},
    "losses": {"functional"},
    "metrics": {"settings", "functional", "distributed", "system"},
    "plots": {"functional", "files", "system"},
    "report": {"settings", "plots", "functional", "files", "system"},
    "integrations": {"settings", "metrics", "functional", "distributed", "system"},
    "trainer": {"distributed"},
    "data": {"trainer", "functional", "files", "system"},
    "protonet": {"trainer", "metrics", "losses", "functional", "distributed", "system"},
    "callbacks": {
        "settings",
        "protonet",
        "trainer",
        "report",
        "plots",
        "metrics",
        "functional",
        "files",
        "distributed",
        "system",
    },
    "cli": {
        *("callbacks", "protonet", "trainer", "data", "report", "plots", "metrics", "losses", "functional"),
        *("engine", "storage", "files", "distributed", "system", "settings"),
    },
}
BELOW |= {layer: below | {"errors"} for layer, below in BELOW.items() if layer != "errors"}
"""Layer, a folder or a module at the top of the package, -> the layers that it may import."""

ENTRIES = {"__init__", "__main__"}
"""Modules at the top of the package that are no layer: what is imported, and what is run."""


@functools.cache
def nodes(file, *kinds):
    """All nodes of these kinds of a file, or all of them."""
    every = tuple(ast.walk(ast.parse(file.read_text()))) if not kinds else nodes(file)
    return [node for node in every if not kinds or isinstance(node, kinds)]


def modules_of(node):
    """The full names of what an import of the package in itself may import: each may be a module, or a name in one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    # `from package import module` imports a module, too, at any depth
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


def modules_in_words(file):
    """The modules that a file imports by a string: `import_module("package.module")`, also with a variable at the end."""
    for call in nodes(file, ast.Call):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("import_module", "__import__") and call.args:
            word = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else call.args[0]
            if isinstance(word, ast.Constant):
                yield word.value.rstrip(".")


def imports(package=PACKAGE):
    """(file, layer of the file, imported module) of every import of the package in itself, by a file of a layer."""
    for file in sorted(package.rglob("*.py")):
        layer = file.relative_to(package).parts[0].removesuffix(".py")
        if layer in ENTRIES:
            continue
        modules = list(modules_in_words(file))
        for node in nodes(file, ast.ImportFrom, ast.Import):
            assert getattr(node, "level", 0) == 0, f"{file} imports from a dot: write the name of the package"
            modules += modules_of(node)
        for module in modules:
            parts = module.split(".")
            if parts[0] == "fewshot_callbacks" and parts[1:] not in ([], ["__version__"]):
                yield file.relative_to(package), layer, ".".join(parts[1:])


def wrong_imports(package=PACKAGE):
    """Those that do not point down, between layers or inside the engine."""
    wrong = set()
    for file, layer, module in imports(package):
        target, _, inside = module.partition(".")
        if target != layer and target not in BELOW.get(layer, ()):
            wrong.add(f"{file} imports {target}")
        if layer == target == "engine" and inside in LINE:
            importer = ".".join(file.with_suffix("").parts[1:])
            if importer in LINE and LINE.index(inside) >= LINE.index(importer):
                wrong.add(f"{file} imports {inside}")
    return sorted(wrong)


def outside_of_layers(package=PACKAGE):
    """Folders and modules at the top of the package that are no layer."""
    folders = {path.parent.name for path in package.glob("*/*.py")}
    modules = {path.stem for path in package.glob("*.py")} - ENTRIES
    return sorted((folders | modules) - set(BELOW))


def test_every_module_belongs_to_a_layer():
    assert outside_of_layers() == []


def test_every_layer_is_a_folder_or_a_module():
    there = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(BELOW) <= there


@pytest.mark.parametrize("file", ["helpers.py", "helpers/new.py"])
def test_a_planted_module_without_a_layer_is_found(file, tmp_path):
    planted = tmp_path / file
    planted.parent.mkdir(exist_ok=True)
    planted.touch()
    assert outside_of_layers(tmp_path) == ["helpers"]


def test_layers_stand_above_those_that_they_import():
    """So none imports itself through others."""
    layers = list(BELOW)
    assert [
        (layer, other) for layer in layers for other in BELOW[layer] if other not in layers[: layers.index(layer)]
    ] == []


def test_imports_point_down():
    assert wrong_imports() == []


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("functional/new.py", "from fewshot_callbacks import callbacks", "functional/new.py imports callbacks"),
        ("functional/new.py", "from fewshot_callbacks import plots as p", "functional/new.py imports plots"),
        ("settings.py", 'import_module("fewshot_callbacks.functional.settings")', "settings.py imports functional"),
        ("files/new.py", 'importlib.import_module(f"fewshot_callbacks.cli.{x}")', "files/new.py imports cli"),
        ("files/new.py", '__import__("fewshot_callbacks.cli")', "files/new.py imports cli"),
        ("functional/new.py", "import fewshot_callbacks.cli.main", "functional/new.py imports cli"),
        ("callbacks/new.py", "from fewshot_callbacks.engine import ranks", "callbacks/new.py imports engine"),
        ("callbacks/new.py", "def f():\n    from fewshot_callbacks import engine", "callbacks/new.py imports engine"),
        ("callbacks/new.py", "from fewshot_callbacks.engine.ranks import RankBlock", "callbacks/new.py imports engine"),
        ("metrics.py", "from fewshot_callbacks import cli", "metrics.py imports cli"),
        ("files/new.py", "from fewshot_callbacks.storage import Shards", "files/new.py imports storage"),
        ("storage/new.py", "from fewshot_callbacks.engine import ranks", "storage/new.py imports engine"),
        ("trainer/new.py", "from fewshot_callbacks import protonet", "trainer/new.py imports protonet"),
        ("functional/new.py", "from fewshot_callbacks import helpers", "functional/new.py imports helpers"),
        ("engine/exact.py", "from fewshot_callbacks.engine import ranks", "engine/exact.py imports ranks"),
        ("engine/exact.py", "import fewshot_callbacks.engine.ranks as r", "engine/exact.py imports ranks"),
    ],
)
def test_a_planted_import_is_found(file, line, said, tmp_path):
    planted = tmp_path / file
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(f"{line}\n")
    assert wrong_imports(tmp_path) == [said]


def circles(package=PACKAGE):
    """A circle of modules that import one another, also inside functions; none if there is no circle.

    The `__init__` of a folder, which lists names for users, is no module here.
    """
    modules = {".".join(file.relative_to(package).with_suffix("").parts): file for file in package.rglob("*.py")}
    modules = {name: file for name, file in modules.items() if file.stem not in ENTRIES}
    below = {name: set() for name in modules}
    for file, _, module in imports(package):
        importer = ".".join(file.with_suffix("").parts)
        if importer in modules and module in modules:
            below[importer].add(module)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_one_another():
    assert circles() == []


def test_a_planted_circle_is_found(tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli/fit.py").write_text("from fewshot_callbacks.cli import compare")
    assert circles(tmp_path) == []
    (tmp_path / "cli/compare.py").write_text("def f():\n    from fewshot_callbacks.cli.fit import run")
    assert set(circles(tmp_path)) == {"cli.fit", "cli.compare"}


def classes_of_one_name(package=PACKAGE):
    """Class name without underscores -> the files that define such a class, for names with several."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        for node in nodes(file, ast.ClassDef):
            files.setdefault(node.name.strip("_"), []).append(str(file.relative_to(package)))
    return {name: found for name, found in files.items() if len(found) > 1}


def test_each_class_name_has_one_class():
    assert classes_of_one_name() == {}


def test_a_planted_second_class_of_one_name_is_found(tmp_path):
    (tmp_path / "one.py").write_text("class Report: ...")
    (tmp_path / "two.py").write_text("class _Report: ...")
    assert classes_of_one_name(tmp_path) == {"Report": ["one.py", "two.py"]}


WITHOUT_LIGHTNING = [
    "system",
    "distributed",
    "files",
    "storage",
    "engine",
    "functional",
    "losses",
    "plots",
    "report",
    "integrations",
]


@pytest.mark.parametrize("layer", WITHOUT_LIGHTNING)
def test_the_maths_knows_no_lightning(layer):
    for file in (PACKAGE / layer).rglob("*.py"):
        imported = {name.split(".")[0] for node in nodes(file, ast.ImportFrom, ast.Import) for name in modules_of(node)}
        assert not imported & {"lightning", "pytorch_lightning", "lightning_fabric"}, file


def test_one_module_imports_lightning():
    """Which of its two packages, is decided there. The command alone works with one of them, always."""
    other = {"lightning", "pytorch_lightning", "lightning_fabric"}
    assert {
        file.relative_to(PACKAGE).parts[0]
        for file in set(PACKAGE.rglob("*.py")) - {PACKAGE / "trainer" / "lightning.py"}
        for node in nodes(file, ast.ImportFrom, ast.Import)
        for name in modules_of(node)
        if name.split(".")[0] in other
    } == {"cli"}


def test_no_test_imports_a_test():
    """What tests have in common stands in modules of its own."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in TESTS.rglob("*.py")
        for node in nodes(file, ast.ImportFrom, ast.Import)
        for module in modules_of(node)
        if module.split(".")[0] == "tests" and any(part.startswith("test_") for part in module.split("."))
    ]
    assert not wrong


def test_every_test_file_says_what_it_holds():
    assert [file for file in TEST_FILES if not ast.get_docstring(nodes(file)[0])] == []


ENGINE = PACKAGE / "engine"
LINE = (
    *("options", "compiled", "layout", "exact", "relevance", "counting", "counted_values", "device"),
    *("candidate_buffer", "operands", "int8", "scale", "operand_rows", "duplicates", "vectors", "shared_layout"),
    *("chunks", "exchange", "gallery", "observers", "backends", "tile_operands", "tiles", "thresholds"),
    *("precision", "ranks", "pooled.grid", "pooled.sample", "pooled.collector", "pooled.bounds", "pooled.negatives"),
    *("pooled.questions", "twins", "distinct_loops", "distinct", "tiled_rows", "evaluation"),
    *("pooled.search", "pooled.areas", "nearest", "scored_pairs"),
)
"""The modules of the engine in an order in which each imports those before it alone: so it can be read."""

MOST_ARGUMENTS_OF_A_LOOP, MOST_LINES_OF_A_FUNCTION = 10, 60

DECORATORS = {"kernel", "inner_kernel", "inlined", "always_inlined", "any_order"}
"""Of the functions that are compiled."""

WITHOUT_WRAPPER = {"inner_kernel", "inlined", "any_order"}
"""Of those that only other loops can call."""


@functools.cache
def lines_of(file):
    """Numbers of the lines with code: no blank lines, no comments, no docstrings."""
    code, docstrings = set(), set()
    for node in nodes(file, ast.Module, ast.ClassDef, ast.FunctionDef):
        if ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    other = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type not in other:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - docstrings


def functions_in(files):
    """(file, function, its lines of code) of every function and method."""
    for file in files:
        for node in nodes(file, ast.FunctionDef):
            yield file.stem, node, sum(node.lineno <= line <= node.end_lineno for line in lines_of(file))


def test_the_line_of_the_engine_has_all_of_its_modules():
    files = [file.relative_to(ENGINE).with_suffix("") for file in ENGINE.rglob("*.py") if file.stem != "__init__"]
    assert {".".join(file.parts) for file in files} == set(LINE)


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


OURS_IN_NAME_ONLY = {
    *("_computed", "_enable_grad", "_should_unsync", "_to_sync", "_update_count"),  # set on a metric of torchmetrics
    "_fill_text",  # overrides a method of argparse
    "_class_path",  # a key of jsonargparse
    "_instantiator",  # a key of Lightning
    "_locator_classes",  # overrides an attribute of numba
    "_nrt",  # an option of numba
}
"""Private names of other libraries that an assignment, a definition or a string in the package looks like its own."""

NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
"""Public, in spite of their names."""

INTERNAL = ("numba.core", "numba.misc")
"""Modules that numba documents as internal."""


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != "" and name not in NAMED_TUPLE


def own_names(layer):
    """The names that a layer defines: functions, classes, variables and attributes of `self`."""
    for file in layer.rglob("*.py"):
        for node in nodes(file, ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr if ast.unparse(node.value) == "self" else ""


def names_in(node):
    """The names that a node of a file uses: attributes, imports from elsewhere, and names in strings."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for module in modules_of(node):
            if module.split(".")[0] not in ("fewshot_callbacks", "__future__"):
                yield from module.split(".")
    elif isinstance(node, ast.Constant) and node.value in OURS_IN_NAME_ONLY:
        yield node.value
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
        word = node.args[1].values[0] if isinstance(node.args[1], ast.JoinedStr) else node.args[1]
        yield from [word.value] if isinstance(word, ast.Constant) else []


def private_parts_of_others(package=PACKAGE):
    """(file, name) of the private attributes and modules of other libraries that the package uses."""
    found = set()
    for layer in {file.relative_to(package).parts[0] for file in package.rglob("*.py")}:
        files = [*(package / layer).rglob("*.py")] or [package / layer]
        own = set(own_names(package / layer)) - OURS_IN_NAME_ONLY
        for file in files:
            for node in nodes(file, ast.Attribute, ast.Import, ast.ImportFrom, ast.Constant, ast.Call):
                names = [name for name in names_in(node) if is_private(name) and name not in own]
                modules = modules_of(node)[:1] if isinstance(node, ast.Import | ast.ImportFrom) else []
                names += [module for module in modules if module.startswith(INTERNAL)]
                found |= {(str(file.relative_to(package)), name) for name in names}
    return found


def listed_private_parts():
    """The rows of the table of docs/project/private_parts.md: files, names, reason, test."""
    return rows((ROOT / "docs/project/private_parts.md").read_text(encoding="utf-8"))


def test_a_page_lists_the_private_parts_of_other_libraries():
    listed = {
        (file, name)
        for files, names, *_ in listed_private_parts()
        for file in files.split("`")[1::2]
        for name in names.split("`")[1::2]
    }
    assert private_parts_of_others() == listed


def test_each_listed_private_part_has_a_test():
    for *_, test in listed_private_parts():
        file, _, name = test.strip("`").partition("::")
        assert name in names_of_tests(file), test


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("trainer._results", ["_results"]),
        ("from torch.nn.modules.batchnorm import _BatchNorm", ["_BatchNorm"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("from numba.core import event", ["numba.core"]),
        ("getattr(module, '_orig_mod')", ["_orig_mod"]),
        ("setattr(self, f'__pl_saved_{name}', value)", ["__pl_saved_"]),
        ("options = {'_nrt': False}", ["_nrt"]),
        ("self._update_count = 1", ["_update_count"]),
        ("module._buffers = {}", ["_buffers"]),
        ("self._rows = row._replace(length=self._rows)", []),
    ],
)
def test_a_planted_private_part_is_found(line, names, tmp_path):
    planted = tmp_path / "trainer" / "new.py"
    planted.parent.mkdir()
    planted.write_text(f"{line}\n")
    assert private_parts_of_others(tmp_path) == {("trainer/new.py", name) for name in names}


def test_functions_are_short():
    long = [node.name for _, node, lines in functions_in(PACKAGE.rglob("*.py")) if lines > MOST_LINES_OF_A_FUNCTION]
    assert long == []


def test_compiled_loops_have_few_arguments():
    compiled = [(file, node) for file, node, _ in functions_in(ENGINE.rglob("*.py")) if is_decorated(node, DECORATORS)]
    assert compiled
    assert not [f"{file}.{node.name}" for file, node in compiled if len(node.args.args) > MOST_ARGUMENTS_OF_A_LOOP]


def is_decorated(node, decorators):
    """Whether a function has one of these decorators."""
    return bool(decorators & {ast.unparse(decorator) for decorator in node.decorator_list})


def loops_without_wrapper(folder):
    """Names of the loops in a folder that only other loops can call."""
    functions = [node for file in sorted(folder.rglob("*.py")) for node in nodes(file, ast.FunctionDef)]
    return {node.name for node in functions if is_decorated(node, WITHOUT_WRAPPER)}


def calls_of_python(file, loops):
    """Calls of these loops that stand in no loop: of one of the file, of an imported one, or as `module.loop`."""
    functions = nodes(file, ast.FunctionDef)
    callers = [range(node.lineno, node.end_lineno + 1) for node in functions if is_decorated(node, DECORATORS)]
    own = {node.name for node in functions if is_decorated(node, WITHOUT_WRAPPER)}
    imported = {
        alias.name
        for node in nodes(file, ast.ImportFrom)
        if (node.module or "").startswith("fewshot_callbacks.engine")
        for alias in node.names
    }
    called = (loops & (own | imported)) | {f"{module}.{name}" for module in LINE for name in loops}
    return [
        f"{file.name}:{node.lineno} {ast.unparse(node.func)}"
        for node in nodes(file, ast.Call)
        if ast.unparse(node.func) in called and not any(node.lineno in lines for lines in callers)
    ]


def test_python_calls_no_loop_that_only_loops_can_call():
    """A loop without a wrapper for Python ends the process that calls it."""
    loops = loops_without_wrapper(ENGINE)
    files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("studies/*.py")]
    assert len(loops) > 10
    assert not [call for file in files for call in calls_of_python(file, loops)]


@pytest.mark.parametrize("call", ["exact_score(1)", "exact.exact_score(1)"])
def test_a_planted_call_of_a_loop_without_a_wrapper_is_found(call, tmp_path):
    lines = [
        "from fewshot_callbacks.engine.exact import exact_score",
        "@kernel",
        "def loop():",
        "    exact_score(1)",
        "def function():",
        f"    {call}",
    ]
    (tmp_path / "module.py").write_text("\n".join(lines))
    assert calls_of_python(tmp_path / "module.py", {"exact_score"}) == [f"module.py:6 {call.removesuffix('(1)')}"]


def test_the_engine_says_why():
    """Each module says what it is for; each number that somebody chose has its reason beside it."""
    without = []
    for file in (ENGINE / f"{name.replace('.', '/')}.py" for name in LINE):
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
