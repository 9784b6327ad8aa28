# SPDX-License-Identifier: Apache-2.0
"""Flight recorder dumps in the format of PyTorch's own (torch.distributed.flight_recorder), for
`farandole export`.

Its analyser (`torchfrtrace DIR`) then finds desynchronised ranks as in NCCL's dumps.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farandole.observe.flight import Call, Page, members_of, shared_calls

# Format version 2.10 of torch 2.5 and newer; it knows the backends and operations of c10d only.
_VERSION = "2.10"
_NAMES = {  # where they differ from ours
    "allreduce": "all_reduce",
    "allgather": "all_gather_v",
    "reducescatter": "reduce_scatter_v",
    "alltoall": "all_to_all",
}
_OTHERS = ("join", "add_process_set", "remove_process_set")
_STATES = {"submitted": "scheduled", "negotiated": "scheduled", "moving": "started"}
_DTYPES = {
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def _entry(page: Page, call: Call, number: int, sequence: int) -> dict[str, Any]:
    """`number`: the call's, over all sets; `sequence`: in its set; both equal on all ranks."""
    shape = list(call.shape)
    dtype = _DTYPES.get(call.dtype, call.dtype)
    epoch = page["epoch_minus_monotonic_ns"]

    def wall(time: int) -> int | None:
        return time + epoch if time else None

    return {
        "frames": [{"name": call.label, "filename": "", "line": 0}],
        "record_id": number,
        "pg_id": call.process_set,
        "process_group": (str(call.process_set), f"process set {call.process_set}"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "gloo:" + _NAMES.get(call.op, call.op),
        "time_created_ns": wall(call.submitted) or 0,
        "input_sizes": [shape],
        "input_dtypes": [dtype],
        "output_sizes": [shape],
        "output_dtypes": [dtype],
        "state": _STATES.get(call.state, "completed"),
        "time_discovered_started_ns": wall(call.launched or call.negotiated),
        "time_discovered_completed_ns": wall(call.done),
        "retired": call.done != 0,
        "timeout_ms": 0,
        "is_p2p": False,
    }


def _record(page: Page, pages: Sequence[Page], entries: list[dict[str, Any]]) -> dict[str, Any]:
    groups = {
        text: {
            "name": text,
            "desc": f"process set {text}",
            "ranks": str(members_of(pages, int(text))),
        }
        for text in page["sets"]
    }
    return {
        "version": _VERSION,
        "pg_config": groups,
        "pg_status": {text: _status(text, entries) for text in groups},
        "entries": entries,
        "host_name": page["host"],
    }


def _status(group: str, entries: Sequence[dict[str, Any]]) -> dict[str, int]:
    own = [entry for entry in entries if entry["process_group"][0] == group]

    def last(states: set[str]) -> int:
        ids = [entry["collective_seq_id"] for entry in own if entry["state"] in states]
        return max(ids, default=-1)

    return {
        "last_enqueued_collective": last({"scheduled", "started", "completed"}),
        "last_started_collective": last({"started", "completed"}),
        "last_completed_collective": last({"completed"}),
    }


def export(pages: Sequence[Page], prefix: str) -> list[Path]:
    """Writes PREFIX0, PREFIX1, ..., one pickle a rank; returns their paths.

    Calls are numbered in the order of negotiation; those that still wait follow, oldest first. A
    call that all have agreed on is left out if a recorded rank lacks it: there it is older than the
    events that were kept, or the rank took part without a tensor. Neither is a desynchronisation.
    """
    entries: dict[int, list[dict[str, Any]]] = {page["rank"]: [] for page in pages}
    by_rank = {page["rank"]: page for page in pages}
    sequences: dict[int, int] = {}
    for number, shared in enumerate(shared_calls(pages)):
        first = shared.first
        members = set(members_of(pages, first.process_set)) & by_rank.keys()
        if first.is_message or first.op in _OTHERS:
            continue
        if shared.negotiated and members - shared.calls.keys():
            continue
        sequence = sequences[first.process_set] = sequences.get(first.process_set, -1) + 1
        for rank, call in shared.calls.items():
            entries[rank].append(_entry(by_rank[rank], call, number, sequence))
    paths = []
    for page in pages:
        path = Path(f"{prefix}{page['rank']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(_record(page, pages, entries[page["rank"]])))
        paths.append(path)
    return paths
