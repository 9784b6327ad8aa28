# SPDX-License-Identifier: Apache-2.0
"""Adasum on a card: by the definition, in stream order, and as the CPU's optimizer."""

import copy

import pytest

import farandole as fd
from harness.adasum import assert_near, expected, tensor
from harness.gpu_arrays import LIBRARIES, slow

pytestmark = pytest.mark.ranks(2, 3)
DTYPES = [("cupy", "float16"), ("cupy", "float32"), ("cupy", "float64"), ("torch", "bfloat16")]


@pytest.mark.parametrize(("library", "dtype"), DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_equals_the_definition(library, dtype, in_place):
    arrays = LIBRARIES[library]()
    carrier = "float32" if dtype == "bfloat16" else dtype
    for shape in [(1,), (7, 5), (0,), (100_003,), (600_000,)]:
        x = arrays.put(tensor(fd.rank(), shape, carrier), dtype)
        call = fd.allreduce_ if in_place else fd.allreduce
        result = call(x, op=fd.Adasum, name=f"{dtype} {shape}")
        assert (result is x) == in_place
        assert result.shape == shape
        assert_near(arrays.get(result), expected(shape, carrier), dtype)
        lowest = fd.allreduce(result, op=fd.Min)
        assert (arrays.get(lowest) == arrays.get(result)).all()  # the same bits everywhere


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_a_group_of_inputs_that_are_still_to_come(library):
    arrays = LIBRARIES[library]()
    stream, shapes = arrays.stream(), [(3,), (1000,), (300_000,)]
    with arrays.current(stream):
        xs = [
            arrays.put(tensor(fd.rank(), shape, salt=i), "float64")
            for i, shape in enumerate(shapes)
        ]
        slow(arrays.pointer(stream), 0.2)
        for x in xs:
            x *= 2.0
        handle = fd.grouped_allreduce_async(xs, op=fd.Adasum, name="late", postscale_factor=0.5)
        del xs
        results = handle.wait()
        for i, (shape, result) in enumerate(zip(shapes, results, strict=True)):
            assert_near(arrays.get(result), expected(shape, salt=i))


def test_the_optimizer_steps_as_on_the_cpu():
    torch = pytest.importorskip("torch")
    import farandole.torch as hvd
    from harness.gpu_toys import network, own_batch

    on_gpu = network()
    on_cpu = copy.deepcopy(on_gpu).cpu()
    optimizers = {
        model: hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), op=hvd.Adasum
        )
        for model in (on_gpu, on_cpu)
    }
    for step in range(5):
        for model, optimizer in optimizers.items():
            x, y = (v.to(next(model.parameters()).device) for v in own_batch(step))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    for p, q in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-6, atol=1e-8)
        assert torch.equal(hvd.allreduce(p.detach(), op=hvd.Min), p)
