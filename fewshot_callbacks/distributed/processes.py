"""Collective communication between processes that each have a part of one set.

All calls are collective: every process makes the same calls in the same order. The rows of a set are only sent to one
process at a time (`exchange`), so that no process has the whole set. Small values are sent to all processes (`gather`,
`summed`).

To add another way to communicate, subclass `Processes` and define `rank`, `count`, `_gather` and `_swap`.
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

from fewshot_callbacks.errors import InputError

T = TypeVar("T")


class ShardIndex(NamedTuple):
    """The global indices of the queries and gallery items of this process."""

    queries: Int[Tensor, "queries"]
    gallery: Int[Tensor, "gallery"]


class RemoteError(RuntimeError):
    """Raised when another process has failed, with the text of that process's error."""


@dataclass(frozen=True)
class _Failure:
    """An error of one process, as it is sent to the others.

    Attributes:
        message: The text of the error that the others raise.
        error_type: The type of that error.
    """

    message: str
    error_type: type[BaseException]

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        # An exception is sent as text. Its class may be unknown to the other process, or take other arguments than a
        # string, and the objects that it refers to may be large or impossible to pickle.
        if type(error) is ValueError or isinstance(error, InputError):
            return cls(str(error), type(error))
        if not isinstance(error, Exception):  # an interrupt of one process interrupts all
            return cls(f"{type(error).__name__} in another process", KeyboardInterrupt)
        return cls(f"{type(error).__name__}: {error}", RemoteError)


