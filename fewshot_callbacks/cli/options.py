"""The options of each command, as dataclasses: their types, defaults and meanings. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

import fewshot_callbacks
from fewshot_callbacks.settings import ReportDefaults, RetrievalDefaults, Similarity


@dataclass(frozen=True)
class Columns:
    """The names of the arrays or columns of one set; None for the usual name.

    Args:
        embeddings: Array or column of the vectors of one set. By default embeddings; in files other than one .npz also the
            only one with two axes.
        labels: Array or column of the label of each row, by default labels; or a .npy file of all rows, as for the next
            three.
        ids: Array or column of the identity of each row, by default ids where there is one.
        groups: Array or column of the group of each row, by default groups where there is one.
        is_gallery: Array or column that says whether a row belongs to the gallery, and is no query; by default is_gallery.
            Where there is none, each row is both.
    """

    embeddings: str | None = None
    labels: str | None = None
    ids: str | None = None
    groups: str | None = None
    is_gallery: str | None = None

    def passed(self) -> dict[str, str]:
        """Return option -> the name, where one is passed."""
        return {name: column for name, column in asdict(self).items() if column is not None}


COLUMNS = tuple(field.name for field in fields(Columns))


@dataclass(frozen=True)
class Evaluate:
    """Compute exact retrieval metrics of embeddings.

    Two examples:

        fewshot evaluate embeddings.npz --metrics mAP recall@1
        fewshot evaluate new.npz --against old.npz

    A file holds one set of items, or two. These are the names of its arrays or columns:

        one set      two sets in one .npz file      meaning
        embeddings   queries        gallery         vectors, (items, dim)
        labels       query_labels   gallery_labels  (items,) or (items, labels)
        ids          query_ids      gallery_ids     identities
        groups       query_groups   gallery_groups  no pair within a group counts
        paths        query_paths    gallery_paths   image files, for a report
        is_gallery                                  true: gallery; false: query

    Vectors and labels are needed. With one set each item is a query against all others, unless is_gallery says which items
    are which. The first item of each id is counted, and no query is compared with itself, by its id, or with an item of
    its group. Labels of several for each item are zeros and ones. label_names are the names of the labels 0, 1, 2, ... in
    a report.

    The metric J, the discriminant ratio of all rows, is computed where it is named beside one of the others.

    Args:
        file: An .npz file, as numpy.savez writes it; or files of one set that are read piece by piece and may be larger
            than memory: .npy, .npz, .parquet, .arrow, .feather or .safetensors, a folder of these, or a glob in quotes.
            Addresses such as s3://bucket/*.parquet are copied once to the folder that FEWSHOT_CALLBACKS_CACHE names, or
            else to the cache folder of the user.
        against: Embeddings of the same items in the same order, for instance by another model, or a report of them that
            --save has written: shows which differences are significant.
        dims: Numbers of dimensions, such as 64 256: shows what embeddings lose that are truncated to their first dimensions,
            in the first of the metrics, and in recall@1 if it is one of them.
        codes: int8, binary or both: the same for embeddings that are stored in a byte or a bit for each dimension, and for
            truncated ones.
        judgements: Judgements of relevance (qrels), in place of labels: a file with the four columns of TREC, or with
            query, item and grade, as BEIR has them, with or without a heading. The ids are those of ids, or of query_ids
            and gallery_ids.
        unknown: What to do with judgements of ids that no row has: error, the default, or ignore, by which a relevant item
            that is not in the gallery counts as never found.
        at_least: The smallest relevant grade of judgements, by default 1; -l of trec_eval.
        resume: A new or empty folder where the state of the evaluation is written about every minute, so that the same
            command goes on from there after a kill; the state is removed at the end.
        slices: Arrays or columns with an attribute of each row, such as camera: shows the first metric for the queries of
            each camera, the worst first.
        require: What must hold, such as 'mAP >= 0.70', 'worst(camera) recall@1.high >= 0.6' or, with --against,
            'gain(mAP).low >= 0'; may be passed several times. The exit status is 3 if one does not hold, with a line for
            each that does not.
        train: Embeddings of the training set by the same model: shows how many queries have a copy there, by their score or
            by ids, and what each metric is without them.
        duplicates_from: Lowest cosine of a copy, by default 0.98; for binary codes the lowest share of equal bits.
        save: A file, such as june.report.npz, or an address, where the report is kept for 'fewshot compare'; a file of this
            name is replaced.
        json: Print the report as JSON.
        per_class: Print the means of each class, too.
    """

    file: Path
    columns: Columns = Columns()
    against: Path | None = None
    dims: Sequence[str] | None = None
    codes: Sequence[str] | None = None
    judgements: Path | None = None
    unknown: Literal["error", "ignore"] | None = None
    at_least: float | None = None
    resume: Path | None = None
    slices: Sequence[str] | None = None
    require: Sequence[str] | None = None
    train: Path | None = None
    duplicates_from: float | None = None
    save: Path | None = None
    json: bool = False
    per_class: bool = False
    # Tables name their intervals by 95 %.
    settings: RetrievalDefaults = field(default=RetrievalDefaults(), metadata={"hides": {"confidence"}})


@dataclass(frozen=True)
class Nearest:
    """Find the exact k nearest neighbours of embeddings in files, such as the ground truth of a search index.

    Two examples:

        fewshot nearest 'embeddings/*.parquet' -k 100 -o truth.parquet
        fewshot nearest queries.npy --gallery gallery.npy -k 100 --queries 10000 -o truth.parquet

    Files and the names of their arrays are those of 'fewshot evaluate'; labels are not needed. Scores are exact. A .parquet
    file has a row for each query: query is its row, indices are the rows of its neighbours, the closest first, and scores
    their similarities in float64. tied marks neighbours whose score another candidate has, too, and unlisted_ties counts
    those that are not listed. If the files have ids, query_id and ids are the same neighbours by their ids.

    Args:
        file: The queries: a file, a folder, a glob in quotes or an address. Without --gallery, they are also searched.
        output: The file to write; a file of this name is replaced. Its ending is the format: .parquet, .ivecs (only rows, as
            int32) or .fvecs (only scores, as float32).
        gallery: Files of the items that are searched, where they are not in the file of the queries.
        k: Number of neighbours of each query.
        queries: Number of queries that are drawn; by default all.
        seed: Seed by which they are drawn.
        similarity: How embeddings are compared.
        memory_mb: Memory budget beyond the embeddings that stay in memory, in MB; by default 512.
        resume: A new or empty folder where the state of the search is written about every minute, so that the same command
            goes on from there after a kill; the state is removed at the end.
    """

    file: Path
    output: Path | None = None
    columns: Columns = Columns()
    gallery: Path | None = None
    k: int = 10
    queries: int | None = None
    seed: int = 0
    similarity: Similarity = "cosine"
    memory_mb: float | None = None
    resume: Path | None = None


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML file about embeddings.

    It shows metrics with intervals, an adjustable threshold, the weakest classes, the worst queries with the items
    retrieved for them, items that may be mislabelled, and near duplicates. It opens in any browser.

    The .npz file holds embeddings and labels, and perhaps paths, ids, groups and label_names; or the arrays of queries and
    of a gallery. 'fewshot evaluate --help' has the table of all names.

    Args:
        file: An .npz file, as numpy.savez writes it.
        output: The HTML file to write; a file of this name is replaced. By default report.html, which replaces an earlier
            report; where something else has that name, report-2.html and so on.
        title: Title of the page.
        images: Folder of the images of the items. With paths in the file, these are relative to this folder (by
            default to the folder of the file). Otherwise its images are taken in the order of torchvision's ImageFolder:
            folders sorted by name, files sorted in each; without folders, files sorted by name.
        gallery_images: The same as --images for the gallery.
        against: Embeddings of the same items in the same order, for instance by another model: shows which differences
            are significant.
        train: Embeddings of another split by the same model, such as the training set: finds near duplicates of both, and
            what the first metric is without the queries that have one.
        train_images: The same as --images for that split.
        slices: Arrays with an attribute of each row, such as camera: shows the first metric for the queries of each camera,
            the worst first.
    """

    file: Path
    output: Path | None = None
    title: str = "Retrieval report"
    images: Path | None = None
    gallery_images: Path | None = None
    against: Path | None = None
    train: Path | None = None
    train_images: Path | None = None
    slices: Sequence[str] | None = None
    # The searches of a report have the `memory_mb` of its evaluation.
    report: ReportDefaults = field(default=ReportDefaults(), metadata={"hides": {"memory_mb"}})
    # A report shows single queries.
    settings: RetrievalDefaults = field(default=RetrievalDefaults(), metadata={"hides": {"confidence", "max_queries"}})


