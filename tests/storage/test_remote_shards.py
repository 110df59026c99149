"""Shards at addresses: every format and form, one copy for each version, and a sentence for each mistake."""

import functools
import json
import multiprocessing
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from fewshot_callbacks import Shards
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.files import remote_cache
from tests.messages import missing_facts, refused
from tests.remote_stores import counting_store, empty_memory, s3_server

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
PLACES = ("bucket", "folder", "file")
"""Of what a reader may have misspelt a name, where there is nothing at an address."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the copies."""
    monkeypatch.setenv("FEWSHOT_CALLBACKS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory():
    with empty_memory() as store:
        yield store


@pytest.fixture
def s3(monkeypatch):
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with s3_server(monkeypatch) as store:
        yield store


def write(file, rows):
    """Write rows as the ending of the file says."""
    if file.suffix == ".npy":
        np.save(file, rows)
    elif file.suffix == ".npz":
        np.savez(file, embeddings=rows)
    elif file.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file({"embeddings": rows}, file)
    else:
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"embeddings": list(rows)})
        if file.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, file)
        else:
            with arrow.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


def put(store, folder, name, rows, tmp_path):
    write(tmp_path / name, rows)
    store.put(str(tmp_path / name), f"{folder}/{name}")


def fetched(monkeypatch, store):
    """A list to which the paths of the files that are fetched from now on are added."""
    paths = []
    name = "_get_file" if store.async_impl else "get_file"
    ordinary = getattr(type(store), name)

    def get_file(self, path, *arguments, **settings):
        paths.append(path)
        return ordinary(self, path, *arguments, **settings)

    async def get_file_later(self, path, *arguments, **settings):
        return await get_file(self, path, *arguments, **settings)

    monkeypatch.setattr(type(store), name, get_file_later if store.async_impl else get_file)
    # An object has the method that its class had when it was made.
    type(store).clear_instance_cache()
    return paths


@pytest.mark.parametrize("ending", [".npy", ".npz", ".parquet", ".arrow", ".feather", ".safetensors"])
@pytest.mark.parametrize("form", [str, Path])
def test_files_of_each_format_are_read_by_a_pattern(memory, tmp_path, ending, form):
    for part in (10, 2):
        put(memory, "/vectors", f"part-{part}{ending}", ROWS + part, tmp_path)
    memory.pipe("/vectors/notes.txt", b"no rows")
    shards = Shards(form(f"memory://vectors/*{ending}"))
    np.testing.assert_array_equal(shards[:], np.concatenate([ROWS + 2, ROWS + 10]))
    assert [file.name for file in shards.files] == [f"part-2{ending}", f"part-10{ending}"]
    assert all("memory" in file.parts and "vectors" in file.parts for file in shards.files)


def test_rows_come_from_a_file_a_list_a_folder_or_files_in_folders(memory, tmp_path):
    put(memory, "/vectors/deep", "a.npy", ROWS, tmp_path)
    put(memory, "/vectors", "b.npy", ROWS + 1, tmp_path)
    np.testing.assert_array_equal(Shards("memory://vectors/b.npy")[:], ROWS + 1)
    both = ["memory://vectors/b.npy", tmp_path / "a.npy", "memory://vectors/deep/a.npy"]
    np.testing.assert_array_equal(Shards(both)[:], np.concatenate([ROWS + 1, ROWS, ROWS]))
    np.testing.assert_array_equal(Shards("memory://vectors")[:], ROWS + 1)
    np.testing.assert_array_equal(Shards("memory://vectors/**/*.npy")[:], np.concatenate([ROWS + 1, ROWS]))
    with refused(ValueError, "memory://vectors/b.npy", "twice") as caught:
        Shards(["memory://vectors/b.npy", "memory://vectors/*.npy"])
    assert os.environ["FEWSHOT_CALLBACKS_CACHE"] not in str(caught.value)


def test_a_file_with_brackets_in_its_name_is_read(memory, tmp_path):
    np.save(tmp_path / "a.npy", ROWS)
    memory.pipe("/vectors/a[1].npy", (tmp_path / "a.npy").read_bytes())
    np.testing.assert_array_equal(Shards("memory://vectors/a[1].npy")[:], ROWS)


def test_labels_may_lie_in_files_of_their_own(memory, tmp_path):
    put(memory, "/vectors", "rows.npy", ROWS, tmp_path)
    put(memory, "/labels", "labels.npy", np.arange(4), tmp_path)
    assert Shards("memory://vectors/rows.npy", labels="memory://labels/*.npy").labels.tolist() == [0, 1, 2, 3]


