"""Methods of FSDPModule: each has FSDP2's results, or raises and names an alternative."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_engine import fsdp2
from tests.comm.trace_lanes import Tracer
from tests.fsdp2.programs import APIS, Log, Model, batch, loss_of, parallelize, sgd, train
from tests.fsdp2.scene import assert_alike, both, gradients, seeded
from tests.pool import on_ranks

SETTINGS: dict[str, Callable[[Any], None]] = {
    "keep after forward": lambda model: model.set_reshard_after_forward(False),
    "root reshards": lambda model: model.set_reshard_after_forward(True, recurse=False),
    "prefetch": lambda model: [
        model.layers["0"].set_modules_to_forward_prefetch([model.layers["1"], model.layers["2"]]),
        model.layers["2"].set_modules_to_backward_prefetch([model.layers["1"], model.layers["0"]]),
    ],
    "no gather for embeddings": lambda model: model.embeddings.set_unshard_in_backward(False),
    "divisor": lambda model: [
        (each.set_force_sum_reduction_for_comms(True), each.set_gradient_divide_factor(3.0))
        for each in model.modules()
        if hasattr(each, "set_gradient_divide_factor")
    ],
    "sums": lambda model: model.set_force_sum_reduction_for_comms(True),
    "unsharded": lambda model: [layer.unshard() for layer in model.layers.values()],
    "unsharded later": lambda model: [
        layer.unshard(async_op=True) for layer in model.layers.values()
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_flags_change_no_result_but_fsdp2s(name: str) -> None:
    def script(api: Any) -> Log:
        model = parallelize(api, seeded())
        optimizer = sgd(model.parameters())
        SETTINGS[name](model)
        return train(model, optimizer, range(3), num_microbatches=2, max_norm=1e6)

    both(script)


@on_ranks(2)
def test_a_divisor_outlasts_a_conversion() -> None:
    def script(api: Any) -> Any:
        model = parallelize(api, seeded())
        model.head.set_force_sum_reduction_for_comms(True)
        model.head.set_gradient_divide_factor(3.0)
        model.to(torch.float64)
        loss_of(model, *batch(0, 0, dist.get_rank())).backward()
        return gradients(model)

    assert_alike(script)


@on_ranks(2)
def test_full_parameters_are_kept_as_long_as_requested() -> None:
    model = parallelize(fsdp2, seeded())
    layer = model.layers["0"]
    unit = fsdp2.fully_shard.state(layer).unit  # type: ignore[attr-defined]
    tokens, targets = batch(0, 0, 0)
    model.set_reshard_after_forward(False)
    loss = loss_of(model, tokens, targets)
    assert unit.unsharded is not None
    loss.backward()
    assert unit.unsharded is None
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(False)
    loss = loss_of(model, tokens, targets)
    assert unit.unsharded is None
    loss.backward()
    assert unit.unsharded is not None
    assert isinstance(layer.up.weight, DTensor)
    layer.reshard()
    assert unit.unsharded is None
    handle = layer.unshard(async_op=True)
    handle.wait()
    assert type(layer.up.weight) is nn.Parameter
    assert layer.up.weight.shape == (50, 24)
    assert unit.unsharded is not None
    layer.reshard()
    assert isinstance(layer.up.weight, DTensor)
    with torch.no_grad():
        model(tokens)
    assert unit.unsharded is None


@on_ranks(2)
def test_an_inner_module_runs_by_itself_after_the_model() -> None:
    tokens, targets = batch(0, 0, 0)

    def script(api: Any) -> Any:
        model = parallelize(api, seeded())
        optimizer = sgd(model.parameters())
        loss_of(model, tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.layers["0"](torch.ones(2, 6, 24), model.angles).sum().backward()
        found = gradients(model)
        optimizer.step()
        return found, loss_of(model, tokens, targets).detach()

    assert_alike(script)


@pytest.mark.parametrize("keeps", [False, True])
@on_ranks(2)
def test_heads_are_called_in_chunks(keeps: bool) -> None:
    """The model without its head, which is called with parts of the output."""

    class Headless(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embeddings(tokens)
            for layer in self.layers.values():
                x = layer(x, self.angles)
            return self.norm(x)

    tokens, _ = batch(0, 0, 0)

    # One process with these tokens; FSDP2 of torch 2.11 does not call one module of a group.
    def script(*, shards: bool) -> Any:
        model: Any = Headless()
        torch.manual_seed(3)
        model.init_weights()
        if shards:
            parallelize(fsdp2, model)
        optimizer = sgd(model.parameters())
        found = []
        for _ in range(2):
            hidden = model(tokens)
            if keeps and shards:
                model.head.set_reshard_after_forward(False)
                model.head.set_reshard_after_backward(False)
            parts = []
            for part in hidden.detach().chunk(3, 1):
                part.requires_grad_()
                model.head(part).pow(2).mean().backward()
                parts.append(part.grad)
            if keeps and shards:
                model.head.set_reshard_after_forward(True)
                model.head.set_reshard_after_backward(True)
                model.head.reshard()
            hidden.backward(torch.cat(parts, 1))
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    found, expected = script(shards=True), script(shards=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_two_forwards_before_a_backward() -> None:
    def script(api: Any) -> Any:
        model = parallelize(api, seeded())
        first, second = model(batch(0, 0, 0)[0]), model(batch(1, 0, 0)[0])
        (first - second).pow(2).mean().backward()
        return gradients(model)

    assert_alike(script)


@on_ranks(2)
def test_one_module_may_hold_back_its_gradients() -> None:
    """Per module: gradients that are not reduced in the first backward are in the second."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def script(api: Any) -> Any:
        model = parallelize(api, seeded(), mesh)
        model.layers["1"].set_requires_gradient_sync(False)
        rank = torch.distributed.get_rank()
        loss_of(model, *batch(0, 0, rank)).backward()
        others = {k: v for k, v in gradients(model).items() if "layers.1" not in k}
        model.set_requires_gradient_sync(True)
        loss_of(model, *batch(0, 1, rank)).backward()
        return others, gradients(model)

    assert_alike(script)


