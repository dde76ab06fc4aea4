"""Training scripts have the same results with this package's ``fully_shard`` as with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_engine import fsdp2
from tests.comm.trace_lanes import Tracer
from tests.fsdp2.programs import (
    Layer,
    Program,
    adamw,
    batch,
    loss_of,
    on_meta,
    parallelize,
    seeded,
    sgd,
)
from tests.matrices import thorough_but
from tests.pool import on_ranks

# Two steps of three microbatches.
PLAIN = Program(microbatches=3)


def sync_last(model: Any, index: int, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)
    model.set_reshard_after_backward(is_last)


def with_dtypes(**dtypes: torch.dtype) -> Program:
    output = dtypes.get("output_dtype", dtypes.get("param_dtype", torch.float32))

    def set_up(model: Any) -> None:
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        assert model(torch.zeros(2, 6, dtype=torch.int64)).dtype == output

    return Program(
        options=lambda api: {"mp_policy": api.MixedPrecisionPolicy(**dtypes)},
        set_up=set_up,
        rounds=True,
    )


def has_bf16_weights(model: Any) -> None:
    assert {each.dtype for each in model.state_dict().values()} == {torch.bfloat16}


def with_a_divisor_in_float64(api: Any, model: Any) -> Any:
    model = parallelize(api, model)
    model.head.set_force_sum_reduction_for_comms(True)
    model.head.set_gradient_divide_factor(3.0)
    return model.to(torch.float64)


def several_roots(api: Any, model: Any) -> Any:
    for layer in model.layers.values():
        api.fully_shard(layer)
    api.fully_shard(model.embeddings)
    api.fully_shard(model.head)
    # A norm that is not sharded, equal on all ranks because it is frozen.
    model.norm.requires_grad_(False)
    return model


def from_meta(api: Any, _: Any) -> Any:
    model = parallelize(api, on_meta())
    assert all(each.is_meta for each in model.parameters())
    with pytest.raises(RuntimeError, match=r"embeddings\.weight.*to_empty"):
        model(torch.zeros(2, 6, dtype=torch.int64))
    return model.to_empty(device="cpu")


def initialize(model: Any) -> None:
    torch.manual_seed(3)
    model.init_weights()


def thaw_after_a_step(model: Any, index: int, is_last: bool) -> None:
    model.num_calls = getattr(model, "num_calls", 0) + 1
    model.layers["0"].requires_grad_(model.num_calls > 2)


def freeze_norms(model: Any) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("norm" not in name)


def by_last_dim(param: nn.Parameter) -> Shard | None:
    even = [dim for dim, size in enumerate(param.shape) if size % 2 == 0]
    return Shard(even[-1]) if even else None


def tie(model: Any) -> None:
    model.head.weight = model.embeddings.weight


def tied(api: Any, model: Any) -> Any:
    for layer in model.layers.values():
        api.fully_shard(layer)
    api.fully_shard([model.embeddings, model.head])
    return api.fully_shard(model)


def choose_layer(model: Any, index: int, is_last: bool) -> None:
    model.only_layer = index == 1


def model_or_layer(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    if not model.only_layer:
        return loss_of(model, tokens, targets)
    return model.layers["0"](torch.ones(2, 6, 24), model.angles).mean()


def with_another_forward(functions: Any) -> Callable[..., Any]:
    """The root gets a method that reads its own parameters. ``functions``: the module whose
    functions register it; None: ``api``."""

    def shard(api: Any, model: Any) -> Any:
        model.logits = lambda tokens: model.head(model.norm(model.embeddings(tokens)))
        policy = fsdp.MixedPrecisionPolicy(output_dtype=torch.float64)
        api.fully_shard(model, mp_policy=policy)
        names = functions or api
        names.share_comm_ctx([model])
        names.register_fsdp_forward_method(nn.Linear(2, 2), "forward")
        names.register_fsdp_forward_method(model, "logits")
        return model

    return shard


def other_forward(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model.logits(tokens)
    assert logits.dtype == torch.float64
    return logits.pow(2).mean()


def checkpoint_layers(model: Any) -> None:
    for layer in model.layers.values():
        checkpoint(layer)


# Calls that do not change results. No call undoes an earlier one, so all have an effect.
SETTINGS: list[Callable[[Any], object]] = [
    lambda model: [layer.unshard() for layer in model.layers.values()],
    lambda model: [layer.unshard(async_op=True) for layer in model.layers.values()],
    lambda model: [
        model.layers["0"].set_modules_to_forward_prefetch([model.layers["1"], model.layers["2"]]),
        model.layers["2"].set_modules_to_backward_prefetch([model.layers["1"], model.layers["0"]]),
    ],
    lambda model: model.embeddings.set_unshard_in_backward(False),
    lambda model: model.set_reshard_after_forward(True, recurse=False),
    lambda model: model.set_force_sum_reduction_for_comms(True),
    lambda model: model.set_reshard_after_forward(False),
]


def change_settings(model: Any, index: int, is_last: bool) -> None:
    """Change one setting before each of the first five microbatches, and the last two before the
    sixth."""
    model.num_calls = getattr(model, "num_calls", 0) + 1
    for setting in SETTINGS[model.num_calls - 1 :][: 1 + (model.num_calls == 6)]:
        setting(model)


def divide_by_3(model: Any) -> None:
    for each in model.modules():
        if hasattr(each, "set_gradient_divide_factor"):
            each.set_force_sum_reduction_for_comms(True)
            each.set_gradient_divide_factor(3.0)


BF16, FP32 = torch.bfloat16, torch.float32
PROGRAMS: dict[str, Program] = {
    "plain": PLAIN,
    "adamw": Program(optimizer=adamw, microbatches=1, steps=3),
    "last microbatch reduced": PLAIN.but(before=sync_last),
    "bf16": with_dtypes(param_dtype=BF16),
    "bf16, rest in fp32": with_dtypes(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
    "reduced in bf16": with_dtypes(reduce_dtype=BF16),
    "bf16 weights": Program(
        prepare=lambda model: model.to(BF16),
        options=lambda api: {"mp_policy": api.MixedPrecisionPolicy(reduce_dtype=FP32)},
        set_up=has_bf16_weights,
        rounds=True,
    ),
    **{
        level: PLAIN.but(options=lambda api, level=level: {"strategy": level})
        for level in ("no_shard", "optim", "optim_grads")
    },
    "from meta": PLAIN.but(shard=from_meta, set_up=initialize),
    "several roots": Program(shard=several_roots, max_norm=1e6),
    "thawed": Program(before=thaw_after_a_step, steps=3),
    "placements": Program(
        prepare=freeze_norms, options=lambda api: {"shard_placement_fn": by_last_dim}
    ),
    "tied": Program(prepare=tie, shard=tied),
    "two forwards": Program(
        loss_of=lambda model, tokens, targets: (model(tokens) - model(targets)).pow(2).mean()
    ),
    "one layer by itself": Program(before=choose_layer, loss_of=model_or_layer),
    "another forward": Program(shard=with_another_forward(None), loss_of=other_forward),
    "functions of torch": Program(shard=with_another_forward(fsdp), loss_of=other_forward),
    "checkpoint": PLAIN.but(prepare=checkpoint_layers),
    "checkpoint wrapper of kept parameters": PLAIN.but(
        prepare=lambda model: apply_activation_checkpointing(
            model, check_fn=lambda each: isinstance(each, Layer)
        ),
        options=lambda api: {"reshard_after_forward": False},
    ),
    "settings": PLAIN.but(before=change_settings),
    "divisor": Program(set_up=divide_by_3, max_norm=1e6),
    "divisor in float64": Program(shard=with_a_divisor_in_float64, max_norm=1e6),
}


# Thorough, since each is similar to "bf16, rest in fp32", "divisor" or ``test_compile.py``.
REPEATED = {"bf16", "divisor in float64", "adamw"}


@pytest.mark.parametrize("name", thorough_but({*PROGRAMS} - REPEATED, PROGRAMS))
@on_ranks(2)
def test_results_are_those_of_fsdp2(name: str) -> None:
    PROGRAMS[name].check()


@pytest.mark.thorough
@pytest.mark.parametrize("all_reduces", [True, False])
@on_ranks(4)
def test_hsdp_trains_as_with_fsdp2(all_reduces: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def sync(model: Any, index: int, is_last: bool) -> None:
        if not all_reduces:
            model.set_requires_all_reduce(is_last)

    Program(options=lambda api: {"mesh": mesh}, optimizer=adamw, before=sync, steps=3).check()


@on_ranks(2)
def test_no_flag_lets_streams_race() -> None:
    """The tracer raises where two accesses would not be ordered on CUDA."""
    tracer = Tracer()
    with tracer:
        model = parallelize(fsdp2, seeded())
        optimizer = sgd(model.parameters())
        for step, setting in enumerate((*SETTINGS, divide_by_3)):
            setting(model)
            for index in range(2):
                model.set_reshard_after_backward(index == 1)
                model.set_requires_gradient_sync(index == 1)
                loss_of(model, *batch(step, index, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(order.num_checks for order in tracer.orders)
