"""The store of embeddings: what it keeps, refuses and gives back, on one process and several."""

import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fewshot_callbacks.metrics import EmbeddingStore
from tests.cases import examples
from tests.messages import missing_facts, refused
from tests.metrics import process_jobs
from tests.metrics.cases import WRONG_BATCHES


def filled(*sizes, dim=4, dtype=torch.float32):
    store, parts = EmbeddingStore(), []
    for size in sizes:
        parts.append((torch.randn(size, dim).to(dtype), torch.randint(-5, 5, (size,)) * 2**58))
        store.append(*parts[-1])
    embeddings, labels = zip(*parts, strict=True)
    return store, torch.cat(embeddings), torch.cat(labels)


@settings(max_examples=examples(18), deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.sampled_from([torch.bfloat16, torch.float64]))
def test_the_store_gives_back_items_in_their_order_and_in_the_dtype_of_the_model(sizes, dtype):
    store, embeddings, labels = filled(*sizes, dtype=dtype)
    assert len(store) == sum(sizes)
    for _ in range(2):  # asking takes nothing away
        found, found_labels = store.gather()
        assert found.dtype == dtype
        assert torch.equal(found, embeddings)
        assert torch.equal(found_labels, labels)


@pytest.mark.parametrize(
    "view", [lambda big: big[:4, :3], lambda big: big[::250, ::33], lambda big: big[:1, :3].expand(4, 3)]
)
def test_the_store_copies_a_slice_and_does_not_hold_what_it_was_cut_from(view):
    big, labels, positions = torch.randn(1000, 100, requires_grad=True), torch.arange(1000), torch.arange(4)
    store, expected = EmbeddingStore(), view(big).detach().clone()
    store.append(view(big), labels[:4], positions)
    (items,) = store._batches
    assert items.labels.values.untyped_storage().nbytes() == 4 * 8
    for tensor in (big.detach(), labels, positions):
        tensor.zero_()
    shard = store.shard()
    assert not shard.embeddings.requires_grad
    assert torch.equal(shard.embeddings, expected)
    assert shard.labels.tolist() == shard.positions.tolist() == [0, 1, 2, 3]


def test_clear_forgets_everything_also_the_dimension():
    store, _, _ = filled(3, 4)
    store.clear()
    assert len(store) == 0
    assert [part.shape for part in store.gather()] == [(0, 0), (0,)]
    store.append(torch.ones(2, 9), torch.arange(2))
    assert store.gather()[0].shape == (2, 9)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        *(((embeddings, labels), ("EmbeddingStore", *facts)) for embeddings, labels, facts in WRONG_BATCHES),
        ((torch.ones(2, 5), torch.arange(2)), ("EmbeddingStore.append", "dimension", 4, 5)),
        ((torch.ones(2, 4), torch.ones(2, 7).long()), ("labels", "integers", "zeros and ones", 7)),
        ((torch.ones(2, 4), torch.arange(2), torch.arange(3)), ("positions", "(3,)", 2)),
        ((torch.ones(5, 4), torch.arange(5), None, ["a", "b"]), ("EmbeddingStore", 5, "embeddings", 2, "ids")),
    ],
)
def test_a_refused_batch_leaves_the_store_as_it_was(arguments, facts):
    store, embeddings, _ = filled(3)
    with refused(ValueError, *facts):
        store.append(*arguments)
    assert len(store) == 3
    assert torch.equal(store.gather()[0], embeddings)


class LargeTensors(TorchDispatchMode):
    """Collects the addresses of the tensors with at least this number of entries that operations return."""

    def __init__(self, entries):
        super().__init__()
        self.entries, self.addresses = entries, set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.entries:
            self.addresses.add(result.data_ptr())
        return result


@pytest.mark.parametrize("dataset_size", [None, 90], ids=["all items", "ten dropped"])
def test_a_shard_takes_the_memory_of_its_rows_once_also_if_items_are_dropped(monkeypatch, dataset_size):
    monkeypatch.setattr("fewshot_callbacks.metrics._rows.BLOCK_BYTES", 45 * 64 * 4)  # no block has all items
    store, embeddings, _ = filled(30, 40, 30, dim=64)
    kept = embeddings[:dataset_size]
    with LargeTensors(kept.numel()) as large:
        shard = store.shard(dataset_size)
    assert torch.equal(shard.embeddings, kept)
    assert large.addresses == {shard.embeddings.data_ptr()}


