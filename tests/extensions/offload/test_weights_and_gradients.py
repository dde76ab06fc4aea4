"""Main weights and gradients on a disk, against a run with all in memory: training, what users do
to parameters and gradients, checkpoints, errors. (``test_offloaded_state.py`` has all optimizers.)
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.offload import ROLES
from tests.extensions.offload.offloaded import (
    all_roles,
    assert_same,
    load,
    make,
    on_disk,
    save,
    step,
    values,
)
from tests.models import Transformer, token_batch
from tests.pairs import PAIRS
from tests.pool import Ranks

BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {
    "fp32": None,
    "bf16": BF16,
    "bf16 gradients": fe.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16
    ),
    "bf16 alone": fe.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, main_params_dtype=torch.bfloat16
    ),
}
LEVELS = ("optim", "optim_grads", "optim_grads_params")
FULL = "optim_grads_params", "no_shard"
COMBINATIONS = [
    roles for count in (1, 2, 3) for roles in itertools.combinations(ROLES, count) if roles[1:]
] + [("main_weights",), ("gradients",)]
Change = Callable[[Any, fe.Engine, Any, int], object]


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """``shard`` makes a group for a process that has none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def nothing(*args: object) -> None:
    pass


def train(
    offload: fe.Offload | None,
    pair: tuple[str, str] = FULL,
    change: Change = nothing,
    micro: int = 2,
    **options: Any,
) -> list[Any]:
    """Losses, weights and state of four steps, before each of which there is a change."""
    model, engine, optimizer = make(pair, "AdamW-fused", offload, **options)
    losses = []
    for number in range(4):
        change(model, engine, optimizer, number)
        losses += step(model, engine, optimizer, number, micro)
    weights = [(key, "", each) for key, each in engine.full_state_dict().items()]
    return [losses, *weights, *values(optimizer)]


def compare(
    folder: str | Path,
    roles: tuple[str, ...],
    pair: tuple[str, str] = FULL,
    change: Change = nothing,
    micro: int = 2,
    **options: Any,
) -> None:
    expected = train(None, pair, change, micro, **options)
    assert_same(train(on_disk(folder, roles), pair, change, micro, **options), expected)
    assert not os.listdir(folder)


@pytest.mark.parametrize("roles", COMBINATIONS, ids="+".join)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_has_the_bits_of_memory(
    policy: str, level: str, roles: tuple[str, ...], tmp_path: Path
) -> None:
    if not set(roles) <= set(all_roles(level)):
        with pytest.raises(ValueError, match=r"offload.gradients: expected 'device', or the inner"):
            train(on_disk(tmp_path, roles), (level, "no_shard"))
        return
    compare(tmp_path, roles, (level, "no_shard"), mp_policy=POLICIES[policy])


def compare_pair(folder: str, pair: tuple[str, str]) -> None:
    for policy in (None, BF16):
        compare(folder, all_roles(pair[0]), pair, mp_policy=policy)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_so_it_has_on_two_axes(ranks: Ranks, pair: tuple[str, str], tmp_path: Path) -> None:
    ranks.run(compare_pair, str(tmp_path), pair, world_size=4)


def bytes_held(folder: str, policy: fe.MixedPrecisionPolicy | None) -> list[set[str]]:
    model, engine, optimizer = make(FULL, "AdamW", on_disk(folder, ROLES), mp_policy=policy)
    held = []
    for number in range(2):
        model(*token_batch(4, number)).backward()
        held.append({role for role, count in engine.memory_bytes().items() if count})
        optimizer.step()
        held.append({role for role, count in engine.memory_bytes().items() if count})
    return held


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_nothing_is_held_between_uses(
    ranks: Ranks, policy: fe.MixedPrecisionPolicy | None, tmp_path: Path
) -> None:
    for held in ranks.run(bytes_held, str(tmp_path), policy, world_size=2):
        assert held == [set()] * 4


def edit_weights(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + number / 8)
        model.head.weight.copy_(torch.full_like(model.head.weight, 0.1 * number))


