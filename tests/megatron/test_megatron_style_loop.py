"""The example of tensor x data parallelism: its layers, and small runs of the whole job."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from corpus import Batch, BatchPlan, read_corpus
from gpt import GPT, GPTConfig
from megatron_style_loop import only_whole_lines
from tensor_parallel import IGNORED, TensorParallelGPT
from tests.pool import on_ranks
from tests.processes import ROOT, printed, torchrun

pytestmark = pytest.mark.thorough

TINY = GPTConfig(sequence_length=32, num_layers=2, width=32, num_heads=4)
# The dimension along which tensor ranks share a parameter; other parameters are replicated.
CUTS = {"qkv.weight": 0, "qkv.bias": 0, "up.weight": 0, "up.bias": 0}
CUTS |= {"out.weight": 1, "down.weight": 1}


def own_part(name: str, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor rank's shard of a parameter or of its gradient."""
    layer = name.split(".", 3)[-1] if name.startswith("blocks") else name
    if layer not in CUTS:
        return whole
    # Each rank has some heads of query, key and value.
    stacked = whole.chunk(3 if layer.startswith("qkv") else 1)
    return torch.cat([each.chunk(group.size(), CUTS[layer])[group.rank()] for each in stacked])


@on_ranks(4)
def test_loss_and_gradients_are_those_of_the_plain_model() -> None:
    for size in (1, 2, 4):
        groups = [dist.new_group(list(range(i, i + size))) for i in range(0, 4, size)]
        group = groups[dist.get_rank() // size]
        torch.manual_seed(0)
        plain = GPT(TINY)
        torch.manual_seed(0)
        model = TensorParallelGPT(TINY, group)
        torch.manual_seed(1)
        batch = torch.randint(256, (3, 33))
        tokens, targets = batch[:, :-1], batch[:, 1:].clone()
        targets[0, 5:] = targets[2, 20:] = IGNORED

        logits = plain(tokens).logits
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        expected.backward()
        loss = model(tokens, targets)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        torch.testing.assert_close(total, expected.detach())

        wholes = dict(plain.named_parameters())
        assert dict(model.named_parameters()).keys() == wholes.keys()
        for name, param in model.named_parameters():
            whole, grad = wholes[name], param.grad
            part = own_part(name, whole.detach(), group)
            torch.testing.assert_close(param.detach(), part, rtol=0, atol=0, msg=name)
            if getattr(param, "sequence_parallel", False):
                assert part.shape == whole.shape
                dist.all_reduce(grad, group=group)
            part = own_part(name, whole.grad, group)
            # Gradients of keys' biases are rounding errors only.
            torch.testing.assert_close(grad, part, rtol=1e-4, atol=1e-4, msg=name)


@on_ranks(3)
def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads: expected a multiple of the 3 tensor ranks"):
        TensorParallelGPT(TINY, dist.group.WORLD)


def test_tokens_after_the_last_newline_of_a_sequence_are_not_counted() -> None:
    rows = [b"ab\ncd", b"abcd\n", b"\nabcd", b"abcde"]
    targets = torch.tensor([list(row) for row in rows])
    kept = only_whole_lines(Batch(targets.clone(), targets)).targets
    assert (kept != IGNORED).sum(dim=1).tolist() == [3, 5, 1, 5]
    assert torch.equal(kept[0, :3], targets[0, :3])


SIZES = "--layers 2 --width 32 --sequence-length 32 --steps 8 --batch-size 4 --microbatches 3"
ADAMW = "--optimizer adamw --lr 0.01"
# SGD shows factors that AdamW would hide.
WEIGHTED = "--optimizer sgd --lr 0.1 --token-weighted"


def train(folder: Path, out: str, arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Runs the job on the texts in ``folder`` to its end; returns what it printed."""
    script = str(ROOT / "examples" / "megatron_style_loop.py")
    paths = ("--data", str(folder / "texts"), "--out", str(folder / out))
    return printed(*launcher, script, *paths, *f"{SIZES} {arguments}".split())


def train_on_four(folder: Path, out: str, arguments: str) -> str:
    return train(folder, out, f"--tensor-parallel 2 {arguments}", torchrun(4))


def losses(folder: Path, out: str) -> list[float]:
    with (folder / out / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row["loss"]) for row in rows]


def test_a_stopped_and_resumed_run_on_four_ranks_has_the_losses_of_one_process(
    texts: Path,
) -> None:
    train(texts, "one", f"{ADAMW} --strategy no_shard")
    overlapped = f"{ADAMW} --strategy optim --overlap --bucket-size 4000"
    train_on_four(texts, "four", f"{overlapped} --save-every 2 --stop-at 5")
    stopped = losses(texts, "four")
    # As if the run had been killed after one group of tensor ranks had saved step 4.
    checkpoints = texts / "four" / "checkpoints"
    shutil.rmtree(checkpoints / "tp1" / "step-00000004")
    text = train_on_four(texts, "four", overlapped)
    assert "resumed after step 2 from" in text
    assert len(stopped) == 5
    assert losses(texts, "four")[:5] == stopped
    assert losses(texts, "four") == pytest.approx(losses(texts, "one"), rel=1e-5)
    assert len(losses(texts, "one")) == 8
    assert stopped[0] - stopped[-1] > 0.5
    for rank in ("tp0", "tp1"):
        assert (checkpoints / rank / "step-00000008").exists()


def test_token_weighted_losses_with_sharded_parameters_are_those_of_one_process(
    texts: Path,
) -> None:
    plan = BatchPlan(batch_size=4, num_microbatches=3, num_ranks=2, sequence_length=32)
    text = read_corpus(texts / "texts").train
    counts = {
        (only_whole_lines(plan.train_batch(text, 0, i, rank)).targets != IGNORED).sum().item()
        for i in range(3)
        for rank in range(2)
    }
    assert len(counts) > 2, "token counts must differ between ranks and microbatches"
    train(texts, "one", WEIGHTED)
    shown = train_on_four(texts, "four", f"{WEIGHTED} --strategy optim_grads_params")
    assert "ranks: 2 data x 2 tensor" in shown
    assert losses(texts, "four") == pytest.approx(losses(texts, "one"), rel=1e-5)
    assert len(losses(texts, "one")) == 8
