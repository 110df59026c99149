"""All monitors together leave a fit as it would be without them, also when it breaks off."""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fewshot_callbacks.callbacks import retrieval as retrieval_module
from tests.callbacks import process_jobs
from tests.callbacks.fit_states import (
    RandomNet,
    StateRecorder,
    all_monitors,
    modes_of,
    random_states,
    seed_everything,
    states_of_fit,
)
from tests.callbacks.models import VALIDATION, are_equal, episodes, loader, trainer
from tests.gloo_processes import answers

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*in eval mode at the start of training",
    "ignore:.*exists and is not empty",
    "ignore:.*callbacks used to create the checkpoint",
)


def hooks_on(net: nn.Module) -> int:
    """Hooks of every kind."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"
    return sum(len(getattr(part, kind)) for part in net.modules() for kind in kinds)


def holds_tensors(monitor: Any) -> list[str]:
    """Attributes of a monitor, or of its collector, that contain embeddings; metric keys do not count."""
    found = []
    ours = [part for part in vars(monitor).values() if type(part).__module__.startswith("fewshot_callbacks.callbacks")]
    parts = [part for part in ours if hasattr(part, "__dict__")]
    for owner in (monitor, *parts):
        for name, value in vars(owner).items():
            held = isinstance(value, dict | list | tuple) and len(value) and name != "_history"
            # Names of values, and which of them are better, are no embeddings.
            words = held and all(isinstance(entry, str) for entry in value)
            if (isinstance(value, Tensor) and value.ndim) or (held and not words):
                found.append(name)
    found += [name for name in ("_validation_store", "_training_store") if len(getattr(monitor, name, ()))]
    return [name for name in found if name not in ("reports", "source", "sizes")]


def held_before() -> list[list[str]]:
    """Return the attributes of monitors that have never run, such as a list of trials."""
    return [holds_tensors(monitor) for monitor in all_monitors()]


def test_a_fit_with_all_monitors_is_bit_identical_to_one_without() -> None:
    net, without = states_of_fit(accumulate_grad_batches=3)
    monitors = all_monitors()
    other, with_them = states_of_fit(*monitors, accumulate_grad_batches=3)
    assert len(without) == len(with_them) == 16 * 2 + 5 + 5
    for one, two in zip(without, with_them, strict=True):
        assert are_equal(one, two)
    assert set(monitors[0].reports) == {"/dataloader_idx_0", "/dataloader_idx_1"}  # all of them did measure
    assert monitors[2].gap is not None
    assert len(monitors[3].history) == 6
    assert (hooks_on(other), [holds_tensors(monitor) for monitor in monitors]) == (hooks_on(net), held_before())
    assert set(modes_of(net)) == {True, False}


def test_python_random_is_left_alone_too(gloo_folder: Path) -> None:
    """In a process of its own, without the type checker."""
    (seen,) = answers(gloo_folder, process_jobs.__name__, 1)
    without, with_monitors = seen["states"]
    assert without == with_monitors
    assert seen["gap"]
    assert seen["steps"] == 8


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Lightning ignores SIGINT once it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def after_a_break(monitors: list[Any], where: str, error: type[BaseException]) -> tuple[RandomNet, Trainer]:
    """A fit that breaks off in the third batch of a step."""
    seed_everything(5)
    net = RandomNet()
    before: Callable[..., Any] = getattr(net, where)

    def breaks(batch: Any, batch_idx: int, *more: Any) -> Any:
        result = before(batch, batch_idx, *more)
        if batch_idx == 2:
            raise error("broken off")
        return result

    setattr(net, where, breaks)
    made = trainer(*monitors)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        made.fit(net, episodes(3), loader(VALIDATION))
    return net, made


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize(("where", "error"), [("training_step", KeyboardInterrupt), ("validation_step", RuntimeError)])
def test_a_step_that_breaks_off_leaves_what_it_would_leave_without_them(where: str, error: type[BaseException]) -> None:
    net, plain = after_a_break([], where, error)
    monitors = all_monitors()
    other, made = after_a_break(monitors, where, error)
    assert modes_of(other) == modes_of(net)
    assert hooks_on(other) == hooks_on(net)
    assert are_equal(other.state_dict(), net.state_dict())
    assert (made.state.status, made.interrupted) == (plain.state.status, plain.interrupted)
    assert [holds_tensors(monitor) for monitor in monitors] == held_before()


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("the evaluation", KeyboardInterrupt),
        ("the check of embed", RuntimeError),
        ("training items", KeyboardInterrupt),
        ("the dynamics", RuntimeError),
        ("their end", KeyboardInterrupt),
    ],
)
def test_a_measurement_that_breaks_off_leaves_nothing_behind(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the check, `embed` is given a validation batch, with training items a larger one."""
    seed_everything(5)
    net = RandomNet()
    seen: dict[str, Any] = {}

    def breaks_off(*_: Any, **__: Any) -> Any:
        raise error("broken off")

    def fails(*_: Any, **__: Any) -> Any:
        random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
        breaks_off()

    def embed(module: RandomNet, batch: Any) -> Tensor:
        if where == ("the check of embed" if len(batch[0]) == 11 else "training items"):
            fails()
        return module(batch[0])

    class Before(Callback):
        """The modes and random states before anything is measured; the monitors come after it."""

        def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            seen["before"] = modes_of(pl_module), random_states()

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if "dynamics" in where or "end" in where:
                seen["before"] = modes_of(pl_module), random_states()

    if where == "the evaluation":  # which draws nothing
        monkeypatch.setattr(retrieval_module, "evaluate_retrieval", breaks_off)
    elif where in ("the dynamics", "their end"):
        forward, good = net.forward, iter(["before the step"] * (where == "their end"))
        monkeypatch.setattr(net, "forward", lambda points: forward(points) if next(good, "") else fails())
    monitors = all_monitors(embed=embed)
    made = trainer(Before(), *monitors)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        made.fit(net, episodes(2), loader(VALIDATION))
    modes, states = seen["before"]
    assert modes_of(net) == modes
    assert are_equal(random_states(), states)
    assert made.interrupted
    assert hooks_on(net) == 0
    assert [holds_tensors(monitor) for monitor in monitors] == held_before()


