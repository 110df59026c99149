"""Does it pay to train on average precision itself? Soft AP compared with other losses, on glyphs and icons.

Run it as it is:    python studies/train_on_average_precision.py --quick     (two minutes on one core)
All of it:          python studies/train_on_average_precision.py             (an hour; stop and resume it as you like)
A part of it:       python studies/train_on_average_precision.py --data glyphs --methods ap triplet softmax --seeds 0 1

Every method trains the same small network on the same number of images. The first seed chooses the one of three learning
rates with the highest mAP on the validation classes; then the network is tested with each seed on unseen classes. Batches
have 4 images per class. The other losses come from pytorch-metric-learning, which must be installed. It writes to
runs/average_precision:

    results.jsonl    a line for each network, with its learning rate and J; networks in this file are not trained again
    tables.md        mAP and Recall@1, the difference in mAP from soft AP with its intervals, where the gradient of soft AP
                     goes, and how far its value is from the exact value
    average_precision_loss.png    the mAP of each network, drawn from figures.json

`--page FILE` also writes the tables into a page, between `<!-- table: NAME -->` and `<!-- end -->`, as in
docs/research/average_precision_loss.md.
"""

import argparse
import copy
import json
import logging
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from icon_themes import IconThemes  # beside this file
from lightning.pytorch import Trainer, seed_everything
from pytorch_metric_learning import losses, miners
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats
from study_figures import write  # beside this file
from torch import Tensor, nn

from fewshot_callbacks import (
    ClassBalanced,
    Conv4,
    DistanceRatioHead,
    EmbeddingModule,
    FewShotDataModule,
    Glyphs,
    SoftAveragePrecisionLoss,
    SoftmaxHead,
    discriminant_ratio,
    evaluate_retrieval,
)
from fewshot_callbacks.functional import paired_difference_interval
from fewshot_callbacks.losses import SoftHistograms, soft_average_precision

# ---------------------------------------------------------------------------------------------------------------------
# Settings: change them here, or some on the command line.
images_seen = 20_480  # of each network
items_per_class = 4  # in a batch; the smallest class of the icons has 6
width = 32  # filters of Conv4; 128 numbers for an image
micro_batch = 256  # larger batches are embedded in such pieces, which batch norm sees
learning_rates = (1e-3, 3e-3, 1e-2)  # of Adam
seeds = (0, 1, 2)


class EpisodeLoss(nn.Module):
    """A prototypical head on a class-balanced batch: the first image of each class is its prototype."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the other images."""
        of_classes = embeddings.unflatten(0, (-1, items_per_class))  # (classes, items, dim)
        queries = of_classes[:, 1:].flatten(0, 1)
        targets = torch.arange(len(of_classes), device=labels.device).repeat_interleave(items_per_class - 1)
        return nn.functional.cross_entropy(self.head(queries, of_classes[:, 0]), targets)


