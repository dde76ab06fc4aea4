"""Bad input: clear errors, on every rank, before anything is changed."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.models import Mlp, Transformer, token_batch, vector_batch
from tests.pool import on_ranks
from tests.units.refusals import assert_still_trains, refused

LEVEL_3 = "optim_grads_params"


class Rootless(nn.Module):
    """A parameter in a module that has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()
        self.bias = nn.Parameter(torch.zeros(models.DIM))


def bad_granule(name: str, parameter: nn.Parameter) -> int:
    return 7 if name == "blocks.0.out.weight" else 1


# Arguments of `shard`, the kind of error, and parts of its text.
REFUSED: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    *(
        ({"strategy": inner, "outer_strategy": outer}, ValueError, ("outer_strategy", inner, outer))
        for inner, outer in itertools.combinations(LEVELS, 2)
    ),
    *(
        ({field: value}, ValueError, (f"{field}: expected one of", LEVEL_3, repr(value)))
        for field in ("strategy", "outer_strategy")
        for value in ("zero3", "", 3)
    ),
    *(
        ({"mesh": mesh}, TypeError, ("mesh: expected a DeviceMesh, sizes such as", repr(mesh)))
        for mesh in ("cuda", "2x2", 4.0)
    ),
    *(
        ({"mesh": sizes}, ValueError, ("mesh: expected one or two sizes",))
        for sizes in ((3, 5), (2, 1, 1), (-1, -2))
    ),
    ({"expert_mesh": (2, 4)}, TypeError, ("expert_mesh: expected a DeviceMesh or None",)),
    ({"units": [3]}, TypeError, ("units",)),
    ({"units": [int]}, TypeError, ("units", "int")),
    ({"mp_policy": torch.bfloat16}, TypeError, ("mp_policy",)),
    ({"config": {}}, TypeError, ("config",)),
    # Units that match nothing, or a module that is not called by itself.
    ({"units": nn.Conv2d}, ValueError, ("units", "Conv2d")),
    ({"units": "layers.*"}, ValueError, ("units", "layers.*")),
    ({"units": [models.Block, "layers.*"]}, ValueError, ("units", "layers.*")),
    ({"units": lambda name, module: False}, ValueError, ("units", "predicate")),
    ({"units": nn.GELU}, ValueError, ("units", "GELU")),
    ({"units": "blocks"}, ValueError, ("units", "blocks", "ModuleList")),
    # A granule that does not divide its parameter, or is not positive.
    ({"granule": bad_granule}, ValueError, ("blocks.0.out.weight", "7", "144")),
    ({"granule": lambda name, parameter: 0}, ValueError, ("embedding.weight", "found 0")),
    ({"granule": lambda name, parameter: -3}, ValueError, ("embedding.weight", "found -3")),
]


@on_ranks(2)
def test_bad_arguments_are_refused_and_the_model_can_still_be_sharded() -> None:
    model = Transformer(num_blocks=1)
    for arguments, kind, parts in REFUSED:
        with refused(model, *parts, kind=kind):
            fe.shard(model, **arguments)
    assert_still_trains(model)


