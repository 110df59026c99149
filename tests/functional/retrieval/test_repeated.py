"""Items that come several times: found bit for bit, noted, left out by their ids; and what only looks like it."""

import numpy as np
import pytest
import torch

from fewshot_callbacks.functional import evaluate_retrieval, grouped_recall, knn_accuracy, nearest
from fewshot_callbacks.functional._repeated import is_on_copies
from fewshot_callbacks.functional.retrieval import Share
from tests.integration_packages import integration
from tests.messages import missing_facts, refused, warned
from tests.thread_processes import in_threads

SETTINGS = {"label_groups": 2, "metrics": ("mAP", "recall@1", "grouped_recall@1", "recall@precision0.5")}


def items(number=100, dim=16, classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % classes
    centres = 0.6 * torch.randn(classes, dim, generator=generator)
    return centres[labels] + torch.randn(number, dim, generator=generator), labels


EMBEDDINGS, LABELS = items()
TWICE = torch.cat([torch.arange(100), torch.arange(20)])


def on_copies(report):
    """The notes on copies."""
    return list(filter(is_on_copies, report.notes))


def copies_by_definition(rows, labels):
    """How many items of one set equal another one of their label."""
    pairs = [(row.tobytes(), label) for row, label in zip(rows.numpy(), labels.tolist(), strict=True)]
    return sum(pairs.count(pair) > 1 for pair in pairs)


# ----------------------------------------------------------------------------------------------------------- the cure


@pytest.mark.parametrize("order", ["at the end", "shuffled"])
@pytest.mark.parametrize("form", ["integers", "words", "NumPy"])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "hamming"])
def test_a_set_with_repeated_items_and_their_ids_is_the_set(similarity, form, order):
    rows, index = EMBEDDINGS.sign() if similarity == "hamming" else EMBEDDINGS, TWICE
    if order == "shuffled":
        index = torch.cat([torch.arange(100), torch.randint(100, (60,), generator=torch.Generator().manual_seed(1))])
        index = torch.cat([index[:50], index[130:], index[50:130]])
    ids = {"integers": index, "words": [f"{n}.png" for n in index.tolist()], "NumPy": index.numpy()}[form]
    found = evaluate_retrieval(rows[index], LABELS[index], query_ids=ids, similarity=similarity, **SETTINGS)
    first = [place for place, n in enumerate(index.tolist()) if n not in index[:place].tolist()]
    assert found == evaluate_retrieval(rows[index[first]], LABELS[index[first]], similarity=similarity, **SETTINGS)
    assert found.queries == found.gallery == 100
    assert found.counted.tolist() == first
    assert torch.equal(found.query_labels, LABELS[index[first]])


def test_ids_that_are_all_different_change_nothing():
    found = evaluate_retrieval(EMBEDDINGS, LABELS, query_ids=torch.arange(100).flip(0), **SETTINGS)
    assert found == evaluate_retrieval(EMBEDDINGS, LABELS, **SETTINGS)
    assert found.counted is None


def test_ids_of_groups_label_sets_and_draws():
    cameras, several = (
        torch.arange(100) // 5,
        torch.nn.functional.one_hot(LABELS, 10) | torch.eye(10).long().roll(1)[LABELS],
    )
    found = evaluate_retrieval(
        EMBEDDINGS[TWICE], LABELS[TWICE], query_ids=TWICE, query_groups=cameras[TWICE], **SETTINGS
    )
    assert found == evaluate_retrieval(EMBEDDINGS, LABELS, query_groups=cameras, **SETTINGS)
    assert evaluate_retrieval(EMBEDDINGS[TWICE], several[TWICE], query_ids=TWICE) == evaluate_retrieval(
        EMBEDDINGS, several
    )
    some = evaluate_retrieval(EMBEDDINGS[TWICE], LABELS[TWICE], query_ids=TWICE, max_queries=40, **SETTINGS)
    assert some == evaluate_retrieval(EMBEDDINGS, LABELS, max_queries=40, **SETTINGS)


