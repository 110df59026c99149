"""What `collect_inputs` makes of the sets of one process: their order, their types, and what it shares with the caller."""

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.inputs import EVERYTHING, Share, collect_inputs
from tests.reports import assert_same


def made(items: int, seed: int, *, as_codes: bool = False) -> tuple[torch.Tensor, list[str]]:
    vectors = torch.randn(items, 6, generator=torch.Generator().manual_seed(seed))
    return vectors > 0 if as_codes else vectors, [f"class {number % 7}" for number in range(items)]


def collected(*sets, share=EVERYTHING, **options):
    return collect_inputs("test", share, *sets, **options)


@pytest.mark.parametrize("similarity", ["cosine", "hamming"])
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("max_queries", [None, 15])
def test_places_put_the_items_of_one_process_in_order(similarity: str, two: bool, max_queries: int | None) -> None:
    (queries, labels), (gallery, gallery_labels) = (made(n, n, as_codes=similarity == "hamming") for n in (40, 30))
    order, other = torch.randperm(40), torch.randperm(30)
    sets = {"embeddings": queries, "labels": labels, "query_groups": torch.arange(40) % 9}
    mixed = {"embeddings": queries[order], "labels": [labels[n] for n in order], "query_groups": order % 9}
    if two:
        sets |= {"gallery": gallery, "gallery_labels": gallery_labels, "gallery_groups": torch.arange(30) % 9}
        mixed |= {"gallery": gallery[other], "gallery_labels": [gallery_labels[n] for n in other]}
        mixed |= {"gallery_groups": other % 9}
    options = {"label_groups": 3, "max_queries": max_queries, "similarity": similarity}
    if similarity == "cosine":
        options["metrics"] = (*DEFAULT_METRICS, "prototype_accuracy", "opis@fmr0.5")
    share = Share(query_places=order, gallery_places=other if two else None)
    assert_same(evaluate_retrieval(**sets, **options), evaluate_retrieval(**mixed, **options, share=share))


@pytest.mark.parametrize("places", [None, torch.arange(40)])
def test_one_set_in_order_is_not_copied(places: torch.Tensor | None) -> None:
    queries, labels = made(40, 0)
    inputs = collected(queries, labels, None, None, share=Share(query_places=places))
    assert inputs.queries is inputs.gallery
    assert inputs.queries.data_ptr() == queries.data_ptr()


def test_a_sample_keeps_the_gallery_and_the_index_of_each_query() -> None:
    queries, labels = made(40, 0)
    drawn = torch.tensor([3, 17, 30])
    inputs = collected(queries, labels, None, None, query_groups=torch.arange(40) % 9)
    sample = inputs.sample(drawn)
    assert torch.equal(sample.queries, queries[drawn])
    assert torch.equal(sample.query_labels, inputs.query_labels[drawn])
    assert torch.equal(sample.codes["query_groups"], drawn % 9)
    assert torch.equal(sample.codes["gallery_groups"], torch.arange(40) % 9)
    assert sample.gallery is inputs.gallery
    assert torch.equal(sample.drawn, drawn)


@pytest.mark.parametrize("unlike", [None, "gallery", "gallery_labels", "gallery_ids"])
def test_the_same_items_twice_are_one_set(unlike: str | None) -> None:
    vectors, labels = made(40, 0)
    sides = {"gallery": vectors.clone(), "gallery_labels": [*labels], "gallery_ids": torch.arange(40)}
    if unlike is not None:
        sides[unlike] = [*reversed(labels)] if unlike == "gallery_labels" else sides[unlike].flip(0)
    gallery, gallery_labels = sides.pop("gallery"), sides.pop("gallery_labels")
    inputs = collected(vectors, labels, gallery, gallery_labels, query_ids=torch.arange(40), **sides)
    one = inputs.as_one_set()
    if unlike is not None:
        assert one is inputs
        return
    assert one.same_set
    assert one.queries is one.gallery
    assert one.codes["query_ids"] is one.codes["gallery_ids"] is None
    assert collected(vectors, labels, gallery, gallery_labels).as_one_set().same_set is False  # a copy is a match
    copies = torch.arange(40) // 2
    kept = collected(vectors, labels, gallery, gallery_labels, query_ids=copies, gallery_ids=copies).as_one_set()
    assert kept.same_set
    assert kept.codes["query_ids"].tolist() == kept.codes["gallery_ids"].tolist() == copies.tolist()
