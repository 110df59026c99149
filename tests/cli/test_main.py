"""The command itself: its help, `fewshot plan`, and what importing the package loads."""

import dataclasses
import json
import math
import platform
import runpy
import subprocess
import sys
import warnings
from importlib.metadata import version

import numpy as np
import pytest

import fewshot_callbacks
from fewshot_callbacks.cli.main import COMMANDS, main
from fewshot_callbacks.cli.options import OPTIONS
from fewshot_callbacks.functional import plan_evaluation
from tests.messages import missing_facts, refused


def test_without_words_it_explains_itself(capsys):
    assert main([]) == 2
    screen = " ".join(capsys.readouterr().out.split())
    for name, text in COMMANDS.items():
        assert f"{name} {text}"[:30] in screen


def test_an_unknown_command_names_the_nearest_or_all(capsys):
    assert main(["evalute"]) == 2
    said = capsys.readouterr().err
    assert missing_facts(said, ("fewshot", "evalute", *COMMANDS)) == [name for name in COMMANDS if name != "evaluate"]
    assert main(["xyz"]) == 2
    assert missing_facts(capsys.readouterr().err, ("xyz", *COMMANDS)) == []


def test_version_says_what_a_bug_report_asks_for(capsys, monkeypatch):
    module = sys.modules["fewshot_callbacks.cli.main"]  # the package has a function of that name
    monkeypatch.setattr(module, "REPORTED_PACKAGES", ("torch", "no-such-package"))
    assert main(["--version"]) == 0
    own, system, others = capsys.readouterr().out.splitlines()
    assert own == f"fewshot_callbacks {fewshot_callbacks.__version__}"
    assert system == f"Python {platform.python_version()}, {platform.platform()}"
    assert others == f"torch {version('torch')}, no-such-package not installed"


