"""The whole gallery of all processes, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

from fewshot_callbacks.engine.chunks import Chunk, ChunkPlan, all_queries, disk_chunks
from fewshot_callbacks.engine.exchange import RemoteCounter, RemoteExchange
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.files.journal import PassRecord


def gallery_chunks(
    vectors: Vectors,
    *,
    symmetric: bool = False,
    counter: RemoteCounter | None = None,
    record: PassRecord | None = None,
) -> Iterator[Chunk]:
    """Yield the whole gallery: rows in memory, rows on disk, rows of the other processes. *Collective*.

    A consumer must drop each chunk before it asks for the next one. Then at most one chunk is in memory at a time, in
    addition to the rows of this process and the chunk that is read, or sent, next.

    Args:
        vectors: Queries and gallery of this process.
        symmetric: Whether queries and gallery are one set whose scores are symmetric. Then each pair is compared in only one
            chunk of one process.
        counter: Counts for the items of remote chunks.
        record: Journal entry of this pass. Finished steps are skipped. Step 0 is the rows in memory; the chunks on disk and
            then the remote chunks follow.
    """
    first_step = 0 if record is None else record.step
    if first_step == 0:
        yield Chunk(vectors, 0, symmetric, all_queries(vectors))
        first_step = 1
    plan = ChunkPlan.of(vectors)
    yield from disk_chunks(vectors, plan, first_step, record)
    yield from RemoteExchange(vectors, plan, counter, symmetric=symmetric).chunks(first_step, record)
