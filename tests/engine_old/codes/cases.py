"""Binary codes for tests."""

import numpy as np
import torch


def signs(items, bits, seed=0, classes=None):
    """Codes of -1 and +1; with classes, those of one class differ in every fourth bit or so."""
    rng = np.random.default_rng(seed)
    if classes is None:
        return torch.from_numpy(rng.choice([-1.0, 1.0], (items, bits)))
    centres = np.random.default_rng(7).choice([-1.0, 1.0], (classes, bits))
    return torch.from_numpy(centres[np.arange(items) % classes] * rng.choice([1.0, 1.0, 1.0, -1.0], (items, bits)))
