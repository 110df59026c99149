"""Reads the embeddings of two encoders, such as those of images and texts, and who belongs together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.callbacks._failures import UsageError
from fewshot_callbacks.callbacks.embeddings import STEP_KEYS, EmbeddingReader, are_zeros_and_ones, read_entry
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional._labels import Labels

Side = tuple[Tensor, Labels]


class TwoEncoders:
    """Reads both embeddings of a step whose source are two keys that hold embeddings.

    Args:
        reader: Knows the source and the labels.
    """

    def __init__(self, reader: EmbeddingReader) -> None:
        self.reader = reader
        self._rows = 0  # so far, without labels

    def directions(self) -> tuple[str, str]:
        """Name both directions: `image_to_text` for `("image_embeds", "text_embeds")`."""
        one, other = (re.sub(r"_(emb|embeds?|embeddings?|features?)$", "", key) for key in self.reader.keys)
        return f"{one}_to_{other}", f"{other}_to_{one}"

    def read(self, outputs: Any, batch: Any, step: str) -> tuple[Side, Side] | None:
        """Read the embeddings and labels of both sides; None unless each key of the source holds embeddings.

        Args:
            outputs: What the step returned.
            batch: What it was given.
            step: Name of the step, for messages.

        Raises:
            UsageError: If the labels do not fit the embeddings, or there are none and the sides differ in length.
        """
        sides = self._embeddings(outputs)
        if sides is None:
            return None
        self.reader.dismiss()
        where, owner = self.reader.labels, self.reader.owner
        if isinstance(where, tuple | list):
            labels = [read_entry("labels", entry, outputs, batch, owner) for entry in where]
        elif where is not None:
            labels = [self.reader.labels_of(None, batch, step)] * 2
        elif STEP_KEYS[1] in outputs:
            labels = [outputs[STEP_KEYS[1]]] * 2
        else:
            labels = [self._of_rows(sides, step)] * 2
        one, other = (self.reader.checked(side, own, step) for side, own in zip(sides, labels, strict=True))
        return one, other

    def _embeddings(self, outputs: Any) -> list[Tensor] | None:
        if not (isinstance(self.reader.source, tuple) and isinstance(outputs, Mapping)):
            return None
        sides = [side for key in self.reader.keys if isinstance(side := outputs.get(key), Tensor)]
        if len(sides) < 2 or not all(side.ndim == 2 and side.is_floating_point() for side in sides):
            return None
        # zeros and ones are labels: those of items with several each
        return None if sides[0].shape[1] != sides[1].shape[1] or are_zeros_and_ones(sides[1]) else sides

    def _of_rows(self, sides: list[Tensor], step: str) -> Labels:
        """Return a label for each row, another one than all other rows have, in every process."""
        if len(sides[0]) != len(sides[1]):
            raise UsageError(
                f"{self.reader.owner}(source={self.reader.source!r}): {step} gave {len(sides[0])} and {len(sides[1])} "
                "embeddings. Say which belong together: labels=('image_id', 'image_of_caption'), an entry for each side."
            )
        rows, processes = torch.arange(self._rows, self._rows + len(sides[0]), device="cpu"), all_processes()
        self._rows += len(rows)
        return Labels(rows * processes.count + processes.rank)