def test_ids_of_rows_on_disk(tmp_path):
    np.save(tmp_path / "rows.npy", EMBEDDINGS[TWICE].numpy())
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    found = evaluate_retrieval(rows, LABELS[TWICE], query_ids=TWICE, memory_mb=0.01, **SETTINGS)
    assert found.values == evaluate_retrieval(EMBEDDINGS, LABELS, **SETTINGS).values
    assert on_copies(evaluate_retrieval(rows, LABELS[TWICE], memory_mb=0.01, **SETTINGS))


def test_ids_in_the_other_functions():
    rows, labels = EMBEDDINGS[TWICE], LABELS[TWICE]
    grouped = grouped_recall(rows, labels, query_ids=TWICE, label_groups=2)
    assert grouped == grouped_recall(EMBEDDINGS, LABELS, label_groups=2)
    votes = knn_accuracy(rows, labels, query_ids=TWICE, k=(1, 5))
    assert votes == knn_accuracy(EMBEDDINGS, LABELS, k=(1, 5))
    found, expected = nearest(rows, labels, query_ids=TWICE, k=3), nearest(EMBEDDINGS, LABELS, k=3)
    assert torch.equal(found.query_indices, torch.arange(100))
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.scores, expected.scores)
    of_copy = nearest(rows, labels, query_ids=TWICE, query_indices=[103, 3], k=3)
    assert torch.equal(of_copy.indices, expected.indices[[3, 3]])
    assert torch.equal(of_copy.query_indices, torch.tensor([103, 3]))


@pytest.mark.parametrize("function", [evaluate_retrieval, grouped_recall, nearest])
def test_query_ids_name_the_items_of_one_set_and_both_ids_those_of_two(function):
    without_gallery = (function.__name__, "gallery_ids", "gallery", "query_ids=")
    with refused(ValueError, *without_gallery):
        function(EMBEDDINGS, LABELS, gallery_ids=TWICE[:100])
    with refused(ValueError, *without_gallery):
        function(EMBEDDINGS, LABELS, query_ids=TWICE[:100], gallery_ids=TWICE[:100])
    with refused(ValueError, "query_ids", "gallery_ids", "both"):
        function(EMBEDDINGS, LABELS, EMBEDDINGS, LABELS, query_ids=TWICE[:100])
    with refused(ValueError, "100 queries", "120 query_ids"):
        function(EMBEDDINGS, LABELS, query_ids=TWICE)


def test_repeated_items_of_two_sets_count_once_by_their_ids():
    queries, items = (
        torch.cat([torch.arange(40), torch.arange(10)]),
        torch.cat([torch.arange(20, 100), torch.arange(25, 60)]),
    )

    def sets(*indices):
        return [array[index] for index in indices for array in (EMBEDDINGS, LABELS)]

    once = torch.arange(40), torch.arange(20, 100)
    for function, options in ((evaluate_retrieval, SETTINGS), (grouped_recall, {"label_groups": 2})):
        found = function(*sets(queries, items), query_ids=queries, gallery_ids=items, **options)
        assert found == function(*sets(*once), query_ids=once[0], gallery_ids=once[1], **options)
    report = evaluate_retrieval(*sets(queries, items), query_ids=queries, gallery_ids=items, **SETTINGS)
    assert report.counted.tolist() == once[0].tolist()
    indices = nearest(*sets(queries, items), query_ids=queries, gallery_ids=items, k=70).indices
    assert (indices < 80).all()  # the first of each id
    assert len(indices) == 40


def test_ids_of_two_sets_that_different_items_share_are_noted():
    ids = torch.arange(100)
    found = evaluate_retrieval(
        EMBEDDINGS, LABELS, EMBEDDINGS, LABELS, query_ids=ids // 2, gallery_ids=100 + ids // 4, **SETTINGS
    )
    assert not missing_facts(found.notes[0], ("query_ids", "50 ids", "embedding", "label")), found.notes
    assert not missing_facts(found.notes[1], ("gallery_ids", "25 ids", "embedding", "label")), found.notes


