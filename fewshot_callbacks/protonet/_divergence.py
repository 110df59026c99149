"""Checks that the exponent of the distance-ratio head stays finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fewshot_callbacks.protonet.heads import DistanceRatioHead

# Largest ln rho: above it rho is infinite in float32.
LARGEST = math.log(torch.finfo(torch.float32).max)


class ExponentWatch:
    """Stops a training whose rho has become infinite or NaN.

    On a CPU it looks at every step. An accelerator would have to be waited for at each look, so there it looks once in
    50 steps, at all values since the last look: the step that it names is the right one.

    Args:
        interval: Steps between two looks, instead of these.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.interval = interval
        self._seen: list[tuple[int, Tensor]] = []
        self._last: tuple[int, float] | None = None

    def see(self, step: int, head: nn.Module, *, wait: bool = False) -> None:
        """Take note of rho before a step.

        Args:
            step: Number of the step.
            head: Whose exponent it is; any other head is passed over.
            wait: Look at once, as before a checkpoint or the end of a training.

        Raises:
            ValueError: Rho is no longer a finite number.
        """
        if not isinstance(head, DistanceRatioHead):
            return
        # A copy, since the optimiser writes the next value into the same tensor.
        self._seen.append((step, head.log_rho.detach().clone()))
        interval = self.interval or (1 if head.log_rho.device.type == "cpu" else 50)
        if wait or len(self._seen) >= interval:
            self._look()

    def _look(self) -> None:
        seen, self._seen = self._seen, []
        log_rhos = torch.stack([log_rho for _, log_rho in seen]) if len(seen) > 1 else seen[0][1].reshape(1)
        for (step, _), log_rho in zip(seen, log_rhos.tolist(), strict=True):  # the one moment that waits for the device
            rho = math.exp(log_rho) if log_rho <= LARGEST else log_rho * math.inf  # inf, or NaN for NaN
            if not (math.isfinite(rho) and math.isfinite(log_rho)):
                before = (
                    "it was never finite" if self._last is None else "its last finite value was {1:.4g}, at step {0}"
                )
                raise ValueError(
                    f"rho of the distance-ratio head became {rho} at step {step} (ln rho = {log_rho:.4g}); "
                    f"{before.format(*self._last or ())}. The training has diverged: lower the learning rate, clip "
                    "gradients (Trainer(gradient_clip_val=1.0)), or look for images that are not finite. Earlier "
                    "checkpoints are not affected."
                )
            self._last = step, rho
