"""Layers that are made late, scripted, or called past their hooks; monitors that are copied to other processes."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from fewshot_callbacks import TrialList, callbacks
from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingMap,
    EmbeddingSource,
    KnnMonitor,
    ProbeMonitor,
    ReportWriter,
    RetrievalMonitor,
    RetrievalPanels,
    ScorePlots,
    TrainingDynamicsMonitor,
    VerificationMonitor,
)
from fewshot_callbacks.callbacks._conduct import UsageError
from tests.callbacks.models import (
    TRAINING,
    VALIDATION,
    Embeds,
    Labelled,
    Net,
    episodes,
    expected_metrics,
    gap_monitor,
    items,
    loader,
    retrieval,
    trainer,
    with_prefix,
)
from tests.callbacks.monitor_jobs import TRIAL_METRICS, paths, trials_of
from tests.messages import refused


class Late(Embeds):
    """Makes its encoder when the Trainer asks for it, as strategies that share out a model need it."""

    def __init__(self, hook: str, *, stand_in: bool) -> None:
        super().__init__()
        self.hook, self.made = hook, self.encoder
        del self.encoder
        if stand_in:
            self.encoder = nn.Identity()

    def make(self, hook: str) -> None:
        if hook == self.hook:
            self.encoder = self.made

    def setup(self, stage: str) -> None:
        self.make("setup")

    def configure_model(self) -> None:
        self.make("configure_model")


def monitors() -> list[Any]:
    return [
        retrieval(source="encoder"),
        retrieval(name="beside", source=EmbeddingSource(embed=lambda module, batch: module(batch[0]))),
        DiscriminantRatioMonitor(source="encoder"),
        EmbeddingHealthMonitor(source="encoder"),
        gap_monitor(source="encoder", embed=lambda module, batch: module(batch[0])),
    ]


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
@pytest.mark.parametrize("stand_in", [True, False])
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_layers_that_are_made_after_the_monitors_are_set_up_are_measured(hook: str, stand_in: bool, stage: str) -> None:
    net = Late(hook, stand_in=stand_in)
    run = trainer(*monitors(), num_sanity_val_steps=1)
    getattr(run, stage)(net, *[loader(VALIDATION)] * (2 if stage == "fit" else 1))
    prefix = "test" if stage == "test" else "val"
    expected = expected_metrics(*net.by_hand(VALIDATION))["mAP"]
    for key in (f"{prefix}/mAP", f"{prefix}/beside/mAP"):
        assert float(run.callback_metrics[key]) == pytest.approx(expected, rel=1e-5)
    assert f"{prefix}/J" in run.callback_metrics


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_the_name_of_a_late_layer_is_enough(hook: str) -> None:
    net = Late(hook, stand_in=False)
    net.frozen = nn.Identity()  # so that the encoder is given the points
    run = trainer(retrieval(source=EmbeddingSource(embed="encoder")))
    run.validate(net, loader(VALIDATION), verbose=False)
    expected = expected_metrics(*net.by_hand(VALIDATION))["mAP"]
    assert float(run.callback_metrics["val/mAP"]) == pytest.approx(expected, rel=1e-5)


class LateEpisodes(LightningModule):
    """Makes the layer that training dynamics name in `configure_model`."""

    shots = 2

    def configure_model(self) -> None:
        self.late = nn.Linear(12, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.late(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_training_dynamics_find_a_layer_that_is_made_late() -> None:
    monitor = TrainingDynamicsMonitor(every_n_steps=1, source=EmbeddingSource(embed="late"), file=None)
    trainer(monitor).fit(LateEpisodes(), episodes(3))
    assert len(monitor.history) == 3


@pytest.mark.parametrize(
    "monitor",
    [
        lambda: retrieval(source="encodr"),
        lambda: retrieval(source=EmbeddingSource(embed="encodr")),
        lambda: gap_monitor(embed="encodr"),
        lambda: DiscriminantRatioMonitor(source="encodr"),
        lambda: TrainingDynamicsMonitor(source=EmbeddingSource(embed="encodr")),
    ],
)
def test_a_layer_that_is_never_made_ends_the_fit_before_it_starts(monitor: Any) -> None:
    run = trainer(monitor(), num_sanity_val_steps=1)
    with refused(ValueError, "'encodr'", "Late", "submodule", "encoder"):
        run.fit(Late("configure_model", stand_in=False), loader(TRAINING), loader(VALIDATION))
    assert run.global_step == 0


class Scripted(Embeds):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.jit.script(self.encoder)


@pytest.mark.parametrize("kind", [RetrievalMonitor, DiscriminantRatioMonitor, EmbeddingHealthMonitor])
@pytest.mark.parametrize(("name", "embed"), [("encoder", "'encoder'"), ("encoder.0", "function")])
def test_a_scripted_encoder_is_refused_with_what_works(kind: Any, name: str, embed: str) -> None:
    cure = f"source=EmbeddingSource(embed={embed})"
    with refused(UsageError, f"{kind.__name__}(source='{name}')", "TorchScript", "hooks", cure):
        trainer(kind(source=name)).validate(Scripted(), loader(), verbose=False)


class PastHooks(Net):
    def embed(self, points: Any) -> Any:
        return self.encoder.forward(self.frozen(points))


@pytest.mark.parametrize("kind", [RetrievalMonitor, DiscriminantRatioMonitor, EmbeddingHealthMonitor])
def test_a_direct_call_of_forward_is_named(kind: Any) -> None:
    facts = "validation_step", "'encoder'", "encoder(x)", "encoder.forward(x)", "embed='encoder'"
    with refused(UsageError, kind.__name__, *facts):
        trainer(kind(source="encoder")).validate(PastHooks(), loader(), verbose=False)


TRIALS = TrialList(same=(True, False), items=(("a", "a"), ("b", "c")))
ARGUMENTS: dict[str, dict[str, Any]] = {
    "RetrievalMonitor": {"source": EmbeddingSource(embed="encoder")},
    "KnnMonitor": {"bank": Labelled(TRAINING)},
    "VerificationMonitor": {"trials": TRIALS, "ids": "path"},
    "GeneralizationGapMonitor": {"bank": Labelled(TRAINING)},
}
# A `Monitor` is a base class.
CALLBACKS = [name for name in callbacks.__all__ if not name.endswith(("Source", "Set")) and name != "Monitor"]


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize(
    "copied", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_every_callback_can_be_copied(name: str, copied: Any) -> None:
    """As `ddp_spawn` does, and the processes of a notebook."""
    needed = {"VerificationMonitor": ARGUMENTS["VerificationMonitor"]}
    for arguments in (needed.get(name, {}), ARGUMENTS.get(name, {})):
        assert type(copied(getattr(callbacks, name)(**arguments))).__name__ == name


def name_of(dataset: Any, index: int) -> str:
    """Stands for the picture of an item."""
    return str(index)


def pictures() -> list[Any]:
    return [RetrievalPanels(1, 1, 1, images=name_of), EmbeddingMap(), ScorePlots(), ReportWriter()]


@pytest.mark.parametrize("shown", [list, pytest.param(pictures, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*(interval|false match rate|strength)")
def test_copies_work_before_a_run_and_after_it(
    shown: Callable[[], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that was made before any run, a copy of that after its run, and one of the second after its run."""
    monkeypatch.chdir(tmp_path)
    every: list[Any] = [
        *(retrieval(), retrieval(name="submodule", source="encoder"), DiscriminantRatioMonitor(source="encoder")),
        *(EmbeddingHealthMonitor(k=2, every_n_steps=1), gap_monitor(), TrainingDynamicsMonitor(shots=1, file=None)),
        *(KnnMonitor(5, "self"), KnnMonitor(5, Labelled(TRAINING), name="bank"), ProbeMonitor(Labelled(TRAINING))),
        VerificationMonitor(trials_of(36), paths, metrics=TRIAL_METRICS),
        *shown(),
    ]
    for _ in range(3):
        every = pickle.loads(pickle.dumps(every))
        net, run = Embeds(), trainer(*every)
        run.fit(net, loader(), loader(items()))
        logged = {key: float(value) for key, value in run.callback_metrics.items()}
        expected = with_prefix(expected_metrics(*net.by_hand(items())))
        assert {key: logged[key] for key in expected} == pytest.approx(expected, rel=1e-5)
        alone = (key for key in logged if key.startswith("val/submodule"))
        assert {key: logged[key] for key in alone} == {f"val/submodule{key[3:]}": logged[key] for key in expected}
        others = ("val/J", "val/hubness", "gap/recall@1", "val/knn@5", "val/bank/knn@5", "val/probe", "val/eer")
        assert set(others) <= logged.keys()