def test_an_address_of_this_machine_is_read_in_place(tmp_path, cache):
    np.save(tmp_path / "rows.npy", ROWS)
    shards = Shards((tmp_path / "rows.npy").as_uri())
    assert shards.files == (tmp_path / "rows.npy",)
    assert not cache.exists()


def test_a_file_in_an_archive_is_read(memory, tmp_path):
    np.savez(tmp_path / "archive.zip.npz", rows=ROWS)
    memory.put(str(tmp_path / "archive.zip.npz"), "/archive.zip")
    np.testing.assert_array_equal(Shards("zip://rows.npy::memory://archive.zip")[:], ROWS)


def test_a_file_is_fetched_once_for_each_of_its_versions(memory, tmp_path, monkeypatch):
    paths = fetched(monkeypatch, memory)
    for name in ("a.npy", "b.npy"):
        put(memory, "/vectors", name, ROWS, tmp_path)
    first = Shards("memory://vectors/*.npy")
    Shards("memory://vectors/*.npy")
    assert paths == ["/vectors/a.npy", "/vectors/b.npy"]
    put(memory, "/vectors", "b.npy", ROWS + 1, tmp_path)  # of the same size
    np.testing.assert_array_equal(Shards("memory://vectors/*.npy")[4:], ROWS + 1)
    assert paths[2:] == ["/vectors/b.npy"]
    np.testing.assert_array_equal(first[4:], ROWS)


def test_an_interrupted_copy_is_not_read(memory, tmp_path, monkeypatch, cache):
    put(memory, "/vectors", "a.npy", ROWS, tmp_path)
    ordinary = MemoryFileSystem.get_file

    def interrupted(self, path, local, **settings):
        Path(local).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryFileSystem, "get_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Shards("memory://vectors/a.npy")
    assert list(cache.rglob("*.npy*")) == list(cache.rglob("*.lock"))
    monkeypatch.setattr(MemoryFileSystem, "get_file", ordinary)
    np.testing.assert_array_equal(Shards("memory://vectors/a.npy")[:], ROWS)


def test_a_file_that_changes_while_it_is_fetched_is_refused(memory, tmp_path, monkeypatch, cache):
    put(memory, "/vectors", "a.npy", ROWS, tmp_path)
    ordinary = MemoryFileSystem.get_file

    def overtaken(self, path, local, **settings):
        ordinary(self, path, local, **settings)
        put(self, "/vectors", "a.npy", ROWS + 1, tmp_path)

    monkeypatch.setattr(MemoryFileSystem, "get_file", overtaken)
    with refused(ValueError, "memory://vectors/a.npy", "changed"):
        Shards("memory://vectors/a.npy")
    assert not list(cache.rglob("a.npy"))


def read_slowly(folder, cache, fetches):
    """Read shards of a store that notes each fetch; in a process of its own."""
    os.environ["FEWSHOT_CALLBACKS_CACHE"] = cache
    from fsspec.implementations.dirfs import DirFileSystem

    class Slow(DirFileSystem):
        protocol = "slow"

        def __init__(self, **settings):
            super().__init__(path=folder, fs=fsspec.filesystem("file"))

        def get_file(self, path, local, **settings):
            with Path(fetches).open("a", encoding="utf-8") as notes:
                notes.write("fetched\n")
            content = self.cat_file(path)
            with Path(local).open("wb") as half:
                half.write(content[:50])
                half.flush()
                import time

                time.sleep(1)
                half.write(content[50:])

    fsspec.register_implementation("slow", Slow, clobber=True)
    np.testing.assert_array_equal(Shards("slow://a.npy")[:], ROWS)


