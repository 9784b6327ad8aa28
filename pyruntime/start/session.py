# SPDX-License-Identifier: Apache-2.0
"""Protocol for authenticated messages over a stream between two processes that share a secret.

A Session does not use a socket or the clock. The server or client that uses it moves the bytes.

Both ends prove that they know the secret before either end reads a message. Afterwards, each length
and each message carries a MAC, which covers a counter. The MAC's key follows from the secret, both
hellos and the direction. Therefore a man in the middle can read messages and end the connection,
but cannot change, repeat, reorder or reflect messages, or replay a recording. The secret is empty
for Unix sockets, because the kernel reports the other end's user there.

    state      next bytes from the other end     then
    new        hello: text, rank, random number  greeted
    greeted    proof: MAC of an empty text       proved
    proved     length, MAC, message, MAC, ...

The client speaks first. The order is client's hello, server's hello, client's proof, server's
proof.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from farandole.start.secret import mac

SECRET_BYTES = 32
_HELLO = struct.Struct("!20sQ32s")
_TEXT = b"farandole session 3\n"
_NUMBER = struct.Struct("!Q")
_TAG = 32  # size in bytes of a MAC


class Refused(ConnectionError):
    """The other end does not know the secret, or the bytes that it sent were changed in transit."""


class _Direction:
    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next_tag(self, part: bytes) -> bytes:
        tag = hmac.new(self._key, _NUMBER.pack(self._number), "sha256")
        tag.update(part)
        self._number += 1
        return tag.digest()


class Session:
    """One end of a connection. Not thread-safe."""

    def __init__(self, secret: bytes, rank: int | None = None) -> None:
        """`rank` is the client's rank, or None at the server's end, where the hello brings it."""
        self.greeted = False  # True once the other end's hello has come
        self.proved = False  # True once the other end has proved that it knows the secret
        self.rank = rank or 0
        self.outgoing = bytearray()  # bytes to send; whoever sends them removes them
        self._incoming = bytearray()
        self._length: int | None = None  # length of the next message; None if it is not known yet
        self._secret, self._calls = secret, rank is not None
        self._own = _HELLO.pack(_TEXT, self.rank, secrets.token_bytes(32))
        self._ours = self._theirs = _Direction(b"")  # until both hellos are known
        if self._calls:
            self.outgoing += self._own

    def send(self, message: bytes) -> None:
        """Appends a message to `outgoing`."""
        self._say(_NUMBER.pack(len(message)))
        self._say(message)

    def _say(self, part: bytes) -> None:
        self.outgoing += part
        self.outgoing += self._ours.next_tag(part)

    def receive(self, data: bytes) -> list[bytes]:
        """Takes received bytes. Returns the messages that are complete now. Raises Refused."""
        self._incoming += data
        found: list[bytes] = []
        if not self.greeted and not self._hear_hello():
            return found
        while (part := self._next_part()) is not None:
            if not self.proved:
                self.proved = True
                if not self._calls:
                    self._say(b"")
            elif self._length is None:
                (self._length,) = _NUMBER.unpack(part)
            else:
                found.append(part)
                self._length = None
        return found

    def _hear_hello(self) -> bool:
        """Takes the other end's hello. Returns False while the hello is incomplete."""
        if not self._incoming.startswith(_TEXT[: len(self._incoming)]):
            raise Refused("it does not speak farandole's protocol")
        if len(self._incoming) < _HELLO.size:
            return False
        hellos = [self._own, bytes(self._incoming[: _HELLO.size])]
        del self._incoming[: _HELLO.size]
        if not self._calls:
            self.outgoing += self._own
            hellos.reverse()
            self.rank = _HELLO.unpack(hellos[0])[1]
        caller, server = (_Direction(mac(self._secret, *hellos, x)) for x in (b"caller", b"server"))
        self._ours, self._theirs = (caller, server) if self._calls else (server, caller)
        self.greeted = True
        if self._calls:
            self._say(b"")
        return True

    def _next_part(self) -> bytes | None:
        """Returns the next proof, length or message, or None while it is incomplete.

        A length is not used before its MAC has been checked.
        """
        size = self._length if self._length is not None else _NUMBER.size * self.proved
        if len(self._incoming) < size + _TAG:
            return None
        with memoryview(self._incoming) as view:
            part, tag = bytes(view[:size]), bytes(view[size : size + _TAG])
        del self._incoming[: size + _TAG]
        if not hmac.compare_digest(self._theirs.next_tag(part), tag):
            raise Refused("it does not know the job's secret, or its messages were altered")
        return part