@dataclass(frozen=True)
class Trials:
    """Evaluate verification on pairs that someone listed.

    It computes EER, minDCF, TAR at false match rates, and accuracy over folds. The list is LFW's pairs.txt or one of
    VoxCeleb's, with --embeddings, or a table with commas between the columns score and same (1 or 0), and first, second
    and fold if they are known.

    Args:
        file: The list of trials.
        embeddings: An .npz file with the arrays embeddings and ids, the name of each item as the list has it.
        similarity: How embeddings are compared.
        metrics: The keys of the metrics. There are eer, min_dcf@{p}, tar@far{p}, pair_auroc, accuracy and cllr. By
            default eer, min_dcf@0.01, tar@far0.01, tar@far0.001, and accuracy where there are folds.
        slices: Attributes, such as age: shows how often trials of each age are wrongly rejected and accepted at the
            threshold of the first metric. A table of scores has the columns first_age and second_age, or only age; the file
            of --embeddings has an array age.
        miss_cost: Cost of a rejected target trial, for min_dcf.
        false_match_cost: Cost of an accepted non-target trial, for min_dcf.
        figures: Folder where det.png and scores.png are written; figures of this command are replaced, other files of
            these names refused.
        report: HTML file to write, with figures and the worst mistakes; a file of this name is replaced.
        json: Print the report as JSON.
    """

    file: Path
    embeddings: Path | None = None
    similarity: Similarity = "cosine"
    metrics: Sequence[str] | None = None
    slices: Sequence[str] | None = None
    miss_cost: float = 1.0
    false_match_cost: float = 1.0
    figures: Path | None = None
    report: Path | None = None
    json: bool = False


