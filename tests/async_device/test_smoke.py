import dataclasses, pytest, torch
from typing import Any
import fsdp_engine as fe
from tests.async_device import device as on
from tests.async_device.scene import Job, compare, differences, train, random_delays
from tests.async_device.test_offloaded_state import make_adamw, FULL, BF16
from tests.optim.optimizers import counting_chunks
from tests.pool import on_ranks
from fsdp_engine.offload import ROLES

@pytest.mark.parametrize("roles", [ROLES[:1], ROLES])
@on_ranks(2)
def test_x(roles: Any) -> None:
    off = fe.Offload(folder="/tmp", **dict.fromkeys(roles, "disk"))
    given = Job(pair=FULL, options=(("offload", off),), make_optimizer=make_adamw, sizes=(2,), num_micro=1)
    for seed in range(3):
        with counting_chunks() as counts:
            assert not compare(given, seed=seed)
        assert max(counts) == 2
    given = dataclasses.replace(given, num_micro=3)
    expected = train(dataclasses.replace(given, options=()), on.NAME)
    with random_delays(1):
        assert not differences(train(given, on.NAME), expected)
