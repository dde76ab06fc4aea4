"""FlatDTensor in one process, with a mesh of four ranks: functions, autograd, copies."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_engine.flat_dtensor import (
    Box,
    FlatDTensor,
    FlatPlacement,
    FlatShard,
    flat_range_boxes,
    functions,
)
from fsdp_engine.optim import shard_optimizer
from tests.optim.pair import mesh_in_name_only
from tests.reference import nothing
from tests.torch_versions import compiled_code_raises, marks_gradients

SHAPE, START, STOP = (6, 5), 7, 19


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with mesh_in_name_only() as made:
        yield made


def flat_of(full: Tensor, mesh: DeviceMesh, start: int = START, stop: int = STOP) -> FlatDTensor:
    """Elements [start, stop) of ``full``."""
    placement = FlatPlacement.on_mesh(full.shape, start, stop, mesh, 1)
    return FlatDTensor.from_flat_local(full.reshape(-1)[start:stop].clone(), placement)


def param_of(full: Tensor, mesh: DeviceMesh) -> Any:
    return nn.Parameter(flat_of(full, mesh))


def check(result: Any, full: Tensor, start: int = START, stop: int = STOP) -> None:
    """``result`` is the FlatDTensor of ``full``'s elements."""
    assert type(result) is FlatDTensor
    assert result.shape == full.shape
    assert result.dtype == full.dtype
    torch.testing.assert_close(result.local, full.reshape(-1)[start:stop], equal_nan=True)