@dataclass(frozen=True)
class Plan:
    """Compute pairs, operations, memory and tiles of an exact evaluation before it is started.

    Args:
        queries: Number of queries, such as 158652 or 1e6.
        files: Files of all items, a folder, or a glob in quotes, as fewshot evaluate reads them: their number and dimension
            are found there, reading is timed.
        embeddings: Array or column of the vectors in these files. By default embeddings, or the only one with two axes.
        gallery: Number of gallery items; by default that of the queries, which are then also the gallery.
        dim: Number of components of an embedding.
        memory_mb: Memory budget beyond the embeddings, in MB; inf sets no limit.
        max_queries: Queries that are drawn for an estimate; by default all.
        dtype: Number format of the embeddings.
        here: Measure how long the evaluation will take on this machine, with all default metrics: for about ten seconds,
            smaller sets are evaluated. With --files they are drawn from the files, which need labels; reading is included
            unless they are one .npz file.
        labels: Array or column of the label of each row in these files, for --here; by default labels.
        difficulty: How well embeddings are generated for --here without files: well-trained or hard; by default both, so
            that the range covers them.
        json: Print the numbers as JSON.
    """

    queries: int | None = None
    files: str | None = None
    embeddings: str | None = None
    gallery: int | None = None
    dim: int | None = None
    memory_mb: float | None = 512
    max_queries: int | None = None
    dtype: str = "float32"
    here: bool = False
    labels: str | None = None
    difficulty: Literal["well-trained", "hard"] | None = None
    json: bool = False


