# SPDX-License-Identifier: Apache-2.0
"""What programs of strangers do with collectives within jit: many of them, loops, retracing,
donation, dropped results, exceptions between calls."""

import contextlib

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import farandole.jax as hvd
from farandole.jax import collectives

pytestmark = pytest.mark.ranks(1, 3)


def sum_(x, **options):
    return hvd.allreduce(x, op=hvd.Sum, **options)


def total():
    return sum(range(hvd.size()))


@pytest.mark.parametrize("named", [False, True])
def test_many_in_one_program(named):
    @jax.jit
    def program(xs):
        names = [f"many.{i}" if named else None for i in range(len(xs))]
        return [sum_(x * (i + 1), name=names[i]) for i, x in enumerate(xs)]

    xs = [jnp.full(1 + 37 * i, hvd.rank(), "float32") for i in range(60)]
    for _ in range(3):
        for i, result in enumerate(program(xs)):
            np.testing.assert_array_equal(result, np.full(1 + 37 * i, total() * (i + 1), "f4"))


def test_one_compiled_function_twice_in_a_program():
    """Both calls have the same name; their order is that of the program."""
    layer = jax.jit(lambda x: sum_(x, name="layer"))
    program = jax.jit(lambda x: (layer(x), layer(-x), layer(2 * x)))
    for turn in range(20):
        found = program(jnp.full(1000, hvd.rank() + turn))
        expected = total() + turn * hvd.size()
        assert [int(x[-1]) for x in found] == [expected, -expected, 2 * expected]


def test_programs_that_do_not_depend_on_each_other():
    """They are dispatched at once, and may be ready in any order: on each rank in another one."""
    slow = jax.jit(lambda x: sum_(lax.fori_loop(0, 2000 * (hvd.rank() + 1), lambda _, y: y @ x, x)))
    fast = jax.jit(sum_)
    eye = jnp.eye(64)
    for turn in range(10):
        late = slow(eye)
        soon = [fast(jnp.full((64, 64), float(hvd.rank() + i + turn))) for i in range(5)]
        assert float(late[0, 0]) == hvd.size()
        for i, x in enumerate(soon):
            assert float(x[0, 0]) == total() + (i + turn) * hvd.size()


def test_loops_and_branches():
    @jax.jit
    def program(x):
        y, ys = lax.scan(
            lambda c, i: (sum_(c) / hvd.size(), sum_(i)), x, jnp.arange(5) + hvd.rank()
        )
        y = lax.fori_loop(0, 4, lambda i, c: hvd.allreduce(c + i), y)
        y = lax.while_loop(lambda c: sum_(c)[0] < 100 * hvd.size(), lambda c: 2 * c, y)
        return lax.cond(y[0] > 0, lambda c: sum_(c), lambda c: c, y), ys

    y, ys = program(jnp.full(3, 1.0 + hvd.rank()))
    mean = 1 + total() / hvd.size()
    value = mean + 6
    while value < 100:
        value *= 2
    np.testing.assert_allclose(y, np.full(3, value * hvd.size()), rtol=1e-6)
    np.testing.assert_array_equal(ys, np.arange(5) * hvd.size() + total())


def test_numbers_within_a_program():
    """They are constants of it, and sent in each of its runs."""
    program = jax.jit(lambda x: x + hvd.allreduce(hvd.rank(), op=hvd.Sum) + sum_(np.ones(3)))
    for turn in range(3):
        assert program(jnp.full(3, turn)).tolist() == [turn + total() + hvd.size()] * 3


def test_dropped_results_are_sent_all_the_same():
    @jax.jit
    def program(x):
        sum_(x, name="dropped")
        return sum_(2 * x, name="kept")

    program(jnp.ones(1000))
    for _ in range(3):
        result = program(jnp.ones(1000) * hvd.rank())
    assert float(result[0]) == 2 * total()


def test_retracing_for_other_shapes_and_types():
    program = jax.jit(sum_)
    for epoch in range(3):
        for length in (1, 5, 1000, 5):
            for dtype in ("float32", "int32", "bfloat16"):
                found = program(jnp.full(length, hvd.rank() + epoch, dtype))
                assert found.dtype == dtype
                assert found.tolist() == [total() + epoch * hvd.size()] * length


def test_a_program_compiled_ahead_of_time():
    program = jax.jit(lambda x: sum_(x) + sum_(2 * x)).lower(jnp.zeros(3)).compile()
    for turn in range(4):
        found = program(jnp.full(3, float(hvd.rank() + turn)))
        np.testing.assert_array_equal(found, np.full(3, 3 * (total() + turn * hvd.size()), "f4"))


def test_donated_arrays():
    step = jax.jit(lambda x, g: x - hvd.allreduce(g), donate_argnums=0)
    itself = jax.jit(sum_, donate_argnums=0)
    x = jnp.zeros(10_000)
    for turn in range(3):
        before, x = x, step(x, jnp.full(10_000, float(hvd.rank())))
        assert before.is_deleted()
        y = itself(jnp.full(10_000, float(hvd.rank() + turn)))
        assert float(y[-1]) == total() + turn * hvd.size()
        z = sum_(jnp.full(10_000, 1.0 + turn))  # made outside of jit, without a copy
        more = jax.jit(lambda z: z + 1, donate_argnums=0)(z)
        assert float(more[-1]) == (1 + turn) * hvd.size() + 1
    np.testing.assert_allclose(x, np.full(10_000, -3 * total() / hvd.size()), rtol=1e-6)
    with pytest.raises(ValueError, match="donated"):
        hvd.allreduce(before)
    assert float(sum_(jnp.float32(1))) == hvd.size()


