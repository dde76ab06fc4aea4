"""Refused offloads, errors of disks, and space on disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.extensions.offload.places import ROLES
from fsdp_engine.optim.state_format import StateFormat
from tests.async_device import device as on
from tests.checkpoint.scene import shared_folder
from tests.extensions.offload.offloaded import FULL, POLICIES, STATE, failing, make, on_disk, step
from tests.models import Small, vector_batch
from tests.optim.optimizers import MAKERS, Lion
from tests.pool import Ranks, on_ranks
from tests.units.refusals import refused

OPTIM = ("optim", "no_shard")
TOO_SMALL = r"expected \d+ bytes for state; found \d+"
EIO = OSError(errno.EIO, "Input/output error")
HOST, DISK = dict.fromkeys(ROLES, "host"), dict.fromkeys(ROLES, "disk")


HOST_BUT_GRADIENTS = {**HOST, "gradients": "device", "step_on": "host"}
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"optimizer_state": "gpu"}, "optimizer_state: expected one of"),
    ({"main_weights": "cpu"}, "main_weights: expected one of .*; found 'cpu'"),
    ({"optimizer_state": "disk"}, "folder: expected a folder for state on 'disk'"),
    ({"step_on": "disk"}, "step_on: expected one of"),
    (HOST_BUT_GRADIENTS, "gradients: expected 'host', since optimizers"),
    ({**DISK, "folder": "/", "step_on": "host"}, "optimizer_state: expected 'host', since optimi"),
    ({"overlap_forward": True}, "optimizer_state: expected 'host' with overlap_forward"),
    ({**HOST, "overlap_forward": True}, "main_weights: expected 'device' with overlap_forward"),
]


@pytest.mark.parametrize(("fields", "problem"), IMPOSSIBLE)
def test_offloads_that_cannot_be_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"offload\.{problem}"):
        fe.Offload(**fields)


def check_places_of_the_device() -> None:
    gradients = "offload.gradients: expected '{}', the place of main_w"
    whole = "offload.main_weights: expected main weights of"
    model = Small(2).to(on.NAME)
    for fields, level, problem in (
        ({"main_weights": "host"}, FULL[0], gradients.format("host")),
        ({"main_weights": "disk"}, FULL[0], gradients.format("disk")),
        ({"gradients": "host"}, FULL[0], gradients.format("device")),
        ({"gradients": "disk"}, FULL[0], gradients.format("device")),
        ({"main_weights": "host", "gradients": "host"}, "optim_grads", whole),
        (DISK, "optim_grads", whole),
    ):
        offload: Any = fe.Offload(folder="/tmp", **fields)  # type: ignore[arg-type]
        with refused(model, problem) as caught:
            fe.shard(model, strategy=level, offload=offload)
        assert problem is not whole or "optim_grads, no_shard" in str(caught.value)
    fe.shard(model)


def test_places_that_the_device_cannot_have_are_refused(device_ranks: Ranks) -> None:
    device_ranks.run(check_places_of_the_device, world_size=1)


def test_places_that_a_level_or_a_folder_cannot_have_are_refused(tmp_path: Path) -> None:
    missing: Any = tmp_path / "missing"
    for kind, level, offload, problem in (
        (ValueError, FULL[0], on_disk(missing), f"can be written; found {missing}"),
        (TypeError, FULL[0], "host", "offload: expected an fe.Offload or None; found 'host'"),
        (ValueError, "optim", on_disk(tmp_path, ROLES), "the inner level optim_grads or"),
    ):
        model = Small(2)
        with refused(model, problem, kind=kind):
            fe.shard(model, strategy=level, offload=offload)
    fe.shard(Small(2), offload=fe.Offload(optimizer_state="host"))


@on_ranks(2)
def test_an_error_of_one_rank_is_an_error_of_all() -> None:
    model, folder = Small(2), shared_folder()
    with refused(model, "expected the same parameters and options") as uneven:
        fe.shard(model, offload=on_disk(folder) if dist.get_rank() else None)
    assert "'optimizer_state': 'disk'" in str(uneven.value)
    expected = pytest.raises((OSError, RuntimeError, ValueError), match=TOO_SMALL)
    with pytest.MonkeyPatch.context() as patch, expected:
        if dist.get_rank() == 1:
            patch.setattr(os, "posix_fallocate", full)
        fe.shard(model, offload=on_disk(folder, ROLES))
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())


class Keeping(torch.optim.SGD):
    """Sets an entry of each parameter's state, in its first or in a later step."""

    def __init__(self, params: Any, key: str, value: Callable[[Any], Any], first: int = 1) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.key, self.value, self.left = key, value, first

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.left -= 1
        for param in self.param_groups[0]["params"] if self.left <= 0 else ():
            self.state[param][self.key] = self.value(self.state[param])


def keeping(value: Any) -> Callable[..., Any]:
    return lambda own, other: Keeping(own, "kept", lambda state: value)


