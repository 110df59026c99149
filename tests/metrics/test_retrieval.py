"""The RetrievalEvaluation metric: any cut into batches, copies, and several processes."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection, MetricTracker

from fewshot_callbacks.functional import DEFAULT_METRICS, Relevance, evaluate_retrieval
from fewshot_callbacks.functional._labels import LabelFormsError
from fewshot_callbacks.metrics import RetrievalEvaluation
from tests.cases import examples
from tests.messages import missing_facts, refused, warned
from tests.metrics import process_jobs
from tests.metrics.cases import COPIES, WRONG_BATCHES

SETTINGS = {"metrics": ("mAP", "recall@1", "recall@3")}


def clustered_items(items=30, classes=5):
    generator = torch.Generator().manual_seed(items)
    number = torch.arange(items) % classes
    centres = torch.randn(classes, 6, generator=generator)
    return centres[number] + torch.randn(items, 6, generator=generator), number - 2**61


def fill(metric, embeddings, labels, size):
    for batch in zip(embeddings.split(size), labels.split(size), strict=True):
        metric.update(*batch)
    return metric


def assert_metrics_are(found, expected):
    """The metrics of a report, as float64 scalars."""
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == torch.float64
        assert value.item() == pytest.approx(float(expected[name]), abs=1e-12, nan_ok=True), name


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(2, 24), st.lists(st.integers(0, 24), max_size=4), st.sampled_from(["cosine", "euclidean"]))
def test_batches_of_any_cut_give_the_values_of_the_function(items, cuts, similarity):
    embeddings, labels = clustered_items(items, 4 if items >= 8 else 1)
    metric = RetrievalEvaluation(**SETTINGS, similarity=similarity)
    for start, stop in itertools.pairwise(sorted({0, items, *(min(cut, items) for cut in cuts)})):
        metric.update(embeddings[start:stop], labels[start:stop])
    expected = evaluate_retrieval(embeddings, labels, **SETTINGS, similarity=similarity)
    assert_metrics_are(metric.compute(), expected.metrics())
    assert metric.report == expected


@pytest.mark.parametrize("name", COPIES)
def test_a_copied_metric_takes_further_batches(name):
    embeddings, labels = clustered_items()
    metric = COPIES[name](fill(RetrievalEvaluation(**SETTINGS), embeddings[:20], labels[:20], 8))
    fill(metric, embeddings[20:], labels[20:], 8)
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())


def test_what_is_kept_is_a_compact_copy_in_the_dtype_of_the_model():
    embeddings, labels = clustered_items()
    wide = torch.cat([embeddings, embeddings], dim=1).half().requires_grad_()
    metric = RetrievalEvaluation(**SETTINGS)
    metric.update(wide[:, :6], labels)
    expected = evaluate_retrieval(embeddings.half(), labels.clone(), **SETTINGS)
    with torch.no_grad():
        wide.fill_(0)
        labels.fill_(0)
    assert_metrics_are(metric.compute(), expected.metrics())
    (kept,) = metric.embeddings
    assert kept.dtype == torch.float16
    assert not kept.requires_grad
    assert kept.untyped_storage().nbytes() == kept.numel() * 2


def test_keywords_of_torchmetrics_stand_beside_the_settings():
    metric = RetrievalEvaluation(metrics=("mAP", "recall@2"), label_groups=None, sync_on_compute=False)
    assert not metric.sync_on_compute
    assert fill(metric, *clustered_items(), 10).compute().keys() == {"mAP", "recall@2"}


def test_a_plot_has_a_point_or_a_line_for_each_value_but_the_threshold():
    metric = RetrievalEvaluation(**SETTINGS | {"metrics": ("mAP", "recall@1", "pair_threshold")})
    results = [metric(*clustered_items()), metric(*clustered_items(20))]
    for values, expected in ((None, [metric.compute()]), (results, results)):
        _, axes = metric.plot(values)
        lines = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
        for name in ("mAP", "recall@1"):
            assert lines[name] == [float(result[name]) for result in expected]
        assert "pair_threshold" not in lines


def test_forward_gives_the_batch_and_keeps_the_whole_and_the_report_is_that_of_the_last_compute():
    embeddings, labels = clustered_items(40, 5)
    metric = RetrievalEvaluation(**SETTINGS)
    assert metric.report is None
    for batch in zip(embeddings.split(20), labels.split(20), strict=True):
        assert_metrics_are(metric(*batch), evaluate_retrieval(*batch, **SETTINGS).metrics())
        assert metric.report.queries == 20
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())
    assert metric.report.queries == 40
    metric.reset()
    assert metric.report is None


def test_forward_of_a_batch_without_a_match_keeps_what_was_collected():
    embeddings, labels = clustered_items(40, 5)
    metric = RetrievalEvaluation(**SETTINGS)
    metric(embeddings[:20], labels[:20])
    with warned(UserWarning, "RetrievalEvaluation", "NaN", 4, "queries", "class"):
        found = metric(embeddings[20:24], torch.arange(100, 104))
    assert_metrics_are(found, dict.fromkeys(SETTINGS["metrics"], np.nan))
    with refused(ValueError, 4, "embeddings", 3, "labels"):
        metric(embeddings[20:24], labels[:3])
    metric(embeddings[24:], labels[24:])
    whole = torch.cat([labels[:20], torch.arange(100, 104), labels[24:]])
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, whole, **SETTINGS).metrics())
    assert not metric._is_synced
    assert metric._to_sync
    sets = RetrievalEvaluation()
    with warned(UserWarning, "RetrievalEvaluation", "NaN", 3, "relevance"):
        assert all(value.isnan() for value in sets(torch.eye(3), torch.eye(3).long()).values())


def test_ids_are_the_same_integers_in_any_form():
    embeddings, labels = clustered_items(30, 5)
    metric = RetrievalEvaluation(**SETTINGS)
    forms = (lambda ids: ids, lambda ids: list(ids.numpy()), lambda ids: ids.tolist(), lambda ids: ids.numpy(), list)
    for form in forms:  # the same items, each time
        metric.update(embeddings, labels, ids=form(torch.arange(30)))
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())


def test_a_word_may_begin_with_any_character():
    embeddings, labels = clustered_items(30, 5)
    begin = ["\0", "\x002 ", "\ud800", "\ud8003 ", "[", '"']
    words = [f"{begin[label % len(begin)]}{label} 1" for label in labels.tolist()]
    metric = RetrievalEvaluation(**SETTINGS)
    metric.update(embeddings, words)
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, words, **SETTINGS).metrics())
    assert metric.report.label_names == tuple(sorted(set(words)))


@pytest.mark.parametrize("name", ["ids", "groups", "is_gallery"])
def test_an_argument_or_a_dimension_of_one_process_alone_is_refused_by_all(on_ranks, name):
    for answers in on_ranks:
        messages = answers["given_by_one"]
        assert missing_facts(messages[name], (name, 4, 4 * len(on_ranks), "process")) == []
        assert missing_facts(messages["dim"], ("dimension", 3, "process 0", 2, "process 1")) == []


def test_compute_before_update_says_what_to_call():
    metric = RetrievalEvaluation()
    with (
        warned(UserWarning, "RetrievalEvaluation", "compute", "update"),
        refused(ValueError, "RetrievalEvaluation.compute", "update(embeddings, labels)"),
    ):
        metric.compute()


@pytest.mark.parametrize(
    ("batch", "facts"),
    [
        *(((rows, labels), ("RetrievalEvaluation", *facts)) for rows, labels, facts in WRONG_BATCHES[::3]),
        ((torch.ones(2, 6), [0, 1], None, [0.5, 1.0]), ("is_gallery", "torch.float32", "(2,)", "boolean")),
    ],
)
def test_a_refused_batch_leaves_the_metric_as_it_was(batch, facts):
    metric = RetrievalEvaluation(**SETTINGS)
    with refused(ValueError, *facts):
        metric.update(**dict(zip(("embeddings", "labels", "ids", "is_gallery"), batch, strict=False)))
    embeddings, labels = clustered_items()
    fill(metric, embeddings, labels, 10)
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())


def test_of_items_with_one_id_the_first_counts():
    embeddings, labels = clustered_items(30, 5)
    metric = RetrievalEvaluation(**SETTINGS)
    for some in torch.cat([torch.arange(30), torch.arange(9)]).split(13):
        metric.update(embeddings[some], labels[some], ids=some)
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())
    shared = RetrievalEvaluation(**SETTINGS)
    shared.update(embeddings, labels, ids=torch.arange(30) // 2 % 15)
    with warned(UserWarning, "RetrievalEvaluation", "ids", 15, 30):
        found = shared.compute()
    assert_metrics_are(found, evaluate_retrieval(embeddings[::2], labels[::2], **SETTINGS).metrics())


@pytest.mark.parametrize("name", [*process_jobs.SHARDS, "half"])
def test_every_rank_gets_the_value_of_one_process(on_ranks, name):
    embeddings, labels = process_jobs.items()
    embeddings = embeddings.half() if name == "half" else embeddings
    expected = evaluate_retrieval(embeddings, labels, **SETTINGS).metrics()
    for answers in on_ranks:
        assert_metrics_are(answers["retrieval"][name], expected)


def test_what_a_sampler_repeats_is_found_by_ids(on_ranks):
    expected = evaluate_retrieval(*process_jobs.items(23), **SETTINGS).metrics()
    for answers in on_ranks:
        assert_metrics_are(answers["retrieval"]["ids"], expected)


def test_queries_and_a_gallery_with_ids_and_groups():
    embeddings, labels = clustered_items(40)
    in_gallery, groups, ids = torch.arange(40) >= 15, torch.arange(40) % 7, torch.arange(40) % 11
    filled = MetricCollection({"retrieval": RetrievalEvaluation(**SETTINGS)})
    for some in torch.arange(40).split(9):
        filled.update(embeddings[some], labels[some], is_gallery=in_gallery[some], groups=groups[some])
    sets = embeddings[:15], labels[:15], embeddings[15:], labels[15:]
    expected = evaluate_retrieval(*sets, query_groups=groups[:15], gallery_groups=groups[15:], **SETTINGS)
    assert_metrics_are(filled.compute(), expected.metrics())
    copies = RetrievalEvaluation(**SETTINGS)
    copies.update(embeddings, labels, ids=ids, is_gallery=in_gallery)  # one id, several items: the first of each side
    with warned(UserWarning, "RetrievalEvaluation", "ids", 11):
        found = copies.compute()
    sets = embeddings[:11], labels[:11], embeddings[15:26], labels[15:26]
    assert_metrics_are(
        found, evaluate_retrieval(*sets, query_ids=ids[:11], gallery_ids=ids[15:26], **SETTINGS).metrics()
    )


def test_several_labels_an_item():
    targets = torch.randint(0, 2, (30, 4), generator=torch.Generator().manual_seed(0))
    embeddings = clustered_items()[0]
    metric = fill(RetrievalEvaluation(), embeddings, targets, 8)
    assert_metrics_are(metric.compute(), evaluate_retrieval(embeddings, targets).metrics())
    with refused(LabelFormsError, "RetrievalEvaluation.update", "labels", "zeros and ones", 4, "integers"):
        metric.update(embeddings, torch.zeros(30, dtype=torch.long))


@pytest.mark.parametrize(("words", "gallery"), [(False, True), (True, False)])
def test_judgements_by_id(words, gallery):
    embeddings, in_gallery = clustered_items(40)[0], torch.arange(40) >= 15
    ids = [f"item {i}" if words else i for i in range(40)]
    queries = 15 if gallery else 40
    judged = {ids[i]: {ids[(i * 3 + step) % 25 + 15]: 1 + step % 2 for step in range(3)} for i in range(1, queries)}
    metric = RetrievalEvaluation(judgements=judged, metrics=("mAP", "ndcg@5"))
    for some in torch.randperm(40).split(9):
        flag = {"is_gallery": in_gallery[some]} if gallery else {}
        metric.update(embeddings[some], ids=[ids[i] for i in some.tolist()], **flag)
    names = (ids[:15], ids[15:]) if gallery else (ids,)
    relevance = Relevance.from_judgements(judged, *names)
    sets = {"queries": embeddings[:15], "gallery": embeddings[15:]} if gallery else {"queries": embeddings}
    assert_metrics_are(
        metric.compute(), evaluate_retrieval(**sets, relevance=relevance, metrics=("mAP", "ndcg@5")).metrics()
    )
    unknown = RetrievalEvaluation(judgements={"nobody": ["item 3"]})
    unknown.update(embeddings, ids=[f"item {i}" for i in range(40)])
    with refused(ValueError, "query", "ids", "'nobody'", "judgements"):
        unknown.compute()


def test_the_smallest_relevant_grade_and_judgements_of_ids_that_no_item_has():
    """As `Relevance.from_judgements` takes them."""
    judged = {0: {2: 1, 3: 2, 9: 2}, 1: {3: 1, 4: 2}, 8: {2: 1}}
    items = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    for options in ({"at_least": 2, "unknown": "ignore"}, {"unknown": "ignore"}):
        metric = RetrievalEvaluation(judgements=judged, metrics=("mAP", "ndcg@5"), **options)
        metric.update(items, ids=range(5), is_gallery=torch.arange(5) > 1)
        relevance = Relevance.from_judgements(judged, [0, 1], [2, 3, 4], **options)
        expected = evaluate_retrieval(items[:2], gallery=items[2:], relevance=relevance, metrics=("mAP", "ndcg@5"))
        assert_metrics_are(metric.compute(), expected.metrics())
        assert metric.report.notes == expected.notes
    strict = RetrievalEvaluation(judgements=judged, at_least=2)
    strict.update(items, ids=range(5), is_gallery=torch.arange(5) > 1)
    with refused(ValueError, "query", "ids", 8, 1, "judgements", "unknown='ignore'"):
        strict.compute()


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"judgements": {0: [1]}, "at_least": 0}, ("at_least=0", "positive")),
        ({"judgements": {0: [1]}, "at_least": "high"}, ("at_least", "'high'", "number")),
        ({"judgements": {0: [1]}, "unknown": "drop"}, ("unknown='drop'", "'error'", "'ignore'")),
        ({"at_least": 2}, ("at_least", "unknown", "judgements")),
        ({"unknown": "ignore"}, ("at_least", "unknown", "judgements")),
    ],
)
def test_wrong_choices_about_judgements_are_refused_at_construction(options, facts):
    with refused(ValueError, "RetrievalEvaluation", *facts):
        RetrievalEvaluation(**options)


@pytest.mark.parametrize(
    ("judgements", "batch", "facts"),
    [
        (None, {}, ("neither", "labels", "judgements", "RetrievalEvaluation(judgements=...)")),
        ({0: [1]}, {"labels": [0, 1]}, ("both", "labels", "judgements", "RetrievalEvaluation(judgements=...)")),
        ({0: [1]}, {}, ("judgements", "items", "ids")),
        (None, {"labels": [0, 1], "is_gallery": [0, 1]}, ("is_gallery", "(2,)", "torch.int64", "boolean", 2)),
    ],
)
def test_arguments_that_an_update_lacks_or_has_too_much_are_named(judgements, batch, facts):
    with refused(ValueError, "RetrievalEvaluation.update", *facts):
        RetrievalEvaluation(judgements=judgements).update(torch.eye(2), **batch)


def test_an_argument_of_some_batches_alone_is_refused():
    metric = RetrievalEvaluation()
    metric.update(torch.eye(2), [0, 1])
    for name, value in (("ids", [0, 1]), ("groups", [0, 1]), ("is_gallery", True)):
        with refused(ValueError, "RetrievalEvaluation.update", name, "batch"):
            metric.update(torch.eye(2), [0, 1], **{name: value})


def test_ids_of_judgements_are_integers_of_any_kind():
    for form in (list, np.array, lambda ids: [np.int64(i) for i in ids], torch.tensor):
        metric = RetrievalEvaluation(judgements={0: [2], 1: [3]}, metrics="mAP")
        metric.update(torch.eye(4)[[0, 1]], ids=form([0, 1]), is_gallery=False)
        metric.update(torch.eye(4)[[0, 1]], ids=form([2, 3]), is_gallery=True)
        assert metric.compute()["mAP"] == 1


def test_items_that_come_twice_are_a_warning_and_ids_leave_them_out():
    embeddings, labels = clustered_items(40)
    index = torch.cat([torch.arange(40), torch.arange(10)])
    metric, named = RetrievalEvaluation(**SETTINGS), RetrievalEvaluation(**SETTINGS)
    for some in index.split(9):
        metric.update(embeddings[some], labels[some])
        named.update(embeddings[some], labels[some], ids=some)
    with warned(UserWarning, "RetrievalEvaluation", 20, 50, "copy", "query_ids="):
        metric.compute()
    assert_metrics_are(named.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())


@pytest.mark.parametrize(
    ("metrics", "higher"),
    [
        (DEFAULT_METRICS, True),
        (("mAP", "pair_threshold"), True),
        (("eer", "fnmr@fmr0.1"), False),
        (("opis@fmr0.1", "opis_gap@fmr0.1"), False),
        (("mAP", "eer"), None),
        (("pair_threshold",), None),
    ],
)
def test_the_direction_is_that_of_all_values_or_none(metrics, higher):
    assert RetrievalEvaluation(metrics=metrics).higher_is_better is higher
    assert copy.deepcopy(RetrievalEvaluation(metrics=metrics)).higher_is_better is higher
    if higher is not None:
        assert MetricTracker(RetrievalEvaluation(metrics=metrics), None).maximize is higher
