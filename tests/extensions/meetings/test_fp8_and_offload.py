"""Weights that are gathered in fp8 are encoded from a disk."""

from __future__ import annotations

from pathlib import Path

import fsdp_engine as fe
from tests.extensions.offload.offloaded import BF16, all_roles, compare
from tests.pool import Ranks


def compare_levels(folder: str) -> None:
    for level in ("optim_grads", "optim_grads_params"):
        options = {"mp_policy": BF16, "codec_rules": [fe.Float8()]}
        compare(folder, [all_roles(level)], (level, "no_shard"), **options)


def test_fp8_weights_are_encoded_from_the_disk(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(compare_levels, str(tmp_path), world_size=1)
