"""For any split of the items over processes, the report equals a one-process report, and all processes act alike."""

import itertools
import math
import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import DEFAULT_METRICS, InputError
from fewshot_callbacks.distributed.processes import ALONE, Alone, RemoteError
from fewshot_callbacks.engine.chunks import LEAST_CHUNKS, ChunkPlan, gather_in_item_order
from fewshot_callbacks.engine.evaluation import Evaluation
from fewshot_callbacks.engine.exchange import queries_of_symmetric_chunk
from fewshot_callbacks.engine.layout import plan_layout
from fewshot_callbacks.engine.options import computing, engine_options
from fewshot_callbacks.engine.ranks import RankCounter
from fewshot_callbacks.engine.thresholds import compute_thresholds
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.items import Share
from fewshot_callbacks.functional.retrieval.decisions import PooledRequest, decide
from fewshot_callbacks.functional.retrieval.inputs import collect_inputs
from tests.cases import examples
from tests.engine.cases import cases, engines
from tests.engine.oracles import TABLES, evaluated
from tests.engine.parts import assert_like_one, spread
from tests.messages import missing_facts, refused
from tests.reports import assert_same
from tests.thread_processes import in_threads

EVERYTHING = {
    "metrics": (*DEFAULT_METRICS, "map@3_min", "ndcg@4", "macro_mAP", "auc_pr", "recall@precision0.5", "fnmr@fmr0.1", "eer"),
    "label_groups": 2,
}  # fmt: skip


OPTIONS = {
    "ties": ["expected", "optimistic", "pessimistic"], "memory_mb": [512, 0.5], "threshold": [None, 0.5, -3.0],
    "max_queries": [None, None, 1, 30],
}  # fmt: skip


@settings(max_examples=examples(20), deadline=None)
@given(
    cases(), st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}), engines(),
    st.integers(1, 4), st.integers(0, 2**16), st.sampled_from([0, 1, 2]),
    st.sampled_from([None, None, torch.float16, torch.bfloat16]),
)  # fmt: skip
def test_the_report_is_that_of_one_process(case, options, road, count, seed, twice, dtype):
    """Also of one set given twice, of which each process holds the same items both times, or others."""
    sets, misses = dict(case), "_miss" * (seed % 2)
    metrics = [key + misses * key.startswith("grouped") for key in EVERYTHING["metrics"]]
    metrics += ["prototype_accuracy"] * (sets["similarity"] != "hamming")  # codes have no means
    options = EVERYTHING | options | {"similarity": sets.pop("similarity"), "metrics": metrics}
    sets["query_labels"] = sets["query_labels"] * (2**40 + 1) - 2**41
    if "gallery" in sets:
        sets["gallery_labels"] = sets["gallery_labels"] * (2**40 + 1) - 2**41
    elif twice and "query_groups" not in sets:
        ids = torch.arange(len(sets["query_labels"])) // 2
        sets |= {"gallery": sets["queries"].clone(), "gallery_labels": sets["query_labels"]}
        sets |= {"query_ids": ids, "gallery_ids": ids}
    for name in {"queries", "gallery"} & sets.keys():
        if dtype and options["similarity"] != "hamming":
            sets[name] = sets[name].to(dtype).nan_to_num()
    gallery_parts = spread(len(sets.get("gallery", ())), count, seed + twice % 2)
    with engine_options(**road):
        assert_like_one(spread(len(sets["query_labels"]), count, seed), sets, gallery_parts, **options)


@pytest.mark.parametrize(
    ("items", "memory_mb", "as_on_device", "noise"),
    [(1500, 256, False, 3.0), (120, 0.5, False, 0.3), (120, 0.5, False, 3.0), (120, 256, True, 0.3)],
)
def test_larger_sets(items, memory_mb, as_on_device, noise):
    """Enough pairs for a sample to choose how they are counted; or, with little memory, too many for one batch."""
    classes = items // 10
    labels = torch.arange(items) % classes
    sets = {"queries": torch.randn(classes, 24)[labels] + noise * torch.randn(items, 24), "query_labels": labels}
    for count in (2, 3):
        with engine_options(as_on_device=as_on_device):
            assert_like_one(spread(items, count, 3), sets, **EVERYTHING | {"memory_mb": memory_mb, "label_groups": 5})


@pytest.mark.parametrize("number", [7, 70])
def test_groups_of_labels_that_are_given(number):
    """Few or many, of three to five labels; the other labels are in none."""
    labels = torch.arange(600) % 300
    sets = {"queries": torch.randn(600, 6) + 0.1 * labels[:, None], "query_labels": labels}
    names = iter(torch.randperm(300).tolist())
    groups = [[next(names) for _ in range(3 + n % 3)] for n in range(number)]
    metrics = ("mAP", "grouped_recall@1_miss", "grouped_recall@2_miss")
    alone = assert_like_one(spread(600, 3, 5), sets, label_groups=groups, metrics=metrics)
    assert alone.grouped.dropped_labels == 300 - sum(map(len, groups))


