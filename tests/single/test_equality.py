# SPDX-License-Identifier: Apache-2.0
"""How differences between ranks are told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from farandole import equality
from farandole.equality import Remedies, Reports, VerifyPolicy, explain, fingerprint
from farandole.errors import PeerError

REMEDIES = Remedies("broadcast first", "broadcast from the last one", "load it")


def told(*ranks: tuple[dict[str, str], dict[str, str]]) -> Reports:
    one: dict[str, Any] = {"state": {}}
    return [{**one, "rank": r, "arrays": a, "settings": s} for r, (a, s) in enumerate(ranks)]


def test_a_slice_of_many_counts() -> None:
    data = np.arange(5 << 20, dtype=np.float64)  # 40 MiB
    before = fingerprint(data.ctypes.data, data.nbytes)
    assert fingerprint(data.ctypes.data, data.nbytes) == before
    data[-1] = np.nextafter(data[-1], 0)
    assert fingerprint(data.ctypes.data, data.nbytes) != before


def test_the_rank_that_most_differ_from_is_named() -> None:
    text = explain(told(({"w": "a"}, {}), ({"w": "b"}, {}), ({"w": "a"}, {})), REMEDIES, 7)
    assert text is not None
    assert "1 of 1 parameter (w) differs, on rank 1 against ranks 0, 2" in text
    assert "They were equal after 7 steps" in text


def test_a_model_that_nobody_broadcast_after_join() -> None:
    text = explain(told(({"w": "a"}, {}), ({"w": "b"}, {})), REMEDIES, 0, joined=True)
    assert text is not None
    assert "equal before join(), and ranks that joined first made fewer steps" in text
    assert text.endswith("broadcast from the last one after last = join()")


@pytest.mark.parametrize("other", [{"w": ""}, {"w": "a"}])
def test_what_a_rank_cannot_read_is_no_difference(other: dict[str, str]) -> None:
    same = {"lr": "1"}
    assert explain(told(({"w": "a"}, same), (other, same)), REMEDIES, None) is None


GOOD = {"rank": 1, "raises": False, "arrays": {"w": "a"}, "settings": {}, "state": {}}
STRANGE: dict[str, bytes] = {
    "no text": b"\xff\xfe",
    "no object": b"[]",
    "deep": b"[" * 100_000,
    "no members": b"{}",
    "another's rank": json.dumps({**GOOD, "rank": 2}).encode(),
    "no rank": json.dumps({**GOOD, "rank": "x"}).encode(),
    "no names": json.dumps({**GOOD, "arrays": ["w"]}).encode(),
    "no fingerprint": json.dumps({**GOOD, "arrays": {"w": 7}}).encode(),
}


def difference(line: bytes, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The difference of a model from that which another rank of two tells by this line."""
    monkeypatch.setattr(equality, "size", lambda: 2, raising=False)  # there is no world here
    own = json.dumps({**GOOD, "rank": 0}).encode()
    found = np.frombuffer(own + b"\n" + line + b"\n", np.uint8)
    monkeypatch.setattr(equality, "rank", lambda: 0)
    monkeypatch.setattr(equality, "allgather", lambda *_, **__: found)
    model = equality.ModelSummary({}, {}, {})
    one = equality.ModelCheck(lambda: model, None, VerifyPolicy(1, True), REMEDIES)  # type: ignore[arg-type]
    return one._difference("optimizer", 3)


@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
def test_what_no_rank_can_have_told(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels without a MAC."""
    with pytest.raises(PeerError, match=r"^optimizer: a rank's report about .* private network"):
        difference(line, monkeypatch)


def test_no_terminal_obeys_what_another_rank_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {**GOOD, "arrays": {"w\x1b[2J": "\udcff"}, "settings": {"lr": "\x07"}}
    text = difference(json.dumps(told).encode(), monkeypatch)
    assert text is not None
    assert text.isprintable()
    assert difference(json.dumps(GOOD).encode(), monkeypatch) is None


def test_a_setting_that_one_rank_lacks() -> None:
    text = explain(told(({}, {"lr of group 0": "0.1"}), ({}, {})), REMEDIES, None)
    assert text is not None
    assert text.startswith("lr of group 0 is 0.1 on rank 0, missing on rank 1.")


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="verify is 'log': pass 'warn' or 'raise'"):
        VerifyPolicy.of(3, "log")
    with pytest.raises(ValueError, match="verify_every is -1"):
        VerifyPolicy.of(-1, "warn")
    assert VerifyPolicy.of(0, "raise") == (0, True)


def test_state() -> None:
    """What one rank keeps elsewhere is no difference."""
    ranks = told(({}, {}), ({}, {}), ({}, {}))
    for one, state in zip(ranks, ("step 3", "none", ""), strict=True):
        one["state"] = {"w": state, "v": state and "step 3"}
    assert explain(ranks[::2], REMEDIES, None) is None
    assert explain(ranks[:2], REMEDIES, None) == (
        "state of w is step 3 on rank 0, none on rank 1. The parameters are equal: load it"
    )
