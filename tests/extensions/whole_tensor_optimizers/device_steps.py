"""Jobs of an optimizer that steps whole tensors on an asynchronous device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from tests.async_device.scene import Job
from tests.extensions.whole_tensor_optimizers.owned import Whitening
from tests.models import Transformer


def make_optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return fe.shard_optimizer(Whitening(params, has_numbers=False))


def job(pair: tuple[str, str], **options: Any) -> Job:
    given = {"make_optimizer": make_optimizer, "num_micro": 1, **options}
    return Job(functools.partial(Transformer, 1), pair=pair, **given)


@contextmanager
def small_chunks() -> Iterator[pytest.MonkeyPatch]:
    """Within it chunks have a parameter of each rank."""
    module = "fsdp_engine.extensions.whole_tensor_optimizers.owned_step"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}._CHUNK_ELEMENTS", 1)
        yield patch
