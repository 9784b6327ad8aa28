# SPDX-License-Identifier: Apache-2.0
"""Horovod's data loaders, in which a thread reads batches ahead."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_END = object()


class BaseDataLoader(ABC):
    """Base class for loaders. Derived classes define __len__() and _iterate()."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """Yields the batches that the loader reads."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Hook that may change a batch. It is called on the consumer's thread."""
        return batch


class _Reader:
    def __init__(self, batches: Iterator[Any], size: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(size)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(batches,), daemon=True)
        self._thread.start()

    def _read(self, batches: Iterator[Any]) -> None:
        last: Any = _END
        try:
            for batch in batches:
                self._queue.put((batch, None))
                if self._stopped.is_set():
                    return
        # Even SystemExit is passed on. Otherwise the consumer would wait forever.
        except BaseException as error:
            last = error
        self._queue.put((_END, last))

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch, error = self._queue.get()
            if batch is not _END:
                yield batch
            elif error is _END:
                return
            else:
                raise error

    def stop(self) -> None:
        """Ends the thread, even if there are unread batches. An iterator that is still waiting for
        a batch raises RuntimeError."""
        self._stopped.set()
        while self._thread.is_alive() or not self._queue.empty():
            try:  # make room for a waiting put()
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()
        why = RuntimeError("a later iteration or close_async_loader() has ended this one")
        self._queue.put((_END, why))


class AsyncDataLoaderMixin:
    """Mixin that reads batches ahead on a thread.

    Usage: `class Loader(AsyncDataLoaderMixin, MyLoader)`.
    Errors of the loader are raised on the consumer's thread.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        """Reads up to `async_loader_queue_size` batches ahead. If this is 0, starts no thread."""
        self.async_loader_queue_size = async_loader_queue_size
        self._reader: _Reader | None = None
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        self.close_async_loader()
        self._reader = reader = _Reader(loader._iterate(), self.async_loader_queue_size)
        for batch in reader:
            yield loader._process_batch(batch)

    def close_async_loader(self) -> None:
        """Ends the thread of an unfinished iteration."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.stop()
