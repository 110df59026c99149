"""The words of each command: its options and their help, read without importing torch; a mistake takes one line."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import fewshot_callbacks

PACKAGE = Path(__file__).parents[1]
CONFIGURATIONS = (PACKAGE / "configs", PACKAGE.parent / "configs")  # of an installed package, and of a clone

EVALUATION = "functional/retrieval/settings.py"  # where the settings of an evaluation are declared

ARRAYS = (
    "The .npz file holds the arrays 'embeddings' (items, dim) and 'labels' (items,); optionally 'gallery' and "
    "'gallery_labels'. Without a gallery each item is a query against all others. Optional arrays: 'ids' "
    "(without a gallery, the first item of each id is counted), 'query_ids' and 'gallery_ids' (an item is not a candidate "
    "for itself, and the first of each id is counted), 'query_groups' and 'gallery_groups'."
)
COLUMNS = {
    "embeddings": "the vectors (default: embeddings, or the only one with two axes)",
    "labels": "the label of each row; may be a .npy file of all rows, as the others may",
    "ids": "the identity of each row (without queries, the first row of each is counted)",
    "groups": "the group of each row",
    "queries": "whether a row is a query, and no item of the gallery (default: each row is both)",
}
SAME_ITEMS = (
    "embeddings of the same items in the same order, for instance by another model: shows which differences are "
    "beyond chance"
)
OF_ALL_ROWS = " J, the discriminant ratio of all rows, is computed where it is named beside one of them."
# Settings of an evaluation that no command has: the tables name their intervals, 95 %.
FIXED = ("confidence",)
# Those that a report does not have, since it shows single queries.
NOT_IN_REPORTS = (*FIXED, "max_queries")


class Options(argparse.ArgumentParser):
    """A parser that answers a command line that it cannot take with one line: what is wrong, and what is near."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(f"fewshot {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        start, _, rest = message.partition(": ")
        if start == "unrecognized arguments":
            word = rest.split()[0].partition("=")[0]
            message = instead(word.removeprefix("--")) or unknown(word, self._option_string_actions)
        elif start.endswith("arguments are required"):
            message = f"{rest} must be given."
        message = message.removeprefix("argument ")
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end} '{self.prog} --help' lists the options.\n")


def unknown(word: str, options: Iterable[str]) -> str:
    """Say that there is no such option, and which is near."""
    if not word.startswith("-"):
        return f"there is an unexpected word '{word}'."
    return f"there is no option {word}.{nearest(word, options)}"


def instead(name: str) -> str:
    """Say what is written in place of a setting of an earlier version; nothing where it never was one."""
    new = ast.literal_eval(source_of(EVALUATION)["GONE"]).get(name)
    return f"{name} is no setting. Write {new}; a command has --metrics recall@1 and --label_groups 10." if new else ""


def nearest(word: str, words: Iterable[str]) -> str:
    """Ask whether a similar word was meant; nothing where none is similar."""
    # Dashes, which all options share, make none alike. Whoever wrote a word did not mean that word.
    plain = {known.lstrip("-"): known for known in words if known != word}
    near = get_close_matches(word.lstrip("-"), plain, n=1)
    return f" Did you mean {plain[near[0]]}?" if near else ""


# Whatever is passed as a keyword in Python, also alone in brackets: no argument of a call, and no part of a longer name.
_KEYWORD = re.compile(r"(?<![^\s(])(?<!\S\()(?<!, )([a-z_]+)=('[^']*'|\([^()]*\)|[\w@.+-]*\w)?")