@dataclass(frozen=True)
class Compare:
    """Compare two runs of 'fewshot fit', or two or more saved reports.

    Two examples:

        fewshot compare runs/version_0 runs/version_1
        fewshot compare june.report.npz july.report.npz august.report.npz --metric mAP

    It tests the best checkpoints of two runs on the same episodes, and compares how their optimiser steps moved the
    embeddings (TrainingDynamicsMonitor), with the tests of the distance-ratio paper.

    'fewshot evaluate FILE --save REPORT' writes a report, and report.save in Python. Reports of the same queries are
    compared query by query: two with a table of differences, three or more with a ranking by a metric.

    Args:
        run: Folder of a run, such as runs/version_0 or s3://bucket/run, or its training_dynamics.json; or a saved report.
        other_run: The same of the run, or the report, to compare with.
        others: Further saved reports.
        names: A name for each run or report in the tables; by default the heads of runs and the names of files.
        metric: Rank reports by this metric; by default mAP if there are three or more.
        difference: Print how many classes a test set needs until a difference of this size in --metric shows, by default in
            mAP; estimated from two reports.
        test: Test both checkpoints; false compares only the steps.
        json: Print the comparison as JSON.
    """

    run: Path
    other_run: Path
    others: Sequence[Path] = field(default=(), metadata={"positional": True})
    names: Sequence[str] | None = None
    metric: str | None = None
    difference: float | None = None
    test: bool = True
    json: bool = False


@dataclass(frozen=True)
class Demo:
    """Train three networks on characters drawn in many typefaces, and compare them on unseen classes.

    Two are prototypical networks (softmax head, distance-ratio head), and one has average precision as its loss. They
    are compared with random weights. The demo writes curves, logs and checkpoints.

    Args:
        output: Folder to write; an earlier demo is replaced.
        epochs: Training epochs of each network.
        episodes: Training episodes, or batches, in an epoch.
        test_episodes: Episodes of the comparison.
        seed: Seed of weights, episodes and augmentation.
        accelerator: Device to train on, as Lightning's Trainer names it: auto, cpu, gpu or mps.
    """

    output: Path = Path("demo")
    epochs: int = 4
    episodes: int = 40
    test_episodes: int = 600
    seed: int = 0
    accelerator: str = "auto"


@dataclass(frozen=True)
class SearchQualityOptions:
    """Compare what an approximate index has found with exact search.

    Two examples:

        fewshot search-quality found.npy queries.npz --gallery gallery.npz
        fewshot search-quality found.ivecs queries.npy --gallery gallery.npy -k 10 100 --require 'search_recall@10 >= 0.95'

    The index may be of any library. It shows recall@k, in which ties count as found, and the values that 5 % and 1 % of the
    queries do not exceed. Where queries and gallery have labels, it shows what the index costs in recall@1 and mAP@k.

    Args:
        found: What the index returned, a row for each query: a .npy file of indices of gallery items; an .npz or .parquet
            file with the array or column found, indices, or only one with two axes; or .ivecs. -1 is an item that was not
            found. If the gallery has ids, these are ids, too.
        queries: Embeddings of the queries, or of queries and gallery, as fewshot evaluate reads them. Labels are not needed.
        gallery: Embeddings of the gallery. By default the queries are searched among themselves, unless their file has a
            gallery.
        k: How many of the nearest items count, such as 10 100; by default as many as the index returned.
        within: Tolerance of the column 'within', relative to the score of the k-th nearest item.
        stored: The rows of the gallery as the index has stored them, such as decoded codes: divides the loss into a part of
            the codes and a part of the graph or lists.
        stored_queries: The queries as the index compares them, if it encodes them, too.
        similarity: What the index searches by.
        memory_mb: Memory budget beyond the embeddings, in MB.
        require: What must hold, such as 'search_recall@10 >= 0.95' or 'search_recall@10.low >= 0.95'; may be passed several
            times. The exit status is 3 if one does not hold, with a line for each that does not.
        json: Print the values as JSON.
    """

    found: Path
    queries: Path
    columns: Columns = Columns()
    gallery: Path | None = None
    k: Sequence[int] | None = None
    within: float = 0.01
    stored: Path | None = None
    stored_queries: Path | None = None
    similarity: Similarity = "cosine"
    memory_mb: float = 512
    require: Sequence[str] | None = None
    json: bool = False


