# SPDX-License-Identifier: Apache-2.0
"""Checks every few steps that all ranks have the same parameters, settings and optimizer state.

Ranks first compare one digest. They send it in the consensus of an optimizer's round, which costs
no extra call, or in a small allgather (StandaloneModelCheck). If digests differ, ranks exchange
fingerprints in order to report the differences. The check runs on the thread that calls step().
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from farandole._library import ffi, lib
from farandole.calls import requests
from farandole.calls.arguments import check
from farandole.calls.public_call import errors_reach_peers
from farandole.config import setting
from farandole.errors import MismatchError, PeerError, counted, printable, ranks_text, warn
from farandole.members import ProcessSet, set_id
from farandole.ops import allgather
from farandole.start.agent_client import may_grow
from farandole.topology import rank, size

_SHOWN = 4  # largest number of names or settings that a text shows
Reports = list[dict[str, Any]]  # one entry for each participating rank


class ModelSummary(NamedTuple):
    """The values that ranks compare."""

    # Maps a name to the array's fingerprint, or to "" if the array is not in this rank's memory.
    arrays: Mapping[str, str]
    settings: Mapping[str, str]  # for example, "lr of group 0" has the value "0.1"
    # Maps a parameter to its optimizer state, such as "step 3", or to "" if another rank holds it.
    state: Mapping[str, str]


class Remedies(NamedTuple):
    """Advice to users of one framework whose models differ. Each text starts with a verb."""

    first: str  # if models differ from the start
    joined: str  # if models differ after `last = join()`
    state: str  # if only the optimizer's state differs


class VerifyPolicy(NamedTuple):
    """Sets how often models are compared and whether a difference raises an error."""

    every: int  # steps between comparisons; 0 means never
    raises: bool  # True to raise MismatchError, False to warn

    @classmethod
    def of(cls, verify_every: int | None, verify: str) -> VerifyPolicy:
        """Creates a policy from options. If `verify_every` is None, uses FARANDOLE_VERIFY_EVERY.
        Raises an error if an option is invalid."""
        if verify_every is None:
            verify_every = int(setting("FARANDOLE_VERIFY_EVERY"))
        check(verify_every=verify_every)
        if verify not in ("warn", "raise"):
            raise ValueError(f"verify is {verify!r}: pass 'warn' or 'raise'")
        return cls(verify_every, verify == "raise")


def fingerprint(address: int, nbytes: int) -> str:
    """Returns a 128-bit BLAKE2b hash of host memory, in hex."""
    memory = ffi.buffer(ffi.cast("char*", address), nbytes)
    return hashlib.blake2b(memory, digest_size=16).hexdigest()


class ModelCheck:
    """Decides when one optimizer's model is compared. Stores a difference until report()."""

    def __init__(
        self,
        describe: Callable[[], ModelSummary],
        process_set: ProcessSet,
        interval: VerifyPolicy,
        remedies: Remedies,
    ) -> None:
        self._describe = describe
        self._process_set = process_set
        self.every, self._raises = interval
        self._remedies = remedies
        self.restart()

    def restart(self) -> None:
        """Restarts the comparisons. All ranks must call this when step counts start again."""
        self._compared: tuple[int, int] | None = None  # (joins, steps) at the latest digest
        self._equal: tuple[int, int] | None = None  # (joins, steps) when models were last equal
        self._warned = False
        self._found: Exception | None = None

    def warn_again(self) -> None:
        """Makes compare() report a difference again. Call this when all ranks compare, because some
        ranks may have missed the last difference."""
        self._warned = False

    def digest(self, joins: int, steps: int) -> int:
        """Returns this rank's contribution to the consensus, from 1 to 2^63 - 1, or 0 if models are
        not compared now.

        `joins` is the number of calls of join(). `steps` is the number of calls of step() since the
        last join().
        """
        if not self.every or self._warned or steps % self.every:
            return 0
        if self._compared == (joins, steps):  # an earlier round in this step has compared models
            return 0
        self._compared = joins, steps
        text = json.dumps(self._describe(), sort_keys=True).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return number >> 1 or 1

    def compare(self, scope: str, digest: int, equal: bool, steps: int) -> None:
        """Looks for a difference and stores it for report(). All ranks must call this after the
        consensus, with the largest `digest`.

        Collective if the digests are not `equal`.
        """
        if digest == 0:
            return
        text = None if equal else self._difference(scope, steps)
        if text is None:
            self._equal = self._compared
            return
        lib.farandole_finding(text.encode())
        self._warned = not self._raises
        self._found = MismatchError(text) if self._raises else UserWarning(text)

    def report(self) -> None:
        """Warns about a difference that compare() has found, or raises MismatchError."""
        found, self._found = self._found, None
        if isinstance(found, MismatchError):
            raise found
        if found is not None:
            warn(str(found), UserWarning)

    def _difference(self, scope: str, steps: int) -> str | None:
        own = {"rank": rank(), "raises": self._raises, **self._describe()._asdict()}
        line = np.frombuffer(json.dumps(own).encode() + b"\n", np.uint8)
        gathered = allgather(line, name=f"{scope}.equality", process_set=self._process_set)
        lines = gathered.tobytes().splitlines()
        reports = [_read(scope, line) for line in lines]  # ranks that have joined send no line
        self._raises |= any(one["raises"] for one in reports)
        joins, before = self._equal or (None, None)
        joined = joins is not None and self._compared is not None and joins != self._compared[0]
        text = explain(reports, self._remedies, before, joined)
        return text and f"{scope}, after {counted(steps, 'step')}: {text}"


