# SPDX-License-Identifier: Apache-2.0
"""Messages over a stream between two processes that know a secret. No socket and no clock are in
here: whoever uses a Session moves the bytes. For servers and for the lines to them.

Both ends prove that they know the secret before either reads a message, and each frame carries a
MAC. Its key is made from the secret, a random number of each end and the direction; the frame's
number counts too. So whoever is between the ends can read, and can hang up. It can't change,
repeat, reorder or reflect a frame, nor use a recorded conversation again. An empty secret is for
Unix sockets, where the kernel says whose process the other one is.

The caller's hello, the server's hello, the caller's proof, the server's proof, messages. A hello is
a fixed text and the random number; a proof is the first frame, which is empty.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from farandole.start.secret import mac

SECRET_BYTES = 32
_HEAD = struct.Struct("!I")  # of a frame: its length, and whether the message goes on in the next
_MORE = 1 << 31
_PART = 1 << 20  # bytes of a message in one frame, at most: so much is held before its MAC is known
_NUMBER = struct.Struct("!Q")
_HELLO = b"farandole session 2\n"
_NONCE = 32  # bytes
_TAG = 32


class Refused(ConnectionError):
    """The other end does not know the secret, or somebody has changed what it sent."""


class _Direction:
    """One direction's MACs."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next_tag(self, head: bytes, part: bytes | memoryview) -> bytes:
        tag = hmac.new(self._key, _NUMBER.pack(self._number) + head, "sha256")
        tag.update(part)
        self._number += 1
        return tag.digest()


class Session:
    """One end of the conversation."""

    def __init__(self, secret: bytes, caller: bool) -> None:
        self.proved = False  # whether the other end may be heard
        self.outgoing = bytearray()  # what is to be sent; whoever sends it removes it
        self._incoming = bytearray()
        self._message = bytearray()  # what has come of the next message
        self._secret, self._caller = secret, caller
        self._nonce = secrets.token_bytes(_NONCE)
        self._both: tuple[_Direction, _Direction] | None = None  # ours, theirs; None: no hello yet
        if caller:
            self.outgoing += _HELLO + self._nonce

    @property
    def greeted(self) -> bool:
        """True when the other end has said its hello."""
        return self._both is not None

    def send(self, message: bytes) -> None:
        """Appends a message to `outgoing`."""
        assert self._both is not None
        whole = memoryview(message)
        for at in range(0, max(1, len(message)), _PART):
            part = whole[at : at + _PART]
            head = _HEAD.pack(len(part) | (at + _PART < len(message)) * _MORE)
            self.outgoing += head
            self.outgoing += part
            self.outgoing += self._both[0].next_tag(head, part)

    def receive(self, data: bytes) -> list[bytes]:
        """Takes bytes that have come; returns the messages that are complete. Raises Refused."""
        self._incoming += data
        found: list[bytes] = []
        if self._both is None and not self._hello():
            return found
        while (more := self._frame()) is not None:
            if not self.proved:
                self.proved = True
                if not self._caller:
                    self.send(b"")
            elif not more:
                found.append(bytes(self._message))
                self._message = bytearray()
        return found

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
        caller, server = (
            _Direction(mac(self._secret, _HELLO, *nonces, who)) for who in (b"caller", b"server")
        )
        self._both = (caller, server) if self._caller else (server, caller)
        if self._caller:
            self.send(b"")
        return True

    def _frame(self) -> bool | None:
        """Moves the next frame into the message; returns whether the message goes on. None: the
        frame is not complete."""
        head = bytes(self._incoming[: _HEAD.size])
        if not self.proved and head != bytes(_HEAD.size)[: len(head)]:
            raise Refused("a message came before the proof")
        if len(head) < _HEAD.size:
            return None
        (word,) = _HEAD.unpack(head)
        end = _HEAD.size + (word & ~_MORE)
        if end > _HEAD.size + _PART:
            raise Refused(f"a frame of {end - _HEAD.size} bytes")
        if len(self._incoming) < end + _TAG:
            return None
        part = bytes(self._incoming[_HEAD.size : end])
        tag = bytes(self._incoming[end : end + _TAG])
        del self._incoming[: end + _TAG]
        assert self._both is not None
        if not hmac.compare_digest(self._both[1].next_tag(head, part), tag):
            raise Refused("it does not know the job's secret, or somebody changes what it sends")
        self._message += part
        return bool(word & _MORE)