@dataclass(frozen=True)
class Warm:
    """Compile the loops of this package now, which a first evaluation on a machine would compile.

    They are kept on the disk, in the folder that NUMBA_CACHE_DIR names, or else beside the installed package, or in the
    cache of the user. A second call compiles nothing. The loops belong to the kind of processor that compiles them.

    Args:
        float64: Compile the loops of embeddings in float64, too, which take as long again.
    """

    float64: bool = False


OPTIONS: dict[str, type] = {
    "evaluate": Evaluate,
    "nearest": Nearest,
    "report": Report,
    "trials": Trials,
    "plan": Plan,
    "compare": Compare,
    "search-quality": SearchQualityOptions,
    "demo": Demo,
    "warm": Warm,
}
"""Command -> the class of its own options."""


def options_of(owner: type) -> Iterator[tuple[type, Field[Any], Any]]:
    """Yield the class, the field and the type of each option; a field with a class means the options of that class."""
    types = get_type_hints(owner)
    for entry in fields(owner):
        kind = types[entry.name]
        if isinstance(kind, type) and is_dataclass(kind):
            hidden = entry.metadata.get("hides", ())
            yield from (option for option in options_of(kind) if option[1].name not in hidden)
        else:
            yield owner, entry, kind


def metric_keys(words: Iterable[str]) -> tuple[str, ...]:
    """Return the keys in the words of `--metrics`, with spaces or commas between them, and perhaps in brackets.

    Examples:
        >>> metric_keys(["mAP,recall@1", "[eer, 'mrr']"])
        ('mAP', 'recall@1', 'eer', 'mrr')
    """
    return tuple(key for word in words for key in re.findall(r"[^\s,'\"()\[\]]+", word))


# A keyword argument in a message, also alone in brackets, but not inside a call or as part of a longer name.
_KEYWORD = re.compile(r"(?<![^\s(])(?<!\S\()(?<!, )([a-z_]+)=('[^']*'|\([^()]*\)|[\w@.+-]*\w)?")

_SAME_OPTION_TWICE = re.compile(r"(--\w+) (?:and|or) \1\b")


def in_shell(text: str, command: str) -> str:
    """Return a message of a function in the words of a shell: `k=5` becomes `--k 5`, if the command has `--k`.

    Examples:
        >>> in_shell("evaluate_retrieval: similarity='dott' is unknown.", "evaluate")
        '--similarity dott is unknown.'
        >>> in_shell("Pass labels= with one of these.", "evaluate")
        'Pass --labels with one of these.'
        >>> in_shell("Pass query_ids= and gallery_ids=.", "evaluate")
        'Pass --ids.'
        >>> in_shell("Some rows are left out (unknown='ignore').", "evaluate")
        'Some rows are left out (--unknown ignore).'
        >>> in_shell("Write it with numpy.savez(path, labels=...).", "evaluate")
        'Write it with numpy.savez(path, labels=...).'
    """
    option_of = _option_of_training if command not in OPTIONS else partial(_option_of_command, command)
    caller, colon, rest = text.partition(": ")
    if colon and caller in fewshot_callbacks.__all__:
        text = rest

    def in_words(match: re.Match[str]) -> str:
        option = option_of(match[1])
        if not option:
            return match[0]
        words = re.findall(r"[^\s'(),]+", match[2] or "")
        return " ".join([option, *("none" if word == "None" else word for word in words)])

    return _SAME_OPTION_TWICE.sub(r"\1", _KEYWORD.sub(in_words, text))


def _option_of_command(command: str, argument: str) -> str:
    """Return the option of a command that sets an argument; empty if no option does."""
    # A column has labels, ids or groups of all rows, which may be queries and gallery items.
    name = re.sub("^(query|gallery)_", "", argument)
    return f"--{name}" if name in {field.name for _, field, _ in options_of(OPTIONS[command])} else ""


def _option_of_training(argument: str) -> str:
    """Return the option of `fewshot fit` and its like that sets an argument; empty if no option does."""
    from fewshot_callbacks.cli.fit_mistakes import option_of_training  # noqa: PLC0415 - other commands need no Lightning

    return option_of_training(argument)
