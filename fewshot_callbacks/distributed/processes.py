"""Collective communication between processes that each hold a part of one set.

All calls are collective: every process makes the same calls in the same order. Data for one process is never sent to all,
so that no process ever holds the whole set.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")


class ShardIndex(NamedTuple):
    """Which of all items this process holds: their indices among all."""

    queries: Int[Tensor, "queries"]
    gallery: Int[Tensor, "gallery"]


class RemoteError(RuntimeError):
    """Raised when another process has failed; its text is that of the other process's error."""


@dataclass(frozen=True)
class _Failure:
    words: str
    # what the others raise
    kind: type[BaseException]

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        # An exception travels as its words: its class may not be known to the other process, or take other arguments
        # than a string, and what it refers to may be large, or impossible to pickle.
        if type(error) is ValueError:
            return cls(str(error), ValueError)
        if not isinstance(error, Exception):  # an interrupt of one is an interrupt of all
            return cls(f"{type(error).__name__} in another process", KeyboardInterrupt)
        return cls(f"{type(error).__name__}: {error}", RemoteError)


@contextmanager
def to_the_end() -> Iterator[None]:
    """An interrupt (Ctrl-C) inside the block is raised after it: the others would wait for the rest of a call.

    A second one is raised at once.
    """
    before = signal.getsignal(signal.SIGINT)
    # Python runs handlers in the main thread alone, where alone they can be set. Where the signal is ignored or left to
    # the system, `getsignal` gives no function that could be called later.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # no signal is handled here
        return
    interrupts: list[tuple[Any, ...]] = []

    def handle(*arguments: Any) -> None:
        interrupts.append(arguments)
        if len(interrupts) > 1:
            before(*interrupts.pop())

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            before(*interrupts[0])


def presence(argument: object) -> str:
    """Say whether an argument is there, for `Processes.refuse_other_calls`: its value is another one in each process."""
    return "left out" if argument is None else "given"


class Processes(ABC):
    """The interface of a group of processes for `evaluate_retrieval`; `metrics.TorchProcesses` implements it."""

    rank: int = 0
    count: int = 1
    _failed = False
    _depth = 0

    # --------------------------------------------------------------------------------------------- what a group fills in

    @abstractmethod
    def _gather(self, mine: Any) -> list[Any]:
        """What each process holds, by rank."""

    @abstractmethod
    def _swap(self, mine: Sequence[Tensor], to: int | None, theirs: Sequence[Tensor], source: int | None) -> None:
        """Send contiguous tensors on the CPU to one process, and fill those that another one sends."""

    # ---------------------------------------------------------------------------------------------------------- talking

    def gather(self, mine: T) -> list[T]:
        """What each process holds, by rank, on every process.

        Raises:
            ValueError: What another process has failed with (see `together`), if that was a ValueError.
            RemoteError: Any other error of another process.
            KeyboardInterrupt: If another process was interrupted.
        """
        with to_the_end():
            everyone: list[Any] = self._gather(mine)
            failures = [held for held in everyone if isinstance(held, _Failure)]
            if failures:
                self._failed = True  # they are not waiting for our own
        if failures:
            raise failures[0].kind(failures[0].words)
        return everyone

    def to_first(self, mine: T) -> list[T] | None:
        """What each process holds, by rank, on the first process; None on the others."""
        everyone = self.gather(mine)
        return everyone if self.rank == 0 else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Report an error inside the block to the other processes at their next call, so that they do not wait for ever.

        No process leaves the outermost block before all have reached its end.
        """
        self._failed = False
        self._depth += 1
        try:
            yield
            # An inner block need not wait: an error is heard at the next call of all. After the outermost there may be
            # none.
            if self._depth == 1 and self.count > 1:
                self.gather(None)
        except BaseException as error:
            # Once: the others take part in one call for this error. Where the error came from another process, they are
            # past it.
            if self.count > 1 and not self._failed:
                self._failed = True
                with to_the_end():
                    self._gather(_Failure.of(error))
            raise
        finally:
            self._depth -= 1

    def refuse_other_calls(self, call: str, arguments: Mapping[str, object]) -> None:
        """Refuse processes that were called in different ways. The first exchange of a collective function.

        Args:
            call: The function, for messages.
            arguments: What must be the same in every process. Values are compared as they are printed.

        Raises:
            ValueError: With the argument that differs; the same in every process.
        """
        first, *others = self.gather({name: str(value) for name, value in arguments.items()})
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise ValueError(
                        f"{call}: {name} is {value} in process 0, {other[name]} in process {rank}. Call it in the same way "
                        "in every process; one that holds no item passes empty tensors."
                    )

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest value of each number over all processes."""
        return np.max(self.gather(list(values)), axis=0).tolist() if self.count > 1 else list(values)

    def summed(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum of each number over all processes."""
        total: NDArray[np.int64] = np.sum(self.gather(values), axis=0)
        return total

    def joined(self, mine: NDArray[Any]) -> NDArray[Any]:
        """Concatenate the arrays of all processes, by rank."""
        return np.concatenate(self.gather(mine)) if self.count > 1 else mine

    def placed(self, mine: Tensor, place: Tensor, length: int) -> Tensor:
        """Gather the columns of all processes into one array.

        Args:
            mine: (..., items) columns of this process.
            place: (items,) index of each of them among all columns.
            length: Number of all columns; those of no process are zero.
        """
        # Nothing is missing, and all is in place: no copy of what may be large.
        if self.count == 1 and len(place) == length and bool((place == torch.arange(length)).all()):
            return mine
        whole = mine.new_zeros(*mine.shape[:-1], length)
        for part, where in self.gather((mine, place)):
            whole[..., where] = part
        return whole

    def exchange(self, mine: Sequence[Tensor] | None, to: int, source: int) -> list[Tensor] | None:
        """Send tensors to one process, and receive those that another one sends to this one; None stands for nothing.

        Args:
            mine: On the CPU.
            to: Rank that they go to.
            source: Rank from which others come.
        """
        mine = None if mine is None else [tensor.contiguous() for tensor in mine]
        with to_the_end():
            # The shapes first, since a receiver has to make room before anything arrives. It is also where all learn
            # that one has failed, and no tensor is then sent that nobody takes.
            shapes = self.gather(None if mine is None else [(tensor.shape, tensor.dtype) for tensor in mine])
            coming = shapes[source]
            theirs = None if coming is None else [torch.empty(shape, dtype=dtype) for shape, dtype in coming]
            self._swap(mine or (), to if mine else None, theirs or (), source if theirs else None)
        return theirs


class Alone(Processes):
    """One process, which holds everything."""

    def _gather(self, mine: Any) -> list[Any]:
        return [mine]

    def _swap(self, mine: Sequence[Tensor], to: int | None, theirs: Sequence[Tensor], source: int | None) -> None:
        del to, source
        for target, tensor in zip(theirs, mine, strict=True):
            target.copy_(tensor)


ALONE = Alone()