def in_shell(text: str, command: str) -> str:
    """Rewrite a message of a function for those who gave a command: `k=5` becomes `--k 5`, where the command has `--k`.

    Examples:
        >>> in_shell("evaluate_retrieval: similarity='dott' is unknown.", "evaluate")
        '--similarity dott is unknown.'
        >>> in_shell("Pass labels= with one of these.", "evaluate")
        'Pass --labels with one of these.'
        >>> in_shell("Some rows are left out (unknown='ignore').", "evaluate")
        'Some rows are left out (--unknown ignore).'
        >>> in_shell("Write it with numpy.savez(path, labels=...).", "evaluate")
        'Write it with numpy.savez(path, labels=...).'
    """
    if command not in PARSERS:
        return text
    known = PARSERS[command]()._option_string_actions
    caller, colon, rest = text.partition(": ")
    if colon and caller in fewshot_callbacks.__all__:
        text = rest

    def option(found: re.Match[str]) -> str:
        name, value = f"--{found[1]}", found[2] or ""
        if name not in known:
            return found[0]
        words = re.findall(r"[^\s'(),]+", value)
        return " ".join([name, *("none" if word == "None" else word for word in words)])

    return _KEYWORD.sub(option, text)


# ----------------------------------------------------------------------------- mistakes in the words of a training