def part_of(case, own, processes, threads=1):
    """Vectors and relevance of the items of one process."""
    rows, labels = case["queries"][own], case["query_labels"][own]
    inputs = collect_inputs("call", Share(processes, own), rows, labels, None, None)
    return Vectors.of(inputs.queries.rows, None, "cosine", threads=threads, processes=processes), inputs.relevance()[0]


def test_budgets_and_threads_that_differ():
    """By default the budget on a device is half of what is free there, which is another one in each process."""
    labels = torch.arange(300) % 30
    rows = torch.randn(30, 8)[labels] + 3 * torch.randn(300, 8)
    case, parts = {"queries": rows, "query_labels": labels, "similarity": "cosine"}, spread(300, 3, 3)
    request = PooledRequest((0.05, 0.5), false_match_rates=(0.1,), average_precision=True)
    with evaluated(case, request) as (result, truth):
        alone = decide(result.pooled, request)

    def work(processes):
        own = parts[processes.rank]
        with engine_options(threads=1 + processes.rank), computing() as threads:
            vectors, relevance = part_of(case, own, processes, threads)
            memory = (10**8, 1_150_000, 10**4)[processes.rank]
            found = {}

            def consume(block):
                for row, query in enumerate(own[block.queries].tolist()):
                    found[query] = [getattr(block, name)[row][block.valid[row]].tolist() for name in TABLES]

            result = Evaluation(vectors, relevance, memory).run(consume, questions=request.questions())
            return found, decide(result.pooled, request)

    counts, decisions = zip(*in_threads(3, work), strict=True)
    assert counts[0] | counts[1] | counts[2] == truth
    for other in decisions:
        for name in ("best_f1", "at_precision", "at_false_match_rate"):
            assert getattr(other, name) == getattr(alone, name)
        assert other.auc_pr.value == pytest.approx(alone.auc_pr.value, abs=1e-12)


def test_groups_of_labels_without_an_item_in_the_gallery():
    sets = {"queries": torch.randn(600, 8), "query_labels": torch.arange(600) % 300}
    sets |= {"gallery": torch.randn(40, 8), "gallery_labels": torch.arange(40) % 3}
    alone = assert_like_one(spread(600, 2, 1), sets, spread(40, 2, 2), label_groups=3)
    assert not missing_facts(alone.notes[-1], ("queries", "labels", "match", "label_groups")), alone.notes


def test_items_of_one_process_follow_those_of_the_one_before():
    """One that holds nothing need not know the dimension."""
    labels, embeddings = torch.tensor([0, 1, 0, 1, 2, 2]), torch.randn(6, 3)
    parts = ((torch.empty(0), torch.empty(0)), (embeddings[:4], labels[:4]), (embeddings[4:], labels[4:]))
    alone = evaluate_retrieval(embeddings, labels, label_groups=None)
    for report in in_threads(3, lambda one: evaluate_retrieval(*parts[one.rank], share=Share(one), label_groups=None)):
        assert report.query_labels.tolist() == labels.tolist()
        assert_same(alone, report)


def test_parts_of_different_precision_are_computed_in_the_widest():
    """In float32 the items of the second part would be one."""
    labels = torch.arange(20) % 4
    single, double = torch.randn(10, 3), 1 + 1e-9 * torch.randn(10, 3, dtype=torch.float64)
    options = {"similarity": "euclidean", "label_groups": None}
    alone = evaluate_retrieval(torch.cat([single.double(), double]), labels, **options)
    parts = [(single, labels[:10]), (double, labels[10:])]
    for some in (parts, parts[::-1]):

        def work(processes, some=some):
            return evaluate_retrieval(*some[processes.rank], share=Share(processes), **options)

        for report in in_threads(2, work):
            assert report.mAP == pytest.approx(alone.mAP, abs=1e-12)
            assert report.queries_with_ties == alone.queries_with_ties == 0


