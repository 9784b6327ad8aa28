# SPDX-License-Identifier: Apache-2.0
"""Messages over a stream between two processes. No socket and no clock are in here: whoever uses a
Session moves the bytes. For servers and for the lines to them.

`Frames` is for Unix sockets, where the kernel says whose process the other one is. A `Session` is
for all others: both ends prove that they know a secret before either reads a message, and each
frame carries a MAC. Its key is made from the secret, a random number of each end and the direction;
the frame's number counts too. So whoever is between the ends can read, and can hang up. It can't
change, repeat, reorder or reflect a frame, nor use a recorded conversation again.

The caller's hello, the server's hello, the caller's proof, the server's proof, messages. A hello is
a fixed text and the random number; a proof is the first frame, which is empty.
"""

from __future__ import annotations

import hmac
import secrets
import struct

SECRET_BYTES = 32
_HEAD = struct.Struct("!I")  # of a frame: its length, and whether the message goes on in the next
_MORE = 1 << 31
_PART = 1 << 20  # bytes of a message in one frame, at most: so much is held before its MAC is known
_NUMBER = struct.Struct("!Q")
_HELLO = b"farandole session 1\n"
_NONCE = 32  # bytes
_TAG = 32


class Refused(ConnectionError):
    """The other end does not know the secret, or somebody has changed what it sent."""


class Frames:
    """Messages as they are."""

    tag_bytes = 0

    def __init__(self) -> None:
        self.proved = True  # whether the other end may be heard
        self.outgoing = bytearray()  # what is to be sent; whoever sends it removes it
        self._incoming = bytearray()
        self._message = bytearray()  # what has come of the next message

    def send(self, message: bytes) -> None:
        """Appends a message to `outgoing`."""
        whole = memoryview(message)
        for at in range(0, max(1, len(message)), _PART):
            part = whole[at : at + _PART]
            head = _HEAD.pack(len(part) | (at + _PART < len(message)) * _MORE)
            self.outgoing += head
            self.outgoing += part
            self.outgoing += self._tag(head, part)

    def receive(self, data: bytes) -> list[bytes]:
        """Takes bytes that have come; returns the messages that are complete. Raises Refused."""
        self._incoming += data
        found = []
        while self._frame():
            if not self._more:
                found.append(bytes(self._message))
                self._message = bytearray()
        return found

    def _frame(self) -> bool:
        """Moves the next frame into the message; False: it is not complete."""
        if len(self._incoming) < _HEAD.size:
            return False
        head = bytes(self._incoming[: _HEAD.size])
        (word,) = _HEAD.unpack(head)
        length, self._more = word & ~_MORE, bool(word & _MORE)
        if length > _PART:
            raise Refused(f"a frame of {length} bytes")
        end = _HEAD.size + length
        if len(self._incoming) < end + self.tag_bytes:
            return False
        part = bytes(self._incoming[_HEAD.size : end])
        self._check(head, part, bytes(self._incoming[end : end + self.tag_bytes]))
        del self._incoming[: end + self.tag_bytes]
        self._message += part
        return True

    def _tag(self, head: bytes, part: bytes | memoryview) -> bytes:
        """The MAC of the next frame that this end sends."""
        return b""

    def _check(self, head: bytes, part: bytes, tag: bytes) -> None:
        """Raises Refused unless it is the MAC of the next frame of the other end."""


class _Direction:
    """One direction's MACs."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next_tag(self, head: bytes, part: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, _NUMBER.pack(self._number) + head, "sha256")
        mac.update(part)
        self._number += 1
        return mac.digest()


class Session(Frames):
    """Messages with MACs, between two that know `secret`."""

    tag_bytes = _TAG

    def __init__(self, secret: bytes, caller: bool) -> None:
        super().__init__()
        self.proved = False
        self._secret, self._caller = secret, caller
        self._nonce = secrets.token_bytes(_NONCE)
        self._ours: _Direction | None = None  # None: no hello has come
        self._theirs: _Direction | None = None
        if caller:
            self.outgoing += _HELLO + self._nonce

    def _frame(self) -> bool:
        if self._theirs is None and not self._hello():
            return False
        if not self.proved:
            return self._proof() and self._frame()
        return super()._frame()

    def _hello(self) -> bool:
        """Takes the other end's; False: it is not complete."""
        begin = bytes(self._incoming[: len(_HELLO)])
        if begin != _HELLO[: len(begin)]:
            raise Refused("it does not speak farandole's protocol")
        length = len(_HELLO) + _NONCE
        if len(self._incoming) < length:
            return False
        nonces = [self._nonce, bytes(self._incoming[len(_HELLO) : length])]
        del self._incoming[:length]
        if not self._caller:
            self.outgoing += _HELLO + self._nonce
            nonces.reverse()
        key = hmac.digest(self._secret, _HELLO + b"".join(nonces), "sha256")
        both = [_Direction(hmac.digest(key, who, "sha256")) for who in (b"caller", b"server")]
        self._ours, self._theirs = both if self._caller else reversed(both)
        if self._caller:
            self.send(b"")
        return True

    def _proof(self) -> bool:
        """Takes the other end's; False: it is not complete."""
        if bytes(self._incoming[: _HEAD.size]) != bytes(_HEAD.size)[: len(self._incoming)]:
            raise Refused("a message came before the proof")
        if not super()._frame():
            return False
        self.proved = True
        if not self._caller:
            self.send(b"")
        return True

    def _tag(self, head: bytes, part: bytes | memoryview) -> bytes:
        assert self._ours is not None
        return self._ours.next_tag(head, part)

    def _check(self, head: bytes, part: bytes, tag: bytes) -> None:
        assert self._theirs is not None
        if not hmac.compare_digest(self._theirs.next_tag(head, part), tag):
            raise Refused("it does not know the job's secret, or somebody changes what it sends")
