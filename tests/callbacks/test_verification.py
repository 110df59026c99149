"""VerificationMonitor: its logged values for a trial list equal `evaluate_trials` of the embeddings."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fewshot_callbacks import EmbeddingSource, TrialList, VerificationMonitor, evaluate_trials, trial_scores
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import TrialReport
from tests.callbacks.models import (
    Net,
    Returns,
    close,
    items,
    loader,
    log_of_validation,
    messages_of,
    retrieval,
    trainer,
    with_prefix,
)
from tests.callbacks.monitor_jobs import TRIAL_METRICS, paths, trials_of
from tests.messages import missing_facts, refused, warned

pytestmark = pytest.mark.filterwarnings("ignore:.*(interval|false match rate)")

ITEMS = items()
NUMBERED = TensorDataset(*ITEMS.tensors, torch.arange(36))


def by_id(net: Returns, points: Tensor, labels: Tensor, ids: Tensor) -> dict[str, Any]:
    return {"embeddings": net(points), "labels": labels, "path": [f"{index:02}" for index in ids.tolist()]}


def embedded(module: Net, batch: Any) -> Tensor:
    return module.embed(batch[0])


def monitor(trials: Any, ids: Any = paths, **settings: Any) -> VerificationMonitor:
    return VerificationMonitor(trials, ids, **({"metrics": TRIAL_METRICS} | settings))


def by_hand(net: Net, trials: TrialList, count: int = 36, **settings: Any) -> TrialReport:
    """Return the report of the trials among the first items."""
    embeddings, _ = net.by_hand(ITEMS)
    first, second = trials.rows([f"{index:02}" for index in range(36)])
    came = ((first < count) & (second < count)).nonzero()[:, 0].tolist()
    chosen = trials.chosen(came)
    similarity = settings.pop("similarity", "cosine")
    scores = trial_scores(embeddings, first[came], second[came], similarity=similarity)
    people: dict[str, Any] = {"first": chosen.first, "second": chosen.second, "folds": chosen.folds}
    return evaluate_trials(scores, chosen.same, **(people | {"metrics": TRIAL_METRICS} | settings))


def of_report(report: TrialReport, missing: int = 0) -> Any:
    return close(with_prefix(dict(report.values) | {"missing_trials": float(missing)}))


def test_the_report_has_the_slices_of_the_list() -> None:
    net, trials = Net(), trials_of(36)
    sensors = tuple("ab"[trial % 2] for trial in range(len(trials)))
    sides = {"sensor": (sensors, ("a",) * len(trials))}
    verification = monitor(replace(trials, slices=sides))
    log_of_validation(verification, net, loader(ITEMS))
    assert verification.report is not None
    expected = by_hand(net, trials, slices=sides)
    assert str(verification.report.of_slices("sensor")) == str(expected.of_slices("sensor"))


@pytest.mark.parametrize(
    "settings", [{}, {"similarity": "euclidean", "metrics": ("eer", "pair_auroc")}, {"confidence": 0.8}]
)
def test_what_is_logged_is_what_the_function_says(settings: Any) -> None:
    net, trials = Net(), trials_of(36)
    verification = monitor(trials, **settings)
    report = by_hand(net, trials, **settings)
    assert log_of_validation(verification, net, loader(ITEMS)) == of_report(report)
    assert verification.report is not None
    assert (verification.report.trials, verification.report.same) == (630, 90)
    assert str(verification.report) == str(report)


@pytest.mark.parametrize("source", ["encoder", EmbeddingSource(embed=embedded), EmbeddingSource("encoder", ids=paths)])
def test_embeddings_come_from_any_source_and_are_shared(source: Any) -> None:
    net, trials = Net(), trials_of(36)
    logged = log_of_validation((retrieval(source=source), monitor(trials, source=source)), net, loader(ITEMS))
    assert {key: logged[key] for key in logged if key.split("/")[1] in (*TRIAL_METRICS, "missing_trials")} == of_report(
        by_hand(net, trials)
    )


def test_rows_on_a_disk_are_found(tmp_path: Path) -> None:
    net, trials = Net(), trials_of(36)
    spilled = monitor(trials, source=EmbeddingSource(spill_to=tmp_path))
    assert log_of_validation(spilled, net, loader(ITEMS)) == log_of_validation(monitor(trials), net, loader(ITEMS))


def test_labels_are_not_needed() -> None:
    net = Returns(lambda net, points: {"embeddings": net(points)})
    logged = log_of_validation(monitor(trials_of(36)), net, loader(TensorDataset(ITEMS.tensors[0])))
    assert logged == of_report(by_hand(net, trials_of(36)))


# ----------------------------------------------------------------------------------------------------------------- lists


def person(index: int) -> str:
    return f"P{int(ITEMS.tensors[1][index]) + 7}"


def lfw_name(outputs: Any, batch: Any) -> list[str]:
    """The name of a file as LFW has it: the person, and the number of the picture among those of the person."""
    return [f"lfw/{person(index)}/{person(index)}_{index:04}.jpg" for index in batch[2].tolist()]


def test_a_list_of_lfw_has_the_accuracy_of_its_folds(tmp_path: Path) -> None:
    """Its default metrics have the accuracy, by the threshold that is best on the other folds."""
    same = [(a, b) for a in range(12) for b in range(a + 1, 36) if person(a) == person(b)][:20]
    other = [(a, b) for a in range(12) for b in range(a + 1, 36) if person(a) != person(b)][::7][:20]
    lines = ["5\t4"]
    for fold in range(5):
        lines += [f"{person(a)}\t{a}\t{b}" for a, b in same[4 * fold : 4 * fold + 4]]
        lines += [f"{person(a)}\t{a}\t{person(b)}\t{b}" for a, b in other[4 * fold : 4 * fold + 4]]
    file = tmp_path / "pairs.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    net = Returns(lambda net, points, labels, ids: {"embeddings": net(points), "labels": labels})
    verification = VerificationMonitor(file, lfw_name)
    logged = log_of_validation(verification, net, loader(NUMBERED))
    embeddings, _ = net.by_hand(ITEMS)
    pairs = [pair for fold in range(5) for pair in (*same[4 * fold : 4 * fold + 4], *other[4 * fold : 4 * fold + 4])]
    scores = trial_scores(embeddings, [a for a, _ in pairs], [b for _, b in pairs])
    kinds = [person(a) == person(b) for a, b in pairs]
    expected = evaluate_trials(scores, kinds, folds=[number // 8 for number in range(40)], metrics=verification.metrics)
    assert "accuracy" in verification.metrics
    assert logged == of_report(expected)


def test_a_list_of_voxceleb_is_read_from_its_path(tmp_path: Path) -> None:
    trials = trials_of(36)
    assert trials.items is not None
    lines = [f"{int(same)} {one} {two}" for same, one, two in zip(trials.same, *trials.items, strict=True)]
    file = tmp_path / "veri_test.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    net = Returns(by_id)
    assert log_of_validation(monitor(str(file), "path"), net, loader(NUMBERED)) == of_report(by_hand(net, trials))


def test_a_list_that_cannot_be_measured_is_refused_at_once() -> None:
    scores = TrialList(same=(True, False), scores=(0.5, 0.1))
    with refused(ValueError, "VerificationMonitor", "scores", "items"):
        VerificationMonitor(scores, "path")
    with refused(ValueError, "VerificationMonitor", "accuracy", "folds"):
        VerificationMonitor(trials_of(5), "path", metrics=("accuracy",))
    with refused(ValueError, "nowhere.txt", "list of trials"):
        VerificationMonitor("nowhere.txt", "path")
    with refused(ValueError, "VerificationMonitor", "'eer@2'", "'eer'"):
        VerificationMonitor(trials_of(5), "path", metrics=("eer@2",))


# ----------------------------------------------------------------------------------------------------------------- items


def split(*indices: Any) -> list[Any]:
    return [loader(TensorDataset(*(part[chosen] for part in ITEMS.tensors)), 7) for chosen in indices]


def test_both_sides_of_a_trial_may_come_from_two_loaders() -> None:
    net, trials = Net(), trials_of(36)
    logged = log_of_validation(monitor(trials), net, split(slice(0, 17), slice(17, 36)))
    assert logged == of_report(by_hand(net, trials))
    with warned(UserWarning, "val", 494, 630, "trials"):
        one = log_of_validation(monitor(trials, loaders=0), net, split(slice(0, 17), slice(17, 36)))
    assert one == of_report(by_hand(net, trials, 17), 494)


def test_missing_trials_are_counted_and_said_once() -> None:
    net, trials = Net(), trials_of(36)
    verification = monitor(trials)
    run = trainer(verification, limit_val_batches=2, max_epochs=3)
    facts = "val", 399, 630, "trials"
    with warned(UserWarning, *facts) as caught:
        run.fit(net, loader(), loader(ITEMS))
    assert len(messages_of(caught, *facts)) == 1
    logged = {key: float(value) for key, value in run.callback_metrics.items() if key.startswith("val/")}
    assert logged == of_report(by_hand(net, trials, 22), 399)


def test_a_trial_whose_id_never_comes_is_left_out() -> None:
    trials = trials_of(36)
    assert trials.items is not None
    more = TrialList(
        same=(*trials.same, True),
        items=((*trials.items[0], "00"), (*trials.items[1], "nobody")),
    )
    net = Net()
    with warned(UserWarning, "val", 1, 631, "trials"):
        logged = log_of_validation(monitor(more), net, loader(ITEMS))
    assert logged == of_report(by_hand(net, trials), 1)


def test_no_trial_at_all_is_nan_and_a_warning() -> None:
    numbers = [str(number) for number in range(100, 136)]
    with warned(UserWarning, "val/eer", "NaN", "VerificationMonitor", 630, "trials", 36, "'00'", "ids"):
        logged = log_of_validation(
            monitor(trials_of(36), lambda outputs, batch: numbers[: len(batch[1])]), Net(), loader(ITEMS)
        )
    assert set(logged) == {f"val/{name}" for name in (*TRIAL_METRICS, "missing_trials")}
    assert all(map(math.isnan, logged.values()))


def test_an_item_that_comes_twice_is_one_item() -> None:
    """In another batch its embedding may differ by rounding."""
    net, trials = Net(), trials_of(36)
    logged = log_of_validation(monitor(trials), net, [loader(ITEMS, 11), loader(ITEMS, 5)])
    assert logged == of_report(by_hand(net, trials))

    class Rounds(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            outputs = super().validation_step(batch, batch_idx)
            return outputs | {"embeddings": outputs["embeddings"] * (1 + 1e-6 * dataloader_idx)}

    rounds = Rounds()
    assert log_of_validation(monitor(trials), rounds, [loader(ITEMS), loader(ITEMS)]) == of_report(
        by_hand(rounds, trials)
    )


def test_an_id_of_two_different_items_names_neither() -> None:
    net, trials = Net(), trials_of(36)

    def two_are_called_00(outputs: Any, batch: Any) -> list[str]:
        return ["00.png" if path == "folder/01.png" else path.removeprefix("folder/") for path in paths(outputs, batch)]

    with warned(UserWarning, "val", 69, 630, "trials"):
        logged = log_of_validation(monitor(trials, two_are_called_00), net, loader(ITEMS))
    kept = [number for number, pair in enumerate(zip(*trials.items, strict=True)) if not {"00", "01"} & set(pair)]  # type: ignore[misc]
    assert logged == of_report(by_hand(net, trials.chosen(kept)), 69)


def test_ids_that_cannot_be_read_are_an_error_that_says_whose() -> None:
    with pytest.raises(UsageError) as raised:
        log_of_validation((retrieval(), monitor(trials_of(36), "nowhere")), Net())
    message = str(raised.value)
    assert missing_facts(message, ("VerificationMonitor(ids='nowhere')", "batch", "(outputs, batch)")) == []
    assert "RetrievalMonitor" not in message


def test_two_lists_are_logged_under_their_own_names() -> None:
    net = Net()
    monitors = monitor(trials_of(36), name="all"), monitor(trials_of(20), name="few")
    logged = log_of_validation(monitors, net, loader(ITEMS))
    assert logged["val/all/eer"] == pytest.approx(by_hand(net, trials_of(36))["eer"])
    assert logged["val/few/eer"] == pytest.approx(by_hand(net, trials_of(20))["eer"])


@pytest.mark.parametrize(
    "costs", [{"miss_cost": 10.0}, {"false_match_cost": 10}, {"miss_cost": 2, "false_match_cost": 3}]
)
def test_costs_are_those_of_the_function(costs: Any) -> None:
    net, trials = Net(), trials_of(36)
    keys = {"metrics": ("min_dcf@0.1", "min_dcf@0.5")}
    logged = log_of_validation(monitor(trials, **keys, **costs), net, loader(ITEMS))
    assert logged == of_report(by_hand(net, trials, **keys, **costs))
    assert logged != of_report(by_hand(net, trials, **keys))
    for name in costs:
        with refused(ValueError, "VerificationMonitor", f"{name}=0"):
            monitor(trials, **{name: 0})
