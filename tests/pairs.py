"""Pairs of levels, (inner, outer), that tests are run for."""

from __future__ import annotations

import pytest

from fsdp_engine.strategies import ALL_STRATEGIES

# All ten pairs, for tests of the levels themselves: training, counts, memory.
PAIRS = [(strategy.inner.name, strategy.outer.name) for strategy in ALL_STRATEGIES]
# Every inner level, and three outer ones: for features in addition to a level.
FEW_PAIRS = [
    ("no_shard", "no_shard"),
    ("optim", "optim"),
    ("optim_grads", "no_shard"),
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim_grads"),
]
# Pairs of FEW_PAIRS that are ``thorough`` where a test has other pairs (``tests/matrices.py``):
# DDP, and a level between two others.
SPARED_PAIRS = [("no_shard", "no_shard"), ("optim_grads", "no_shard")]
FEW_PAIR_NAMES = ["-".join(pair) for pair in FEW_PAIRS]

# For tests of many ways: FEW_PAIRS with a few ways (False); in ``make test-all``, all ten pairs
# with all ways (True).
PAIRS_AND_WAYS = [
    *(pytest.param(*pair, False, id=f"{'-'.join(pair)}-few") for pair in FEW_PAIRS),
    *(
        pytest.param(*pair, True, id=f"{'-'.join(pair)}-all", marks=pytest.mark.thorough)
        for pair in PAIRS
    ),
]

# All ten pairs as arguments of tests: those of FEW_PAIRS always, the others in ``make test-all``.
EVERY_PAIR = [
    pytest.param(*pair, id="-".join(pair), marks=() if pair in FEW_PAIRS else pytest.mark.thorough)
    for pair in PAIRS
]