class MinedLoss(nn.Module):
    """A loss of the pairs or triplets that a miner chooses."""

    def __init__(self, loss: nn.Module, miner: nn.Module) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mine, then measure."""
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


class Method(NamedTuple):
    """A row of the tables."""

    title: str
    loss: Callable[[int, int], nn.Module]
    """from the numbers of training classes and of dimensions"""
    batch: int = 256


def soft(title: str, batch: int = 256, **settings: Any) -> Method:
    return Method(title, lambda classes, dim: SoftAveragePrecisionLoss(**settings), batch)


def mined(title: str, loss: nn.Module, miner: nn.Module) -> Method:
    return Method(title, lambda classes, dim: MinedLoss(loss, miner))


methods = {
    "ap": soft("soft AP: 25 bins, cosine, batch 256"),
    "ap-5-bins": soft("soft AP, 5 bins", bins=5),
    "ap-100-bins": soft("soft AP, 100 bins", bins=100),
    "ap-euclidean": soft("soft AP, Euclidean", similarity="euclidean"),
    "ap-batch-64": soft("soft AP, batch 64", 64),
    "ap-batch-1024": soft("soft AP, batch 1,024", 1024),
    "ap-batch-4096": soft("soft AP, batch 4,096", 4096),
    "softmax": Method("softmax head", lambda classes, dim: EpisodeLoss(SoftmaxHead())),
    "dr": Method("DR head", lambda classes, dim: EpisodeLoss(DistanceRatioHead())),
    "triplet": mined("triplet, distance-weighted", losses.TripletMarginLoss(0.2), miners.DistanceWeightedMiner()),
    "triplet-unmined": Method("triplet, all triplets of the batch", lambda classes, dim: losses.TripletMarginLoss(0.2)),
    "multi-similarity": mined("multi-similarity", losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()),
    "arcface": Method("ArcFace", losses.ArcFaceLoss),
    "fastap": Method("FastAP", lambda classes, dim: losses.FastAPLoss()),
    "smoothap": Method("SmoothAP", lambda classes, dim: losses.SmoothAPLoss()),
}
sets = {"glyphs": Glyphs, "icons": IconThemes}
# ---------------------------------------------------------------------------------------------------------------------
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--quick", action="store_true", help="4,096 images, one rate, one seed; writes to a separate folder"
)
parser.add_argument("--data", nargs="+", choices=tuple(sets), default=list(sets))
parser.add_argument(
    "--methods", nargs="+", choices=tuple(methods), default=list(methods), metavar="METHOD",
    help=f"of {', '.join(methods)}; by default all. The others are compared with ap, which is always one",
)  # fmt: skip
parser.add_argument("--seeds", type=int, nargs="+", default=None, help="by default 0 1 2; 0 with --quick")
parser.add_argument("--images", type=int, default=None, help=f"that a network sees; by default {images_seen:,}")
parser.add_argument("--output", type=Path, default=None, help="by default runs/average_precision")
parser.add_argument("--page", type=Path, default=None, help="a page whose tables are to be replaced")
options = parser.parse_args()
if options.quick:
    images_seen, seeds, learning_rates = 4096, (0,), (3e-3,)
of_images = f" {options.images}" if options.images else ""  # in the names of tables
images_seen, seeds = options.images or images_seen, tuple(options.seeds or seeds)
chosen = {name: methods[name] for name in dict.fromkeys(["ap", *options.methods])}
output = options.output or Path("runs") / f"average_precision{'_quick' if options.quick else ''}"
output.mkdir(parents=True, exist_ok=True)
console = Console()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", ".*does not have many workers.*|.*GPU available but not used.*|.*LeafSpec.*")


@torch.no_grad()
def embed(backbone: nn.Module, loader: Any) -> tuple[Tensor, Tensor]:
    """The embeddings of all images of a split, and their labels."""
    backbone.eval()
    parts = [(backbone(images), labels) for images, labels in loader]
    return torch.cat([part for part, _ in parts]), torch.cat([labels for _, labels in parts])


def share_of_hardest(weights: Tensor, scores: Tensor, allowed: Tensor, share: float) -> float:
    """Return the fraction of the weights on each query's highest-scoring candidates among the allowed candidates."""
    order = scores.masked_fill(~allowed, -math.inf).argsort(dim=1, descending=True)
    first = max(1, round(share * int(allowed[0].sum())))
    weights = weights.masked_fill(~allowed, 0.0)
    return (weights.gather(1, order[:, :first]).sum() / weights.sum()).item()


