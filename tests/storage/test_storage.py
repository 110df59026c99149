"""Shards: rows of files of every format are those that were written, nothing is loaded, and bad files are named."""

import json
import os
import pickle
import re
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fewshot_callbacks import Shards
from fewshot_callbacks.storage import RowSubset
from fewshot_callbacks.storage.stored_rows import StoredRows
from tests.cases import examples
from tests.messages import missing_facts, refused

DTYPES = ("float16", "float32", "float64", "int8", "uint8")


def table(rows, lists="fixed", **columns):
    """An Arrow table of vectors in lists of a fixed or of any length, or in tensors of Arrow's own."""
    values, ends = pa.array(rows.ravel()), np.arange(len(rows) + 1) * rows.shape[1]
    vectors = {
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(values, rows.shape[1]),
        "any": lambda: pa.ListArray.from_arrays(ends.astype(np.int32), values),
        "large": lambda: pa.LargeListArray.from_arrays(ends, values),
        "tensor": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(rows),
    }[lists if len(rows) else "fixed"]()
    return pa.table({**columns, "embeddings": vectors})


def parquet(lists, **options):
    return lambda file, rows, **columns: pa.parquet.write_table(table(rows, lists, **columns), file, **options)


def feather(lists, **options):
    return lambda file, rows, **columns: pa.feather.write_feather(table(rows, lists, **columns), file, **options)


def write_stream(file, rows, **columns):
    written = table(rows, **columns)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, written.schema) as stream:
        stream.write_table(written, max_chunksize=5)


WRITERS = {
    "plain.npy": lambda file, rows, **_: np.save(file, rows),
    "fortran.npy": lambda file, rows, **_: np.save(file, np.asfortranarray(rows)),
    "swapped.npy": lambda file, rows, **_: np.save(file, rows.astype(rows.dtype.newbyteorder(">"))),
    "stored.npz": lambda file, rows, **columns: np.savez(file, **columns, embeddings=rows),
    "compressed.npz": lambda file, rows, **columns: np.savez_compressed(file, **columns, embeddings=rows),
    "groups.parquet": parquet("fixed", row_group_size=7),
    "lists.parquet": parquet("any"),
    "packed.feather": feather("large", chunksize=5),
    "mapped.arrow": feather("tensor", compression="uncompressed"),
    "stream.arrow": write_stream,
    "one.safetensors": lambda file, rows, **columns: save_file(
        {name: torch.tensor(array) for name, array in (columns | {"embeddings": rows}).items()}, file
    ),
}


def matrix(rows=20, dim=3, dtype="float32"):
    drawn = np.random.default_rng(rows).integers(0, 256, (rows, dim * np.dtype(dtype).itemsize), np.uint8)
    return np.nan_to_num(drawn.view(dtype))


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_slice_of_any_files_is_that_of_the_array(tmp_path_factory, data):
    folder, dtype = tmp_path_factory.mktemp("shards"), data.draw(st.sampled_from(DTYPES))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any))
    whole = matrix(sum(lengths), data.draw(st.integers(1, 4)), dtype)
    files = []
    for number, part in enumerate(np.split(whole, np.cumsum(lengths)[:-1])):
        files.append(folder / f"{number}-{data.draw(st.sampled_from(sorted(WRITERS)))}")
        WRITERS[files[-1].name.partition("-")[2]](files[-1], part)
    shards = Shards(files)
    assert (shards.shape, shards.dtype, len(shards)) == (whole.shape, whole.dtype, len(whole))
    places = st.none() | st.integers(-len(whole) - 2, len(whole) + 2)
    for start, stop in data.draw(st.lists(st.tuples(places, places), min_size=5, max_size=5)):
        read, expected = shards[start:stop], whole[start:stop]
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        assert read.tobytes() == expected.tobytes()
    row = data.draw(st.integers(0, len(whole) - 1))
    number, file = re.fullmatch(r"row (\d+) of (.*)", shards.where(row)).groups()
    assert Shards(file)[int(number) : int(number) + 1].tobytes() == whole[row : row + 1].tobytes()


