"""Episodes per second in training and evaluation, compared with easyfsl, and the cost of monitors per training step.

    python benchmarks/episodes.py                               # easyfsl's columns need: pip install easyfsl
    python benchmarks/episodes.py --sizes 32 --repeats 3        # only small images, three turns
    python benchmarks/episodes.py --monitors

Both libraries take turns in one run, on the same glyphs (in memory, not augmented), with a Conv4 of the same layers. Ratios
are medians over the turns. "easyfsl with our Conv4" runs easyfsl with our module, which stores its channels last in memory:
the remaining difference is how episodes are drawn, collated, embedded and scored.

Our training runs in a Lightning Trainer, easyfsl's in the plain loop of its tutorial. The evaluation has 600 episodes; ours
also uses the Trainer. `--monitors` prints another table, with the cost of monitors per step: monitors measure every second
step of one 5-way 5-shot training run, and the time in their hooks is recorded.
"""

import argparse
import importlib.util
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))

from _results import Cell, Column, Results, add_file_option

from fewshot_callbacks import (
    Conv4,
    DiscriminantRatioMonitor,
    EpisodicBatchSampler,
    Glyphs,
    ProtoNet,
    SoftmaxHead,
    TrainingDynamicsMonitor,
)

QUERIES = 5
COLUMNS = (
    Column("5-way episodes"),
    Column("ours, per second", ".1f"),
    Column("easyfsl, per second", ".1f"),
    Column("ours / easyfsl, median of ratios", ".1f"),
    Column("easyfsl with our Conv4, per second", ".1f"),
    Column("ours / easyfsl with our Conv4, median of ratios", ".1f"),
)
MONITOR_COLUMNS = (
    Column("images"),
    Column("monitor"),
    Column("a measured step adds, steps", ".4f"),
)


class Images(Dataset):
    """Images in memory, one at a time for easyfsl, or a whole batch at once for our loaders."""

    def __init__(self, glyphs: Glyphs, size: int) -> None:
        images = glyphs.images.float().div(255)
        if size != images.shape[-1]:
            images = nn.functional.interpolate(images, size=(size, size), mode="bilinear")
        self.images, self.labels = images, glyphs.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[indices], self.labels[indices]

    def get_labels(self) -> list[int]:
        return self.labels.tolist()


class OneByOne(Dataset):
    """The same without the batches, which easyfsl's collate function does not take."""

    def __init__(self, images: Images) -> None:
        self.images, self.get_labels = images, images.get_labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index]


def plain_conv4() -> nn.Module:
    """The same layers, written in the usual way."""

    def block(channels: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1), *block(64), *block(64), *block(64), nn.Flatten())


def quiet_trainer(*callbacks: Callback) -> Trainer:
    return Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=list(callbacks),
    )  # fmt: skip


def as_it_is(batch: object) -> object:
    return batch


def our_training(data: Images, shots: int, episodes: int) -> Callable[[], None]:
    net = ProtoNet(Conv4(1), "softmax", shots=shots)
    sampler = EpisodicBatchSampler(data.labels, ways=5, shots=shots, queries=QUERIES, episodes=episodes)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=as_it_is)

    def run() -> None:
        quiet_trainer().fit(net, loader)

    return run


def our_evaluation(data: Images, shots: int, episodes: int) -> Callable[[], None]:
    protocol = {"ways": 5, "shots": shots, "queries": QUERIES, "episodes": episodes, "seed": 0}
    net = ProtoNet(Conv4(1), SoftmaxHead(), shots=shots, evaluation=protocol)
    loader = DataLoader(data, batch_size=256, collate_fn=as_it_is)

    def run() -> None:
        quiet_trainer().test(net, loader, verbose=False)

    return run


def their_loader(data: Images, shots: int, episodes: int) -> DataLoader:
    from easyfsl.samplers import TaskSampler  # noqa: PLC0415 - an optional peer

    # easyfsl 1.5.0 passes Sampler an argument that torch has since removed; without this line it does not start.
    torch.utils.data.Sampler.__init__ = lambda self, data_source=None: None
    images = OneByOne(data)
    sampler = TaskSampler(images, n_way=5, n_shot=shots, n_query=QUERIES, n_tasks=episodes)
    return DataLoader(images, batch_sampler=sampler, collate_fn=sampler.episodic_collate_fn)


def their_training(data: Images, shots: int, episodes: int, backbone: nn.Module) -> Callable[[], None]:
    from easyfsl.methods import PrototypicalNetworks  # noqa: PLC0415

    model = PrototypicalNetworks(backbone)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = their_loader(data, shots, episodes)

    def run() -> None:
        model.train()
        for support, support_labels, query, query_labels, _ in loader:
            optimizer.zero_grad()
            model.process_support_set(support, support_labels)
            nn.functional.cross_entropy(model(query), query_labels).backward()
            optimizer.step()

    return run