def test_a_warning_of_the_command_is_its_words_alone(monkeypatch, capsys):
    """Which line of which file of the package warns is of no use to who types a command; developers want it."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    monkeypatch.setattr(sys, "argv", ["fewshot", "--version"])
    with refused(SystemExit, 0):
        runpy.run_module("fewshot_callbacks", run_name="__main__")
    assert warnings.formatwarning("Mind the gap.", UserWarning, "file.py", 3) == "Warning: Mind the gap.\n"
    assert "file.py:3: DeprecationWarning: Old." in warnings.formatwarning("Old.", DeprecationWarning, "file.py", 3)


def planned(capsys, *words):
    assert main(["plan", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_plan_of_the_whole_logo_set(capsys):
    words = ["--queries", "158652", "--gallery", "158,652", "--dim", "512"]
    plan = json.loads(planned(capsys, *words, "--json"))
    assert (plan["pairs"], plan["floating_point_operations"]) == (158652**2, 2 * 512 * 158652**2)
    assert (plan["matrix_bytes"], plan["memory_bytes"]) == (4 * 158652**2, 512 * 10**6)
    screen = planned(capsys, *words)
    assert "25,170,457,104" in screen
    assert "325 MB + 325 MB" in screen  # two sets
    assert "101 GB" in screen


def test_plan_of_files(tmp_path, capsys):
    for part in range(2):
        np.save(tmp_path / f"{part}.npy", np.ones((500, 8), np.float16))
    words = ["--files", tmp_path / "*.npy"]
    plan = json.loads(planned(capsys, *words, "--json"))
    assert (plan["queries"], plan["gallery"], plan["dim"], plan["gallery_bytes"]) == (1000, 1000, 8, 16_000)
    assert plan["bytes_read"] == plan["reads"] * 16_000
    assert plan["bytes_per_second"] > 0
    assert "│ 16 kB │ one set" in " ".join(planned(capsys, *words).split())
    some = planned(capsys, *words, "--queries", 20)
    assert "20 queries against 1,000 items" in some
    assert "│ 320 B + 16 kB │" in " ".join(some.split())
    assert main(["plan", *map(str, words), "--dim", "8"]) == 1
    assert missing_facts(capsys.readouterr().err, ("--dim", "--gallery")) == []
    assert main(["plan", "--queries", "5"]) == 1
    assert missing_facts(capsys.readouterr().err, ("--queries", "--dim", "--files")) == []


@pytest.mark.slow
def test_plan_measures_the_evaluation_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["plan", "--queries", "200", "--dim", "4", "--here"]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    here = json.loads(captured.out)["here"]
    assert (here["queries"], here["gallery"], here["dim"]) == (200, 200, 4)
    assert 0 < here["low_seconds"] <= here["high_seconds"]
    assert missing_facts(captured.err, ("fewshot plan", "ten seconds")) == []
    embeddings = np.random.default_rng(0).standard_normal((300, 4), dtype=np.float32)
    np.savez(tmp_path / "set.npz", embeddings=embeddings, labels=np.arange(300) % 30, other=np.arange(300) % 60)
    for more in ([], ["--labels", "other"]):  # in memory, and row by row from the file
        said = planned(capsys, "--files", tmp_path / "set.npz", "--here", *more)
        assert missing_facts(said, ("measured", "this machine", "memory beyond them")) == []


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--difficulty", "hard"], ("--difficulty", "--here")),
        (["--labels", "label"], ("--labels", "--here")),
        (["--here", "--labels", "label"], ("--labels", "files")),
    ],
)
def test_plan_refuses_options_that_change_nothing(words, facts, capsys):
    assert main(["plan", "--queries", "9", "--dim", "3", *words]) == 1
    assert missing_facts(capsys.readouterr().err, facts) == []


def test_plan_here_of_files_needs_their_labels(tmp_path, capsys):
    np.save(tmp_path / "set.npy", np.ones((9, 3), np.float32))
    assert main(["plan", "--files", str(tmp_path / "set.npy"), "--here"]) == 1
    assert missing_facts(capsys.readouterr().err, ("set.npy", "'labels'", "--here")) == []
    assert main(["plan", "--files", str(tmp_path / "set.npy"), "--here", "--difficulty", "hard"]) == 1
    assert missing_facts(capsys.readouterr().err, ("--difficulty", "--files")) == []


def test_plan_of_a_budget_that_cannot_be_kept_names_one_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--queries", "1000000", "--gallery", "1000000", "--dim", "64", "--memory_mb"]
    enough = math.ceil(plan_evaluation(10**6, 10**6, 64).least_bytes / 1e6)
    said = planned(capsys, *words, 64)
    assert missing_facts(said, ("budget", "64 MB", f"--memory_mb {enough}")) == []
    assert "of 64 MB │" not in said  # nor is another number given
    said = planned(capsys, *words, enough)
    assert f"of {enough} MB │" in said
    assert "--memory_mb" not in said


def test_plan_of_a_sample_in_half_precision_without_a_limit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--queries", "1e6", "--dim", "64", "--max_queries", "5000", "--dtype", "float16", "--memory_mb", "inf"]
    said = planned(capsys, *words)
    assert "5,000 queries, drawn from 1,000,000 against 1,000,000 items" in said
    assert "│ 128 MB │ one set, both queries and gallery, in float16" in " ".join(said.split())
    assert "256 MB │ in float32, which half precision is compared as" in said
    assert "there is no limit" in said


def lines_of_fresh_python(code, *words):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


IMPORTED_TWICE = """
import sys, torch, lightning.pytorch, torchmetrics
before = set(sys.modules)
import fewshot_callbacks
print(*sorted(m for m in set(sys.modules) - before if not m.startswith("fewshot_callbacks")))
for name in [m for m in sys.modules if m.split(".")[0] in ("torchvision", "fewshot_callbacks")]: del sys.modules[name]
sys.modules["torchvision"] = None
import fewshot_callbacks as f
for name in f.__all__: getattr(f, name)
f.ProtoNet("conv4", in_channels=1)
print("fine")
"""


def test_importing_adds_little_and_no_torchvision_before_an_image_model_or_folder():
    """At most 0.3 s beyond torch and lightning is promised; what is imported is asserted, which no machine's load moves.

    What lightning and torchmetrics import is theirs, and takes seconds: once for both halves of this. A torchvision that is
    broken afterwards must not matter.
    """
    added, fine = lines_of_fresh_python(IMPORTED_TWICE)
    assert fine == "fine"
    assert len(added.split()) < 10, added


ONE_AFTER_THE_OTHER = """
import gc, io, sys
from contextlib import redirect_stdout