@on_ranks(2)
def test_reset_after_an_exception() -> None:
    class Raising(nn.Module):
        armed = True

        def forward(self, x: Tensor, angles: Tensor) -> Tensor:
            if self.armed:
                raise ValueError("boom")
            return x

    def script(api: Any) -> Any:
        model = seeded()
        model.layers["2"] = raising = Raising()
        parallelize(api, model)
        with pytest.raises(ValueError, match="boom"):
            model(batch(0, 0, 0)[0])
        raising.armed = False
        model.reset_iter_state()
        loss_of(model, *batch(0, 0, 0)).backward()
        return gradients(model)

    if not hasattr(fsdp.FSDPModule, "reset_iter_state"):  # torch before 2.13
        script(fsdp2)
    else:
        assert_alike(script)


@on_ranks(2)
def test_other_methods_are_forwards() -> None:
    def script(api: Any) -> Any:
        model = parallelize(api, seeded())
        model.layers["0"].twice = lambda x: x * 2
        api.register_fsdp_forward_method(nn.Linear(2, 2), "forward")
        inner = seeded()
        inner.logits = lambda tokens: inner.head(inner.norm(inner.embeddings(tokens)))
        api.fully_shard(inner)
        api.register_fsdp_forward_method(inner, "logits")
        inner.logits(batch(0, 0, 0)[0]).pow(2).mean().backward()
        return gradients(inner)

    assert_alike(script)


@on_ranks(2)
def test_ignored_parameters_are_unchanged() -> None:
    def script(api: Any) -> Any:
        model = seeded()
        ignored = {model.head.weight, *model.layers["1"].parameters()}
        for layer in model.layers.values():
            api.fully_shard(layer, ignored_params=ignored)
        api.fully_shard(model, ignored_params=ignored)
        assert type(model.head.weight) is nn.Parameter
        assert isinstance(model.norm.weight, DTensor)
        loss_of(model, *batch(0, 0, 0)).backward()
        model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
        loss_of(model, *batch(0, 0, 0)).backward()
        return gradients(model)

    assert_alike(script)


@on_ranks(2)
def test_frozen_parameters_and_placements() -> None:
    def largest(param: nn.Parameter) -> Shard | None:
        even = [dim for dim, size in enumerate(param.shape) if size % 2 == 0]
        return Shard(even[-1]) if even else None

    def script(api: Any) -> Log:
        model = seeded()
        for name, param in model.named_parameters():
            param.requires_grad_("norm" not in name)
        parallelize(api, model, shard_placement_fn=largest)
        trainable = [each for each in model.parameters() if each.requires_grad]
        return train(model, sgd(trainable), range(3))

    both(script)


