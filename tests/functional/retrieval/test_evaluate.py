"""`evaluate_retrieval` against brute force, scikit-learn and itself on other orders, scales, budgets and samples."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_curve

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional import evaluate_retrieval, plan_evaluation
from fewshot_callbacks.functional.items import EVERYTHING, Share
from fewshot_callbacks.functional.retrieval.inputs import collect_inputs
from tests.cases import clustered_items, examples
from tests.functional.retrieval.cases import check_all_metrics, retrieval_cases
from tests.messages import missing_facts, refused
from tests.reports import assert_same

SIMILARITIES = ("cosine", "dot", "euclidean")


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(retrieval_cases(SIMILARITIES), st.integers(1, 6), st.sampled_from([None, (0.0, 1.0), (-0.5, 0.25)]))
def test_equals_brute_force(case, k, bounds):
    check_all_metrics(case, k, threshold_bounds=bounds)


@settings(max_examples=examples(50), deadline=None)
@given(retrieval_cases(SIMILARITIES), st.floats(-1, 1))
@example({"queries": np.zeros((2, 1), np.float32), "query_labels": np.zeros(2, int), "similarity": "euclidean"}, -1.0)
def test_fixed_threshold(case, threshold):
    check_all_metrics(case, 1, threshold=threshold)


@pytest.mark.parametrize("noise", [0.3, 3.0, 100.0])
def test_larger_sets_equal_a_sorted_reference(noise):
    embeddings, labels = clustered_items(300, 20, 12, noise=noise)
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    scores, same = (unit @ unit.T).fill_diagonal_(-2), (labels[:, None] == labels).fill_diagonal_(False)
    asked = (*DEFAULT_METRICS, "fnmr@fmr0.001", "fnmr@fmr0.01", "fnmr@fmr0.2", "eer")
    report = evaluate_retrieval(embeddings, labels, metrics=asked)
    ranked = same.gather(1, scores.argsort(1, descending=True)).double()
    average = (ranked.cumsum(1) / torch.arange(1, 301) * ranked).sum(1) / ranked.sum(1)
    expected = average.mean().item(), ranked[:, 0].mean().item()
    assert (report.mAP, report["recall@1"]) == pytest.approx(expected, abs=1e-12)
    others = ~torch.eye(300, dtype=torch.bool)
    pairs, relevant = scores[others], same[others]
    tp = relevant[pairs.argsort(descending=True)].double().cumsum(0)
    f1 = 2 * tp / (torch.arange(1, len(tp) + 1) + relevant.sum())
    assert report["pair_f1"] == pytest.approx(f1.max().item(), abs=1e-12)
    area = average_precision_score(relevant, pairs)
    assert report.auc_pr.low - 1e-9 <= area <= report.auc_pr.high + 1e-9
    assert report.auc_pr.error < 0.01
    exact = evaluate_retrieval(embeddings, labels, metrics=("auc_pr",))
    assert exact.auc_pr.error < 1e-12
    assert exact["auc_pr"] == pytest.approx(area, abs=1e-9)
    false_match, match, _ = roc_curve(relevant, pairs, drop_intermediate=False)
    negatives = int((~relevant).sum())
    for rate, point in report.at_false_match_rate.items():
        allowed = false_match <= np.floor(rate * negatives + 1e-9) / negatives + 1e-15
        assert point.false_non_match_rate == pytest.approx(1 - match[allowed].max(), abs=1e-9)
        assert point.false_match_rate <= rate
    crossing = np.flatnonzero(1 - match <= false_match)[0]
    between = slice(crossing - 1, crossing + 1)
    expected = np.interp(0, -(1 - match - false_match)[between], false_match[between])
    assert report["eer"] == pytest.approx(expected, abs=2 / int(relevant.sum()))
    recalls = [recall for _, _, recall in report.curve]
    assert (recalls, recalls[-1]) == (sorted(recalls), 1.0)
    assert 20 < len(recalls) <= 200
    assert all(0 < precision <= 1 for _, precision, _ in report.curve)
    if noise == 3.0:  # neither perfect nor at chance
        assert [name for name, (low, high) in report.intervals.items() if not low < report[name] < high] == []


@settings(max_examples=examples(20), deadline=None)
@given(
    st.integers(0, 2**32), st.integers(3, 60), st.sampled_from([0.0, 0.5, 2.0]), st.booleans(),
    st.sampled_from(SIMILARITIES), st.sampled_from([{"threads": 1}, {"precision": "int8"}, {"precision": "float64"}]),
)  # fmt: skip
def test_order_memory_threads_and_precision_do_not_change_a_bit(seed, items, noise, two_sets, similarity, engine):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 12, (items,), generator=generator).repeat(2) * 5 - 2**40
    embeddings = (labels[:, None] % 7 + noise * torch.randn(2 * items, 4, generator=generator)).round(decimals=1)
    order, other = (torch.randperm(len(labels), generator=generator) for _ in range(2))
    options = {
        "metrics": ("mAP", "recall@2", "ndcg@5", "macro_mAP", "pair_f1", "recall@precision0.5", "grouped_recall@2"),
        "label_groups": 3 if len(labels.unique()) >= 3 else None,
        "similarity": similarity,
    }
    sets, permuted = (embeddings, labels), (embeddings[order], labels[order])
    if two_sets:
        sets, permuted = (*sets, *sets), (*permuted, embeddings[other], labels[other])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grouped recall over 1 group")
        report, again = evaluate_retrieval(*sets, **options), evaluate_retrieval(*permuted, **options)
        assert evaluate_retrieval(*sets, **options, memory_mb=0.5) == report
        with engine_options(**engine):
            assert evaluate_retrieval(*sets, **options) == report
    assert (repr(again.intervals), again) == (repr(report.intervals), report)


def test_a_distance_of_zero_has_no_sign():
    report = evaluate_retrieval(torch.ones(4, 2), torch.arange(4) // 2, similarity="euclidean", label_groups=None)
    assert math.copysign(1.0, report.decision.threshold) == 1.0


def test_a_cosine_does_not_see_the_length_of_an_embedding():
    embeddings, labels = torch.randn(60, 8), torch.arange(60) % 6
    longer = 2.0 ** torch.randint(-20, 20, (60, 1)) * embeddings  # powers of two round nothing
    options = {"label_groups": 3, "metrics": (*DEFAULT_METRICS, "eer")}
    report, other = (evaluate_retrieval(rows, labels, **options) for rows in (embeddings, longer))
    assert report.intervals == other.intervals
    assert report.decision == other.decision
    assert evaluate_retrieval(longer, labels, **options, similarity="dot").mAP != report.mAP


class TestInput:
    def test_accepts_numpy_half_and_mixed_precision_any_integers_and_gradients(self):
        embeddings, labels = clustered_items(80, 8, 16)
        expected = evaluate_retrieval(embeddings.half().float(), labels)
        halves = embeddings.half().requires_grad_()
        assert evaluate_retrieval(halves, labels.to(torch.uint8)) == expected
        assert halves.grad is None
        from_numpy = evaluate_retrieval(embeddings.half().float().numpy(), (labels - 4 + 2**62).numpy())
        assert from_numpy.mAP == expected.mAP
        wide, targets = embeddings.double(), torch.nn.functional.one_hot(labels)
        for y in (labels, targets):
            found = evaluate_retrieval(halves[:40], y[:40], wide[40:], y[40:], label_groups=None)
            assert found == evaluate_retrieval(halves[:40].double(), y[:40], wide[40:], y[40:], label_groups=None)

    @pytest.mark.parametrize(
        ("change", "facts"),
        [
            ({"queries": torch.randn(40)}, ("queries", "(items, dim)", "(40,)", "queries[None]", "queries[:, None]")),
            ({"queries": torch.randn(40, 2, 2)}, ("(40, 2, 2)", "queries.flatten(1)")),
            ({"queries": torch.zeros(40, 2, dtype=torch.long)}, ("queries", "torch.int64", "queries.float()")),
            (
                {"query_labels": torch.randn(40)},
                ("integer", "query_labels", "torch.float32", "list(map(str, query_labels.tolist()))"),
            ),
            ({"query_labels": torch.full((40, 3), 2)}, ("query_labels", "(40, 3)", 120, 0, 1)),
            ({"queries": torch.randn(0, 4), "query_labels": torch.arange(0)}, ("queries", "empty", "(0, 4)")),
            ({"query_labels": torch.arange(40)}, ("40 queries", "class", "40 labels", "once")),
            ({"gallery": torch.randn(3, 8)}, ("gallery", "gallery_labels", "both")),
            ({"gallery_labels": torch.arange(3)}, ("gallery", "gallery_labels", "both")),
            ({"gallery": torch.randn(3, 9), "gallery_labels": [0] * 3}, ("queries", 8, "gallery", 9)),
            (
                {"gallery": torch.randn(3, 8), "gallery_labels": [9] * 3},
                ("40 queries", "class", 0, "4 labels", "gallery"),
            ),
            ({"queries": torch.empty(40, 0)}, ("queries", "dimensions", "(40, 0)")),
            ({"query_groups": torch.arange(40) % 4}, ("40 queries", "class", "groups")),
            ({"gallery_ids": torch.arange(40)}, ("gallery_ids", "gallery", "query_ids=")),
        ],
    )
    def test_refuses_with_fact_and_fix(self, change, facts, as_users_run_it):
        embeddings, labels = clustered_items(40, 4, 8)
        with refused(ValueError, "evaluate_retrieval", *facts):
            evaluate_retrieval(**({"queries": embeddings, "query_labels": labels} | change))

    def test_non_finite_rows_are_counted_and_located(self):
        embeddings, labels = clustered_items(40, 4, 8)
        embeddings[[5, 31], 2] = torch.tensor([math.nan, -math.inf])
        with refused(ValueError, 2, "40 rows", "queries", "NaN", "Inf", "index 5"):
            evaluate_retrieval(embeddings, labels)


VECTORS, PLACES, LABELS = torch.arange(240).sin().view(40, 6), torch.arange(40), [f"class {n % 7}" for n in range(40)]


@pytest.mark.parametrize(
    ("similarity", "two", "max_queries"), [("cosine", False, None), ("cosine", True, 15), ("hamming", True, None)]
)
def test_places_put_the_items_of_one_process_in_order(similarity, two, max_queries):
    queries = VECTORS > 0 if similarity == "hamming" else VECTORS
    order, other, labels = torch.randperm(40), torch.randperm(30), torch.arange(40) % 7
    sets = {"queries": queries, "query_labels": labels, "query_groups": PLACES % 9}
    mixed = {name: part[order] for name, part in sets.items()}
    if two:
        gallery = {"gallery": queries[:30].flip(1), "gallery_labels": labels[:30], "gallery_groups": PLACES[:30] % 9}
        sets |= gallery
        mixed |= {name: part[other] for name, part in gallery.items()}
    options = {"label_groups": 3, "max_queries": max_queries, "similarity": similarity}
    if similarity == "cosine":
        options["metrics"] = (*DEFAULT_METRICS, "prototype_accuracy", "opis@fmr0.5")
    share = Share(query_places=order, gallery_places=other if two else None)
    assert_same(evaluate_retrieval(**sets, **options), evaluate_retrieval(**mixed, **options, share=share))


@pytest.mark.parametrize("places", [None, PLACES])
def test_one_set_in_order_is_not_copied(places):
    inputs = collect_inputs("test", Share(query_places=places), VECTORS, LABELS, None, None)
    assert inputs.queries.rows is inputs.gallery.rows
    assert inputs.queries.rows.data_ptr() == VECTORS.data_ptr()


def test_the_same_items_twice_are_one_set():
    def one_set(gallery=VECTORS, labels=LABELS, ids=PLACES, query_ids=PLACES):
        sets = VECTORS, LABELS, gallery.clone(), labels
        return collect_inputs("test", EVERYTHING, *sets, query_ids=query_ids, gallery_ids=ids).as_one_set()

    one = one_set()
    assert one.same_set
    assert one.queries is one.gallery
    assert one.queries.columns.keys() == {"labels"}
    kept = one_set(ids=PLACES // 2, query_ids=PLACES // 2)
    assert kept.same_set
    assert len(kept.queries.labels) == len(PLACES) // 2  # the first of each id
    others = {"gallery": VECTORS.flip(0)}, {"labels": LABELS[::-1]}, {"ids": PLACES.flip(0)}
    for other in (*others, {"ids": None, "query_ids": None}):  # without ids a copy is a match
        assert not one_set(**other).same_set


class TestMetrics:
    def test_keys_of_the_report_are_those_that_were_asked_for_in_their_order(self):
        asked = ("eer", "map@3_found", "macro_recall@1", "recall@7", "grouped_recall@2", "auc_pr", "fnmr@fmr0.01")
        report = evaluate_retrieval(*clustered_items(100, 20, 8), metrics=asked)
        assert tuple(report.metrics()) == tuple(json.loads(json.dumps(report.to_dict()))["metrics"]) == asked
        assert tuple(evaluate_retrieval(*clustered_items(100, 20, 8)).metrics()) == DEFAULT_METRICS

    def test_what_was_not_asked_for_is_no_quiet_number(self):
        report = evaluate_retrieval(*clustered_items(100, 20, 8), metrics=("pair_f1", "recall@2"))
        assert (report.grouped, report.notes) == (None, ())
        for missing in (lambda: report.mAP, lambda: report["mAP"]):
            with refused(LookupError, "'mAP'", "pair_f1", "recall@2", "metrics=('mAP', ...)"):
                missing()
        with refused(ValueError, "'recal@2'", "'recall@2'"):
            report["recal@2"]
        assert report.at("recall@{k}") == {2: report["recall@2"]}
        assert [key in report for key in ("recall@2", "mAP", 0)] == [True, False, False]

    def test_pairs_are_counted_where_that_was_asked_for(self):
        data, asked = clustered_items(100, 20, 8), ("mAP", "recall@2")
        report, whole = evaluate_retrieval(*data, metrics=asked), evaluate_retrieval(*data, metrics=(*asked, "pair_f1"))
        others = ({"threshold": 0.5}, {"metrics": ("eer", "mAP")}, {"metrics": ("opis@fmr0.1",)})
        counted = [whole, *(evaluate_retrieval(*data, **{"metrics": asked} | one) for one in others)]
        for name in ("decision", "at_precision", "at_false_match_rate", "auc_pr", "curve", "pair_counts"):
            with refused(LookupError, "pairs", "mAP", "recall@2", "metrics=('pair_f1', ...)", "threshold"):
                getattr(report, name)
            for other in counted:
                getattr(other, name)
        assert not {"curve", "auc_pr_bounds", "thresholds_at_precision"} & report.to_dict().keys()
        assert whole.to_dict()["curve"]
        assert report.metrics() == {key: whole[key] for key in asked}
        assert report.per_query["mAP"].tolist() == whole.per_query["mAP"].tolist()

    def test_error_rates_cross_inside_a_tie_and_a_single_class_has_none(self):
        scores = torch.tensor([3.0, 1, 1, 1, 1, 0, 0])[
            :, None
        ]  # FNMR falls from 2/3 to 0 where FMR rises from 0 to 1/2
        tied = evaluate_retrieval(torch.ones(1, 1), [1], scores, [1] * 3 + [0] * 4, similarity="dot", metrics="eer")
        assert tied["eer"] == pytest.approx(2 / 7, abs=1e-12)
        report = evaluate_retrieval(torch.randn(20, 4), [0] * 20, metrics=("fnmr@fmr0.1", "eer"))
        assert all(map(math.isnan, report.values.values()))


class TestSample:
    def test_a_sample_is_near_the_whole_and_says_what_it_is(self):
        data = clustered_items(800, 40, 16, noise=2.0)
        whole, part = evaluate_retrieval(*data), evaluate_retrieval(*data, max_queries=200)
        assert (part.queries, part.gallery, part.is_estimate, whole.is_estimate) == (200, 800, True, False)
        low, high = part.intervals["mAP"]
        assert low - (high - low) < whole.mAP < high + (high - low)
        assert not missing_facts(part.notes[0], (200, "800 queries", "seed 0")), part.notes
        assert evaluate_retrieval(*data, max_queries=200) == part
        assert evaluate_retrieval(*data, max_queries=200, seed=1).drawn.tolist() != part.drawn.tolist()
        assert evaluate_retrieval(*data, max_queries=800) == whole  # which is no sample

    def test_each_class_gives_its_share(self):
        labels = torch.tensor([0] * 100 + [1] * 300 + [2] * 600)
        drawn = evaluate_retrieval(torch.randn(1000, 2), labels, max_queries=100, seed=3, metrics="recall@1").drawn
        assert torch.bincount(labels[drawn]).tolist() == [10, 30, 60]

    def test_a_drawn_query_is_no_candidate_of_itself(self):
        embeddings, labels = clustered_items(60, 20, 8, noise=50.0)
        whole, part = (evaluate_retrieval(embeddings, labels, max_queries=n).per_class()["mAP"] for n in (None, 59))
        assert sum(part.get(label) == value for label, value in whole.items()) >= 19  # all but that of the lost query


@pytest.mark.parametrize("memory_mb", [0.3, 512])
def test_progress_ends_at_all_pairs_and_never_falls_back(memory_mb):
    """Where all pairs are counted once more, the total was doubled, and the bar fell from 100 to 50 %."""
    seen = []
    options = {"metrics": (*DEFAULT_METRICS, "recall@precision0.05", "recall@precision0.06"), "memory_mb": memory_mb}
    labels = torch.arange(1000) % 20
    report = evaluate_retrieval(torch.randn(1000, 8), labels, **options, progress=lambda *now: seen.append(now))
    assert (report.pair_counts.relevant, report.pair_counts.irrelevant) == (1000 * 49, 1000 * 950)
    assert {total for _, total in seen} == {10**6}
    assert (seen, seen[-1]) == (sorted(seen), (10**6, 10**6))


def test_one_by_hand_and_a_sample_of_its_queries():
    plan = plan_evaluation(1000, 2000, 128)
    assert (plan.pairs, plan.floating_point_operations) == (2_000_000, 512_000_000)  # 2 * 2e6 * 128
    assert (plan.query_bytes, plan.gallery_bytes, plan.copy_bytes) == (1000 * 128 * 4, 2000 * 128 * 4, 0)
    assert (plan.matrix_bytes, plan.memory_bytes) == (8_000_000, 512 * 10**6)
    assert plan_evaluation(10, 10, 4, relevant=0).tiles == 1
    some = plan_evaluation(1000, 2000, 128, max_queries=100)
    assert (some.queries, some.pairs, some.floating_point_operations) == (100, 200_000, 2 * 200_000 * 128)
    assert some.query_bytes == plan.query_bytes  # all of them are there to be drawn from
    assert some.tile[0] <= 100
    assert plan_evaluation(1000, 2000, 128, max_queries=5000) == plan


sizes = st.integers(1, 300_000)


@settings(max_examples=examples(100), deadline=None)
@given(sizes, sizes, st.integers(1, 4096), st.floats(-2, 4), st.integers(0, 5000))
def test_tiles_cover_every_pair_and_keep_to_the_budget_or_the_least_that_is_possible(n, m, dim, power, relevant):
    plan = plan_evaluation(n, m, dim, memory_mb=10**power, relevant=relevant)
    rows, columns = plan.tile
    assert 1 <= rows <= n
    assert 1 <= columns <= m
    assert plan.tiles == math.ceil(n / rows) * math.ceil(m / columns)
    assert plan.needed_bytes <= max(plan.memory_bytes, plan.least_bytes)
    assert plan.least_bytes == plan_evaluation(n, m, dim, memory_mb=1e-6, relevant=relevant).needed_bytes


WRONG = [
    *(({name: 0}, (f"{name}=0", "positive")) for name in ("queries", "gallery", "dim", "memory_mb", "max_queries")),
    *(({"relevant": one}, (f"relevant={one!r}", "whole", 1000)) for one in (2.5, "9", True)),
    ({"relevant": -1}, ("relevant=-1", "negative")),
    ({"dtype": "int4"}, ("dtype='int4'", "int8", "uint8", "float16", "bfloat16")),
]


@pytest.mark.parametrize(("change", "facts"), WRONG)
def test_a_plan_of_impossible_sizes_is_refused(as_users_run_it, change, facts):
    with refused(ValueError, "plan_evaluation", *facts):
        plan_evaluation(**{"queries": 10, "gallery": 10, "dim": 4} | change)


def test_half_precision_is_copied_and_float64_is_not():
    for dtype, size, copied in (("bfloat16", 2, 4), ("float64", 8, 0)):
        one, two = (plan_evaluation(1000, gallery, 16, dtype=dtype) for gallery in (1000, 500))
        assert (one.query_bytes, one.gallery_bytes, one.copy_bytes) == (16_000 * size, 16_000 * size, 16_000 * copied)
        assert (two.gallery_bytes, two.copy_bytes) == (8_000 * size, 24_000 * copied)


# ------------------------------------------------------------------------- what the report notes

TWELVE = torch.arange(12) % 3


def notes_of(embeddings, labels=TWELVE, **options):
    return evaluate_retrieval(embeddings, labels, label_groups=None, **options).notes


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "hamming"])
def test_a_collapse_is_one_vector_and_no_more(similarity):
    vectors = torch.tensor([[1.0, 1, 1], [1, -1, 1], [-1, 1, 1], [-1, -1, 1]])
    for distinct in (1, 2, 3, 4):
        # of a collapse the ties go without saying
        facts = ("embeddings", "collapsed") if distinct == 1 else (12, "12 queries", "tie")
        [note] = notes_of(vectors[torch.arange(12) // 3 % distinct], similarity=similarity)
        assert not missing_facts(note, facts), (distinct, note)


def test_ties_are_spoken_of_where_more_than_a_hundredth_of_the_queries_has_some():
    for items, said in ((200, False), (198, True)):
        embeddings = torch.randn(items, 8, generator=torch.Generator().manual_seed(0))
        embeddings[2] = embeddings[0]  # of two classes: each ties for the other of both
        notes = notes_of(embeddings, torch.arange(items) // 2)
        assert [missing_facts(note, (2, f"{items} queries", "tie")) for note in notes] == [[]] * said


def test_a_vector_of_length_zero_is_counted_where_that_matters():
    embeddings = torch.randn(12, 4)
    embeddings[[3, 7]] = 0
    facts = ("2 embeddings", "zero", "cosine")
    assert [missing_facts(note, facts) for note in notes_of(embeddings) if "zero" in note] == [[]]
    assert not any("zero" in note for note in notes_of(embeddings, similarity="dot"))


@pytest.mark.parametrize(
    ("similarity", "longer", "said"),
    [("dot", 2000, True), ("euclidean", 2000, True), ("dot", 500, False), ("cosine", 2000, False)],
)
def test_an_embedding_far_longer_than_the_others_is_named(similarity, longer, said):
    embeddings = torch.nn.functional.normalize(torch.randn(40, 8), dim=1)
    embeddings[17] *= longer
    told = [note for note in notes_of(embeddings, torch.arange(40) % 4, similarity=similarity) if "median" in note]
    facts = ("Gallery", "row 17", "2e+03", "batch", 'similarity="cosine"')
    assert [missing_facts(note, facts) for note in told] == [[]] * said
    assert not any("median" in note for note in notes_of(torch.eye(12, 4), similarity=similarity))  # zeros


def test_false_match_rates_below_one_irrelevant_pair_of_the_drawn_queries_are_named():
    embeddings = torch.randn(12, 4)  # 12 queries, 8 irrelevant items each
    for rates, told in (((1 / 96, 0.1), None), ((0.1, 0.0104), "0.0104"), ((1e-3, 1 / 96, 1e-6), "0.001, 1e-06")):
        notes = notes_of(embeddings, metrics=[f"fnmr@fmr{rate!r}" for rate in rates])
        facts = ("false match rate", 0.0104, "1 / 96", "96 irrelevant pairs", told)
        assert [missing_facts(note, facts) for note in notes] == [[]] * (told is not None)
    [note] = notes_of(embeddings[:6], [0] * 6, metrics="fnmr@fmr0.1")  # where there is no such pair
    assert not missing_facts(note, ("fnmr@fmr0.1", "NaN", "irrelevant")), note
    note = notes_of(torch.randn(400, 4), torch.arange(400) % 4, metrics="fnmr@fmr0.0001", max_queries=10)[1]
    assert not missing_facts(note, (0.000333, "1 / 3,000", "3,000 irrelevant pairs", 0.0001)), note


def test_a_printed_report_has_each_metric_in_a_line_with_its_interval_and_the_notes():
    report = evaluate_retrieval(torch.randn(60, 8), torch.arange(60) % 20, metrics=(*DEFAULT_METRICS, "eer"))
    first, *lines = str(report).splitlines()
    assert first == "60 queries, 60 gallery items, 20 classes"
    assert [line.split()[0] for line in lines[: len(report.values)]] == list(report.values)
    low, high = report.intervals["mAP"]
    assert lines[0].split() == ["mAP", f"{report.mAP:.4f}", f"({low:.4f}", "to", f"{high:.4f})"]
    assert tuple(lines[len(report.values) :]) == report.messages
