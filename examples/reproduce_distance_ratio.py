"""Does the distance-ratio (DR) head help? The experiments of Kim, Parviainen and Malde, on the glyphs.

Run it as it is:    python examples/reproduce_distance_ratio.py --quick      (two or three minutes on two cores)
All of it:          python examples/reproduce_distance_ratio.py              (an hour; stop and start it as you like)

It trains 5-way prototypical networks (Conv4) with the softmax and the DR head: 1-shot, 5-shot, and 5-shot with the nearest
support point in place of the mean (with one shot both are the same network). It writes to runs/distance_ratio:

    maps_*.png       figures 1, 7 and 8: the probability of one class over the plane and over the sphere
    accuracy.png     figures 2, 3 and 6: accuracy and loss of training, accuracy of validation
    norm_ratio.png   figures 4 and 5: how much of each step was more than a change of scale
    tables.md        table 2: 600 test episodes with intervals; tables 3 to 10: the measures of training and their tests
    results.json     all of these as numbers

A run that was finished is not repeated, and one that was stopped goes on from its last checkpoint. docs/distance_ratio.md
shows what came out, claim by claim.
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

import matplotlib.pyplot as plt
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from fewshot_callbacks import (
    DistanceRatioHead,
    DynamicsHistory,
    GlyphDataModule,
    ProtoNet,
    SoftmaxHead,
    TrainingDynamicsMonitor,
    compare_dynamics,
)
from fewshot_callbacks.functional import sample_episodes
from fewshot_callbacks.protonet import evaluate_episodes, squared_distances

# ---------------------------------------------------------------------------------------------------------------------
# Settings: change them here, or some on the command line.
heads = {"softmax": "softmax", "dr": "DR"}
tasks = {"1-shot": (1, "mean"), "5-shot": (5, "mean"), "5-shot, nearest": (5, "nearest")}  # shots, representation
ways, queries = 5, 5  # a training class has 10 images or more
test_queries, test_episodes, hard_ways = 7, 600, 20  # 20-way tells networks apart where 5-way is near its ceiling
episodes = 2000  # the paper: 60,000 and 50,000
validate_every, measure_every = 200, 10  # the paper: both 100; 3 seeds x 200 measured steps are its 600 again
seeds = (0, 1, 2)
# ---------------------------------------------------------------------------------------------------------------------
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--quick", action="store_true", help="one seed and 120 episodes a network, into a folder of its own"
)
parser.add_argument(
    "--episodes", type=int, default=None, help=f"of training, for each network; by default {episodes:,}"
)
parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
parser.add_argument("--output", type=Path, default=None, help="by default runs/distance_ratio")
parser.add_argument("--threads", type=int, default=None, help="of torch; by default all cores")
options = parser.parse_args()
if options.quick:
    episodes, options.seeds, validate_every, measure_every = 120, options.seeds[:1], 60, 2
options.episodes = options.episodes or episodes
validate_every = min(validate_every, options.episodes)
if options.episodes % validate_every:
    parser.error(f"--episodes {options.episodes} must be a multiple of {validate_every}, after which it validates.")
output = options.output or Path("runs") / ("distance_ratio_quick" if options.quick else "distance_ratio")
output.mkdir(parents=True, exist_ok=True)
if options.threads:
    torch.set_num_threads(options.threads)
console = Console()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings(
    "ignore", ".*does not have many workers.*|.*Checkpoint directory.*|.*GPU available but not used.*"
)
colours = {"softmax": "tab:orange", "dr": "tab:blue"}
point_colours = ("red", "lime", "deepskyblue")


class Curves(Callback):
    """Means of loss and accuracy of the last steps, and the accuracy of each validation; checkpoints hold them."""

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


def run(task: str, head: str, seed: int) -> dict[str, Any]:
    """Train and test one network, or read what an earlier call found."""
    folder = output / f"{task.replace(', ', '_')}_{head}_seed{seed}"
    done, last = folder / "result.json", folder / "last.ckpt"
    if done.exists():
        result = json.loads(done.read_text())
        if result["episodes"] != options.episodes:
            parser.error(
                f"{folder} was trained for {result['episodes']} episodes, not {options.episodes}. Use another --output."
            )
        return result
    shots, representation = tasks[task]
    seed_everything(seed, verbose=False)  # both heads begin with the same weights and see the same episodes
    data = GlyphDataModule(
        ways=ways, shots=shots, queries=queries, episodes=validate_every, seed=seed,
        test_ways=ways, test_shots=shots, test_queries=test_queries, test_episodes=test_episodes,
    )  # fmt: skip
    protocol = {"ways": ways, "shots": shots, "queries": test_queries, "episodes": test_episodes, "seed": 0}
    net = ProtoNet("conv4", head, in_channels=1, shots=shots, representation=representation, evaluation=protocol)
    curves = Curves(every=max(1, options.episodes // 60))
    dynamics = TrainingDynamicsMonitor(every_n_steps=measure_every, file=None)
    best = ModelCheckpoint(
        folder, filename="best", monitor="val/accuracy", mode="max", save_last=True, enable_version_counter=False
    )
    trainer = Trainer(
        max_epochs=options.episodes // validate_every,  # not max_steps, with which Lightning resumes an epoch too far
        callbacks=[curves, dynamics, best],
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
        console.print(f"\nStopped. Run it again to go on: what is finished is in {output}.")
        raise SystemExit(130) from None
    if trainer.global_step != options.episodes:
        raise RuntimeError(
            f"{folder} has {trainer.global_step} of {options.episodes} episodes; remove it and run again."
        )

    best_net = ProtoNet.load_from_checkpoint(best.best_model_path, map_location="cpu").eval()
    glyphs = data.glyphs("test")
    with torch.no_grad():
        embeddings = torch.cat([best_net(images.float().div(255)) for images in glyphs.images.split(512)])
    test = {}
    for number in (ways, hard_ways):
        drawn = sample_episodes(
            glyphs.labels, ways=number, shots=shots, queries=test_queries, episodes=test_episodes, seed=0
        )
        accuracy = evaluate_episodes(embeddings, glyphs.labels, best_net.head, drawn, representation=representation)
        test[str(number)] = {"mean": accuracy.mean, "ci95": accuracy.ci95, "hash": accuracy.episodes_hash}
    result = {
        "task": task, "head": head, "seed": seed, "episodes": options.episodes, "test": test,
        "train": curves.train, "val": curves.val, "dynamics": dynamics.history.to_dict(),
        "rho": best_net.head.rho.item() if head == "dr" else None,
    }  # fmt: skip
    part = done.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.replace(done)
    last.unlink(missing_ok=True)
    return result


# -------------------------------------------------------------------------------- figures 1, 7 and 8: maps of probability
def draw_plane(path: Path) -> None:
    """The probability of the red class over the plane, for two and for three prototypes."""
    prototypes = torch.tensor([[0.0, 0.5], [-0.6, -0.5], [0.6, -0.5]])
    side = torch.linspace(-2, 2, 401)
    grid = torch.cartesian_prod(side, side)  # (points, 2)
    models = {
        "softmax": SoftmaxHead(),
        "DR, ρ = 1": DistanceRatioHead(0.0),
        "DR, ρ = 2": DistanceRatioHead(math.log(2)),
    }
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.6), layout="constrained")
    for row, classes in zip(axes, (2, 3), strict=True):
        for place, (name, head) in zip(row, models.items(), strict=True):
            with torch.no_grad():
                red = head(grid.double(), prototypes[:classes].double()).softmax(-1)[:, 0].reshape(401, 401)
            shown = place.imshow(
                red.T, origin="lower", extent=(-2, 2, -2, 2), cmap="magma", vmin=0, vmax=1, interpolation="bilinear"
            )
            place.contour(side, side, red.T, levels=[0.1, 0.25, 0.5, 0.75, 0.9], colors="white", linewidths=0.5)
            for point, colour in zip(prototypes[:classes], point_colours, strict=False):
                place.plot(*point, "o", color=colour, markeredgecolor="white", markersize=7)
            highest = grid[red.flatten().argmax()]
            place.plot(*highest, "x", color="cyan", markersize=9, markeredgewidth=2, clip_on=False)
            place.set_title(f"{name}, {classes} prototypes", fontsize=10)
            place.set_xticks([])
            place.set_yticks([])
    figure.colorbar(shown, ax=axes, shrink=0.7, label="probability of the red class")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_sphere(path: Path) -> dict[str, dict[str, list[float]]]:
    """The same over the unit sphere, seen from outside as a map of the world; where it is highest and lowest.

    The vectors of the classes are red (0, 0, 1), green (0, 1, 0) and blue (1, 0, 0). A margin counts for the red class.
    """
    vectors = torch.eye(3, dtype=torch.float64)[[2, 1, 0]]
    latitude = torch.linspace(-math.pi / 2, math.pi / 2, 241).double()
    longitude = torch.linspace(-math.pi, math.pi, 481).double()  # 0 lies between green and blue
    up, around = torch.meshgrid(latitude, longitude, indexing="ij")
    turned = around + math.pi / 4
    points = torch.stack([up.cos() * turned.cos(), up.cos() * turned.sin(), up.sin()], dim=-1).reshape(-1, 3)
    cosines = (points @ vectors.T).clamp(-1, 1)  # (points, classes)
    angle = cosines[:, 0].acos()
    sphereface = torch.where(angle <= math.pi / 2, (2 * angle).cos(), -(2 * angle).cos() - 2)  # margin 2

    def with_margin(red_logit: torch.Tensor) -> torch.Tensor:
        return 2 * torch.cat([red_logit[:, None], cosines[:, 1:]], dim=1)  # scale 2

    two = math.log(2)
    with torch.no_grad():
        models = {
            "NormFace (softmax of chords)": 2 * cosines,  # -|q - v|^2 = 2 cos - 2
            "SphereFace, margin 2": with_margin(sphereface),
            "CosFace, margin 0.25": with_margin(cosines[:, 0] - 0.25),
            "ArcFace, margin 0.25": with_margin((angle + 0.25).cos()),
            "softmax of angles": SoftmaxHead("angular")(points, vectors),
            "DR of chords, ρ = 2": DistanceRatioHead(two, "unit_euclidean")(points, vectors),
            "DR of angles, ρ = 2": DistanceRatioHead(two, "angular")(points, vectors),
        }
    figure = plt.figure(figsize=(13, 4.6), layout="constrained")
    extremes = {}
    for number, (name, logits) in enumerate(models.items(), start=1):
        red = logits.softmax(-1)[:, 0]
        ends = {kind: int(getattr(red, f"arg{kind}")()) for kind in ("max", "min")}
        extremes[name] = {kind: [round(x, 2) + 0.0 for x in points[at].tolist()] for kind, at in ends.items()}
        place = figure.add_subplot(2, 4, number, projection="mollweide")
        place.pcolormesh(around, up, red.reshape(up.shape), cmap="magma", vmin=0, vmax=1, shading="gouraud")
        place.contour(around, up, red.reshape(up.shape), levels=[0.25, 0.5, 0.75], colors="white", linewidths=0.5)
        for (x, y), colour in zip(((0, math.pi / 2), (math.pi / 4, 0), (-math.pi / 4, 0)), point_colours, strict=True):
            place.plot(x, y, "o", color=colour, markeredgecolor="white", markersize=8, clip_on=False)
        for kind, mark in (("max", "x"), ("min", "v")):
            x, y = around.flatten()[ends[kind]], up.flatten()[ends[kind]]
            x = 0.0 if abs(y) > math.pi / 2 - 1e-6 else x  # a pole has any longitude
            place.plot(x, y, mark, color="cyan", markersize=8, markeredgewidth=2, fillstyle="none", clip_on=False)
        place.set_title(name, fontsize=10)
        place.set_xticks([])
        place.set_yticks([])
    note = figure.add_subplot(2, 4, 8)
    note.axis("off")
    note.text(
        0, 0.5, "probability of the red class\n(black 0, light 1)\n\n● vectors of the classes\n× highest, ▽ lowest",
        fontsize=11, va="center",
    )  # fmt: skip
    figure.savefig(path, dpi=85)
    plt.close(figure)
    return extremes


draw_plane(output / "maps_plane.png")
extremes = draw_sphere(output / "maps_sphere.png")
far = squared_distances(torch.tensor([[0.0]]), torch.tensor([[1.0], [-2.0]]))  # table 1: distances 1 and 2
toy = {name: head.logits(far).softmax(-1)[0, 0].item() for name, head in
       {"softmax": SoftmaxHead(), "DR": DistanceRatioHead(math.log(2)).requires_grad_(False)}.items()}  # fmt: skip
console.print(f"Table 1: distances 1 and 2 give the nearer class {toy['softmax']:.5f} (softmax), {toy['DR']:.5f} (DR)")

# ------------------------------------------------------------------------------------------------------------ trainings
results = {}
cells = list(product(options.seeds, tasks, heads))
for number, (seed, task, head) in enumerate(cells, start=1):
    results[task, head, seed] = result = run(task, head, seed)
    five, hard = (result["test"][str(n)] for n in (ways, hard_ways))
    console.print(
        f"{number}/{len(cells)}  {task}, {heads[head]}, seed {seed}: {ways}-way {100 * five['mean']:.2f} "
        f"±{100 * five['ci95']:.2f} %, {hard_ways}-way {100 * hard['mean']:.2f} ±{100 * hard['ci95']:.2f} %",
        soft_wrap=True,
    )

# ----------------------------------------------------------------------------------- figures 2, 3 and 6: accuracy and loss
figure, axes = plt.subplots(3, len(tasks), figsize=(12, 9), layout="constrained", sharex=True)
for column, task in zip(axes.T, tasks, strict=True):
    for head, title in heads.items():
        for number, seed in enumerate(options.seeds):
            result = results[task, head, seed]
            steps, loss, accuracy = zip(*result["train"], strict=True)
            val_steps, val = zip(*result["val"], strict=True)
            style = {"color": colours[head], "linewidth": 1.3, "alpha": 0.85, "label": None if number else title}
            for place, (x, y) in zip(column, ((steps, loss), (steps, accuracy), (val_steps, val)), strict=True):
                place.plot(x, y, **style)
    column[0].set_title(f"{ways}-way {task}", fontsize=11)
    column[0].set_yscale("log")
    column[-1].set_xlabel("training episodes")
for row, title in zip(axes, ("training loss", "training accuracy", "validation accuracy"), strict=True):
    row[0].set_ylabel(title)
    for place in row:
        place.grid(alpha=0.3)
axes[0, 0].legend(frameon=False)
figure.savefig(output / "accuracy.png", dpi=80)
plt.close(figure)

# ------------------------------------------------------------------------------------------- figures 4 and 5: norm ratio
figure, axes = plt.subplots(1, len(tasks), figsize=(12, 3.4), layout="constrained", sharey=True)
for place, task in zip(axes, tasks, strict=True):
    for head, title in heads.items():
        for number, seed in enumerate(options.seeds):
            history = DynamicsHistory.from_dict(results[task, head, seed]["dynamics"])
            place.plot(
                history.steps, history.values("norm_ratio"), ".", color=colours[head], markersize=2.5, alpha=0.6,
                label=None if number else title,
            )  # fmt: skip
    place.set_title(f"{ways}-way {task}", fontsize=11)
    place.set_xlabel("training episodes")
    place.grid(alpha=0.3)
axes[0].set_ylabel("norm ratio φ")
axes[0].legend(frameon=False, markerscale=4)
figure.savefig(output / "norm_ratio.png", dpi=80)
plt.close(figure)

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
    pooled = []
    for head in heads:  # the seeds one after the other, as one long run
        steps, measures = [], []
        for seed in options.seeds:
            for step, measure in DynamicsHistory.from_dict(results[task, head, seed]["dynamics"]):
                steps.append(len(options.seeds) * step + options.seeds.index(seed))
                measures.append(measure)
        pooled.append(DynamicsHistory(tuple(steps), tuple(measures)))
    comparisons[task] = compare_dynamics(*pooled, names=("softmax", "DR"))
    lines += ["", f"{ways}-way {task}", "```", *str(comparisons[task]).splitlines(), "```"]
(output / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
(output / "results.json").write_text(
    json.dumps(
        {
            "test": [
                {key: result[key] for key in ("task", "head", "seed", "test", "rho")} for result in results.values()
            ],
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
