"""What torch promises of compiled blocks: their code is compiled, and none of the engine's."""

from __future__ import annotations

import copy
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fsdp_engine as fe
from tests import reference
from tests.models import Mlp
from tests.pool import on_ranks


def _compile_in_place(model: nn.Sequential, backend: Any) -> None:
    for place in (1, 2):
        model[place].compile(backend=backend)


def _compile_around(model: nn.Sequential, backend: Any) -> None:
    for place in (1, 2):
        model[place] = torch.compile(model[place], backend=backend)


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize(
    ("compile_blocks", "is_before"),
    [(_compile_in_place, True), (_compile_around, True), (_compile_in_place, False)],
    ids=["compiled-in-place", "compiled-around", "compiled-after-shard"],
)
@on_ranks(2)
def test_of_compiled_blocks_one_frame_is_compiled_as_without_the_engine(
    compile_blocks: Any, is_before: bool, level: str
) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Mlp(8, 8), Mlp(8, 8), nn.Linear(8, 2))
    alone = copy.deepcopy(model)
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    with patch.object(sys, "unraisablehook") as told:
        if is_before:
            compile_blocks(model, backend)
        fe.shard(model, None, level, units=lambda name, module: name in {"1", "2"})
        if not is_before:
            compile_blocks(model, backend)
        _train(model)
    _train(alone)
    told.assert_not_called()
    assert [len(graph) for graph in graphs] == [4]  # two layers, an activation, a sum
    assert counters["frames"] == {"total": 1, "ok": 1}
    assert not counters["graph_break"]
    expected = reference.full_weights(alone)
    for name, weight in reference.full_weights(model).items():
        torch.testing.assert_close(weight, expected[name.replace("_orig_mod.", "")], msg=name)