@pytest.mark.parametrize(
    ("make_optimizer", "problem"),
    [
        (keeping({}), "of the parameter's shape.*'kept' of dict"),
        (keeping([torch.zeros(3)]), "parameter's shape.*'kept' of list"),
        (keeping(torch.zeros(2)), r"the parameter's shape.*shape \(2,"),
        (lambda own, other: torch.optim.AdamW(own + other), "Make an optimizer for each engine"),
    ],
    ids=["dict", "list", "shape", "two engines"],
)
def test_optimizers_whose_state_cannot_lie_there_are_refused(
    make_optimizer: Callable[[list[Tensor], list[Tensor]], Any], problem: str, tmp_path: Path
) -> None:
    models = [Small(2), Small(2)]
    for model in models:
        fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    optimizer = make_optimizer(*(list(model.parameters()) for model in models))
    with pytest.raises(ValueError, match=problem):
        fe.shard_optimizer(optimizer, elementwise=True)


def test_state_that_a_later_step_makes_in_another_dtype_is_an_error(tmp_path: Path) -> None:
    model, engine, _ = make(OPTIM, offload=on_disk(tmp_path))
    key = "momentum_buffer"
    optimizer = Keeping(model.parameters(), key, lambda state: state[key].half(), first=3)
    fe.shard_optimizer(optimizer, elementwise=True)
    for number in (0, 1):
        step(model, engine, optimizer, number)
    with pytest.raises(RuntimeError, match=r"'momentum_buffer' in torch.float32.*torch.float16"):
        step(model, engine, optimizer, 3)


def test_state_in_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = make(OPTIM, offload=on_disk(tmp_path))
    monkeypatch.setattr(StateFormat, "has_plain_tensors", False)
    with pytest.raises(ValueError, match=r"plain tensors.*found AdamW, whose state is quantised"):
        fe.shard_optimizer(torch.optim.AdamW(model.parameters()))


def test_an_optimizer_that_was_not_sharded_is_refused_at_its_step(tmp_path: Path) -> None:
    model, engine, _ = make(OPTIM, offload=on_disk(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    for closure in (None, lambda: 0.0):
        with pytest.raises(RuntimeError, match=r"fe.shard_optimizer\(optimizer\) before its first"):
            optimizer.step(closure)
    fe.shard_optimizer(optimizer)
    step(model, engine, optimizer, 0)


def test_a_step_that_raises_in_any_unit_keeps_no_memory_and_the_next_one_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Lion):
        calls_left = -1

        def step(self, closure: Any = None) -> Any:
            Failing.calls_left -= 1
            if not Failing.calls_left:
                raise ArithmeticError("planted")
            return super().step(closure)

    monkeypatch.setitem(MAKERS, "Lion", Failing)
    model, engine, optimizer = make(OPTIM, "Lion", on_disk(tmp_path))
    Failing.calls_left = 0
    step(model, engine, optimizer, 0)
    num_calls = -Failing.calls_left
    assert num_calls > 3
    for number in range(num_calls):
        Failing.calls_left = 1 + number
        with pytest.raises(ArithmeticError, match="planted"):
            step(model, engine, optimizer, 1)
        assert "optimizer" not in engine.memory_bytes()
        step(model, engine, optimizer, 3)
    assert optimizer.num_steps == 1 + num_calls


def full(*args: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_too_small_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Small(2)
    fe.shard(model, strategy="optim", offload=on_disk(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=TOO_SMALL):
        fe.shard_optimizer(torch.optim.AdamW(model.parameters()))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("roles", [STATE, ROLES], ids="+".join)
def test_after_an_error_of_the_disk_the_next_step_steps(
    roles: tuple[str, ...], tmp_path: Path
) -> None:
    pair = OPTIM if roles is STATE else FULL
    model, engine, optimizer = make(pair, "AdamW", on_disk(tmp_path, roles))
    step(model, engine, optimizer, 0)
    for name, numbers in (("preadv", range(2)), ("pwritev", range(3))):
        for number in numbers:
            before = engine.full_state_dict()
            problem = r"state on disk: .*Input/output error"
            with failing(name, number, EIO), pytest.raises(ValueError, match=problem):
                step(model, engine, optimizer, 1)
            assert "optimizer" not in engine.memory_bytes()
            if roles is ROLES:
                engine.reset()
            if number == 0 and roles is ROLES:
                torch.testing.assert_close(engine.full_state_dict(), before, rtol=0, atol=0)
            step(model, engine, optimizer, 3)


@pytest.mark.parametrize("roles", [ROLES, ROLES[1:2], ROLES[2:]], ids="+".join)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("level", ["optim_grads", "optim_grads_params"])
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
    engine = fe.shard(Small(), strategy=level, offload=on_disk(tmp_path, roles), **options)
    assert engine.memory_bytes("disk") or not ends
    for taken in ends.values():
        assert taken[0] == taken[-1] == max(taken)


def test_a_kept_reference_sees_the_gradients_of_the_next_step(tmp_path: Path) -> None:
    model, _, optimizer = make(FULL, "AdamW", on_disk(tmp_path, ("gradients",)))
    model(*vector_batch(4, 0)).backward()
    held: Tensor = model.last.weight.grad
    optimizer.zero_grad()
    model(*vector_batch(4, 1)).backward()
    assert model.last.weight.grad is held
    assert len({param.grad.local.untyped_storage()._cdata for param in model.parameters()}) > 1
