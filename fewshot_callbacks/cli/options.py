"""The options of each command as dataclasses, with their types, defaults and meanings. This module does not import torch."""

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
        embeddings: Array or column with the vectors, by default embeddings. Except in a single .npz file, the default is
            also the only array with two axes, whatever its name.
        labels: Array or column with the label of each row, by default labels. You can also pass a .npy file that covers all
            rows; the same is true of --ids, --groups and --is_gallery.
        ids: Array or column with the identity of each row, by default ids if it exists.
        groups: Array or column with the group of each row, by default groups if it exists.
        is_gallery: Array or column that is true for gallery items and false for queries, by default is_gallery. Without it,
            each row is both a query and a gallery item.
    """

    embeddings: str | None = None
    labels: str | None = None
    ids: str | None = None
    groups: str | None = None
    is_gallery: str | None = None

    def passed(self) -> dict[str, str]:
        """Return option -> name, for the options that are passed."""
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

    Vectors and labels are required. In one set, each item is a query against all other items, unless is_gallery separates
    queries from gallery items. Only the first item of each id counts. A query is never compared with its own id or with an
    item of its group. Several labels per item are a matrix of zeros and ones. label_names contains the names of labels 0,
    1, 2, ... for a report.

    To get the metric J, the discriminant ratio of all rows, name it together with at least one other metric.

    Args:
        file: An .npz file, as numpy.savez writes it; or files with one set that are read piece by piece and may be larger
            than memory: .npy, .npz, .parquet, .arrow, .feather or .safetensors, a folder of such files, or a glob in quotes.
            Addresses such as s3://bucket/*.parquet are copied once, to the folder in FEWSHOT_CALLBACKS_CACHE or else to
            your cache folder.
        against: Embeddings of the same items in the same order, for example from another model, or a report that --save
            has written. Shows which differences are significant.
        dims: Numbers of dimensions, such as 64 256. Shows what embeddings lose when they are truncated to their first
            dimensions, in the first metric and, if requested, in recall@1.
        codes: int8, binary or both. Shows what embeddings lose with one byte or one bit per dimension, also when they are
            truncated.
        judgements: Relevance judgements (qrels) instead of labels: a file with the four columns of TREC, or with query, item
            and grade as in BEIR, with or without a header. Its ids refer to ids, or to query_ids and gallery_ids.
        unknown: How to treat judgements with ids that no row has. error, the default, stops. ignore counts a relevant item
            that is missing from the gallery as never retrieved.
        at_least: The smallest grade that counts as relevant, by default 1; -l in trec_eval.
        resume: A new or empty folder. The state of the evaluation is written there about every minute, and the same command
            resumes from it after a kill. The state is removed at the end.
        slices: Arrays or columns with an attribute of each row, such as camera. Shows the first metric for the queries of
            each camera, the worst first.
        require: A requirement, such as 'mAP >= 0.70', 'worst(camera) recall@1.high >= 0.6' or, with --against,
            'gain(mAP).low >= 0'. You can pass it several times. If a requirement is not met, the exit status is 3, and each
            failure is printed on its own line.
        train: Embeddings of the training set from the same model. Shows how many queries have a copy there, by score or by
            id, and each metric without these queries.
        duplicates_from: Lowest cosine of a copy, by default 0.98; for binary codes, the lowest fraction of equal bits.
        save: File or address where the report is saved for 'fewshot compare', such as june.report.npz. An existing file is
            replaced.
        json: Print the report as JSON.
        per_class: Also print the mean of each class.
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
    # The headings of the tables contain 95 %.
    settings: RetrievalDefaults = field(default=RetrievalDefaults(), metadata={"hides": {"confidence"}})


@dataclass(frozen=True)
class Nearest:
    """Find the exact k nearest neighbours of embeddings in files, such as the ground truth of a search index.

    Two examples:

        fewshot nearest 'embeddings/*.parquet' -k 100 -o truth.parquet
        fewshot nearest queries.npy --gallery gallery.npy -k 100 --queries 10000 -o truth.parquet

    The command reads the same files and array names as 'fewshot evaluate', but needs no labels. Scores are exact. A
    .parquet file has one row per query. The column query contains the row of the query, indices the rows of its neighbours,
    closest first, and scores their similarities in float64. tied marks neighbours that share their score with another
    candidate, and unlisted_ties counts the candidates with the last score that are not listed. If the files have ids,
    query_id and ids contain the ids of the query and its neighbours.

    Args:
        file: The queries: a file, a folder, a glob in quotes or an address. Without --gallery, the same items are searched.
        output: The file to write; an existing file is replaced. Its extension sets the format: .parquet, .ivecs (only rows,
            int32) or .fvecs (only scores, float32).
        gallery: Files with the items to search, if they are not in the file of the queries.
        k: Number of neighbours per query.
        queries: Number of queries to draw at random; by default all.
        seed: Seed for drawing queries.
        similarity: How embeddings are compared.
        memory_mb: Memory budget in MB, in addition to the embeddings that are kept in memory; by default 512.
        resume: A new or empty folder. The state of the search is written there about every minute, and the same command
            resumes from it after a kill. The state is removed at the end.
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

    The file shows metrics with intervals, an adjustable threshold, the weakest classes, the worst queries with the items
    retrieved for them, items that may be mislabelled, and near duplicates. You can open it in any browser.

    The .npz file contains embeddings and labels, and optionally paths, ids, groups and label_names; or the arrays of queries
    and a gallery. 'fewshot evaluate --help' lists all names.

    Args:
        file: An .npz file, as numpy.savez writes it.
        output: The HTML file to write; an existing file is replaced. By default report.html, if that does not exist or is an
            earlier report, and otherwise report-2.html and so on.
        title: Title of the page.
        images: Folder with the images of the items. If the file contains paths, they are relative to this folder, or
            without --images to the folder of the file. If it contains no paths, the images are read in the order of
            torchvision's ImageFolder: subfolders sorted by name, then files sorted by name.
        gallery_images: Folder with the images of the gallery, as for --images.
        against: Embeddings of the same items in the same order, for example from another model. Shows which differences
            are significant.
        train: Embeddings of another split from the same model, such as the training set. Finds near duplicates between both
            splits, and shows the first metric without the queries that have one.
        train_images: Folder with the images of that split, as for --images.
        slices: Arrays with an attribute of each row, such as camera. Shows the first metric for the queries of each camera,
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
    # The searches of a report use the `memory_mb` of its evaluation.
    report: ReportDefaults = field(default=ReportDefaults(), metadata={"hides": {"memory_mb"}})
    # A report shows individual queries.
    settings: RetrievalDefaults = field(default=RetrievalDefaults(), metadata={"hides": {"confidence", "max_queries"}})


