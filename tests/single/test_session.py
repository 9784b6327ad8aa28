# SPDX-License-Identifier: Apache-2.0
"""Sessions with somebody in between, who reads, changes, repeats and records what he likes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from farandole.start.session import Refused, Session

SECRET = bytes(range(32))
PART = 1 << 20
PROOF = 32  # bytes: a MAC of nothing
HELLO = 20 + 8 + 32


def take(session: Session) -> bytes:
    """What it sends now."""
    data = bytes(session.outgoing)
    session.outgoing.clear()
    return data


def met() -> tuple[Session, Session, list[bytes], list[bytes]]:
    """Both ends after their proofs, and what each has sent: the caller's first."""
    caller, server = Session(SECRET, 7), Session(SECRET)
    said: tuple[list[bytes], list[bytes]] = ([], [])
    while not (caller.proved and server.proved):
        for one, other, record in ((caller, server, said[0]), (server, caller, said[1])):
            data = take(one)
            record.append(data)
            assert other.receive(data) == []
    return caller, server, *said


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
def test_messages_of_any_size_in_any_pieces(size: int) -> None:
    draw = random.Random(size)
    one, other = met()[:2]
    messages = [draw.randbytes(size), b"", b"last"]
    for message in messages:
        one.send(message)
    data, got = take(one), []
    while data:
        cut = draw.randint(1, max(1, size // 3))
        got += other.receive(data[:cut])
        data = data[cut:]
    assert got == messages


def test_both_directions() -> None:
    caller, server = met()[:2]
    for number in range(3):
        for one, other in ((caller, server), (server, caller)):
            one.send(b"%d" % number)
            assert other.receive(take(one)) == [b"%d" % number]


def test_another_secret() -> None:
    """The server notices first, and has proved nothing then."""
    caller, server = Session(SECRET, 7), Session(bytes(32))
    server.receive(take(caller))
    caller.receive(take(server))
    with pytest.raises(Refused, match="does not know the job's secret"):
        server.receive(take(caller))
    assert not take(server)
    assert not caller.proved
    assert not server.proved


def test_a_server_that_does_not_know_the_secret() -> None:
    caller, false = Session(SECRET, 7), Session(bytes(32))
    false.receive(take(caller))
    hello = take(false)
    false.send(b"")
    with pytest.raises(Refused, match="does not know the job's secret"):
        caller.receive(hello + take(false))


def test_a_caller_is_not_its_own_server() -> None:
    """Reflection: what it says comes back to it."""
    caller = Session(SECRET, 7)
    caller.receive(take(caller))
    with pytest.raises(Refused):
        caller.receive(take(caller))


def test_a_recorded_conversation_cannot_be_used_again() -> None:
    caller, _, said_by_caller, said_by_server = met()
    caller.send(b"a word")
    said_by_caller.append(take(caller))
    server = Session(SECRET)
    with pytest.raises(Refused):
        server.receive(b"".join(said_by_caller))
    assert not server.proved
    with pytest.raises(Refused):
        Session(SECRET, 7).receive(b"".join(said_by_server))


def changed(data: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(data)):
        copy = bytearray(data)
        copy[bit // 8] ^= 1 << bit % 8
        yield bytes(copy)


def heard(other: Session, data: bytes) -> list[bytes]:
    try:
        return other.receive(data)
    except Refused:
        return []


def test_no_bit_of_a_handshake_can_be_changed() -> None:
    for bit in range(8 * (HELLO + PROOF)):
        caller, server = Session(SECRET, 7), Session(SECRET)
        at = 0
        got: list[bytes] = []
        for _ in range(3):
            data = bytearray(take(caller))
            if at <= bit // 8 < at + len(data):
                data[bit // 8 - at] ^= 1 << bit % 8
            at += len(data)
            got += heard(server, bytes(data))
            heard(caller, take(server))
            if caller.proved:
                caller.send(b"a word")
        assert not server.proved, bit
        assert not got


def test_no_bit_of_a_message_can_be_changed() -> None:
    for copy in changed(sealed(b"a word")[2]):
        _, server, _ = sealed(b"a word")
        assert heard(server, copy) == []


def sealed(message: bytes) -> tuple[Session, Session, bytes]:
    caller, server = met()[:2]
    caller.send(message)
    return caller, server, take(caller)


Middle = Callable[[bytes, bytes, bytes], bytes]


@pytest.mark.parametrize(
    "middle",
    [
        lambda one, two, back: one + one + two,
        lambda one, two, back: two + one,
        lambda one, two, back: two,
        lambda one, two, back: back + one + two,
        lambda one, two, back: one[:10] + two,
    ],
    ids=["repeats", "swaps", "leaves out", "reflects", "cuts"],
)
def test_frames_keep_their_order(middle: Middle) -> None:
    caller, server = met()[:2]
    parts = []
    for end, message in ((caller, b"one"), (caller, b"two"), (server, b"back")):
        end.send(message)
        parts.append(take(end))
    got: list[bytes] = []

    def hear() -> None:
        for byte in middle(*parts):
            got.extend(server.receive(bytes([byte])))

    with pytest.raises(Refused):
        hear()
    assert got in ([], [b"one"])


STRANGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": bytes(100),
    "a large frame": b"\xff" * 100,
    "a pickled rank": b"\x00\x00\x00\x05\x80\x04K\x00.",
    "another version": b"farandole session 2\n" + bytes(80),
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE.keys())
@pytest.mark.parametrize("caller", [True, False])
def test_garbage_is_refused_at_once(data: bytes, caller: bool) -> None:
    session = Session(SECRET, 0 if caller else None)
    take(session)
    with pytest.raises(Refused):
        session.receive(data)
    assert not take(session), "a stranger is told nothing"


@pytest.mark.parametrize("length", [1, 36, 1 << 20, (1 << 64) - 1])
def test_nothing_is_read_before_the_proof(length: int) -> None:
    """Neither a message in its place, nor its length."""
    caller, server = Session(SECRET, 7), Session(SECRET)
    server.receive(take(caller))
    with pytest.raises(Refused, match="does not know"):
        server.receive(length.to_bytes(8, "big") + bytes(PROOF - 8))


@pytest.mark.parametrize("length", [0, 7, PART + 1, (1 << 64) - 1])
def test_a_changed_length_is_refused_before_anything_is_held(length: int) -> None:
    """A word of six bytes: whoever is between changes how many are announced, and sends no more."""
    _, server, word = sealed(b"a word")
    with pytest.raises(Refused):
        server.receive(length.to_bytes(8, "big") + word[8:40])


def test_a_rank_can_not_be_changed() -> None:
    caller, server = Session(SECRET, 7), Session(SECRET)
    hello = bytearray(take(caller))
    assert int.from_bytes(hello[20:28], "big") == 7
    hello[27] = 8
    server.receive(bytes(hello))
    caller.receive(take(server))
    with pytest.raises(Refused):
        server.receive(take(caller))
    assert met()[1].rank == 7
