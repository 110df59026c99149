"""However the items are spread over processes: the report is that of one process."""

import math
import re
import signal
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.distributed.processes import ALONE, Alone, RemoteError, _Failure
from fewshot_callbacks.engine.layout import plan_layout
from fewshot_callbacks.engine.options import computing, engine_options
from fewshot_callbacks.engine.ranks import RankCounter, relevant_scores
from fewshot_callbacks.engine.relevance import Lists, Relevance
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.engine.visits import CHUNKS, everyone
from fewshot_callbacks.functional import evaluate_retrieval
from tests.cases import sampled_product
from tests.engine.cases import engines
from tests.reports import assert_same
from tests.thread_processes import Thread, in_threads

EVERYTHING = {
    "macro": True,
    "per_class": True,
    "map_k": (3,),
    "ndcg_k": (4,),
    "precisions": (0.5, 0.95),
    "false_match_rates": (0.1,),
    "equal_error_rate": True,
    "auc_pr": True,
    "group_size": 2,
}


def evaluated(parts, sets, gallery_parts=(), each=(), **options):
    """The reports of processes that hold these parts of queries and gallery, given as arguments by name.

    `each`: the engine's options of every process.
    """

    def work(processes):
        own = parts[processes.rank]
        arguments = {"query_places": own}
        if "gallery" in sets:
            arguments["gallery_places"] = gallery_parts[processes.rank]
        for name, tensor in sets.items():
            arguments[name] = tensor[arguments["gallery_places"] if name.startswith("gallery") else own]
        with engine_options(**(each[processes.rank] if each else {})):
            return evaluate_retrieval(**arguments, processes=processes, **options)

    return in_threads(len(parts), work)


def spread(items, count, seed):
    """Some items for each process, in no order; uneven, and perhaps none for some."""
    generator = np.random.default_rng(seed)
    share = generator.dirichlet(np.full(count, 0.7))
    owner = generator.choice(count, size=items, p=share)
    return [torch.from_numpy(generator.permutation(np.flatnonzero(owner == rank))) for rank in range(count)]


