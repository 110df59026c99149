"""Slices of trials have the error rates of their trials at the common threshold, and simultaneous intervals."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit
from scipy.stats import t

from fewshot_callbacks import evaluate_trials
from tests.cases import examples
from tests.messages import missing_facts, refused

KEYS = ("eer", "min_dcf@0.5", "tar@far0.1")
values = st.sampled_from(["old", "young", "child"])
trials = st.lists(st.tuples(st.integers(-3, 4), st.booleans(), values, values), min_size=2, max_size=40).filter(
    lambda drawn: len({same for _, same, *_ in drawn}) == 2
)


def counts(drawn, threshold, chosen):
    """Numbers of mistakes and of trials of both kinds, among the trials whose two values are chosen, by a loop."""
    found = {kind: [0, 0] for kind in (True, False)}
    for score, same, first, second in drawn:
        if chosen(first, second):
            found[same][0] += (score < threshold) if same else (score >= threshold)
            found[same][1] += 1
    return found


@settings(max_examples=examples(120), deadline=None)
@given(trials)
def test_rates_of_slices_are_the_definitions(drawn):
    scores, same, first, second = zip(*drawn, strict=True)
    report = evaluate_trials(scores, same, slices={"age": (first, second)}, metrics=KEYS)
    for key in KEYS:
        found = report.of_slices("age", key)
        assert (found.metric, found.threshold) == (key, report.thresholds[key])
        rates = {True: found.false_non_match_rate, False: found.false_match_rate}
        of_all = counts(drawn, found.threshold, lambda *_: True)
        for kind, of_kind in rates.items():
            assert of_kind.overall == of_all[kind][0] / of_all[kind][1]
            expected = {
                name: counts(drawn, found.threshold, lambda *sides, name=name: set(sides) == {name})[kind]
                for name in {*first, *second}
            }
            across = counts(drawn, found.threshold, lambda one, two: one != two)[kind]
            if across[1]:
                expected["across"] = across
            assert {name: [rate.mistakes, rate.trials] for name, rate in of_kind.items()} == expected
            # All slices together are all trials.
            assert [sum(rate[column] for rate in of_kind.values()) for column in (2, 3)] == of_all[kind]
            for rate in of_kind.values():
                assert rate.value == pytest.approx(
                    rate.mistakes / rate.trials if rate.trials else math.nan, nan_ok=True
                )
            assert of_kind[of_kind.worst].value == max(
                rate.value for rate in of_kind.values() if not math.isnan(rate.value)
            )


def trials_of_people(identities=30, seed=0):
    """Scores, kinds and both identities of 900 trials, and the sensor of each side."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, identities, (2, 900))
    second[:300] = first[:300]
    same = first == second
    sensors = rng.integers(0, 2, (2, 900))
    scores = rng.normal(size=900) + 2 * same - 0.5 * (first % 3 == 0) - 0.4 * sensors[0]
    return scores, same, first, second, sensors


def interval_of_a_rate(wrong, first, second, confidence):
    """The interval of a share, by leaving out each identity in a loop."""
    people = sorted({*first, *second})
    value = wrong.mean()
    moves = np.array([wrong[(first != one) & (second != one)].mean() - value for one in people])
    couples: dict[frozenset, float] = {}
    for mistake, *sides in zip(wrong, first, second, strict=True):
        if sides[0] != sides[1]:
            couples[frozenset(sides)] = couples.get(frozenset(sides), 0.0) + (mistake - value) / len(wrong)
    squares = (moves**2).sum()
    once = max(squares - sum(part**2 for part in couples.values()), squares / 2)
    error = math.sqrt((len(people) - 1) / len(people) * once)
    freedom = max(1, min(len(people) - 1, 2 * squares**2 / (moves**4).sum()))
    reach = t.ppf((1 + confidence) / 2, freedom) * error / (value * (1 - value))
    return [expit(logit(value) - reach), expit(logit(value) + reach)]


