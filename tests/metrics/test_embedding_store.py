"""The store of embeddings: what it keeps, refuses and gives back, on one process and several."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.metrics import EmbeddingStore
from tests.metrics import gloo_jobs
from tests.metrics.cases import WRONG_BATCHES


def filled(*sizes, dim=4, dtype=torch.float32):
    store, parts = EmbeddingStore(), []
    for size in sizes:
        parts.append((torch.randn(size, dim).to(dtype), torch.randint(-5, 5, (size,)) * 2**58))
        store.append(*parts[-1])
    embeddings, labels = zip(*parts, strict=True)
    return store, torch.cat(embeddings), torch.cat(labels)


@settings(max_examples=18, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.sampled_from([torch.bfloat16, torch.float64]))
def test_hands_out_what_came_in_in_order_and_in_the_dtype_of_the_model(sizes, dtype):
    store, embeddings, labels = filled(*sizes, dtype=dtype)
    assert len(store) == sum(sizes)
    for _ in range(2):  # asking takes nothing away
        found, found_labels = store.gather()
        assert found.dtype == dtype
        assert torch.equal(found, embeddings)
        assert torch.equal(found_labels, labels)


def test_holds_copies_not_views():
    embeddings, labels, positions = torch.randn(4, 3), torch.arange(4), torch.arange(4)
    store, expected = EmbeddingStore(), embeddings.clone()
    store.append(embeddings.requires_grad_() * 1, labels, positions)
    embeddings = embeddings.detach()
    for tensor in (embeddings, labels, positions):
        tensor.zero_()
    found, found_labels = store.gather()
    assert not found.requires_grad
    assert torch.equal(found, expected)
    assert found_labels.tolist() == [0, 1, 2, 3]
    (batch,) = store._batches
    assert batch.positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "view", [lambda big: big[:4, :3], lambda big: big[::250, ::33], lambda big: big[:1, :3].expand(4, 3)]
)
def test_a_slice_does_not_keep_what_it_was_cut_from(view):
    big, labels = torch.randn(1000, 100), torch.arange(1000)
    store = EmbeddingStore()
    store.append(view(big)[:4], labels[:4])
    (batch,) = store._batches
    assert batch.embeddings.untyped_storage().nbytes() == batch.embeddings.numel() * 4
    assert batch.embeddings.data_ptr() != big.data_ptr()
    assert batch.labels.untyped_storage().nbytes() == 4 * 8
    assert torch.equal(batch.embeddings, view(big)[:4])


def test_clear_forgets_everything_also_the_dimension():
    store, _, _ = filled(3, 4)
    store.clear()
    assert len(store) == 0
    assert [part.shape for part in store.gather()] == [(0, 0), (0,)]
    store.append(torch.ones(2, 9), torch.arange(2))
    assert store.gather()[0].shape == (2, 9)


def test_nothing_stored():
    embeddings, labels = EmbeddingStore().gather(dataset_size=10)
    assert embeddings.shape == (0, 0)
    assert labels.shape == (0,)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((embeddings, labels), f"EmbeddingStore{message}") for embeddings, labels, message in WRONG_BATCHES),
        ((torch.ones(2, 5), torch.arange(2)), r"embeddings so far have dimension 4, those of this batch 5. Every"),
        (
            (torch.ones(2, 4), torch.ones(2, 7).long()),
            "labels so far are integers, those of this batch zeros and ones of 7 labels",
        ),
        (
            (torch.ones(2, 4), torch.arange(2), torch.arange(3)),
            r"one position for each of the 2 embeddings; got .* \(3,\)",
        ),
        ((torch.ones(5, 4), torch.arange(5), None, ["a", "b"]), "EmbeddingStore: 5 embeddings, but 2 ids"),
    ],
)
def test_refusals_leave_the_store_alone(arguments, message):
    store, embeddings, _ = filled(3)
    with pytest.raises(ValueError, match=message):
        store.append(*arguments)
    assert len(store) == 3
    assert torch.equal(store.gather()[0], embeddings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies through pinned memory need a GPU")
class TestFromCuda:
    def test_arrives_as_it_left(self):
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

    def test_another_dimension_is_refused_while_the_first_batch_is_on_its_way(self):
        store = EmbeddingStore()
        store.append(torch.ones(2, 4, device="cuda"), torch.arange(2, device="cuda"))
        with pytest.raises(ValueError, match=r"embeddings so far have dimension 4, those of this batch 5"):
            store.append(torch.ones(2, 5, device="cuda"), torch.arange(2, device="cuda"))


class TestIds:
    @pytest.mark.parametrize("ids", [torch.tensor([5, 2**62, 5, -1, -1]), ["a", "b", "a", "ä", "ä"]])
    def test_the_first_of_each_stays(self, ids):
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
        assert shard.note is not None
        assert shard.note.startswith(
            "80 of 80 ids are shared by items that differ in embedding or label. Only the first item of each id is "
            "counted, so that 320 of 400 items are left out, and 320 of them are no repetitions. Pass ids that name single "
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_repetitions_may_differ_by_rounding_and_labels_may_not(self, dtype):
        for changed in (0, 3):
            store, embeddings, labels = EmbeddingStore(), 1e20 * torch.randn(40, 32), torch.arange(80) % 40
            labels[77:] += changed
            store.append(torch.cat([embeddings, embeddings * 1.004]).to(dtype), labels, ids=torch.arange(80) % 40)
            note = store.shard().note
            if not changed:
                assert note is None
            else:
                assert note is not None
                assert "3 of 40 ids" in note
                assert "40 of 80 items are left out, and 3 of them are no repetitions" in note


class TestSeveralProcesses:
    @pytest.mark.parametrize("n", [1, 22, 23])
    def test_the_padding_of_the_sampler_is_dropped_and_the_order_restored(self, on_ranks, n):
        embeddings, labels = gloo_jobs.items(n)
        for answers in on_ranks:
            found, found_labels = answers["embedding_store"][f"sampler {n}"]
            assert torch.equal(found, embeddings.half())
            assert torch.equal(found_labels, labels)

    def test_the_padding_is_there_without_the_size_of_the_data_set(self, on_ranks):
        embeddings, _ = gloo_jobs.items(23)
        for answers in on_ranks:
            found, _ = answers["embedding_store"]["padded 23"]
            assert torch.equal(found, torch.cat([embeddings, embeddings[: -23 % len(on_ranks)]]).half())

    def test_positions_of_a_part_of_the_items(self, on_ranks):
        embeddings, labels = gloo_jobs.items(23)
        kept = labels != labels[0]
        for answers in on_ranks:
            found, found_labels = answers["embedding_store"]["some"]
            assert torch.equal(found, embeddings[kept])
            assert torch.equal(found_labels, labels[kept])

    @pytest.mark.parametrize("name", gloo_jobs.SHARDS)
    def test_every_rank_gets_every_item_once(self, on_ranks, name):
        embeddings, labels = gloo_jobs.items(24 if name == "even" else 23)
        first, *others = (answers["embedding_store"][name] for answers in on_ranks)
        for other in others:
            assert torch.equal(first[0], other[0])
            assert torch.equal(first[1], other[1])
        rows = {(*row, label) for row, label in zip(embeddings.tolist(), labels.tolist(), strict=True)}
        assert {(*row, label) for row, label in zip(first[0].tolist(), first[1].tolist(), strict=True)} == rows
        assert len(first[0]) == len(embeddings)

    @pytest.mark.parametrize("kind", ["integers", "words"])
    def test_of_items_with_one_id_one_stays(self, on_ranks, kind):
        embeddings, labels = gloo_jobs.items(23)
        rows = sorted((*row, label) for row, label in zip(embeddings.tolist(), labels.tolist(), strict=True))
        for answers in on_ranks:
            (found, found_labels), dropped = answers["embedding_store"][kind]
            assert sorted((*row, y) for row, y in zip(found.tolist(), found_labels.tolist(), strict=True)) == rows
            assert dropped == 7 * (len(on_ranks) - 1) + len(on_ranks)

    def test_nothing_anywhere(self, on_ranks):
        for answers in on_ranks:
            embeddings, labels = answers["embedding_store"]["nothing"]
            assert embeddings.shape == (0, 0)
            assert labels.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_spilled_is_what_came_in(tmp_path, dtype):
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


def test_a_folder_that_is_none_is_refused_at_once(tmp_path):
    with pytest.raises(
        ValueError, match=r"spill_to='.*none' cannot be written to: No such file.* Pass a folder on a disk"
    ):
        EmbeddingStore(spill_to=tmp_path / "none")
