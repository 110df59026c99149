"""The items of a batch that make an episode."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.dynamics import episode_in
from tests.cases import examples
from tests.messages import refused


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=25), st.integers(1, 3))
def test_as_many_items_of_each_class_that_has_enough(labels: list[int], shots: int) -> None:
    counts = {label: labels.count(label) for label in labels}
    enough = [count for count in counts.values() if count > shots]
    if len(set(counts.values())) == 1:
        assert episode_in(torch.tensor(labels), shots)[0].tolist() == list(range(len(labels)))
    elif len(enough) < 2:
        with refused(ValueError, len(enough), f"{len(counts)} classes", f"shots={shots}", "EpisodicBatchSampler"):
            episode_in(torch.tensor(labels), shots)
    else:
        first = [i for i, label in enumerate(labels) if counts[label] > shots and labels[:i].count(label) < min(enough)]
        chosen, size, classes = episode_in(torch.tensor(labels), shots)
        assert (chosen.tolist(), size, classes) == (first, min(enough), len(enough))
