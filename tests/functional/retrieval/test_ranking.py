"""Ranks and groups of several models follow from the corrected differences of each two."""

from itertools import chain, combinations

import pytest
import torch

from fewshot_callbacks import InputError, Metric, evaluate_retrieval, rank_reports
from fewshot_callbacks.functional import Difference, Interval, Ranking, compare_reports
from fewshot_callbacks.functional.p_values import paired_difference_p_value
from tests.functional.retrieval.users_metrics import MEAN_RANK, mean_rank
from tests.messages import missing_facts, refused

LABELS = torch.arange(300) % 30


def model(noise, seed, metrics=("mAP", "macro_mAP", "pair_f1")):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(30, 12, generator=generator)[LABELS] + torch.randn(300, 12, generator=generator)
    points += noise * torch.randn(300, 12, generator=torch.Generator().manual_seed(seed))
    return evaluate_retrieval(points, LABELS, metrics=metrics)


@pytest.fixture(scope="module")
def models():
    noises = {"a": 0.3, "b": 1.5, "c": 0.32, "d": 1.0, "e": 0.3}
    return {name: model(noise, seed) for seed, (name, noise) in enumerate(noises.items())}


def corrected(p_values):
    """Holm's definition: the smallest level at which the procedure rejects a hypothesis."""

    def rejected(level):
        found = set()
        for step, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
            if p_values[index] > level / (len(p_values) - step):
                break
            found.add(index)
        return found

    levels = sorted({min(1.0, p * count) for p in p_values for count in range(1, len(p_values) + 1)})
    # rounding of p * count / count
    return [
        next((level for level in levels if index in rejected(level * (1 + 1e-12))), 1.0)
        for index in range(len(p_values))
    ]


@pytest.mark.parametrize("metric", ["mAP", "macro_mAP"])
def test_ranks_and_groups_follow_from_the_pairs(models, metric):
    ranking = rank_reports(models, metric)
    names = sorted(models, key=lambda name: -models[name][metric])
    assert list(ranking.values) == names
    alone = {}
    for pair in combinations(names, 2):
        first, second = (models[name] for name in pair)
        assert ranking.differences[pair] == compare_reports(first, second)[metric]
        of_queries = first.per_query["mAP"] - second.per_query["mAP"]
        if metric == "macro_mAP":
            of_classes = torch.stack([of_queries[c == LABELS].mean() for c in range(30)])
            alone[pair] = paired_difference_p_value(of_classes)
        else:
            alone[pair] = paired_difference_p_value(of_queries, LABELS)
    expected = corrected(list(alone.values()))
    assert list(ranking.p_values.values()) == pytest.approx(expected, rel=1e-9)
    for name in names:
        better = sum(p < 0.05 and pair[1] == name for pair, p in ranking.p_values.items())
        worse = sum(p < 0.05 and pair[0] == name for pair, p in ranking.p_values.items())
        assert ranking.ranks[name] == (1 + better, 5 - worse)
    assert set(ranking.groups[0]) == {"a", "c", "e"}
    assert ranking.ranks["b"] == (5, 5)


def ranking_of(count, differing):
    """A ranking of so many models of which these pairs differ."""
    names = [f"m{number}" for number in range(count)]
    pairs = list(combinations(names, 2))
    p_values = {pair: 0.01 if pair in differing else 0.5 for pair in pairs}
    unknown = Difference(0.5, 0.5, Interval(0.0, 0.0))
    return Ranking("mAP", dict.fromkeys(names, 0.5), dict.fromkeys(pairs, unknown), p_values, 0.95)


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_the_largest_sets_without_a_difference(seed):
    generator = torch.Generator().manual_seed(seed)
    names = [f"m{number}" for number in range(6)]
    pairs = [pair for pair in combinations(names, 2) if torch.rand((), generator=generator) < 0.4]
    subsets = chain.from_iterable(combinations(names, size) for size in range(1, 7))
    alike = [set(subset) for subset in subsets if not any(pair in pairs for pair in combinations(subset, 2))]
    largest = [subset for subset in alike if not any(subset < other for other in alike)]
    groups = ranking_of(6, pairs).groups
    assert len(groups) == len(largest)
    assert all(set(group) in largest for group in groups)
    for pair in combinations(names, 2):
        assert any(set(pair) <= set(group) for group in groups) == (pair not in pairs)


