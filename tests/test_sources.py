"""Shards: rows of files of every format are those that were written, nothing is loaded, and bad files are named."""

import os
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fewshot_callbacks import Shards

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


@settings(max_examples=40, deadline=None)
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
    shards = Shards(tmp_path, labels="label", queries="flag", ids=list(range(20)))
    assert np.array_equal(shards[:], rows)
    assert shards.labels.tolist() == labels.tolist()
    assert (shards.queries.dtype, shards.queries.tolist()) == (bool, flags.tolist())
    assert (shards.ids.tolist(), shards.groups) == (list(range(20)), None)


def test_bfloat16_is_read_as_tensors(tmp_path):
    rows = torch.randn(9, 4).bfloat16()
    for part, some in enumerate(rows.split(3)):
        save_file({"vectors": some.clone(), "scale": torch.tensor(2.0)}, tmp_path / f"{part}.safetensors")
    shards = Shards(tmp_path)
    assert (shards.shape, shards.dtype) == ((9, 4), torch.bfloat16)
    for some in (slice(1, 2), slice(2, 8), slice(4, 4)):
        assert torch.equal(shards[some], rows[some])


def test_files_come_in_the_order_of_names_and_of_lists(tmp_path):
    (tmp_path / "labels").mkdir()
    for number in (10, 2, 1):
        np.save(tmp_path / f"part-{number}.npy", np.full((1, 1), number, np.float32))
        np.save(tmp_path / "labels" / f"{number}.npy", [number])
    for hidden in ("_SUCCESS", ".part-3.npy"):
        (tmp_path / hidden).touch()
    by_name = Shards(str(tmp_path / "part-*.npy"), labels=tmp_path / "labels" / "*.npy")
    assert by_name[:].ravel().tolist() == by_name.labels.tolist() == [1, 10, 2]
    assert Shards(tmp_path)[:].ravel().tolist() == [1, 10, 2]  # without what is hidden
    listed = Shards([tmp_path / "part-2.npy", str(tmp_path / "part-1*.npy")], labels=[2, 1, 10])
    assert listed[:].ravel().tolist() == listed.labels.tolist()


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
@pytest.mark.parametrize("kind", ["plain.npy", "stored.npz", "compressed.npz", "groups.parquet", "one.safetensors"])
def test_few_of_many_files_are_open_at_a_time(tmp_path, kind):
    for part in range(40):
        WRITERS[kind](tmp_path / f"{part:02}-{kind}", matrix(5), label=np.arange(5))
    opened = len(os.listdir("/proc/self/fd"))
    shards = Shards(tmp_path, labels=None if kind.endswith("npy") else "label")
    assert shards[:].shape == (200, 3)
    assert len(os.listdir("/proc/self/fd")) - opened < 20


def test_a_file_that_changed_is_noticed(tmp_path):
    for part in range(9):
        np.save(tmp_path / f"{part}.npy", matrix())
    shards = Shards(tmp_path)
    np.save(tmp_path / "0.npy", matrix(21))
    with pytest.raises(ValueError, match=r"0\.npy was changed after it had been opened\. Open the shards again"):
        shards[0:5]


