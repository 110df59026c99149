"""`BatchRetrievalMetrics` in a real Trainer, in one process and in two."""

import gc
import inspect

import pytest
import torch

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.integrations import BatchRetrievalMetrics
from tests.gloo_processes import answers
from tests.integration_packages import integration
from tests.integrations.cases import embedded_items, trainer_on
from tests.messages import missing_facts, refused, warned

transformers = integration("transformers")
integration("accelerate")
SETTINGS = {"metrics": ("mAP", "recall@1", "pair_f1", "grouped_recall@1"), "label_groups": 2}


def batches(items, size=4):
    """Yield each batch as the Trainer passes it, and whether it is the last."""
    embeddings, labels = items
    parts = list(zip(embeddings.split(size), labels.split(size), strict=True))
    for number, (rows, of_rows) in enumerate(parts, start=1):
        yield transformers.EvalPrediction(rows, of_rows), number == len(parts)


@pytest.mark.parametrize("batched", [True, False])
def test_a_trainer_logs_what_the_whole_set_gives(batched, tmp_path):
    items = embedded_items()
    expected = evaluate_retrieval(*items, **SETTINGS).metrics()
    trainer = trainer_on(items, BatchRetrievalMetrics(output=1, **SETTINGS), tmp_path, batch_eval_metrics=batched)
    for _ in range(2):  # the second evaluation has none of the first
        values = trainer.evaluate()
        assert {name: values[f"eval_{name}"] for name in expected} == expected


