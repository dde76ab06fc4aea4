"""``engine.together()`` on the asynchronous device."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import mesh_of
from tests.extensions.different_modules.maze import check, draw_case
from tests.pool import Ranks

ranks = device.ranks


@pytest.mark.parametrize(
    ("shape", "outer", "num_cases"),
    [
        ((2,), "no_shard", 3),
        ((2, 2), "optim", 1),
        pytest.param((2, 2), "optim", 3, marks=pytest.mark.thorough),
    ],
)
def test_any_routes_give_the_gradients_of_one_process_in_any_order_that_delays_make(
    ranks: Ranks, shape: tuple[int, ...], outer: str, num_cases: int
) -> None:
    ranks.run(check_with_delays, shape, outer, num_cases, world_size=len(shape) * 2)


def check_with_delays(shape: tuple[int, ...], outer: str, num_cases: int) -> None:
    mesh, pair = mesh_of(on.DEVICE.type, shape), ("optim_grads_params", outer)
    for seed in range(num_cases):
        case = draw_case(random.Random(f"{seed} {shape}"), dist.get_world_size())
        torch.accelerator.synchronize()
        delays = {"compute": 2e-4, "copy": 2e-4, "collective": 1e-3}
        with on.delays(**delays, seed=4 * seed + dist.get_rank()):
            check(case, mesh, pair, device=on.DEVICE)