def where_the_gradient_goes(backbone: nn.Module, data: Any) -> dict[str, list[float]]:
    """Return the fractions of |d loss / d score| on the hardest negatives and the hardest positive per query of a batch."""
    images, labels = next(iter(data.train_dataloader()))
    with torch.no_grad():
        embeddings = nn.functional.normalize(copy.deepcopy(backbone).train()(images))
    scores = embeddings @ embeddings.T
    same, own = labels[:, None] == labels, torch.eye(len(labels), dtype=torch.bool)
    weights = {}
    for bins in (5, 25, 100):
        leaf = scores.clone().requires_grad_()
        centres = torch.linspace(1, 0, bins)
        count = (1 - (bins - 1) * (leaf.clamp(0, 1)[..., None] - centres).abs()).clamp(min=0)  # (queries, items, bins)
        count = count.masked_fill(own[..., None], 0.0)
        histograms = SoftHistograms(count.sum(dim=1), (count * same[..., None]).sum(dim=1))
        (1 - soft_average_precision(histograms).mean()).backward()
        weights[f"soft AP, {bins} bins: gradient"] = leaf.grad.abs()
    anchors, _, negatives = miners.DistanceWeightedMiner()(embeddings, labels)
    drawn = torch.zeros_like(scores).index_put((anchors, negatives), torch.ones(len(anchors)), accumulate=True)
    weights["distance-weighted miner: its choice"] = drawn
    weights["all pairs alike"] = torch.ones_like(scores)
    shares = {}
    for name, weight in weights.items():
        choice = torch.ones_like(scores) if "miner" in name else weight  # it draws positives regardless of their scores
        shares[name] = [share_of_hardest(weight, scores, ~same, share) for share in (0.01, 0.1)]
        shares[name].append(share_of_hardest(choice, -scores, same & ~own, 0.01))
    return shares


