"""Trains a small GPT with DistributedDataParallel; ``with_fsdp_engine.py`` is the same program with
fsdp_engine, and ``diff with_ddp.py with_fsdp_engine.py`` shows what changes.

    torchrun --nproc-per-node 2 examples/migration/with_ddp.py --steps 40

It has what most training scripts have: gradient accumulation, clipping, a schedule of the learning
rate, an exponential moving average of the weights, an evaluation by which the best weights are
kept, and a resume.
"""

import argparse
import contextlib
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


def batch(text: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)  # a step has the same rows in every run
    starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--folder", default="runs/ddp")
args = parser.parse_args()
os.makedirs(args.folder, exist_ok=True)

torch.manual_seed(0)
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(GPT(args.width).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

step, best = 0, float("inf")
if os.path.exists(f"{args.folder}/last.pt"):
    state = torch.load(f"{args.folder}/last.pt", map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    ema.load_state_dict(state["ema"])
    step, best = state["step"], state["best"]
while step < args.steps:
    step += 1
    for part, rows in enumerate(batch(TRAIN, step)[rank::size].chunk(PARTS)):
        with contextlib.nullcontext() if part == PARTS - 1 else model.no_sync():
            loss = model(rows.to(device)) / PARTS
            loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    ema.update_parameters(model.module)
    if step % 10:
        continue

    ema.eval()
    with torch.no_grad():
        held_out = ema(batch(HELD_OUT, 0)[rank::size].to(device)) / size
    dist.all_reduce(held_out)
    is_best = held_out.item() < best
    best = min(best, held_out.item())
    if rank == 0:
        print(f"step {step}  norm {norm:.4f}  held-out loss {held_out:.4f}")
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "ema": ema.state_dict(),
            "step": step,
            "best": best,
        }
        torch.save(state, f"{args.folder}/last.pt")
        if is_best:
            torch.save(ema.module.state_dict(), f"{args.folder}/best.pt")
if rank == 0:
    print(f"best held-out loss {best:.4f}")
dist.destroy_process_group()