def test_parts_that_have_collapsed_to_points_of_their_own_are_two():
    sets = {"queries": 1e-9 * torch.eye(2)[torch.arange(8) % 2], "query_labels": torch.arange(8) // 2 % 2}
    assert_like_one([torch.arange(0, 8, 2), torch.arange(1, 8, 2)], sets, label_groups=None)


# ------------------------------------------------------------------------------------------------ what travels, who works


def test_no_process_is_sent_more_than_a_chunk_of_a_part():
    """In threads as in processes, the largest tensor that comes in is a chunk of the embeddings of another part."""
    items, dim, count = 400, 64, 4
    embeddings, labels = torch.randn(items, dim), torch.arange(items) % 200

    def work(processes):
        own = torch.arange(processes.rank, items, count)
        evaluate_retrieval(embeddings[own], labels[own], share=Share(processes, own), label_groups=5)
        return processes.most_received

    for largest in in_threads(count, work):
        assert 0 < largest <= 1.2 * items / count / LEAST_CHUNKS * dim  # groups of labels cannot be cut to size


@dataclass
class Watcher:
    """Observes tiles: marks the pairs that it sees, by their places among all, and adds up the sizes of the tiles."""

    estimates: Estimates
    queries: Any
    items: Any
    per_query: bool = False

    def __post_init__(self):
        self.seen, self.made = np.zeros((len(self.items), len(self.items)), int), 0

    def new_workspace(self):
        return None

    def see(self, tile, space):
        height, width = tile.estimates.shape
        own, first = self.queries[tile.row : tile.row + height], tile.chunk.first_item + tile.column
        self.seen[np.ix_(own, self.items[first : first + width])] += np.isfinite(tile.estimates)
        self.made += height * width


@pytest.mark.parametrize(
    ("count", "counting", "both_directions"),
    [(1, False, False), (2, True, True), (3, False, True), (4, True, False), (5, False, False)],
)
def test_work_is_shared_fairly(count, counting, both_directions):
    """Of the pairs of one set each process makes as many as the others, and each pair is made once."""
    items = 240
    labels = torch.arange(items) % 20
    case = {"queries": torch.randn(items, 8), "query_labels": labels}
    parts = [torch.arange(rank, items, count) for rank in range(count)]

    def work(processes):
        with computing():
            own = parts[processes.rank]
            (vectors, relevance), own = part_of(case, own, processes), own.numpy()
            layout = plan_layout(10**8, len(own), len(own), 8, 12 * len(own))._replace(height=4, width=4)
            symmetric = relevance.symmetric and not both_directions
            made = Estimates(vectors, relevance, "float32", layout, symmetric=symmetric)
            watcher, observers = Watcher(made, own, gather_in_item_order(processes, own)), []
            if counting:
                thresholds = compute_thresholds(vectors, relevance, slice(0, len(own)))
                observers = [RankCounter(made, thresholds)]
            return made.show(*observers, watcher), watcher

    numbers, watchers = zip(*in_threads(count, work), strict=True)
    negative = (labels[:, None] != labels[None, :]).numpy()
    seen = sum(watcher.seen for watcher in watchers)
    assert np.array_equal(seen if both_directions else seen + seen.T, negative)
    assert sum(numbers) == negative.sum() // (1 if both_directions else 2)
    most, all_made = max(watcher.made for watcher in watchers), sum(watcher.made for watcher in watchers)
    assert most <= 1.05 * all_made / count
    assert all_made <= 1.1 * items**2 / (1 if both_directions else 2)


# ----------------------------------------------------------------------------------------------- errors and interrupts


@pytest.mark.parametrize("when", ["early", "late", "at the end"])
@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
def test_an_error_or_interrupt_of_one_is_one_of_all(kind, when):
    """Raised by the progress of the second of three processes."""
    embeddings, labels = torch.randn(60, 4), torch.arange(60) % 6
    parts = [torch.arange(rank, 60, 3) for rank in range(3)]

    def work(processes):
        def progress(done, total):
            if processes.rank == 1 and done >= {"early": 0, "late": total // 2, "at the end": total}[when]:
                raise kind("no more numbers")

        own = parts[processes.rank]
        options = {"share": Share(processes, own), "progress": progress}
        with engine_options(height=5, width=5):
            return evaluate_retrieval(embeddings[own], labels[own], **options)

    outcomes = in_threads(3, work)
    others = RemoteError if kind is ArithmeticError else KeyboardInterrupt
    assert [type(error) for error in outcomes] == [others, kind, others]
    words = f"{kind.__name__}: no more numbers" if kind is ArithmeticError else "KeyboardInterrupt in another process"
    assert [str(error) for error in outcomes] == [words, "no more numbers", words]


def test_an_error_behind_the_last_call_is_an_error_of_all():
    """A process that has nothing more to ask must not go on to something else meanwhile."""
    embeddings, labels = torch.randn(20, 4), torch.arange(20) % 4

    def work(processes):
        own = torch.arange(processes.rank, 20, 2)
        try:
            with processes.together():
                evaluate_retrieval(embeddings[own], labels[own], share=Share(processes))
                if processes.rank == 0:
                    raise ArithmeticError("the bar does not close")
        except (ArithmeticError, RemoteError) as error:
            return str(error), processes.gather(processes.rank)

    words = "the bar does not close"
    assert in_threads(2, work) == [(words, [0, 1]), (f"ArithmeticError: {words}", [0, 1])]


CALLS = {
    "gather": lambda processes: processes.gather(1),
    "exchange": lambda processes: processes.exchange([torch.ones(2)], 0, 0),
    "summed": lambda processes: processes.summed(np.ones(2, np.int64)),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_in_a_call_is_raised_after_it(call):
    """What is begun with the others is brought to its end with them; then they are told."""

    class Interrupted(Alone):
        count, calls = 2, ()

        def _gather(self, mine):
            signal.raise_signal(signal.SIGINT)
            self.calls += ("told" if "KeyboardInterrupt" in repr(mine) else "gathered",)
            return [mine]

        def _swap(self, mine, to, theirs, source):
            signal.raise_signal(signal.SIGINT)
            super()._swap(mine, to, theirs, source)
            self.calls += ("swapped",)

    # a shell starts what runs in the background with Ctrl-C ignored
    processes, before = Interrupted(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), processes.together():
            CALLS[call](processes)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert processes.calls in (("gathered", "told"), ("gathered", "swapped", "told"))


def numbers(*shape):
    return torch.arange(math.prod(shape)).view(shape).float().sin()


SET = {"queries": numbers(8, 3), "query_labels": torch.arange(8) % 2}
WRONG = [
    ({"queries": numbers(8, 2)}, ("queries", "3 in process 0", "2 in process 1")),
    ({"queries": numbers(8, 3) / torch.tensor([0.0, 1, 1])}, (8, 16, "NaN", "Inf", "index 8")),
    ({"query_labels": torch.arange(7)}, ("8 queries", "7 query_labels")),
    ({"gallery": numbers(8, 3), "gallery_labels": torch.arange(8)}, ("gallery", "left out in process 0", "process 1")),
    ({"metrics": ("mAP", "recall@1")}, ("metrics", "process 0", "('mAP', 'recall@1') in process 1")),
    ({"memory_mb": -1}, ("memory_mb=-1", "positive")),
    ({"share": torch.arange(8)}, ("query_places", "left out in process 0", "process 1")),
]  # fmt: skip


def test_places_that_two_processes_both_name_are_refused_in_both():
    def work(processes):
        return evaluate_retrieval(**SET, share=Share(processes, torch.arange(8)))

    for error in in_threads(2, work):
        assert type(error) is InputError
        assert not missing_facts(str(error), ("places", "queries", "0 to 15")), error


@pytest.mark.parametrize(("change", "facts"), WRONG)
def test_what_is_wrong_in_one_process_is_named_in_all(change, facts):
    def work(processes):
        given = SET | (change if processes.rank else {})
        return evaluate_retrieval(**given | {"share": Share(processes, given.get("share"))})

    for error in in_threads(2, work):
        assert type(error) is InputError
        assert not missing_facts(str(error), facts), error


def test_items_that_no_process_has_are_named():
    for error in in_threads(2, lambda processes: evaluate_retrieval(torch.empty(0, 0), [], share=Share(processes))):
        assert not missing_facts(str(error), ("queries", "empty", "(0, 0)", "process")), error


@pytest.mark.parametrize(
    ("places", "facts"), [([0, 1, 2], ("4 queries", "3 places")), ([0, 1, 1, 3], ("places", "queries", "0 to 3"))]
)
def test_a_single_process_has_a_place_for_each_query_once(places, facts):
    with refused(ValueError, *facts):
        evaluate_retrieval(torch.randn(4, 2), torch.arange(4), share=Share(query_places=torch.tensor(places)))


def test_alone():
    assert [tensor.tolist() for tensor in ALONE.exchange([torch.ones(2)], 0, 0) or []] == [[1.0, 1.0]]
    assert ALONE.placed(torch.tensor([5, 6]), torch.tensor([1, 0]), 2).tolist() == [6, 5]
    with pytest.raises(KeyError), ALONE.together():
        raise KeyError


@given(st.lists(st.integers(0, 23), min_size=2, max_size=4), st.integers(LEAST_CHUNKS, 9))
def test_each_pair_of_two_processes_of_one_set_is_computed_in_one_of_them(items, chunks):
    plan = ChunkPlan(items, chunks, 0)
    for low, high in itertools.combinations(range(len(items)), 2):
        times = np.zeros((items[low], items[high]), int)
        for chunk in range(chunks):
            times[queries_of_symmetric_chunk(plan, low, high, chunk), plan.slice_of(high, chunk)] += 1
            times[plan.slice_of(low, chunk), queries_of_symmetric_chunk(plan, high, low, chunk)] += 1
        assert (times == 1).all()