def train(of: str, name: str, rate: float, seed: int) -> dict[str, Any]:
    """Train and test one network."""
    started, method = time.process_time(), chosen[name]
    seed_everything(seed, verbose=False)  # all methods of a seed begin with the same weights
    batches = ClassBalanced(method.batch // items_per_class, items_per_class, images_seen // method.batch)
    data = FewShotDataModule(sets[of](), train=batches, batch_size=512, seed=seed)
    backbone = Conv4(data.dataset.in_channels, width)
    before = where_the_gradient_goes(backbone, data) if name == "ap" else None
    model = EmbeddingModule(
        backbone,
        method.loss(len(data.dataset.class_names), backbone.output_dim(32)),
        micro_batch=micro_batch if method.batch > micro_batch else None,
        ap_every_n_steps=0,
        learning_rate=rate,
    )
    trainer = Trainer(
        max_epochs=1, limit_val_batches=0, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(model, data)
    except SystemExit:  # Lightning's answer to Ctrl-C
        raise KeyboardInterrupt from None
    seconds = time.process_time() - started
    settings: dict[str, Any] = {"metrics": ("mAP", "recall@1"), "label_groups": None}
    validation = evaluate_retrieval(*embed(backbone, data.val_dataloader()), **settings)
    embeddings, labels = embed(backbone, data.test_dataloader())
    report = evaluate_retrieval(embeddings, labels, **settings)
    euclidean = evaluate_retrieval(embeddings, labels, similarity="euclidean", **settings)
    record = {
        "data": of, "method": name, "rate": rate, "seed": seed, "images": images_seen, "seconds": seconds,
        "val_mAP": validation.mAP, "mAP": report.mAP, "mAP_euclidean": euclidean.mAP, "recall@1": report["recall@1"],
        "J": discriminant_ratio(nn.functional.normalize(embeddings), labels).item(), "labels": labels.tolist(),
        "per_query": {k: [round(v, 5) for v in report.per_query[k].tolist()] for k in ("mAP", "recall@1")},
    }  # fmt: skip
    if name == "ap":
        record["gradient"] = {"before": before, "after": where_the_gradient_goes(backbone, data)}
        losses_of = {bins: SoftAveragePrecisionLoss(bins)(embeddings, labels) for bins in (5, 25, 100, 1000)}
        record["surrogate"] = {bins: 1 - loss.item() for bins, loss in losses_of.items()}
    return record


# ------------------------------------------------------------------------------------------------------------ trainings
results_file = output / "results.jsonl"
done: dict[tuple[Any, ...], dict[str, Any]] = {}
for line in results_file.read_text().splitlines() if results_file.exists() else ():
    found = json.loads(line)
    done[found["data"], found["method"], found["rate"], found["seed"], found["images"]] = found


def result(of: str, name: str, rate: float, seed: int) -> dict[str, Any]:
    """A network of an earlier call, or a new one."""
    key = (of, name, rate, seed, images_seen)
    if key not in done:
        try:
            done[key] = train(*key[:4])
        except KeyboardInterrupt:
            console.print(f"\nStopped. Run it again to continue: finished results are in {output}.")
            raise SystemExit(130) from None
        with results_file.open("a") as file:
            file.write(json.dumps(done[key]) + "\n")
    return done[key]


todo = []
for of in options.data:
    try:
        classes = len(sets[of]().class_names)
    except ValueError as error:  # no icon themes on this machine
        console.print(f"[bold]{of}[/] left out: {error}")
        continue
    largest = min(images_seen, classes * items_per_class)  # a batch
    todo += [(of, name) for name in chosen if chosen[name].batch <= largest]
present = list(dict.fromkeys(of for of, _ in todo)) or parser.error("No data set is left.")
best, of_seeds = {}, {}
for of, name in track(todo, "learning rates", console=console):
    searched = [result(of, name, rate, seeds[0]) for rate in learning_rates]
    best[of, name] = max(searched, key=lambda record: record["val_mAP"])["rate"]
for of, name in track(todo, "seeds", console=console):
    of_seeds[of, name] = [result(of, name, best[of, name], seed) for seed in seeds]

# --------------------------------------------------------------------------------------------------------------- tables
tables: dict[str, str] = {}


def show(name: str, title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table, and keep it as Markdown."""
    table = Table(title=title)
    for number, column in enumerate(header):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    ruler = ["---", *["---:"] * (len(header) - 1)]
    tables[name + of_images] = "\n".join(f"| {' | '.join(row)} |" for row in (header, ruler, *rows))


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}" + (f" (s {statistics.stdev(values):.3f})" if len(values) > 1 else "")


def difference(records: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Return the mean difference in mAP over seeds, with its interval over classes and its interval over seeds."""
    pairs = list(zip(records, others, strict=True))
    of_queries = torch.tensor([[a["per_query"]["mAP"], b["per_query"]["mAP"]] for a, b in pairs]).diff(dim=1)[:, 0]
    low, high = paired_difference_interval(-of_queries.mean(dim=0), records[0]["labels"])
    words = f"{-of_queries.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
    if len(pairs) > 1:
        reach = stats.t.ppf(0.975, len(pairs) - 1) * stats.sem(of_queries.mean(dim=1))
        words += f" ±{reach:.3f}"
    return words


for of in present:
    base, rows = of_seeds[of, "ap"], []
    for name, method in chosen.items():
        if (of, name) not in of_seeds:  # the set cannot fill its batch
            continue
        records = of_seeds[of, name]
        row = [method.title, *(spread([record[metric] for record in records]) for metric in ("mAP", "recall@1"))]
        rows.append([*row, difference(records, base) if name != "ap" else ""])
    show(of, f"{of}: classes never seen", ["", "mAP", "Recall@1", "mAP minus soft AP's"], rows)

    gradient, exact = base[0]["gradient"], base[0]["mAP"]
    places = {"hardest 1 % of negatives": 0, "hardest positive": 2}
    header = ["", *(f"{words}, {when}" for when in gradient for words in places)]
    rows = [
        [name, *(f"{shares[name][place]:.0%}" for shares in gradient.values() for place in places.values())]
        for name in gradient["before"]
    ]
    show(f"{of} gradient", f"{of}: where the gradient goes, before and after training", header, rows)
    rows = [[f"{int(bins):,}", f"{value:.4f}", f"{value - exact:+.4f}"] for bins, value in base[0]["surrogate"].items()]
    show(f"{of} surrogate", f"{of}: exact mAP {exact:.4f}", ["bins", "soft AP", "minus the exact mAP"], rows)
marked = (f"<!-- table: {name} -->\n{table}\n<!-- end -->\n" for name, table in tables.items())
(output / "tables.md").write_text("\n".join(marked))
if options.page:
    page = options.page.read_text()
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = marks.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", page)
    options.page.write_text(page)

# --------------------------------------------------------------------------------------------------------------- figure
data = {
    "titles": {name: method.title for name, method in chosen.items()},
    "mAP": {
        of: {name: [round(r["mAP"], 5) for r in of_seeds[of, name]] for name in chosen if (of, name) in of_seeds}
        for of in present
    },
}
write(data, output, ["average_precision_loss"])
console.print(f"Written to {output}: results.jsonl, tables.md, average_precision_loss.png")
