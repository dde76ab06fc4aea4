"""Groups of weight gradients that share a node of the graph are computed together."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_engine.extensions.pipelines.pipeline_stage import _joined


def test_groups_that_share_a_node_without_a_gradient_are_joined_too() -> None:
    grad = (torch.ones(1),)

    def group(param: str, **grads: Any) -> dict[str, Any]:
        return {"params": {param}, "intermediates": list(grads), "grads": list(grads.values())}

    groups = [group("p", a=None, b=grad), group("q", b=grad), group("r", a=None, c=grad)]
    found = [(nodes, grads) for nodes, grads in _joined(groups) if grads]
    assert [(sorted(map(str, nodes)), sorted(map(str, grads))) for nodes, grads in found] == [
        (["p", "q", "r"], ["b", "c"])
    ]