@pytest.mark.parametrize("is_in_file", [False, True])
@pytest.mark.parametrize("dataset_size", [None, 50])
def test_a_shard_that_clears_the_store_is_the_same(monkeypatch, tmp_path, is_in_file, dataset_size):
    monkeypatch.setattr("fewshot_callbacks.metrics._rows.BLOCK_BYTES", 45 * 8 * 4)  # no block has two batches
    embeddings = torch.randn(100, 8)
    store = EmbeddingStore(tmp_path if is_in_file else None)
    for rows in torch.arange(100).split([30, 40, 30]):
        store.append(embeddings[rows], rows)
    copied, moved = store.shard(dataset_size), store.shard(dataset_size, clear=True)
    assert torch.equal(moved.embeddings, embeddings[:dataset_size])
    assert torch.equal(copied.embeddings, moved.embeddings)
    assert len(store) == 0
    assert store.gather()[0].shape == (0, 0)


def test_batches_come_inside_and_outside_inference_mode():
    store, embeddings = EmbeddingStore(), torch.randn(6, 4)
    for is_inside, rows in zip((True, False, True), torch.arange(6).split(2), strict=True):
        with torch.inference_mode(is_inside):
            store.append(embeddings[rows], rows)
    assert torch.equal(store.shard().embeddings, embeddings)


def test_positions_count_dropped_items_and_places_do_not():
    store = EmbeddingStore()
    store.append(torch.eye(4), torch.arange(4), ids=["a", "b", "a", "c"])
    shard = store.shard()
    assert shard.positions.tolist() == [0, 1, 3]
    assert shard.places.tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [None, 5])
def test_batches_of_several_dtypes_give_the_wider_one(size):
    store = EmbeddingStore()
    store.append(torch.ones(3, 2).half(), torch.arange(3))
    store.append(torch.ones(3, 2), torch.arange(3))
    assert store.shard(size).embeddings.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies through pinned memory need a GPU")
def test_what_comes_from_a_device_arrives_as_it_left():
    store, whole = EmbeddingStore(), torch.randn(10, 4, device="cuda").half()
    labels = torch.arange(10, device="cuda")
    for part in torch.arange(10).split(3):
        source = whole[part.cuda()]
        store.append(source, labels[part.cuda()])
        source.zero_()  # comes after the copy on the same stream
    embeddings, found = store.gather()
    assert torch.equal(embeddings, whole.cpu())
    assert not embeddings.is_pinned()
    assert found.tolist() == list(range(10))


class TestIds:
    @pytest.mark.parametrize("ids", [torch.tensor([5, 2**62, 5, -1, -1]), ["a", "b", "a", "ä", "ä"]])
    def test_the_first_item_of_each_id_stays(self, ids):
        store, embeddings = EmbeddingStore(), torch.randn(5, 3)
        store.append(embeddings, torch.arange(5), ids=ids)
        shard = store.shard()
        assert torch.equal(shard.embeddings, embeddings[[0, 1, 3]])
        assert shard.labels.tolist() == [0, 1, 3]
        assert shard.places.tolist() == [0, 1, 2]
        assert shard.dropped == 2

    def test_items_of_one_id_that_are_no_repetitions_are_counted(self):
        store, embeddings = EmbeddingStore(), torch.randn(400, 32)
        store.append(embeddings, torch.arange(400) % 20, ids=[f"item {number % 80}" for number in range(400)])
        shard = store.shard()
        assert (len(shard.labels), shard.dropped) == (80, 320)
        assert missing_facts(shard.note, ("ids", 80, 320, 400)) == []

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_repetitions_may_differ_by_rounding_and_labels_may_not(self, dtype):
        notes = []
        for changed in (0, 3):
            store, embeddings, labels = EmbeddingStore(), 1e20 * torch.randn(40, 32), torch.arange(80) % 40
            labels[77:] += changed
            store.append(torch.cat([embeddings, embeddings * 1.004]).to(dtype), labels, ids=torch.arange(80) % 40)
            notes.append(store.shard().note)
        assert notes[0] is None
        assert missing_facts(notes[1], ("ids", 3, 40, 80)) == []


