"""Checkpoints that earlier versions of the engine wrote load as ever.

``data/before_units_as_sets`` is from commit 2c149ee, the last one in which a unit was one module:
two ranks, level 3, ``Transformer(num_blocks=2, tied=True)`` after two steps of AdamW. Its root held
what a unit of embedding, norm and head holds since.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdp_engine as fe
from tests.models import Transformer, token_batch
from tests.pool import on_few_ranks

FOLDER = Path(__file__).parent / "data" / "before_units_as_sets"
# Of token_batch(4, 99), before and after a third step with that batch on all ranks; printed by the
# program that wrote the checkpoint.
LOSSES = (7.681292533874512, 6.736013889312744)


@on_few_ranks
def test_a_checkpoint_of_two_ranks_goes_on() -> None:
    for strategy in ("no_shard", "optim_grads_params"):
        model = Transformer(num_blocks=2, tied=True)
        engine = fe.shard(model, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert fe.load_checkpoint(str(FOLDER), engine, optimizer) == {"step": 2}
        loss = model(*token_batch(4, 99))
        loss.backward()
        optimizer.step()
        losses = (float(loss.detach()), float(model(*token_batch(4, 99)).detach()))
        assert losses == pytest.approx(LOSSES, rel=1e-5)
