"""Articles and plurals of messages, by lists of words."""

import pytest

from fewshot_callbacks.system.words import counted, verb, with_article


@pytest.mark.parametrize(
    ("article", "nouns"),
    [
        ("a", "list float tensor UserDict uint8 Unit euro one Dataset mapping None nn"),
        ("an", "int array evaluation object Own Identity ndarray NDFrame HFDataset item uncle"),
    ],
)
def test_the_article_is_that_of_the_sound(article: str, nouns: str) -> None:
    assert [with_article(noun) for noun in nouns.split()] == [f"{article} {noun}" for noun in nouns.split()]


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("1 query", "2,000 queries"),
        ("1 class", "2,000 classes"),
        ("1 box", "2,000 boxes"),
        ("1 batch", "2,000 batches"),
        ("1 gallery item", "2,000 gallery items"),
        ("1 key", "2,000 keys"),
    ],
)
def test_one_thing_is_no_plural(one: str, many: str) -> None:
    noun = one.removeprefix("1 ")
    assert (counted(1, noun), counted(2000, noun)) == (one, many)
    assert [verb(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]
