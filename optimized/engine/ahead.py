"""Work that is done ahead, by a thread of its own, while the caller is busy with what was done before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_NAME = "radixmlp-ahead"


@dataclass(frozen=True)
class _Failed:
    """What the producer raised."""

    error: BaseException


_DONE = object()


class _Ahead(Generic[T]):
    """An iterator over what a thread takes out of a generator, at most `depth` items ahead."""

    def __init__(self, produce: Generator[T, None, None], depth: int) -> None:
        self._produce = produce
        self._ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._slots = threading.Semaphore(depth)
        self._stopped = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last: object = _DONE
        try:
            while True:
                self._slots.acquire()
                if self._stopped:
                    break
                item = next(self._produce, _DONE)
                if item is _DONE:
                    break
                self._ready.put(item)
        except BaseException as error:  # whatever it is, the caller is the one to see it
            last = _Failed(error)
        finally:
            self._produce.close()
            self._ready.put(last)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._ready.get()
        self._slots.release()
        if item is _DONE:
            self._ended = True
            raise StopIteration
        if isinstance(item, _Failed):
            self._ended = True
            raise item.error
        return item  # type: ignore[return-value]

    def stop(self) -> None:
        """Have the thread end after the item it is at, and wait for it."""
        self._stopped = True
        self._slots.release()
        self._thread.join()


@contextmanager
def ahead(produce: Generator[T, None, None], depth: int = 2) -> Iterator[Iterator[T]]:
    """Run `produce` in a thread, `depth` items ahead of the block that iterates over the result.

    What it raises is raised at the item where it happened. However the block is left (its end, an exception, an
    interrupt), the thread has ended and the generator is closed afterwards.
    """
    items = _Ahead(produce, depth)
    try:
        yield items
    finally:
        items.stop()