def test_two_processes_fetch_a_file_once(tmp_path):
    (tmp_path / "store").mkdir()
    np.save(tmp_path / "store" / "a.npy", ROWS)
    fetches = tmp_path / "fetches.txt"
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "store"), str(tmp_path / "cache"), str(fetches))
    processes = [context.Process(target=read_slowly, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert fetches.read_text(encoding="utf-8") == "fetched\n"


def test_a_note_says_what_is_fetched_if_it_is_large(memory, tmp_path, monkeypatch, capsys, cache):
    put(memory, "/vectors", "a.npy", ROWS, tmp_path)
    Shards("memory://vectors/a.npy")
    assert capsys.readouterr().err == ""
    shutil.rmtree(cache)
    monkeypatch.setattr(remote_cache, "_NOTICE_BYTES", 100)
    Shards("memory://vectors/a.npy")
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: ")
    assert missing_facts(note, ("memory://vectors/a.npy", "0.0 MB", cache / "remote", "FEWSHOT_CALLBACKS_CACHE")) == []


def test_a_disk_without_room_is_said_before_anything_is_fetched(memory, tmp_path, monkeypatch, cache):
    paths = fetched(monkeypatch, memory)
    put(memory, "/vectors", "a.npy", ROWS, tmp_path)
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    address = "memory://vectors/a.npy"
    with refused(ValueError, address, cache / "remote", "0.0 MB", "free", "FEWSHOT_CALLBACKS_CACHE"):
        Shards("memory://vectors/*.npy")
    assert paths == []


@pytest.mark.parametrize(
    ("address", "facts"),
    [
        ("memory://vectors/*.parquet", ("memory://vectors/*.parquet", "file", "folder", "glob")),
        ("memory://other/*.npy", ("memory://other/*.npy", *PLACES)),
        ("memory://vectors/b.npy", ("memory://vectors/b.npy", *PLACES)),
        ("memory://vectors/a.pkl", ("memory://vectors/a.pkl", ".npy", ".safetensors", "pickle", "code")),
        ("memory://vectors/*", ("memory://vectors/a.pkl", ".npy", ".safetensors", "pickle", "code")),
        ("nonsense://vectors/*.npy", ("nonsense://vectors/*.npy", "protocol", "fsspec.available_protocols()")),
    ],
)
def test_what_cannot_be_read_is_named_and_nothing_is_fetched(memory, tmp_path, address, facts, monkeypatch):
    paths = fetched(monkeypatch, memory)
    put(memory, "/vectors", "c.npy", ROWS, tmp_path)
    memory.pipe("/vectors/a.pkl", b"pickle")
    with refused(ValueError, *facts):
        Shards(address)
    assert paths == []


def test_a_protocol_without_its_package_is_refused_with_the_line_that_installs_it(monkeypatch):
    missing = {"class": "nowhere_fs.FileSystem", "err": "Install nowhere_fs"}
    monkeypatch.setitem(known_implementations, "nowhere", missing)
    with refused(ModuleNotFoundError, "nowhere://a.npy", "pip install nowhere_fs"):
        Shards("nowhere://a.npy")


def test_a_store_that_cannot_be_reached_is_named_with_the_reason(memory, monkeypatch):
    def refuse(self, path, **settings):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    with refused(ValueError, "memory://a.npy", "no route to host", "address", "network", "keys"):
        Shards("memory://a.npy")


@pytest.fixture
def web_server(tmp_path):
    """The address of a web server, and the folder that it shows."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def test_shards_on_a_web_server_are_read_and_fetched_anew_once_they_change(web_server, cache):
    address, folder = web_server
    for part in range(2):
        np.save(folder / f"part-{part}.npy", ROWS + part)
    np.testing.assert_array_equal(Shards(f"{address}/part-1.npy?key=secret")[:], ROWS + 1)
    np.testing.assert_array_equal(Shards(f"{address}/*.npy")[:], np.concatenate([ROWS, ROWS + 1]))
    assert not [path for path in cache.rglob("*") if "secret" in path.name]
    np.save(folder / "part-1.npy", ROWS + 7)
    os.utime(folder / "part-1.npy", (1e9, 1e9))
    np.testing.assert_array_equal(Shards(f"{address}/part-1.npy")[:], ROWS + 7)
    with refused(ValueError, f"{address}/part-2.npy", *PLACES):
        Shards(f"{address}/part-2.npy")


@pytest.mark.slow
def test_shards_in_s3_are_fetched_once_for_each_version(s3, tmp_path, monkeypatch):
    for part in range(2):
        put(s3, "bucket/vectors", f"part-{part}.parquet", ROWS + part, tmp_path)
    paths = fetched(monkeypatch, s3)
    for address in ("s3://bucket/vectors/*.parquet", "s3://bucket/vectors/"):
        np.testing.assert_array_equal(Shards(address)[:], np.concatenate([ROWS, ROWS + 1]))
    np.testing.assert_array_equal(Shards(Path("s3://bucket/vectors/part-1.parquet"))[:], ROWS + 1)
    assert len(paths) == 2
    put(s3, "bucket/vectors", "part-0.parquet", ROWS + 5, tmp_path)
    np.testing.assert_array_equal(Shards("s3://bucket/vectors/*.parquet")[:4], ROWS + 5)
    assert len(paths) == 3


@pytest.mark.slow
def test_a_wrong_bucket_a_wrong_name_and_a_lack_of_permission_in_s3_are_told_apart(s3, tmp_path, monkeypatch):
    put(s3, "bucket/vectors", "a.npy", ROWS, tmp_path)
    with refused(ValueError, "s3://bukket/*.npy", "The specified bucket does not exist", *PLACES):
        Shards("s3://bukket/*.npy")
    with refused(ValueError, "s3://bucket/vectors/*.npz", "glob"):
        Shards("s3://bucket/vectors/*.npz")

    async def denied(self, *arguments, **settings):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(s3), "_lsdir", denied)
    monkeypatch.setattr(type(s3), "_info", denied)
    type(s3).clear_instance_cache()
    for address in ("s3://bucket/vectors/*.npy", "s3://bucket/vectors/a.npy"):
        with refused(PermissionError, address, "Access Denied", "keys"):
            Shards(address)


# ------------------------------------------------------------------------------------------------------ heads and footers

MANY = np.random.default_rng(0).normal(size=(20_000, 64)).astype(np.float32)


def write_many(file, kind):
    """Write 20,000 rows with a label each, as the ending of the file and a kind of it say."""
    labels = np.arange(len(MANY))
    if file.suffix == ".npy":
        np.save(file, MANY)
    elif file.suffix == ".npz":
        save = np.savez_compressed if kind == "compressed" else np.savez
        save(file, embeddings=MANY, labels=labels)
    elif file.suffix == ".safetensors":
        torch = pytest.importorskip("safetensors.torch").torch
        tensors = {"embeddings": torch.from_numpy(MANY).bfloat16(), "labels": torch.from_numpy(labels)}
        pytest.importorskip("safetensors.torch").save_file(tensors, file)
    else:
        arrow = pytest.importorskip("pyarrow")
        lists = list(MANY)
        if kind == "fixed":
            lists = arrow.FixedSizeListArray.from_arrays(arrow.array(MANY.ravel()), 64)
        table = arrow.table({"embeddings": lists, "labels": labels})
        if file.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, file, row_group_size=3000)
        else:
            write_arrow = arrow.ipc.new_stream if kind == "stream" else arrow.ipc.new_file
            with write_arrow(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=2000)


@pytest.mark.parametrize(
    ("ending", "kind", "bytes_read"),
    [
        # Each of three files is opened twice: the first for the names of its arrays, and each for its length.
        (".npy", "", 2**19),
        (".npz", "", 2**20),
        (".npz", "compressed", 2**20),
        (".safetensors", "", 2**19),
        (".parquet", "lists", 2**19),
        (".parquet", "fixed", 2**19),
        # The heads of 40 batches, with the labels between them, and a batch of the vectors.
        (".arrow", "lists", 3 * 2**22),
        (".feather", "fixed", 3 * 2**22),
    ],
)
def test_a_plan_reads_heads_and_footers_and_fetches_nothing(tmp_path, cache, capsys, ending, kind, bytes_read):
    (tmp_path / "store").mkdir()
    for part in range(3):
        write_many(tmp_path / "store" / f"{part}{ending}", kind)
    stored = sum(file.stat().st_size for file in (tmp_path / "store").iterdir())
    reads = counting_store(str(tmp_path / "store"))
    words = ["plan", "--json", "--files"]
    assert main([*words, f"counted://*{ending}"]) == 0
    of_remote = json.loads(capsys.readouterr().out)
    assert sum(size for _, size in reads) < min(bytes_read, 0.6 * stored)
    assert not cache.exists()
    assert main([*words, str(tmp_path / "store" / f"*{ending}")]) == 0
    of_local = json.loads(capsys.readouterr().out)
    assert (of_remote["queries"], of_remote["dim"], of_remote["bytes_to_fetch"]) == (60_000, 64, stored)
    assert of_remote["bytes_per_second"] is None
    for name in ("queries", "gallery", "dim", "gallery_bytes", "bytes_read"):
        assert of_remote[name] == of_local[name]


def test_a_stream_is_fetched_for_a_plan_since_it_has_no_footer(tmp_path, cache, capsys):
    (tmp_path / "store").mkdir()
    write_many(tmp_path / "store" / "a.arrow", "stream")
    counting_store(str(tmp_path / "store"))
    assert main(["plan", "--json", "--files", "counted://a.arrow"]) == 0
    assert json.loads(capsys.readouterr().out)["queries"] == 20_000
    assert len(list(cache.rglob("a.arrow"))) == 1


def test_a_plan_of_remote_files_names_the_file_that_is_damaged(tmp_path, capsys):
    (tmp_path / "store").mkdir()
    np.save(tmp_path / "store" / "0.npy", MANY)
    (tmp_path / "store" / "1.npy").write_bytes(b"damaged")
    counting_store(str(tmp_path / "store"))
    assert main(["plan", "--files", "counted://*.npy"]) == 1
    assert missing_facts(capsys.readouterr().err, ("counted://1.npy", "damaged")) == []
