# SPDX-License-Identifier: Apache-2.0
"""A wrong argument on one rank: an error on all of them at once, and then life goes on.

Every public call x every argument x what is wrong with it, on the last rank or on all.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.numpy as fnp
import farandole.torch as hvd
from farandole.calls.arguments import ARGUMENTS
from farandole.calls.public_call import is_collective
from harness.ranks import last, restarted

pytestmark = pytest.mark.ranks(2, 4)


@pytest.fixture(scope="module", autouse=True)
def _stalls_end_early() -> Iterator[None]:
    with restarted(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="12"):
        yield


# ---- the calls, and arguments with which they work


def rows() -> np.ndarray[Any, Any]:
    return np.full((fd.size(), 2), float(fd.rank()))


def tensor() -> torch.Tensor:
    return torch.full((fd.size(), 2), float(fd.rank()))


def trained() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def params() -> dict[str, Any]:
    return {"w": tensor(), "b": tensor()[:1].clone()}


def arrays() -> dict[str, Any]:
    return {"w": rows(), "b": {"c": rows()[:1].copy()}}


Good = Callable[[], dict[str, Any]]
MODULES: dict[str, Any] = {"fd": fd, "hvd": hvd, "fnp": fnp}
OF_ONE = (*("allreduce", "allreduce_", "broadcast", "broadcast_", "allgather", "reducescatter"),)


def root(call: str) -> dict[str, Any]:
    return {"root_rank": 0} if call == "broadcast" else {}


def _goods() -> dict[str, Good]:
    """By the name of the call: the arguments that it must have."""
    goods: dict[str, Good] = {}
    for prefix, make in (("fd", rows), ("hvd", tensor)):
        for base in (*OF_ONE, "alltoall"):
            stem = base.rstrip("_")
            for form in (base, f"{stem}_async{base[len(stem) :]}"):
                goods[f"{prefix}.{form}"] = lambda m=make, s=stem: {"tensor": m(), **root(s)}
                grouped = lambda m=make, s=stem: {"tensors": [m(), m()], **root(s)}  # noqa: E731
                goods[f"{prefix}.grouped_{form}"] = grouped
    for prefix in ("fd", "hvd"):
        goods[f"{prefix}.barrier"] = goods[f"{prefix}.join"] = dict
        goods[f"{prefix}.allgather_object"] = lambda: {"obj": fd.rank()}
        goods[f"{prefix}.broadcast_object"] = lambda: {"obj": fd.rank(), "root_rank": last()}
    goods["hvd.sparse_allreduce_async"] = lambda: {
        "tensor": tensor().to_sparse(),
        "name": "sparse",
        "op": hvd.Sum,
    }
    goods["hvd.broadcast_parameters"] = lambda: {"params": params(), "root_rank": 0}
    goods["hvd.broadcast_optimizer_state"] = lambda: {"optimizer": trained(), "root_rank": last()}
    goods["fnp.broadcast_parameters"] = lambda: {"params": arrays(), "root_rank": 0}
    return {call: good for call, good in goods.items() if hasattr(*_split(call))}


def _split(call: str) -> tuple[Any, str]:
    module, _, name = call.partition(".")
    return MODULES[module], name


GOODS = _goods()
ELSEWHERE = {"add_process_set", "remove_process_set", "send", "send_async", "recv", "recv_async"}

# ---- what may be wrong


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("this object can't be sent")


class HalfCompressor:
    compress = None


class OddCompressor:
    @staticmethod
    def compress(x: Any) -> Any:
        return x

    @staticmethod
    def decompress(x: Any, _: Any) -> Any:
        return x


class FailingCompressor(OddCompressor):
    @staticmethod
    def compress(x: Any) -> Any:
        raise ValueError("the compressor is broken")


def unregistered() -> fd.ProcessSet:
    return fd.ProcessSet(range(fd.size()))


NAN = float("nan")
TENSORS: list[Any] = [
    *(None, 3.0, "text", [1.0], {"a": 1}, object(), np.ones(2, object), np.array(["a"])),
    *(torch.ones(2, device="meta"), lambda: torch.ones(2, 2).to_sparse_csr()),
]
WRONG: dict[str, list[Any]] = {
    "tensor": [*TENSORS, lambda: tensor().to_sparse()],
    "tensors": [
        *(None, 5, "text", {"a": 1}, object(), lambda: {1.0, 2.0}, rows, tensor),
        list,
        lambda: [rows()],
        lambda: [rows()] * 3,
        lambda: [rows(), None],
        lambda: ["text", rows()],
        lambda: [rows(), rows(), object()],
    ],
    "op": ["Sum", "average", 99, -1, 1.5, True, NAN, object(), [1], 2**70],
    "average": ["yes", 2, 0.5, object(), []],
    "prescale_factor": ["2", None, NAN, 1j, [2.0], object(), True, b"2", 10**400],
    "compression": [None, "fp16", 5, object(), HalfCompressor, OddCompressor, FailingCompressor],
    "root_rank": [None, "0", 1.0, True, NAN, -1, 100, 2**31, 2**70, object(), [0]],
    "splits": [
        *("ab", 5, True, [1], [0.5, 0.5], [-1] * 4, [9] * 4, [2**70], [[1, 1]], {"a": 1}, object()),
    ],
    "name": [b"as bytes"],
    "process_set": [
        *(None, 0, 7, -1, 2**70, True, 1.5, "world", [0, 1], object(), unregistered),
        lambda: fd.ProcessSet([0]),
    ],
    "timeout": ["1", NAN, -1, [], 1e300, object(), True],
    "obj": [lambda: Unsendable(), lambda: threading.Lock()],
    "params": [
        None,
        5,
        0.5,
        "text",
        object,
        tensor,
        lambda: {"w": object()},
        lambda: {"x": rows()},
    ],
    "optimizer": [None, 5, "sgd", object, tensor, lambda: torch.nn.Linear(1, 1)],
    "grads": [None, 5, "text", object, lambda: {"w": object()}, lambda: {"w": [1.0]}],
}
WRONG |= {"postscale_factor": WRONG["prescale_factor"]}
MESSAGES = {"destination", "source", "tag"}  # of the calls ELSEWHERE: test_point_to_point.py
FRAMEWORKS = {"tree", "variables", "keras_model"}  # tests/with_jax, with_tensorflow, with_keras
ANYTHING = {"device", "model", "device_dense", "device_sparse", "ignore_name_scope", "inplace"}


def made(value: Any) -> Any:
    """Some have to be made when the ranks are known."""
    return value() if callable(value) and not isinstance(value, type) else value


def wrongs(call: str) -> Iterator[tuple[str, Any]]:
    """(argument, value): each argument of a call with each value that is wrong for it."""
    signature = inspect.signature(getattr(*_split(call)))
    arguments = [name for name in signature.parameters if name not in ANYTHING]
    for argument in arguments:
        for value in WRONG[argument]:
            if not _is_right(call, argument, value):
                yield argument, value


def _is_right(call: str, argument: str, value: Any) -> bool:
    """What is wrong for most calls, but not for this one."""
    if call == "hvd.sparse_allreduce_async" and argument == "tensor":
        return value is WRONG["tensor"][-1]
    if argument == "op" and value is True:
        return False
    return call.startswith("fnp.") and argument == "params" and value is tensor


def run(call: str, arguments: dict[str, Any]) -> Any:
    """The call, waited for where it has to be."""
    result = getattr(*_split(call))(**arguments)
    if call == "hvd.sparse_allreduce_async":
        return result()
    return result.wait() if isinstance(result, fd.Handle) else result


TYPED = (TypeError, ValueError, fd.MismatchError, fd.LibraryError)
# Of Python itself: they tell nobody which argument it was.
PYTHONS_OWN = (
    *("object has no attribute", "object is not callable", "object is not iterable", "unhashable"),
    *("object is not subscriptable", "not supported between"),
)


def fault_of(error: BaseException | None, mine: bool) -> str:
    """What is wrong with how a call ended; "": nothing. A stall is no TYPED error."""
    if error is None:
        return "nothing was raised"
    said = f"{type(error).__name__}: {error}"
    fine = isinstance(error, TYPED)
    fine = fine and not any(own in said for own in PYTHONS_OWN)
    if not mine and not isinstance(error, fd.MismatchError):
        fine = fine and (f"rank {last()}" in said or "members 0 and" in said)
    return "" if fine else said


def go_on(call: str, case: str, options: dict[str, Any]) -> None:
    """The same call works on all ranks afterwards."""
    try:
        run(call, {**GOODS[call](), **options})
    except Exception as reason:
        raise AssertionError(f"after {case}") from reason


def unnamed_calls_go_on() -> None:
    """Their numbers are the same on all ranks."""
    total = fd.allreduce(np.ones(3), op=fd.Sum)
    pair = fd.grouped_allreduce([np.ones(1), np.ones(2)], op=fd.Sum)
    assert total.tolist() == [fd.size()] * 3
    assert [x.tolist() for x in pair] == [[fd.size()], [fd.size()] * 2]


def attempt(call: str, arguments: dict[str, Any]) -> Exception | None:
    try:
        run(call, arguments)
    except Exception as reason:
        return reason
    return None


def options_of(call: str, named: bool) -> dict[str, Any]:
    takes_name = "name" in inspect.signature(getattr(*_split(call))).parameters
    return {"name": f"{call} again"} if takes_name and named else {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse CSR")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("call", GOODS)
def test_wrong_on_one_rank(call: str, named: bool) -> None:
    wrong_arguments(call, False, named)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse CSR")
@pytest.mark.parametrize("call", GOODS)
def test_wrong_on_all_ranks(call: str) -> None:
    wrong_arguments(call, True, False)


def wrong_arguments(call: str, everywhere: bool, named: bool) -> None:
    options = options_of(call, named)
    faults: list[str] = []
    for argument, value in wrongs(call):
        if argument == "name" and (not named or everywhere):
            continue
        if argument == "name":
            value = options["name"].encode()
        case = f"{call}({argument}={value!r}) {'named' if named else 'unnamed'}"
        arguments = {**GOODS[call](), **options}
        mine = everywhere or fd.rank() == last()
        if mine:
            arguments[argument] = made(value)
        error = attempt(call, arguments)
        fault = fault_of(error, mine)
        if everywhere and error is None and argument in ("tensors", "params", "grads"):
            fault = ""  # another number of tensors, and so on: wrong only where others differ
        faults += [f"{case}: {fault}"] if fault else []
        go_on(call, case, options)
    unnamed_calls_go_on()
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("call", GOODS)
def test_what_does_not_fit_the_signature(call: str, named: bool) -> None:
    options = options_of(call, named)
    good = {**GOODS[call](), **options}
    first = next(iter(GOODS[call]()), None)
    wrong: list[dict[str, Any]] = [{**good, "nmae": 3}]
    if first is not None:
        wrong.append({k: v for k, v in good.items() if k != first})
    for arguments in wrong:
        case = f"{call}({', '.join(arguments)})"
        mine = fd.rank() == last()
        error = attempt(call, arguments if mine else {**GOODS[call](), **options})
        fault = fault_of(error, mine)
        assert not fault, f"{case}: {fault}"
        go_on(call, case, options)
        unnamed_calls_go_on()


def test_errors_name_argument_value_and_remedy() -> None:
    with pytest.raises(TypeError, match=r"allreduce 'grad': op is 'Sum', of type str: pass one of"):
        fd.allreduce(np.ones(2), op="Sum", name="grad")
    with pytest.raises(TypeError, match=r"tensors\[1\]: NoneType is not an array: pass"):
        hvd.grouped_allreduce([torch.ones(1), None], name="pair")
    with pytest.raises(ValueError, match=r"root_rank is -1, of type int: pass a rank of the world"):
        hvd.broadcast(torch.ones(1), -1)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.reducescatter(torch.ones(4), op=hvd.Adasum)
    fd.barrier()
    if fd.rank() == last():
        with pytest.raises(ValueError, match="prescale_factor is nan"):
            fd.allreduce(np.ones(2), prescale_factor=NAN, name="scaled")
    else:
        wanted = rf"rank {last()} refused: ValueError: allreduce 'scaled': prescale_factor is nan"
        with pytest.raises(ValueError, match=wanted):
            fd.allreduce(np.ones(2), name="scaled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("door", [fd, hvd], ids=["fd", "hvd"])
def test_adasum_is_for_allreduce_only(door: Any, everywhere: bool, dtype: torch.dtype) -> None:
    x, op = torch.ones((4, 2), dtype=dtype), fd.Max
    if everywhere or fd.rank() == last():
        op = fd.Adasum
    errors = (NotImplementedError, ValueError, fd.LibraryError)
    with pytest.raises(errors, match="Adasum"):
        door.reducescatter(x, op=op, name="rows")


# ---- that nothing was forgotten


def test_every_public_call_is_in_the_table() -> None:
    for prefix, module in MODULES.items():
        for name in module.__all__:
            function = getattr(module, name)
            if is_collective(function) and name not in ELSEWHERE:
                home = f"fd.{name}" if prefix == "fnp" and hasattr(fd, name) else f"{prefix}.{name}"
                assert home in GOODS, f"{home} has no row in this test"


def test_every_call_that_takes_a_process_set_tells_its_peers() -> None:
    makers = {"DistributedOptimizer", "convert_sync_batchnorm"}  # meet nobody
    elsewhere = {"same_on_all_ranks"}  # test_agreement.py: errors of what it compares
    for module in MODULES.values():
        for name in set(module.__all__) - makers - elsewhere:
            function = getattr(module, name)
            if inspect.isfunction(function):
                takes = "process_set" in inspect.signature(function).parameters
                assert not takes or is_collective(function), f"{name} tells no peer"


def test_every_argument_has_wrong_values_here() -> None:
    assert ARGUMENTS.keys() - ANYTHING - MESSAGES - FRAMEWORKS == WRONG.keys()
