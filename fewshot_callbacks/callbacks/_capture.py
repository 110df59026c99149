"""Captures the output of a submodule while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fewshot_callbacks.trainer.lightning import LightningModule

# Lightning's names of the steps. `LightningModule._current_fx_name` is the name of the running method or callback.
STEPS = ("training_step", "validation_step", "test_step")

_HOOKS_IGNORED: ContextVar[bool] = ContextVar("hooks_ignored", default=False)


@contextmanager
def hooks_ignored() -> Iterator[None]:
    """Make every `Capture` ignore calls inside the block, which do not belong to a step."""
    token = _HOOKS_IGNORED.set(True)
    try:
        yield
    finally:
        _HOOKS_IGNORED.reset(token)


class CapturedCall(NamedTuple):
    """One call of the submodule in a step."""

    value: Any
    """the result of `read` for its output; tensors are detached copies"""
    circumstances: tuple[bool, bool, bool]
    """whether the submodule was in training mode, gradients were on, and an input had a gradient"""


class Capture:
    """Keeps copies of a submodule's outputs, from `start` to `stop`, while a step of the module runs.

    The forward hook exists only in this time, so the module can be copied, pickled, scripted or exported between
    batches. Compiled code runs only hooks that existed when it was compiled, so there the hook stays from `attach` to
    `detach`.

    It ignores calls outside a step, and calls while autograd runs, as in activation checkpointing. It drops calls from
    before the step ran again or the weights changed, as in a closure of L-BFGS.

    Args:
        read: Returns the part of an output that is kept.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.calls: list[CapturedCall] = []
        self._module: LightningModule | None = None
        self._submodule: nn.Module | None = None
        self._handle: RemovableHandle | None = None
        self._is_started = False
        self._stays = False
        # whether the step has ended, so that another run of it replaces the calls so far
        self._has_run_ended = False
        # the parameters of the submodule, and the number of their in-place changes at the latest call
        self._parameters: Sequence[Tensor] = ()
        self._changes = 0

    def attach(self, module: LightningModule, name: str, *, is_compiled: bool) -> None:
        """Remember the submodule."""
        submodule = module.get_submodule(name)
        if submodule is self._submodule and module is self._module:
            return
        self.detach()
        self._module = module
        self._submodule = submodule
        self._stays = is_compiled
        self._parameters = tuple(submodule.parameters())
        self._add_hook()
        if not self._stays:
            self._remove_hook()

    def detach(self) -> None:
        """Forget the submodule, and drop the captured outputs."""
        self.stop()
        self._remove_hook()
        self._module = None
        self._submodule = None
        self._parameters = ()

    def start(self) -> None:
        """Start to capture outputs."""
        self.calls = []
        self._has_run_ended = False
        self._is_started = True
        if self._submodule is not None:
            self._add_hook()

    def stop(self) -> None:
        """Stop capturing, and drop the captured outputs."""
        self.calls = []
        self._is_started = False
        if not self._stays:
            self._remove_hook()

    def end_run(self) -> None:
        """Mark the end of the step. If it runs again for the same batch, new calls replace earlier ones."""
        self._has_run_ended = True

    def _add_hook(self) -> None:
        if self._handle is None and self._submodule is not None:
            self._handle = self._submodule.register_forward_hook(_Hook(self))

    def _remove_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def keep(self, submodule: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the output of a call, if it belongs to the step."""
        if not self._is_started or self._module is None or self._module._current_fx_name not in STEPS:
            return
        # In a traced call these values would be constants of the trace.
        if not torch.compiler.is_compiling():
            if _HOOKS_IGNORED.get() or torch._C._current_graph_task_id() != -1:
                return
            self._drop_calls_of_other_weights()
        if self._has_run_ended:
            self.calls.clear()
            self._has_run_ended = False
        has_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        circumstances = (submodule.training, torch.is_grad_enabled(), has_gradient)
        self.calls.append(CapturedCall(self.read(output), circumstances))

    def _drop_calls_of_other_weights(self) -> None:
        """Drop earlier calls if an optimiser has changed the weights since then."""
        changes = sum(parameter._version for parameter in self._parameters if not parameter.is_inference())
        if changes != self._changes:
            self.calls.clear()
        self._changes = changes


class _Hook:
    """The forward hook of a capture. It does nothing in a copied or pickled submodule."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def __call__(self, submodule: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.capture.keep(submodule, inputs, output)

    def __reduce__(self) -> Any:
        # A hook gets three arguments, as does this `__exit__`, which does nothing. It can be unpickled without this
        # package.
        return getattr, (nullcontext(), "__exit__")
