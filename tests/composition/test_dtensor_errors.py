"""DTensor parameters that cannot be sharded: an error on all ranks, before anything is changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import fsdp_engine as fe
from tests.composition.tensor_parallel import Model, cut, mesh_of
from tests.pool import on_ranks


def two_by_two() -> DeviceMesh:
    return mesh_of((2, 2), ("dp", "tp"))


def with_norm(weight: Any, model: Any) -> Any:
    model.norm.weight = nn.Parameter(weight)
    return model


@on_ranks(4)
def test_dtensors_that_cannot_be_sharded() -> None:
    mesh = two_by_two()
    tp, dp = mesh["tp"], mesh["dp"]
    model = cut(Model(), tp)
    # A mesh with another root mesh.
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    data = DeviceMesh.from_group(groups[dist.get_rank() % 2], "cpu")
    # Another device.
    elsewhere = DeviceMesh("cuda", tp.mesh, mesh_dim_names=("tp",), _init_backend=False)
    meta = TensorMeta(torch.Size((12,)), (1,), torch.float32)
    make: Any = DTensor
    spec = DTensorSpec(elsewhere, (Shard(0),), tensor_meta=meta)
    on_cuda = with_norm(make(torch.ones(6), spec, requires_grad=False), cut(Model(), tp))
    # Placements that are no shards.
    partial = with_norm(DTensor.from_local(torch.ones(12), tp, [Partial()]), Model())
    # A plain tensor and a DTensor in one tie.
    tied = Model(tied=True)
    whole = tied.embedding.weight.detach()
    tied.head.weight = nn.Parameter(DTensor.from_local(whole, tp, [Replicate()]))
    refusals: list[tuple[nn.Module, DeviceMesh | None, tuple[str, ...]]] = [
        (model, None, ("embedding.weight", 'mesh["dp"]')),
        (model, mesh, ("embedding.weight", "overlapping")),
        (model, tp, ("embedding.weight", "overlapping")),
        (model, mesh_of((4,), ("all",)), ("embedding.weight",)),
        (model, data, ("embedding.weight", "names")),
        (on_cuda, dp, ("norm.weight", "found a DTensor on cuda")),
        (partial, dp, ("norm.weight", "Partial")),
        (tied, dp, ("embedding.weight", "head.weight", "same elements")),
    ]
    for refused, given, said in refusals:
        before = {name: id(param) for name, param in refused.named_parameters()}
        with pytest.raises(ValueError, match=re.escape(said[0])) as raised:
            fe.shard(refused, given)
        assert all(word in str(raised.value) for word in said), raised.value
        assert before == {name: id(param) for name, param in refused.named_parameters()}


@on_ranks(4)
def test_what_one_rank_raises_all_raise() -> None:
    rank, mesh = dist.get_rank(), two_by_two()

    def granule(name: str, param: Tensor) -> int:
        if rank == 3:
            raise KeyError(name)
        return 1

    with pytest.raises(KeyError if rank == 3 else Exception, match="embedding"):
        fe.shard(cut(Model(), mesh["tp"]), mesh["dp"], options=fe.Options(granule=granule))
    torch.manual_seed(1)
    model = cut(Model(), mesh["tp"])
    if rank == 2:
        shard: Any = model.blocks[1].up.weight
        shard.data._local_tensor.add_(1)
    # The error is raised on ranks 0 and 2, which share the value, and on the others, which would
    # otherwise hang.
    expected = r"blocks\.1\.up\.weight: expected the same initial values"
    with pytest.raises(ValueError, match=expected):
        fe.shard(model, mesh["dp"])


class Plainly(torch.autograd.Function):
    """Computes with the local tensor of a DTensor, and returns a plain gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight.to_local().sum()  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones(6, 2) * grad.sum()


class Odd(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(6, 2), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return Plainly.apply(x, self.weight)


@on_ranks(4)
def test_a_gradient_that_is_no_dtensor() -> None:
    mesh = two_by_two()
    engine = fe.shard(Odd(mesh["tp"]), mesh["dp"])
    expected = "backward: expected a gradient of weight that is a DTensor"
    with pytest.raises(RuntimeError, match=expected):
        engine.model(torch.ones(1, requires_grad=True)).sum().backward()
