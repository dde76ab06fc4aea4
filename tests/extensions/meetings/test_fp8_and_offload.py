"""Weights that are gathered in fp8 are encoded from a disk."""

from __future__ import annotations

import fsdp_engine as fe
from tests.checkpoint.scene import shared_folder
from tests.extensions.offload.offloaded import BF16, all_roles, compare, scenario
from tests.pool import on_ranks


@on_ranks(1)
def test_fp8_weights_are_encoded_from_the_disk() -> None:
    for level in ("optim_grads", "optim_grads_params"):
        given = scenario((level, "no_shard"), mp_policy=BF16, codec_rules=[fe.Float8()])
        compare(shared_folder(), [all_roles(level)], given)
