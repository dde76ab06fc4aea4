"""Trains a small GPT with fsdp_engine; ``with_ddp.py`` is the same program with
DistributedDataParallel, and ``diff with_ddp.py with_fsdp_engine.py`` shows what changes.

    torchrun --nproc-per-node 2 examples/migration/with_fsdp_engine.py --steps 40

It has what most training scripts have: gradient accumulation, clipping, a schedule of the learning
rate, an exponential moving average of the weights, an evaluation by which the best weights are
kept, and a resume.
"""

import argparse
import contextlib
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fsdp_engine as fe

SUMS = [f"{a} + {b} = {a + b}\n" for a in range(100) for b in range(100)]
random.Random(0).shuffle(SUMS)
TEXT = torch.tensor(list("".join(SUMS).encode()))  # a token is a byte
TRAIN, HELD_OUT = TEXT[:-10_000], TEXT[-10_000:]
LENGTH, ROWS, PARTS = 32, 24, 2  # 24 rows in 2 parts: ranks must divide 12


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        ]
        self.embedding = nn.Embedding(128, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, rows.device)
        x = self.embedding(rows[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), rows[:, 1:].flatten())


class Best:
    """Holds the lowest held-out loss, so that checkpoints contain it."""

    loss = float("inf")

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss = state["loss"]


def batch(text: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)  # a step has the same rows in every run
    starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--folder", default="runs/fsdp_engine")
args = parser.parse_args()

torch.manual_seed(0)
model = GPT(args.width)
engine = fe.shard(model, strategy="optim_grads_params")
rank, size, device = engine.mesh.rank, engine.mesh.size, engine.mesh.device
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
ema = fe.EMA(engine, decay=0.9, copy_first=True)
best = Best()
extra = {"scheduler": scheduler, "ema": ema, "best": best}
checkpointer = fe.Checkpointer(f"{args.folder}/last", engine, optimizer, extra=extra, keep=1)

step = checkpointer.load().step if checkpointer.steps() else 0
while step < args.steps:
    step += 1
    for part, rows in enumerate(batch(TRAIN, step)[rank::size].chunk(PARTS)):
        with contextlib.nullcontext() if part == PARTS - 1 else engine.no_sync():
            loss = model(rows.to(device)) / PARTS
            loss.backward()
    norm = engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    ema.update()
    if step % 10:
        continue

    model.eval()
    with torch.no_grad(), ema.swapped():  # the model has the averages
        held_out = model(batch(HELD_OUT, 0)[rank::size].to(device)) / size
        dist.all_reduce(held_out)
        if held_out.item() < best.loss:  # the same on all ranks
            best.loss = held_out.item()
            fe.export_safetensors(engine, f"{args.folder}/best")
    model.train()
    checkpointer.save(step)
    if rank == 0:
        print(f"step {step}  norm {norm:.4f}  held-out loss {held_out:.4f}")
checkpointer.close()
if rank == 0:
    print(f"best held-out loss {best.loss:.4f}")
dist.destroy_process_group()
