"""What works without any extra of the package, and the errors of the rest. These tests also run with only the core."""

import re
import subprocess
import sys
from pathlib import Path

from tests.messages import missing_facts

ROOT = Path(__file__).parents[2]
OF_EXTRAS = (
    "PIL", "docstring_parser", "jinja2", "jsonargparse", "matplotlib", "platformdirs", "rich", "sklearn", "tensorboard",
    "torchvision", "umap", "yaml",
)  # fmt: skip
# Where the extras are installed, modules of the package find them no more; Lightning and torchmetrics still do.
ALONE = f"""
import builtins
ordinary = builtins.__import__

def without_extras(name, globals=None, locals=None, fromlist=(), level=0):
    asking = str((globals or {{}}).get("__name__", ""))
    if level == 0 and asking.startswith("fewshot_callbacks") and name.partition(".")[0] in {OF_EXTRAS}:
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return ordinary(name, globals, locals, fromlist, level)

builtins.__import__ = without_extras
"""
TRAINING = """
import logging, warnings
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset
import fewshot_callbacks as few

labels = torch.arange(120) % 12
images = torch.nn.functional.one_hot(labels, 12).float().repeat(1, 2)[:, None, :, None].expand(-1, 1, 24, 16)
data = TensorDataset(images + 0.1 * torch.randn(images.shape), labels)
episodes = few.EpisodicBatchSampler(labels, ways=4, shots=1, queries=2, episodes=4)
protocol = few.EpisodeProtocol(ways=4, shots=1, queries=2, episodes=5)
module = few.ProtoNet("conv4", "dr", in_channels=1, evaluation=protocol)
monitors = [few.RetrievalMonitor(), few.DiscriminantRatioMonitor(), few.TrainingDynamicsMonitor(every_n_steps=1)]
quiet = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=monitors, logger=False, **quiet)
trainer.fit(module, DataLoader(data, batch_sampler=episodes), DataLoader(data, batch_size=40))
assert {"val/mAP", "val/pair_f1"} <= set(trainer.callback_metrics), sorted(trainer.callback_metrics)
print(few.evaluate_retrieval(images.flatten(1), labels))
"""


ASKED = {
    "from fewshot_callbacks import EmbeddingMap": ("EmbeddingMap", "report"),
    "from fewshot_callbacks import ReportWriter": ("ReportWriter", "report"),
    "from fewshot_callbacks.data import Glyphs": ("Glyphs", "vision"),
    "import fewshot_callbacks.plots": ("plots", "report"),
    "import fewshot_callbacks.report": ("report", "report"),
    "from fewshot_callbacks.protonet import resnet18; resnet18()": ("resnet18", "vision"),
}
COMMANDS = {"evaluate a.npz": "cli", "plan --queries 9 --dim 2": "cli", "fit": "all", "demo": "all"}
ASKING = f"""
import sys
from fewshot_callbacks.cli import main
for words in {[*COMMANDS]}:
    assert main(words.split()) == 1
for asked in {[*ASKED]}:
    try:
        exec(asked)
    except ImportError as error:
        print(error, file=sys.stderr)
"""


def test_without_extras_the_core_trains_and_what_is_missing_is_said_with_the_line_that_installs_it():
    """In one process, which imports torch and Lightning once; the commands come before these are there."""
    command = [sys.executable, "-c", ALONE + ASKING + TRAINING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "mAP" in done.stdout
    said = iter(done.stderr.splitlines())
    for words, extra in COMMANDS.items():
        name = f"fewshot {words.split()[0]}"
        assert missing_facts(line := next(said), (name, f"pip install '.[{extra}]'")) == [], line
    for name, extra in ASKED.values():
        line = next(said)
        assert re.search(rf"\b{name}\b", line), line
        assert missing_facts(line, (f"pip install '.[{extra}]'",)) == [], line
        before = line.partition("pip install")[0]
        assert len(missing_facts(before, OF_EXTRAS)) < len(OF_EXTRAS), line  # it names the package that is missing