def test_intervals_leave_out_each_identity_of_the_slice_and_hold_together():
    scores, same, first, second, sensors = trials_of_people()
    report = evaluate_trials(
        scores, same, first=first, second=second, slices={"sensor": tuple(sensors)}, confidence=0.9
    )
    found = report.of_slices("sensor", "tar@far0.01")
    report_of_eer = report.of_slices("sensor")  # the first metric
    assert report_of_eer.metric == "eer"
    masks = {code: (sensors == code).all(0) for code in (0, 1)} | {"across": sensors[0] != sensors[1]}
    given = 0
    for slices, kind in ((found.false_non_match_rate, same), (report_of_eer.false_match_rate, ~same)):
        threshold = found.threshold if kind is same else report_of_eer.threshold
        assert set(slices) == {0, 1, "across"}
        for name, rate in slices.items():
            chosen = masks[name] & kind
            wrong = ((scores >= threshold) != same)[chosen].astype(float)
            assert rate.identities == len({*first[chosen], *second[chosen]})
            expected = interval_of_a_rate(wrong, first[chosen], second[chosen], 1 - 0.1 / 3)
            assert rate.interval == pytest.approx(expected, rel=1e-9)
            given += 1
    assert given == 6


def test_a_slice_without_mistakes_has_an_upper_bound():
    """Gaffke's, of the identities of its trials: (alpha / 2)^(1 / identities) is the least weight of what was seen."""
    labels = np.repeat(np.arange(12), 2)
    first, second = labels[np.triu_indices(24, 1)[0]], labels[np.triu_indices(24, 1)[1]]
    same = first == second
    sensors = np.where(first < 6, "a", "b"), np.where(second < 6, "a", "b")
    people = {"first": first, "second": second}
    found = evaluate_trials(same.astype(float), same, **people, slices={"sensor": sensors}).of_slices(
        "sensor", "tar@far0.01"
    )
    assert found.threshold == 1.0
    for rates, slices in ((found.false_non_match_rate, 2), (found.false_match_rate, 3)):
        rate = rates["a"]
        assert (rate.value, rate.identities, rate.interval.low) == (0.0, 6, 0.0)
        assert rate.interval.high == pytest.approx(1 - (0.05 / slices / 2) ** (1 / 6))


def test_one_slice_is_the_whole_set():
    scores, same, first, second, _ = trials_of_people()
    everyone = ["all"] * 900
    report = evaluate_trials(
        scores, same, first=first, second=second, slices={"one": (everyone, everyone)}, metrics=("tar@far0.1", "eer")
    )
    found = report.of_slices("one")
    [rejected], [accepted] = found.false_non_match_rate.values(), found.false_match_rate.values()
    assert rejected.value == found.false_non_match_rate.overall == pytest.approx(1 - report["tar@far0.1"])
    assert accepted.value == found.false_match_rate.overall <= 0.1
    assert (rejected.trials, accepted.trials, accepted.identities) == (report.same, report.different, 30)