@dataclass(frozen=True)
class Trials:
    """Evaluate verification on a list of pairs.

    It computes EER, minDCF, TAR at false match rates, and accuracy over folds. The list is LFW's pairs.txt or a VoxCeleb
    list, together with --embeddings. It can also be a comma-separated table with the columns score and same (1 or 0), and
    optionally first, second and fold.

    Args:
        file: The list of trials.
        embeddings: An .npz file with the arrays embeddings and ids. ids contains the name of each item as it is in the list.
        similarity: How embeddings are compared.
        metrics: Keys of the metrics: eer, min_dcf@{p}, tar@far{p}, pair_auroc, accuracy or cllr. By default eer,
            min_dcf@0.01, tar@far0.01, tar@far0.001 and, if there are folds, accuracy.
        slices: Attributes, such as age. Shows how often trials of each age are wrongly rejected and accepted at the
            threshold of the first metric. A table of scores needs the columns first_age and second_age, or only age; the
            --embeddings file needs an array age.
        miss_cost: Cost of a rejected target trial, for min_dcf.
        false_match_cost: Cost of an accepted non-target trial, for min_dcf.
        figures: Folder where det.png and scores.png are written. Earlier figures of this command are replaced; other files
            with these names are an error.
        report: HTML file to write, with figures and the worst mistakes; an existing file is replaced.
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
    """Predict the pairs, operations, memory and tiles of an exact evaluation before you start it.

    Args:
        queries: Number of queries, such as 158652 or 1e6.
        files: Files with all items, a folder, or a glob in quotes, as for fewshot evaluate. The number of items and their
            dimension are read from the files, and reading is timed.
        embeddings: Array or column with the vectors in these files, by default embeddings or the only one with two axes.
        gallery: Number of gallery items. By default the queries are also the gallery.
        dim: Number of dimensions of an embedding.
        memory_mb: Memory budget in MB, in addition to the embeddings; inf means no limit.
        max_queries: Number of queries to draw for an estimate; by default all.
        dtype: Number format of the embeddings.
        here: Measure how long the evaluation takes on this machine, with all default metrics. For about ten seconds, smaller
            sets are evaluated. With --files they are drawn from the files, which need labels, and reading is included
            unless the files are a single .npz file.
        labels: Array or column with the label of each row in these files, for --here; by default labels.
        difficulty: Embeddings to generate for --here without files: well-trained or hard. By default both, and the predicted
            range covers both.
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

    For two runs, the command tests both best checkpoints on the same episodes. It also compares how the optimiser steps
    moved the embeddings (TrainingDynamicsMonitor), with the statistical tests of the distance-ratio paper.

    To save a report, run 'fewshot evaluate FILE --save REPORT', or call report.save in Python. Reports on the same queries
    are compared query by query. Two reports give a table of differences; three or more are ranked by a metric.

    Args:
        run: Folder of a run, such as runs/version_0 or s3://bucket/run, or its training_dynamics.json; or a saved report.
        other_run: The run or report to compare with.
        others: Further saved reports.
        names: A name for each run or report in the tables; by default the heads of the runs, or the names of the files.
        metric: Rank the reports by this metric; by default mAP if there are three or more.
        difference: Estimate from two reports how many classes a test set needs to detect a difference of this size in
            --metric, by default in mAP.
        test: Test both checkpoints; with false, only the steps are compared.
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

    Two are prototypical networks (softmax head and distance-ratio head). The third is trained with average precision as its
    loss. All are compared with random weights. The demo writes curves, logs and checkpoints.

    Args:
        output: Folder to write; an earlier demo is replaced.
        epochs: Training epochs per network.
        episodes: Training episodes, or batches, per epoch.
        test_episodes: Number of test episodes.
        seed: Seed for weights, episodes and augmentation.
        accelerator: Accelerator for Lightning's Trainer: auto, cpu, gpu or mps.
    """

    output: Path = Path("demo")
    epochs: int = 4
    episodes: int = 40
    test_episodes: int = 600
    seed: int = 0
    accelerator: str = "auto"


@dataclass(frozen=True)
class SearchQualityOptions:
    """Compare the results of an approximate index with exact search.

    Two examples:

        fewshot search-quality found.npy queries.npz --gallery gallery.npz
        fewshot search-quality found.ivecs queries.npy --gallery gallery.npy -k 10 100 --require 'search_recall@10 >= 0.95'

    The index can come from any library. The command shows recall@k, where ties count as found, and its 5th and 1st
    percentile over the queries. If queries and gallery have labels, it also shows the loss of recall@1 and mAP@k.

    Args:
        found: The results of the index, one row per query: a .npy file with indices of gallery items; an .npz or .parquet
            file with an array or column named found or indices, or with only one array with two axes; or an .ivecs file.
            -1 marks an item that was not found. If the gallery has ids, pass ids instead of indices.
        queries: Embeddings of the queries, or of queries and gallery, as for fewshot evaluate. Labels are optional.
        gallery: Embeddings of the gallery. By default the gallery in the file of the queries, or else the queries.
        k: How many nearest items count, such as 10 100; by default as many as the index returned.
        within: Tolerance of the column 'within', relative to the score of the k-th nearest item.
        stored: Gallery vectors as the index stores them, such as decoded codes. Splits the loss into a part from the codes
            and a part from the graph or lists.
        stored_queries: Query vectors as the index compares them, if it also encodes queries.
        similarity: The similarity that the index uses.
        memory_mb: Memory budget in MB, in addition to the embeddings.
        require: A requirement, such as 'search_recall@10 >= 0.95' or 'search_recall@10.low >= 0.95'. You can pass it several
            times. If a requirement is not met, the exit status is 3, and each failure is printed on its own line.
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
    """Compile the kernels now that the first evaluation on this machine would otherwise compile.

    They are cached on disk: in the folder in NUMBA_CACHE_DIR, or else next to the installed package, or in your cache
    folder. A second call compiles nothing. A different processor model needs its own cache.

    Args:
        float64: Also compile the kernels for float64 embeddings, which takes twice as long.
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
"""Command -> the class of its options."""


def options_of(owner: type) -> Iterator[tuple[type, Field[Any], Any]]:
    """Yield the class, the field and the type of each option. A field that is a dataclass stands for its options."""
    types = get_type_hints(owner)
    for entry in fields(owner):
        kind = types[entry.name]
        if isinstance(kind, type) and is_dataclass(kind):
            hidden = entry.metadata.get("hides", ())
            yield from (option for option in options_of(kind) if option[1].name not in hidden)
        else:
            yield owner, entry, kind


def metric_keys(words: Iterable[str]) -> tuple[str, ...]:
    """Return the keys in the words of `--metrics`, which may be separated by spaces or commas, or be in brackets.

    Examples:
        >>> metric_keys(["mAP,recall@1", "[eer, 'mrr']"])
        ('mAP', 'recall@1', 'eer', 'mrr')
    """
    return tuple(key for word in words for key in re.findall(r"[^\s,'\"()\[\]]+", word))


# A keyword argument in a message, also the only one in brackets, but not inside a call or as part of a longer name.
_KEYWORD = re.compile(r"(?<![^\s(])(?<!\S\()(?<!, )([a-z_]+)=('[^']*'|\([^()]*\)|[\w@.+-]*\w)?")

_SAME_OPTION_TWICE = re.compile(r"(--\w+) (?:and|or) \1\b")


def in_shell(text: str, command: str) -> str:
    """Return the message of a function with options instead of arguments: `--k 5` for `k=5`, if the command has `--k`.

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
    # One column contains the labels, ids or groups of queries and gallery items.
    name = re.sub("^(query|gallery)_", "", argument)
    return f"--{name}" if name in {field.name for _, field, _ in options_of(OPTIONS[command])} else ""


def _option_of_training(argument: str) -> str:
    """Return the option of `fewshot fit`, `validate` or `test` that sets an argument; empty if no option does."""
    from fewshot_callbacks.cli.fit_mistakes import option_of_training  # noqa: PLC0415 - other commands need no Lightning

    return option_of_training(argument)
