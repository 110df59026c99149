"""Try the wheel of a folder in an empty environment, as users install it: python tools/try_release.py dist.

`python -m build` makes the wheel from the source distribution, so that both are tested. First only the core is installed,
and it evaluates an embedding. Then the package is installed with [all], and its command evaluates a file. The checkout
cannot be imported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CORE = """
import sys
from pathlib import Path
import torch
import fewshot_callbacks
from fewshot_callbacks import evaluate_retrieval

labels = torch.arange(40) % 4
embeddings = torch.nn.functional.one_hot(labels).float() + 0.1 * torch.randn(40, 4)
report = evaluate_retrieval(embeddings, labels, metrics=("mAP", "recall@1"))
assert report.mAP > 0.99, report.mAP
skill = Path(fewshot_callbacks.__file__).parent / ".agents/skills/fewshot-callbacks/SKILL.md"
assert skill.is_file(), f"there is no {skill}"
extras = {"jsonargparse", "matplotlib", "jinja2", "pyarrow"} & set(sys.modules)
assert not extras, f"the core alone imports {extras}"
print(report)
"""

FILE = """
import numpy as np
labels = np.arange(40) % 4
np.savez("embeddings.npz", embeddings=np.eye(4)[labels] + 0.1 * np.random.default_rng(0).normal(size=(40, 4)), labels=labels)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder with the wheel")
    parser.add_argument("--only", choices=("core", "all"), help="install only the core, or the package with [all]")
    parser.add_argument("--environment", type=Path, help="environment to install into, instead of a new one")
    options = parser.parse_args()
    wheel = the_wheel(options.dist)
    with tempfile.TemporaryDirectory() as folder:
        environment = options.environment or Path(folder) / "environment"
        if options.environment is None:
            venv.create(environment, with_pip=True)
        scripts = environment / ("Scripts" if sys.platform == "win32" else "bin")
        if options.only != "all":
            try_core(scripts, wheel, folder)
        if options.only != "core":
            try_all(scripts, wheel, folder)


def the_wheel(dist: Path) -> Path:
    """Return the only wheel of a folder."""
    wheels = list(dist.glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"{dist} holds {len(wheels)} wheels; there must be one, that of `python -m build`.")
    return wheels[0].resolve()


def try_core(scripts: Path, wheel: Path, folder: str) -> None:
    """Install the wheel without an extra, and evaluate an embedding."""
    run([scripts / "python", "-m", "pip", "install", "--quiet", wheel], folder)
    run([scripts / "python", "-c", CORE], folder)


def try_all(scripts: Path, wheel: Path, folder: str) -> None:
    """Install the wheel with [all], and evaluate a file with the command."""
    run([scripts / "python", "-m", "pip", "install", "--quiet", f"{wheel}[all]"], folder)
    run([scripts / "fewshot", "--version"], folder)
    run([scripts / "fewshot", "demo", "--help"], folder)
    run([scripts / "python", "-c", FILE], folder)
    run([scripts / "fewshot", "evaluate", "embeddings.npz", "--metrics", "mAP", "recall@1"], folder)


def run(command: list[str | Path], folder: str) -> None:
    """Run a command in a folder outside of the checkout, and exit if it fails."""
    words = [str(word) for word in command]
    print("$", *[word if "\n" not in word else "..." for word in words], flush=True)
    if (status := subprocess.run(words, cwd=folder, check=False).returncode) != 0:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
