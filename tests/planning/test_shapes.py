"""Remembered shapes against the operations themselves."""

import pytest
import torch
from support import ROOT

from lapcli.planning.pretending import pretended
from lapcli.planning.shapes import ShapeMemory
from lapcli.planning.trace import trace_memory
from lapcli.planning.training import META, kind_of
from lapcli.recipe import load_recipe

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def layouts(result):
    return [(x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()) for x in several(result)]


def several(result):
    return result if isinstance(result, tuple | list) else [result]


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        (aten.mul.Tensor, (meta(4, 1, 6), meta(5, 6, dtype=torch.bfloat16))),
        (aten.add.Tensor, (meta(6, 4).t(), 1.0)),
        (aten.mul.Tensor, (meta(3, dtype=torch.int64), 2)),
        (aten.mul.Tensor, (meta(3, dtype=torch.int64), 2.0)),
        (aten.mm.default, (meta(3, 4), meta(4, 5))),
        (aten.cat.default, ([meta(2, 3), meta(4, 3)],)),
        (aten.native_layer_norm.default, (meta(2, 3, 8), [8], meta(8), meta(8), 1e-5)),
        (aten._to_copy.default, (meta(8, 4).t(),)),
        (aten.sum.dim_IntList, (meta(2, 3, 4), [1], True)),
        (aten.topk.default, (meta(4, 9), 3)),
    ],
)
def test_the_second_time_is_as_the_first(operation, args):
    memory, expected = ShapeMemory(), layouts(operation(*args))
    first, second, third = (memory.call(operation, args, {}) for _ in range(3))
    assert layouts(first) == layouts(second) == layouts(third) == expected
    storages = {
        x.untyped_storage()._cdata for r in (first, second, third) for x in (r if isinstance(r, tuple) else [r])
    }
    assert len(storages) == 3 * len(expected)  # nobody shares anything


def test_equal_numbers_of_other_types_are_other_arguments():
    memory, whole = ShapeMemory(), meta(3, dtype=torch.int64)
    assert [memory.call(aten.mul.Tensor, (whole, x), {}).dtype for x in (1, 1.0, 1)] == [
        torch.int64,
        torch.float32,
        torch.int64,
    ]


def test_what_is_written_to_is_returned():
    memory = ShapeMemory()
    for _ in range(3):
        x, out = meta(2, 3), meta(2, 3)
        assert memory.call(aten.mul_.Tensor, (x, 2.0), {}) is x
        assert memory.call(aten.add.out, (x, x), {"out": out}) is out


def test_an_output_that_has_to_grow_grows_each_time():
    memory = ShapeMemory()
    for _ in range(3):
        out = meta(0)
        memory.call(aten.add.out, (meta(2, 3), meta(2, 3)), {"out": out})
        assert out.shape == (2, 3)


def test_real_tensors_are_computed_each_time():
    memory, x = ShapeMemory(), torch.ones(3)
    for expected in (2.0, 4.0, 8.0):
        assert memory.call(aten.mul_.Tensor, (x, 2.0), {}).tolist() == [expected] * 3
        assert memory.call(aten.arange.default, (3,), {"device": torch.device("cpu")}).tolist() == [0, 1, 2]
        assert memory.call(aten.add.Tensor, (x, 1), {}).tolist() == [expected + 1] * 3


@pytest.mark.parametrize("operation", [aten.view.default, aten._unsafe_view.default])
def test_views_share_their_storage(operation):
    memory = ShapeMemory()
    for _ in range(3):
        x = meta(2, 6)
        assert memory.call(operation, (x, [3, 4]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["quickstart", "vit_digits", "dino_quickstart"])
def test_a_trace_is_the_same_without_memory(name, bf16):
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    kind = kind_of(recipe)

    def peak(shapes):
        with pretended("cuda" if bf16 else "cpu", bf16=bf16, compiled=bf16):
            sketch = kind.sketch(META, bf16)
            dtype = torch.bfloat16 if bf16 else torch.float32
            return trace_memory(sketch, 2 * kind.multiple, shapes, keeps_gradients=False, muon_dtype=dtype)

    memory = ShapeMemory()
    assert peak(memory) == peak(memory) == peak(Forgetful())  # the second time everything is known


class Forgetful(ShapeMemory):
    def call(self, operation, args, kwargs):
        return operation(*args, **kwargs)