def test_no_rows_after_a_step_back_have_the_dim(tmp_path):
    feather("large", chunksize=5)(tmp_path / "a.feather", matrix(6))
    shards = Shards(tmp_path / "a.feather")
    assert [shards[some].shape for some in (slice(6), slice(1, 0))] == [(6, 3), (0, 3)]


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if not kind.endswith(".npy")])
def test_columns_of_numbers_and_words_are_read_beside_the_vectors(tmp_path, kind):
    rows, flags, words = matrix(), np.arange(20) % 2 == 0, np.array(["owl", "heron"] * 10)
    labels = np.arange(20) % 7 if "tensors" in kind else words
    for part in range(2):
        half = slice(10 * part, 10 * part + 10)
        label = pa.array(labels[half].tolist()).dictionary_encode() if "arrow" in kind else labels[half]
        WRITERS[kind](tmp_path / f"{part}-{kind}", rows[half], label=label, flag=flags[half])
    shards = Shards(tmp_path, labels="label", is_gallery="flag", ids=list(range(20)))
    assert np.array_equal(shards[:], rows)
    assert shards.labels.tolist() == labels.tolist()
    assert (shards.is_gallery.dtype, shards.is_gallery.tolist()) == (bool, flags.tolist())
    assert (shards.ids.tolist(), shards.groups) == (list(range(20)), None)


def test_bfloat16_is_read_as_tensors(tmp_path):
    rows = torch.randn(9, 4).bfloat16()
    for part, some in enumerate(rows.split(3)):
        save_file({"vectors": some.clone(), "scale": torch.tensor(2.0)}, tmp_path / f"{part}.safetensors")
    shards = Shards(tmp_path)
    assert (shards.shape, shards.dtype) == ((9, 4), torch.bfloat16)
    for some in (slice(1, 2), slice(2, 8), slice(4, 4)):
        assert torch.equal(shards[some], rows[some])


def test_files_come_in_the_order_of_their_numbers_and_of_lists(tmp_path):
    (tmp_path / "labels").mkdir()
    for number in (10, 2, 1):
        np.save(tmp_path / f"part-{number}.npy", np.full((1, 1), number, np.float32))
        np.save(tmp_path / "labels" / f"{number}.npy", [number])
    for hidden in ("_SUCCESS", ".part-3.npy"):
        (tmp_path / hidden).touch()
    by_name = Shards(str(tmp_path / "part-*.npy"), labels=tmp_path / "labels" / "*.npy")
    assert by_name[:].ravel().tolist() == by_name.labels.tolist() == [1, 2, 10]
    assert by_name.notes == ()  # the labels lie in files with the same numbers
    assert Shards(tmp_path)[:].ravel().tolist() == [1, 2, 10]  # without what is hidden
    outside = Shards(str(tmp_path / "part-*.npy"), labels=[1, 2, 10])
    (note,) = outside.notes
    assert missing_facts(note, ("order", "part-2.npy", "part-10.npy", "labels")) == []
    assert note.index("part-2.npy") < note.index("part-10.npy")
    listed = Shards([tmp_path / "part-2.npy", str(tmp_path / "part-1*.npy")], labels=[2, 1, 10])
    assert listed[:].ravel().tolist() == listed.labels.tolist()


@pytest.mark.parametrize(
    "names", [["7", "77", "777"], ["b2-1", "b2-10", "b10-1"], ["x-y", "x", "x1", "x01a", "x1a", "x2"]]
)
def test_numbers_anywhere_in_a_name_are_counted(tmp_path, names):
    for place, name in reversed([*enumerate(names)]):
        np.save(tmp_path / f"{name}.npy", np.full((1, 1), place, np.float32))
    assert Shards(tmp_path)[:].ravel().tolist() == [*range(len(names))]


