"""Stores for tests: the memory of fsspec, and an S3 server of this machine."""

import contextlib
import os
import socket
import urllib.request
from collections.abc import Iterator

from fsspec.implementations.memory import MemoryFileSystem


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