def test_neither_order_nor_names_nor_sides_matter():
    scores, same, first, second, sensors = trials_of_people()
    people = {"first": first, "second": second}
    whole = evaluate_trials(scores, same, **people, slices={"sensor": tuple(sensors)}).of_slices("sensor")
    order = np.random.default_rng(1).permutation(900)
    words = np.array(["zebra", "ant"])[sensors[:, order]]
    again = evaluate_trials(
        torch.from_numpy(scores[order]),
        same[order],
        first=second[order],
        second=first[order],
        slices={"sensor": [words[1], list(words[0])]},
    ).of_slices("sensor")
    for of_whole, of_again in (
        (whole.false_non_match_rate, again.false_non_match_rate),
        (whole.false_match_rate, again.false_match_rate),
    ):
        for name, other in ((0, "zebra"), (1, "ant"), ("across", "across")):
            assert of_whole[name][2:] == of_again[other][2:]
            assert of_whole[name].value == of_again[other].value
            assert of_again[other].interval == pytest.approx(of_whole[name].interval, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_a_value_for_each_trial_is_that_of_both_sides(form):
    scores, same, *_, sensors = trials_of_people()
    one = evaluate_trials(scores, same, slices={"sensor": form(sensors[0].tolist())})
    both = evaluate_trials(scores, same, slices={"sensor": (sensors[0], sensors[0])})
    assert one == both
    assert "across" not in one.of_slices("sensor").false_match_rate


def test_two_trials_have_a_value_each():
    found = evaluate_trials([1.0, 0.0], [1, 0], slices={"sensor": ("a", "b")}).of_slices("sensor")
    assert {name: rate.trials for name, rate in found.false_match_rate.items()} == {"a": 0, "b": 1}


def test_a_slice_without_identities_or_trials_has_no_interval():
    scores, same, first, second, sensors = trials_of_people()
    found = evaluate_trials(scores, same, slices={"sensor": tuple(sensors)}).of_slices("sensor")
    assert all(math.isnan(rate.interval.low) for rate in found.false_match_rate.values())
    assert all(rate.identities == 0 for rate in found.false_match_rate.values())
    kinds = np.where(same, "target", "non-target")
    found = evaluate_trials(scores, same, first=first, second=second, slices={"kind": kinds}).of_slices("kind")
    empty = found.false_match_rate["target"]
    assert math.isnan(empty.value)
    assert (empty.mistakes, empty.trials, empty.identities) == (0, 0, 0)
    # The empty slice does not widen the interval of the other.
    alone = evaluate_trials(scores, same, first=first, second=second, slices={"all": ["all"] * 900}).of_slices("all")
    assert found.false_match_rate["non-target"].interval == alone.false_match_rate["all"].interval


def test_what_is_printed_and_stored():
    scores, same, first, second, sensors = trials_of_people()
    report = evaluate_trials(scores, same, first=first, second=second, slices={"sensor": tuple(sensors)}, metrics=KEYS)
    found = report.of_slices("sensor", "tar@far0.1")
    lines = str(found).splitlines()
    assert missing_facts(lines[0], ("tar@far0.1", f"{found.threshold:.4f}")) == []
    for rates, table in ((found.false_non_match_rate, lines[1:5]), (found.false_match_rate, lines[5:9])):
        printed = [line.split()[1] for line in table[1:]]
        assert printed == [f"{value:.4f}" for value in sorted((rate.value for rate in rates.values()), reverse=True)]
        assert table[1].split()[0] == str(rates.worst)
    assert missing_facts(lines[-1], ("95 %", "worst")) == []
    stored = json.loads(json.dumps(report.to_dict()))["slices"]["sensor"]
    assert list(stored) == list(KEYS)
    of_metric = stored["tar@far0.1"]
    assert of_metric["threshold"] == found.threshold
    assert of_metric["overall"]["false_match_rate"] == found.false_match_rate.overall
    assert of_metric["false_match_rate"]["across"] == {
        "value": found.false_match_rate["across"].value,
        "interval": list(found.false_match_rate["across"].interval),
        "mistakes": found.false_match_rate["across"].mistakes,
        "trials": found.false_match_rate["across"].trials,
        "identities": found.false_match_rate["across"].identities,
    }
    assert evaluate_trials(scores, same).to_dict()["slices"] == {}


@pytest.mark.parametrize(
    ("slices", "facts"),
    [
        (["a", "b"], ("slices", "list", "dictionary")),
        ({1: ["a"] * 4}, ("slices", "strings")),
        ({"age": ["a"] * 3}, ("4 scores", "3 slices['age']")),
        ({"age": (["a"] * 4, ["a"] * 3)}, ("4 scores", "3 slices['age'][1]")),
        ({"age": (["a"] * 4, [1] * 4)}, ("slices['age'][0]", "strings", "integers")),
        ({"age": [0.5, 1.0, 2.0, 3.0]}, ("slices['age']",)),
        ({"age": ["across", "a", "b", "a"]}, ("'across'", "slices['age']")),
    ],
)
def test_slices_that_are_refused(slices, facts):
    with refused(ValueError, "evaluate_trials", *facts):
        evaluate_trials([1.0, 2.0, 3.0, 4.0], [1, 0, 1, 0], slices=slices)


def test_more_slices_than_people_can_tell_apart_are_refused():
    scores, same, first, second, _ = trials_of_people(310)
    evaluate_trials(scores, same, slices={"age": np.arange(900) % 30})
    with refused(ValueError, "slices['age']", "31 values", "at most 30"):
        evaluate_trials(scores, same, slices={"age": np.arange(900) % 31})
    people = {"first": first, "second": second}
    identities = evaluate_trials(scores, same, **people).identities
    most = identities // 10
    with refused(ValueError, f"{most + 10} values", f"{identities} identities"):
        evaluate_trials(scores, same, **people, slices={"age": np.arange(900) % (most + 10)})


def test_what_a_report_has_no_slices_of():
    report = evaluate_trials([1.0, 0.0], [1, 0], slices={"sensor": ["a", "b"]}, metrics=("cllr", "eer"))
    assert report.of_slices("sensor").metric == "eer"
    with refused(ValueError, "TrialReport.of_slices", "'age'", "'sensor'"):
        report.of_slices("age")
    with refused(ValueError, "TrialReport.of_slices", "'cllr'", "eer"):
        report.of_slices("sensor", "cllr")
    with refused(ValueError, "none", "threshold"):
        evaluate_trials([1.0, 0.0], [1, 0], slices={"sensor": ["a", "b"]}, metrics=("cllr",)).of_slices("sensor")