def test_a_file_is_read_once_whatever_links_lead_to_it(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    for place in range(2):
        np.save(inner / f"{place}.npy", np.full((1, 1), place, np.float32))
    (inner / "00-latest.npy").symlink_to("1.npy")
    (inner / "up").symlink_to("..", target_is_directory=True)
    for paths in (inner, f"{inner}/*.npy", f"{tmp_path}/**/*.npy"):
        shards = Shards(paths)
        assert shards[:].ravel().tolist() == [0, 1]
        assert [file.name for file in shards.files] == ["0.npy", "1.npy"]
        assert missing_facts(shards.notes[0], ("files", "00-latest.npy")) == []
    np.save(tmp_path / "0.npy", np.ones((1, 1), np.float32))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.npy").symlink_to(tmp_path / "0.npy")
    assert Shards(tmp_path / "outside")[:].tolist() == [[1.0]]  # only a link is a file
    for listed in ([inner / "1.npy", inner / "00-latest.npy"], [inner / "1.npy", inner / "up" / "inner" / "1.npy"]):
        with refused(ValueError, "twice", *listed):
            Shards(listed)


@pytest.mark.parametrize("paths", ["", "*.npy", "2.npy"])
def test_a_link_that_leads_nowhere_is_an_error(tmp_path, paths):
    np.save(tmp_path / "1.npy", matrix())
    (tmp_path / "2.npy").symlink_to(tmp_path / "gone.npy")
    with refused(ValueError, tmp_path / "2.npy", "link", tmp_path / "gone.npy"):
        Shards(tmp_path / paths)


CACHED = "cache-0123456789abcdef"


def test_what_datasets_keeps_beside_its_data_is_no_data(tmp_path):
    """As `save_to_disk` after a `map` leaves a folder."""
    halves, outer = np.split(matrix(), 2), tmp_path / "outer"
    tmp_path = outer / "saved"
    tmp_path.mkdir(parents=True)
    for part, half in enumerate(halves):
        write_stream(tmp_path / f"data-0000{part}-of-00002.arrow", half)
        write_stream(tmp_path / f"{CACHED}_0000{part}_of_00002.arrow", half)
    for state in (None, {"_data_files": [{"filename": f"data-0000{part}-of-00002.arrow"} for part in range(2)]}):
        if state is not None:
            (tmp_path / "state.json").write_text(json.dumps(state))
            write_stream(tmp_path / "renamed.arrow", halves[0])
        for paths in (tmp_path, f"{tmp_path}/*.arrow", f"{outer}/*/*.arrow"):
            shards = Shards(paths)
            assert np.array_equal(shards[:], matrix())
            assert missing_facts(shards.notes[0], (2 if state is None else 3, "files", "datasets")) == []
    assert len(Shards(f"{tmp_path}/{CACHED}*.arrow")) == 20  # these are meant
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with refused(ValueError, tmp_path / "state.json", "data-00001-of-00002.arrow", "folder"):
        Shards(tmp_path)


def test_words_that_look_alike_are_one_value_or_refused(tmp_path):
    words = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    for part, word in enumerate(words):
        np.savez(tmp_path / f"{part}.npz", embeddings=np.ones((1, 2)), labels=np.array([word]))
    with refused(ValueError, "labels", "café", *map(ascii, words), "Unicode", "unicodedata.normalize('NFC', word)"):
        Shards(tmp_path, labels="labels")
    assert Shards(tmp_path / "1.npz", labels="labels").labels.tolist() == [words[1]]  # as they were written


def test_vectors_are_found_by_name_or_as_the_only_matrix(tmp_path):
    first, second = matrix(), matrix(dim=5)
    np.savez(tmp_path / "two.npz", first=first, second=second, n=np.arange(20))
    np.savez(tmp_path / "one.npz", second=second, n=np.arange(20))
    WRITERS["lists.parquet"](tmp_path / "tags.parquet", first, tags=[["a", "b"], ["c"]] * 10)
    assert np.array_equal(Shards(tmp_path / "two.npz", embeddings="first")[:], first)
    for name, expected in (("one.npz", second), ("tags.parquet", first)):
        assert np.array_equal(Shards(tmp_path / name)[:], expected)


def test_a_slice_of_a_file_of_a_terabyte_reads_its_rows(tmp_path):
    """A sparse file: were it loaded, neither memory nor disk would do."""
    rows, dim = 2**32, 128
    np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.float16, (rows, dim))[-1] = 1
    shards = Shards(tmp_path / "large.npy")
    assert shards[rows - 2 :].tolist() == [[0.0] * dim, [1.0] * dim]
    assert not shards[:5].flags.owndata