# --- boxes and placements ---


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(ranges())
@settings(max_examples=400, deadline=None)
def test_boxes_are_the_range_and_nothing_else(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = flat_range_boxes(shape, start, stop)
    elements = torch.arange(math.prod(shape)).reshape(shape)
    found = []
    for box in boxes:
        part = elements[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        assert part.reshape(-1).tolist() == list(range(box.start, box.stop))
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert len({box.offsets for box in boxes}) == len(boxes)


def test_boxes_of_the_worked_example() -> None:
    assert flat_range_boxes((4, 5), 3, 17) == (
        Box((0, 3), (1, 2), 3, 5),
        Box((1, 0), (2, 5), 5, 15),
        Box((3, 0), (1, 2), 15, 17),
    )


def test_a_placement_names_the_sharded_axes(mesh: DeviceMesh) -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    flats = [FlatPlacement.on_mesh((4,), 0, 1, square, cut) for cut in (0, 1, 2)]
    assert [flat.placements for flat in flats] == [
        (Replicate(), Replicate()),
        (Replicate(), FlatShard(flats[1])),
        (FlatShard(flats[2]), FlatShard(flats[2])),
    ]
    groups = FlatPlacement.on_mesh((4,), 0, 1, square, 2).split_groups
    assert groups == (square.get_group("inner"), square.get_group("outer"))


def test_a_flat_shard_is_a_shard_of_no_dim() -> None:
    flat = FlatShard()
    assert flat.is_shard()
    assert not any((flat.is_shard(0), flat.is_replicate(), flat.is_partial()))
    assert not isinstance(flat, Shard)
    assert FlatShard((0, 1)) != FlatShard((1, 2))
    assert flat != Replicate()
    assert Replicate() != flat
    assert pickle.loads(pickle.dumps(flat)) == flat
    assert copy.deepcopy(flat) == flat


# --- changes ---


def step(param: Any, wrap: Callable[[Any], object] = nothing, **form: bool) -> None:
    param.grad = torch.full_like(param, -1.0, requires_grad=False)
    optimizer = torch.optim.SGD([param], lr=1.0, **form)
    wrap(optimizer)
    optimizer.step()


CHANGES: dict[str, Callable[[Any], object]] = {
    "add_": torch.no_grad()(lambda param: param.add_(1)),
    "data": lambda param: param.data.fill_(1),
    "detach": lambda param: param.detach().fill_(1),
    "local": lambda param: param.local.fill_(1),
    "foreach": torch.no_grad()(lambda param: torch._foreach_add_([param], 1)),
    "fused": functools.partial(step, fused=True),
    **{
        f"sharded, {form}": functools.partial(step, wrap=shard_optimizer, **form)
        for form in ({"foreach": False}, {"foreach": True}, {"fused": True})
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows_in_the_buffer_and_its_version(mesh: DeviceMesh, change: str) -> None:
    buffer = torch.zeros(64)
    placement = FlatPlacement.on_mesh(SHAPE, START, STOP, mesh, 1)
    param: Any = nn.Parameter(FlatDTensor.from_flat_local(buffer[20:32], placement))
    before = buffer._version
    CHANGES[change](param)
    assert param._version == buffer._version > before
    assert buffer[20:32].tolist() == [1.0] * 12
    assert buffer.sum() == 12


# --- functions ---


def torch_function(name: str) -> Callable[..., Any]:
    """The function of this name in torch, torch.special, functional or Tensor."""
    for place in (torch, torch.special, F, Tensor):
        if hasattr(place, name):
            return getattr(place, name)
    raise AssertionError(name)


INPUTS: dict[str, Callable[[], list[Any]]] = {
    "where": lambda: [torch.rand(SHAPE) > 0.5, torch.rand(SHAPE), torch.rand(SHAPE)],
    "masked_fill": lambda: [torch.rand(SHAPE), torch.rand(SHAPE) > 0.5, 2.0],
    "fill": lambda: [torch.rand(SHAPE), 2.0],
    "clamp": lambda: [torch.rand(SHAPE), torch.tensor(0.2), torch.rand(SHAPE)],
    "clip": lambda: [torch.rand(SHAPE), 0.2, 0.6],
    "threshold": lambda: [torch.rand(SHAPE), 0.5, 0.1],
    "polygamma": lambda: [1, torch.rand(SHAPE)],
    "leaky_relu": lambda: [torch.rand(SHAPE) - 0.5, 0.3],
    "lerp": lambda: [torch.rand(SHAPE), torch.rand(SHAPE), torch.rand(SHAPE)],
    "ldexp": lambda: [torch.rand(SHAPE), torch.randint(1, 4, SHAPE)],
}


def example_inputs(name: str) -> list[list[Any]]:
    """Arguments to try: the listed ones, else tensors until the function takes them."""
    if name in INPUTS:
        return [INPUTS[name]()]
    floats = [[torch.rand(SHAPE) for _ in range(arity)] for arity in (1, 2, 3)]
    integers = [[torch.randint(1, 4, SHAPE) for _ in range(arity)] for arity in (1, 2)]
    return floats + integers


@pytest.mark.parametrize("module", functions._LOADED_LATER)
def test_modules_that_are_loaded_later_have_the_functions_of_the_table(module: str) -> None:
    loaded = importlib.import_module(f"fsdp_engine.flat_dtensor.{module}")
    assert functions._LOADED_LATER[module] == loaded.HANDLERS.keys()


@pytest.mark.parametrize("name", sorted(functions._ELEMENTWISE))
def test_a_listed_function_is_elementwise(mesh: DeviceMesh, name: str) -> None:
    function = torch_function(name)
    for args in example_inputs(name):
        try:
            expected = function(*args)
        except (RuntimeError, TypeError):
            continue
        flat = [flat_of(a, mesh) if isinstance(a, Tensor) and a.ndim else a for a in args]
        check(function(*flat), expected)
        inplace = getattr(Tensor, name + "_", None)
        if inplace is not None and isinstance(args[0], Tensor) and expected.dtype == args[0].dtype:
            assert inplace(flat[0], *flat[1:]) is flat[0]
            check(flat[0], expected)
        return
    pytest.fail(f"{name} takes none of the arguments")


OPERATIONS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b * 2 - 1,
    lambda a, b: 1 - a / (2 + b),
    lambda a, b: (a // 0.3) % 0.5,
    lambda a, b: 2**a + b**2,
    lambda a, b: -abs(a) + (+b),
    lambda a, b: (a > b) & ~(a == b) | (a < 0.1) ^ (b >= 0.2),
    lambda a, b: torch.tensor(2.0) * a + b * torch.ones(1),
    lambda a, b: torch.where(a > b, a, 0.0),
    lambda a, b: torch.max(a, b) + torch.min(a, other=b),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: (c := a.clone().lerp_(b, 0.1), torch._foreach_lerp_([c], [a], 0.1))[0],
    lambda a, b: torch.addcdiv(a, a, b + 1, value=0.5),
    lambda a, b: a.clone().mul_(b).addcmul_(a, b, value=2).clamp_(min=0.2),
    lambda a, b: torch.zeros_like(a) + torch.ones_like(b) + torch.full_like(a, 3.0),
    lambda a, b: a.to(torch.bfloat16),
    lambda a, b: a.to(b.double()),
    lambda a, b: a.type_as(b.half()),
    lambda a, b: a.double().float().bfloat16(),
    lambda a, b: a.cpu().contiguous().detach(),
    lambda a, b: a.view(6, 5).reshape(6, -1).view_as(b).expand(-1, 5),
    lambda a, b: a.view(torch.int32),
    lambda a, b: a.new_zeros(6, 5) + a.new_full((6, 5), 2.0) + b.new_ones(torch.Size((6, 5))),
    lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2)[1],
    lambda a, b: torch._foreach_mul([a, b], torch.tensor(2.0))[0],
    lambda a, b: torch._foreach_sqrt((a, b))[0],
    lambda a, b: torch.mul(a, b, out=torch.empty_like(a)),
    lambda a, b: a.is_floating_point() * a + a.dim() * b + len(a),
    lambda a, b: torch.mul(a, b, out=None) + torch.where(a > b, a, b, out=None),
]


@pytest.mark.parametrize("index", range(len(OPERATIONS)))
def test_arithmetic_keeps_the_slice(mesh: DeviceMesh, index: int) -> None:
    cases = [(SHAPE, START, STOP), (SHAPE, 0, 30), (SHAPE, 4, 4)]
    if index in (0, 1, 3, 9, 10, 12, 13, 14, 22):
        cases += [((), 0, 0), ((), 0, 1)]
    for shape, start, stop in cases:
        a, b = torch.rand(shape), torch.rand(shape)
        result = OPERATIONS[index](flat_of(a, mesh, start, stop), flat_of(b, mesh, start, stop))
        check(result, OPERATIONS[index](a, b), start, stop)


def local(tensor: Tensor, mesh: DeviceMesh) -> FlatDTensor:
    """A FlatDTensor of the slice [0, 4)."""
    return FlatDTensor.from_flat_local(tensor, FlatPlacement.on_mesh(SHAPE, 0, 4, mesh, 1))


def placement(mesh: DeviceMesh, start: int, stop: int, **options: Any) -> FlatPlacement:
    return FlatPlacement(torch.Size(SHAPE), start, stop, mesh, **options)


GRADIENT = torch.ones(2, requires_grad=True)
NOT_DEFINED = r": not defined .*shape \(6, 5\), el.*Call \.full_tensor\(\)"
WHOLE = r"Call \.full_tensor\(\)"
MIXES, NO_GRAD = "mixes two different slices", r"torch\.no_grad"
NO_INPUTS = r"inputs=; found .*\(6, 5\).*requires_grad_\(False\)"
NO_LOCAL = r"expected a contiguous tensor of shape \(4,\)"
NO_EDGE = "register_post_accumulate_grad_hook"
NO_PLACE = r"redistribute: expected all Replicate\(\)"
Call = Callable[[Any, Any, Any, Any], Any]
# Calls with a tensor, a parameter of the same elements, a tensor of another slice, and the mesh.
REFUSED: list[tuple[Call, type[Exception], str]] = [
    (lambda t, p, o, m: F.layer_norm(t, (5,)), ValueError, f"(?s)^layer_norm{NOT_DEFINED}"),
    (lambda t, p, o, m: t.numpy(), ValueError, f"(?s)numpy{NOT_DEFINED}"),
    (lambda t, p, o, m: t.item(), ValueError, WHOLE),
    (lambda t, p, o, m: bool(t), ValueError, WHOLE),
    (lambda t, p, o, m: t.resize_(3), ValueError, WHOLE),
    (lambda t, p, o, m: t.t_(), ValueError, WHOLE),
    (lambda t, p, o, m: t.transpose_(0, 1), ValueError, WHOLE),
    (lambda t, p, o, m: torch.mm(t, t.local, out=torch.empty(6, 6)), ValueError, WHOLE),
    (
        lambda t, p, o, m: torch.randn_like(t),
        ValueError,
        f"(?s)initialize full .* instead.*{WHOLE}",
    ),
    (lambda t, p, o, m: F.dropout(t), ValueError, WHOLE),
    (lambda t, p, o, m: torch.ones(6, 5).copy_(t), ValueError, WHOLE),
    (lambda t, p, o, m: torch._foreach_add([t], [torch.ones(6, 5)]), ValueError, WHOLE),
    (lambda t, p, o, m: t + o, ValueError, MIXES),
    (lambda t, p, o, m: torch._foreach_add_([t, o], [o, t]), ValueError, MIXES),
    (lambda t, p, o, m: torch.equal(t, o), ValueError, MIXES),
    (lambda t, p, o, m: setattr(p, "grad", o), TypeError, "a FlatDTensor of the slice"),
    (lambda t, p, o, m: p.add_(1), RuntimeError, NO_GRAD),
    (lambda t, p, o, m: p.zero_(), RuntimeError, NO_GRAD),
    (lambda t, p, o, m: p.copy_(torch.rand(SHAPE)), RuntimeError, NO_GRAD),
    (lambda t, p, o, m: torch._foreach_mul_([p], 2.0), RuntimeError, NO_GRAD),
    (lambda t, p, o, m: (p * 2).mul_(3), RuntimeError, NO_GRAD),
    (lambda t, p, o, m: p.__iadd__(1), RuntimeError, NO_GRAD),
    (lambda t, p, o, m: t.set_(torch.ones(SHAPE)), ValueError, "the memory of a flat buffer"),
    (lambda t, p, o, m: t.new_tensor(t), ValueError, "new_tensor: not defined"),
    (lambda t, p, o, m: torch.autograd.graph.get_gradient_edge(p), ValueError, NO_EDGE),
    (lambda t, p, o, m: (2 * GRADIENT).sum().backward(inputs=[p, GRADIENT]), ValueError, NO_INPUTS),
    (lambda t, p, o, m: p.sum().backward(inputs=[p]), ValueError, NO_INPUTS),
    (lambda t, p, o, m: p.sum().backward(inputs=p), ValueError, NO_INPUTS),
    (lambda t, p, o, m: setattr(p, "data", t.bfloat16()), TypeError, r"data: .*float32 .*\.bf"),
    (lambda t, p, o, m: t.redistribute(placements=[Shard(0)]), ValueError, NO_PLACE),
    (lambda t, p, o, m: t.redistribute(placements=[Replicate()] * 2), ValueError, NO_PLACE),
    (lambda t, p, o, m: t.redistribute(), ValueError, NO_PLACE),
    (lambda t, p, o, m: local(torch.zeros(5), m), ValueError, NO_LOCAL),
    (lambda t, p, o, m: local(torch.zeros(2, 2), m), ValueError, NO_LOCAL),
    (lambda t, p, o, m: local(torch.zeros(8)[::2], m), ValueError, NO_LOCAL),
    (lambda t, p, o, m: local(GRADIENT.repeat(2), m), ValueError, "does not require grad"),
    (lambda t, p, o, m: placement(m, 4, 31), ValueError, r"stop <= 30 .* found \[4, 31\)"),
    (lambda t, p, o, m: placement(m, 4, 5, num_sharded_axes=2), ValueError, "0 to 1 .* found 2"),
    (lambda t, p, o, m: flat_range_boxes((4, 5), 3, 21), ValueError, r"stop <= 20 .*\[3, 21\)"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_not_defined_for_slices_raises_and_changes_nothing(
    mesh: DeviceMesh, number: int
) -> None:
    call, error, message = REFUSED[number]
    full = torch.rand(SHAPE)
    tensor, param = flat_of(full, mesh), param_of(full, mesh)
    other = flat_of(full, mesh, START + 1, STOP + 1)
    with pytest.raises(error, match=message):
        call(tensor, param, other, mesh)
    check(tensor, full)
    assert torch.equal(param.local, tensor.local)


def test_lists_may_mix_slices_and_plain_tensors(mesh: DeviceMesh) -> None:
    full, plain = torch.rand(SHAPE), torch.rand(3)
    tensors, others = [flat_of(full, mesh), plain.clone()], [flat_of(full, mesh), plain.clone()]
    torch._foreach_addcmul_(tensors, others, others, 2.0)
    check(tensors[0], full + 2 * full * full)
    torch.testing.assert_close(tensors[1], plain + 2 * plain * plain)
    doubled = torch._foreach_mul(tensors, 2.0)
    assert [type(each) for each in doubled] == [FlatDTensor, Tensor]


def test_a_mask_of_the_same_slice_selects(mesh: DeviceMesh) -> None:
    full = torch.rand(SHAPE)
    flat = flat_of(full, mesh)
    flat[flat > 0.5] = 7.0
    full[full > 0.5] = 7.0
    check(flat, full)


def test_each_form_of_in_place_change_is_announced(mesh: DeviceMesh) -> None:
    """Each change calls ``prepare_change``, so that the engine can wait for copies of the slice."""
    param, announced = param_of(torch.rand(SHAPE), mesh), []
    param.backref = Mock(prepare_change=lambda: announced.append(1))
    changes: list[Callable[[], Any]] = [
        lambda: param.mul_(2),
        lambda: torch.add(param.detach(), 1, out=param),
        lambda: param.__setitem__(param > 0.5, 0.0),
        lambda: param.copy_(torch.rand(SHAPE)),
        lambda: param.zero_(),
        lambda: nn.init.normal_(param),
        lambda: torch._foreach_mul_([param], 2.0),
        lambda: torch._foreach_copy_([param], [torch.rand(SHAPE)]),
        lambda: torch._foreach_zero_([param]),
        lambda: torch._foreach_add_([torch.rand(3), param], 1.0),
    ]
    with torch.no_grad():
        for number, change in enumerate(changes, 1):
            change()
            assert len(announced) == number


def test_in_place_functions_return_the_same_object(mesh: DeviceMesh) -> None:
    flat = flat_of(torch.rand(SHAPE), mesh)
    same: Any = flat
    same += 1
    same *= flat
    assert same is flat
    assert flat.contiguous() is flat
    assert flat.to(torch.float32) is flat
    assert flat.detach().add_(flat) is not flat


def test_zeroing_leaves_a_mark(mesh: DeviceMesh) -> None:
    params = [param_of(torch.rand(SHAPE), mesh) for _ in range(3)]
    for param in params:
        param.grad = flat_of(torch.rand(SHAPE), mesh)
    grads = [param.grad for param in params]
    assert not any(grad.zeroed for grad in grads)
    torch.optim.SGD(params[:1], lr=0.1).zero_grad(set_to_none=False)
    assert [grad.zeroed for grad in grads] == [True, False, False]
    torch.optim.SGD(params, lr=0.1, foreach=True).zero_grad(set_to_none=False)
    assert all(grad.zeroed for grad in grads)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert not any(grad.local.any() for grad in grads)


# --- parameters and autograd ---


def test_a_parameter_is_a_parameter(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    assert isinstance(param, nn.Parameter)
    assert type(param) is FlatDTensor
    assert param.requires_grad
    assert param.is_leaf
    assert isinstance(param, DTensor)
    module = nn.Module()
    module.weight = param
    assert dict(module.named_parameters())["weight"] is param
    assert module.state_dict()["weight"].local.data_ptr() == param.local.data_ptr()
    param.requires_grad = False
    assert not param.requires_grad


def loss_of(p: Any, q: Any) -> Any:
    return ((p * p).sum() + (p * 3 + q).mean() + torch.where(p > 0.5, p, q).sum() + p.norm()) * 2


@marks_gradients
def test_gradients_are_the_slices_of_full_gradients(mesh: DeviceMesh) -> None:
    # This rank holds all elements, and collectives of a fake group change nothing. So gradients of
    # full reductions are the mean over four ranks, three of which contribute nothing.
    full = [torch.rand(SHAPE, requires_grad=True) for _ in range(2)]
    params: list[Any] = [nn.Parameter(flat_of(each.detach(), mesh, 0, 30)) for each in full]
    expected = loss_of(*full)
    loss = loss_of(*params)
    assert type(loss) is Tensor
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    loss_of(*params).backward()  # adds to gradients
    for param, each in zip(params, full, strict=True):
        assert each.grad is not None
        check(param.grad, 2 * each.grad / 4, 0, 30)
        assert param.grad is param.grad
    (grad,) = torch.autograd.grad(loss_of(*params), params[:1])
    assert full[0].grad is not None
    check(grad, full[0].grad / 4, 0, 30)


@marks_gradients
def test_gradients_of_a_sharded_output_are_given_alone_or_in_a_list(mesh: DeviceMesh) -> None:
    value, gradient = torch.rand(SHAPE), torch.rand(SHAPE)
    for as_argument in (lambda each: each, lambda each: [each], lambda each: (each,)):
        param: Any = nn.Parameter(flat_of(value, mesh, 0, 30))
        flat_gradient = flat_of(gradient, mesh, 0, 30)
        torch.autograd.backward(param * 2, grad_tensors=as_argument(flat_gradient))
        check(param.grad, 2 * gradient, 0, 30)


def test_a_scalar_parameter_has_gradients_even_where_it_is_not(mesh: DeviceMesh) -> None:
    for stop in (0, 1):
        param: Any = nn.Parameter(flat_of(torch.tensor(3.0), mesh, 0, stop))
        (param * param + param).backward()
        check(param.grad, torch.tensor(7.0), 0, stop)
        ((param * 2).sum() + (param * 3).sum()).backward()
        # Gradients of sums are averaged over four ranks, three of which contribute nothing.
        check(param.grad, torch.tensor(7.0 + 5.0 / 4), 0, stop)


def test_torchs_backward_takes_one_sharded_scalar(mesh: DeviceMesh) -> None:
    backward = torch.autograd.backward
    param: Any = nn.Parameter(flat_of(torch.tensor(3.0), mesh, 0, 1))
    square = param * param
    backward([square], retain_graph=True)
    backward(square)
    check(param.grad, torch.tensor(12.0), 0, 1)
    with pytest.raises(ValueError, match="of several tensors"):
        backward([param * 2, param * 3])
    with pytest.raises(ValueError, match="of several tensors"):
        backward([torch.tensor(1.0, requires_grad=True), param * 3])
    check(param.grad, torch.tensor(12.0), 0, 1)


def test_to_local_is_differentiable(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    (param.to_local() * 2).sum().backward()
    check(param.grad, torch.full(SHAPE, 2.0))
    with torch.no_grad():
        assert param.to_local() is param.local


def test_autograd_notices_a_change_before_backward(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    loss = (param * param).sum()
    param.data.add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()


# --- copying ---


def test_copy_takes_the_slice_of_a_full_tensor(mesh: DeviceMesh) -> None:
    full = torch.rand(SHAPE)
    flat = flat_of(torch.zeros(SHAPE), mesh)
    check(flat.copy_(full), full)
    check(flat.copy_(flat_of(full + 1, mesh)), full + 1)
    check(flat.copy_(torch.tensor(4.0)), torch.full(SHAPE, 4.0))
    check(flat.copy_(3.0), torch.full(SHAPE, 3.0))
    check(flat.copy_(full.double()), full)
    params = [param_of(torch.zeros(SHAPE), mesh), nn.Parameter(torch.zeros(3))]
    nn.utils.vector_to_parameters(torch.cat([full.view(-1), torch.ones(3)]), params)
    check(params[0], full)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_of_slices_is_as_right_as_any(mesh: DeviceMesh, backend: str) -> None:
    full = torch.rand(SHAPE)
    compiled = torch.compile(lambda x: (x + 1) * 2, backend=backend)
    check(compiled(flat_of(full, mesh)), (full + 1) * 2)


@compiled_code_raises
def test_a_compiled_function_that_a_slice_cannot_answer_is_refused(mesh: DeviceMesh) -> None:
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda x: F.layer_norm(x, (5,)), backend=backend)
        with pytest.raises(ValueError, match=r"layer_norm: not defined for a slice"):
            compiled(flat_of(torch.rand(SHAPE), mesh))


def test_a_module_keeps_its_parameters_through_to_or_refuses(mesh: DeviceMesh) -> None:
    module = nn.Linear(5, 6, bias=False)
    param = module.weight = param_of(torch.rand(SHAPE), mesh)
    param.grad = flat_of(torch.rand(SHAPE), mesh)
    pointer = param.local.data_ptr()
    for same in (module.to("cpu"), module.float(), module.to(torch.float32)):
        assert same.weight is param
        assert param.local.data_ptr() == pointer
    for change in (module.half, module.double, lambda: module.to("meta")):
        with pytest.raises(TypeError, match="belongs to a flat buffer"):
            change()
        assert module.weight is param
        assert param.dtype == torch.float32


def test_tensors_that_data_returned_keep_their_values_when_data_is_set(mesh: DeviceMesh) -> None:
    old, new = torch.rand(SHAPE), torch.rand(SHAPE)
    param, average = param_of(old, mesh), flat_of(new, mesh)
    pointer = param.local.data_ptr()
    # Swap in averages of weights, as for an evaluation, and swap them out again.
    backup, detached, viewed = param.data, param.detach(), param.data
    param.data = average
    check(param, new)
    for each in (backup, detached, viewed):
        check(each, old)
    backup.add_(1.0)
    check(param, new)
    check(detached, old + 1.0)  # backup, detached and viewed still share memory
    param.data, average.data = average.data, param.data.mul_(2.0)
    check(param, new)
    check(average, 2.0 * new)
    param.data = detached
    check(param, old + 1.0)
    param.data.zero_()
    check(param, torch.zeros(SHAPE))
    check(backup, old + 1.0)
    assert param.local.data_ptr() == pointer


def save_and_load(param: Any) -> Any:
    file = io.BytesIO()
    torch.save({"w": param}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda param: pickle.loads(pickle.dumps(param)),
    "torch.save": save_and_load,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_equal(mesh: DeviceMesh, way: str) -> None:
    full = torch.rand(SHAPE)
    param = param_of(full, mesh)
    param.mark = "mine"
    param.grad = flat_of(full + 1, mesh)
    other = COPIES[way](param)
    if way == "deepcopy":
        check(other.grad, full + 1)
        assert other.grad is not param.grad
        first, second = copy.deepcopy([param, param])
        assert first is second
    check(other, full)
    assert isinstance(other, nn.Parameter)
    assert other.requires_grad
    assert other.mark == "mine"
    assert other.placements == param.placements
    assert (other.local.data_ptr() == param.local.data_ptr()) == (way == "copy")


def test_new_tensors_of_other_shapes_are_plain(mesh: DeviceMesh) -> None:
    flat = flat_of(torch.rand(SHAPE), mesh)
    for new in (flat.new_zeros(3), flat.new_empty(()), flat.new_tensor([1.0]), flat.new_ones(2, 2)):
        assert type(new) is Tensor
    assert flat.redistribute(placements=flat.placements) is flat
    assert "shape=(6, 5), elements [7, 19) here" in repr(flat)
