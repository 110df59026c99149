"""`knn_accuracy` agrees with a loop over all orders of ties, and with the rule of DINOv2 where nothing ties."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import Share, knn_accuracy
from fewshot_callbacks.functional.knn import LAST_RANKS
from tests.cases import examples
from tests.messages import missing_facts, refused
from tests.thread_processes import in_threads


def brute(rows, labels, gallery, gallery_labels, ks, temperature, excluded=lambda query, item: False):
    """Shares of all orders of equal scores and of equal votes, by dot products; the mean over queries that have a match."""
    found = {f"knn@{k}{name}": [] for k in ks for name in LAST_RANKS}
    for n, (row, label) in enumerate(zip(rows, labels, strict=True)):
        voters = [m for m in range(len(gallery_labels)) if (gallery is not None or m != n) and not excluded(n, m)]
        if label not in [gallery_labels[m] for m in voters]:
            continue
        score = {m: float(row @ (rows if gallery is None else gallery)[m]) for m in voters}
        for k in ks:
            votes = dict.fromkeys(gallery_labels, 0.0)
            cut = sorted(score.values(), reverse=True)[:k][-1]  # all vote if there are fewer than k
            above = sum(each > cut for each in score.values())
            tied = sum(each == cut for each in score.values())
            for m, each in score.items():
                part = 1 if each > cut else min(Fraction(k - above, tied), 1) if each == cut else 0
                votes[gallery_labels[m]] += float(part) * (1 if temperature is None else math.exp(each / temperature))
            cast = {name: round(each, 9) for name, each in votes.items() if each}
            for name, last_rank in LAST_RANKS.items():
                orders = [sorted(order, key=lambda c: -cast[c])[:last_rank] for order in itertools.permutations(cast)]
                found[f"knn@{k}{name}"].append(sum(label in order for order in orders) / len(orders))
    return {key: sum(each) / len(each) for key, each in found.items()}


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 9), st.integers(4, 9), st.sampled_from([None, 1.0]), st.booleans())
def test_agrees_with_loops(seed, queries, items, temperature, is_one):
    """Whole numbers have many equal scores, and equal rows."""
    generator = torch.Generator().manual_seed(seed)
    rows, gallery = (torch.randint(-1, 2, (n, 2), generator=generator).double() for n in (queries, items))
    labels, voters = (torch.randint(6, (n,), generator=generator).tolist() for n in (queries, items))
    labels[:2] = [voters[0]] * 2
    ks, whole = (1, 2, 3) if not is_one else (1, 2), (labels, voters)
    other = (None, None) if is_one else (gallery, voters)
    expected = brute(rows, labels, other[0], whole[not is_one], ks, temperature)
    found = knn_accuracy(rows, labels, *other, k=ks, temperature=temperature, similarity="dot")
    assert found.values == pytest.approx(expected, rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 1.0]), st.booleans(), st.booleans(), st.booleans())
def test_ids_and_groups_agree_with_loops(seed, temperature, is_one, with_ids, with_groups):
    """Rows are equal, ids repeat, and some queries have fewer candidates than k."""
    generator = np.random.default_rng(seed)
    rows, gallery = (generator.integers(-1, 2, (n, 2)).astype(float) for n in (9, 10))
    labels, voters, ids, item_ids = (generator.integers(0, most, n) for most, n in ((4, 9), (4, 10), (6, 9), (8, 10)))
    groups, item_groups = (generator.integers(0, 3, n) for n in (9, 10))
    options = {"query_ids": ids} if with_ids else {}
    options |= {"query_groups": groups} if with_groups else {}
    if not is_one:
        options |= {"gallery_ids": item_ids} if with_ids else {}
        options |= {"gallery_groups": item_groups} if with_groups else {}
    # the first of each id, by loops
    kept = [n for n in range(9) if not with_ids or ids[n] not in ids[:n]]
    kept_items = kept if is_one else [m for m in range(10) if not with_ids or item_ids[m] not in item_ids[:m]]
    ids_of_items, groups_of_items = (ids, groups) if is_one else (item_ids, item_groups)

    def excluded(query, item):
        n, m = kept[query], kept_items[item]
        return (with_ids and ids[n] == ids_of_items[m]) or (with_groups and groups[n] == groups_of_items[m])

    gallery, voters = (rows, labels) if is_one else (gallery, voters)
    sets = rows[kept], labels[kept].tolist(), None if is_one else gallery[kept_items], voters[kept_items].tolist()
    arguments = [torch.from_numpy(rows), labels, *(() if is_one else (torch.from_numpy(gallery), voters))]
    options |= {"k": (1, 3, 5), "temperature": temperature, "similarity": "dot"}
    if not has_match(sets[1], sets[3], excluded, is_one):
        with refused(ValueError, "knn_accuracy", "candidate", "label"):
            knn_accuracy(*arguments, **options)
        return
    expected = brute(*sets, options["k"], temperature, excluded)
    found = knn_accuracy(*arguments, **options)
    for key, value in found.values.items():
        if int(key.split("@")[1].split("_")[0]) > found.gallery:
            assert math.isnan(value)
        else:
            assert value == pytest.approx(expected[key], rel=1e-9)


def has_match(labels, voters, excluded, is_one):
    """Whether some query has a candidate of its label."""
    return any(
        label == voter and not excluded(n, m) and not (is_one and n == m)
        for n, label in enumerate(labels)
        for m, voter in enumerate(voters)
    )


def dino(rows, labels, gallery, gallery_labels, ks, temperature=0.07):
    """The rule of DINOv2's eval/knn.py: a softmax over the most neighbours, its parts summed by class up to each k."""
    rows, gallery = (torch.nn.functional.normalize(each.double()) for each in (rows, gallery))
    classes, hits = int(gallery_labels.max()) + 1, {f"knn@{k}{name}": 0 for k in ks for name in LAST_RANKS}
    for row, label in zip(rows, labels, strict=True):
        score, index = (gallery @ row).topk(max(ks))
        weight = (score / temperature).softmax(0)
        for k in ks:
            votes = torch.zeros(classes, dtype=torch.float64)
            for n in range(k):
                votes[gallery_labels[index[n]]] += weight[n]
            for name, last_rank in LAST_RANKS.items():
                hits[f"knn@{k}{name}"] += label in votes.topk(last_rank).indices
    return {key: int(each) / len(rows) for key, each in hits.items()}


