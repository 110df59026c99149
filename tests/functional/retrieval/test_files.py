"""Embeddings in files, and in small types, that are read piece by piece: the report of memory, bit for bit."""

import os
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from fewshot_callbacks import Shards
from fewshot_callbacks.functional import Relevance, Share, evaluate_retrieval, grouped_recall
from tests.integration_packages import integration
from tests.messages import missing_facts, refused
from tests.reports import assert_same
from tests.thread_processes import in_threads

ITEMS, DIM = 300, 24
METRICS = (
    "mAP",
    "recall@1",
    "ndcg@10",
    "pair_f1",
    "recall@precision0.9",
    "eer",
    "grouped_recall@1",
    "prototype_accuracy",
)
LABELS = torch.randint(0, 40, (ITEMS,), generator=torch.Generator().manual_seed(0))
TINY = 0.025
"""Megabytes of which a quarter holds no more than half of the vectors, so that most of them are read."""


def vectors(dtype):
    made = torch.randn(ITEMS, DIM, generator=torch.Generator().manual_seed(1))
    return (10 * (made + 2 * torch.nn.functional.one_hot(LABELS % DIM, DIM))).numpy().astype(dtype)


def in_files(folder, values, **columns):
    for part in range(3):
        some = slice(100 * part, 100 * (part + 1))
        columns_of_part = {name: rows[some] for name, rows in columns.items()}
        np.savez(folder / f"{part}.npz", embeddings=values[some], **columns_of_part)
    return Shards(folder, **{name: name for name in columns})