@pytest.mark.parametrize("kind", ["lists.parquet", "stream.arrow", "mapped.arrow"])
def test_arrow_holds_a_few_thousand_rows_at_a_time(tmp_path, kind):
    WRITERS[kind](tmp_path / kind, matrix(30_000, 16))
    shards, before, most = Shards(tmp_path), pa.total_allocated_bytes(), 0
    for start in range(0, len(shards), 1000):
        shards[start : start + 1000]
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 30_000 * 16 * 4 / 3


def test_forward_slices_decode_each_row_once(tmp_path, monkeypatch):
    whole = matrix(20_000, 2)
    pa.parquet.write_table(table(whole), tmp_path / "a.parquet", row_group_size=9000)
    read, batches = [], pa.parquet.ParquetFile.iter_batches

    def counted(*words, **options):
        for batch in batches(*words, **options):
            read.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", counted)
    shards = Shards(tmp_path)
    for start in range(0, 20_000, 300):
        assert np.array_equal(shards[start : start + 300], whole[start : start + 300])
    assert sum(read) == 20_000
    # a step back: from its group on, not from the first
    assert np.array_equal(shards[19_000:19_100], whole[19_000:19_100])
    assert sum(read) <= 20_000 + 4096


def test_two_threads_read_the_same_shards(tmp_path):
    whole = matrix(3000, 2)
    for part, some in enumerate(np.split(whole, 6)):
        kind = ("compressed.npz", "groups.parquet")[part % 2]
        WRITERS[kind](tmp_path / f"{part}-{kind}", some)
    shards = Shards(sorted(tmp_path.iterdir()))

    def read(step):
        return np.concatenate([shards[start : start + step] for start in range(0, 3000, step)])

    with ThreadPoolExecutor(2) as threads:
        assert all(np.array_equal(found, whole) for found in threads.map(read, (70, 110)))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the open files of Linux")
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("part", [lambda rows: rows, lambda rows: rows[1:2], lambda rows: rows.numpy()[:, 1:].T])
def test_rows_that_were_read_stay_as_they_are_while_anything_refers_to_a_part_of_them(dtype, part):
    values = np.random.default_rng(0).normal(size=(2_000, 3)).astype(dtype)
    stored = StoredRows(values, memory=0)
    chunks = [(rows, part(chunk)) for rows, chunk in stored.chunks()]
    assert len(chunks) > 20
    for rows, kept in chunks:
        assert np.array_equal(np.asarray(kept), np.asarray(part(torch.from_numpy(values[rows]).to(stored.dtype))))


@pytest.mark.parametrize("kind", ["plain.npy", "stored.npz", "compressed.npz", "groups.parquet", "one.safetensors"])
def test_few_of_many_files_are_open_at_a_time(tmp_path, kind):
    for part in range(40):
        WRITERS[kind](tmp_path / f"{part:02}-{kind}", matrix(5), label=np.arange(5))
    opened = len(os.listdir("/proc/self/fd"))
    shards = Shards(tmp_path, labels=None if kind.endswith("npy") else "label")
    assert shards[:].shape == (200, 3)
    assert len(os.listdir("/proc/self/fd")) - opened < 20


@pytest.mark.parametrize("kind", ["packed.feather", "stream.arrow"])
def test_an_open_arrow_file_is_read_to_its_end_if_another_takes_its_name(tmp_path, kind):
    rows = matrix(20)
    file = tmp_path / kind
    other = tmp_path / f"other-{kind}"
    WRITERS[kind](file, rows)
    WRITERS[kind](other, rows + 1)
    shards = Shards(file)
    assert np.array_equal(shards[10:20], rows[10:])
    other.replace(file)
    assert np.array_equal(shards[0:10], rows[:10])  # a step back


