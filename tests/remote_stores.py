"""Stores for tests: the memory of fsspec, and an S3 server of this machine."""

import contextlib
import os
import socket
import urllib.request
from collections.abc import Iterator

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile


@contextlib.contextmanager
def empty_memory() -> Iterator[MemoryFileSystem]:
    """The files of memory:// with nothing in them."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


@contextlib.contextmanager
def s3_server(monkeypatch) -> Iterator[object]:
    """An S3 server with an empty bucket named bucket; s3fs asks it, and no other."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in {**variables, "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy")]:
        monkeypatch.delenv(name)
    # Servers of one process share their buckets.
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")).close()
    S3FileSystem.clear_instance_cache()
    store = S3FileSystem()
    store.mkdir("bucket")
    try:
        yield store
    finally:
        S3FileSystem.clear_instance_cache()
        server.stop()


def counting_store(folder: str) -> list[tuple[str, int]]:
    """Show a folder at counted://, and return a list of the reads from now on: the name of a file, and the bytes."""
    reads: list[tuple[str, int]] = []

    class RangeFile(AbstractBufferedFile):
        """A file that is read by ranges of bytes, as files in a bucket are."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            content: bytes = self.fs.cat_file(self.path, start=start, end=end)
            reads.append((self.path, len(content)))
            return content

    class CountingStore(DirFileSystem):
        protocol = "counted"

        def __init__(self, **settings: object) -> None:
            super().__init__(path=folder, fs=fsspec.filesystem("file"))

        def get_file(self, path: str, local: str, **settings: object) -> None:
            reads.append((path, self.info(path)["size"]))
            super().get_file(path, local, **settings)

        def open(self, path: str, mode: str = "rb", **settings: object) -> RangeFile:
            return RangeFile(self, path, mode, **settings)

    fsspec.register_implementation("counted", CountingStore, clobber=True)
    CountingStore.clear_instance_cache()
    return reads