def test_two_processes_have_the_values_of_one_and_hold_half_of_the_items(gloo_folder):
    items = embedded_items()
    expected = evaluate_retrieval(*items).metrics()
    for answer in answers(gloo_folder, "tests.integrations.process_jobs", 2):
        assert answer["world"] == 2
        for values in answer["values"]:
            assert {name: values[f"eval_{name}"] for name in expected} == expected
        assert answer["most"] <= -(-len(items[0]) // 2)


def test_only_embeddings_are_held():
    compute_metrics = BatchRetrievalMetrics(output=0)
    for rows, labels in zip(torch.eye(6).split(2), torch.arange(6).split(2), strict=True):
        batch = transformers.EvalPrediction((rows, torch.ones(2, 12_345)), labels)
        assert compute_metrics(batch, compute_result=False) == {}
    del batch
    gc.collect()
    assert not [held for held in gc.get_objects() if isinstance(held, torch.Tensor) and held.shape[-1:] == (12_345,)]


def test_all_batches_are_dropped_after_the_last_also_if_it_is_refused():
    compute_metrics = BatchRetrievalMetrics(metrics=("mAP",))
    lone = transformers.EvalPrediction(torch.eye(3), torch.arange(3))
    with refused(ValueError, 3, "queries", "class"):
        compute_metrics(lone, compute_result=True)
    items = embedded_items()
    values = [compute_metrics(batch, compute_result=is_last) for batch, is_last in batches(items)]
    assert values[:-1] == [{}] * (len(values) - 1)
    assert values[-1] == evaluate_retrieval(*items, metrics=("mAP",)).metrics()


class Breaking(torch.utils.data.Dataset):
    """Items of a Trainer, one of which raises an error as often as it is told to."""

    def __init__(self, items, error):
        self.items = [{"items": item, "labels": label} for item, label in zip(*items, strict=True)]
        self.error = error
        self.breaks = 1

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        if number == 30 and self.breaks:
            self.breaks -= 1
            raise self.error
        return self.items[number]


class OneLoader:
    """A mixin of a Trainer: every evaluation reads the same loader, as with persistent workers."""

    def get_eval_dataloader(self, eval_dataset=None):
        if not hasattr(self, "loader"):
            self.loader = super().get_eval_dataloader(eval_dataset)
        return self.loader


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("keeps_loader", [False, True])
def test_batches_of_an_evaluation_that_broke_off_are_no_part_of_the_next(error, times, keeps_loader, tmp_path):
    items = embedded_items()
    expected = evaluate_retrieval(*items, **SETTINGS).metrics()
    compute_metrics = BatchRetrievalMetrics(output=1, **SETTINGS)
    trainer = trainer_on(items, compute_metrics, tmp_path)
    if keeps_loader:
        trainer.__class__ = type("WithOneLoader", (OneLoader, type(trainer)), {})
    trainer.eval_dataset = Breaking(items, error("it broke off"))
    trainer.eval_dataset.breaks = times
    kept = []
    for _ in range(times):
        try:
            trainer.evaluate()
        except error as broken:
            kept.append(broken)  # its traceback keeps the loader of this evaluation, as a notebook does
    assert len(kept) == times
    for _ in range(2):
        with torch.no_grad():  # the second epoch has other embeddings
            trainer.eval_dataset.items = [one | {"items": one["items"] * 1} for one in trainer.eval_dataset.items]
        values = trainer.evaluate()
        assert {name: values[f"eval_{name}"] for name in expected} == expected


def test_a_batch_before_an_evaluation_and_an_evaluation_inside_a_training_that_broke_off(tmp_path):
    items = embedded_items()
    expected = evaluate_retrieval(*items, **SETTINGS).metrics()
    compute_metrics = BatchRetrievalMetrics(output=1, **SETTINGS)
    [(first, _), *_] = batches(items)
    embedded = transformers.EvalPrediction((first.predictions, first.predictions), first.label_ids)
    assert compute_metrics(embedded, compute_result=False) == {}
    trainer = trainer_on(items, compute_metrics, tmp_path, eval_strategy="epoch", num_train_epochs=1)
    trainer.train_dataset = [{"items": item, "labels": label} for item, label in zip(*items, strict=True)]
    trainer.eval_dataset = Breaking(items, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    for values in (trainer.evaluate(), [trainer.train(), trainer.evaluate()][1]):
        assert {name: values[f"eval_{name}"] for name in expected} == expected


def test_a_loop_of_ones_own_that_broke_off_is_noticed_by_its_copies():
    compute_metrics = BatchRetrievalMetrics(metrics=("mAP",))
    items = embedded_items()
    [first, *_] = batches(items)
    compute_metrics(first[0], compute_result=False)
    *others, last = [batch for batch, _ in batches(items)]
    for batch in others:
        compute_metrics(batch, compute_result=False)
    with warned(UserWarning, "BatchRetrievalMetrics", 8, 49, "copy") as caught:
        compute_metrics(last)
    assert len(caught) == 1


def test_a_kind_of_note_is_told_once():
    compute_metrics = BatchRetrievalMetrics(metrics=("mAP",))
    rows, labels = embedded_items()
    labels[0] = 90
    with warned(UserWarning, "BatchRetrievalMetrics", 1, 45, "queries", "match"):
        compute_metrics(transformers.EvalPrediction(rows, labels))
    labels[1] = 91
    compute_metrics(transformers.EvalPrediction(rows, labels))  # any warning would be an error


def stock_model(**options):
    """A model for images of the library, with random weights."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=5, **sizes, **options)
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config).eval()


def test_the_remedy_for_a_stock_model_gives_the_values_of_its_embeddings(tmp_path):
    labels = embedded_items()[1]
    images = torch.randn(len(labels), 3, 8, 8, generator=torch.Generator().manual_seed(2))
    model = stock_model(output_hidden_states=True)
    data = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]

    def trainer(**options):
        trainer = trainer_on((images, labels), None, tmp_path)
        return transformers.Trainer(model=model, args=trainer.args, eval_dataset=data, **options)

    with refused(ValueError, 2, "outputs", "(4, 5)", "[(4, 5, 24), (4, 5, 24), (4, 5, 24)]", "output=1"):
        trainer(compute_metrics=BatchRetrievalMetrics(metrics=("mAP",))).evaluate()
    with pytest.raises(ValueError, match="preprocess_logits_for_metrics=") as caught:
        trainer(compute_metrics=BatchRetrievalMetrics(output=1, metrics=("mAP",))).evaluate()
    # The call that the message proposes, as it is written there.
    message = str(caught.value)
    assert missing_facts(message, ("BatchRetrievalMetrics", "output 1", "(items, dim)")) == []
    written = message.partition("preprocess_logits_for_metrics=")[2].partition(", compute_metrics")[0]
    values = trainer(
        preprocess_logits_for_metrics=eval(written), compute_metrics=BatchRetrievalMetrics(metrics=("mAP",))
    ).evaluate()
    with torch.no_grad():
        embeddings = torch.cat([model(part).hidden_states[-1].mean(dim=1) for part in images.split(4)])
    assert values["eval_mAP"] == pytest.approx(evaluate_retrieval(embeddings, labels)["mAP"], abs=1e-12)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("output", "shape", "remedy"),
    [
        (torch.rand(3, 50, 24, 32), "(3, 50, 24, 32)", "outputs.mean(dim=(2, 3))"),
        (torch.rand(3, 50, 24), "(3, 50, 24)", "outputs.mean(dim=1)"),
        ((torch.rand(3, 5), (torch.rand(3, 4), torch.rand(3, 4))), "[(3, 4), (3, 4)]", "outputs[1][-1],"),
        (torch.rand(3), "(3,)", "BatchRetrievalMetrics(output=...)"),
    ],
)
def test_an_output_that_is_no_vector_for_each_item_is_refused_with_what_makes_one(output, shape, remedy):
    batch = transformers.EvalPrediction(output, torch.arange(3))
    index = 1 if isinstance(output, tuple) else None
    with refused(ValueError, "BatchRetrievalMetrics", shape, "(items, dim)", remedy):
        BatchRetrievalMetrics(output=index)(batch)


def test_an_interrupted_evaluation_is_dropped_by_reset():
    compute_metrics = BatchRetrievalMetrics(metrics=("mAP",))
    items = embedded_items()
    [first, *_] = batches(items)
    compute_metrics(first[0], compute_result=False)
    compute_metrics.reset()
    whole = transformers.EvalPrediction(*items)
    assert compute_metrics(whole) == evaluate_retrieval(*items, metrics=("mAP",)).metrics()


def test_the_trainer_finds_the_argument_that_it_asks_for():
    assert "compute_result" in inspect.signature(BatchRetrievalMetrics()).parameters


@pytest.mark.usefixtures("as_users_run_it")
def test_outputs_metrics_and_labels_that_do_not_fit_are_refused_with_what_to_pass():
    two = transformers.EvalPrediction((torch.eye(2), torch.ones(2, 3)), torch.arange(2))
    with refused(ValueError, "outputs", "(2, 2)", "(2, 3)", "BatchRetrievalMetrics(output=1)"):
        BatchRetrievalMetrics()(two)
    with refused(ValueError, "BatchRetrievalMetrics", "output=5", "outputs", "index below 2"):
        BatchRetrievalMetrics(output=5)(two)
    with refused(ValueError, "BatchRetrievalMetrics", "'recal@1'", "'recall@1'"):
        BatchRetrievalMetrics(metrics=("recal@1",))
    several = transformers.EvalPrediction(torch.eye(2), (torch.arange(2), torch.arange(2)))
    with refused(ValueError, "label_ids", 2, 'TrainingArguments(label_names=["labels"])'):
        BatchRetrievalMetrics()(several)