@contextmanager
def to_the_end() -> Iterator[None]:
    """Postpone an interrupt (Ctrl-C) to the end of the block, since the other processes wait for the rest of a call.

    A second interrupt is raised at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main_thread = threading.current_thread() is threading.main_thread()
    # Only the main thread can set a handler, and handlers only run there. If the signal is ignored or left to the
    # system, `getsignal` returns no function that could be called later.
    if not is_main_thread or not callable(handler):
        yield
        return
    interrupts: list[tuple[Any, ...]] = []

    def postpone(*arguments: Any) -> None:
        interrupts.append(arguments)
        if len(interrupts) > 1:
            handler(*interrupts.pop())

    signal.signal(signal.SIGINT, postpone)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            handler(*interrupts[0])


def presence(argument: object) -> str:
    """Return "left out" or "given", for arguments of `refuse_other_calls` whose values may differ between processes."""
    return "left out" if argument is None else "given"


class Processes(ABC):
    """The interface of a group of processes for `evaluate_retrieval`; `metrics.TorchProcesses` implements it.

    Attributes:
        rank: The number of this process, from 0.
        count: The number of processes.
    """

    rank: int = 0
    count: int = 1
    # Whether an error was already exchanged: the others have then passed the call that would report it.
    _error_is_known = False
    # How many blocks of `together` surround the current call.
    _depth = 0

    # -------------------------------------------------------------------------------- what a kind of processes implements

    @abstractmethod
    def _gather(self, value: Any) -> list[Any]:
        """Return the value of each process, by rank, on every process."""

    @abstractmethod
    def _swap(
        self, sent: Sequence[Tensor], destination: int | None, received: Sequence[Tensor], sender: int | None
    ) -> None:
        """Send contiguous tensors on the CPU to one process, and fill `received` with the tensors of another one.

        Args:
            sent: The tensors to send.
            destination: Rank of the process that receives them; None if nothing is sent.
            received: Empty tensors of the right shapes and types.
            sender: Rank of the process that fills them; None if nothing is received.
        """

    # ----------------------------------------------------------------------------------------------------- communication

    def gather(self, value: T) -> list[T]:
        """Return the value of each process, by rank, on every process.

        Raises:
            ValueError: If another process has failed with a ValueError (see `together`).
            RemoteError: If another process has failed with any other error.
            KeyboardInterrupt: If another process was interrupted.
        """
        with to_the_end():
            values: list[Any] = self._gather(value)
            failures = [gathered for gathered in values if isinstance(gathered, _Failure)]
            if failures:
                self._error_is_known = True
        if failures:
            raise failures[0].error_type(failures[0].message)
        return values

    def to_first(self, value: T) -> list[T] | None:
        """Return the value of each process, by rank, on the first process; None on the others."""
        values = self.gather(value)
        return values if self.rank == 0 else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Report an error inside the block to the other processes at their next call, so that they do not wait forever.

        No process leaves the outermost block before all processes have reached its end.
        """
        self._error_is_known = False
        self._depth += 1
        try:
            yield
            # The other processes learn of an error at their next call. After the outermost block there may be no call,
            # so this one is made here.
            if self._depth == 1 and self.count > 1:
                self.gather(None)
        except BaseException as error:
            # An error is reported once: the other processes take part in one call for it. If the error came from another
            # process, they have already made that call.
            if self.count > 1 and not self._error_is_known:
                self._error_is_known = True
                with to_the_end():
                    self._gather(_Failure.of(error))
            raise
        finally:
            self._depth -= 1

    def refuse_other_calls(self, call: str, arguments: Mapping[str, object]) -> None:
        """Raise an error if processes were called with different arguments. A collective function calls this first.

        Args:
            call: The function, for messages.
            arguments: The arguments that must be the same in every process. Values are compared as they are printed.

        Raises:
            ValueError: An argument differs. Every process raises the same message, which names the argument.
        """
        by_rank = self.gather({name: str(value) for name, value in arguments.items()})
        for rank, printed in enumerate(by_rank):
            for name, value in by_rank[0].items():
                if printed[name] != value:
                    raise InputError(
                        f"{call}: {name} is {value} in process 0, but {printed[name]} in process {rank}. Call it in the "
                        "same way in every process. A process without items passes empty tensors."
                    )

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all processes."""
        if self.count == 1:
            return list(values)
        largest: list[float] = np.max(self.gather(list(values)), axis=0).tolist()
        return largest

    def summed(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum of each value over all processes."""
        total: NDArray[np.int64] = np.sum(self.gather(values), axis=0)
        return total

    def joined(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the arrays of all processes, joined by rank."""
        return np.concatenate(self.gather(values)) if self.count > 1 else values

    def placed(self, columns: Tensor, places: Tensor, length: int) -> Tensor:
        """Return the columns of all processes in one array.

        Args:
            columns: (..., items) columns of this process.
            places: (items,) index of each column among all columns.
            length: Number of all columns. A column that no process has is zero.
        """
        # A single process that has all columns in order needs no copy, which may be large.
        if self.count == 1 and len(places) == length and bool((places == torch.arange(length)).all()):
            return columns
        result = columns.new_zeros(*columns.shape[:-1], length)
        for process_columns, process_places in self.gather((columns, places)):
            result[..., process_places] = process_columns
        return result

    def exchange(self, sent: Sequence[Tensor] | None, destination: int, sender: int) -> list[Tensor] | None:
        """Send tensors to one process, and return the tensors that another process sends.

        Args:
            sent: Tensors on the CPU; None to send nothing.
            destination: Rank of the process that they go to.
            sender: Rank of the process that sends to this one.

        Returns:
            The tensors of the sender; None if it sends nothing.
        """
        sent = None if sent is None else [tensor.contiguous() for tensor in sent]
        with to_the_end():
            # A receiver needs the shapes before it can allocate tensors. In this call, all processes also learn whether a
            # process has failed, so that no tensor is sent without a receiver.
            shapes = self.gather(None if sent is None else [(tensor.shape, tensor.dtype) for tensor in sent])
            shapes_of_sender = shapes[sender]
            received = None
            if shapes_of_sender is not None:
                received = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes_of_sender]
            self._swap(sent or (), destination if sent else None, received or (), sender if received else None)
        return received


class Alone(Processes):
    """A single process with the whole set."""

    def _gather(self, value: Any) -> list[Any]:
        return [value]

    def _swap(
        self, sent: Sequence[Tensor], destination: int | None, received: Sequence[Tensor], sender: int | None
    ) -> None:
        del destination, sender  # both are this process
        for target, tensor in zip(received, sent, strict=True):
            target.copy_(tensor)


ALONE = Alone()