def test_ids_that_different_items_share_are_noted():
    found = evaluate_retrieval(EMBEDDINGS, LABELS, query_ids=torch.arange(100) // 2, **SETTINGS)
    assert found.queries == 50
    assert not missing_facts(found.notes[0], ("50 ids", "embedding", "label")), found.notes


def test_ids_of_a_gallery_that_votes_leave_out_the_query_itself():
    """The gallery holds some of the queries, and items of its own, one of them twice."""
    gallery, gallery_labels = torch.cat([EMBEDDINGS[30:], EMBEDDINGS[50:51]]), torch.cat([LABELS[30:], LABELS[50:51]])
    ids = torch.cat([torch.arange(30, 100), torch.tensor([50])])
    found = knn_accuracy(
        EMBEDDINGS[:60], LABELS[:60], gallery, gallery_labels, query_ids=torch.arange(60), gallery_ids=ids, k=(1, 5)
    )
    for query in range(60):
        others = [n for n in range(30, 100) if n != query]
        alone = knn_accuracy(EMBEDDINGS[[query]], LABELS[[query]], EMBEDDINGS[others], LABELS[others], k=(1, 5))
        assert {key: float(of[query]) for key, of in found.per_query.items()} == {
            key: float(of[0]) for key, of in alone.per_query.items()
        }
    assert list(filter(is_on_copies, found.notes)) == []


# ----------------------------------------------------------------------------------------------------------- the note


def test_repeated_items_are_counted_and_noted_with_what_they_do_to_recall():
    right = evaluate_retrieval(EMBEDDINGS, LABELS, **SETTINGS)
    assert (right.queries_with_copies, on_copies(right)) == (0, [])
    found = evaluate_retrieval(EMBEDDINGS[TWICE], LABELS[TWICE], **SETTINGS)
    assert found.queries_with_copies == copies_by_definition(EMBEDDINGS[TWICE], LABELS[TWICE]) == 40
    (note,) = on_copies(found)
    # each copy is hidden from the items it equals
    without = []
    for query in range(120):
        others = (TWICE[query] != TWICE).nonzero().flatten()
        scores = torch.nn.functional.cosine_similarity(EMBEDDINGS[TWICE[query]], EMBEDDINGS[TWICE[others]])
        without.append(float(LABELS[TWICE[others[scores.argmax()]]] == LABELS[TWICE[query]]))
    recalls = (f"{found['recall@1']:.3f}", f"{np.mean(without):.3f}")
    assert not missing_facts(note, (40, "120 queries", "33 %", "recall@1", *recalls, "query_ids=")), note


def test_the_queries_passed_as_the_gallery_are_noted_with_the_right_recall():
    found = evaluate_retrieval(EMBEDDINGS, LABELS, EMBEDDINGS, LABELS, **SETTINGS)
    right = evaluate_retrieval(EMBEDDINGS, LABELS, **SETTINGS)
    assert found["recall@1"] == 1.0
    assert found.queries_with_copies == 100
    (note,) = on_copies(found)
    assert not missing_facts(note, ("recall@1", "1.000", f"{right['recall@1']:.3f}", "gallery")), note
    excluded = evaluate_retrieval(
        EMBEDDINGS, LABELS, EMBEDDINGS, LABELS, query_ids=TWICE[:100], gallery_ids=TWICE[:100], **SETTINGS
    )
    assert (excluded.queries_with_copies, on_copies(excluded)) == (0, [])
    groups = torch.arange(100) // 3
    excluded = evaluate_retrieval(EMBEDDINGS, LABELS, EMBEDDINGS, LABELS, query_groups=groups, gallery_groups=groups)
    assert excluded.queries_with_copies == 0


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_note_comes_in_any_precision_and_similarity(dtype, similarity):
    rows = EMBEDDINGS.to(dtype)[TWICE]
    found = evaluate_retrieval(rows, LABELS[TWICE], similarity=similarity, **SETTINGS)
    assert len(on_copies(found)) == 1
    assert on_copies(evaluate_retrieval(EMBEDDINGS.to(dtype), LABELS, similarity=similarity, **SETTINGS)) == []


def test_several_labels_words_and_draws_are_noted_too():
    several = torch.nn.functional.one_hot(LABELS, 10)
    assert len(on_copies(evaluate_retrieval(EMBEDDINGS[TWICE], several[TWICE]))) == 1
    words = [f"class {label}" for label in LABELS[TWICE].tolist()]
    assert len(on_copies(evaluate_retrieval(EMBEDDINGS[TWICE], words, max_queries=60, **SETTINGS))) == 1


def test_a_copy_of_another_label_is_none():
    found = evaluate_retrieval(EMBEDDINGS[TWICE], torch.cat([LABELS, (LABELS[:20] + 1) % 10]), **SETTINGS)
    assert (found.queries_with_copies, on_copies(found)) == (0, [])


def test_a_handful_among_many_is_counted_without_a_note():
    rows, labels = items(1000)
    index = torch.cat([torch.arange(1000), torch.arange(3)])
    found = evaluate_retrieval(rows[index], labels[index], metrics="mAP")
    assert (found.queries_with_copies, on_copies(found)) == (6, [])


def test_votes_of_a_gallery_that_holds_the_queries_are_noted():
    found = knn_accuracy(EMBEDDINGS[:40], LABELS[:40], EMBEDDINGS, LABELS, k=1)
    assert found["knn@1"] == 1.0
    (note,) = list(filter(is_on_copies, found.notes))
    assert not missing_facts(note, ("40 queries", "gallery")), note
    (note,) = list(filter(is_on_copies, knn_accuracy(EMBEDDINGS[TWICE], LABELS[TWICE], k=1).notes))
    assert not missing_facts(note, (40, "120 queries")), note
    assert knn_accuracy(EMBEDDINGS, LABELS, k=1).notes == ()


def test_grouped_recall_warns():
    with warned(UserWarning, "grouped_recall", 40, "120 queries", "33 %"):
        grouped_recall(EMBEDDINGS[TWICE], LABELS[TWICE], label_groups=2)


# ------------------------------------------------------------------------------------------------------- no false alarm


def one_hot(labels, scale=1.0):
    return scale * torch.nn.functional.one_hot(labels).float()


def relu(rows):
    return torch.cat([rows.relu(), torch.full((len(rows), 4), 0.25)], dim=1)


GENERATOR = torch.Generator().manual_seed(5)
FALSE_ALARMS = {
    "collapsed to a point": (torch.ones(100, 8), LABELS),
    "each class a point": (torch.randn(10, 16, generator=GENERATOR)[LABELS], LABELS),
    "some classes a point": (torch.where((LABELS < 3)[:, None], EMBEDDINGS[LABELS], EMBEDDINGS), LABELS),
    "one vector for a third of all": (
        torch.where((torch.arange(100) % 3 == 0)[:, None], EMBEDDINGS[0], EMBEDDINGS),
        LABELS,
    ),
    "zeros": (EMBEDDINGS.masked_fill((torch.arange(100) % 3 == 0)[:, None], 0.0), LABELS),
    "one hot": (one_hot(LABELS), LABELS),
    "one hot pairs": (one_hot(torch.arange(100) // 2, 0.3), torch.arange(100) // 2),
    "bits": ((one_hot(LABELS) * 3 + torch.randn(100, 10, generator=GENERATOR) > 0.7).float(), LABELS),
    "signs of unit length": (
        (one_hot(LABELS) * 3 + torch.randn(100, 10, generator=GENERATOR) - 0.7).sign() / 10**0.5,
        LABELS,
    ),
    "few levels": ((EMBEDDINGS[:, :4] / 2).round(), LABELS),
    "rounded to its class": ((EMBEDDINGS[LABELS] + 0.03 * EMBEDDINGS).mul(5).round() / 5, LABELS),
}


@pytest.mark.parametrize("name", FALSE_ALARMS)
def test_no_false_alarm(name):
    rows, labels = FALSE_ALARMS[name]
    assert copies_by_definition(rows, labels) > 1
    report = evaluate_retrieval(rows, labels, metrics="mAP")
    assert report.queries_with_copies == copies_by_definition(rows, labels)
    assert on_copies(report) == []
    assert list(filter(is_on_copies, knn_accuracy(rows, labels, k=1).notes)) == []


def test_codes_are_counted_without_a_note():
    codes = EMBEDDINGS[:, :4].sign()
    report = evaluate_retrieval(codes, LABELS, similarity="hamming", metrics="mAP")
    assert report.queries_with_copies == copies_by_definition(codes, LABELS) > 20
    assert on_copies(report) == []


BYTES = (30 * EMBEDDINGS).round().clamp(-127, 127)
RIGHT_ALARMS = {
    "rectified, with constant columns": relu(EMBEDDINGS),
    "int8": BYTES.to(torch.int8).float(),
    "halves": EMBEDDINGS.half().float(),
    "two dimensions": EMBEDDINGS[:, :2],
}


@pytest.mark.parametrize("name", RIGHT_ALARMS)
def test_repeated_items_are_noted_whatever_the_embedding(name):
    rows = RIGHT_ALARMS[name]
    assert on_copies(evaluate_retrieval(rows, LABELS, metrics="mAP")) == []
    assert len(on_copies(evaluate_retrieval(rows[TWICE], LABELS[TWICE], metrics="mAP"))) == 1


def test_single_items_of_each_class_are_noted_where_the_queries_are_the_gallery():
    names = torch.arange(100)
    assert len(on_copies(evaluate_retrieval(EMBEDDINGS, names, EMBEDDINGS, names, metrics="mAP"))) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_find_what_one_finds(count):
    index = TWICE[torch.randperm(120, generator=torch.Generator().manual_seed(2))]
    places = [torch.arange(rank, 120, count) for rank in range(count)]

    def evaluate(processes, **ids):
        mine = places[processes.rank]
        share = Share(processes, mine)
        given = {name: values[mine] for name, values in ids.items()}
        return evaluate_retrieval(EMBEDDINGS[index][mine], LABELS[index][mine], share=share, **given, **SETTINGS)

    alone = evaluate_retrieval(EMBEDDINGS[index], LABELS[index], **SETTINGS)
    for report in in_threads(count, evaluate):
        assert report.queries_with_copies == 40
        assert report == alone
    once = evaluate_retrieval(EMBEDDINGS[index], LABELS[index], query_ids=index, **SETTINGS)
    for report in in_threads(count, lambda processes: evaluate(processes, query_ids=index)):
        assert report == once
        assert torch.equal(report.counted, once.counted)


@pytest.mark.parametrize("items_of_all", [233, 61])
def test_samples_that_loaders_of_accelerate_repeat_count_once_by_their_ids(items_of_all):
    """Its sampler of batches begins again with the first, until all processes have the same number of full batches."""
    loaders = integration("accelerate.data_loader")
    rows, labels = items(items_of_all)
    right = evaluate_retrieval(rows, labels, **SETTINGS)
    dealt = [
        torch.cat([torch.tensor(batch) for batch in loaders.BatchSamplerShard(batches, 2, rank)])
        for batches in [torch.utils.data.BatchSampler(range(items_of_all), 16, drop_last=False)]
        for rank in range(2)
    ]
    assert sum(map(len, dealt)) > items_of_all

    def evaluate(processes, *, named):
        mine = dealt[processes.rank]
        ids = mine if named else None
        return evaluate_retrieval(rows[mine], labels[mine], query_ids=ids, share=Share(processes), **SETTINGS)

    for report in in_threads(2, lambda processes: evaluate(processes, named=False)):
        assert report["recall@1"] > right["recall@1"]
        assert "gather_for_metrics" in on_copies(report)[0]
    for report in in_threads(2, lambda processes: evaluate(processes, named=True)):
        assert report.values == pytest.approx(right.values, rel=1e-12)


def test_copies_are_noted_however_few_rows_a_process_has():
    """Each process has one pair of rows, of which nothing can be said; all of them together have three."""
    rows, labels = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)), torch.arange(6) // 2
    known = evaluate_retrieval(rows, labels, rows, labels, metrics="mAP")
    assert len(on_copies(known)) == 1

    def work(processes):
        mine = labels == processes.rank
        part = rows[mine], labels[mine]
        return evaluate_retrieval(*part, *part, metrics="mAP", share=Share(processes))

    assert [on_copies(report) for report in in_threads(3, work)] == 3 * [on_copies(known)]
