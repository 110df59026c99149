"""A monitor of your own: how much nearer is each item to its class than to the next one?"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks import Monitor
from fewshot_callbacks.callbacks import EmbeddedSet


class SilhouetteMonitor(Monitor):
    """Logs the simplified silhouette, in [-1, 1]; larger is better.

    The silhouette of an item is (b - a) / max(a, b): a is the distance to the mean of its class, b the distance to the
    nearest mean of another class. The value of a class is the mean over its items.

    Args:
        worst: Number of classes in the attribute `worst_classes`.
        **arguments: Those of every monitor: source, gallery, loaders, name, prog_bar, strict.
    """

    names = ("silhouette", "silhouette_of_worst_class")
    better = dict.fromkeys(names, "higher")

    def __init__(self, worst: int = 3, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.worst = worst
        self.worst_classes: list[Any] = []

    def measure(self, items: EmbeddedSet) -> Mapping[str, Any]:
        embeddings = torch.nn.functional.normalize(items.embeddings.double(), dim=1)
        classes = sorted(set(items.labels))
        if len(classes) < 2:
            raise ValueError(f"A silhouette needs two classes, and this set has {len(classes)}.")
        index_of = {label: index for index, label in enumerate(classes)}
        class_of_item = torch.tensor([index_of[label] for label in items.labels])
        means = class_means(embeddings, class_of_item)

        distances = torch.cdist(embeddings, means)
        to_own_mean = distances.gather(1, class_of_item[:, None])[:, 0]
        to_other_means = distances.scatter(1, class_of_item[:, None], torch.inf).amin(dim=1)
        silhouettes = (to_other_means - to_own_mean) / torch.maximum(to_other_means, to_own_mean)

        of_classes = class_means(silhouettes[:, None], class_of_item)[:, 0]
        self.worst_classes = [classes[index] for index in of_classes.argsort()[: self.worst].tolist()]
        return {"silhouette": silhouettes.mean(), "silhouette_of_worst_class": of_classes.min()}


def class_means(rows: Tensor, class_of_row: Tensor) -> Tensor:
    """Return the mean of the rows of each class, (classes, dim)."""
    sizes = class_of_row.bincount()
    return rows.new_zeros(len(sizes), rows.shape[1]).index_add(0, class_of_row, rows) / sizes[:, None]
