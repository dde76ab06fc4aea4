"""Checkpoints: what any ranks, strategy and mesh saved, any others load, bit by bit.

Most tests save in one call of the pool and load in another, so that nothing but the folder connects
the two. Saved values are passed from call to call as full plain tensors (:func:`contents`).
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from fsdp_engine.checkpoint.writer import Writer
from fsdp_engine.optim import shard_optimizer
from fsdp_engine.strategies import LEVELS
from tests import models, reference
from tests.checkpoint.scene import (
    NUM_STEPS,
    Config,
    Everything,
    all_configs,
    contents,
    different,
    label,
    run_on,
    shard,
    shared_folder,
    step,
    trained,
    two_groups,
)
from tests.models import Transformer, token_batch
from tests.pool import RankError, Ranks, on_ranks

"""Keys: strategy, outer, shape (of the mesh; none: one process without a group); granule,
param_dtype and wrap may be left out."""


def save_each(folder: str, configs: list[Config]) -> list[dict[str, Any]]:
    """Trains and saves once for each config; returns the saved values."""
    found = []
    for config in configs:
        model, engine, optimizer = trained(config)
        extra = {"config": config, "empty": {}, 3: (1, None), "tensor": torch.arange(3)}
        save_checkpoint(f"{folder}/{label(config)}", engine, optimizer, extra)
        found.append(contents(model, engine, optimizer))
    return found if dist.get_rank() == 0 else []


def load_each(folder: str, pairs: list[tuple[Config, Config]], expected: Any) -> list[str]:
    """Loads the checkpoint of one config into another one, for each pair; what differs."""
    lines = []
    for source, target in pairs:
        torch.manual_seed(2)
        model = Everything()
        engine = shard(model, target)
        optimizer = two_groups(model, swap=True, lr=5e-2)
        if target.get("wrap"):
            shard_optimizer(optimizer)
        extra = load_checkpoint(f"{folder}/{label(source)}", engine, optimizer)
        assert extra.pop("tensor").tolist() == [0, 1, 2]
        assert extra == {"config": source, "empty": {}, 3: (1, None)}
        found = contents(model, engine, optimizer, whole=False)
        lines += [
            f"{label(source)} -> {label(target)}: {line}"
            for line in different(found, expected[label(source)])
        ]
        if "param_dtype" not in target:
            assert math.isfinite(step(model, optimizer, 9))
    return lines


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: Any) -> tuple[str, dict[str, Any]]:
    """A checkpoint of every config: the folder, and its contents by label."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    found: dict[str, Any] = {}
    for world_size, configs in all_configs().items():
        results = run_on(ranks, world_size, save_each, folder, configs)
        found.update(zip(map(label, configs), results[0], strict=True))
    return folder, found


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [0, 1, 2, 4])
def test_every_pair_loads_what_others_saved_bit_for_bit(
    ranks: Ranks, saved: tuple[str, dict[str, Any]], world_size: int
) -> None:
    folder, expected = saved
    sources = list(itertools.chain(*all_configs().values()))
    targets = [dict(config) for config in all_configs()[world_size]]
    for target in targets[1::3]:
        # Other compute weights over main weights of the same dtype.
        target["param_dtype"] = torch.float64
    # Every source is loaded at every world size, and every target loads several.
    count = max(2, math.ceil(len(sources) / len(targets)))
    turn = itertools.cycle(sources[::-1])
    pairs = [(next(turn), target) for target in targets for _ in range(count)]
    assert {label(source) for source, _ in pairs} == {label(source) for source in sources}
    results = run_on(ranks, world_size, load_each, folder, pairs, expected, timeout=280)
    assert not any(results), "\n".join(results[0][:10])


def test_the_comparison_sees_one_bit_and_one_hyperparameter(ranks: Ranks, tmp_path: Path) -> None:
    one, other = (
        run_on(ranks, world_size, save_each, str(tmp_path), all_configs()[world_size][:1])[0][0]
        for world_size in (4, 0)
    )
    assert different(one, one) == []
    assert different(one, other)  # one rank alone has seen other data
    key = next(key for key in one if key.startswith("state.") and key.endswith("exp_avg"))
    nudged = torch.nextafter(one[key], torch.tensor(torch.inf))
    assert len(different({**one, key: nudged}, one)) == 1
    key = next(key for key in one if key.startswith("group."))
    assert len(different({**one, key: {**one[key], "lr": 0.5}}, one)) == 1
    assert {type(value) for value in one.values()} == {Tensor, dict}
    assert one["model.odd.scale"].shape == one["state.odd.scale.exp_avg"].shape == ()
    assert one["state.odd.scale.step"].item() == NUM_STEPS
    assert "state.blocks.3.unused.step" not in one


