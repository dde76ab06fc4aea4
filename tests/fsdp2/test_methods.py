"""Methods of FSDPModule: each has FSDP2's results, or raises and names an alternative."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine import fsdp2
from fsdp_engine.fsdp2.root_module import inputs_on
from fsdp_engine.runtime.unit import State
from tests.fsdp2.programs import (
    APIS,
    Model,
    assert_alike,
    batch,
    gradients,
    loss_of,
    parallelize,
    seeded,
    sgd,
)
from tests.models import Mlp, vector_batch
from tests.pool import on_ranks

TOKENS, TARGETS = batch(0, 0, 0)


@on_ranks(2)
def test_full_parameters_are_kept_as_long_as_requested() -> None:
    model = parallelize(fsdp2, seeded())
    layer = model.layers["0"]
    unit = fsdp2.fully_shard.state(layer).unit
    for after_forward, after_backward in ((True, False), (False, True)):
        model.set_reshard_after_forward(not after_forward)
        model.set_reshard_after_backward(not after_backward)
        loss = loss_of(model, TOKENS, TARGETS)
        assert (unit.state is not State.SHARDED) is after_forward
        loss.backward()
        assert (unit.state is not State.SHARDED) is after_backward
        assert isinstance(layer.up.weight, DTensor)
    layer.reshard()
    assert unit.state is State.SHARDED
    handle = layer.unshard(async_op=True)
    assert isinstance(handle, fsdp.UnshardHandle)
    handle.wait()
    assert type(layer.up.weight) is nn.Parameter
    assert layer.up.weight.shape == (49, 24)
    assert unit.state is not State.SHARDED
    layer.reshard()
    assert isinstance(layer.up.weight, DTensor)
    with torch.no_grad():
        model(TOKENS)
    assert unit.state is State.SHARDED


class Headless(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden(tokens)


@pytest.mark.parametrize("keeps", [False, True])
@on_ranks(2)
def test_heads_are_called_with_parts_of_the_models_output(keeps: bool) -> None:
    def reshards(model: Any, value: bool) -> None:
        if keeps and isinstance(model, fsdp2.FSDPModule):
            model.head.set_reshard_after_forward(value)
            model.head.set_reshard_after_backward(value)
            if value:
                model.head.reshard()

    def script(model: Any) -> Any:
        optimizer, found = sgd(model.parameters()), []
        for _ in range(2):
            hidden = model(TOKENS)
            reshards(model, False)
            parts = [part.requires_grad_() for part in hidden.detach().chunk(3, 1)]
            for part in parts:
                model.head(part).pow(2).mean().backward()
            reshards(model, True)
            hidden.backward(torch.cat([part.grad for part in parts], 1))
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    # Compared with one process: FSDP2 of torch 2.11 does not call one module of a group alone.
    found, expected = script(parallelize(fsdp2, seeded(Headless))), script(seeded(Headless))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_one_module_may_hold_back_its_gradients_until_the_second_backward() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def script(api: Any) -> Any:
        model = parallelize(api, seeded(), mesh)
        model.layers["1"].set_requires_gradient_sync(False)
        loss_of(model, *batch(0, 0, dist.get_rank())).backward()
        others = {k: v for k, v in gradients(model).items() if "layers.1" not in k}
        model.set_requires_gradient_sync(True)
        loss_of(model, *batch(0, 1, dist.get_rank())).backward()
        return others, gradients(model)

    assert_alike(script)


@on_ranks(2)
def test_the_switch_of_all_reductions_leaves_unsynced_gradients_unsynced() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = parallelize(fsdp2, seeded(), mesh)
    options = fsdp2.fully_shard.state(model.layers["1"]).unit.options
    # As in FSDP2, units are reduced along the second axis only if also along the first.
    for sets_all_reduce, value, syncs in (
        (False, False, False),
        (True, True, False),
        (True, False, False),
        (True, True, False),
        (False, True, True),
        (True, False, False),
        (True, True, True),
        (True, False, False),
        (False, True, True),
    ):
        if sets_all_reduce:
            model.set_requires_all_reduce(value)
        else:
            model.set_requires_gradient_sync(value)
        assert options.syncs is syncs


@on_ranks(2)
def test_reset_after_an_exception() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("boom")

    def script(api: Any) -> Any:
        model = parallelize(api, seeded())
        hook = model.layers["2"].norm2.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="boom"):
            model(TOKENS)
        hook.remove()
        model.reset_iter_state()
        loss_of(model, TOKENS, TARGETS).backward()
        return gradients(model)

    if not hasattr(fsdp.FSDPModule, "reset_iter_state"):  # torch before 2.13
        script(fsdp2)
    else:
        assert_alike(script)


@on_ranks(2)
def test_ignored_parameters_are_unchanged() -> None:
    def script(api: Any) -> Any:
        model = seeded()
        ignored = {model.head.weight, *model.layers["1"].parameters()}
        for module in (*model.layers.values(), model):
            api.fully_shard(module, ignored_params=ignored)
        assert type(model.head.weight) is nn.Parameter
        assert isinstance(model.norm.weight, DTensor)
        loss_of(model, TOKENS, TARGETS).backward()
        model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
        loss_of(model, TOKENS, TARGETS).backward()
        return gradients(model)

    assert_alike(script)


@on_ranks(2)
def test_policies_differ_between_modules() -> None:
    def script(api: Any) -> Any:
        policy = api.MixedPrecisionPolicy
        model = seeded()
        for module, own in (
            (model.layers["0"], policy(torch.bfloat16, output_dtype=torch.float32)),
            (model.layers["1"], policy(torch.float64, output_dtype=torch.bfloat16)),
            (model.layers["2"], policy(torch.bfloat16, None, torch.float32, False)),
            (model, policy(param_dtype=torch.float32)),
        ):
            api.fully_shard(module, mp_policy=own)
        seen = []
        for layer in model.layers.values():
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
            layer.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        return [*seen, model(TOKENS).dtype]

    assert script(fsdp2) == script(fsdp)


@on_ranks(2)
def test_units_of_two_models_share_lanes_but_no_collective() -> None:
    def script(api: Any) -> Any:
        teacher, student = seeded(), seeded()
        api.fully_shard(teacher.head)
        parallelize(api, student)
        api.fully_shard(teacher)
        tokens, targets = batch(0, 0, dist.get_rank())
        loss = (teacher(tokens) * student(tokens)).mean() + loss_of(student, tokens, targets)
        loss.backward()
        return gradients(teacher), gradients(student)

    assert_alike(script)
    tags = [
        buffer.spec.tag
        for model in (parallelize(fsdp2, seeded()), parallelize(fsdp2, seeded()))
        for module in model.modules()
        if (group := fsdp2.fully_shard.state(module)) is not None
        for buffer in group.unit.buffers
    ]
    assert len(set(tags)) == len(tags) - 2  # norm and head are two modules of one group


@pytest.mark.thorough
@on_ranks(4)
def test_modules_of_one_model_on_other_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everybody = init_device_mesh("cpu", (4,))

    def script(api: Any) -> Any:
        torch.manual_seed(1)
        model: Any = Mlp()
        torch.manual_seed(2 + mesh.get_local_rank("ep"))
        model.down.reset_parameters()  # an expert of this rank
        api.fully_shard(model.down, mesh=mesh["dp"])
        api.fully_shard(model, mesh=everybody)
        optimizer = sgd(model.parameters())
        found = []
        for step in range(3):
            model(vector_batch(3, 10 * step + dist.get_rank())[0]).pow(2).mean().backward()
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert_alike(script)


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_each_rank_keeps_slices_of_its_own_values(api: str) -> None:
    linear: Any = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        linear.weight.fill_(dist.get_rank())
    warns = pytest.warns(UserWarning, match="weight: expected the same initial values")
    with nullcontext() if api == "fsdp2" else warns:  # FSDP2 does not warn
        APIS[api].fully_shard(linear)
    assert linear.weight.to_local().unique().tolist() == [dist.get_rank()]


class Sum(nn.Module):
    def forward(self, x: Tensor, ys: tuple[Tensor, Tensor]) -> Tensor:
        return x + ys[0] + ys[1] + 1


@on_ranks(2)
def test_inputs_of_a_module_without_parameters_are_kept_and_others_moved() -> None:
    model, x = fsdp2.fully_shard(Sum()), torch.ones(3)
    torch.testing.assert_close(model(x, (x, x)), torch.full((3,), 4.0))
    args, kwargs = inputs_on(((x, [x]), {"y": (x, 2)}), torch.device("meta"))
    assert [args[0].is_meta, args[1][0].is_meta, kwargs["y"][0].is_meta] == [True] * 3
    inputs = ((x,), {})
    assert inputs_on(inputs, torch.device("cpu")) is inputs


@on_ranks(2)
def test_calls_within_a_meta_device_context() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    torch.manual_seed(3)
    expected = make()
    with torch.device("meta"):
        model, other = make(), make()
        for module in (model[0], model):
            fsdp2.fully_shard(module)
        fe.shard(other)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in model:
        layer.reset_parameters()
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), expected(x))
    assert torch.isfinite(other(x)).all()


def test_every_method_of_torchs_class_is_overridden() -> None:
    own = vars(fsdp2.FSDPModule)
    torchs = vars(fsdp.FSDPModule).items()
    assert [name for name, value in torchs if callable(value) and name not in own] == []


@on_ranks(2)
def test_classes() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    assert fsdp2.fully_shard([model[0], model[0], model[1]]) is not None
    assert fsdp2.fully_shard(model) is model
    assert isinstance(model, fsdp2.FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert [isinstance(each, fsdp.FSDPModule) for each in model] == [True, True, False]
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[2]) is nn.Linear
    assert type(model[:2]) is type(type(model)(nn.ReLU())) is nn.Sequential
    state = fsdp2.fully_shard.state
    assert state(model[0]) is state(model[1])
    assert state(model) is not state(model[0])
    assert all(isinstance(each, DTensor) for each in model.parameters())


@on_ranks(2)
def test_an_empty_list_of_modules_restores_the_recorded_order_of_prefetches() -> None:
    layers = parallelize(fsdp2, seeded()).layers
    options = fsdp2.fully_shard.state(layers["0"]).unit.options
    for name in ("forward", "backward"):
        set_modules = getattr(layers["0"], f"set_modules_to_{name}_prefetch")
        set_modules([layers["1"]])
        assert getattr(options, f"prefetch_in_{name}") is not None
        set_modules([])
        assert getattr(options, f"prefetch_in_{name}") is None


# Method, argument, words of the error.
UNSUPPORTED: list[tuple[str, list[Any], str]] = [
    ("set_allocate_memory_from_process_group_for_comm", [True], "Arenas"),
    ("set_symm_mem_for_comm", [], "set_symm_mem_for_comm.*Arenas"),
    ("set_reduce_scatter_max_input_buffers", [2], "staging_limit"),
    ("set_custom_all_gather", [None], "implements all-gathers itself"),
    ("set_custom_reduce_scatter", [None], "implements reductions itself"),
    ("set_all_reduce_hook", [print], "2-D mesh"),
    ("set_separate_reduce_scatter_group", [False], "separate process group"),
]
WITHOUT_AN_EFFECT = [
    ("set_allocate_memory_from_process_group_for_comm", False),
    ("set_separate_reduce_scatter_group", True),
    ("set_reduce_scatter_unused_params", True),
    ("set_is_last_backward", False),
    ("_set_unshard_async_op", True),
]
WRONG: list[tuple[str, Any]] = [
    ("set_reshard_after_forward", 2),
    ("set_gradient_divide_factor", 0),
    ("set_modules_to_forward_prefetch", [nn.Linear(1, 1)]),
    ("set_force_sum_reduction_for_comms", None),
]


@on_ranks(2)
def test_unsupported_methods_raise_and_name_an_alternative() -> None:
    model = parallelize(fsdp2, seeded())
    for name, given, message in UNSUPPORTED:
        with pytest.raises(NotImplementedError, match=message):
            getattr(model, name)(*given)
    for name, value in WITHOUT_AN_EFFECT:
        getattr(model, name)(value)
    fsdp2.share_comm_ctx([model])
    words = r"expected .*; found"
    for name, value in WRONG:
        with pytest.raises(ValueError, match=words):
            getattr(model, name)(value)
    with pytest.raises(ValueError, match=words):
        fsdp2.share_comm_ctx([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=words):
        fsdp2.register_fsdp_forward_method(model, "none")
    stranger = parallelize(fsdp2, seeded())
    model.layers["0"].set_modules_to_forward_prefetch([stranger.layers["1"]])
    with pytest.raises(ValueError, match="within the root module; found one outside of it"):
        loss_of(model, TOKENS, TARGETS)
    model.layers["0"].set_modules_to_forward_prefetch([model.layers["1"]])
    loss_of(model, TOKENS, TARGETS).backward()
    with pytest.raises(ValueError, match="expected modules of the same model"):
        model.layers["0"].set_modules_to_backward_prefetch([stranger.layers["1"]])
    with pytest.raises(RuntimeError, match="expected the root module"):
        model.layers["0"].reset_iter_state()
    with pytest.raises((RuntimeError, AssertionError), match="deepcopy"):
        copy.deepcopy(model)