def test_rows_of_a_subset_that_lie_far_apart_are_read_in_spans(tmp_path):
    rows = matrix(50_000)
    np.save(tmp_path / "rows.npy", rows)
    chosen = np.arange(len(rows)) % 1000 < 2
    longest = 0

    class Watched(Shards):
        def __getitem__(self, span):
            nonlocal longest
            longest = max(longest, span.stop - span.start)
            return super().__getitem__(span)

    source = RowSubset(Watched(tmp_path / "rows.npy"), chosen)
    for part in (slice(0, 100), slice(3, 40), slice(20, 21), slice(7, 7)):
        assert np.array_equal(source[part], rows[chosen][part])
    assert longest <= 1024


def test_a_file_that_changed_is_noticed(tmp_path):
    for part in range(9):
        np.save(tmp_path / f"{part}.npy", matrix())
    shards = Shards(tmp_path)
    np.save(tmp_path / "0.npy", matrix(21))
    with refused(ValueError, tmp_path / "0.npy", "size", "time", "shards"):
        shards[0:5]


OBJECTS, MATRIX, ZEROS = np.array([{}, None], dtype=object), matrix(), np.zeros((2, 2))
TWO, ENDINGS = [[1.0, 2.0], [2.0, 3.0]], (".npy", ".npz", ".parquet", ".arrow", ".feather", ".safetensors")
PICKLES = ("Python objects", "pickles", "code", "array.astype(str)")
BAD = {
    "no match": ({}, "*.npy", ("*.npy", "file", "folder", "glob")),
    "an empty folder": ({}, "", (*ENDINGS, "glob", "*.npy'")),
    "two kinds": ({"a.npy": MATRIX, "b.npz": {"embeddings": MATRIX}}, "", (".npy", ".npz", "glob", "*.npy'")),
    "unknown": ({"a.pt": b""}, "a.pt", ("a.pt", *ENDINGS, "pickle", "code")),
    "another dim": ({"a.npy": MATRIX, "b.npy": matrix(dim=4)}, "*.npy", ("b.npy", "4 float32", "a.npy", "3 float32")),
    "another dtype": ({"a.npy": MATRIX, "b.npy": matrix(dtype="float16")}, "*.npy",
                      ("b.npy", "3 float16", "a.npy", "3 float32", "model", "dtype")),
    "no floats": ({"a.npy": np.zeros((2, 2), np.int64)}, "a.npy",
                  ("a.npy", "'embeddings'", "int64", *DTYPES, "torch.bfloat16")),
    "a vector": ({"a.npy": np.zeros(3)}, "a.npy", ("a.npy", "'embeddings'", "(3,)", "(rows, dim)", "embeddings=")),
    "a number": ({"a.npy": np.array(1.0)}, "a.npy", ("a.npy", "'embeddings'", "()", "(rows, dim)", "embeddings=")),
    "no rows": ({"a.npy": np.zeros((0, 3))}, "a.npy", ("a.npy", "rows")),
    "objects": ({"a.npy": OBJECTS}, "a.npy", ("a.npy", *PICKLES)),
    "a pickle": ({"a.npy": pickle.dumps(MATRIX)}, "a.npy", ("a.npy", *PICKLES)),
    "an object in an archive": ({"a.npz": {"embeddings": ZEROS, "labels": OBJECTS}}, "a.npz", ("a.npz", *PICKLES)),
    "a compressed object": ({"a.npz": lambda file: np.savez_compressed(file, embeddings=ZEROS, labels=OBJECTS)}, "a.npz",
                            ("a.npz", *PICKLES)),
    "no column": ({"a.parquet": {"embeddings": TWO, "species": ["owl", "owl"]}}, "a.parquet",
                  ("a.parquet", "'labels'", "'embeddings'", "'species'", "labels=")),
    "no matrix": ({"a.npz": {"x": ZEROS, "y": ZEROS}}, "a.npz", ("a.npz", "'embeddings'", "'x'", "'y'", "embeddings=")),
    "fewer labels": ({"a.npz": {"embeddings": MATRIX, "labels": np.zeros(2)}}, "a.npz", ("a.npz", "2 labels", "20 rows")),
    "words and numbers": (
        {f"{of}.npz": {"embeddings": np.zeros((1, 2)), "labels": np.array([of])} for of in ("owl", 3)}, "*.npz",
        ("labels", "int64", "str96", "files"),
    ),
    "a missing label": ({"a.parquet": {"embeddings": TWO, "labels": [1, None]}}, "a.parquet",
                        ("a.parquet", "'labels'", "row 1")),
    "another length": ({"a.parquet": {"embeddings": [[1.0, 2.0], [2.0]], "labels": [1, 2]}}, "a.parquet",
                       ("a.parquet", 2, "'embeddings'", "row 1", "one of 1")),
    "Fortran": ({"a.npz": lambda file: np.savez_compressed(file, embeddings=np.asfortranarray(MATRIX))}, "a.npz",
                ("a.npz", "Fortran's", "numpy.ascontiguousarray(array)")),
}  # fmt: skip