@on_ranks(2)
def test_policies_differ_between_modules() -> None:
    def script(api: Any) -> Any:
        policy = api.MixedPrecisionPolicy
        model = seeded()
        half = policy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        api.fully_shard(model.layers["0"], mp_policy=half)
        wide = policy(param_dtype=torch.float64, output_dtype=torch.bfloat16)
        api.fully_shard(model.layers["1"], mp_policy=wide)
        keeps = policy(torch.bfloat16, None, torch.float32, cast_forward_inputs=False)
        api.fully_shard(model.layers["2"], mp_policy=keeps)
        api.fully_shard(model, mp_policy=policy(param_dtype=torch.float32))
        seen = []
        for layer in model.layers.values():
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
            layer.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        found = model(batch(0, 0, 0)[0])
        return [str(each) for each in seen], str(found.dtype)

    logs = [script(api) for api in APIS.values()]
    assert logs[0] == logs[1]


@on_ranks(2)
def test_a_tie_is_one_group_or_an_error() -> None:
    def script(api: Any) -> Log:
        model = seeded()
        model.head.weight = model.embeddings.weight
        for layer in model.layers.values():
            api.fully_shard(layer)
        api.fully_shard([model.embeddings, model.head])
        api.fully_shard(model)
        return train(model, sgd(model.parameters()), range(3))

    both(script)
    model = seeded()
    model.head.weight = model.embeddings.weight
    fsdp2.fully_shard(model.embeddings)
    with pytest.raises(ValueError, match=r"head\.weight.*tied.*fully_shard\(\[embedding, head\]\)"):
        fsdp2.fully_shard(model)


@on_ranks(2)
def test_unsupported_methods_raise_and_name_an_alternative() -> None:
    model = parallelize(fsdp2, seeded())
    calls: dict[str, Callable[[], Any]] = {
        "nccl_ub": lambda: model.set_allocate_memory_from_process_group_for_comm(True),
        "set_symm_mem_for_comm.*nccl_ub": lambda: model.set_symm_mem_for_comm(),
        "suggested_communication": lambda: model.set_reduce_scatter_max_input_buffers(2),
        "implements all-gathers itself": lambda: model.set_custom_all_gather(None),
        "implements reductions itself": lambda: model.set_custom_reduce_scatter(None),
        "2-D mesh": lambda: model.set_all_reduce_hook(print),
        "separate process group": lambda: model.set_separate_reduce_scatter_group(False),
    }
    for message, call in calls.items():
        with pytest.raises(NotImplementedError, match=message):
            call()
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_is_last_backward(False)
    model._set_unshard_async_op(True)
    fsdp2.share_comm_ctx([model])
    for call in (
        lambda: model.set_reshard_after_forward(2),
        lambda: model.set_gradient_divide_factor(0),
        lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
        lambda: model.set_force_sum_reduction_for_comms(None),
        lambda: fsdp2.share_comm_ctx([nn.Linear(1, 1)]),
        lambda: fsdp2.register_fsdp_forward_method(model, "none"),
    ):
        with pytest.raises(ValueError, match=r"expected .*; found"):
            call()
    stranger = parallelize(fsdp2, seeded())
    model.layers["0"].set_modules_to_forward_prefetch([stranger.layers["1"]])
    with pytest.raises(ValueError, match="within the root module; found another"):
        loss_of(model, *batch(0, 0, 0))
    model.layers["0"].set_modules_to_forward_prefetch([model.layers["1"]])
    loss_of(model, *batch(0, 0, 0)).backward()
    with pytest.raises(ValueError, match="expected modules of the same model"):
        model.layers["0"].set_modules_to_backward_prefetch([stranger.layers["1"]])
    with pytest.raises(RuntimeError, match="expected the root module"):
        model.layers["0"].reset_iter_state()
    with pytest.raises((RuntimeError, AssertionError), match="deepcopy"):
        copy.deepcopy(model)


@on_ranks(2)
def test_no_flag_lets_streams_race() -> None:
    """The tracer raises where two accesses would not be ordered on CUDA."""
    tracer = Tracer()
    with tracer:
        model = parallelize(fsdp2, seeded())
        optimizer = sgd(model.parameters())
        for step, setting in enumerate(SETTINGS.values()):
            setting(model)
            for index in range(2):
                model.set_reshard_after_backward(index == 1)
                model.set_requires_gradient_sync(index == 1)
                loss_of(model, *batch(step, index, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(order.num_checks for order in tracer.orders)
