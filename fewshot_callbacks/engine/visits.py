"""How gallery items visit queries: those of other processes travel, chunk by chunk; those in files are read.

Each process numbers all items: its own first, then those of the next process, and so on. What is known of an item
beside its row (labels, identities) is known everywhere, by these numbers; rows are known of the own part and of one
visiting chunk. With one process there is one part, and nothing travels.

Two rules keep processes together. Whatever steers a collective call comes from numbers that all have. Whatever a
score is made of is that of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.journal import Record
from fewshot_callbacks.stored import spans

# In which a part travels, at least.
CHUNKS = 4


class Part(NamedTuple):
    """Some items of the gallery, whose rows are here: those of this process, or visitors."""

    # of the queries with them
    vectors: Vectors
    # number of the first item among all
    first: int
    # they are the queries, so that a tile serves its columns as well
    mutual: bool
    # so many of the first queries meet them here; what the others meet is met in another process as well
    meets: int
    # they are queries elsewhere, for which is counted here
    guests: bool = False


def everyone(processes: Processes, mine: NDArray[Any]) -> NDArray[Any]:
    """Return what all processes hold, in the order in which this one numbers it."""
    parts = processes.gather(mine)
    return np.concatenate(parts[processes.rank :] + parts[: processes.rank])


def visitors(
    vectors: Vectors, *, mutual: bool, once: bool, travellers: Sequence[Any] = (), record: Record | None = None
) -> Iterator[Part]:
    """Yield the parts of the gallery that are not in memory, and those of all other processes; collective.

    Args:
        vectors: Of this process.
        mutual: A pair of one set is met in both processes. Of two parts the lower process meets the first half of its rows
            with all of the other, and the higher one all of its rows with the other half: so each pair is met once.
        once: Only so.
        travellers: Who counts for visitors, as `ranks.RankCounter` does: `leave` gives what goes along with some items,
            `receive` gets ready for visitors, `counted` gives what goes back, and `add` takes what came back.
        record: Says which parts are done, and is told which are: the first in memory, then these in their order.
    """
    processes, own, resident = vectors.processes, vectors.items, len(vectors.pairs.gallery)
    rank, count, queries = processes.rank, processes.count, len(vectors.pairs.queries)
    every = processes.gather((own, vectors.pieces))
    sizes, chunks = [size for size, _ in every], max(CHUNKS, *(pieces for _, pieces in every))
    half, begun = chunks // 2, 1 if record is None else max(1, record.part)
    pieces = spans(resident, own, max(1, -(-own // chunks)))
    most = max(processes.gather(len(pieces)))
    reading = iter(vectors.read(pieces[begun - 1 :]))
    for number in range(begun, most + 1):
        if record is not None:
            record.reached(number)
        for some, values in islice(reading, 1):
            yield Part(vectors.with_gallery(values, some.start), some.start, False, queries)
            del values  # before the next piece but one is read
    first = own
    for step in range(1, count):
        destination, source = (rank - step) % count, (rank + step) % count
        number = most + 1 + (step - 1) * chunks  # of the first visit
        left = range(min(chunks, max(0, begun - number)), chunks)
        for chunk, (some, here) in zip(left, vectors.read(_span(own, chunk, chunks) for chunk in left), strict=True):
            if record is not None:
                record.reached(number + chunk)
            stays = some.start == some.stop or (once and mutual and rank < destination and chunk < half)
            along = [torch.from_numpy(table) for traveller in travellers for table in traveller.leave(some)]
            theirs = processes.exchange(None if stays else [torch.from_numpy(here), *along], destination, source)
            first_here, back = first + _span(sizes[source], chunk, chunks).start, None
            if theirs is not None:
                halfway = _span(queries, half, chunks).start
                meets = queries if not mutual else halfway if rank < source else queries * (chunk >= half)
                values, *tables = (table.numpy() for table in theirs)
                part = Part(vectors.with_gallery(values, first_here), first_here, False, meets, bool(travellers))
                for traveller in travellers:
                    traveller.receive(part, tables)
                yield part
                back = [torch.from_numpy(counters) for traveller in travellers for counters in traveller.counted()]
                del part, values, tables, theirs  # visitors leave before others come
            if travellers:
                counted = processes.exchange(back, source, destination)
                for traveller in travellers if counted else ():
                    traveller.add(some, [counters.numpy() for counters in counted or ()])
        first += sizes[source]


def _span(items: int, chunk: int, chunks: int) -> slice:
    return slice(items * chunk // chunks, items * (chunk + 1) // chunks)
