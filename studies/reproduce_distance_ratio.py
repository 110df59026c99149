"""Does the distance-ratio (DR) head help? The experiments of Kim, Parviainen and Malde, on the glyphs or on icons.

Run it as it is:    python studies/reproduce_distance_ratio.py --quick      (two or three minutes on two cores)
All of it:          python studies/reproduce_distance_ratio.py              (an hour; stop and resume it as you like)
The early lead:     python studies/reproduce_distance_ratio.py --early      (ten seeds, 120 episodes per network)
The other backbone: python studies/reproduce_distance_ratio.py --backbone resnet18 --tasks 1-shot --seeds 0
The icon themes:    python studies/reproduce_distance_ratio.py --data icons     (1-shot; see examples/icons)
Unseen styles:      python studies/reproduce_distance_ratio.py --data icons --split themes

It trains 5-way prototypical networks with the softmax head and the DR head: 1-shot, 5-shot, and 5-shot with the nearest
support point instead of the mean (with one shot both are the same network). It writes to runs/distance_ratio:

    distance_ratio_maps_*.png       figures 1, 7 and 8: the probability of one class over the plane and over the sphere
                                    (distance_ratio_maps.py draws only these, in seconds)
    distance_ratio_accuracy.png     figures 2, 3 and 6: accuracy and loss of training, accuracy of validation
    distance_ratio_norm_ratio.png   figures 4 and 5: how much of each step was more than a change of scale
    figures.json     the data of the figures
    tables.md        table 2: 600 test episodes with intervals, and with several seeds the paired difference of the heads;
                     tables 3 to 10: the measures of training and their tests
    results.json     all of these as numbers

A finished run is not repeated, and a stopped run resumes from its last checkpoint.
docs/research/distance_ratio.md shows the results, claim by claim.
"""

import argparse
import json
import logging
import math
import statistics
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distance_ratio_maps import draw_maps  # beside this file
from icon_themes import IconThemes  # beside this file
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from scipy import stats
from study_figures import write  # beside this file

from fewshot_callbacks import (
    DistanceRatioHead,
    EpisodeProtocol,
    Episodes,
    FewShotDataModule,
    Glyphs,
    ProtoNet,
    SoftmaxHead,
    TrainingDynamicsMonitor,
    compare_dynamics,
    evaluate_retrieval,
)
from fewshot_callbacks.functional import DynamicsHistory, sample_episodes
from fewshot_callbacks.protonet import evaluate_episodes, squared_distances

# ---------------------------------------------------------------------------------------------------------------------
# Settings: change them here, or some on the command line.
heads = {"softmax": "softmax", "dr": "DR"}
tasks = {"1-shot": (1, "mean"), "5-shot": (5, "mean"), "5-shot, nearest": (5, "nearest")}  # shots, representation
ways, queries = 5, 5  # a training class has 10 images or more
test_queries, test_episodes, hard_ways = 7, 600, 20  # 20-way separates networks when 5-way is near its ceiling
episodes = 2000  # the paper: 60,000 and 50,000
validate_every, measure_every = 200, 10  # the paper: both 100; 3 seeds x 200 measured steps are its 600 again
seeds = (0, 1, 2)
# ---------------------------------------------------------------------------------------------------------------------
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--quick", action="store_true", help="one seed and 120 episodes per network, written to a separate folder"
)
parser.add_argument(
    "--early", action="store_true", help="ten seeds and 120 episodes a network: is the lead of DR more than luck?"
)
parser.add_argument("--data", choices=("glyphs", "icons"), default="glyphs")
parser.add_argument(
    "--split", choices=("classes", "themes", "both"), default="classes", help="of the icons: what the test has not seen"
)
parser.add_argument("--backbone", choices=("conv4", "resnet18"), default="conv4")
parser.add_argument(
    "--tasks", nargs="+", choices=tuple(tasks), default=None, metavar="TASK",
    help=f"of {', '.join(tasks)}; by default all of them, on icons 1-shot: their classes are small",
)  # fmt: skip
parser.add_argument(
    "--episodes", type=int, default=None, help=f"of training, for each network; by default {episodes:,}"
)
parser.add_argument(
    "--seeds", type=int, nargs="+", default=None, help="by default 0 1 2; 0 with --quick; 0 to 9 with --early"
)
parser.add_argument("--output", type=Path, default=None, help="by default runs/distance_ratio")
parser.add_argument("--threads", type=int, default=None, help="of torch; by default all cores")
options = parser.parse_args()
if options.quick and options.early:
    parser.error("--quick trains one seed and --early ten. Use one of them.")
if options.quick or options.early:
    episodes, seeds, validate_every, measure_every = 120, tuple(range(1 if options.quick else 10)), 60, 2
