"""The exchange: each process receives the items of all others, one remote chunk at a time.

A score of a symmetric set counts for both of its items. If the items belong to two processes, one of the two processes
computes the score, and also counts for the item of the other process (`RemoteCounter`). So each estimate is computed once,
as long as the queries are ranked in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray

from fewshot_callbacks.engine.chunks import Chunk, ChunkPlan, all_queries
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.files.journal import Arrays, PassRecord


@runtime_checkable
class RemoteCounter(Protocol):
    """An observer that also counts for the queries of other processes.

    In a symmetric set, a pair whose items belong to two processes is computed in one of them, but counts for both items. So
    the items of a remote chunk are sent with their thresholds, and their counts are sent back.
    """

    def export_thresholds(self, queries: slice) -> Arrays:
        """Return the thresholds of queries of this process, to be sent."""

    def import_thresholds(self, chunk: Chunk, thresholds: Arrays) -> None:
        """Start counting for the items of a remote chunk, which have these thresholds."""

    def export_counts(self) -> Arrays:
        """Return the counts of the items of the remote chunk, to be sent back."""

    def import_counts(self, queries: slice, counts: Arrays) -> None:
        """Add what another process has counted for queries of this process."""


class _Round(NamedTuple):
    """One round of the exchange, in which each process sends all its items to one other process."""

    destination: int
    # rank of the process whose items are received
    sender: int
    # number of the first item of the sender, as `gather_in_item_order` numbers items in this process
    first_item_of_sender: int
    # step of the first chunk
    first_step: int


def queries_of_symmetric_chunk(plan: ChunkPlan, rank: int, sender: int, chunk: int) -> slice:
    """Return the queries that a process compares with a chunk of another process, if queries and items are one set.

    Each process receives the items of the other, so both have every pair of their items. One of the two computes a pair:

                                           item of the higher rank
                                           in its first half    in its second half
        item of the    in its first half   lower rank           higher rank
        lower rank     in its second half  higher rank          lower rank

    The process of the lower rank has its queries in the rows of this table, and the chunk in a column. So it compares the
    queries of the half that the chunk has among the items of its sender. The process of the higher rank has its queries in
    the columns, and the chunk in a row. So it compares the queries of the other half.

    Each process then computes half of the pairs, and about the same number with every chunk that it receives.

    Args:
        plan: How the items of all processes are cut into chunks.
        rank: The process whose queries are returned.
        sender: The process whose items are in the chunk.
        chunk: Number of the chunk.
    """
    queries = plan.items[rank]
    first_half = slice(0, plan.first_half_stop(rank))
    second_half = slice(plan.first_half_stop(rank), queries)
    is_lower_rank = rank < sender
    return first_half if plan.is_in_first_half(chunk) == is_lower_rank else second_half


class RemoteExchange:
    """Receives the items of all other processes, and sends the items of this one to them. All methods are collective.

    Args:
        vectors: Queries and gallery of this process.
        plan: How the items of all processes are cut into chunks.
        counter: Counts for the items of remote chunks.
        symmetric: Whether queries and gallery are one set whose scores are symmetric.
    """

    def __init__(self, vectors: Vectors, plan: ChunkPlan, counter: RemoteCounter | None, *, symmetric: bool) -> None:
        self.vectors = vectors
        self.plan = plan
        self.counter = counter
        self.symmetric = symmetric
        self.processes = vectors.processes

    def chunks(self, first_step: int, record: PassRecord | None) -> Iterator[Chunk]:
        """Yield the remote chunks from a step on."""
        plan = self.plan
        for this_round in self._rounds():
            steps_done = min(plan.chunks, max(0, first_step - this_round.first_step))
            remaining = range(steps_done, plan.chunks)
            own_chunks = self.vectors.read(plan.slice_of(self.processes.rank, chunk) for chunk in remaining)
            for chunk, (own_items, own_rows) in zip(remaining, own_chunks, strict=True):
                if record is not None:
                    record.begin_step(this_round.first_step + chunk)
                yield from self._swap(this_round, chunk, own_items, own_rows)

    def _rounds(self) -> Iterator[_Round]:
        """Yield the rounds: in round r, each process sends to the process r ranks below and receives from r ranks above.

        So items arrive in the order of their numbers (`gather_in_item_order`), the items of the next rank first.
        """
        rank = self.processes.rank
        count = self.processes.count
        first_item = self.vectors.items
        for number in range(1, count):
            sender = (rank + number) % count
            first_step = 1 + self.plan.disk_steps + (number - 1) * self.plan.chunks
            yield _Round((rank - number) % count, sender, first_item, first_step)
            first_item += self.plan.items[sender]

    def _swap(self, this_round: _Round, chunk: int, own_items: slice, own_rows: NDArray[Any]) -> Iterator[Chunk]:
        """Send a chunk of own items and yield the received chunk, if any; then send its counts back."""
        # Both sides take the chunks in the same order, so messages do not name their chunk.
        destination, sender, first_item_of_sender, _ = this_round
        outgoing = self._with_thresholds(own_items, own_rows)
        received = self._exchange(outgoing, destination, sender)
        counts: Arrays | None = None
        if received is not None:
            rows, *thresholds = received
            first_item = first_item_of_sender + self.plan.slice_of(sender, chunk).start
            queries = all_queries(self.vectors)
            if self.symmetric:
                queries = queries_of_symmetric_chunk(self.plan, self.processes.rank, sender, chunk)
            remote = Chunk(
                self.vectors.with_gallery(rows, first_item), first_item, False, queries, self.counter is not None
            )
            if self.counter is not None:
                self.counter.import_thresholds(remote, thresholds)
            yield remote
            if self.counter is not None:
                counts = self.counter.export_counts()
            del remote, rows, thresholds, received  # frees memory before counts and the next chunk are received
        if self.counter is not None:
            own_counts = self._exchange(counts, sender, destination)
            if own_counts is not None:
                self.counter.import_counts(own_items, own_counts)

    def _with_thresholds(self, own_items: slice, own_rows: NDArray[Any]) -> Arrays | None:
        """Return the arrays that are sent with items; None if there are no items."""
        if len(own_rows) == 0:
            return None
        thresholds = [] if self.counter is None else self.counter.export_thresholds(own_items)
        return [own_rows, *thresholds]

    def _exchange(self, arrays: Arrays | None, destination: int, sender: int) -> Arrays | None:
        """Send arrays to one process and return the arrays from another; None for no arrays."""
        tensors = None if arrays is None else [torch.from_numpy(array) for array in arrays]
        received = self.processes.exchange(tensors, destination, sender)
        return None if received is None else [tensor.numpy() for tensor in received]
