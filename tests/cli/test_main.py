"""The command itself: its help, `fewshot plan`, and what importing the package loads."""

import json
import math
import platform
import subprocess
import sys
import textwrap
from importlib.metadata import version

import numpy as np
import pytest

import fewshot_callbacks
from fewshot_callbacks._compiling import WORDS
from fewshot_callbacks.cli import main as command
from fewshot_callbacks.cli.main import COMMANDS, main
from fewshot_callbacks.functional import plan_evaluation


def test_without_words_it_explains_itself(capsys):
    assert main([]) == 2
    screen = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert name in screen
        assert text.split()[0] in screen


def test_an_unknown_command_names_the_nearest_or_all(capsys):
    assert command(["evalute"]) == 2
    assert capsys.readouterr().err == "fewshot: there is no command evalute. Did you mean evaluate?\n"
    assert command(["xyz"]) == 2
    assert "There are demo, compare, evaluate, report, trials, plan, fit, validate, test." in capsys.readouterr().err


def test_version_says_what_a_bug_report_asks_for(capsys, monkeypatch):
    module = sys.modules["fewshot_callbacks.cli.main"]  # the package has a function of that name
    monkeypatch.setattr(module, "COMPUTES_WITH", ("torch", "no-such-package"))
    assert main(["--version"]) == 0
    own, system, others = capsys.readouterr().out.splitlines()
    assert own == f"fewshot_callbacks {fewshot_callbacks.__version__}"
    assert system == f"Python {platform.python_version()}, {platform.platform()}"
    assert others == f"torch {version('torch')}, no-such-package not installed"


def test_a_warning_is_its_words_alone():
    """Which line of which file of the package warns is of no use to who types a command."""
    program = """
        import sys, types, warnings
        def run(words):
            warnings.warn("Mind the gap.")
            warnings.warn("Old.", DeprecationWarning)
        sys.modules["fewshot_callbacks.cli.plan"] = types.SimpleNamespace(run=run)
        from fewshot_callbacks.cli import main
        sys.argv = ["fewshot", "plan", "--queries=9", "--dim=2"]
        sys.exit(main())
    """
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    first, second = done.stderr.strip().splitlines()
    assert first == "Warning: Mind the gap."
    assert "DeprecationWarning: Old." in second


def test_an_interrupt_says_so(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fewshot_callbacks.cli.plan.run", interrupted)
    assert main(["plan", "--queries=9", "--dim=2"]) == 130
    assert "Interrupted." in capsys.readouterr().err


def test_plan_of_the_whole_logo_set(capsys):
    words = ["--queries", "158652", "--gallery", "158,652", "--dim", "512"]
    assert main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["pairs"] == 158652**2
    assert plan["floating_point_operations"] == 2 * 512 * 158652**2
    assert plan["matrix_bytes"] == 4 * 158652**2
    assert plan["memory_bytes"] == 512 * 10**6
    assert main(["plan", *words]) == 0
    screen = capsys.readouterr().out
    assert "25,170,457,104" in screen
    assert "101 GB" in screen


def test_plan_of_files(tmp_path, capsys):
    for part in range(2):
        np.save(tmp_path / f"{part}.npy", np.ones((500, 8), np.float16))
    words = ["plan", "--files", str(tmp_path / "*.npy")]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["queries"], plan["gallery"], plan["dim"], plan["gallery_bytes"]) == (1000, 1000, 8, 16_000)
    assert plan["bytes_read"] == plan["reads"] * 16_000
    assert plan["bytes_per_second"] > 0
    assert main([*words, "--queries", "20"]) == 0
    assert "20 queries against 1,000 items" in capsys.readouterr().out
    assert main([*words, "--dim", "8"]) == 1
    assert "Leave out --dim and --gallery" in capsys.readouterr().err
    assert main(["plan", "--queries", "5"]) == 1
    assert "Pass --queries and --dim, or --files" in capsys.readouterr().err


def test_plan_of_a_budget_that_cannot_be_kept_names_one_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["plan", "--queries", "1000000", "--gallery", "1000000", "--dim", "64"]
    assert main([*words, "--memory_mb", "64"]) == 0
    said = capsys.readouterr().out
    least = plan_evaluation(10**6, 10**6, 64).least_bytes
    enough = math.ceil(least / 1e6)
    assert f"the budget of 64 MB cannot be kept. Pass --memory_mb {enough}" in said
    assert "of 64 MB │" not in said  # nor is another number given
    assert main([*words, "--memory_mb", str(enough)]) == 0
    said = capsys.readouterr().out
    assert f"of {enough} MB │" in said
    assert "cannot be kept" not in said


def test_plan_of_a_sample_in_half_precision_without_a_limit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--queries", "1e6", "--dim", "64", "--max_queries", "5000", "--dtype", "float16", "--memory_mb", "inf"]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "5,000 queries, drawn from 1,000,000 against 1,000,000 items" in said
    assert "5,000,000,000" in said
    assert "128 MB + 128 MB │ queries and gallery in float16" in said
    assert "256 MB │ in float32, which half precision is compared as" in said
    assert "there is no limit" in said
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["copy_bytes"] == 256 * 10**6


def in_fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


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
    added, fine = in_fresh_python(IMPORTED_TWICE).splitlines()
    assert fine == "fine"
    assert len(added.split()) < 10, added


def test_the_maths_needs_neither_lightning_nor_torchvision():
    loaded = in_fresh_python(
        "import sys; from fewshot_callbacks import evaluate_retrieval, discriminant_ratio;"
        "print(*[m for m in ('lightning', 'torchvision', 'torchmetrics', 'matplotlib', 'rich') if m in sys.modules])"
    ).split()
    assert loaded == []


@pytest.mark.parametrize(
    ("words", "not_needed"),
    [
        *(
            ([*name, "--help"], "torch numpy numba lightning jsonargparse rich")
            for name in ([], *([one] for one in COMMANDS))
        ),
        (["evaluate", "e.npz"], "lightning torchvision torchmetrics matplotlib tensorboard sklearn PIL jinja2"),
        (["report", "e.npz", "-o", "e.html"], "lightning torchvision torchmetrics matplotlib tensorboard sklearn"),
        (["plan", "--queries", "9", "--dim", "2"], "lightning torchvision torchmetrics matplotlib tensorboard sklearn"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_command_imports_what_it_needs(words, not_needed, tmp_path):
    embeddings = np.random.default_rng(0).standard_normal((12, 4), dtype=np.float32)
    np.savez(tmp_path / "e.npz", embeddings=embeddings, labels=np.arange(12) % 3)
    code = (
        "import gc, sys; from fewshot_callbacks.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(gc.isenabled(), *[m for m in sys.argv[0].split() if m in sys.modules], file=sys.stderr)"
    )
    start = f"import sys; sys.argv = {[not_needed, *words]!r}\n"
    run = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [line for line in run.stderr.splitlines() if line != WORDS] == ["True"]  # the first run compiles
    assert run.stdout


def test_public_names_are_complete_and_sorted():
    import fewshot_callbacks

    assert list(fewshot_callbacks.__all__) == sorted(fewshot_callbacks.__all__)
    assert "RetrievalMonitor" in fewshot_callbacks.__all__
    assert set(fewshot_callbacks.__all__) <= set(dir(fewshot_callbacks))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fewshot_callbacks.nothing