def _read(scope: str, line: bytes) -> dict[str, Any]:
    """Parses a rank's report. Raises PeerError if no rank can have written the report, because
    somebody may alter the data between hosts."""

    def texts(found: dict[str, str]) -> dict[str, str]:
        return {printable(name): printable(value) for name, value in found.items()}

    try:
        one = json.loads(line)
        model = {what: texts(one[what]) for what in ModelSummary._fields}
        return {"rank": range(size())[one["rank"]], "raises": one["raises"] is True, **model}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as reason:
        raise PeerError(
            f"{scope}: a rank's report about its model can't be read "
            f"({printable(repr(reason)):.200}): somebody alters the data between the hosts; "
            "remedy: use a private network"
        ) from reason


class StandaloneModelCheck:
    """Compares models in a separate call, for code that has no optimizer rounds."""

    def __init__(
        self,
        kind: str,
        describe: Callable[[], ModelSummary],
        process_set: ProcessSet,
        interval: VerifyPolicy,
        remedies: Remedies,
    ) -> None:
        """`kind`, such as "model", becomes part of the calls' names."""
        self._scope = requests.Scope(kind, process_set)
        self._process_set = process_set
        self._every = interval.every
        self._equality = ModelCheck(describe, process_set, interval, remedies)
        self._steps: Counter[int] = Counter()  # keyed by the number of earlier join() calls
        self._world = 0

    def before_step(self) -> None:
        """Compares models if a comparison is due. All ranks must call this in each step. It is
        collective in the first step and at comparisons.

        Warns about a difference or raises MismatchError.
        """
        process_set = self._process_set
        if not process_set.included() or (process_set.size() == 1 and not may_grow()):
            return
        if self._world != requests.world():
            self._world = requests.world()
            self._steps.clear()
            self._equality.restart()
        joins = requests.joins[set_id(process_set)]
        steps = self._steps[joins]
        self._steps[joins] += 1
        if steps == 0:
            self._equality.warn_again()
        name = f"{self._scope.name}.digest"
        with errors_reach_peers(process_set, name):
            digest = self._equality.digest(joins, steps)
        if steps and not digest:
            return
        own = np.array([[digest, self._every]], np.int64)
        digests, intervals = allgather(own, name=name, process_set=process_set).T.tolist()
        # All ranks use the shortest interval. Otherwise, some would wait for the others.
        self._equality.every = min((every for every in intervals if every), default=0)
        equal = len(set(digests)) == 1
        self._equality.compare(self._scope.name, max(digests), equal, steps)
        self._equality.report()


def explain(
    reports: Reports, remedies: Remedies, equal: int | None, joined: bool = False
) -> str | None:
    """Describes how the ranks' models differ, and why. Returns None if the models are equal.

    `equal` is the number of steps after which models were last equal, or None if they never were.
    `joined` is True if a rank has called join() since then.
    """
    arrays, state = (
        {name: groups for name, groups in _differences(reports, what) if all(groups)}
        for what in ("arrays", "state")
    )
    settings = dict(_differences(reports, "settings"))
    values_of = {**settings, **{f"state of {name}": groups for name, groups in state.items()}}
    texts = []
    if arrays:
        names, apart = list(arrays), _apart(reports, arrays.values())
        total = len({name for one in reports for name in one["arrays"]})
        texts.append(
            f"the ranks have different models: {len(names)} of {counted(total, 'parameter')} "
            f"({_listed(names)}) {'differs' if len(names) == 1 else 'differ'}, on {apart}"
        )
    for name, groups in [*values_of.items()][:_SHOWN]:
        values = [f"{value or 'missing'} on {ranks_text(who)}" for value, who in groups.items()]
        texts.append(f"{name} is {', '.join(values)}")
    if len(values_of) > _SHOWN:
        texts.append(f"{len(values_of) - _SHOWN} more of these differ")
    if not texts:
        return None
    if not arrays and not state:
        cause = "Give the optimizer the same settings on all ranks, and step schedulers on all"
    elif not arrays and not joined:
        cause = f"The parameters are equal: {remedies.state}"
    else:
        cause = _cause(bool(settings), remedies, equal, joined)
    return f"{'; '.join(texts)}. {cause}"


def _differences(reports: Reports, what: str) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Yields, for each difference, the name and a dict from each value to the ranks that have it.
    The value "" means that a rank lacks the name."""
    names = dict.fromkeys(name for one in reports for name in one[what])
    for name in names:
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for one in reports:
            groups[one[what].get(name, "")].append(one["rank"])
        if len(groups) > 1:
            yield name, dict(groups)


def _apart(reports: Reports, all_groups: Iterable[dict[str, list[int]]]) -> str:
    """Returns a text that names the ranks outside the largest group of ranks with equal values. If
    groups are equally large, the first one counts as the largest."""
    others: set[int] = set()
    for groups in all_groups:
        most = max(groups.values(), key=len)
        others |= {one["rank"] for one in reports} - set(most)
    rest = sorted({one["rank"] for one in reports} - others)
    return ranks_text(others) + (f" against {ranks_text(rest)}" if rest else "")


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _cause(settings: bool, remedies: Remedies, equal: int | None, joined: bool) -> str:
    if equal is None:
        more = ", and give all ranks the same settings" if settings else ""
        return f"They were never equal: {remedies.first} before training{more}"
    if joined:
        return (
            "They were equal before join(), and ranks that joined first made fewer steps: "
            f"{remedies.joined} after last = join()"
        )
    text = f"They were equal after {counted(equal, 'step')}"
    if settings:
        return f"{text}: the different settings have changed them since"
    return (
        f"{text}: since then a rank has changed its parameters by itself, computed a different "
        "result in the same step, or has faulty memory"
    )
