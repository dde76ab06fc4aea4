"""Where a promise has to hold: every level, several pairs, one rank and many.

A promise is tested by a function of one :class:`Place`, which shards a model there and checks::

    @everywhere
    def test_a_gradient_that_was_zeroed_stays_zeros(place: Place) -> None:
        engine = place.shard(nn.Linear(4, 4))
        ...

It is run at every place of 1, 2 and (in ``make test-all`` only) 4 ranks, a test for each number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from tests import reference
from tests.pool import Ranks
from tests.training import mesh_of


@dataclass(frozen=True)
class Place:
    """A pair of levels on a mesh of ``shape``, (inner,) or (outer, inner)."""

    inner: str
    outer: str
    shape: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.shape)

    def shard(self, model: nn.Module, **options: Any) -> fe.Engine:
        """``fe.shard`` at this place."""
        if self.shape not in _MESHES:
            _MESHES[self.shape] = mesh_of(*self.shape)
        return fe.shard(model, _MESHES[self.shape], self.inner, self.outer, **options)


# The meshes of the current process group, by shape. Each is used again, since every mesh has groups
# of its own, whose threads wake a hundred times a second.
_MESHES: dict[tuple[int, ...], DeviceMesh] = {}


# For all places of one number of ranks together.
TIMEOUT_SECONDS = 240.0

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")

PLACES = (
    *(Place(level, "no_shard", (1,)) for level in LEVELS),
    *(Place(level, "no_shard", (2,)) for level in LEVELS),
    Place("no_shard", "no_shard", (2, 2)),
    Place("optim", "optim", (2, 2)),
    Place("optim_grads", "no_shard", (2, 2)),
    Place("optim_grads_params", "no_shard", (2, 2)),
    Place("optim_grads_params", "optim", (2, 2)),
    Place("optim_grads_params", "optim_grads_params", (2, 2)),
)


def everywhere(check: Callable[[Place], None]) -> Callable[..., None]:
    """Makes a test of ``check(place)``, which every rank of every place shall run."""

    @pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
    @functools.wraps(check)
    def test(ranks: Ranks, num_ranks: int) -> None:
        __tracebackhide__ = True
        call = (run_at_places, check.__module__, check.__qualname__)
        ranks.run(*call, world_size=num_ranks, timeout=TIMEOUT_SECONDS)

    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, either) for name in ("ranks", "num_ranks")]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return test


def run_at_places(module: str, name: str) -> None:
    # The module's attribute is the test; functools.wraps left the check on it.
    check = getattr(importlib.import_module(module), name).__wrapped__
    try:
        for place in PLACES:
            if math.prod(place.shape) == dist.get_world_size():
                torch.manual_seed(0)
                check(place)
    except Exception as error:
        error.add_note(f"at {place}")
        raise
    finally:
        _MESHES.clear()


# Returns a loss for backward, or None if no backward follows.
Act = Callable[[Any, Tensor], Tensor | None]


def mean_square(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def assert_as_alone(
    place: Place,
    model: nn.Module,
    *acts: Act | tuple[Act, bool],
    clear: Sequence[bool] = (True, True),
    shape: tuple[int, ...] = (4, 6),
    rtol: float = 2e-5,
    atol: float = 1e-6,
    **options: Any,
) -> fe.Engine:
    """Training has the gradients and weights of one process with the batches of all ranks.

    Args:
        acts: The acts of each step. Backward runs on the loss that an act returns. An act in a pair
            with False runs within ``no_sync``.
        clear: Whether ``zero_grad`` sets to None, for each step.
        shape: Shape of a batch.
        options: Options of ``shard``.
    """
    alone = deepcopy(model)
    engine = place.shard(model, **options)
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [reference.sgd(each.parameters()) for each in (model, alone)]
    for step, to_none in enumerate(clear):
        for number, act in enumerate(acts or [mean_square]):
            act, sync = act if isinstance(act, tuple) else (act, True)
            seeds = [1000 * step + 10 * number + each for each in range(world)]
            xs = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
            with nullcontext() if sync else engine.no_sync():
                loss = act(model, xs[rank])
                if loss is not None:
                    assert type(loss) is Tensor
                    loss.backward()
            for x in xs if loss is not None else xs[:1]:
                expected = act(alone, x)
                if expected is not None:
                    (expected / world).backward()
        for (name, param), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (param.grad is None) == (wanted.grad is None), f"{name}: {param.grad}"
            if param.grad is not None and wanted.grad is not None:
                found = reference.held(param.grad)
                expected = reference.slice_like(wanted.grad, param.grad)
                torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=name)
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=to_none)
    reference.assert_same_weights(model, alone, rtol=rtol, atol=atol)
    return engine