def made(kind, items, classes, dim, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (items,), generator=generator) * (2**40 + 1) - 2**41
    centres = torch.randn(classes, dim, generator=generator)
    noise = torch.randn(items, dim, generator=generator)
    embeddings = {
        "separated": centres[(labels + 2**41) // (2**40 + 1)] + 0.4 * noise,
        "few values": noise.round(),
        "collapsed": torch.ones(items, dim),
        "repeated": noise[torch.randint(0, max(1, items // 3), (items,), generator=generator)],
        "far": noise + 1e4,
    }[kind]
    return embeddings.to(dtype), labels


def blurred(items, classes, dim=24, noise=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % classes
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + noise * torch.randn(items, dim, generator=generator), labels


CASES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["separated", "few values", "collapsed", "repeated", "far"]),
        "items": st.integers(1, 60),
        "classes": st.integers(1, 7),
        "dim": st.integers(1, 5),
        "dtype": st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
        "seed": st.integers(0, 2**16),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "similarity": st.sampled_from(["cosine", "dot", "euclidean"]),
        "ties": st.sampled_from(["expected", "optimistic", "pessimistic"]),
        "memory_mb": st.sampled_from([512, 0.5]),
        "threshold": st.sampled_from([None, 0.5]),
        "prototype_accuracy": st.booleans(),
        "grouped_unmatched": st.sampled_from(["exclude", "miss"]),
    }
)
FORMS = ("one set", "groups", "two sets", "ids", "one set twice", "drawn", "drawn of two")


def outcome(work):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return work()
        except ValueError as error:
            return error


def assert_all_same(alone, others):
    for other in others:
        if isinstance(alone, ValueError):
            assert isinstance(other, ValueError), other
            assert str(other) == str(alone)
        else:
            assert_same(alone, other)


@settings(max_examples=80, deadline=None)
@given(
    case=CASES,
    options=OPTIONS,
    count=st.integers(1, 4),
    form=st.sampled_from(FORMS),
    each=st.lists(engines(), min_size=4, max_size=4),
)
def test_the_report_is_that_of_one_process(case, options, count, form, each):
    """The engines of the processes differ in all sizes, threads and roads, as machines and budgets may."""
    embeddings, labels = made(**case)
    seed, items = case["seed"], case["items"]
    options = EVERYTHING | options
    sets, gallery_parts = {"embeddings": embeddings, "labels": labels}, spread(items + 3, count, seed + 1)
    if form == "groups":
        sets["query_groups"] = torch.arange(items) % 5
    elif form in ("two sets", "ids", "drawn of two"):
        sets["gallery"], sets["gallery_labels"] = made(**(case | {"items": items + 3, "seed": seed + 1}))
        if form == "ids":
            sets |= {"query_ids": torch.arange(items), "gallery_ids": torch.arange(items + 3)}
    elif form == "one set twice":  # in half of the cases each process holds the same items of both
        sets |= {"gallery": embeddings.clone(), "gallery_labels": labels}
        sets |= {"query_ids": torch.arange(items) // 2, "gallery_ids": torch.arange(items) // 2}
        gallery_parts = spread(items, count, seed + seed % 2)
    if form.startswith("drawn"):
        options["max_queries"] = max(1, items // 2)
    each = [one | {name: each[0][name] for name in ("precision", "plain")} for one in each]
    alone = outcome(lambda: evaluate_retrieval(**sets, **options))
    assert_all_same(alone, evaluated(spread(items, count, seed), sets, gallery_parts, each, **options))


@settings(max_examples=20, deadline=None)
@given(
    items=st.integers(2, 50),
    bits=st.integers(1, 70),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    two=st.booleans(),
)
def test_codes(items, bits, count, seed, two):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2, (items, bits), generator=generator)
    labels = torch.randint(0, 4, (items,), generator=generator)
    options = EVERYTHING | {"similarity": "hamming", "threshold": -3.0}
    sets = {"embeddings": codes, "labels": labels}
    if two:
        sets["gallery"] = torch.randint(0, 2, (items + 2, bits), generator=generator)
        sets["gallery_labels"] = torch.arange(items + 2) % 4
    alone = outcome(lambda: evaluate_retrieval(**sets, **options))
    parts, gallery_parts = spread(items, count, seed), spread(items + 2, count, seed + 1)
    assert_all_same(alone, evaluated(parts, sets, gallery_parts, **options))


@pytest.mark.parametrize(("items", "memory_mb", "plain"), [(1500, 256, False), (1500, 256, True), (120, 0.5, False)])
@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_larger_sets(items, memory_mb, plain, noise):
    """Enough pairs for a sample to choose how they are counted; or, with little memory, too many for one batch."""
    embeddings, labels = blurred(items, items // 10, noise=noise, seed=1)
    options = EVERYTHING | {"memory_mb": memory_mb, "group_size": 5}
    with engine_options(plain=plain):
        alone = evaluate_retrieval(embeddings, labels, **options)
        for count in (2, 3):
            others = evaluated(spread(items, count, 3), {"embeddings": embeddings, "labels": labels}, **options)
            assert_all_same(alone, others)


@pytest.mark.parametrize(
    ("similarity", "two", "max_queries"),
    sampled_product(["cosine", "dot", "euclidean"], [False, True], [None, 50], count=5),
)
def test_many_groups_of_labels(similarity, two, max_queries):
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 90, (300,), generator=generator)
    sets = {"embeddings": torch.randn(300, 6, generator=generator) + 0.1 * labels[:, None], "labels": labels}
    if two:  # with labels that no query has
        sets |= {"gallery": torch.randn(200, 6, generator=generator), "gallery_labels": torch.arange(200) % 95}
    options = {"similarity": similarity, "group_size": 3, "grouped_k": (1, 2)}
    options |= {} if max_queries is None else {"max_queries": max_queries}
    alone = evaluate_retrieval(**sets, **options)
    assert alone.grouped is not None or two
    for count in (2, 3):
        assert_all_same(alone, evaluated(spread(300, count, 5), sets, spread(200, count, 6), **options))


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("given", [7, 120])
def test_given_groups_of_labels(two, given):
    """Groups of two to four labels; the other labels are in none."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(900) % 450
    sets = {"embeddings": torch.randn(900, 6, generator=generator) + 0.1 * labels[:, None], "labels": labels}
    if two:
        sets |= {"gallery": torch.randn(700, 6, generator=generator), "gallery_labels": torch.arange(700) % 460}
    names = iter(torch.randperm(450, generator=generator).tolist())
    groups = [[next(names) for _ in range(2 + number % 3)] for number in range(given)]
    options = {"label_groups": groups, "grouped_unmatched": "miss"}
    alone = evaluate_retrieval(**sets, **options)
    assert alone.grouped.dropped_labels == 450 - sum(map(len, groups))
    assert alone.grouped.unmatched == "miss"
    assert_all_same(alone, evaluated(spread(900, 3, 5), sets, spread(700, 3, 6), **options))


def test_groups_of_labels_without_an_item_in_the_gallery():
    generator = torch.Generator().manual_seed(0)
    sets = {"embeddings": torch.randn(600, 8, generator=generator), "labels": torch.arange(600) % 300}
    sets |= {"gallery": torch.randn(40, 8, generator=generator), "gallery_labels": torch.arange(40) % 3}
    alone = evaluate_retrieval(**sets, group_size=3)
    assert "has a match" in alone.notes[-1]
    assert_all_same(alone, evaluated(spread(600, 2, 1), sets, spread(40, 2, 2), group_size=3))


ROOMS = [
    ({"batch": 1}, {}),
    ({"batch": 200}, {"batch": 900}),
    ({"knots": 3}, {"knots": 70}),
    ({"collected": 5}, {"collected": 2000}),
    ({"batch": 500, "knots": 3, "collected": 50}, {"threads": 3, "height": 7, "width": 14}),
    ({"threads": 1}, {"threads": 4}),
    ({"plain": True}, {}),
]


@pytest.mark.parametrize("each", ROOMS)
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_room_that_differs(each, similarity):
    """By default the budget on a device is half of what is free there, which is another one in each process."""
    embeddings, labels = blurred(400, 40)
    options = {"auc_pr": True, "equal_error_rate": True, "group_size": 5, "similarity": similarity}
    alone, sets = evaluate_retrieval(embeddings, labels, **options), {"embeddings": embeddings, "labels": labels}
    for some in (each, each[::-1]):
        assert_all_same(alone, evaluated(spread(400, 2, 3), sets, (), some, **options))


def test_threads_that_differ():
    """With this budget the counters of all queries fit beside what one thread needs, but not beside what 64 need."""
    embeddings, labels = blurred(400, 40)
    alone, each = evaluate_retrieval(embeddings, labels), ({"threads": 1}, {"threads": 64})
    for memory_mb in (2, 16, 64):
        sets = {"embeddings": embeddings, "labels": labels}
        assert_all_same(alone, evaluated(spread(400, 2, 3), sets, (), each, memory_mb=memory_mb))


def test_queries_in_one_process_and_the_gallery_in_another():
    generator = torch.Generator().manual_seed(0)
    sets = {"embeddings": torch.randn(1100, 8, generator=generator), "labels": torch.arange(1100) % 50}
    sets |= {"gallery": torch.randn(1000, 8, generator=generator), "gallery_labels": torch.arange(1000) % 50}
    alone = evaluate_retrieval(**sets)
    parts = [torch.arange(1100), torch.arange(0)]
    for gallery_parts in ([torch.arange(0), torch.arange(1000)], [torch.arange(1000), torch.arange(0)]):
        assert_all_same(alone, evaluated(parts, sets, gallery_parts))


def test_items_of_one_process_follow_those_of_the_one_before():
    labels = torch.tensor([0, 1, 0, 1, 2, 2])
    embeddings = torch.randn(6, 3)

    def work(processes: Thread):
        own = slice(0, 4) if processes.rank == 0 else slice(4, 6)
        return evaluate_retrieval(embeddings[own], labels[own], processes=processes, group_size=None)

    for report in in_threads(2, work):
        assert report.query_labels.tolist() == labels.tolist()
        assert_same(evaluate_retrieval(embeddings, labels, group_size=None), report)


def test_parts_of_different_precision_are_computed_in_the_widest():
    """In float32 the items of the second part would be one."""
    labels = torch.arange(20) % 4
    single, double = torch.randn(10, 3), 1 + 1e-9 * torch.randn(10, 3, dtype=torch.float64)
    options = {"similarity": "euclidean", "group_size": None}
    alone = evaluate_retrieval(torch.cat([single.double(), double]), labels, **options)
    assert alone.queries_with_ties == 0
    parts = [(single, labels[:10]), (double, labels[10:])]

    def work(processes: Thread):
        return evaluate_retrieval(*parts[processes.rank], processes=processes, **options)

    assert_all_same(alone, in_threads(2, work))


def test_a_process_that_holds_nothing_need_not_know_the_dimension():
    embeddings, labels = torch.randn(12, 3), torch.arange(12) % 3

    def work(processes: Thread):
        mine = (embeddings, labels) if processes.rank == 1 else (torch.empty(0), torch.empty(0))
        return evaluate_retrieval(*mine, processes=processes, group_size=None)

    assert_all_same(evaluate_retrieval(embeddings, labels, group_size=None), in_threads(3, work))


@pytest.mark.parametrize("points", [1, 2])
def test_parts_that_have_collapsed_to_points_of_their_own_are_two(points):
    embeddings, labels = 1e-9 * torch.eye(2)[torch.arange(8) % points], torch.arange(8) // 2 % 2
    alone = evaluate_retrieval(embeddings, labels, group_size=None)
    assert any("collapsed" in note for note in alone.notes) == (points == 1)
    sets = {"embeddings": embeddings, "labels": labels}
    for parts in ([torch.arange(0, 8, 2), torch.arange(1, 8, 2)], [torch.arange(8)[:1], torch.arange(8)[1:]]):
        assert_all_same(alone, evaluated(parts, sets, group_size=None))


def test_places_order_the_items_of_one_process_as_well():
    labels, embeddings = torch.tensor([0, 1, 0, 1]), torch.randn(4, 3)
    order = torch.tensor([2, 0, 3, 1])
    report = evaluate_retrieval(embeddings, labels, query_places=order, group_size=None)
    assert report.query_labels.tolist() == [1, 1, 0, 0]
    assert_same(evaluate_retrieval(embeddings[order.argsort()], labels[order.argsort()], group_size=None), report)


def test_no_process_is_sent_more_than_a_chunk_of_a_part():
    """In threads as in processes, the largest tensor that comes in is a chunk of the embeddings of another part."""
    items, dim = 400, 64
    embeddings, labels = torch.randn(items, dim), torch.arange(items) % 200
    for count in (2, 4):

        def work(processes: Thread, count: int = count):
            own = torch.arange(processes.rank, items, count)
            evaluate_retrieval(embeddings[own], labels[own], processes=processes, query_places=own, group_size=5)
            return processes.most_received

        assert set(in_threads(count, work)) == {items // count // CHUNKS * dim}


class Seen:
    """Notes the pairs of every tile, by numbers among all items."""

    def __init__(self, numbers, once):
        self.numbers, self.once, self.pairs, self.lock = numbers, once, [], threading.Lock()

    def space(self):
        return None

    def see(self, tile, _):
        rows, columns = np.nonzero(tile.estimates > -np.inf)
        with self.lock:
            self.pairs.append(self.numbers[np.stack([rows + tile.row, columns + tile.column + tile.part.first])])


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_work_is_shared_fairly(count):
    """Of the pairs of one set each process makes as many as the others, and each pair is made once."""
    items, classes = 240, 20
    embeddings, labels = torch.randn(items, 8), np.arange(items) % classes

    def work(processes: Thread):
        own = np.arange(processes.rank, items, count)
        numbers = everyone(processes, own)
        with engine_options(height=16, width=32), computing() as threads:
            vectors = Vectors(embeddings[own], None, "cosine", threads=threads, processes=processes)
            lists = Lists.of_labels(labels[own], labels[numbers])
            relevance = Relevance(lists, np.arange(len(own), dtype=np.int32), mutual=True)
            layout = plan_layout(1e8, len(own), len(own), 8, len(numbers))._replace(height=16, width=32)
            estimates = Estimates(vectors, relevance, "float32", layout, True)
            seen, counter = Seen(numbers, True), RankCounter(estimates, *relevant_scores(estimates, slice(0, len(own))))
            negatives = estimates.show(seen, counter)
            pairs = np.sort(np.concatenate(seen.pairs, axis=1), axis=0)
            ranks = counter.ranks()
        return pairs, negatives, ranks.above.sum() + ranks.tied.sum()

    outcomes = in_threads(count, work)
    assert not [error for error in outcomes if isinstance(error, BaseException)]
    pairs = np.concatenate([pairs for pairs, *_ in outcomes], axis=1)
    left, right = np.nonzero(np.triu(labels[:, None] != labels[None, :]))
    assert sorted(map(tuple, pairs.T.tolist())) == list(zip(left.tolist(), right.tolist(), strict=True))
    negatives = [number for _, number, _ in outcomes]
    assert sum(negatives) == len(left)
    assert negatives == [pairs.shape[1] for pairs, *_ in outcomes]
    assert max(negatives) <= 1.03 * len(left) / count
    similarities = torch.nn.functional.cosine_similarity(embeddings[:, None].double(), embeddings[None].double(), dim=2)
    different = torch.from_numpy(labels[:, None] != labels[None, :])
    relevant = ~different & ~torch.eye(items, dtype=torch.bool)
    beaten = sum(
        int((similarities[i, different[i]] > score).sum())
        for i, j in relevant.nonzero().tolist()
        for score in [similarities[i, j]]
    )
    assert sum(ranked for *_, ranked in outcomes) == beaten


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, as in a terminal; a shell starts what runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class TestErrors:
    @pytest.mark.parametrize("other", [1, 2])
    def test_a_process_that_fails_takes_the_others_with_it(self, other):
        def work(processes: Thread):
            embeddings = torch.randn(8, 3 if processes.rank != other else 2)
            return evaluate_retrieval(embeddings, torch.arange(8) % 2, processes=processes)

        outcomes = in_threads(3, work)
        assert [type(error) for error in outcomes] == [ValueError] * 3
        (words,) = {str(error) for error in outcomes}
        assert words.startswith(f"evaluate_retrieval: embeddings have dimension 3 in process 0, 2 in process {other}.")

    @pytest.mark.parametrize("raised", [ArithmeticError, KeyboardInterrupt])
    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("threads", [1, 3])
    def test_an_error_or_interrupt_of_one_is_one_of_all(self, raised, late, threads):
        embeddings, labels = torch.randn(60, 4), torch.arange(60) % 6

        def work(processes: Thread):
            def progress(done: int, total: int) -> None:
                if processes.rank == 1 and (done == total or not late):
                    raise raised("no more numbers")

            own = torch.arange(processes.rank, 60, 3)
            with engine_options(threads=threads, height=8, width=8):
                return evaluate_retrieval(embeddings[own], labels[own], processes=processes, progress=progress)

        others = RemoteError if raised is ArithmeticError else KeyboardInterrupt
        outcomes = in_threads(3, work)
        assert [type(error) for error in outcomes] == [others, raised, others]
        if others is RemoteError:
            assert str(outcomes[0]) == str(outcomes[2]) == "ArithmeticError: no more numbers"

    def test_an_error_behind_the_last_call_is_an_error_of_all(self):
        """A process that has nothing more to ask must not go on to something else meanwhile."""
        embeddings, labels = torch.randn(20, 4), torch.arange(20) % 4

        def work(processes: Thread):
            own = torch.arange(processes.rank, 20, 2)
            try:
                with processes.together():
                    evaluate_retrieval(embeddings[own], labels[own], processes=processes)
                    if processes.rank == 0:
                        raise ArithmeticError("the bar does not close")
            except (ArithmeticError, RemoteError) as error:
                return str(error), processes.gather(processes.rank)

        words = "the bar does not close"
        assert in_threads(2, work) == [(words, [0, 1]), (f"ArithmeticError: {words}", [0, 1])]

    @pytest.mark.parametrize(
        "call",
        [
            lambda processes: processes.gather(1),
            lambda processes: processes.exchange([torch.ones(2)], 0, 0),
            lambda processes: processes.summed(np.ones(2, np.int64)),
        ],
    )
    def test_an_interrupt_in_a_call_is_raised_after_it(self, call, interruptible):
        """What is begun with the others is brought to its end with them; then they are told."""

        class Interrupted(Alone):
            count = 2

            def __init__(self):
                self.calls = []

            def _gather(self, mine):
                signal.raise_signal(signal.SIGINT)
                self.calls.append(mine if isinstance(mine, _Failure) else "gathered")
                return [mine]

            def _swap(self, mine, to, theirs, source):
                signal.raise_signal(signal.SIGINT)
                super()._swap(mine, to, theirs, source)
                self.calls.append("swapped")

        processes, handler = Interrupted(), signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), processes.together():
            call(processes)
        *calls, told = processes.calls
        assert calls in (["gathered"], ["gathered", "swapped"])
        assert told.kind is KeyboardInterrupt
        assert signal.getsignal(signal.SIGINT) is handler

    def test_what_is_not_finite_is_named_by_its_place_among_all(self):
        embeddings = torch.randn(10, 3)
        embeddings[[4, 7]] = math.nan

        def work(processes: Thread):
            own = torch.arange(processes.rank, 10, 2)
            return evaluate_retrieval(embeddings[own], torch.arange(10)[own] % 2, processes=processes, query_places=own)

        for error in in_threads(2, work):
            assert "2 of 10 rows of embeddings hold NaN or Inf, the first at index 4" in str(error)

    @pytest.mark.parametrize("name", ["labels", "gallery_labels"])
    def test_labels_of_another_number_are_named(self, name):
        names = ("embeddings", "labels", "gallery", "gallery_labels")

        def work(processes):
            arguments = {of: torch.arange(4) if of.endswith("labels") else torch.randn(4, 3) for of in names}
            arguments[name] = arguments[name][:3]
            return evaluate_retrieval(**arguments, processes=processes)

        for error in in_threads(2, work):
            assert isinstance(error, ValueError)
            assert re.search(rf"(^|[^_\w]){name}\b", str(error)), error

    def test_nothing_anywhere(self):
        def work(processes: Thread):
            return evaluate_retrieval(torch.empty(0, 0), torch.empty(0), processes=processes)

        for error in in_threads(2, work):
            assert "embeddings is empty (shape (0, 0)) in every process" in str(error)

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ({"similarity": "dot"}, "similarity is cosine in process 0, dot in process 1"),
            ({"recall_k": (1, 2)}, r"recall_k is \(1, 5, 10\) in process 0, \(1, 2\) in process 1"),
            ({"query_groups": torch.arange(8)}, "query_groups is left out in process 0, given in process 1"),
            ({"memory_mb": -1}, "memory_mb=-1 must be positive"),
        ],
    )
    def test_processes_that_are_called_in_different_ways(self, setting, words):
        def work(processes: Thread):
            more = setting if processes.rank == 1 else {}
            return evaluate_retrieval(torch.randn(8, 3), torch.arange(8) % 2, processes=processes, **more)

        for error in in_threads(2, work):
            assert type(error) is ValueError
            assert re.search(words, str(error)), error

    @pytest.mark.parametrize("places", [torch.arange(3), torch.tensor([0, 1, 1, 3]), torch.tensor([1, 2, 3, 4])])
    def test_places_that_are_none_in_one_process(self, places):
        with pytest.raises(ValueError, match=r"places of embeddings must be 0 to 3|4 embeddings, but 3 places"):
            evaluate_retrieval(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64), query_places=places)

    def test_places_that_are_none(self):
        def work(processes: Thread):
            return evaluate_retrieval(
                torch.randn(3, 2), torch.zeros(3, dtype=torch.int64), processes=processes, query_places=torch.arange(3)
            )

        for error in in_threads(2, work):
            assert "places of embeddings must be 0 to 5, each once over all processes" in str(error)


def test_alone():
    assert ALONE.gather(3) == [3]
    assert ALONE.largest([1.5]) == [1.5]
    assert ALONE.summed(np.array([1, 2])).tolist() == [1, 2]
    assert [tensor.tolist() for tensor in ALONE.exchange([torch.ones(2)], 0, 0) or []] == [[1.0, 1.0]]
    assert ALONE.placed(torch.tensor([5, 6]), torch.tensor([1, 0]), 2).tolist() == [6, 5]
    with pytest.raises(KeyError), ALONE.together():
        raise KeyError
