"""When the last reference to a model is dropped, its engine, memory and groups are freed."""

from __future__ import annotations

import gc
import inspect
import pydoc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extension_list import names_of
from fsdp_engine.strategies import LEVELS
from tests.models import Transformer, token_batch
from tests.pool import on_ranks
from tests.processes import printed


@on_ranks(2)
def test_a_model_keeps_its_engine_and_takes_it_along() -> None:
    for level in LEVELS:
        model = Transformer(num_blocks=2)
        engine = weakref.ref(fe.shard(model, strategy=level))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            gc.collect()
            model(*token_batch(2, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine() is not None
        dropped = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert dropped() is None, level
        assert engine() is None, level


@on_ranks(2)
def test_idle_memory_goes_back_with_the_last_backward_of_a_step() -> None:
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, strategy="optim_grads_params")
    for _ in range(2):
        with engine.no_sync():
            model(*token_batch(2, dist.get_rank())).backward()
        assert engine._memory.idle_bytes > 0
        model(*token_batch(2, dist.get_rank())).backward()
        assert engine._memory.idle_bytes == 0


@on_ranks(1)
def test_a_step_leaves_attributes_of_the_engine_s_objects_quick_to_read() -> None:
    # CPython keeps attributes in the object until a program asks for its `__dict__`. A search
    # for kept tensors that asked all objects of the engine made each step 10 % slower.
    model = Transformer(num_blocks=2)
    engine = fe.shard(model, strategy="optim_grads_params")
    for _ in range(2):
        model(*token_batch(2, dist.get_rank())).backward()
    buffers = [buffer for unit in engine.scheduler.units for buffer in unit.buffers]
    objects = [engine.scheduler, *engine.scheduler.units, *buffers]
    objects += [buffer.weights for buffer in buffers]
    for each in objects:
        held = gc.get_referents(each)  # before `vars` makes the dict
        assert not any(vars(each) is referent for referent in held), type(each)


@on_ranks(1)
def test_engines_list_the_methods_of_extensions() -> None:
    engine = fe.shard(torch.nn.Linear(2, 2))
    assert "clip_grad_norm_" in dir(engine)
    assert set(names_of("methods")) <= set(dir(engine))
    assert "last_mean_loss" in pydoc.render_doc(fe.Engine)
    assert inspect.getdoc(fe.Engine.describe) == inspect.getdoc(engine.describe) is not None
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'described'"):
        engine.described()


class Raises(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError


@on_ranks(2)
def test_a_forward_that_raises_leaves_its_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Raises(4, 4))
    engine = fe.shard(model, options=fe.Options(min_unit_size=0))
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, 4))
    assert engine.scheduler.is_at_rest
    assert [unit.uses for unit in engine.units] == [0] * len(engine.units)


KEEPS_OPEN = """
import sys, torch, fsdp_engine as fe

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)

model = Net(2, 2)
text, data = open(sys.argv[1], "w"), open(sys.argv[2], "wb")
fe.shard(model, strategy=sys.argv[3])
loss = model(torch.ones(1, 2)).sum()
loss.backward()
text.write("line")
data.write(b"bytes")
"""


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
def test_files_that_a_program_keeps_open_are_written_when_it_ends(
    tmp_path: Path, level: str
) -> None:
    program, text, data = (tmp_path / name for name in ("program.py", "text", "data"))
    program.write_text(KEEPS_OPEN, encoding="utf-8")
    printed(str(program), str(text), str(data), level)
    assert text.read_text() == "line"
    assert data.read_bytes() == b"bytes"