def their_evaluation(data: Images, shots: int, episodes: int, backbone: nn.Module) -> Callable[[], None]:
    from easyfsl.methods import PrototypicalNetworks  # noqa: PLC0415
    from easyfsl.utils import evaluate  # noqa: PLC0415

    model, loader = PrototypicalNetworks(backbone), their_loader(data, shots, episodes)
    return lambda: evaluate(model, loader, device="cpu", use_tqdm=False)


def take_turns(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each, measured in turns; the first turn is a warm-up and is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


class StepTimer(Callback):
    """Records the seconds of each step, and the part that a monitor spent in its own hooks."""

    def __init__(self, monitor: Callback) -> None:
        self.starts: list[float] = []
        self.inside: list[float] = []
        for name in HOOKS:
            setattr(monitor, name, self._timed(getattr(monitor, name)))

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object, **named: object) -> None:
            started = time.perf_counter()
            hook(*arguments, **named)
            self.inside[-1] += time.perf_counter() - started

        return timed

    def on_train_batch_start(self, *_: object) -> None:
        self.starts.append(time.perf_counter())
        self.inside.append(0.0)


def cost_of(monitor: Callback, data: Images, steps: int) -> float:
    """Return the extra cost of a measured step, in steps, on the CPU, which runs no work asynchronously.

    Every second step is measured. A comparison with the length of the neighbouring steps would give the same cost, but
    with 2 % of noise on a shared machine.
    """
    seed_everything(0, verbose=False)
    timer = StepTimer(monitor)
    sampler = EpisodicBatchSampler(data.labels, ways=5, shots=5, queries=QUERIES, episodes=steps)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=as_it_is)
    quiet_trainer(timer, monitor).fit(ProtoNet("conv4", "dr", in_channels=1, shots=5), loader)
    seconds = [b - a for a, b in zip(timer.starts, timer.starts[1:], strict=False)][4:]
    plain, inside = seconds[0::2], timer.inside[5::2]  # step 2, 4, 6, ... are measured
    return statistics.median(inside) / statistics.median(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--episodes", type=int, default=20, help="training episodes in a turn")
    parser.add_argument("--test_episodes", type=int, default=600)
    parser.add_argument("--steps", type=int, default=300, help="training steps for the cost of a monitor")
    parser.add_argument("--sizes", type=int, nargs="*", default=[32, 84], help="height and width of the images")
    parser.add_argument("--shots", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--monitors", action="store_true", help="measure the cost of monitors instead of episodes")
    add_file_option(parser)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    columns = MONITOR_COLUMNS if options.monitors else COLUMNS
    with Results(columns, threads=torch.get_num_threads(), file=options.json) as results:
        if options.monitors:
            measure_monitors(results, options)
        else:
            measure_episodes(results, options)


def measure_episodes(results: Results, options: argparse.Namespace) -> None:
    """Add a row for each kind of episode."""
    backbones = peers()
    splits = {"training": Glyphs("train"), "evaluation": Glyphs("test")}
    for kind, glyphs in splits.items():
        is_training = kind == "training"
        episodes = options.episodes if is_training else options.test_episodes
        repeats = options.repeats if is_training else max(1, options.repeats // 3)
        ours = our_training if is_training else our_evaluation
        theirs = their_training if is_training else their_evaluation
        for size in options.sizes:
            images = Images(glyphs, size)
            for shots in options.shots:
                runs = {"ours": ours(images, shots, episodes)}
                runs |= {name: theirs(images, shots, episodes, backbone()) for name, backbone in backbones.items()}
                seconds = take_turns(runs, repeats)
                title = f"{kind}, {size} x {size}, {shots}-shot"
                results.add(title, *rates(seconds, episodes))


def peers() -> dict[str, Callable[[], nn.Module]]:
    """Return the networks of easyfsl; empty if it is not installed."""
    if importlib.util.find_spec("easyfsl") is None:
        print("easyfsl is not installed, so only our figures are shown: pip install easyfsl", file=sys.stderr)
        return {}
    return {"easyfsl": plain_conv4, "easyfsl, our Conv4": lambda: Conv4(1)}


def rates(seconds: dict[str, list[float]], episodes: int) -> list[Cell]:
    """Return our episodes per second, and for each peer its episodes per second and the quotient."""
    cells: list[Cell] = [episodes / statistics.median(seconds["ours"])]
    for name, theirs in seconds.items():
        if name == "ours":
            continue
        cells.append(episodes / statistics.median(theirs))
        cells.append(statistics.median(b / a for a, b in zip(seconds["ours"], theirs, strict=True)))
    return cells + [None] * (len(COLUMNS) - 1 - len(cells))


def measure_monitors(results: Results, options: argparse.Namespace) -> None:
    """Add a row for each size and monitor."""
    train = Glyphs("train")
    for size in options.sizes:
        images = Images(train, size)
        for monitor in (DiscriminantRatioMonitor(every_n_steps=2), TrainingDynamicsMonitor(every_n_steps=2)):
            name = f"`{type(monitor).__name__}`"
            results.add(f"{size} x {size}", name, cost_of(monitor, images, options.steps))


if __name__ == "__main__":
    main()