def found(label, names):
    print(label, gc.isenabled(), *[name for name in names.split() if name in sys.modules])

def run(*words):
    with redirect_stdout(io.StringIO()) as screen:
        try: status = main(words)
        except SystemExit as stop: status = stop.code
    assert status in (0, None) and screen.getvalue(), words

from fewshot_callbacks.cli.main import COMMANDS, main
from fewshot_callbacks.cli.options import OPTIONS
for words in (["--help"], *([name, "--help"] for name in COMMANDS)): run(*words)
found("help", "torch numpy numba lightning rich")
large = "lightning torchvision torchmetrics matplotlib tensorboard sklearn"
from fewshot_callbacks import evaluate_retrieval, discriminant_ratio
found("maths", large + " rich")
folder = sys.argv[1]
run("plan", "--queries", "9", "--dim", "2")
run("evaluate", folder + "/e.npz")
found("plan and evaluate", large + " PIL jinja2")
run("report", folder + "/e.npz", "-o", folder + "/e.html")
found("report", large)
"""


def test_commands_and_the_maths_import_what_they_need(tmp_path):
    embeddings = np.random.default_rng(0).standard_normal((12, 4), dtype=np.float32)
    np.savez(tmp_path / "e.npz", embeddings=embeddings, labels=np.arange(12) % 3)
    found = lines_of_fresh_python(ONE_AFTER_THE_OTHER, str(tmp_path))
    assert found == ["help True", "maths True", "plan and evaluate True", "report True"]


def test_a_plan_of_any_dimension_times_a_product_that_fits(capsys):
    assert main(["plan", "--queries", "1e18", "--dim", "9e18"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out


NAMES = """
import fewshot_callbacks
import fewshot_callbacks.functional

print([name for name in dir(fewshot_callbacks) if not name.startswith("__") and name not in fewshot_callbacks.__all__])
print([name for name in ("callbacks", "metrics", "evaluate_retrieval") if not hasattr(fewshot_callbacks, name)])
try:
    from fewshot_callbacks import RetrievalMonitors
except ImportError as error:
    print(error)
try:
    from fewshot_callbacks import something_else_altogether
except ImportError as error:
    print(str(error).partition(" (")[0])
from fewshot_callbacks import functional
print(hasattr(fewshot_callbacks, "RetrievalMonitors"))
"""


def test_dir_shows_public_names_and_a_misspelt_import_is_an_import_error():
    public, missing, misspelt, unknown, is_there = lines_of_fresh_python(NAMES)
    assert all(f"'{word}'" not in public for word in ("Any", "Path", "ast", "import_module", "annotations"))
    assert "'functional'" in public
    assert missing == "['callbacks', 'metrics']"  # no submodule before it is imported
    # From Python 3.12 on, the traceback adds the name that is near.
    assert missing_facts(misspelt, ("'RetrievalMonitors'", "'fewshot_callbacks'")) == []
    assert missing_facts(unknown, ("'something_else_altogether'", "'fewshot_callbacks'")) == []
    assert is_there == "False"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_plan_says_which_files_are_passed_over(form, tmp_path, capsys):
    np.save(tmp_path / "part-0.npy", np.ones((50, 8), np.float16))
    (tmp_path / "._part-0.npy").write_text("of a Mac")
    assert main(["plan", "--files", str(tmp_path), *form]) == 0
    said = capsys.readouterr()
    assert missing_facts(said.err, ("skipped", "._part-0.npy 1")) == []
    assert said.err.startswith("note: ")
    assert bool(form) == said.out.startswith("{")


def test_an_option_without_a_line_in_the_docstring_is_named(monkeypatch, capsys):
    @dataclasses.dataclass
    class Scale:
        """Scale.

        Args:
            file: The file.
        """

        file: str
        factor: float = 1.0

    monkeypatch.setitem(OPTIONS, "plan", Scale)
    assert main(["plan", "a.npy"]) == 1
    said = capsys.readouterr().err
    assert missing_facts(said, ("docstring", "Scale", "factor", "Args")) == []
