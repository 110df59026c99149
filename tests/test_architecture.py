"""Imports run one way between the layers of the package and inside the engine, which stays small; tests mirror both."""

import ast
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


def imports():
    """(file, layer of the file, imported module) of every import of the package in itself."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                if (
                    module
                    and module.startswith("fewshot_callbacks.")
                    and name in BELOW
                    and module.split(".")[1] in BELOW
                ):
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
        assert "lightning" not in {
            node.module.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }, file


BEHAVIOURS = {
    "docs": ("code_blocks", "sources"),
    "callbacks": (
        *(
            "degenerate",
            "distributed",
            "fit",
            "labels",
            "multilabel",
            "no_trace",
            "random_sets",
            "situations",
            "sources",
        ),
        "variance_ratio",
    ),
    "cli": ("mistakes",),
    "metrics": ("labels",),
}
"""Folder -> test files that are named after what all modules of the folder do, not after one of them."""


def test_every_test_file_is_named_after_a_module():
    """`test_module.py` or, for a part of it, `test_module_part.py`, in the folder of the module.

    Tests of the engine are named after what it does, whichever of its modules do it.
    """
    behaviours = {(folder, name) for folder, names in BEHAVIOURS.items() for name in names}
    wrong = []
    for file in TEST_FILES:
        folder, name = file.parent.relative_to(TESTS), file.stem.removeprefix("test_")
        where = PACKAGE / folder if (PACKAGE / folder).is_dir() and folder != Path() else ROOT / folder
        modules = [part.stem.strip("_") for part in where.glob("*.py")] + [part.name for part in where.glob("*/")]
        if folder in (Path(), Path("engine")) or any(
            name == module or name.startswith(f"{module}_") for module in modules
        ):
            continue
        if (str(folder), name) not in behaviours:
            wrong.append(str(file.relative_to(ROOT)))
    assert not wrong


TESTED_WITH = {
    "_terminal": "cli/test_evaluate",
    "_trainer": "callbacks/test_training_dynamics",
    "callbacks/_embedder": "callbacks/test_generalization_gap",
    "callbacks/_evaluation": "callbacks/test_situations",
    "callbacks/_failures": "callbacks/test_embeddings",
    "callbacks/_progress": "callbacks/test_retrieval",
    "callbacks/_schedule": "callbacks/test_generalization_gap",
    "callbacks/_targets": "callbacks/test_multilabel",
    "callbacks/_training_classes": "callbacks/test_generalization_gap",
    "callbacks/_viewers": "callbacks/test_pictures",
    "callbacks/_watched": "callbacks/test_fit",
    "cli/_checkpoint": "cli/test_mistakes",
    "cli/_configuration": "cli/test_mistakes",
    "cli/_demo_run": "cli/test_demo",
    "cli/_options": "cli/test_mistakes",
    "cli/curves": "cli/test_demo",
    "cli/plan": "cli/test_main",
    "data/_augmentation": "data/test_glyphs",
    "data/_cache": "data/test_glyphs",
    "data/_glyph_drawing": "data/test_glyphs",
    "data/batches": "data/test_data_module",
    "data/dataset": "data/test_data_module",
    "data/image_set": "data/test_image_folder",
    "distributed/processes": "engine/test_processes",
    "functional/_codes": "functional/retrieval/test_settings",
    "functional/_scatter_kernel": "functional/test_variance_ratio",
    "functional/_tensors": "functional/test_inputs",
    "functional/episodes/protocol": "protonet/test_module",
    "functional/neighbours/inputs": "functional/neighbours/test_nearest",
    "functional/retrieval/label_groups": "functional/retrieval/test_grouped_recall",
    "functional/retrieval/query_metrics": "functional/retrieval/test_evaluate",
    "functional/retrieval/report": "functional/retrieval/test_evaluate",
    "functional/retrieval/threshold_search": "functional/retrieval/test_operating_points",
    "losses/histograms": "losses/test_average_precision",
    "metrics/_class_moments": "metrics/test_discriminant_ratio",
    "metrics/_sync": "metrics/test_embedding_store",
    "metrics/_words": "metrics/test_labels",
    "plots/operating_marks": "callbacks/test_score_plots",
    "protonet/_divergence": "protonet/test_module",
    "protonet/evaluation": "protonet/test_module",
    "protonet/pieces": "protonet/test_embedding_module",
    "report/content": "report/test_page",
    "report/findings": "report/test_page",
    "report/settings": "report/test_page",
}
"""Module without a test file of its name -> the test file of what it is a part of."""


def test_every_module_has_a_test_file():
    """Of its own name, or the one that `TESTED_WITH` names."""
    without = set()
    for file in PACKAGE.rglob("*.py"):
        folder, name = file.parent.relative_to(PACKAGE), file.stem.strip("_")
        if folder != Path("engine") and file.stem != "__init__" and not list((TESTS / folder).glob(f"test_{name}*.py")):
            without.add(str(folder / file.stem))
    assert without == set(TESTED_WITH)
    assert {test for test in TESTED_WITH.values() if not (TESTS / f"{test}.py").is_file()} == set()


def test_no_test_imports_a_test():
    """What tests have in common stands in modules of its own."""
    wrong = [
        f"{file.relative_to(ROOT)} imports {node.module}"
        for file in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests.")
        if any(part.startswith("test_") for part in [*node.module.split("."), *(alias.name for alias in node.names)])
    ]
    assert not wrong


def test_every_test_file_says_what_it_holds():
    assert [file for file in TEST_FILES if not ast.get_docstring(ast.parse(file.read_text()))] == []


ENGINE = PACKAGE / "engine"
LINE = (
    *("options", "compiled", "threads", "layout", "exact", "vectors", "relevance", "counting", "visits"),
    *("device", "tiles", "ranks", "collecting", "pooled", "distinct", "precision", "evaluation", "nearest"),
)
"""The modules of the engine in an order in which each imports those before it alone: so it can be read."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_ARGUMENTS_OF_A_LOOP = 2720, 60, 10
"""What the engine had when it was as small as it could be made, 2,600 lines, and 120 for tiles that stay on a GPU: without
these, that road took ten times as long. Whoever needs more may look first for what can go."""

