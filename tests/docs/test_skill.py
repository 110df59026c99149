"""The skill for assistants: its form, the keys of its table, its place in the wheel. Its blocks run with the pages."""

import re
import zipfile

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import fewshot_callbacks as few
from fewshot_callbacks.functional import DEFAULT_TRIAL_METRICS
from tests.scripts import ROOT

FOLDER = "fewshot_callbacks/.agents/skills/fewshot-callbacks"
SKILL = ROOT / FOLDER / "SKILL.md"


class Encoder(LightningModule):
    """A module that embeds its batch by a submodule, and trains it towards nothing in particular."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        return self.encoder(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.encoder(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def table_rows():
    """Monitor and keys of each row of the first table."""
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| ([^|]+) \|$", SKILL.read_text(encoding="utf-8"), re.M)
    return [(monitors, re.findall(r"`(\w+/[\w@]+)`", keys)) for monitors, keys in rows]


def test_it_has_the_form_that_assistants_read():
    text = SKILL.read_text(encoding="utf-8")
    name, description = re.match(r"---\nname: (\S+)\ndescription: (.+)\n---\n\n# ", text).groups()
    assert name == SKILL.parent.name
    assert len(description) <= 1024
    assert len(text.splitlines()) <= 100  # one page


@pytest.mark.filterwarnings("ignore")
def test_every_key_of_its_table_is_logged():
    labels = torch.arange(96) % 24
    train_set = TensorDataset(torch.randn(96, 8), labels)
    available = {name: getattr(few, name) for name in few.__all__} | {"train_set": train_set}
    monitors, keys = [], set()
    for written, named in table_rows():
        keys |= set(named)
        if "VerificationMonitor" in written:  # it needs a list of pairs
            assert [key.removeprefix("val/") for key in named] == ["eer"]
            assert "eer" in DEFAULT_TRIAL_METRICS
            continue
        for call in re.findall(r"`([^`]+)`", written):
            monitor, _, arguments = call.partition("(")
            end = arguments.removesuffix(")")
            other = f", name='m{len(monitors)}'" if monitor == "RetrievalMonitor" and monitors else ""
            if monitor == "GeneralizationGapMonitor":  # on a busy machine it would skip the only epoch
                other = ", max_share=None"
            monitors.append(eval(f"{monitor}({end + ', ' if end else ''}source='encoder'{other})", available))
    trainer = Trainer(
        max_epochs=1, callbacks=monitors, logger=False, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loaders = [
        DataLoader(train_set, batch_size=48),
        DataLoader(TensorDataset(torch.randn(96, 8), labels), batch_size=48),
    ]
    trainer.fit(Encoder(), *loaders)
    logged = {re.sub(r"/m\d+/", "/", key) for key in trainer.callback_metrics}
    assert len(keys) >= 10
    assert keys - logged == set()


def test_it_is_in_the_wheel(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    [path] = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    files = set(zipfile.ZipFile(path).namelist())
    assert {f"{FOLDER}/SKILL.md", "fewshot_callbacks/py.typed", "fewshot_callbacks/__init__.pyi"} <= files
    assert "fewshot_callbacks/configs/protonet_dr_folder.yaml" in files
    assert not [file for file in files if file.startswith(("tests/", "docs/", "benchmarks/"))]
