"""Parameters of tensor classes with FSDP2's all-gather hooks, against FSDP2 and one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import fsdp_engine as fe
from fsdp_engine import fsdp2
from tests.pool import Ranks, on_ranks

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
STEPS = 2


class Pair(torch.Tensor):
    """Has two inner tensors, both gathered; ``fsdp_pre_all_gather`` has one argument."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_a, on_b = (
            tree_map_only(cls, lambda each, name=name: getattr(each, name), (args, kwargs or {}))
            for name in ("a", "b")
        )
        found = func(*on_a[0], **on_a[1]), func(*on_b[0], **on_b[1])
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            return args[0]
        if isinstance(found[0], Tensor):
            return cls(*found)
        if isinstance(found[0], list):
            return [cls(a, b) for a, b in zip(*found, strict=True)]
        return found[0]

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        a, b = outputs
        if out is not None:
            assert out.a.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
            return None
        return Pair(a, b), (a, b)


class Narrow(torch.Tensor):
    """Is gathered as bf16, computes in its dtype; ``fsdp_pre_all_gather`` has five arguments."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each._data, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Linear)
        assert mesh.ndim == 1
        assert outer_stride == (outer_size[1], 1)
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        padded[: self._data.shape[0]].copy_(self._data)
        return (padded,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered[: out.shape[0]])
            return None
        wide = gathered.to(param_dtype)
        return wide, (gathered, wide)


class Flattened(Narrow):
    """Like a class of PyTorch's tests: its ``__tensor_unflatten__`` does not fit torch.compile."""

    def __tensor_flatten__(self) -> Any:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, size: Any, stride: Any) -> Any:
        return inner["_data"]


KINDS: dict[str, Any] = {
    "pair": lambda t: Pair(t, t.clone()),
    "narrow": Narrow,
    "narrow flattened": Flattened,
}


def _model(kind: str, *, is_plain: bool = False) -> nn.Module:
    torch.manual_seed(0)
    # Narrow pads uneven shards. The second layer's 6 rows make even shards.
    size = 7 if kind.startswith("narrow") else 8
    blocks = [
        nn.Sequential(nn.Linear(6, size, bias=False), nn.Tanh(), nn.Linear(size, 6, bias=False))
        for _ in range(3)
    ]
    for block in blocks:
        for layer in (block[0], block[2]):
            assert isinstance(layer, nn.Linear)
            if not is_plain:
                layer.weight = nn.Parameter(KINDS[kind](layer.weight.detach().clone()))
    return nn.Sequential(*blocks)


def _train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        for microbatch in range(2):
            seed = 100 * step + 10 * microbatch + dist.get_rank()
            batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
            loss = model(batch).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.a if isinstance(loss, Pair) else loss).item())
    return losses


def _losses(kind: str, way: str, level: str) -> list[float]:
    """Losses of a model that is sharded in ``way``. With "meta", parameters get the values of
    ``_model(kind)`` after sharding."""
    on_meta, axes = way.startswith("meta"), num_axes(way)
    with torch.device("meta" if on_meta else "cpu"):
        model = _model(kind)
    if way == "meta rank0" and dist.get_rank() == 0:
        model = _model(kind)
    if "fully_shard" in way:
        names = ("replicate", "shard")[-axes:]
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (2,) * axes, mesh_dim_names=names)
        }
        calls: Any = fully_shard if way.startswith("torch's") else fsdp2.fully_shard
        if calls is fsdp2.fully_shard and axes == 1:
            options["strategy"] = level
        for block in model.children():
            calls(block, **options)
        calls(model, **options)
        if way == "meta fully_shard":
            model.to_empty(device="cpu")
    else:
        fe.shard(model, strategy=level, min_unit_size=0)
    if on_meta and way != "meta rank0":
        values = dict(_model(kind, is_plain=True).named_parameters())
        state = {
            name: distribute_tensor(values[name].detach(), param.device_mesh, param.placements)
            for name, param in model.named_parameters()
        }
        model.load_state_dict(state, assign="assigned" in way)
    return _train(model)


