# SPDX-License-Identifier: Apache-2.0
"""Messages over a stream between two processes that know a secret. No socket and no clock are in
here: whoever uses a Session moves the bytes. For servers and for the lines to them.

Both ends prove that they know the secret before either reads a message. All that follows carries a
MAC, the length of a message before the message. Its key is made from the secret, what both ends
have said in their hellos, and the direction; the MAC's number counts too. So whoever is between the
ends can read, and can hang up. They can't change, repeat, reorder or reflect anything, nor use a
recorded conversation again. An empty secret is for Unix sockets, where the kernel says whose
process the other one is.

The caller's hello, the server's hello, the caller's proof, the server's proof, messages. A hello is
a fixed text, the caller's rank and a random number; a proof is the first MAC, of an empty text.
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
_TAG = 32  # bytes of a MAC


class Refused(ConnectionError):
    """The other end does not know the secret, or somebody has changed what it sent."""


class _Direction:
    """One direction's MACs."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next_tag(self, part: bytes) -> bytes:
        tag = hmac.new(self._key, _NUMBER.pack(self._number), "sha256")
        tag.update(part)
        self._number += 1
        return tag.digest()


class Session:
    """One end of the conversation."""

    def __init__(self, secret: bytes, rank: int | None = None) -> None:
        """`rank`: the caller's, from 0; None: this is the server's end, which hears it."""
        self.greeted = False  # whether the other end has said its hello
        self.proved = False  # whether the other end may be heard
        self.rank = rank or 0
        self.outgoing = bytearray()  # what is to be sent; whoever sends it removes it
        self._incoming = bytearray()
        self._length: int | None = None  # of the message that comes now; None: not yet known
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
        """Takes bytes that have come; returns the messages that are complete. Raises Refused."""
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
        """Takes the other end's; False: it is not complete."""
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
        """The proof, a message's length or a message, whichever is next; None: it is not complete.
        No length is used before its MAC is checked."""
        size = self._length if self._length is not None else _NUMBER.size * self.proved
        if len(self._incoming) < size + _TAG:
            return None
        with memoryview(self._incoming) as view:
            part, tag = bytes(view[:size]), bytes(view[size : size + _TAG])
        del self._incoming[: size + _TAG]
        if not hmac.compare_digest(self._theirs.next_tag(part), tag):
            raise Refused("it does not know the job's secret, or somebody changes what it sends")
        return part