def quiet(*sets, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluate_retrieval(*sets, metrics=METRICS, **options)


def quiet_of(rows, **options):
    return evaluate_retrieval(rows, metrics=("mAP", "recall@1"), **options)


def computable(values):
    return torch.from_numpy(values.astype(np.float64 if values.dtype == np.float64 else np.float32))


@pytest.mark.parametrize(
    ("dtype", "similarity"), [("float16", "cosine"), ("float32", "dot"), ("float64", "euclidean"), ("int8", "cosine")]
)
def test_files_give_the_report_of_memory(tmp_path, dtype, similarity):
    values = vectors(dtype)
    shards = in_files(tmp_path, values, labels=LABELS.numpy())
    for drawn in (None, 100):
        known = quiet(computable(values), LABELS, similarity=similarity, max_queries=drawn)
        for memory in (512, TINY):
            read = quiet(shards, similarity=similarity, max_queries=drawn, memory_mb=memory)
            assert_same(known, read)


def test_several_processes_read_their_own_files():
    values = vectors("float16")
    known = quiet(computable(values), LABELS)

    def work(process):
        mine = slice(process.rank, None, 3)
        places = torch.arange(ITEMS)[mine]
        share = Share(process, query_places=places, gallery_places=places)
        return quiet(_Rows(values[mine]), LABELS[mine], share=share, memory_mb=TINY)

    for report in in_threads(3, work):
        assert_same(known, report)


class _Rows:
    """The least that a source is."""

    def __init__(self, values):
        self._values, self.shape, self.dtype = values, values.shape, values.dtype
        self.most = 0

    def __getitem__(self, rows):
        self.most = max(self.most, rows.stop - rows.start)
        return self._values[rows]


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_rows_out_of_range_are_divided_as_in_memory(similarity):
    values = vectors("float64") * 1e200
    known = quiet(torch.from_numpy(values), LABELS, similarity=similarity)
    assert_same(known, quiet(_Rows(values), LABELS, similarity=similarity, memory_mb=TINY))


def test_mapped_files_are_sources(tmp_path):
    values = vectors("float16")
    known = quiet(computable(values), LABELS)
    np.save(tmp_path / "rows.npy", values.astype(np.float32))
    np.save(tmp_path / "columns.npy", np.asfortranarray(values, np.float32))
    mapped = np.load(tmp_path / "columns.npy", mmap_mode="r")
    for source in (Shards(tmp_path / "rows.npy"), mapped):
        assert_same(known, quiet(source, LABELS, memory_mb=TINY))


@pytest.mark.parametrize("memory", [512, TINY])
def test_data_sets_of_h5py_and_zarr_are_sources(tmp_path, memory):
    h5py, zarr = integration("h5py"), integration("zarr")
    values = vectors("float16")
    known = quiet(computable(values), LABELS)
    stored = zarr.create_array(str(tmp_path / "rows.zarr"), data=values)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        for source in (file.create_dataset("rows", data=values), stored):
            assert_same(known, quiet(source, LABELS, memory_mb=memory))


FULL = """
import numpy as np
from fewshot_callbacks import Shards
from fewshot_callbacks.functional import evaluate_retrieval
np.save("rows.npy", np.random.default_rng(0).normal(size=(3000, 24)).astype(np.float16))
try:
    evaluate_retrieval(Shards("rows.npy"), np.arange(3000) % 40, memory_mb=0.05)
except ValueError as error:
    print(error)
"""


def has_small_disks():
    """Whether a disk can be made that is full after some bytes: by a user of Linux, in most places."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return bool(shutil.which("unshare")) and subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(
    not has_small_disks(), reason="a small disk is made with unshare and mount, which this system refuses"
)
@pytest.mark.parametrize("size", ["100k", "280k"])
def test_a_copy_that_does_not_fit_on_the_disk_is_refused(tmp_path, size):
    script = f'mount -t tmpfs -o size={size} tmpfs "$0" && TMPDIR="$0" exec "$@"'
    small = tmp_path / "small"
    small.mkdir()
    command = ["unshare", "-rm", "sh", "-c", script, str(small), sys.executable, "-c", FULL]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, (done.returncode, done.stderr)  # a write to a mapped file ends the process by a signal
    facts = ("3,000", "24-dimensional vectors", small, "No space left on device", "0.3 MB", "TMPDIR", "max_queries")
    assert not missing_facts(done.stdout, facts), done.stdout


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_large_gallery_is_compared_in_small_pieces(dtype):
    queries, values = vectors(dtype)[:50], vectors(dtype)
    known, rows = quiet(queries, LABELS[:50], computable(values), LABELS), _Rows(values)
    for gallery in (torch.from_numpy(values), rows):
        assert_same(known, quiet(queries, LABELS[:50], gallery, LABELS, memory_mb=TINY))
    assert 0 < rows.most < ITEMS / 4


def test_labels_ids_groups_and_the_gallery_come_from_the_files(tmp_path):
    values, names = vectors("float16"), np.array([f"item {n // 2}" for n in range(ITEMS)])
    flags, cameras = np.arange(ITEMS) % 3 == 0, np.arange(ITEMS) % 7
    shards = in_files(tmp_path, values, labels=LABELS.numpy(), ids=names, groups=cameras, is_gallery=~flags)
    rows = computable(values)
    known = quiet(
        rows[flags], LABELS[flags], rows[~flags], LABELS[~flags],
        query_ids=names[flags].tolist(), gallery_ids=names[~flags].tolist(),
        query_groups=cameras[flags], gallery_groups=cameras[~flags],
    )  # fmt: skip
    for memory in (512, TINY):
        assert_same(known, quiet(shards, memory_mb=memory))


@pytest.mark.parametrize("memory", [512, TINY])
def test_ids_in_the_files_of_one_side_count_each_item_once_and_exclude_nobody(tmp_path, memory):
    values = vectors("float32")
    repeated = np.concatenate([values, values[100:140]])
    ids, labels = np.arange(ITEMS + 40), torch.cat([LABELS, LABELS[100:140]]).numpy()
    ids[ITEMS:] -= ITEMS - 100
    shards = in_files(tmp_path, repeated, labels=labels, ids=ids)
    known = quiet(values[:50], LABELS[:50], values, LABELS)
    assert quiet(values[:50], LABELS[:50], shards, memory_mb=memory).values == known.values
    known = quiet(values, LABELS, values[:50], LABELS[:50])
    found = quiet(shards, None, values[:50], LABELS[:50], memory_mb=memory)
    assert (found.values, found.queries) == (known.values, ITEMS)


def test_groups_in_the_files_of_one_side_are_refused(tmp_path):
    values = vectors("float32")
    shards = in_files(tmp_path, values, labels=LABELS.numpy(), groups=np.arange(ITEMS) % 7)
    with refused(ValueError, "files", "queries", "groups", "groups=", "gallery_groups="):
        quiet(shards, None, values, LABELS)
    with refused(ValueError, "files", "gallery", "groups", "groups=", "query_groups="):
        quiet(values, LABELS, shards)
    cameras = np.arange(ITEMS) % 7
    known = quiet(values, LABELS, values, LABELS, query_groups=cameras, gallery_groups=cameras)
    assert_same(known, quiet(shards, None, values, LABELS, gallery_groups=cameras))


@pytest.mark.parametrize("memory", [512, TINY])
def test_three_members_make_a_source_whatever_the_memory(tmp_path, memory):
    values = vectors("float16")
    known = quiet(computable(values), LABELS)
    assert_same(known, quiet(_Rows(values), LABELS, memory_mb=memory))
    sets = [{label} for label in LABELS.tolist()]
    relevance = Relevance.from_label_sets(sets)
    judged = quiet_of(computable(values), relevance=relevance)
    assert quiet_of(_Rows(values), relevance=relevance, memory_mb=memory).values == judged.values


def test_grouped_recall_alone_reads_files(tmp_path):
    values = vectors("float16")
    known = grouped_recall(computable(values), LABELS, label_groups=10)
    shards = in_files(tmp_path, values, labels=LABELS.numpy())
    assert grouped_recall(shards, None, label_groups=10, memory_mb=TINY) == known


def test_a_row_that_is_not_finite_is_named_with_its_file(tmp_path):
    values = vectors("float16")
    values[150] = np.nan
    shards = in_files(tmp_path, values, labels=LABELS.numpy())
    for memory in (512, TINY):
        with refused(ValueError, 1, "300 rows", "queries", "index 150", "row 50", tmp_path / "1.npz"):
            quiet(shards, memory_mb=memory)


LIMITED = """
import resource, sys
import numpy as np
from fewshot_callbacks import Shards, evaluate_retrieval

def of_some(file, labels):
    return evaluate_retrieval(Shards(file), labels, max_queries=100, memory_mb=16, metrics=("mAP", "pair_f1"))

labels = np.arange(50_000) % 500
of_some(sys.argv[2], labels[:3_000])  # compiles what the large file needs, and compiling takes memory
held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 64 * 2**20, resource.RLIM_INFINITY))
try:
    np.zeros((50_000, 1_024), np.float16)
except MemoryError:
    print(of_some(sys.argv[1], labels).mAP)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_a_file_is_evaluated_where_a_copy_does_not_fit(tmp_path):
    """The system refuses more than 67 MB beyond what the process holds; the rows take 102, and 205 in float32."""
    rows = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float16, (50_000, 1_024))
    centres, *noise = np.random.default_rng(0).normal(size=(9, 500, 1_024))
    for part in range(100):
        rows[500 * part : 500 * (part + 1)] = centres + np.roll(noise[part % 8], part, axis=0)
    np.save(tmp_path / "few.npy", rows[:3_000])
    words = [sys.executable, "-c", LIMITED, str(tmp_path / "rows.npy"), str(tmp_path / "few.npy")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert 0.5 < float(ran.stdout) <= 1
