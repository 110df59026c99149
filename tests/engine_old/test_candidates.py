"""Items are ordered by class, and who is no candidate of whom."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.candidates import find_candidates

NAMES = np.array([0, 1, 2, -5, 2**24, 2**24 + 1, 2**61, -(2**63), 2**63 - 1])


@st.composite
def sets(draw):
    """Labels of one or two sets, with or without ids and groups."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    queries, classes = draw(st.integers(1, 15)), draw(st.integers(1, 8))
    case = {"query_labels": NAMES[rng.integers(0, classes, queries)], "same_set": draw(st.booleans())}
    gallery = queries if case["same_set"] else draw(st.integers(0, 15))
    case["gallery_labels"] = case["query_labels"] if case["same_set"] else NAMES[rng.integers(0, classes + 1, gallery)]
    for kind in ("ids", "groups"):
        if draw(st.booleans()):
            case |= {f"query_{kind}": rng.integers(0, 4, queries), f"gallery_{kind}": rng.integers(0, 4, gallery)}
    return case


def found(case):
    return find_candidates(**{k: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in case.items()})


class TestFindCandidates:
    @settings(max_examples=45, deadline=None)
    @given(sets())
    def test_items_stand_in_classes(self, case):
        candidates = found(case)
        sides = (
            (case["query_labels"], candidates.query_order, candidates.query_class, candidates.query_start),
            (case["gallery_labels"], candidates.gallery_order, candidates.gallery_class, candidates.gallery_start),
        )
        names = {}
        for labels, order, number, start in sides:
            assert sorted(order.tolist()) == list(range(len(labels)))
            assert number.tolist() == sorted(number.tolist())
            for place, (index, class_number) in enumerate(zip(order.tolist(), number.tolist(), strict=True)):
                # one number for one label, on both sides, and each class lies between its start and the next
                assert names.setdefault(class_number, labels[index]) == labels[index]
                assert start[class_number] <= place < start[class_number + 1]
            assert start[-1] == len(labels)
            assert len(start) == candidates.classes + 1
        assert len(set(names.values())) == len(names) == candidates.classes
        assert candidates.classes == len(set(case["query_labels"].tolist()) | set(case["gallery_labels"].tolist()))

    @settings(max_examples=30, deadline=None)
    @given(sets())
    def test_classes_are_ordered_by_what_there_is_to_find(self, case):
        candidates = found(case)
        in_gallery = Counter(case["gallery_labels"].tolist())
        sizes = [in_gallery[case["query_labels"][query]] for query in candidates.query_order.tolist()]
        assert sizes == sorted(sizes)

    @settings(max_examples=45, deadline=None)
    @given(sets())
    def test_excluded_are_the_item_itself_its_copies_and_its_group(self, case):
        candidates = found(case)
        queries, gallery = len(case["query_labels"]), len(case["gallery_labels"])
        excluded = candidates.excluded(torch.arange(queries)[:, None], torch.arange(gallery)[None, :])
        assert excluded.shape == (queries, gallery)
        different = torch.from_numpy(case["query_labels"][:, None] != case["gallery_labels"])
        assert candidates.excluded_negatives == int((excluded & different).sum())
        assert candidates.negative_pairs == int((~excluded & different).sum())
        for i in range(queries):
            for j in range(gallery):
                reasons = [case["same_set"] and i == j]
                reasons += [
                    case[f"query_{kind}"][i] == case[f"gallery_{kind}"][j]
                    for kind in ("ids", "groups")
                    if f"query_{kind}" in case
                ]
                assert bool(excluded[i, j]) == any(reasons)

    def test_nothing_is_excluded_by_default(self):
        labels = torch.arange(6)
        candidates = find_candidates(labels, labels, same_set=False)
        assert candidates.exclusions == ()
        assert not candidates.excluded(labels, labels).any()