if options.split != "classes" and options.data != "icons":
    parser.error(f"--split {options.split} is of icons: the glyphs are split by script. Add --data icons.")
options.seeds = options.seeds or seeds
tasks = {task: tasks[task] for task in options.tasks or (tasks if options.data == "glyphs" else ["1-shot"])}
options.episodes = options.episodes or episodes
validate_every, measure_every = min(validate_every, options.episodes), min(measure_every, options.episodes)
if options.episodes % validate_every:
    parser.error(f"--episodes {options.episodes} must be a multiple of {validate_every}, after which it validates.")
kind = "_quick" if options.quick else "_early" if options.early else ""
kind += f"_{options.backbone}" if options.backbone != "conv4" else ""
kind = f"_icons{kind}" if options.data == "icons" else kind
kind += f"_{options.split}" if options.split != "classes" else ""
output = options.output or Path("runs") / f"distance_ratio{kind}"
output.mkdir(parents=True, exist_ok=True)
if options.threads:
    torch.set_num_threads(options.threads)
console = Console()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings(
    "ignore", ".*does not have many workers.*|.*Checkpoint directory.*|.*GPU available but not used.*"
)


class Curves(Callback):
    """Records mean loss and accuracy of the last steps, and the accuracy of each validation; checkpoints store them."""

    def __init__(self, every: int) -> None:
        self.every, self.train, self.val, self.window = every, [], [], []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.window.append((float(metrics["train/loss"]), float(metrics["train/accuracy"])))
        if trainer.global_step % self.every == 0:
            self.train.append([trainer.global_step, *np.mean(self.window, axis=0).tolist()])
            self.window = []

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.val.append([trainer.global_step, float(trainer.callback_metrics["val/accuracy"])])

    def state_dict(self) -> dict[str, Any]:
        return {"train": self.train, "val": self.val, "window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train, self.val, self.window = state["train"], state["val"], state["window"]


def data_of(shots: int, seed: int) -> FewShotDataModule:
    """The episodes of a task; icon episodes have as many queries as the smallest class allows, at most 5."""
    of_training, of_test = queries, test_queries
    if options.data == "icons":
        of_training = of_test = min(5, (6 if options.split == "classes" else 3) - shots)
    return FewShotDataModule(
        IconThemes(by=options.split) if options.data == "icons" else Glyphs(),
        train=Episodes(ways, shots, of_training, validate_every),
        evaluation=EpisodeProtocol(ways, shots, of_test, test_episodes),
        batch_size=512,
        seed=seed,
    )


def run(task: str, head: str, seed: int) -> dict[str, Any]:
    """Train and test one network, or read the results of an earlier call."""
    folder = output / f"{task.replace(', ', '_')}_{head}_seed{seed}"
    done, last = folder / "result.json", folder / "last.ckpt"
    if done.exists():
        result = json.loads(done.read_text())
        trained = (result.get("backbone", "conv4"), result["episodes"])
        if trained != (options.backbone, options.episodes):
            parser.error(
                f"{folder} is a {trained[0]} of {trained[1]} episodes, not a {options.backbone} of {options.episodes}. "
                "Use another --output."
            )
        return result
    shots, representation = tasks[task]
    seed_everything(seed, verbose=False)  # both heads begin with the same weights and see the same episodes
    data = data_of(shots, seed)
    net = ProtoNet(
        options.backbone,
        head,
        in_channels=data.dataset.in_channels,
        shots=shots,
        representation=representation,
        evaluation=data.evaluation,
    )
    curves = Curves(every=max(1, options.episodes // 60))
    dynamics = TrainingDynamicsMonitor(every_n_steps=measure_every, file=None)
    best = ModelCheckpoint(folder, filename="best", monitor="val/accuracy", mode="max", enable_version_counter=False)
    newest = ModelCheckpoint(folder, filename="last", enable_version_counter=False)  # save_last only follows the best
    trainer = Trainer(
        max_epochs=options.episodes // validate_every,  # not max_steps: with it Lightning resumes one epoch too far
        callbacks=[curves, dynamics, best, newest],
        logger=False,
        accelerator="auto",
        devices=1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=console.is_terminal,
    )
    try:
        trainer.fit(net, data, ckpt_path=str(last) if last.exists() else None)
    except SystemExit:  # Lightning's answer to Ctrl-C
        raise KeyboardInterrupt from None
    if trainer.global_step != options.episodes:
        raise RuntimeError(
            f"{folder} has {trainer.global_step} of {options.episodes} episodes; remove it and run again."
        )

    best_net = ProtoNet.load_from_checkpoint(best.best_model_path, map_location="cpu").eval()
    with torch.no_grad():
        embedded = [(best_net(images), of_images) for images, of_images in data.test_dataloader()]
    embeddings, labels = map(torch.cat, zip(*embedded, strict=True))
    test = {}
    for number in (ways, hard_ways):
        drawn = sample_episodes(
            labels, ways=number, shots=shots, queries=data.evaluation.queries, episodes=test_episodes, seed=0
        )
        accuracy = evaluate_episodes(embeddings, labels, best_net.head, drawn, representation=representation)
        test[str(number)] = {"mean": accuracy.mean, "ci95": accuracy.ci95, "hash": accuracy.episodes_hash}
    retrieval = evaluate_retrieval(embeddings, labels, metrics=("mAP", "recall@1"))
    result = {
        "task": task, "head": head, "seed": seed, "test": test,
        "mAP": retrieval.mAP, "Recall@1": retrieval["recall@1"],
        "backbone": options.backbone, "episodes": options.episodes,
        "train": curves.train, "val": curves.val, "dynamics": dynamics.history.to_dict(),
        "rho": best_net.head.rho.item() if head == "dr" else None,
    }  # fmt: skip
    part = done.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.replace(done)
    last.unlink(missing_ok=True)
    return result


# -------------------------------------------------------------------------------- figures 1, 7 and 8: maps of probability
extremes = draw_maps(output)
far = squared_distances(torch.tensor([[0.0]]), torch.tensor([[1.0], [-2.0]]))  # table 1: distances 1 and 2
toy = {name: head.logits(far).softmax(-1)[0, 0].item() for name, head in
       {"softmax": SoftmaxHead(), "DR": DistanceRatioHead(math.log(2)).requires_grad_(False)}.items()}  # fmt: skip
console.print(f"Table 1: distances 1 and 2 give the nearer class {toy['softmax']:.5f} (softmax), {toy['DR']:.5f} (DR)")

# ------------------------------------------------------------------------------------------------------------ trainings
results = {}
cells = list(product(options.seeds, tasks, heads))
for number, (seed, task, head) in enumerate(cells, start=1):
    try:
        results[task, head, seed] = result = run(task, head, seed)
    except KeyboardInterrupt:
        console.print(f"\nStopped. Run it again to continue: finished results are in {output}.")
        raise SystemExit(130) from None
    five, hard = (result["test"][str(n)] for n in (ways, hard_ways))
    console.print(
        f"{number}/{len(cells)}  {task}, {heads[head]}, seed {seed}: {ways}-way {100 * five['mean']:.2f} "
        f"±{100 * five['ci95']:.2f} %, {hard_ways}-way {100 * hard['mean']:.2f} ±{100 * hard['ci95']:.2f} %",
        soft_wrap=True,
    )


# ------------------------------------------------- figures 2, 3 and 6: accuracy and loss; figures 4 and 5: the norm ratio
def curves_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a run for the figures, with five digits: more than one can see."""
    history = DynamicsHistory.from_dict(result["dynamics"])
    curves = {
        kind: [[step, *(float(f"{x:.5g}") for x in rest)] for step, *rest in result[kind]] for kind in ("train", "val")
    }
    return {
        "seed": result["seed"],
        **curves,
        "norm_ratio": [round(x, 7) for x in history.values("norm_ratio").tolist()],
    }


data = {
    "ways": ways,
    "tasks": {
        task: {head: [curves_of(results[task, head, seed]) for seed in options.seeds] for head in heads}
        for task in tasks
    },
}
write(data, output, ["distance_ratio_accuracy", "distance_ratio_norm_ratio"])

# ---------------------------------------------------------------------------------------------------------------- tables
columns = [f"{number}-way {task}" for number in (ways, hard_ways) for task in tasks]
lines = [
    f"| {test_episodes} test episodes | {' | '.join(columns)} |",
    f"| --- | {' | '.join('---:' for _ in columns)} |",
]
for head, title in heads.items():
    for seed in options.seeds:
        row = [results[task, head, seed]["test"][str(number)] for number in (ways, hard_ways) for task in tasks]
        shown = " | ".join(f"{100 * cell['mean']:.2f} ±{100 * cell['ci95']:.2f}" for cell in row)
        lines.append(f"| {title}, seed {seed} | {shown} |")
    if len(options.seeds) > 1:
        means = [
            [results[task, head, seed]["test"][str(number)]["mean"] for seed in options.seeds]
            for number in (ways, hard_ways)
            for task in tasks
        ]
        shown = " | ".join(f"**{100 * statistics.mean(m):.2f}** (s {100 * statistics.stdev(m):.2f})" for m in means)
        lines.append(f"| **{title}, mean of seeds** | {shown} |")

paired = {}  # both heads of a seed start with the same weights and see the same episodes
if len(options.seeds) > 1:
    for number, task in product((ways, hard_ways), tasks):
        dr, softmax = (
            np.array([100 * results[task, head, seed]["test"][str(number)]["mean"] for seed in options.seeds])
            for head in ("dr", "softmax")
        )
        interval = stats.ttest_rel(dr, softmax).confidence_interval(0.95)  # Student's t over the seeds
        paired[f"{number}-way {task}"] = {
            "mean": float((dr - softmax).mean()),
            "low": float(interval.low),
            "high": float(interval.high),
            "s": float((dr - softmax).std(ddof=1)),
            "DR ahead": int((dr > softmax).sum()),
        }
    shown = " | ".join(f"{d['mean']:+.2f} [{d['low']:+.2f}, {d['high']:+.2f}]" for d in paired.values())
    lines.append(f"| DR - softmax, paired, 95 % interval over {len(options.seeds)} seeds | {shown} |")
    shown = " | ".join(f"{d['DR ahead']} of {len(options.seeds)}" for d in paired.values())
    lines.append(f"| seeds with DR ahead | {shown} |")

measured = [task for task in tasks if all("mAP" in results[task, head, s] for head in heads for s in options.seeds)]
if measured:  # results of earlier versions have no retrieval values
    names = [f"{name}, {task}" for name in ("mAP", "Recall@1") for task in measured]
    lines += ["", f"| retrieval among the test images | {' | '.join(names)} |"]
    lines.append(f"| --- | {' | '.join('---:' for _ in names)} |")
    columns = {
        head: [
            [results[task, head, s][name] for s in options.seeds] for name in ("mAP", "Recall@1") for task in measured
        ]
        for head in heads
    }
    for head, title in heads.items():
        shown = " | ".join(f"{statistics.mean(of):.3f} ({', '.join(f'{v:.3f}' for v in of)})" for of in columns[head])
        lines.append(f"| {title}, mean (seeds) | {shown} |")
    if len(options.seeds) > 1:
        pairs = zip(columns["dr"], columns["softmax"], strict=True)
        tests = [(np.subtract(dr, softmax).mean(), stats.ttest_rel(dr, softmax)) for dr, softmax in pairs]
        ends = [(mean, test.confidence_interval(0.95)) for mean, test in tests]
        shown = " | ".join(f"{mean:+.3f} [{end.low:+.3f}, {end.high:+.3f}]" for mean, end in ends)
        lines.append(f"| DR - softmax, paired, 95 % interval over {len(options.seeds)} seeds | {shown} |")

steps = [step for step, _ in results[next(iter(tasks)), "dr", options.seeds[0]]["val"]]
early = sorted({0, len(steps) // 2, len(steps) - 1})  # the first validation, the one in the middle, the last
columns = [f"{task}, {steps[place]} episodes" for task in tasks for place in early]
lines += ["", f"| validation accuracy | {' | '.join(columns)} |", f"| --- | {' | '.join('---:' for _ in columns)} |"]
for head, title in heads.items():
    means = [
        statistics.mean(results[task, head, seed]["val"][place][1] for seed in options.seeds)
        for task in tasks
        for place in early
    ]
    lines.append(f"| {title}, mean of seeds | {' | '.join(f'{100 * mean:.2f}' for mean in means)} |")

comparisons = {}
for task in tasks:
    pooled, late = [], []
    for head, title in heads.items():  # the seeds in sequence, as one long run
        steps, measures = [], []
        for seed in options.seeds:
            for step, measure in DynamicsHistory.from_dict(results[task, head, seed]["dynamics"]):
                steps.append(len(options.seeds) * step + options.seeds.index(seed))
                measures.append(measure)
        pooled.append(DynamicsHistory(tuple(steps), tuple(measures)))
        half = len(options.seeds) * options.episodes / 2
        ratios = [measure.norm_ratio for step, measure in pooled[-1] if step > half]
        late.append(f"{title} {statistics.geometric_mean(ratios):.5f}")
    comparisons[task] = compare_dynamics(*pooled, names=("softmax", "DR"))
    lines += ["", f"{ways}-way {task}", "```", *str(comparisons[task]).splitlines(), "```"]
    lines.append(f"Norm ratio of the second half of the training: {', '.join(late)}")
(output / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
(output / "results.json").write_text(
    json.dumps(
        {
            "test": [
                {key: result[key] for key in ("task", "head", "seed", "test", "rho")} for result in results.values()
            ],
            "paired": paired,
            "dynamics": {task: comparison.to_dict() for task, comparison in comparisons.items()},
            "sphere": extremes,
        },
        indent=2,
    )
    + "\n"
)
for task, comparison in comparisons.items():
    console.print(f"\n[bold]{ways}-way {task}[/]")
    console.print(comparison.table())
console.print("\n".join(lines[: lines.index("")]), soft_wrap=True)
console.print(f"Figures, tables.md and results.json are in {output}.")