# --- continuing ---

TOTAL, HALF = 4, 2
SAME: Config = {"strategy": "optim_grads_params", "outer": "optim", "shape": (2, 2)}
OTHERS: dict[int, list[Config]] = {
    4: [
        {"strategy": "no_shard", "outer": "no_shard", "shape": (4,)},
        {"strategy": "optim_grads", "outer": "no_shard", "shape": (2, 2), "wrap": True},
    ],
    2: [{"strategy": "optim_grads_params", "outer": "no_shard", "shape": (2,)}],
}
DTYPES = [None, torch.bfloat16]


def regrouped(num_ranks: int) -> reference.Data:
    """The data of four ranks, dealt to fewer."""
    data = reference.make_data(token_batch, TOTAL, 2, 4)
    per_rank = 4 // num_ranks
    return [
        [
            [
                tuple(torch.cat(each) for each in zip(*parts[i : i + per_rank], strict=True))
                for i in range(0, 4, per_rank)
            ]
            for parts in microbatches
        ]
        for microbatches in data
    ]


def run_and_save(folder: str) -> list[list[reference.Step]]:
    """Trains to the end, saving half way; all steps, for each dtype."""
    found = []
    data = regrouped(4)
    for dtype in DTYPES:
        torch.manual_seed(1)
        model = Transformer(num_blocks=2, tied=True)
        engine = shard(model, {**SAME, "param_dtype": dtype})
        make = reference.once(reference.adamw)
        steps = reference.train_sharded(model, engine, data[:HALF], make, max_norm=1.0)
        save_checkpoint(f"{folder}/{dtype}", engine, make(()), {"step": HALF})
        found.append(
            steps + reference.train_sharded(model, engine, data[HALF:], make, max_norm=1.0)
        )
    return found


def resume(
    folder: str, configs: list[Config], expected: list[list[reference.Step]], exact: bool
) -> list[str]:
    """Continues from half way; what differs from the run that was not interrupted."""
    lines = []
    data = regrouped(dist.get_world_size())
    for config, (dtype, steps) in itertools.product(configs, zip(DTYPES, expected, strict=True)):
        torch.manual_seed(3)
        model = Transformer(num_blocks=2, tied=True)
        engine = shard(model, {**config, "param_dtype": dtype})
        # Full parameters that were gathered before the loading must not be used after it.
        model(*data[0][0][dist.get_rank()])
        optimizer = reference.adamw(model.parameters())
        if config.get("wrap"):
            shard_optimizer(optimizer)
        extra = load_checkpoint(f"{folder}/{dtype}", engine, optimizer)
        found = reference.train_sharded(
            model, engine, data[extra["step"] :], lambda _, o=optimizer: o, max_norm=1.0
        )
        # In bf16 a weight may lie on the other side of a rounding boundary.
        tolerance = 0.0 if exact else 2e-5 if dtype is None else 5e-2
        lines += [
            f"{label(config)} {dtype}: {line}"
            for line in reference.differences(found, steps[HALF:], tolerance)
        ]
    return lines


def test_a_resumed_run_continues_as_if_nothing_had_happened(ranks: Ranks, tmp_path: Path) -> None:
    """Bit for bit with the same ranks and strategy, up to rounding with others."""
    expected = ranks.run(run_and_save, str(tmp_path))[0]
    exact = ranks.run(resume, str(tmp_path), [SAME], expected, True)
    assert not any(exact), "\n".join(exact[0][:10])
    for world_size, configs in OTHERS.items():
        lines = ranks.run(
            resume, str(tmp_path), configs, expected, False, world_size=world_size, timeout=120
        )
        assert not any(lines), "\n".join(lines[0][:10])


# --- contents ---


def save_over(folder: str, strategies: list[str]) -> list[tuple[list[str], int]]:
    """Saves again and again into one folder; the files and their bytes after each."""
    found = []
    for strategy in strategies:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        engine = fe.shard(model, strategy=strategy)
        save_checkpoint(folder, engine)
        dist.barrier()
        files = sorted(Path(folder).iterdir())
        found.append(([file.name for file in files], sum(file.stat().st_size for file in files)))
        dist.barrier()
    return found