# Lines that hold for any value of the option: the alternatives that nobody meant, and the value, which was typed just now.
_NOISE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
)
# The words of jsonargparse from 4.51 on. A message that fits none of the patterns here and below is shown as it is.
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |Option '|Subcommand '\w+' does not accept option ')([^\s=']+)")


def explained(message: str, options: Iterable[str]) -> str:
    """Rewrite a message of jsonargparse as one sentence or two, with what was probably meant.

    It tells of every type that a value might have had, and of these the reason that matters is found.

    Args:
        message: Of the parser.
        options: Those that it knows.
    """
    keys, owner, text = deepest(message)
    module, _, name = owner.rpartition(".")
    start = f"--{'.'.join(keys)}: " if keys else ""
    if (found := _UNKNOWN.match(text)) and owner:
        word = found[1].lstrip("-")
        known = _arguments_of(module, name)
        end = f" {instead(word)}".rstrip() or nearest(word, known) or f" It has {', '.join(known)}."
        return f"{name} has no argument {word}.{end}"
    if found:
        return unknown(found[1] if text.startswith("unrecognized") else f"--{found[1]}", options)
    if "has no attribute" in text and owner:
        return f"there is no class {owner}.{nearest(name, vars(import_module(module)))}"
    if text.endswith(".data"):  # the following arguments are required
        return "there is no data. Give a configuration, such as --config protonet_dr_glyphs."
    value = re.search(r"Got value: (.*)", text) or re.search(r"Given value: (.*)", message)
    if found := re.search(r"(?:(--[\w.]+): )?Expected a dot import path string: (\S+)", text):
        option = found[1] or f"--{'.'.join(keys)}"
        return f"{option}: {_no_such_class(found[2], option)}"
    if value and (found := re.match(r"Expected an? (.*?)(?:\. Got value|$)", text)):
        text = f"{value[1]} is not {_plain(found[1])}"
    return start + text.rstrip(".?") + ("?" if text.endswith("?") else ".")


def deepest(message: str) -> tuple[list[str], str, str]:
    """Return the line that is indented most, with the keys and the last class on the way to it.

    The alternatives of a union stand side by side, and that which took most of the value has the longest explanation: of
    `Episodes` and `ClassBalanced` the one that knows the argument. The first of several counts.
    """
    if "Parser key" not in message and "class_path" not in message:
        return [], "", " ".join(message.split())
    lines: list[tuple[int, str]] = []
    way: list[tuple[int, str]] = []
    # A reason that follows its key on the same line gets a line of its own, one level deeper.
    for line in re.sub(r'(Parser key "[^"]+":) (\S)', r"\1\n  \2", message).splitlines():
        text = line.lstrip(" -")
        depth = len(line) - len(text)
        if not text or _NOISE.match(text):
            continue
        way = [*((before, head) for before, head in way if before < depth), (depth, text)]
        if not lines or depth > lines[-1][0]:
            lines = way
    heads = "\n".join(text for _, text in lines)
    owners = re.findall(r"class_path '([\w.]+)'", heads)
    return re.findall(r'Parser key "([^"]+)"', heads), owners[-1] if owners else "", lines[-1][1] if lines else message


# Base classes of what options take: the noun, and the words that come before the name of such a class.
TAKEN_BY = {
    "LightningDataModule": ("data module", "--data"),
    "LightningModule": ("module", "--model"),
    "Callback": ("callback", "--trainer.callbacks+"),
    "Dataset": ("data set", "--data FewShotDataModule --data.dataset"),
}


def _no_such_class(name: str, option: str) -> str:
    """Say why an option does not take this name of a class: there is none, or another option takes it."""
    if name not in fewshot_callbacks.__all__:
        return f"{name} is not a file or a class.{nearest(name, fewshot_callbacks.__all__)}"
    bases = [base.__name__ for base in getattr(getattr(fewshot_callbacks, name), "__mro__", ())]
    base = next((base for base in bases if base in TAKEN_BY), None)
    if base is None:
        return f"{name} is no class that this option takes."
    noun, words = TAKEN_BY[base]
    if option.endswith(".help"):
        words = f"{words.removesuffix('+')}.help"
    return f"{name} is a {noun}. Write {words} {name}."


def _arguments_of(module: str, name: str) -> list[str]:
    """List the arguments of a class, with those of the settings among them."""
    arguments = inspect.signature(getattr(import_module(module), name)).parameters
    inner = [f"{a}.{field}" for a in arguments for field in getattr(arguments[a].default, "__dataclass_fields__", ())]
    return [*arguments, *inner]


def _plain(kind: str) -> str:
    """Shorten `<class 'int'>` to `int`, `typing.Literal['a', 'b']` to `one of 'a', 'b'`."""
    kind = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind)
    return re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", kind)


# ---------------------------------------------------------------------------------------------- values as people write them


def number(word: str) -> float:
    """Read a number, inf among them."""
    try:
        return float(word)
    except ValueError:
        raise ArgumentTypeError(f"{word} is not a number.") from None


def whole(word: str) -> int:
    """Read 5, 1e6, 1_000_000 or 1,000,000."""
    value = number(word.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", word) else word)
    if not value.is_integer():
        raise ArgumentTypeError(f"{word} is not a whole number, such as 5 or 1e6.")
    # PyTorch and NumPy hold no larger ones.
    if abs(value) >= 2**63:
        raise ArgumentTypeError(f"{word} is too large; whole numbers go up to 2^63 - 1.")
    return int(value)


def or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Read `none`, too."""
    return lambda word: None if word.lower() in ("none", "null") else parse(word)


def several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Read `[1, 5, 10]`, `1,5,10`, `1 5 10` or `5`; quotes do not matter."""
    return lambda words: tuple(parse(word.strip("'\"")) for word in re.split(r"[\s,]+", words.strip("[]() ")) if word)


def groups(word: str) -> Any:
    """Read the number of labels in a group, `auto`, or lists of lists, such as `[[owl, eagle], [oak, elm]]`."""
    if word.lower() == "auto":
        return "auto"
    if not word.startswith("["):
        return whole(word)
    import yaml  # noqa: PLC0415 - for one option

    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        raise ArgumentTypeError(f"{word} are no lists, such as [[0, 1], [2, 3]].") from None


def reader_of(annotation: str) -> Callable[[str], Any]:
    """Choose how a word is read for a setting of this type; words for a choice are judged by who takes them."""
    read: Callable[[str], Any] = str
    for part, one in {"Sequence[Sequence": groups, "int": whole, "float": number}.items():
        if part in annotation:
            read = one
            break
    read = several(read) if annotation.startswith(("Sequence", "tuple")) else read
    return or_none(read) if annotation.endswith("None") else read


# --------------------------------------------------------------------------------------------------- settings of classes


def source_of(file: str) -> dict[str, Any]:
    """Read what a module declares, by name, from its source: importing it would import torch, for seconds, only to list."""
    found: dict[str, Any] = {}
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found[ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)] = node.value
    return found


def metrics_of(file: str, kind: str = "") -> tuple[str, str]:
    """Name the metrics of a registry, and those that are computed where none is named."""
    source = source_of(file)
    usual = (str(key.value) for key in ast.walk(source[f"DEFAULT_{kind}METRICS"]) if isinstance(key, ast.Constant))
    return ", ".join(ast.literal_eval(metric.args[0]) for metric in source[f"{kind}METRICS"].elts), " ".join(usual)


def add_settings(options: Options, file: str, owner: str, without: Sequence[str], further_metric: str = "") -> None:
    """Add an option for each field of a dataclass, whose meaning is the string that follows it.

    One that is not given is left to the default of the class.

    Args:
        options: The parser that gets them.
        file: The module of the class.
        owner: Name of the class.
        without: Fields that are no options.
        further_metric: A sentence about a metric that the command knows beside those of the registry.
    """
    source = source_of(file)
    for field, text in pairwise(source[owner].body):
        if not (isinstance(field, ast.AnnAssign) and field.value is not None and isinstance(text, ast.Expr)):
            continue
        name, kind, default = (ast.unparse(part) for part in (field.target, field.annotation, field.value))
        meaning = " ".join(ast.literal_eval(text.value).split())
        how: dict[str, Any] = {"type": reader_of(kind), "default": SUPPRESS}
        if default in source:  # a constant of the module
            default = ast.unparse(source[default])
        if name == "metrics":
            patterns, default = metrics_of("functional/retrieval/registry.py")
            meaning += f" There are {patterns}; macro_ before one is its mean over classes.{further_metric}"
            how |= {"type": several(str), "nargs": "+", "metavar": "KEY"}
        if name not in without:
            # argparse fills in what follows a single percent sign.
            options.add_argument(f"--{name}", help=f"{meaning} (default: {default})".replace("%", "%%"), **how)


# ---------------------------------------------------------------------------------------------------------- the commands


def evaluate() -> Options:
    """Make the options of `fewshot evaluate`."""
    several = "Labels of zeros and ones, (items, labels), are those of items with several labels each."
    options = Options("evaluate", f"Compute exact retrieval metrics of embeddings. {ARRAYS} {several}")
    files = (
        "an .npz file, as numpy.savez writes it; or, with --labels, files that are read piece by piece and may be larger "
        "than memory: .npy, .npz, .parquet, .arrow, .feather or .safetensors, a folder of these, or a glob in quotes"
    )
    options.add_argument("file", type=Path, help=files)
    for name, what in COLUMNS.items():
        options.add_argument(f"--{name}", metavar="NAME", help=f"array or column of such files: {what}")
    options.add_argument("--against", type=Path, metavar="FILE", help=SAME_ITEMS)
    judged = (
        "judgements of relevance (qrels), in place of labels: a file with the four columns of TREC, or with query, item and "
        "grade, as BEIR has them, with or without a heading. The ids are those of 'query_ids' and 'gallery_ids'"
    )
    options.add_argument("--judgements", type=Path, metavar="FILE", help=judged)
    unknown = (
        "what to do with judgements of ids that no row has: error (the default) or ignore, by which a relevant item that is "
        "not in the gallery counts as never found"
    )
    options.add_argument("--unknown", choices=("error", "ignore"), default="error", help=unknown)
    at_least = "the smallest relevant grade of judgements, -l of trec_eval (default: 1)"
    options.add_argument("--at_least", type=float, default=1.0, metavar="GRADE", help=at_least)
    resumed = (
        "a new or empty folder where the state of the evaluation is written about every minute, so that the same command "
        "goes on from there after a kill; the state is removed at the end"
    )
    options.add_argument("--resume", type=Path, metavar="FOLDER", help=resumed)
    options.add_argument("--json", action="store_true", help="print the report as JSON")
    options.add_argument("--per_class", action="store_true", help="print the means of each class, too")
    add_settings(options, EVALUATION, "RetrievalSettings", FIXED, further_metric=OF_ALL_ROWS)
    return options


def report() -> Options:
    """Make the options of `fewshot report`."""
    options = Options(
        "report",
        "Write one self-contained HTML file about embeddings: metrics with intervals, an adjustable threshold, the "
        "weakest classes, the worst queries with the items retrieved for them, items that may be mislabelled, and near "
        f"duplicates. It opens in any browser. {ARRAYS} It may also hold 'paths' and 'gallery_paths', the image files "
        "of the items, and 'label_names', the name of each label 0, 1, 2, ...",
    )
    options.add_argument("file", type=Path, help="an .npz file, as numpy.savez writes it")
    output = (
        "the HTML file to write; a file of this name is replaced. By default report.html, which replaces an earlier report; "
        "where something else has that name, report-2.html and so on"
    )
    options.add_argument("-o", "--output", type=Path, metavar="FILE", help=output)
    options.add_argument("--title", default="Retrieval report", help="title of the page")
    images = (
        "folder of the images of the items. With 'paths' in the file, the paths are relative to this folder (by default "
        "to the folder of the file). Otherwise its images are taken in the order of torchvision's ImageFolder: folders "
        "sorted by name, files sorted in each; without folders, files sorted by name"
    )
    another = "embeddings of another split by the same model, such as the training set: finds near duplicates of both"
    options.add_argument("--images", type=Path, metavar="FOLDER", help=images)
    options.add_argument("--gallery_images", type=Path, metavar="FOLDER", help="the same for the gallery")
    options.add_argument("--against", type=Path, metavar="FILE", help=SAME_ITEMS)
    options.add_argument("--train", type=Path, metavar="FILE", help=another)
    options.add_argument("--train_images", type=Path, metavar="FOLDER", help="the same as --images for that split")
    add_settings(options, "report/findings.py", "ReportSettings", ("memory_mb",))
    add_settings(options, EVALUATION, "RetrievalSettings", NOT_IN_REPORTS)
    return options


def trials() -> Options:
    """Make the options of `fewshot trials`."""
    options = Options(
        "trials",
        "Evaluate verification on pairs that someone listed: EER, minDCF, TAR at false match rates, accuracy over folds. "
        "The list is LFW's pairs.txt or one of VoxCeleb's, with --embeddings, or a table with commas between the columns "
        "score and same (1 or 0), and first, second and fold if they are known.",
    )
    options.add_argument("file", type=Path, help="the list of trials")
    stored = "an .npz file with the arrays 'embeddings' and 'ids', the name of each item as the list has it"
    options.add_argument("--embeddings", type=Path, metavar="FILE", help=stored)
    options.add_argument("--similarity", default="cosine", help="how embeddings are compared (default: cosine)")
    patterns, usual = metrics_of("functional/verification/trials.py", "TRIAL_")
    text = f"what is computed. There are {patterns}. (default: {usual}, and accuracy where there are folds)"
    options.add_argument("--metrics", type=several(str), nargs="+", metavar="KEY", help=text)
    for name, kind in (
        ("miss_cost", "a rejected genuine trial"),
        ("false_match_cost", "an accepted one of two"),
    ):
        options.add_argument(f"--{name}", type=number, default=1.0, help=f"cost of {kind}, for min_dcf; 1 by default")
    figures = (
        "write det.png and scores.png there; figures of this command are replaced, other files of these names refused"
    )
    options.add_argument("--figures", type=Path, metavar="FOLDER", help=figures)
    page = "write an HTML file with figures and the worst mistakes; a file of this name is replaced"
    options.add_argument("--report", type=Path, metavar="FILE", help=page)
    options.add_argument("--json", action="store_true", help="print the report as JSON")
    return options


def plan() -> Options:
    """Make the options of `fewshot plan`."""
    options = Options(
        "plan", "Compute pairs, operations, memory and tiles of an exact evaluation before it is started."
    )
    options.add_argument("--queries", type=whole, help="number of queries, such as 158652 or 1e6")
    files = "files of all items, a folder, or a glob in quotes: their number and dimension are found there, reading is timed"
    options.add_argument("--files", metavar="FILES", help=files)
    gallery = "number of gallery items; by default that of the queries, which are then also the gallery"
    options.add_argument("--gallery", type=or_none(whole), help=gallery)
    options.add_argument("--dim", type=whole, help="number of components of an embedding")
    memory = "memory budget beyond the embeddings, in MB; 512 by default, inf sets no limit"
    options.add_argument("--memory_mb", type=or_none(number), default=512, help=memory)
    drawn = "queries that are drawn for an estimate; by default all"
    options.add_argument("--max_queries", type=or_none(whole), help=drawn)
    options.add_argument("--dtype", default="float32", help="number format of the embeddings; float32 by default")
    options.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return options


def compare() -> Options:
    """Make the options of `fewshot compare`."""
    options = Options(
        "compare",
        "Test the best checkpoints of two runs of 'fewshot fit' on the same episodes, and compare how their optimiser "
        "steps moved the embeddings (TrainingDynamicsMonitor), with the tests of the distance-ratio paper.",
    )
    options.add_argument(
        "run", type=Path, help="folder of a run, such as runs/version_0, or its training_dynamics.json"
    )
    options.add_argument("other_run", type=Path, help="the same of the run to compare with")
    names = "names of the two runs in the tables; by default those of their heads"
    options.add_argument("--names", nargs=2, metavar="NAME", help=names)
    tested = "test both checkpoints, the default; false compares only the steps"
    options.add_argument("--test", choices=("true", "false"), default="true", help=tested)
    options.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return options


def demo() -> Options:
    """Make the options of `fewshot demo`."""
    options = Options(
        "demo",
        "Train two prototypical networks (softmax head, distance-ratio head) and a network with average precision as the "
        "loss, on characters drawn in many typefaces, and compare them with random weights on unseen classes. Writes "
        "curves, logs and checkpoints.",
    )
    folder = "folder to write, ./demo by default; an earlier demo is replaced"
    options.add_argument("--output", type=Path, default=Path("demo"), help=folder)
    for name, default, text in (
        ("epochs", 4, "training epochs of each network"),
        ("episodes", 40, "training episodes, or batches, in an epoch"),
        ("test_episodes", 600, "episodes of the comparison"),
        ("seed", 0, "seed of weights, episodes and augmentation"),
    ):
        options.add_argument(f"--{name}", type=whole, default=default, help=f"{text}; {default} by default")
    device = "device to train on, as Lightning's Trainer names it: auto (the default), cpu, gpu or mps"
    options.add_argument("--accelerator", default="auto", help=device)
    return options


def fit(command: str) -> Options:
    """Make the help of `fewshot fit`, `validate` and `test`; their words are read by Lightning's command line."""
    options = Options(
        command,
        "Train or evaluate a network from configuration files and options; what comes later overrules what came before. "
        "Every argument of the Trainer, the model and the data is an option.",
    )
    names = ", ".join(sorted(configurations()))
    options.add_argument("-c", "--config", metavar="FILE", help=f"a YAML file, or one of these: {names}")
    options.add_argument("--model.NAME", metavar="VALUE", help="of ProtoNet, such as --model.head dr; or --model CLASS")
    options.add_argument("--data.NAME", metavar="VALUE", help="such as --data.train.ways 5; or --data CLASS")
    options.add_argument("--trainer.NAME", metavar="VALUE", help="of Lightning's Trainer: --trainer.max_epochs 20")
    options.add_argument("--trainer.callbacks+", metavar="CLASS", help="add a callback; its settings follow")
    listed = (
        "list the settings of a data module, and exit; for a data set: --data FewShotDataModule --data.dataset.help"
    )
    options.add_argument("--data.help", metavar="CLASS", help=listed)
    checkpoint = "weights to go on from, or to evaluate: such as runs/version_0/checkpoints/best.ckpt"
    options.add_argument("--ckpt_path", metavar="FILE", help=checkpoint)
    options.add_argument("--print_config", action="store_true", help="show all settings as YAML, and exit")
    options.add_argument("--help=full", action="store_true", help="list all options, as Lightning does, and exit")
    return options


def configurations() -> dict[str, Path]:
    """Find the configurations of the package by their names."""
    return {file.stem: file for place in CONFIGURATIONS for file in sorted(place.rglob("*.yaml"))}


PARSERS = {make.__name__: make for make in (evaluate, report, trials, plan, compare, demo)}


def parse(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Read the words of a command.

    Raises:
        SystemExit: They ask for help, or cannot be understood.
    """
    options = PARSERS[command]()
    for word in words:  # argparse would name what is missing instead of the word that was mistyped
        if word.startswith("--") and word.partition("=")[0] not in options._option_string_actions:
            options.error(f"unrecognized arguments: {word}")
    return options.parse_args(list(words))