@pytest.mark.parametrize("name", ["ids", "groups"])
@pytest.mark.parametrize("given", [(True, False), (False, True)])
def test_ids_or_groups_of_some_batches_alone_are_refused(name, given):
    """A batch without items need not have it."""
    store, batch = EmbeddingStore(), (torch.ones(2, 4), torch.arange(2))
    for has_it in given:
        store.append(*batch, **({name: [0, 1]} if has_it else {}))
    with refused(ValueError, "EmbeddingStore", name, "batches"):
        store.gather()
    store.clear()
    store.append(*batch, **{name: [0, 0]})
    store.append(torch.ones(0, 4), torch.arange(0))
    assert store.shard().dropped == (name == "ids")
    assert (store.shard().groups is not None) == (name == "groups")


def rows_of(embeddings, labels):
    """Items in an order of their own."""
    return sorted((*row, label) for row, label in zip(embeddings.tolist(), labels.tolist(), strict=True))


class TestSeveralProcesses:
    @pytest.mark.parametrize("n", [1, 23])
    def test_the_padding_of_the_sampler_is_dropped_and_the_order_restored(self, on_ranks, n):
        embeddings, labels = process_jobs.items(n)
        for answers in on_ranks:
            found, padded = answers["embedding_store"][f"sampler {n}"]
            assert torch.equal(found[0], embeddings.half())
            assert torch.equal(found[1], labels)
            # it is there without the size of the data set
            assert torch.equal(padded[0], torch.cat([embeddings, embeddings.repeat(2, 1)[: -n % len(on_ranks)]]).half())

    def test_positions_of_a_part_of_the_items(self, on_ranks):
        embeddings, labels = process_jobs.items()
        kept = labels != labels[0]
        for answers in on_ranks:
            found, found_labels = answers["embedding_store"]["some"]
            assert torch.equal(found, embeddings[kept])
            assert torch.equal(found_labels, labels[kept])
            found, found_labels = answers["embedding_store"]["nothing"]
            assert (found.shape, found_labels.shape, found_labels.dtype) == ((0, 0), (0,), torch.int64)

    @pytest.mark.parametrize("name", process_jobs.SHARDS)
    def test_every_rank_gets_every_item_once(self, on_ranks, name):
        first, *others = (answers["embedding_store"][name] for answers in on_ranks)
        for other in others:
            assert torch.equal(first[0], other[0])
            assert torch.equal(first[1], other[1])
        assert rows_of(*first) == rows_of(*process_jobs.items())

    def test_ids_groups_and_sizes_that_differ_between_processes_are_refused_in_all_of_them(self, on_ranks):
        last = f"process {len(on_ranks) - 1}"
        facts = {
            "ids in one process": ("ids", "process 0", last),
            "groups in one process": ("groups", "process 0", last),
            "ids in some batches of one process": ("ids", "batches", last),
            "sizes": ("dataset_size", "None", "process 0", 99, last),
        }
        for answers in on_ranks:
            messages = answers["stores_of_different_calls"]
            assert messages.keys() == facts.keys()
            for name, message in messages.items():
                assert missing_facts(message, ("EmbeddingStore", *facts[name])) == [], message

    def test_of_items_with_one_id_one_stays(self, on_ranks):
        for answers in on_ranks:
            found, dropped = answers["embedding_store"]["ids"]
            assert rows_of(*found) == rows_of(*process_jobs.items())
            assert dropped == 7 * (len(on_ranks) - 1) + len(on_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_that_were_spilled_to_a_file_come_back_unchanged(tmp_path, dtype):
    batches = [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (5, 0, 7)]
    kept, spilled = EmbeddingStore(), EmbeddingStore(spill_to=tmp_path)
    for store in (kept, spilled):
        for batch in batches:
            store.append(batch, torch.arange(len(batch)), ids=torch.arange(len(batch)))
    one, other = kept.shard(), spilled.shard()
    assert torch.equal(one.embeddings, other.embeddings)
    assert one.dropped == other.dropped == 5
    assert other.embeddings.dtype == dtype
    assert not [*tmp_path.iterdir()]  # it has no name
    assert torch.equal(kept.shard(dataset_size=9).embeddings, spilled.shard(dataset_size=9).embeddings)


def test_spilling_to_a_missing_folder_is_refused_at_once(tmp_path):
    with refused(ValueError, f"spill_to={str(tmp_path / 'none')!r}", os.strerror(errno.ENOENT), "folder"):
        EmbeddingStore(spill_to=tmp_path / "none")