def clusters(n, classes=40, dim=16):
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(5))
    return centres[labels] + 1.4 * torch.randn(n, dim), labels


def test_equals_the_rule_of_dinov2():
    (gallery, gallery_labels), (rows, labels) = clusters(600), clusters(100)
    found = knn_accuracy(rows, labels, gallery, gallery_labels)
    assert found.values == pytest.approx(dino(rows, labels, gallery, gallery_labels, (10, 20, 100, 200)), abs=1e-6)
    assert 0.1 < found["knn@10"] < found["knn@10_top5"] < 1
    assert all(low < found[key] < high for key, (low, high) in found.intervals.items())
    assert json.loads(json.dumps(found.to_dict()))["metrics"]["knn@20"] == found["knn@20"]
    assert str(found).startswith("100 queries, 600 items that vote\nknn@10 ")


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "hamming"])
def test_order_and_names_do_not_matter(similarity):
    rows = torch.randint(-2, 3, (60, 4)).float()  # with many ties
    rows = torch.where(rows < 0, -1, 1) if similarity == "hamming" else rows
    labels, order = torch.randint(7, (60,)), torch.randperm(60)
    one = knn_accuracy(rows, labels, k=(3, 20), similarity=similarity)
    words = [f"c{9 - label}" for label in labels[order].tolist()]
    other = knn_accuracy(rows[order], words, k=(20, 3), similarity=similarity, memory_mb=1)
    assert all(torch.equal(one.per_query[key][order], other.per_query[key]) for key in one.values)
    options = {"k": (3, 20), "similarity": similarity, "share": Share(query_places=order)}
    assert knn_accuracy(rows[order], labels[order], **options) == one


def test_what_cannot_vote_is_counted():
    rows, labels = clusters(30, classes=5)
    found = knn_accuracy(rows, [*labels[:28].tolist(), 77, 78], k=(5, 29, 30))
    assert (found.queries, found.queries_without_match, found.gallery) == (28, 2, 29)
    assert math.isnan(found["knn@30"])
    assert not math.isnan(found["knn@29"])
    assert found.per_query["knn@5"].isnan().sum() == 2
    left_out, few = found.notes
    assert not missing_facts(left_out, (2, "30 queries", "label")), left_out
    assert not missing_facts(few, ("29 items", "knn@30, knn@30_top5", "NaN", "gallery", "k")), few


def test_numbers_of_any_library_are_numbers():
    rows, labels = clusters(30, classes=5)
    expected = knn_accuracy(rows, labels, k=3, temperature=0.5)
    for temperature in (np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        assert knn_accuracy(rows, labels, k=np.int64(3), temperature=temperature) == expected
    for wrong in (0, -1.0, math.nan, math.inf, True, "0.07", torch.tensor([0.5, 0.5])):
        with refused(ValueError, "knn_accuracy", f"temperature={wrong!r}", "0.07, or None"):
            knn_accuracy(rows, labels, k=3, temperature=wrong)
    with refused(ValueError, "knn_accuracy", "k", "empty", "(10, 20)"):
        knn_accuracy(rows, labels, k=())


def test_an_accuracy_that_naming_the_largest_class_reaches_is_noted():
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(400, 8, generator=generator), (torch.arange(400) % 20 == 0).long()
    noted = knn_accuracy(rows, labels, k=(5, 20))
    assert not all(missing_facts(note, ("knn@5", "knn@20", "0.950")) for note in noted.notes), noted.notes
    for separable, classes in ((torch.eye(2)[labels] + 0.1 * rows[:, :2], labels), (rows, torch.zeros(400))):
        assert not any("knn@5" in note for note in knn_accuracy(separable, classes.long(), k=5).notes)


def test_a_matrix_of_another_shape_is_refused_with_the_cure_on_several_processes():
    def work(processes):
        return knn_accuracy(torch.ones(4, 2, 3), [0, 1, 0, 1], share=Share(processes))

    for outcome in in_threads(2, work):
        with refused(ValueError, "knn_accuracy", "queries", "(4, 2, 3)", "queries.flatten(1)"):
            raise outcome


def test_processes_that_all_hold_nothing_are_told_the_shape():
    nothing = torch.empty(0, 3), torch.empty(0, dtype=torch.long)
    for outcome in in_threads(2, lambda processes: knn_accuracy(*nothing, share=Share(processes))):
        with refused(ValueError, "knn_accuracy", "queries", "(0, 3)", "process"):
            raise outcome
