"""Optimizers of torchao, bitsandbytes and pytorch_optimizer that quantise their state in blocks.

[Note: Blocks of quantised state]
A block is ``block_size`` consecutive elements of a parameter (256; 128 for torchao's 4 bits) with
one scale. No shard boundary divides a block ([Note: Blocks] in ``layout/placement.py``), so the
package's own step on a slice computes the codes and scales of the full parameter, on any number of
ranks and at any level:

    full     | block 0 | block 1 | block 2 | block 3 | b4|
    rank 0   | block 0 | block 1 |
    rank 1                       | block 2 | block 3 | b4|

torchao and bitsandbytes only quantise the state of tensors of at least 4,096 elements. A shadow
([Note: Shadow optimizer] in ``optim/sharded_step.py``) has slices as parameters, so a mixin decides
for each slice as the package does for the full parameter.
"""

from __future__ import annotations

from typing import Any

from fsdp_engine.optim.step_listeners import add_step_check


def register() -> None:
    """Register a check of each step of torchao's optimizers."""
    add_step_check(_check_torchao)


def _check_torchao(optimizer: Any) -> None:
    if any(kind.__module__.startswith("torchao.") for kind in type(optimizer).__mro__):
        from fsdp_engine.extensions.low_bit_state.torchao_state import refuse_unsharded_step

        refuse_unsharded_step(optimizer)