def num_axes(way: str) -> int:
    return 2 if way.endswith("on two axes") else 1


@functools.cache
def expected_losses(ranks: Ranks, kind: str, way: str) -> list[list[float]]:
    found: list[list[float]] = ranks.run(_losses, kind, way, "", world_size=2 ** num_axes(way))
    return found


FULLY_SHARD = ("fully_shard", "fully_shard on two axes")
FROM_META = ("meta fully_shard", "meta fully_shard assigned", "meta shard", "meta rank0")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", ["shard", *FULLY_SHARD, *FROM_META])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_train_as_with_fsdp2_also_with_values_set_after_sharding_on_meta(
    ranks: Ranks, kind: str, way: str, level: str
) -> None:
    found = ranks.run(_losses, kind, way, level, world_size=2 ** num_axes(way))
    torchs = FULLY_SHARD[num_axes(way) - 1]
    expected = expected_losses(ranks, kind, f"torch's {torchs}")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_hooks_on_meta_begin_with_the_values_of_plain_layers(kind: str) -> None:
    found = []
    for is_plain in (False, True):
        with torch.device("meta"):
            model = _model(kind, is_plain=is_plain)
        torch.manual_seed(3)
        fe.shard(model, min_unit_size=0)
        found.append([param.full_tensor() for param in model.parameters()])  # type: ignore[operator]
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_different_inner_tensors_are_refused_by_name() -> None:
    model: Any = _model("pair")
    model[0][0].weight = nn.Parameter(Pair(torch.ones(8, 6), torch.zeros(8, 6)))
    match = r"0\.0\.weight: expected a Pair whose inner tensors \['a', 'b'\] have one value"
    with pytest.raises(ValueError, match=match):
        fe.shard(model)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["before", "slice", "parameter"])
@on_ranks(2)
def test_hooks_set_on_a_tensor_are_refused(where: str, level: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    if where == "before":
        model[1].weight.fsdp_pre_all_gather = lambda mesh: None
        with pytest.raises(ValueError, match=r"1\.weight: expected a tensor class .* set on it"):
            fe.shard(model, strategy=level)
        return
    fe.shard(model, strategy=level)
    model(torch.ones(2, 6)).sum().backward()
    weight: Any = model[1].weight
    patched = getattr(weight, "_local_tensor", weight) if where == "slice" else weight
    patched.fsdp_pre_all_gather = lambda mesh: None
    place = "its _local_tensor" if patched is not weight else "it"
    with pytest.raises(ValueError, match=rf"1\.weight: expected a tensor class .* set on {place}"):
        model(torch.ones(2, 6))
    del patched.fsdp_pre_all_gather
    model(torch.ones(2, 6)).sum().backward()


@on_ranks(2)
def test_hooks_set_on_slices_are_refused_at_the_first_forward() -> None:
    """As in PyTorch's ``test_all_gather_extensions_monkey_patch``."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        nn.init.normal_(param)
        local: Any = param._local_tensor
        if "weight" in name:
            local.fsdp_pre_all_gather = (lambda self, mesh: None).__get__(local)
            local.fsdp_post_all_gather = (lambda self, *outputs: None).__get__(local)
    with pytest.raises(ValueError, match=r"0\.weight: .* set on its _local_tensor"):
        model(torch.ones(2, 6))


@pytest.mark.parametrize("calls", ["shard", "fully_shard"])
@on_ranks(4)
def test_hooks_within_dtensors_are_refused(calls: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    for index, dim in enumerate((0, 1)):
        weight = distribute_tensor(model[index].weight.detach(), mesh["tp"], [Shard(dim)])
        local = weight.to_local()
        pair = Pair(local.clone(), local.clone())
        model[index].weight = nn.Parameter(DTensor.from_local(pair, mesh["tp"], [Shard(dim)]))
    made: Any = fe.shard if calls == "shard" else fsdp2.fully_shard
    with pytest.raises(ValueError, match=r"0\.weight: expected a plain shard in a DTensor"):
        made(model, mesh=mesh["dp"])
    assert isinstance(model[0].weight.to_local(), Pair)