def test_results_outlive_their_inputs_and_inputs_are_only_read():
    kept = []
    for i in range(20):
        x = jnp.full(5000, float(hvd.rank() + i))
        kept.append((sum_(x), jax.jit(sum_)(x), x))
    for i, (outside, inside, x) in enumerate(kept):
        assert float(outside[-1]) == float(inside[-1]) == total() + i * hvd.size()
        assert float(x[0]) == hvd.rank() + i


def test_an_exception_between_two_calls():
    program = jax.jit(lambda x: sum_(x, name="raises"))
    for turn in range(3):
        with contextlib.suppress(KeyError):
            program(jnp.ones(3))
            raise KeyError
        if turn == 1:
            with pytest.raises(TypeError):
                jax.jit(lambda x: [sum_(x)] + x["no"])(jnp.ones(3))
    assert program(jnp.full(3, float(hvd.rank()))).tolist() == [total()] * 3


def test_vmap_is_refused():
    """On all ranks, before any of them sends something."""
    for program in (jax.vmap(hvd.allreduce), jax.jit(jax.vmap(hvd.allreduce))):
        with pytest.raises(NotImplementedError, match="Batching rule for 'farandole'"):
            program(jnp.ones((2, 3)))
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum).tolist() == [hvd.size()]


def test_a_program_for_other_ranks_is_refused():
    program = jax.jit(hvd.allgather)
    assert program(jnp.ones(1)).shape == (hvd.size(),)
    if hvd.size() < 3:
        return
    pair = hvd.add_process_set([0, 1])
    inner = jax.jit(lambda x: sum_(x, process_set=pair))
    if pair.included():
        assert float(inner(jnp.float32(1))) == 2
    hvd.remove_process_set(pair)
    other = hvd.add_process_set([0, 2])
    if hvd.rank() == 0:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"ranks have changed|no process set"):
            inner(jnp.float32(1))
    hvd.remove_process_set(other)


def test_remat_and_nested_transformations():
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda v: jnp.sin(sum_(v * w)))(x))

    w, x = jnp.float32(0.3), jnp.full(5, 0.1 * (1 + hvd.rank()))
    value = jax.jit(jax.value_and_grad(loss))(w, x)
    s = 0.1 * sum(range(1, hvd.size() + 1))
    assert float(value[0]) == pytest.approx(5 * np.sin(0.3 * s), rel=1e-5)
    everyone = hvd.allreduce(value[1], op=hvd.Sum)
    assert float(everyone) == pytest.approx(hvd.size() * 5 * np.cos(0.3 * s) * s, rel=1e-5)


@pytest.mark.ranks(1)
def test_a_program_for_cuda_calls_the_core_in_its_order():
    """As far as it goes without a GPU: what XLA gets to compile."""

    @jax.jit
    def program(x):
        return sum_(x), hvd.allgather(x, name="rows")

    traced = program.trace(jnp.ones((2, 3)))
    lines = traced.lower(lowering_platforms=("cuda",)).as_text(dialect="hlo").splitlines()
    first, second = (line for line in lines if 'custom_call_target="farandole_collective"' in line)
    assert all("custom_call_has_side_effect=true" in line for line in (first, second))
    assert all("api_version=API_VERSION_TYPED_FFI" in line for line in (first, second))
    [after] = (line for line in lines if f"get-tuple-element({first.split()[0]}), index=0" in line)
    assert f" custom-call({after.split()[0]}, " in second
    with pytest.raises(NotImplementedError, match="supports CPUs and CUDA only: compile for"):
        traced.lower(lowering_platforms=("tpu",))


def test_values_on_a_gpu_are_sent_by_a_program(monkeypatch):
    """Here a CPU stands for the GPU: all but the place of the arrays is as there."""
    monkeypatch.setattr(collectives, "_on_gpu", lambda tree: True)
    x = jnp.arange(6.0).reshape(2, 3) + hvd.rank()
    for name in (None, "named"):
        tree = sum_({"a": x, "b": jnp.float32(hvd.rank())}, name=name)
        np.testing.assert_array_equal(
            tree["a"], hvd.size() * np.arange(6.0).reshape(2, 3) + total()
        )
        assert float(tree["b"]) == total()
    params = hvd.broadcast_parameters({"w": x, "step": hvd.rank()}, root_rank=hvd.size() - 1)
    np.testing.assert_array_equal(params["w"], np.arange(6.0).reshape(2, 3) + hvd.size() - 1)
    assert int(params["step"]) == hvd.size() - 1
    assert hvd.alltoall(jnp.full(hvd.size(), hvd.rank())).tolist() == list(range(hvd.size()))
    with pytest.raises(ValueError, match="within jit or on a GPU"):
        hvd.alltoall(jnp.ones(3), splits=[3])
    if hvd.size() > 1:
        with pytest.raises(hvd.MismatchError, match="shape is"):
            sum_(jnp.ones(2 + (hvd.rank() == 0)), name="odd")
        assert float(sum_(jnp.float32(1), name="after")) == hvd.size()
