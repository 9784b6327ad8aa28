# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for metrics: one thread with an event loop, a limited number of connections,
and a time limit for each, since anybody who reaches the port may connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from farandole.start.forks import not_inherited

_MOST = 64  # connections; beyond these the oldest one has to go
_PATIENCE = 5.0  # seconds for a request and the reading of its answer
_LONGEST = 1 << 14  # bytes of a request
_FRESH = 1.0  # seconds for which a page is given to all readers: making one takes the rank's time
_BACKLOG = 128
_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus


class _Open:
    """The descriptor of an open connection."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number


class ScrapeServer:
    """Answers each request by a text until close()."""

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        """Raises OSError where the port is taken, or the address is none of this host's."""
        self._text = text
        self._page, self._stale = b"", 0.0  # the page, and when it is made anew
        self._open: dict[asyncio.Task[Any], None] = {}  # the oldest first
        family, _, _, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._socket = not_inherited(socket.socket(family, socket.SOCK_STREAM))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._end = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)  # no descriptor is left, say
        self._thread = threading.Thread(target=self._run, name="farandole.metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._answer_all())
        self._loop.close()

    async def _answer_all(self) -> None:
        server = await asyncio.start_server(self._serve, sock=self._socket, limit=_LONGEST)
        await self._end.wait()
        server.close()
        ending = list(self._open)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = not_inherited(_Open(writer.get_extra_info("socket").fileno()))
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = None
        if len(self._open) > _MOST:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        try:
            with contextlib.suppress(
                OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.LimitOverrunError
            ):
                await asyncio.wait_for(self._answer(reader, writer), _PATIENCE)
        except asyncio.CancelledError:
            pass
        finally:
            self._open.pop(task, None)
            writer.transport.abort()  # which waits for nobody
            del held

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        writer.write(self._respond(head))
        writer.write_eof()
        await writer.drain()
        while await reader.read(_LONGEST):  # until the other side has all, and closes
            pass

    def _respond(self, head: str) -> bytes:
        words = head.partition("\r\n")[0].split(" ")
        if len(words) != 3 or words[0] != "GET":
            why = "400 Bad Request" if len(words) != 3 else "405 Method Not Allowed"
            return f"HTTP/1.0 {why}\r\nContent-Length: 0\r\n\r\n".encode()
        if (now := time.monotonic()) >= self._stale:
            self._page, self._stale = self._text().encode(), now + _FRESH
        body = self._page
        head = f"HTTP/1.0 200 OK\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
