"""Imports run one way between the layers of the package, the engine is entered by its door, and tests mirror both."""

import ast
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
    "docs": ("code_blocks",),
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
    """`test_module.py` or, for a part of it, `test_module_part.py`, in the folder of the module."""
    behaviours = {(folder, name) for folder, names in BEHAVIOURS.items() for name in names}
    wrong = []
    for file in TEST_FILES:
        folder, name = file.parent.relative_to(TESTS), file.stem.removeprefix("test_")
        where = PACKAGE / folder if (PACKAGE / folder).is_dir() and folder != Path() else ROOT / folder
        modules = [part.stem.strip("_") for part in where.glob("*.py")] + [part.name for part in where.glob("*/")]
        if folder == Path() or any(name == module or name.startswith(f"{module}_") for module in modules):
            continue
        if (str(folder), name) not in behaviours:
            wrong.append(str(file.relative_to(ROOT)))
    assert not wrong


TESTED_WITH = {
    "_terminal": "cli/test_evaluate",
    "_trainer": "callbacks/test_training_dynamics",
    "callbacks/_chosen_queries": "callbacks/test_panels",
    "callbacks/_embedder": "callbacks/test_generalization_gap",
    "callbacks/_evaluation": "callbacks/test_situations",
    "callbacks/_failures": "callbacks/test_embeddings",
    "callbacks/_panel_rows": "callbacks/test_panels",
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
    "data/__main__": "data/test_glyphs",
    "data/_augmentation": "data/test_glyphs",
    "data/_cache": "data/test_glyphs",
    "data/_episodic": "data/test_episodes",
    "data/_glyph_drawing": "data/test_glyphs",
    "data/_images": "data/test_folders",
    "data/_sheet": "data/test_glyphs",
    "data/icons/augmentation": "data/icons/test_data_module",
    "data/icons/cache": "data/icons/test_data_module",
    "data/icons/copies": "data/icons/test_data_module",
    "data/icons/drawing": "data/icons/test_data_module",
    "data/icons/sheet": "data/icons/test_data_module",
    "data/icons/splits": "data/icons/test_data_module",
    "distributed/processes": "engine/test_exchange",
    "engine/blocks": "engine/test_ranking_pass",
    "engine/codes/hamming_kernel": "engine/codes/test_hamming_pass",
    "engine/cpu/count_kernels": "engine/cpu/test_tiles",
    "engine/cpu/counter": "engine/cpu/test_tiles",
    "engine/cpu/first_precision": "engine/pooled/test_recount",
    "engine/cpu/products": "engine/cpu/test_tiles",
    "engine/cuda/counter": "engine/cuda/test_tiles",
    "engine/matrix": "engine/test_exchange",
    "engine/open_pass": "engine/test_ranking_pass",
    "engine/options": "engine/test_ranking_pass",
    "engine/pooled/bins": "engine/pooled/test_intervals",
    "engine/pooled/bounds": "engine/pooled/test_recount",
    "engine/pooled/first_counts": "engine/pooled/test_histogram",
    "engine/pooled/record": "engine/pooled/test_highest",
    "engine/pooled/refine": "engine/pooled/test_recount",
    "engine/pooled/relevant_pairs": "engine/pooled/test_recount",
    "engine/pooled/tally": "engine/pooled/test_highest",
    "engine/pytorch/tile": "engine/pytorch/test_count",
    "engine/pytorch/tiles": "engine/pytorch/test_count",
    "engine/ranks": "engine/test_exchange",
    "engine/scores/bounds": "engine/scores/test_products",
    "engine/scores/compare": "engine/scores/test_exact",
    "engine/scores/pairs": "engine/scores/test_products_of_pairs",
    "engine/scores/similarity": "engine/scores/test_exact",
    "engine/scores/vectors": "engine/scores/test_units",
    "engine/thresholds": "engine/test_relevant_scores",
    "engine/tile_maker": "engine/pytorch/test_count",
    "functional/_scatter_kernel": "functional/test_variance_ratio",
    "functional/_tensors": "functional/test_inputs",
    "functional/neighbours/inputs": "functional/neighbours/test_nearest",
    "functional/retrieval/label_groups": "functional/retrieval/test_grouped_recall",
    "functional/retrieval/query_metrics": "functional/retrieval/test_evaluate",
    "functional/retrieval/report": "functional/retrieval/test_evaluate",
    "functional/retrieval/threshold_rules": "functional/retrieval/test_operating_points",
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
        if file.stem != "__init__" and not list((TESTS / folder).glob(f"test_{name}*.py")):
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


DOORS = {
    "engine": PACKAGE / "engine/__init__.py",
    "engine.budget": PACKAGE / "engine/budget.py",
    "engine.codes": PACKAGE / "engine/codes/__init__.py",
    "engine.neighbours": PACKAGE / "engine/neighbours/__init__.py",
    "engine.options": PACKAGE / "engine/options.py",
    "engine.pooled": PACKAGE / "engine/pooled/__init__.py",
    "engine.scores": PACKAGE / "engine/scores/__init__.py",
}
"""What may be imported from the engine outside of it, and where it says which names."""

MOST_NAMES = 7


def names_of(door):
    """The names that a door lists in `__all__`."""
    for node in ast.parse(DOORS[door].read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{door} lists no names")


@pytest.mark.parametrize("door", DOORS)
def test_a_door_of_the_engine_has_few_names(door):
    names = names_of(door)
    assert len(names) <= MOST_NAMES
    assert not [name for name in names if not any(name in imported_from(door, file) for file in outside())], (
        "nobody asks"
    )


def outside():
    """The modules of the package outside the engine, the benchmarks and the tools."""
    own = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] != "engine"]
    return [*own, *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/**/*.py")]


def imported_from(door, file):
    """The names that a file imports from a door."""
    return [
        alias.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == f"fewshot_callbacks.{door}"
        for alias in node.names
    ]


def test_the_engine_is_entered_by_its_doors():
    inner = [
        f"{file} imports {module}"
        for file, layer, module in imports()
        if layer != "engine" and module.startswith("engine") and module not in DOORS
    ]
    assert not inner
    wrong = [
        f"{file} imports {name} from {door}"
        for door in DOORS
        for file in outside()
        if file.is_relative_to(PACKAGE)
        for name in imported_from(door, file)
        if name not in names_of(door)
    ]
    assert not wrong


def test_rooms_of_the_engine_do_not_import_the_pass():
    below = (
        "engine/pooled/histogram",
        "engine/pooled/recount",
        "engine/cpu",
        "engine/cuda",
        "engine/pytorch",
        "engine/scores",
    )
    wrong = [
        f"{file} imports {module}"
        for file, _, module in imports()
        if str(file).startswith(below) and module == "engine.ranking_pass"
    ]
    assert not wrong


def test_the_engine_asks_no_protocol_at_run_time():
    for file in (PACKAGE / "engine").rglob("*.py"):
        assert "runtime_checkable" not in file.read_text(), file