@on_ranks(2)
def test_models_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(TypeError, match="model"):
        fe.shard(list(Transformer().parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameters"):
        fe.shard(nn.Sequential(nn.ReLU(), nn.Tanh()))
    with torch.device("meta"):
        model = Rootless()
    with refused(model, "bias", "reset_parameters", "meta"):
        fe.shard(model)
    # Each rank has another part of the parameters, which "rank0" would overwrite.
    wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with refused(wrapped, "found 0, whose parameters FullyShardedDataParallel", kind=TypeError):
        fe.shard(nn.Sequential(wrapped), initial_values="rank0")
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match="found 0, whose parameters torch's fully_shard has"):
        fe.shard(nn.Sequential(sharded))


@on_ranks(4)
def test_meshes_of_three_axes_or_without_this_rank_are_refused() -> None:
    model = Transformer(num_blocks=1)
    with refused(model, "mesh", "3 axes"):
        fe.shard(model, init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    mesh, rank = DeviceMesh("cpu", [0, 1]), dist.get_rank()
    if rank < 2:
        fe.shard(model, mesh)
        model(*token_batch(2, rank)).backward()
    else:
        with refused(model, "mesh", f"covers this rank, {rank}", "[0, 1]"):
            fe.shard(model, mesh)


def _renamed(block: Any) -> None:
    block.other = block.out
    del block.out


# A change to a model on one rank, and parts of the error.
DIFFERENT: list[tuple[Callable[[Any], object], tuple[str, ...]]] = [
    (lambda model: _renamed(model.blocks[1]), ("blocks.1.out.weight", "blocks.1.other.weight")),
    (
        lambda model: setattr(model.blocks[1], "out", nn.Linear(models.DIM, models.DIM + 1)),
        ("blocks.1.out.weight", "(12, 12)", "(13, 12)"),
    ),
    (lambda model: model.blocks[1].out.bfloat16(), ("blocks.1.out.weight", "float32", "bfloat16")),
    (
        lambda model: model.blocks[1].out.requires_grad_(False),
        ("blocks.1.out.weight", "trainable", "frozen"),
    ),
    (lambda model: delattr(model, "head"), ("head.weight",)),
]


@on_ranks(4)
def test_parameters_that_differ_between_ranks_are_refused_on_all_of_them() -> None:
    for change, parts in DIFFERENT:
        for rank in (0, 2):
            model = Transformer(num_blocks=2)
            if dist.get_rank() == rank:
                change(model)
            with refused(model, *parts, f"rank {rank}" if rank else "rank 1"):
                fe.shard(model)
            dist.barrier()


@on_ranks(2)
def test_arguments_that_differ_or_are_wrong_on_one_rank_are_refused_on_all() -> None:
    model, rank = Transformer(num_blocks=1), dist.get_rank()
    with refused(model, "rank 1", "optim_grads"):
        fe.shard(model, strategy=("optim", "optim_grads")[rank])
    with refused(model, "rank 0 [options.prefetch_window=0]", "rank 1 [options.prefetch_window=1]"):
        fe.shard(model, options=fe.Options(prefetch_window=rank))
    with refused(model, "layers.*"):
        fe.shard(model, units=("blocks.*", "layers.*")[rank])
    assert_still_trains(model)


@on_ranks(2)
def test_an_optimizer_built_before_sharding_is_refused() -> None:
    model = Transformer(num_blocks=1)
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(model, "optimizer", "after", "embedding.weight"):
        fe.shard(model)
    del optimizer
    gc.collect()  # the error's frames still refer to the optimizer
    assert_still_trains(model)


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_parameters_that_were_collected_before_sharding_are_not_trained_in_silence(
    level: str,
) -> None:
    model = Transformer(num_blocks=1)
    collected = list(model.parameters())
    before = [param.detach().clone() for param in collected]
    engine = fe.shard(model, strategy=level, initial_values="rank0")
    groups = [{"params": collected[:2]}, {"params": collected[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    batch = token_batch(2, 0)
    model(*batch).backward()
    for use in (
        optimizer.step,
        optimizer.zero_grad,
        lambda: nn.utils.clip_grad_norm_(collected, 1.0),
        lambda: fe.shard_optimizer(optimizer).step(),
        lambda: setattr(collected[0], "grad", torch.zeros_like(collected[0])),
    ):
        message = r"gradient of embedding\.weight: expected a parameter of the sharded model"
        with pytest.raises(RuntimeError, match=message):
            use()
    engine.zero_grad_buffer()
    # Values of collected parameters can be read.
    for param, value in zip(collected, before, strict=True):
        assert param.shape == value.shape
        assert type(copy.deepcopy(param.detach())) is Tensor
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch).backward()
    kept = engine.full_state_dict()
    optimizer.step()
    assert all(not torch.equal(engine.full_tensor(name), kept[name]) for name in kept)


class Listing(nn.Module):
    """Reads a weight from a list, which ``shard`` does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weights = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(nn.functional.linear(x, self.weights[0])).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_a_parameter_that_is_read_from_a_list_is_not_trained_in_silence(level: str) -> None:
    model = Listing()
    engine = fe.shard(model, strategy=level, initial_values="rank0")
    message = r"gradient of linear\.weight: expected a parameter of the sharded model.*from a list"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            model(torch.ones(2, 4)).backward()
        engine.reset()
    model.weights = [model.linear.weight]
    with torch.no_grad():
        model(torch.ones(2, 4))
    frozen = Listing()
    frozen.linear.weight.requires_grad_(False)
    fe.shard(frozen, strategy=level, initial_values="rank0")
    frozen(torch.ones(2, 4)).backward()


@on_ranks(1)
def test_an_engine_that_is_used_as_the_model_names_the_model() -> None:
    engine = fe.shard(nn.Linear(2, 2))
    for name in ("parameters", "state_dict", "train", "module"):
        with pytest.raises(AttributeError, match=f"{name!r}. fe.shard changes the model in place"):
            getattr(engine, name)
    with pytest.raises(AttributeError, match=r"no attribute 'paramters'$"):
        engine.paramters()
    with pytest.raises(TypeError, match="expected a call of the model; found a call of the engine"):
        engine(torch.ones(2, 2))
    with pytest.raises(AttributeError, match=r"'backward'\. Use loss\.backward\(\)"):
        engine.backward(torch.ones(()))


def test_torch_marks_the_classes_of_which_optimizers_were_made() -> None:
    """The engine relies on this to know, without a search of all objects, that no optimizer
    exists."""

    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            raise AssertionError

    assert not hasattr(Own.step, "hooked")
    Own([nn.Parameter(torch.ones(1))], {})
    assert hasattr(Own.step, "hooked")


@on_ranks(2)
def test_sharding_a_model_twice_is_refused() -> None:
    for strategy in LEVELS:
        model = Transformer(num_blocks=2)
        engine = fe.shard(model, strategy=strategy)
        whole: list[nn.Module] = [model, model.blocks[1], nn.Sequential(model)]
        for module in whole:
            with refused(module, "model"):
                fe.shard(module)
        data = reference.make_data(token_batch, 1, 1, dist.get_world_size())
        (step,) = reference.train_sharded(model, engine, data)
        assert step.norm > 0


@on_ranks(2)
def test_a_gradient_edited_between_microbatches_names_the_parameter() -> None:
    for strategy in LEVELS:
        model = Transformer(num_blocks=1)
        engine = fe.shard(model, strategy=strategy)
        for _ in range(2):  # once in the first microbatch, and once after others
            with engine.no_sync():
                model(*token_batch(2, 1)).backward()
        head = model.head.weight
        assert head.grad is not None
        head.grad.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"\.grad of head\.weight.*between microbatches"):
            model(*token_batch(2, 2)).backward()


@on_ranks(2)
def test_bad_arguments_of_methods_are_refused() -> None:
    model = Transformer(num_blocks=1)
    with pytest.raises(ValueError, match="module"):
        fe.register_forward_method(model, "generate")
    engine = fe.shard(model)
    weight = model.blocks[0].out.weight
    with pytest.raises(ValueError, match="sample"):
        fe.register_forward_method(model, "sample")
    with pytest.raises(KeyError, match=r"blocks\.9\.out"):
        engine.full_tensor("blocks.9.out")
    with pytest.raises(ValueError, match="Mlp"), engine.unsharded(Mlp()):
        pass
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match="redistribute"):
        weight.redistribute(placements=[Shard(0)])
    whole = weight.redistribute(placements=[Replicate()])
    assert torch.equal(whole.to_local(), engine.full_tensor("blocks.0.out.weight"))
    (model(*token_batch(2, 1)) * float("nan")).backward()
    with pytest.raises(RuntimeError, match="finite"):
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type"):
        engine.clip_grad_norm_(1.0, norm_type=0.0)


@on_ranks(2)
def test_training_within_unsharded_is_refused() -> None:
    for strategy in LEVELS:
        model = Transformer(num_blocks=1)
        engine = fe.shard(model, strategy=strategy)
        with engine.unsharded(), pytest.raises(RuntimeError, match="no_grad"):
            model(*token_batch(2, 1))
        model(*token_batch(2, 1)).backward()


def break_down(module: nn.Module, args: Any) -> None:
    raise ArithmeticError("this rank's own")


@on_ranks(2)
def test_a_rank_that_waits_for_another_in_vain_says_for_what() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    options = fe.Options(prefetch_window=0, staging_limit=0)
    model = models.Chain(Mlp(), Mlp(), Mlp())
    fe.shard(model, DeviceMesh.from_group(group, "cpu"), options=options)
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_pre_hook(break_down, prepend=True)
        with pytest.raises(ArithmeticError):
            model(*vector_batch(2, seed=1))
        time.sleep(4)  # its connections stay open, as those of a rank that is merely slow
    else:
        with pytest.raises(RuntimeError, match=r"blocks\.1.*did not complete: another rank"):
            model(*vector_batch(2, seed=1))


class Unheard(Exception):
    """An exception that only this test defines."""


def raises_here(*args: Any) -> Any:
    if dist.get_rank() == 1:
        raise Unheard("only here")
    return None


def on_rank_1(wrong: Any, right: Any = None) -> Any:
    return wrong if dist.get_rank() == 1 else right


Arguments = Callable[[], dict[str, Any]]
# Arguments with a function that is called on all ranks, and raises on rank 1.
RAISES_ON_RANK_1: dict[str, Arguments] = {
    "units": lambda: {"units": lambda name, module: raises_here() or name == "blocks.0"},
    "units that are iterated": lambda: {"units": (raises_here() or each for each in [nn.Linear])},
    "granule": lambda: {"options": fe.Options(granule=lambda name, param: raises_here() or 1)},
    "a codec rule": lambda: {"extensions": [fe.CodecRules([raises_here])]},
    "extensions that are iterated": lambda: {
        "extensions": (raises_here() or fe.CodecRules([]) for _ in range(1))
    },
}
# Arguments that are wrong on rank 1 only; kind and text of the error on the other ranks.
WRONG_ON_RANK_1: dict[str, tuple[Arguments, type[Exception], str]] = {
    **{name: (make, RuntimeError, "Unheard: only here") for name, make in RAISES_ON_RANK_1.items()},
    "a type": (lambda: {"mp_policy": on_rank_1("bf16")}, TypeError, "TypeError: mp_policy"),
    "a config": (lambda: {"config": on_rank_1(3)}, TypeError, "TypeError: config"),
    "a mesh": (lambda: {"mesh": on_rank_1("cuda")}, TypeError, "TypeError: mesh"),
    "an expert mesh": (
        lambda: {"expert_mesh": on_rank_1(5) or init_device_mesh("cpu", (dist.get_world_size(),))},
        TypeError,
        "TypeError: expert_mesh",
    ),
    "the name of a level": (
        lambda: {"strategy": on_rank_1("zero3", "optim")},
        ValueError,
        "ValueError: strategy: expected one of",
    ),
    "rows": (
        lambda: {
            "config": fe.DistributedDataParallelConfig(
                use_distributed_optimizer=True, num_distributed_optimizer_instances=on_rank_1(3, 1)
            )
        },
        ValueError,
        "num_distributed_optimizer_instances",
    ),
}


BY_THE_WRAPPER = ("units", "a type", "a config", "a mesh")


@pytest.mark.parametrize(
    ("face", "wrong"),
    [
        *(("shard", wrong) for wrong in WRONG_ON_RANK_1),
        *(("DistributedDataParallel", wrong) for wrong in BY_THE_WRAPPER),
    ],
)
@on_ranks(4, timeout=30.0)
def test_what_is_wrong_on_one_rank_alone_is_raised_on_all_of_them(face: str, wrong: str) -> None:
    make, kind, text = WRONG_ON_RANK_1[wrong]
    what = "shard()" if face == "shard" else face
    model = Transformer(num_blocks=1)
    if dist.get_rank() == 1:
        with refused(model, kind=Exception):
            getattr(fe, face)(model, **make())
    else:
        with refused(model, f"{what} failed on", "rank 1", text, kind=kind):
            getattr(fe, face)(model, **make())
    assert_still_trains(model)


@on_ranks(4)
def test_meshes_of_other_shapes_are_refused_on_all_ranks() -> None:
    model = Transformer(num_blocks=1)
    # All ranks make both meshes: torch waits for all of them.
    row, table = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    with refused(model, "shard(): expected the same on all ranks", "shape (2, 2)", "shape (4,)"):
        fe.shard(model, table if dist.get_rank() == 2 else row)
    given = {"expert_mesh": row} if dist.get_rank() == 3 else {}
    with refused(model, "shard(): expected the same on all ranks", "an expert_mesh"):
        fe.shard(model, row, **given)
    assert_still_trains(model)


@on_ranks(2)
def test_a_memory_format_of_channels_has_no_effect_and_a_warning() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    model = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    with pytest.warns(UserWarning, match=r"0\.weight: expected a row-major parameter; found torch"):
        fe.shard(model, strategy=LEVEL_3)
    model.to(memory_format=torch.channels_last)
    weight = model[0].weight
    for same in (weight.clone(memory_format=torch.channels_last), weight):
        assert torch.equal(same.full_tensor(), plain[0].weight)
    batch = torch.randn(2, 3, 8, 8)
    for module in (plain, model):
        module(batch.to(memory_format=torch.channels_last)).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain[0].weight.grad)