def written(file, content):
    """Bytes, an array, the columns of a table or an archive, or what a function writes."""
    if callable(content):
        content(file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(file, content)
    else:
        pa.parquet.write_table(pa.table(content), file) if file.suffix == ".parquet" else np.savez(file, **content)


@pytest.mark.parametrize(("files", "paths", "facts"), BAD.values(), ids=BAD)
def test_bad_files_are_named_with_the_fix_in_one_line(tmp_path, files, paths, facts):
    for name, content in files.items():
        written(tmp_path / name, content)
    labels = None if paths.endswith("npy") else "labels"
    with pytest.raises(ValueError, match=r"\A.+\Z") as raised:  # one line
        Shards(tmp_path / paths, labels=labels)[:]
    message = str(raised.value)
    assert missing_facts(message, facts) == []
    assert message.startswith((str(tmp_path), "labels"))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_is_cut_off_is_said_to_be(tmp_path, kind):
    file = tmp_path / kind
    WRITERS[kind](file, matrix(400, 8), label=np.arange(400))
    whole = file.read_bytes()
    for share in (0, 0.03, 0.5, 0.97):
        file.write_bytes(whole[: int(share * len(whole))])
        with refused(ValueError, file, "damaged", file.suffix):
            Shards(file)[:]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("step", [7, 400])
def test_a_number_that_was_changed_on_the_disk_is_noticed(tmp_path, order, step):
    file, rows = tmp_path / "a.npz", np.asarray(matrix(400, 8), order=order)
    np.savez(file, embeddings=rows, labels=np.arange(400))
    assert np.array_equal(Shards(file, labels="labels")[:], rows)
    for changed in (rows[200], np.arange(300, 302)):  # of the vectors, of the labels
        np.savez(file, embeddings=rows, labels=np.arange(400))
        whole = file.read_bytes()
        at = whole.index(changed[order == "F" and changed.dtype == np.float32 and 0 :][:1].tobytes())
        file.write_bytes(whole[:at] + b"\1\2" + whole[at + 2 :])
        for _ in range(2):
            with refused(ValueError, file, "damaged", ".npz", "checksum"):
                [shards := Shards(file, labels="labels"), *(shards[at : at + step] for at in range(0, 400, step))]


def test_a_head_that_names_more_rows_than_there_are_reads_no_other_array(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, embeddings=np.ones((100, 4), np.float32), other=np.zeros((100, 4), np.float32))
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"'shape': (100, 4), ", b"'shape': (150, 4), ", 1))
    with refused(ValueError, file, "damaged", "(150, 4)", "2,528 bytes", "1,728"):
        Shards(file, embeddings="embeddings")


WORDS = pa.array(["owl", "heron"] * 10)
FLAGS = pa.array([1, 0] * 10)