DECORATORS = {"kernel", "inlined", "always_inlined", "allocating", "any_order"}
"""Of the functions that are compiled."""


def code_lines(text):
    """Numbers of the lines with code: no blank lines, no comments and no docstrings of modules, classes and functions."""
    code, docstrings = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - docstrings


def functions_of_the_engine():
    """(file, function, its lines of code) of every function and method."""
    for file in ENGINE.glob("*.py"):
        text = file.read_text()
        code = code_lines(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield file.stem, node, sum(node.lineno <= line <= node.end_lineno for line in code)


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
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fewshot_callbacks.engine")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not wrong


def test_the_engine_stays_small():
    assert sum(len(code_lines(file.read_text())) for file in ENGINE.glob("*.py")) <= MOST_LINES


def test_functions_of_the_engine_stay_short():
    long = [f"{file}.{node.name}: {lines}" for file, node, lines in functions_of_the_engine()]
    assert not [name for name in long if int(name.split(": ")[1]) > MOST_LINES_OF_A_FUNCTION]


def test_compiled_loops_have_few_arguments():
    compiled = [
        (file, node)
        for file, node, _ in functions_of_the_engine()
        if DECORATORS & {ast.unparse(decorator) for decorator in node.decorator_list}
    ]
    assert len(compiled) > 20
    assert not [f"{file}.{node.name}" for file, node in compiled if len(node.args.args) > MOST_ARGUMENTS_OF_A_LOOP]


def test_the_engine_says_why():
    """Each module says what it is for; each number that somebody chose has its reason beside it."""
    without = []
    for file in (ENGINE / f"{name}.py" for name in LINE):
        text = file.read_text()
        lines, body = text.split("\n"), ast.parse(text).body
        assert ast.get_docstring(ast.parse(text)), file
        for node, following in itertools.pairwise([*body, None]):
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            numbers = [value for value in constants if type(value) in (int, float)]
            if not isinstance(node, ast.Assign) or not numbers or not ast.unparse(node.targets[0]).isupper():
                continue
            said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not said and "#" not in lines[node.lineno - 1] and not lines[node.lineno - 2].startswith("#"):
                without.append(f"{file.stem}: {lines[node.lineno - 1]}")
    assert not without