def test_a_checkpoint_holds_what_a_resumed_run_needs_and_nothing_else(tmp_path: Path) -> None:
    contents = []
    for name, monitors in (("without", []), ("with", all_monitors())):
        states_of_fit(
            *monitors, ModelCheckpoint(tmp_path / name, filename="saved"), val_check_interval=None, max_epochs=1
        )
        contents.append(torch.load(tmp_path / name / "saved.ckpt", weights_only=True))
    without, with_them = contents
    states = {key: state for key, state in with_them["callbacks"].items() if not key.startswith("ModelCheckpoint")}
    [(key, state)] = states.items()
    assert key.startswith("TrainingDynamicsMonitor")
    assert set(state) == {"history", "updates"}
    assert state["updates"] == len(state["history"]["steps"]) == 8
    for part in ("state_dict", "optimizer_states", "loops", "epoch", "global_step"):
        assert are_equal(without[part], with_them[part]), part
    assert set(without) == set(with_them)

    ends = []
    for name, monitors in (("without", []), ("with", again := all_monitors())):
        net, recorder = RandomNet(), StateRecorder()
        made = trainer(*monitors, recorder, max_epochs=2)
        seed_everything(6)
        made.fit(net, episodes(), loader(VALIDATION), ckpt_path=str(tmp_path / name / "saved.ckpt"))
        ends.append(recorder.states)
    assert len(ends[0]) == 8 * 2 + 1
    assert all(are_equal(one, two) for one, two in zip(*ends, strict=True))
    assert again[3].history.steps == tuple(range(1, 17))