OBJECTS, MATRIX, ZEROS = np.array([{}, None], dtype=object), matrix(), np.zeros((2, 2))
TWO, PICKLES = [[1.0, 2.0], [2.0, 3.0]], "holds Python objects, which are pickles: "
BAD = {
    "no match": ({}, "*.npy", "is no file, and as a glob it matches none. Pass a file, a folder or a glob."),
    "an empty folder": ({}, "", "holds no .npy, .npz, .parquet, .arrow, .feather, .safetensors file. Pass those that you"),
    "two kinds": ({"a.npy": MATRIX, "b.npz": {"embeddings": MATRIX}}, "",
                  "holds .npy and .npz files. Pass those that you mean as a glob, such as"),
    "unknown": ({"a.pt": b""}, "a.pt", "a pickle, as .pkl and .pt files are, can run any code and is"),
    "another dim": ({"a.npy": MATRIX, "b.npy": matrix(dim=4)}, "*.npy", "b.npy holds vectors of 4 float32, and "),
    "another dtype": ({"a.npy": MATRIX, "b.npy": matrix(dtype="float16")}, "*.npy",
                      "b.npy holds vectors of 3 float16, and {folder}/a.npy of 3 float32. Pass files of one model"),
    "no floats": ({"a.npy": np.zeros((2, 2), np.int64)}, "a.npy",
                  "a.npy holds 'embeddings' as int64. Save float16, torch.bfloat16, float32, float64, int8, uint8"),
    "a vector": ({"a.npy": np.zeros(3)}, "a.npy", "a.npy holds 'embeddings' of shape (3,), and embeddings are (rows, dim)."),
    "no rows": ({"a.npy": np.zeros((0, 3))}, "a.npy", "a.npy and the files after it hold no"),
    "objects": ({"a.npy": OBJECTS}, "a.npy", f"a.npy {PICKLES}these can run any code and are never loaded. Save numbers"),
    "a pickle": ({"a.npy": pickle.dumps(MATRIX)}, "a.npy", f"a.npy {PICKLES}"),
    "an object in an archive": ({"a.npz": {"embeddings": ZEROS, "labels": OBJECTS}}, "a.npz", f"a.npz {PICKLES}"),
    "a compressed object": ({"a.npz": lambda file: np.savez_compressed(file, embeddings=ZEROS, labels=OBJECTS)}, "a.npz",
                            f"a.npz {PICKLES}"),
    "no column": ({"a.parquet": {"embeddings": TWO, "species": ["owl", "owl"]}}, "a.parquet",
                  "a.parquet has no 'labels', but 'embeddings', 'species'. Pass labels= with one of these, or an array of"),
    "no matrix": ({"a.npz": {"x": ZEROS, "y": ZEROS}}, "a.npz",
                  "a.npz has no 'embeddings', and 'x', 'y' with two axes. Pass embeddings= with the name of one."),
    "fewer labels": ({"a.npz": {"embeddings": MATRIX, "labels": np.zeros(2)}}, "a.npz", "a.npz has 2 labels for 20 rows."),
    "words and numbers": (
        {f"{of}.npz": {"embeddings": np.zeros((1, 2)), "labels": np.array([of])} for of in ("owl", 3)}, "*.npz",
        "labels are int64 of 1 axes and str96 of 1 axes in different files. Write them alike.",
    ),
    "a missing label": ({"a.parquet": {"embeddings": TWO, "labels": [1, None]}}, "a.parquet",
                        "a.parquet has no value of 'labels' in row 1. Leave rows without one out."),
    "another length": (
        {"a.parquet": {"embeddings": [[1.0, 2.0], [2.0]], "labels": [1, 2]}}, "a.parquet",
        "a.parquet holds lists of 2 numbers in 'embeddings', and in row 1 one of 1. Write vectors of one length.",
    ),
    "Fortran": ({"a.npz": lambda file: np.savez_compressed(file, embeddings=np.asfortranarray(MATRIX))}, "a.npz",
                "a.npz is compressed in Fortran's order. Save numpy.ascontiguousarray(array), or do not compress."),
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


@pytest.mark.parametrize(("files", "paths", "words"), BAD.values(), ids=BAD)
def test_bad_files_are_named_with_the_fix_in_one_line(tmp_path, files, paths, words):
    for name, content in files.items():
        written(tmp_path / name, content)
    labels = None if paths.endswith("npy") else "labels"
    with pytest.raises(ValueError, match=re.escape(words.format(folder=tmp_path))) as raised:
        Shards(tmp_path / paths, labels=labels)[:]
    assert str(raised.value).startswith(str(tmp_path)) or "labels are" in words
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_is_cut_off_is_said_to_be(tmp_path, kind):
    file = tmp_path / kind
    WRITERS[kind](file, matrix(400, 8), label=np.arange(400))
    whole = file.read_bytes()
    for share in (0, 0.03, 0.5, 0.97):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"is damaged or cut off, or no \.\w+ file \(.*\)\. Write it again\."):
            Shards(file)[:]


def test_what_fails_once_fails_again(tmp_path):
    """A reader that stands behind what it could not read would return other rows."""
    written(tmp_path / "a.parquet", {"embeddings": [[1.0]] * 5000 + [[None]] + [[1.0]] * 5000})
    shards = Shards(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="has no value of 'embeddings' in row 5000"):
            shards[4990:5010]
    assert shards[:100].shape == (100, 1)


def test_columns_and_indices_fit_the_rows(tmp_path):
    file, short = tmp_path / "a.npy", tmp_path / "short.npy"
    np.save(file, matrix())
    np.save(short, np.arange(7))
    for error, words, work in (
        (ValueError, "labels has 7 entries for the 20 rows of 1 files", lambda: Shards(file, labels=str(short))),
        (ValueError, "a.npy has no 'label', but 'embeddings'. Pass labels=", lambda: Shards(file, labels="label")),
        (ValueError, "queries are int64 other than 0 and 1. Pass one", lambda: Shards(file, queries=np.arange(20))),
        (ValueError, "scale=2.0 and offset=0.0 are of integers, and ", lambda: Shards(file, scale=2.0)),
        (ValueError, "a.npy is listed twice, and its rows would", lambda: Shards([file, tmp_path / "a*.npy"])),
        (TypeError, "shards[5:6] in place of shards[5]", lambda: Shards(file)[5]),
        (IndexError, "no row 20 in shards of 20 rows. Pass one from 0 to 19.", lambda: Shards(file).where(20)),
    ):
        with pytest.raises(error, match=re.escape(words)):
            work()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".safetensors"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch, suffix):
    package, file = "safetensors" if suffix == ".safetensors" else "pyarrow", tmp_path / f"a{suffix}"
    file.touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    words = f"a {suffix} file needs {package}, which is not installed. Run pip install 'fewshot-callbacks[files]'."
    with pytest.raises(ModuleNotFoundError, match=re.escape(words)):
        Shards(file)


def test_integers_that_stand_for_other_numbers(tmp_path):
    numbers = np.arange(200, dtype=np.uint8).reshape(20, 10)
    for part in range(2):
        np.save(tmp_path / f"{part}.npy", numbers[10 * part : 10 * part + 10])
    np.save(tmp_path / "0a.npy", numbers[:0])  # as distributed jobs write them
    shards = Shards(tmp_path, scale=0.5, offset=128)
    np.testing.assert_array_equal(shards[5:15], (numbers[5:15].astype(np.float32) - 128) / 2)
    assert (shards.dtype, shards[0:0].dtype) == (np.float32, np.float32)
