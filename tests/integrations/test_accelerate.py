"""A training loop with accelerate over the engine, compared with DDP on the same ranks."""

from __future__ import annotations

import itertools
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_engine as fe
from fsdp_engine.engine import engine_of
from tests.checkpoint.scene import Values, raises_each
from tests.integrations.trainer_scene import (
    FULL,
    LEVELS,
    as_launched,
    llama,
    num_ranks,
    rows,
    shared_folder,
)
from tests.matrices import thorough_but
from tests.pool import Ranks, on_few_ranks, on_ranks


def accelerator(kind: Any, shard: dict[str, Any] | None = None, **given: Any) -> Any:
    as_launched()
    from accelerate import Accelerator

    from fsdp_engine.integrations.accelerate import FSDPEngineAccelerator

    given = {"cpu": True, "gradient_accumulation_steps": 2, **given}
    if kind == "plain":
        return Accelerator(**given)
    shard = {"min_unit_size": 0} if shard is None else shard
    return FSDPEngineAccelerator(shard={"strategy": kind, **shard}, **given)


class Loop:
    """A loop as in accelerate's documentation: everything is built before it is prepared."""

    def __init__(self, kind: str, seed: int = 0, **given: Any) -> None:
        self.accelerator = accelerator(kind, **given)
        model = llama(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        size = 4 // num_ranks()
        torch.manual_seed(7)
        loader = torch.utils.data.DataLoader(rows(32), batch_size=size, shuffle=True)
        held_out = torch.utils.data.DataLoader(rows(7, seed=2), batch_size=3)
        prepared = self.accelerator.prepare(optimizer, model, loader, held_out, scheduler)
        self.optimizer, self.model, self.loader, self.held_out, self.scheduler = prepared

    def train(
        self, epoch: int = 0, first: int = 0, last: int | None = None
    ) -> list[tuple[float, float]]:
        """Loss over all ranks and gradient norm of each step, in an epoch or in batches ``first``
        to ``last`` of it, as in accelerate's example of checkpoints."""
        figures, losses = [], []
        self.loader.set_epoch(epoch)
        loader = self.accelerator.skip_first_batches(self.loader, first) if first else self.loader
        for batch in itertools.islice(loader, None if last is None else last - first):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                losses.append(self.accelerator.reduce(loss.detach(), "mean"))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    assert type(norm) is torch.Tensor
                    figures.append((float(sum(losses)) / len(losses), float(norm)))
                    losses.clear()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return figures

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        self.model.eval()
        found = []
        for batch in self.held_out:
            logits = self.model(**batch).logits
            found.append(self.accelerator.gather_for_metrics(logits))
        self.model.train()
        return torch.cat(found)


@cache
def plain_run(size: int) -> tuple[list[tuple[float, float]], torch.Tensor]:
    plain = Loop("plain")
    return plain.train(), plain.evaluate()


@pytest.mark.parametrize("level", thorough_but([FULL], LEVELS))
@on_few_ranks
def test_a_loop_is_that_of_ddp(level: str) -> None:
    expected, logits = plain_run(num_ranks())
    ours = Loop(level)
    torch.testing.assert_close(ours.train(), expected, rtol=1e-4, atol=1e-5)
    found = ours.evaluate()
    assert len(found) == 7
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_a_loop_in_bf16_and_its_policy() -> None:
    expected = Loop("plain", mixed_precision="bf16").train()
    ours = Loop(FULL, mixed_precision="bf16")
    torch.testing.assert_close(ours.train(), expected, rtol=3e-2, atol=3e-2)
    batch = next(iter(ours.held_out))
    assert ours.model(**batch).logits.dtype == torch.float32


@on_ranks(1)
def test_a_plan_keeps_its_dtypes_in_bf16() -> None:
    """``mixed_precision`` determines the dtypes only where neither the plan nor the user does."""
    planned = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    class Plan:
        def arguments(self, mesh: Any, world_size: int, given: Any) -> dict[str, Any]:
            known = {name: each for name, each in given.items() if each is not None}
            return {"mp_policy": planned, **known, "strategy": FULL, "outer_strategy": None}

    own = fe.MixedPrecisionPolicy()
    for options, expected in (({}, planned), ({"mp_policy": own}, own)):
        given = accelerator(Plan(), options, mixed_precision="bf16")
        assert engine_of(given.prepare(llama())).policy == expected


@on_ranks(2)
def test_a_part_of_the_parameters_is_clipped_by_its_own_norm() -> None:
    norms = []
    for kind in ("plain", FULL):
        loop = Loop(kind, gradient_accumulation_steps=1)
        loop.accelerator.backward(loop.model(**next(iter(loop.loader))).loss)
        part = [p for name, p in loop.model.named_parameters() if "mlp" in name]
        norms.append(loop.accelerator.clip_grad_norm_(part, 1e-3))
        norms.append(loop.accelerator.clip_grad_norm_(loop.model.parameters(), float("inf")))
    assert all(type(norm) is torch.Tensor for norm in norms)
    torch.testing.assert_close(norms[:2], norms[2:], rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_the_weights_are_those_of_the_usual_idiom() -> None:
    from transformers import AutoModelForCausalLM

    folder = shared_folder()
    loop = Loop(FULL)
    loop.train()
    state = loop.accelerator.get_state_dict(loop.model)
    whole = loop.accelerator.unwrap_model(loop.model)
    first = loop.accelerator.is_main_process
    assert bool(state) == first
    whole.save_pretrained(
        folder, is_main_process=first, save_function=loop.accelerator.save, state_dict=state
    )
    loop.accelerator.save_model(loop.model, folder / "plain")
    loop.accelerator.wait_for_everyone()
    expected = engine_of(loop.model).full_state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(value, expected[name])
    assert (folder / "plain" / "model.safetensors").is_file()


def held(loop: Loop) -> dict[str, Any]:
    state = loop.optimizer.optimizer.state
    names = {param: name for name, param in loop.model.named_parameters()}
    means = {names[param]: each["exp_avg"].full_tensor() for param, each in state.items()}
    rates = [group["lr"] for group in loop.optimizer.param_groups]
    weights = engine_of(loop.model).full_state_dict()
    return {"weights": weights, "means": means, "rates": rates}


def loop_and_counter(level: str, seed: int) -> tuple[Loop, Values]:
    from accelerate.utils import DataLoaderConfiguration

    # Only this sampler's order is saved in checkpoints.
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    loop, counter = Loop(level, seed, dataloader_config=loading), Values(0)
    loop.accelerator.register_for_checkpointing(counter)
    return loop, counter


def train_and_save(folder: str, level: str) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    loop, counter = loop_and_counter(level, seed=0)
    loop.train()
    loop.train(epoch=1, last=4)
    counter.value = 5
    assert loop.accelerator.save_state(f"{folder}/state") == f"{folder}/state"
    loop.accelerator.save_state(f"{folder}/state")  # overwrites the same folder
    return held(loop), loop.train(epoch=1, first=4)


def resume(folder: str, level: str) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    loop, counter = loop_and_counter(level, seed=9)
    loop.accelerator.load_state(f"{folder}/state")
    assert counter.value == 5
    return held(loop), loop.train(epoch=1, first=4)


def test_a_state_saved_within_an_epoch_is_loaded_on_any_ranks(ranks: Ranks, tmp_path: Path) -> None:
    saved, expected = ranks.run(train_and_save, str(tmp_path), FULL, world_size=2)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    for world_size in (2, 1):
        loaded, found = ranks.run(resume, str(tmp_path), "optim", world_size=world_size)[0]
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
        if world_size == 2:  # accelerate's schedulers step once for each rank
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_automatic_names_and_their_limit() -> None:
    from accelerate.utils import ProjectConfiguration

    folder = shared_folder()
    project = ProjectConfiguration(
        project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2
    )
    loop = Loop(FULL, project_config=project)
    for _ in range(3):
        loop.accelerator.save_state()
    loop.accelerator.wait_for_everyone()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    loop.accelerator.load_state()
    if loop.accelerator.is_main_process:
        shutil.rmtree(folder / "checkpoints" / "checkpoint_2" / "fsdp_engine")
    loop.accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match=r"input_dir: expected .*; found .*checkpoint_2"):
        loop.accelerator.load_state()


@pytest.mark.parametrize("level", ["no_shard", FULL])
@on_ranks(2)
def test_what_does_not_fit_together_is_refused_on_all_ranks(level: str) -> None:
    from accelerate.local_sgd import LocalSGD

    raises_each(
        (ValueError, "mixed_precision: ", partial(accelerator, FULL, mixed_precision="fp16")),
        (ValueError, "num_processes: expected the 2", partial(accelerator, FULL, cpu=False)),
        (ValueError, "strategy: expected", partial(Loop, "level 3")),
    )
    loop = Loop(level)
    local = LocalSGD(accelerator=loop.accelerator, model=loop.model, local_sgd_steps=2)
    uneven = partial(loop.accelerator.join_uneven_inputs, [loop.model])
    raises_each(
        (ValueError, "of a sharded model", partial(loop.accelerator.prepare, loop.model.model)),
        (NotImplementedError, "LocalSGD makes.* use LocalSGD with", local.__enter__),
        (ValueError, r"Iterate over engine\.even_batches", uneven),
    )
    switched_off = LocalSGD(loop.accelerator, loop.model, local_sgd_steps=2, enabled=False)
    with switched_off as each:
        found = loop.train()
        each.step()
    torch.testing.assert_close(found, plain_run(2)[0], rtol=1e-4, atol=1e-5)