@pytest.mark.parametrize(
    "column",
    [
        WORDS.dictionary_encode(),
        WORDS.cast("large_string"),
        pa.array(WORDS.to_pylist(), pa.string_view()),
        pa.compute.run_end_encode(WORDS),
    ],
    ids=["dictionary", "large", "view", "runs"],
)
@pytest.mark.parametrize("lists", [pa.list_view, pa.LargeListViewArray, pa.list_])
def test_arrow_has_many_forms_for_the_same_values(tmp_path, column, lists):
    rows, kinds = matrix(), {pa.LargeListViewArray: pa.large_list_view}
    vectors = pa.array(rows.tolist(), kinds.get(lists, lists)(pa.float32()))
    written = pa.table({"embeddings": vectors, "labels": column})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, written.schema) as file:
        file.write_table(written, max_chunksize=6)
    shards = Shards(tmp_path, labels="labels")
    assert np.array_equal(shards[3:17], rows[3:17])
    assert shards.labels.tolist() == WORDS.to_pylist()


@pytest.mark.parametrize("form", ["dictionary", "value of a dictionary", "runs"])
def test_a_label_that_is_missing_in_any_form_is_named_with_its_row(tmp_path, form):
    words = WORDS.to_pylist()
    words[9] = None
    column = {
        "dictionary": lambda: pa.array(words).dictionary_encode(),
        "value of a dictionary": lambda: pa.DictionaryArray.from_arrays(
            pa.array([0, 1] * 4 + [0, 2] + [0, 1] * 5), pa.array(["owl", "heron", None])
        ),
        "runs": lambda: pa.compute.run_end_encode(pa.array(words)),
    }[form]()
    written = pa.table({"embeddings": pa.array(matrix().tolist(), pa.list_(pa.float32())), "labels": column})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, written.schema) as stream:
        stream.write_table(written)
    with refused(ValueError, tmp_path / "a.arrow", "'labels'", "row 9"):
        Shards(tmp_path, labels="labels")


def test_what_fails_once_fails_again(tmp_path):
    """A reader that stands behind what it could not read would return other rows."""
    written(tmp_path / "a.parquet", {"embeddings": [[1.0]] * 5000 + [[None]] + [[1.0]] * 5000})
    shards = Shards(tmp_path)
    for _ in range(2):
        with refused(ValueError, tmp_path / "a.parquet", "'embeddings'", "row 5000"):
            shards[4990:5010]
    assert shards[:100].shape == (100, 1)


def test_columns_and_indices_fit_the_rows(tmp_path):
    file, short = tmp_path / "a.npy", tmp_path / "short.npy"
    np.save(file, matrix())
    np.save(short, np.arange(7))
    for error, facts, work in (
        (ValueError, ("labels", 7, "20 rows", 1), lambda: Shards(file, labels=str(short))),
        (ValueError, (file, "'label'", "'embeddings'", "labels="), lambda: Shards(file, labels="label")),
        (ValueError, ("is_gallery", "int64", 0, 1, "boolean"), lambda: Shards(file, is_gallery=np.arange(20))),
        (ValueError, ("scale=2.0", "offset=0.0", file, "float32"), lambda: Shards(file, scale=2.0)),
        (ValueError, (file, "twice"), lambda: Shards([file, tmp_path / "a*.npy"])),
        (ValueError, ("empty list", "file", "folder", "glob"), lambda: Shards([])),
        (TypeError, ("shards[5:6]", "shards[5]"), lambda: Shards(file)[5]),
        (IndexError, ("row 20", "20 rows", 0, 19), lambda: Shards(file).where(20)),
    ):
        with refused(error, *facts):
            work()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".safetensors"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch, suffix):
    package, file = "safetensors" if suffix == ".safetensors" else "pyarrow", tmp_path / f"a{suffix}"
    file.touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with refused(ModuleNotFoundError, suffix, package, "pip install '.[files]'"):
        Shards(file)


def test_integers_that_stand_for_other_numbers(tmp_path):
    numbers = np.arange(200, dtype=np.uint8).reshape(20, 10)
    for part in range(2):
        np.save(tmp_path / f"{part}.npy", numbers[10 * part : 10 * part + 10])
    np.save(tmp_path / "0a.npy", numbers[:0])  # as distributed jobs write them
    shards = Shards(tmp_path, scale=0.5, offset=128)
    np.testing.assert_array_equal(shards[5:15], (numbers[5:15].astype(np.float32) - 128) / 2)
    assert (shards.dtype, shards[0:0].dtype) == (np.float32, np.float32)