def test_all_groups_have_a_sign_of_their_own():
    pairs = list(combinations([f"m{number}" for number in range(30)], 2))
    signs = [row[-1] for row in ranking_of(30, pairs).rows()]
    assert sorted(map(int, signs)) == list(range(1, 31))
    assert [row[-1] for row in ranking_of(3, []).rows()] == ["a", "a", "a"]


def test_equal_models_share_all_ranks(models):
    ranking = rank_reports({"one": models["a"], "two": models["a"], "three": models["a"]})
    assert set(ranking.p_values.values()) == {1.0}
    assert set(ranking.ranks.values()) == {(1, 3)}
    assert ranking.groups == (("one", "two", "three"),)


def test_lower_values_come_first_where_they_are_better():
    reports = {str(noise): model(noise, 1, metrics=("mAP", MEAN_RANK)) for noise in (2.0, 0.2, 1.0)}
    ranking = rank_reports(reports, "mean_rank")
    assert list(ranking.values) == ["0.2", "1.0", "2.0"]
    assert [ranks.best for ranks in ranking.ranks.values()] == [1, 2, 3]


def test_a_single_class_has_no_p_value():
    points = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    two = {name: evaluate_retrieval(points + shift, [0] * 20, metrics="mAP") for name, shift in (("a", 0), ("b", 1))}
    ranking = rank_reports(two)
    assert set(ranking.ranks.values()) == {(1, 2)}
    assert "unknown" in str(ranking)
    assert ranking.to_dict()["pairs"][0]["p"] is None


def test_the_table_and_its_values_for_json_say_the_same(models):
    ranking = rank_reports(models)
    first, *_ = lines = str(ranking).splitlines()
    assert first.split() == ["model", "mAP", "minus", "best", "p", "rank", "groups"]
    assert missing_facts(" ".join(lines[-2:]), ("95 %", "10 pairs", "Holm")) == []
    stored = ranking.to_dict()
    assert [entry["name"] for entry in stored["models"]] == [line.split()[0] for line in lines[1:6]]
    assert [entry["groups"] for entry in stored["models"]] == [row[-1].split() for row in ranking.rows()]
    assert stored["pairs"][0]["p"] == next(iter(ranking.p_values.values()))


def test_paths_are_read(models, tmp_path):
    paths = {name: tmp_path / f"{name}.npz" for name in ("a", "b")}
    for name, path in paths.items():
        models[name].save(path)
    assert rank_reports(models) == rank_reports({**models, **paths})
    assert compare_reports(str(paths["a"]), paths["b"]) == compare_reports(models["a"], models["b"])


def test_what_cannot_be_ranked_is_refused(models):
    with refused(InputError, "rank_reports", "1 report", "two or more"):
        rank_reports({"a": models["a"]})
    with refused(InputError, "rank_reports", "pair_f1", "mAP, macro_mAP"):
        rank_reports(models, "pair_f1")
    with refused(InputError, "rank_reports", "'b'", "recall@1", "Evaluate with it"):
        rank_reports({"a": model(0.3, 0, ("recall@1",)), "b": models["b"]}, "recall@1")
    others = evaluate_retrieval(torch.randn(300, 4), LABELS.flip(0))
    with refused(InputError, "rank_reports", "'other'", "their labels", "same items"):
        rank_reports({**models, "other": others})
    other_metric = Metric("mean_rank", "ranks", mean_rank, "Another meaning.", range=None, better="lower")
    mixed = {name: model(0.3, 0, ("mAP", metric)) for name, metric in (("a", MEAN_RANK), ("b", other_metric))}
    with refused(InputError, "rank_reports", "mean_rank", "user-defined metric", "mAP"):
        rank_reports(mixed, "mean_rank")
    undirected = Metric("mean_rank", "ranks", mean_rank, "Neither is better.", range=None, better=None)
    with refused(InputError, "rank_reports", "mean_rank", "neither direction", "mAP"):
        rank_reports({name: model(0.3, 0, ("mAP", undirected)) for name in "ab"}, "mean_rank")
