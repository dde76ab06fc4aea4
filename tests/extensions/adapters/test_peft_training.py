"""Training of adapters over a frozen base equals PEFT on one process, at every level."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from tests import reference
from tests.checkpoint.scene import update
from tests.extensions.adapters.peft_models import adapted, lora, peft
from tests.pool import on_few_ranks, on_ranks

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 3


def made(kind: str, dtype: torch.dtype) -> peft.PeftModel:
    model = adapted("lora" if kind in ("checkpointing", "dropped") else kind, dtype)
    torch.manual_seed(1)
    with torch.no_grad():  # lora_B is zero at first, and then lora_A has no gradient
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape), alpha=0.1)
    if kind == "checkpointing":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    return model


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(48, (4, 8), generator=generator)
    return update(model(input_ids=tokens, labels=tokens).loss, optimizer)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def assert_as_plain(model: nn.Module, plain: nn.Module) -> None:
    """Parameters are the same, bit for bit."""
    found = reference.full_weights(model)
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())


KINDS = [
    *(("lora", torch.float32), ("lora", torch.bfloat16)),
    *(("checkpointing", torch.float32), ("checkpointing", torch.bfloat16)),
    *((kind, torch.float32) for kind in ("dora", "modules to save", "ia3", "prompt")),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_adapters_train_as_peft_trains_them(level: str, kind: str, dtype: torch.dtype) -> None:
    """Bit for bit: all ranks have the same batch, which makes means over ranks exact."""
    plain, model = made(kind, dtype), made(kind, dtype)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    fe.shard(model, strategy=level, initial_values="rank0")
    jobs = (plain, optimizer_of(plain)), (model, optimizer_of(model))
    for step in range(STEPS):
        expected, loss = (step_of(*job, step) for job in jobs)
        assert loss == expected, step
    own = reference.full_weights(model)
    for name, param in plain.named_parameters():
        # A trainable parameter that is bf16 has main weights of its own in fp32.
        assert own[name].dtype != param.dtype or torch.equal(own[name], param.detach()), name
        is_changed = not torch.equal(param, before[name])
        assert is_changed == param.requires_grad, name


def two_adapters() -> peft.PeftModel:
    model = made("lora", torch.float32)
    model.add_adapter("other", lora(r=2))
    return model


@on_few_ranks
def test_adapters_that_are_trainable_when_sharded_take_turns() -> None:
    plain, model = two_adapters(), two_adapters()
    for each in (plain, model):
        each.base_model.set_adapter(["default", "other"])  # both require gradients
    fe.shard(model, initial_values="rank0")
    jobs = (plain, optimizer_of(plain)), (model, optimizer_of(model))
    for step, active in enumerate(["default", "other", "default"]):
        losses = []
        for each, optimizer in jobs:
            each.set_adapter(active)
            losses.append(step_of(each, optimizer, step))
        assert losses[0] == losses[1]
    with plain.disable_adapter(), model.disable_adapter(), torch.no_grad():
        tokens = torch.arange(8).view(1, 8)
        assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert_as_plain(model, plain)


@on_ranks(2)
def test_an_adapter_that_was_frozen_when_sharded_stays_so() -> None:
    model = two_adapters()
    engine = fe.shard(model, initial_values="rank0")
    tokens = torch.arange(8).view(1, 8)
    model.set_adapter("other")
    with pytest.raises(RuntimeError, match=r"expected .*lora_A.other.weight to stay frozen"):
        model(input_ids=tokens)
    model.set_adapter("default")
    engine.reset()
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
    # To compute with it, without training it, is fine.
    model.set_adapter("other", inference_mode=True)
    with torch.no_grad():
        assert model(input_ids=tokens).logits.isfinite().all()


@on_ranks(2)
def test_adapters_merge_where_weights_are_whole() -> None:
    plain, model = made("lora", torch.float32), made("lora", torch.float32)
    engine = fe.shard(model, initial_values="rank0")
    before = reference.full_weights(model)
    with pytest.raises(ValueError, match="expected the parameters that the model had when"):
        model.add_adapter("late", lora(r=2))
    torch.testing.assert_close(reference.full_weights(model), before, rtol=0, atol=0)
    for context, change in (
        (nullcontext, "merge_adapter"),  # products of gathered adapters are added to the shards
        (nullcontext, "unmerge_adapter"),
        (engine.unsharded, "merge_adapter"),
        (torch.no_grad, "unmerge_adapter"),  # writes weights one by one, outside of the graph
    ):
        getattr(plain, change)()
        with context():
            getattr(model, change)()
        assert_as_plain(model, plain)
        with torch.no_grad():
            logits = [each(input_ids=torch.arange(8).view(1, 8)).logits for each in (model, plain)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("kind", ["dora", "ia3", "boft", "hra", "lora, embeddings"])
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_every_kind_of_adapter_merges(kind: str, level: str) -> None:
    for dtype, safe_merge in ((torch.float32, False), (torch.bfloat16, True)):
        plain, model = made(kind, dtype).eval(), made(kind, dtype).eval()
        engine = fe.shard(model, strategy=level, initial_values="rank0")
        for merges in (True, False, True):
            with engine.unsharded():
                for each in (plain, model):
                    if merges:
                        each.merge_adapter(safe_merge=safe_merge)
                    else:
                        each.unmerge_adapter()
            for name, param in plain.named_parameters():
                own = engine.full_tensor(name)
                torch.testing.assert_close(own.to(param.dtype), param.detach(), msg=name)