def load_weights(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    full = engine.full_state_dict()
    model.load_state_dict({key: value * 1.5 for key, value in full.items()})


def edit_unsharded(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    with engine.unsharded(), torch.no_grad():
        for param in model.parameters():
            param.add_(0.01)


def keep_gradients(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    """A backward without a step, whose gradients the next ones are added to."""
    model(*token_batch(4, number)).backward()
    if number == 1:
        for param in model.parameters():
            param.grad.mul_(3.0)
    elif number == 2:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
    elif number == 3:
        optimizer.zero_grad(set_to_none=False)


def set_gradients_alone(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    with torch.no_grad():
        model(*token_batch(4, number))


def reset(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    model(*token_batch(4, number)).backward()
    engine.reset()


def clip_by_torch(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    model(*token_batch(4, number)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def train_together(model: Any, engine: fe.Engine, optimizer: Any, number: int) -> None:
    with engine.together():
        model(*token_batch(4, number)).backward()


CHANGES = [
    edit_weights,
    load_weights,
    edit_unsharded,
    keep_gradients,
    set_gradients_alone,
    evaluate,
    reset,
    clip_by_torch,
    train_together,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_what_users_do_between_steps_counts(
    change: Change, policy: fe.MixedPrecisionPolicy | None, tmp_path: Path
) -> None:
    for roles in (ROLES, ROLES[1:], ROLES[1:2], ROLES[2:]):
        compare(tmp_path, roles, FULL, change, mp_policy=policy)


def compare_changes(folder: str, names: list[str]) -> None:
    for change in CHANGES:
        if change.__name__ in names:
            compare(folder, ROLES, FULL, change)


def test_so_it_does_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    names = [change.__name__ for change in CHANGES if change is not set_gradients_alone]
    ranks.run(compare_changes, str(tmp_path), names, world_size=2)


def test_frozen_units_and_those_of_two_optimizers_train_as_in_memory(tmp_path: Path) -> None:
    found = []
    for offload in (None, on_disk(tmp_path, ROLES)):
        torch.manual_seed(0)
        model = Transformer()
        for param in model.blocks[0].parameters():
            param.requires_grad_(False)
        engine = fe.shard(model, offload=offload, min_unit_size=0)
        params = [param for param in model.parameters() if param.requires_grad]
        # They share units.
        optimizers = [
            fe.shard_optimizer(torch.optim.AdamW(part, lr=1e-2))
            for part in (params[::2], params[1::2])
        ]
        for number in range(3):
            model(*token_batch(4, number)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights = [(key, "", each) for key, each in engine.full_state_dict().items()]
        found.append([*weights, *values(optimizers[0]), *values(optimizers[1])])
    assert_same(found[1], found[0])


def convert(model: Any) -> Any:
    model.blocks[0].double()
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def add_parameters_later(model: Any) -> Any:
    params = list(model.parameters())
    optimizer = fe.shard_optimizer(torch.optim.AdamW(params[:3], lr=1e-2))
    model(*token_batch(4, 9)).backward()
    optimizer.step()
    optimizer.add_param_group({"params": params[5:]})
    return optimizer


@pytest.mark.parametrize("roles", COMBINATIONS, ids="+".join)
def test_a_model_is_converted_before_it_is_trained(roles: tuple[str, ...], tmp_path: Path) -> None:
    compare_from(convert, on_disk(tmp_path, roles))


@pytest.mark.parametrize("roles", COMBINATIONS, ids="+".join)
def test_parameters_of_a_unit_are_added_later(roles: tuple[str, ...], tmp_path: Path) -> None:
    compare_from(add_parameters_later, on_disk(tmp_path, roles))


def compare_from(begin: Callable[[Any], Any], place: fe.Offload) -> None:
    found = []
    for offload in (None, place):
        torch.manual_seed(0)
        model = Transformer()
        model.blocks[0].register_forward_hook(lambda *args: args[2].float())
        model.blocks[0].register_forward_pre_hook(
            lambda module, args: args[0].to(module.up.weight.dtype)
        )
        engine = fe.shard(model, offload=offload, min_unit_size=0)
        optimizer = fe.shard_optimizer(begin(model))
        for number in range(3):
            model(*token_batch(4, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [(key, "", each) for key, each in engine.full_state_dict().items()]
        found.append([*weights, *values(optimizer)])
    assert_same(found[1], found[0])


def test_fp8_weights_are_encoded_from_the_disk(tmp_path: Path) -> None:
    for level in ("optim_grads", "optim_grads_params"):
        roles = all_roles(level)
        compare(tmp_path, roles, (level, "no_shard"), mp_policy=BF16, codec_rules=[fe.Float8()])


# Checkpoints.


@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_loads_on_other_ranks_with_another_offload(
    ranks: Ranks, saves: bool, loads: bool, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    place = [on_disk(disk, ROLES) if there else None for there in (saves, loads)]
    expected = ranks.run(save, str(tmp_path), place[0], FULL, world_size=2)[0]
    other = ("optim_grads", "no_shard")
    found = ranks.run(load, str(tmp_path), place[1], other, 1, world_size=1)[0]
    for one, expected_one in zip(found, expected, strict=True):
        torch.testing.assert_close(one, expected_one, rtol=1e-5, atol=1e-6)


# Files and memory that go with the engine.


def state_files() -> set[str]:
    """Those that this process has open."""
    folder = "/proc/self/fd"
    links = [os.path.join(folder, number) for number in os.listdir(folder)]
    found = {os.readlink(link) for link in links if os.path.lexists(link)}
    return {name for name in found if "fsdp_engine-state" in name}


def test_files_go_with_their_engine(tmp_path: Path) -> None:
    gc.collect()
    gc.collect()
    before = state_files()
    model, engine, optimizer = make(FULL, "AdamW", on_disk(tmp_path, ROLES))
    step(model, engine, optimizer, 0)
    assert len(state_files() - before) == len(ROLES)
    del model, engine, optimizer
    gc.collect()
    assert state_files() <= before


# Errors.


def test_a_disk_that_fails_is_an_error_after_which_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine, optimizer = make(FULL, "AdamW", on_disk(tmp_path, ROLES))
    step(model, engine, optimizer, 0)
    before = engine.full_state_dict()

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for name in ("preadv", "pwritev"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, broken)
            with pytest.raises(ValueError, match=r"state on disk: .*Input/output error"):
                step(model, engine, optimizer, 1)
        engine.reset()
        for key, value in engine.full_state_dict().items():
            assert torch.equal(value, before[key])
    step(model, engine, optimizer, 1)


def test_a_disk_that_is_too_small_is_an_error_of_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"expected \d+ bytes for state; found \d+"):
        fe.shard(Transformer(), offload=on_disk(tmp_path, ROLES))
    assert not os.listdir(tmp_path)


def shard_where_one_disk_is_full(folder: str) -> str:
    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = Transformer()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "posix_fallocate", full)
        with pytest.raises((OSError, RuntimeError, ValueError)) as caught:
            fe.shard(model, offload=on_disk(folder, ROLES))
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    return str(caught.value)


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(shard_where_one_disk_is_full, str(tmp_path), world_size=2):
        assert re.search(r"expected \d+ bytes for state; found \d+", found)


@pytest.mark.parametrize("roles", [ROLES, ROLES[1:2], ROLES[2:]], ids="+".join)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("level", LEVELS[1:])
def test_space_is_taken_before_anything_is_built(
    level: str, policy: str, roles: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: dict[int, list[int]] = {}
    fallocate = os.posix_fallocate

    def note(number: int, start: int, num_bytes: int) -> None:
        ends.setdefault(number, []).append(start + num_bytes)
        fallocate(number, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", note)
    options: Any = {"min_unit_size": 0, "mp_policy": POLICIES[policy]}
    engine = fe.shard(Transformer(), strategy=level, offload=on_disk(tmp_path, roles), **options)
    assert engine.memory_bytes("disk") or not ends
    for taken in ends.values():
        assert taken[0] == taken[-1] == max(taken)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offload.main_weights: expected one of .*; found 'cpu'"):
        fe.Offload(main_weights="cpu")
    with pytest.raises(ValueError, match=r"offload.step_on: expected one of"):
        fe.Offload(step_on="disk")
    with pytest.raises(ValueError, match=r"offload.gradients: expected 'host', since optimizers"):
        fe.Offload("host", main_weights="host", step_on="host")
    with pytest.raises(ValueError, match=r"offload.gradients: .*the inner level optim_grads or"):
        fe.shard(Transformer(), strategy="optim", offload=on_disk(tmp_path, ROLES))


def test_a_kept_reference_sees_the_gradients_of_the_next_step(tmp_path: Path) -> None:
    """As with resident gradients: documented."""
    model, _, optimizer = make(FULL, "AdamW", on_disk(tmp_path, ("gradients",)))
    model(*token_batch(4, 0)).backward()
    held: Tensor = model.head.weight.grad
    optimizer.zero_grad()
    model(*token_batch(4, 1)).backward()
    assert model.head.weight.grad is held
    assert len({param.grad.local.untyped_storage()._cdata for param in model.parameters()}) > 1