def test_a_weight_is_written_once_and_the_ranks_share_the_work(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for files, num_bytes in ranks.run(save_over, str(tmp_path), list(LEVELS))[0]:
        assert len(files) == 4 + 2, files  # a file for each rank, the metadata, and the user's
        weights = 8 * 64 * 64 * 4
        assert weights < num_bytes < 1.5 * weights
    assert (tmp_path / "notes.txt").read_text() == "mine"
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata.keys() == {
        *(f"model.{i}.weight" for i in range(8)),
        "extra",
    }


def fail_to_save(folder: str, where: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    engine = fe.shard(model)
    save_checkpoint(folder, engine, extra={"which": "older"})
    before = {name: reference.full(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    original = getattr(Writer, where)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if where == "write_data" and dist.get_rank() == 0:
            return original(*args, **kwargs)  # what rank 1 has to write is missing
        raise OSError("the disk is full")

    setattr(Writer, where, fails)
    try:
        with pytest.raises(OSError, match=r"writing failed .*the disk is full"):
            save_checkpoint(folder, engine, extra={"which": "newer"})
    finally:
        setattr(Writer, where, original)
    assert load_checkpoint(folder, engine) == {"which": "older"}
    assert all(torch.equal(reference.full(p), before[n]) for n, p in model.named_parameters())
    save_checkpoint(folder, engine, extra={"which": "third"})
    dist.barrier()
    assert len(list(Path(folder).glob("*.distcp"))) == 2  # what the failure left is gone too


@pytest.mark.parametrize("where", ["write_data", "finish"])
def test_a_save_that_fails_leaves_the_older_checkpoint_whole(
    ranks: Ranks, tmp_path: Path, where: str
) -> None:
    ranks.run(fail_to_save, str(tmp_path), where, world_size=2)


def save_on_halves(folder: str) -> None:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another; each pair saves its own."""
    half = dist.get_rank() // 2
    mesh = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))["data"]][0]
    torch.manual_seed(half)
    model = Transformer(num_blocks=1)
    engine = fe.shard(model, mesh)
    expected = contents(model, engine)
    save_checkpoint(f"{folder}/{half}", engine, extra={"half": half})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert load_checkpoint(f"{folder}/{half}", engine) == {"half": half}
    assert different(contents(model, engine), expected) == []


def test_ranks_outside_the_mesh_take_no_part(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_on_halves, str(tmp_path))


def load_other_statistics(folder: str) -> None:
    model = models.Chain(models.Normalised(), models.Normalised())
    engine = fe.shard(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    own = model.blocks[0].norm.running_mean.clone()
    save_checkpoint(folder, engine)
    load_checkpoint(folder, engine)
    of_first = model.blocks[0].norm.running_mean
    assert torch.equal(of_first, own) == (dist.get_rank() == 0)
    assert model.blocks[0].norm.num_batches_tracked.item() == 1
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, of_first)
    assert torch.equal(*gathered)


def test_every_rank_loads_the_buffers_of_the_first(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(load_other_statistics, str(tmp_path), world_size=2)


# --- with other code ---


def save_transformer(folder: str, with_optimizer: bool) -> dict[str, Any]:
    model = Transformer(num_blocks=1, tied=True)
    engine = fe.shard(model)
    optimizer = two_groups(model)
    for number in range(NUM_STEPS):
        model(*token_batch(2, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, engine, optimizer if with_optimizer else None)
    return contents(model, engine, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:You are using .torch.load.")
def test_an_unsharded_model_and_optimizer_load_what_was_saved(ranks: Ranks, tmp_path: Path) -> None:
    """By torch.distributed.checkpoint alone, in a process without a process group."""
    expected = ranks.run(save_transformer, str(tmp_path), True, world_size=2)[0]
    torch.manual_seed(5)
    model = Transformer(num_blocks=1, tied=True)
    weights: dict[str, Any] = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=tmp_path)
    optimizer = two_groups(model, lr=0.5)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    found = contents(model, None, optimizer)  # type: ignore[arg-type]
    assert different(found, expected) == []


def load_unsharded(folder: str, expected: dict[str, Any], with_optimizer: bool) -> None:
    model = Transformer(num_blocks=1, tied=True)
    engine = fe.shard(model)
    optimizer = two_groups(model, swap=True, lr=0.5) if with_optimizer else None
    assert load_checkpoint(folder, engine, optimizer) == {}
    assert different(contents(model, engine, optimizer), expected) == []
    if not with_optimizer:
        with pytest.raises(ValueError, match=r"optimizer\.param_groups.*found none"):
            load_checkpoint(folder, engine, two_groups(model))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("with_optimizer", [False, True], ids=["weights", "optimizer"])
def test_what_an_unsharded_model_saved_is_loaded(
    ranks: Ranks, tmp_path: Path, with_optimizer: bool
) -> None:
    model = Transformer(num_blocks=1, tied=True)
    optimizer = two_groups(model)
    model(*token_batch(2, 1)).backward()
    optimizer.step()
    state: dict[str, Any] = {"model": model.state_dict(), "epoch": 3}
    if with_optimizer:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=tmp_path)
    expected = contents(model, None, optimizer if with_optimizer else None)  # type: ignore[arg-type]
    ranks.run(load_unsharded, str(tmp_path), expected, with_optimizer, world_size=2)


# --- what does not fit ---


def prepare(change: Callable[[Transformer], None] = lambda model: None) -> Any:
    torch.manual_seed(4)
    model = Transformer(num_blocks=2)
    change(model)
    return model, fe.shard(model)


def save_default(folder: str) -> None:
    torch.manual_seed(1)
    model = Transformer(num_blocks=2)
    engine = fe.shard(model)
    optimizer = two_groups(model)
    model(*token_batch(2, 1)).backward()
    optimizer.step()
    save_checkpoint(folder, engine, optimizer)


@pytest.fixture(scope="module")
def default(ranks: Ranks, tmp_path_factory: Any) -> str:
    """A checkpoint of a Transformer of two blocks and its AdamW."""
    folder = str(tmp_path_factory.mktemp("default") / "checkpoint")
    ranks.run(save_default, folder, world_size=2)
    return folder


def refuse(
    folder: str,
    change: Callable[[Transformer], None],
    make: Callable[[nn.Module], Any],
    error: type[Exception],
    parts: list[str],
) -> str:
    """Loading raises ``error`` with all ``parts``, and changes nothing."""
    model, engine = prepare(change)
    optimizer = make(model)
    before = contents(model, engine, optimizer)
    with pytest.raises(error) as caught:
        load_checkpoint(folder, engine, optimizer)
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part} is not in: {message}"
    assert different(contents(model, engine, optimizer), before) == []
    return message


def keep(model: Transformer) -> None:
    """Changes nothing."""


def rebuild(model: Transformer) -> None:
    """Something missing, something else, two shapes changed, a dtype narrowed."""
    del model.blocks[1].out
    model.blocks[0].extra = nn.Linear(2, 3)
    model.head = nn.Linear(models.DIM, models.VOCABULARY + 1, bias=False)
    model.norm.weight = nn.Parameter(torch.ones(models.DIM, 1))
    model.norm.bias = nn.Parameter(torch.zeros(models.DIM, dtype=torch.bfloat16))
    model.norm.bias.requires_grad_(False)


def test_everything_that_does_not_fit_is_listed_at_once(ranks: Ranks, default: str) -> None:
    parts = [
        default,
        "found 19 that differ",
        "missing model.blocks.0.extra.weight: expected shape (3, 2), float32; found nothing",
        "missing model.blocks.0.extra.bias: expected shape (3,), float32; found nothing",
        "unexpected model.blocks.1.out.weight: expected nothing; found shape (12, 12), float32",
        "unexpected model.blocks.1.out.bias",
        "model.head.weight: expected shape (24, 12), float32; found shape (23, 12), float32",
        "model.norm.weight: expected shape (12, 1), float32; found shape (12,), float32",
        "model.norm.bias: expected torch.bfloat16, or a dtype that it holds exactly; found "
        "torch.float32",
        "optimizer.state.head.weight.exp_avg: expected shape (24, 12), float32; found shape "
        "(23, 12), float32",
        "optimizer.state.head.weight.exp_avg_sq",
        "optimizer.state.norm.weight.exp_avg: expected shape (12, 1), float32; found shape (12,)",
        "missing optimizer.state.blocks.0.extra.bias",
        "unexpected optimizer.state.blocks.1.out.bias",
        "unexpected optimizer.state.norm.bias",
        "one betas for all of group 0; found (0.9, 0.999) of embedding.weight and (0.8, 0.95) of "
        "norm.weight",
    ]
    messages = ranks.run(refuse, default, rebuild, two_groups, ValueError, parts, world_size=2)
    assert messages[0] == messages[1]
    assert len(messages[0].splitlines()) == 20, messages[0]


def no_optimizer(model: nn.Module) -> None:
    return None


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def head_only(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.head.parameters(), lr=0.1)


def of_another_model(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(3, 5).parameters(), lr=0.1)


def no_optimizer_at_all(model: Any) -> Any:
    return 3


OTHER_OPTIMIZERS: list[tuple[Callable[[Any], Any], type[Exception], list[str]]] = [
    (sgd, ValueError, ["expected the state of SGD; found that of AdamW", "momentum"]),
    (one_group, ValueError, ["expected one", "of group 0", "embedding.weight"]),
    (head_only, ValueError, ["unexpected optimizer.state.blocks.0.norm1.bias"]),
]


@pytest.mark.parametrize(("make", "error", "parts"), OTHER_OPTIMIZERS)
def test_another_optimizer_is_refused(
    ranks: Ranks,
    default: str,
    make: Callable[[Any], Any],
    error: type[Exception],
    parts: list[str],
) -> None:
    ranks.run(refuse, default, keep, make, error, parts, world_size=2)


def refuse_strangers(folder: str) -> None:
    model, engine = prepare()
    for make, error, part in (
        (of_another_model, ValueError, r"parameters of the sharded model.*group 0.*\(5, 3\)"),
        (no_optimizer_at_all, TypeError, "expected a torch.optim.Optimizer or None; found 3"),
    ):
        with pytest.raises(error, match=part):
            load_checkpoint(folder, engine, make(model))
        with pytest.raises(error, match=part):
            save_checkpoint(f"{folder}-not", engine, make(model))
    assert not Path(f"{folder}-not").exists()


def test_an_optimizer_of_something_else_is_refused(ranks: Ranks, default: str) -> None:
    ranks.run(refuse_strangers, default, world_size=2)


class MyAdamW(torch.optim.AdamW):
    """A user's own class."""


def exchange_kinds(folder: str) -> None:
    """A subclass loads its base's state and the reverse; SGD takes no AdamW's and the reverse."""
    model, engine = prepare()
    first, other = sgd(model), MyAdamW(model.parameters(), lr=0.3)
    save_checkpoint(f"{folder}/sgd", engine, first)
    with pytest.raises(ValueError, match="expected the state of MyAdamW; found that of SGD"):
        load_checkpoint(f"{folder}/sgd", engine, other)
    save_checkpoint(f"{folder}/mine", engine, other)
    base = one_group(model)
    load_checkpoint(f"{folder}/mine", engine, base)
    assert base.param_groups[0]["lr"] == 0.3
    save_checkpoint(f"{folder}/base", engine, base)
    load_checkpoint(f"{folder}/base", engine, other)


def test_a_subclass_takes_the_state_of_its_base(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(exchange_kinds, str(tmp_path), world_size=2)


def go_back(folder: str) -> None:
    """Loading a checkpoint from before the first step forgets the steps since."""
    model, engine = prepare()
    optimizer = two_groups(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    before = contents(model, engine, optimizer)
    save_checkpoint(folder, engine, optimizer)
    model(*token_batch(2, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state
    optimizer.param_groups[0]["lr"] = 0.5
    load_checkpoint(folder, engine, optimizer)
    assert not any(optimizer.state.values())
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert different(contents(model, engine, optimizer), before) == []


def test_a_checkpoint_from_before_the_first_step_has_no_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(go_back, str(tmp_path), world_size=2)


class HalfMomentum(torch.optim.Optimizer):
    """Keeps its momentum in bf16, a count as an int, and nothing for later."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"momentum": torch.zeros_like(param).bfloat16(), "count": 0}
                    state |= {"later": None}
                state["count"] += 1
                state["momentum"].add_(param.grad)
                param.add_(state["momentum"].float(), alpha=-group["lr"])


def round_trip_own_optimizer(folder: str) -> None:
    for strategy in LEVELS:
        model = models.odd_model()
        engine = fe.shard(model, strategy=strategy)
        optimizer = HalfMomentum(model.parameters())
        step(model, optimizer, 1, width=7)
        state = optimizer.state[model.blocks[0].scale]
        expected = reference.full(state["momentum"])
        save_checkpoint(folder, engine, optimizer)
        state["momentum"].zero_()
        state["count"] = 7
        load_checkpoint(folder, engine, optimizer)
        state = optimizer.state[model.blocks[0].scale]
        assert state.keys() == {"momentum", "count", "later"}
        assert (state["count"], state["later"]) == (1, None)
        assert state["momentum"].dtype == torch.bfloat16
        assert torch.equal(reference.full(state["momentum"]), expected)
        state["list"] = [1]
        with pytest.raises(ValueError, match=r"found a list in 'list'"):
            save_checkpoint(folder, engine, optimizer)


def test_state_keeps_its_dtype_and_may_be_numbers(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(round_trip_own_optimizer, str(tmp_path), world_size=2)


@on_ranks(2)
def test_a_0d_parameter_alone_keeps_its_step_apart_from_its_state() -> None:
    """Nothing but the name tells them apart there. The folder lives on rank 0's disk, as ours."""
    folder = shared_folder()
    model = OneNumber()
    engine = fe.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        model(torch.tensor(float(number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = contents(model, engine, optimizer)
    save_checkpoint(folder, engine, optimizer)
    other = torch.optim.AdamW(model.parameters(), lr=0.7)
    load_checkpoint(folder, engine, other)
    assert different(contents(model, engine, other), before) == []
    state = other.state[model.number]
    assert isinstance(state["exp_avg"], fe.FlatDTensor)
    assert not isinstance(state["step"], fe.FlatDTensor)


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.number * x).sin()


def refuse_paths(folder: str) -> None:
    model, engine = prepare()
    before = contents(model, engine)
    missing, empty, file = (f"{folder}/{name}" for name in ("missing", "empty", "file"))
    with pytest.raises(FileNotFoundError, match=f"{missing}; found nothing"):
        load_checkpoint(missing, engine)
    with pytest.raises(FileNotFoundError, match=f"{empty}; found a folder without .metadata"):
        load_checkpoint(Path(empty), engine)
    with pytest.raises(NotADirectoryError, match=file):
        load_checkpoint(file, engine)
    with pytest.raises(NotADirectoryError, match=file):
        save_checkpoint(file, engine)
    with pytest.raises(TypeError, match="extra: expected a dict or None; found list"):
        save_checkpoint(missing, engine, extra=[1])  # type: ignore[arg-type]
    with engine.unsharded(), pytest.raises(RuntimeError, match=r"engine\.unsharded\(\)"):
        save_checkpoint(missing, engine)
    assert different(contents(model, engine), before) == []
    assert not Path(missing).exists()


def test_bad_paths_and_bad_moments_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no checkpoint")
    ranks.run(refuse_paths, str(tmp_path), world_size=2)
    assert (tmp_path / "file").read_text() == "no checkpoint"


def differ(folder: str) -> str:
    """Rank 1 makes a mistake; all are told."""
    _, engine = prepare()
    rank = dist.get_rank()
    extra = {"hook": lambda: 1} if rank == 1 else {}
    own = (pickle.PicklingError, AttributeError) if rank == 1 else (RuntimeError,)
    with pytest.raises(own) as caught:
        save_checkpoint(folder, engine, extra=extra)
    assert not Path(folder).exists()
    with pytest.raises(FileNotFoundError):
        load_checkpoint(f"{folder}-{rank}" if rank else f"{folder}-default", engine)
    return str(caught.value)


def test_a_mistake_on_one_rank_is_raised_on_all(ranks: Ranks, default: str, tmp_path: Path) -> None:
    (tmp_path / "new-default").symlink_to(default)
    messages = ranks.run(differ, str(tmp_path / "new"), world_size=2)
    assert "save_checkpoint() failed on data-parallel rank 1" in messages[0]


def read_damaged(folder: str) -> None:
    _, engine = prepare()
    load_checkpoint(folder, engine)


def test_a_damaged_file_is_reported_on_every_rank(
    ranks: Ranks, default: str, tmp_path: Path
) -> None:
    for file in Path(default).iterdir():
        content = file.read_bytes()
        kept = len(content) // 3 if file.suffix == ".distcp" else None
        (tmp_path / file.name).write_bytes(content[:kept])
    with pytest.raises(RankError) as caught:
        ranks.run(read_damaged, str(tmp_path), world_size=2)
    assert set(caught.value.failures) == {0, 1}
    for text in caught.value.failures.values():
        assert "DamagedError" in text or "ValueError: load_checkpoint() failed on" in text
        assert ".distcp: expected" in text
