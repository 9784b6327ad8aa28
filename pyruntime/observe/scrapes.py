# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for metrics, on a separate thread. Anybody who reaches the port may
connect, so callers are few, and each has little time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from farandole.start.server import Guest, Listener

_LONGEST = 1 << 14  # bytes of a request
_FRESH = 1.0  # seconds for which a page is given to all readers: making one takes the rank's time
_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus


class _Exchange:
    """One request and its answer. Its caller stays a stranger, whose place another one may get."""

    proved, rank = False, 0

    def __init__(self, page: Callable[[], bytes]) -> None:
        """`page`: the body of an answer."""
        self.outgoing = bytearray()
        self.greeted = False  # whether it is answered
        self._page = page
        self._request = bytearray()

    def receive(self, data: bytes) -> list[bytes]:
        """Answers when the request is whole. ValueError: it is too long, or more comes."""
        if self.greeted:
            raise ValueError("one request for each connection")
        self._request += data
        if b"\r\n\r\n" in self._request:
            self.outgoing += self._answer()
            self.greeted = True
        elif len(self._request) > _LONGEST:
            raise ValueError("no request")
        return []

    def _answer(self) -> bytes:
        words = self._request.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or words[0] != b"GET":
            why = "400 Bad Request" if len(words) != 3 else "405 Method Not Allowed"
            return f"HTTP/1.0 {why}\r\nContent-Length: 0\r\n\r\n".encode()
        body = self._page()
        head = f"HTTP/1.0 200 OK\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


class ScrapeServer(Listener):
    """Answers each request by a text until close()."""

    patience = 5.0  # seconds for a request and the reading of its answer
    strangers = 8  # those who have sent a request are answered at once

    def __init__(self, address: str, port: int, text: Callable[[], str]) -> None:
        """Raises OSError where the port is taken, or the address is none of this host's."""
        self._text = text
        self._page, self._stale = b"", 0.0  # the page, and when it is made anew
        family, _, _, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen()  # two sockets can be bound to one port, and one of them listens
        except BaseException:
            listener.close()
            raise
        super().__init__("farandole.metrics", [listener])

    def _conversation(self) -> _Exchange:
        return _Exchange(self._fresh)

    def _flush(self, guest: Guest) -> None:
        """Writes, and says when that was all."""
        super()._flush(guest)
        if guest.session.greeted and not guest.session.outgoing:
            guest.connection.shutdown(socket.SHUT_WR)

    def _fresh(self) -> bytes:
        if (now := time.monotonic()) >= self._stale:
            self._page, self._stale = self._text().encode(), now + _FRESH
        return self._page
