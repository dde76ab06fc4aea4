"""FlatDTensor in one process, of four ranks that exist in name: functions, autograd, copies."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_engine.flat_dtensor import (
    Box,
    FlatDTensor,
    FlatPlacement,
    FlatShard,
    flat_range_boxes,
    functions,
)
from tests.optim.optimizers import FUSED, OPTIMIZERS
from tests.torch_versions import compiled_code_raises, marks_gradients

SHAPE, START, STOP = (6, 5), 7, 19


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of four that exist in name only."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


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


def test_boxes_outside_the_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stop <= 20 for shape \(4, 5\); found \[3, 21\)"):
        flat_range_boxes((4, 5), 3, 21)


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


def test_an_invalid_placement_raises(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"stop <= 30 .* found \[4, 31\)"):
        FlatPlacement(torch.Size((6, 5)), 4, 31, mesh)
    with pytest.raises(ValueError, match="0 to 1 sharded axes; found 2"):
        FlatPlacement(torch.Size((6, 5)), 4, 5, mesh, num_sharded_axes=2)


def test_a_flat_shard_is_a_shard_of_no_dim() -> None:
    assert FlatShard().is_shard()
    assert not FlatShard().is_shard(0)
    assert not FlatShard().is_replicate()
    assert not isinstance(FlatShard(), Shard)
    assert not FlatShard().is_partial()
    assert FlatShard((0, 1)) != FlatShard((1, 2))
    assert FlatShard() != Replicate()
    assert Replicate() != FlatShard()
    assert pickle.loads(pickle.dumps(FlatShard())) == FlatShard()
    assert copy.deepcopy(FlatShard()) == FlatShard()


# --- making ---


def test_a_local_part_of_the_wrong_size_or_stride_is_refused(mesh: DeviceMesh) -> None:
    placement = FlatPlacement.on_mesh((6, 5), 0, 4, mesh, 1)
    for local in (torch.zeros(5), torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"expected a contiguous tensor of shape \(4,\)"):
            FlatDTensor.from_flat_local(local, placement)
    with pytest.raises(ValueError, match="does not require grad"):
        FlatDTensor.from_flat_local(torch.zeros(4, requires_grad=True), placement)


@pytest.mark.parametrize("change", ["add_", "data", "detach", "fused", "foreach", "local"])
def test_every_change_shows_in_the_buffer_and_its_version(mesh: DeviceMesh, change: str) -> None:
    buffer = torch.zeros(64)
    placement = FlatPlacement.on_mesh(SHAPE, START, STOP, mesh, 1)
    param: Any = nn.Parameter(FlatDTensor.from_flat_local(buffer[20:32], placement))
    before = buffer._version
    if change == "add_":
        with torch.no_grad():
            param.add_(1)
    elif change == "data":
        param.data.fill_(1)
    elif change == "detach":
        param.detach().fill_(1)
    elif change == "local":
        param.local.fill_(1)
    elif change == "foreach":
        with torch.no_grad():
            torch._foreach_add_([param], 1)
    else:
        param.grad = flat_of(torch.full(SHAPE, -1.0), mesh)
        torch.optim.SGD([param], lr=1.0, fused=True).step()
    assert buffer._version > before
    assert param._version == buffer._version
    assert buffer[20:32].tolist() == [1.0] * 12
    assert buffer.sum() == 12


# --- functions ---


def torch_function(name: str) -> Callable[..., Any]:
    """A function by name, wherever torch keeps it."""
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
    lambda a, b: F.gelu(a) + F.silu(b) + F.softplus(a),
    lambda a, b: a.is_floating_point() * a + a.dim() * b + len(a),
]


@pytest.mark.parametrize("index", range(len(OPERATIONS)))
@pytest.mark.parametrize(("start", "stop"), [(START, STOP), (0, 30), (4, 4)])
def test_arithmetic_keeps_the_slice(mesh: DeviceMesh, index: int, start: int, stop: int) -> None:
    a, b = torch.rand(SHAPE), torch.rand(SHAPE)
    result = OPERATIONS[index](flat_of(a, mesh, start, stop), flat_of(b, mesh, start, stop))
    check(result, OPERATIONS[index](a, b), start, stop)


@pytest.mark.parametrize("index", [0, 1, 3, 9, 11, 12, 13, 21])
@pytest.mark.parametrize("stop", [0, 1])
def test_arithmetic_keeps_a_scalar_tensor(mesh: DeviceMesh, index: int, stop: int) -> None:
    a, b = torch.rand(()), torch.rand(())
    result = OPERATIONS[index](flat_of(a, mesh, 0, stop), flat_of(b, mesh, 0, stop))
    check(result, OPERATIONS[index](a, b), 0, stop)


REFUSED: list[Callable[[Any], Any]] = [
    lambda p: F.layer_norm(p, (5,)),
    lambda p: p.numpy(),
    lambda p: p.item(),
    lambda p: bool(p),
    lambda p: p.resize_(3),
    lambda p: p.t_(),
    lambda p: p.transpose_(0, 1),
    lambda p: torch.mm(p, p.local, out=torch.empty(6, 6)),
    lambda p: torch.randn_like(p),
    lambda p: F.dropout(p),
    lambda p: torch.ones(6, 5).copy_(p),
    lambda p: torch._foreach_add([p], [torch.ones(6, 5)]),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_functions_not_defined_for_slices_raise_with_their_name(
    mesh: DeviceMesh, index: int
) -> None:
    flat = flat_of(torch.rand(SHAPE), mesh)
    before = flat.local.clone()
    with torch.no_grad(), pytest.raises(ValueError, match=r"Call \.full_tensor\(\)"):
        REFUSED[index](flat)
    assert torch.equal(flat.local, before)


def test_the_error_contains_expected_and_found(mesh: DeviceMesh) -> None:
    flat = flat_of(torch.rand(SHAPE), mesh)
    with pytest.raises(ValueError, match=r"^layer_norm: not defined .*shape \(6, 5\), el"):
        F.layer_norm(flat, (5,))
    with pytest.raises(ValueError, match="initialize full parameters instead"):
        torch.randn_like(flat)


def test_different_slices_do_not_mix(mesh: DeviceMesh) -> None:
    full = torch.rand(SHAPE)
    a, b = flat_of(full, mesh), flat_of(full, mesh, START + 1, STOP + 1)
    with pytest.raises(ValueError, match="mixes two different slices"):
        a + b
    with pytest.raises(ValueError, match="different slices at one index"):
        torch._foreach_add_([a, b], [b, a])
    with pytest.raises(ValueError, match="different slices"):
        torch.equal(a, b)
    with pytest.raises(TypeError, match="a FlatDTensor of the slice"):
        a.grad = b


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


def test_in_place_functions_return_the_same_object(mesh: DeviceMesh) -> None:
    flat = flat_of(torch.rand(SHAPE), mesh)
    same: Any = flat
    same += 1
    same *= flat
    assert same is flat
    assert flat.detach().add_(flat) is not flat
    assert flat.contiguous() is flat
    assert flat.to(torch.float32) is flat


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
    # This rank has all, and collectives of a fake group change nothing: gradients of full
    # reductions are the mean over four ranks, of which three have nothing.
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


def test_a_scalar_parameter_has_gradients_even_where_it_is_not(mesh: DeviceMesh) -> None:
    for stop in (0, 1):
        param: Any = nn.Parameter(flat_of(torch.tensor(3.0), mesh, 0, stop))
        (param * param + param).backward()
        check(param.grad, torch.tensor(7.0), 0, stop)
        ((param * 2).sum() + (param * 3).sum()).backward()
        # The mean over four ranks, of which three have nothing in a fake group.
        check(param.grad, torch.tensor(7.0 + 5.0 / 4), 0, stop)


def test_to_local_is_differentiable(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    (param.to_local() * 2).sum().backward()
    check(param.grad, torch.full(SHAPE, 2.0))
    with torch.no_grad():
        assert param.to_local() is param.local


def test_in_place_changes_under_autograd_raise(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    before = param.local.clone()
    for change in (
        lambda: param.add_(1),
        lambda: param.zero_(),
        lambda: param.copy_(torch.rand(SHAPE)),
        lambda: torch._foreach_mul_([param], 2.0),
        lambda: (param * 2).mul_(3),
        lambda: param.__iadd__(1),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
            change()
    assert torch.equal(param.local, before)


def test_autograd_notices_a_change_before_backward(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    loss = (param * param).sum()
    param.data.add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss.backward()


def test_a_number_is_copied_into_every_element(mesh: DeviceMesh) -> None:
    tensor = flat_of(torch.ones(SHAPE), mesh)
    check(tensor.copy_(3.0), torch.full(SHAPE, 3.0))


def test_memory_cannot_be_replaced_nor_copied_element_by_element(mesh: DeviceMesh) -> None:
    tensor = flat_of(torch.ones(SHAPE), mesh)
    with pytest.raises(ValueError, match="replaces the memory of a flat buffer"):
        tensor.set_(torch.ones(SHAPE))
    with pytest.raises(ValueError, match="new_tensor: not defined"):
        tensor.new_tensor(tensor)


def test_the_node_at_which_autograd_accumulates_is_not_shown(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook"):
        torch.autograd.graph.get_gradient_edge(param_of(torch.ones(SHAPE), mesh))


def test_backward_with_sharded_inputs_raises_and_names_an_alternative(mesh: DeviceMesh) -> None:
    param, x = param_of(torch.ones(SHAPE), mesh), torch.ones(2, requires_grad=True)
    for backward in (
        lambda: (2 * x).sum().backward(inputs=[param, x]),
        lambda: param.sum().backward(inputs=[param]),
        lambda: param.sum().backward(inputs=param),
    ):
        with pytest.raises(ValueError, match=r"inputs=; found .*\(6, 5\).*requires_grad_\(False\)"):
            backward()


def test_gradients_may_have_another_dtype(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    param.grad_dtype = torch.bfloat16
    param.grad = flat_of(torch.ones(SHAPE, dtype=torch.bfloat16), mesh)
    assert param.grad.dtype == torch.bfloat16


# --- copying ---


def test_copy_takes_the_slice_of_a_full_tensor(mesh: DeviceMesh) -> None:
    full = torch.rand(SHAPE)
    flat = flat_of(torch.zeros(SHAPE), mesh)
    check(flat.copy_(full), full)
    check(flat.copy_(flat_of(full + 1, mesh)), full + 1)
    check(flat.copy_(torch.tensor(4.0)), torch.full(SHAPE, 4.0))
    check(flat.copy_(full.double()), full)


def test_a_module_loads_the_state_dict_of_an_unsharded_one(mesh: DeviceMesh) -> None:
    plain, sharded = nn.Linear(5, 6), nn.Linear(5, 6)
    sharded.weight = nn.Parameter(flat_of(sharded.weight.detach(), mesh))
    sharded.load_state_dict(plain.state_dict())
    check(sharded.weight, plain.weight.detach())


def test_a_vector_is_spread_over_parameters(mesh: DeviceMesh) -> None:
    params = [param_of(torch.zeros(SHAPE), mesh), nn.Parameter(torch.zeros(3))]
    vector = torch.rand(33)
    nn.utils.vector_to_parameters(vector, params)
    check(params[0], vector[:30].view(SHAPE))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_of_slices_is_as_right_as_any(mesh: DeviceMesh, backend: str) -> None:
    full = torch.rand(SHAPE)
    compiled = torch.compile(lambda x: (x + 1) * 2, backend=backend)
    check(compiled(flat_of(full, mesh)), (full + 1) * 2)


@compiled_code_raises
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_a_slice_cannot_answer_is_refused(
    mesh: DeviceMesh, backend: str
) -> None:
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


def test_setting_data_copies(mesh: DeviceMesh) -> None:
    full = torch.rand(SHAPE)
    param = param_of(torch.zeros(SHAPE), mesh)
    pointer = param.local.data_ptr()
    param.data = flat_of(full, mesh)
    check(param, full)
    assert param.local.data_ptr() == pointer
    with pytest.raises(TypeError, match=r"data: expected torch\.float32 on cpu; found torch\.bf"):
        param.data = flat_of(full, mesh).bfloat16()


def test_tensors_that_data_returned_keep_their_values_when_data_is_set(mesh: DeviceMesh) -> None:
    old, new = torch.rand(SHAPE), torch.rand(SHAPE)
    param, average = param_of(old, mesh), flat_of(new, mesh)
    # As averages of weights are swapped in for an evaluation, and out again.
    backup, detached, viewed = param.data, param.detach(), param.data
    param.data = average
    check(param, new)
    for each in (backup, detached, viewed):
        check(each, old)
    backup.add_(1.0)
    check(param, new)
    check(detached, old + 1.0)  # these three are one tensor still
    param.data, average.data = average.data, param.data.mul_(2.0)
    check(param, new)
    check(average, 2.0 * new)
    param.data = detached
    check(param, old + 1.0)
    param.data.zero_()
    check(param, torch.zeros(SHAPE))
    check(backup, old + 1.0)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "copy"])
def test_a_copy_is_equal(mesh: DeviceMesh, way: str) -> None:
    full = torch.rand(SHAPE)
    param = param_of(full, mesh)
    param.mark = "mine"
    param.grad = flat_of(full + 1, mesh)
    if way == "deepcopy":
        other = copy.deepcopy(param)
        check(other.grad, full + 1)
        assert other.grad is not param.grad
    elif way == "copy":
        other = copy.copy(param)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(param))
    else:
        file = io.BytesIO()
        torch.save({"w": param}, file)
        file.seek(0)
        other = torch.load(file, weights_only=True)["w"]
    check(other, full)
    assert isinstance(other, nn.Parameter)
    assert other.requires_grad
    assert other.mark == "mine"
    assert other.placements == param.placements
    assert (other.local.data_ptr() == param.local.data_ptr()) == (way == "copy")


def test_a_shared_parameter_is_shared_in_a_deep_copy(mesh: DeviceMesh) -> None:
    param = param_of(torch.rand(SHAPE), mesh)
    a, b = copy.deepcopy([param, param])
    assert a is b


def test_new_tensors_of_other_shapes_are_plain(mesh: DeviceMesh) -> None:
    flat = flat_of(torch.rand(SHAPE), mesh)
    for new in (flat.new_zeros(3), flat.new_empty(()), flat.new_tensor([1.0]), flat.new_ones(2, 2)):
        assert type(new) is Tensor


def test_redistribute_to_other_placements_raises(mesh: DeviceMesh) -> None:
    flat = flat_of(torch.rand(SHAPE), mesh)
    assert flat.redistribute(placements=flat.placements) is flat
    for placements in ([Shard(0)], [Shard(1)], [Replicate(), Replicate()], None):
        with pytest.raises(ValueError, match=r"redistribute: expected all Replicate\(\)"):
            flat.redistribute(placements=placements)


def test_the_repr_contains_the_slice(mesh: DeviceMesh) -> None:
    text = repr(param_of(torch.rand(SHAPE), mesh))
    assert "shape=(6, 5), elements [7, 19) here" in text
    assert "requires_grad=True" in text


# --- optimizers and averages ---


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (name, form)
        for name, form in itertools.product(OPTIMIZERS, ("loop", "foreach", "fused"))
        if form != "fused" or name in FUSED
    ],
)
def test_an_optimizer_steps_as_on_plain_slices(mesh: DeviceMesh, name: str, form: str) -> None:
    options = {"foreach": form == "foreach"} if form != "fused" else {"fused": True}
    cases = [(SHAPE, START, STOP), ((), 0, 1), ((), 0, 0), (SHAPE, 4, 4), ((7,), 0, 7)]
    flats: list[Any] = []
    for shape, start, stop in cases:
        flats.append(nn.Parameter(flat_of(torch.rand(shape), mesh, start, stop)))
    plains = [nn.Parameter(p.local.clone()) for p in flats]
    optimizers = [OPTIMIZERS[name](params, **options) for params in (flats, plains)]
    for _ in range(4):
        for flat, plain, (shape, start, stop) in zip(flats, plains, cases, strict=True):
            flat.grad = flat_of(torch.randn(shape), mesh, start, stop)
            plain.grad = flat.grad.local.clone()
        for optimizer in optimizers:
            optimizer.step()
    for flat, plain, (shape, *_) in zip(flats, plains, cases, strict=True):
        torch.testing.assert_close(flat.local, plain.detach(), rtol=0, atol=0)
        states = [
            optimizer.state[p] for optimizer, p in zip(optimizers, (flat, plain), strict=True)
        ]
        assert states[0].keys() == states[1].keys()
        for value, expected in zip(states[0].values(), states[1].values(), strict=True):
            if isinstance(value, FlatDTensor):
                assert value.shape == shape
                torch.testing.assert_close(value.local, expected, rtol=0, atol=0)


def test_an_average_of_weights_keeps_the_slice(mesh: DeviceMesh) -> None:
    full, other = torch.rand(SHAPE), torch.rand(SHAPE)
    param, average = param_of(full, mesh), copy.deepcopy(param_of(other, mesh)).detach()
    with torch.no_grad():
        average.lerp_(param, 0.1)
        torch._foreach_lerp_([average], [param], 0.1)
    check(average, other.lerp(full, 0.1).lerp(full, 0.1))
