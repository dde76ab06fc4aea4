"""Step 7: average the weights (EMA), and evaluate trained and averaged weights."""

import contextlib
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fsdp_engine as fe

SUMS = [f"{a} + {b} = {a + b}\n" for a in range(100) for b in range(100)]
random.Random(0).shuffle(SUMS)
TEXT = torch.tensor(list("".join(SUMS).encode()))  # a token is a byte
TRAIN, HELD_OUT = TEXT[:-10_000], TEXT[-10_000:]
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
LENGTH, PARTS = 32, 4


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        ]
        self.embedding = nn.Embedding(128, 64)
        self.positions = nn.Parameter(torch.zeros(LENGTH, 64))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(64, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, rows.device)
        x = self.embedding(rows[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), rows[:, 1:].flatten())


def batch(text: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)  # a step has the same 16 rows in every run
    starts = torch.randint(len(text) - LENGTH, (16, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


torch.manual_seed(0)
model = GPT()
policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
engine = fe.shard(model, strategy="optim_grads_params", mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after shard()
rank, size, device = engine.mesh.rank, engine.mesh.size, engine.mesh.device
ema = fe.EMA(engine, decay=0.9)
checkpointer = fe.Checkpointer("runs/tutorial_ema", engine, optimizer, extra={"ema": ema})
first = checkpointer.load().step if checkpointer.steps() else 0
if rank == 0:
    print(f"begin after step {first}")
for step in range(first + 1, STEPS + 1):
    mean = torch.zeros((), device=device)
    for part in range(PARTS):
        with contextlib.nullcontext() if part == PARTS - 1 else engine.no_sync():
            loss = model(batch(TRAIN, step)[rank::size].chunk(PARTS)[part].to(device)) / PARTS
            loss.backward()
        mean += loss.detach() / size
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    ema.update()
    optimizer.zero_grad()
    dist.all_reduce(mean)
    if rank == 0 and step % 10 == 0:
        print(f"step {step}  loss {mean.item():.3f}")
    if step % 10 == 0:
        checkpointer.save(step)
checkpointer.close()
model.eval()
for name, weights in (("trained", contextlib.nullcontext()), ("averaged", ema.swapped())):
    with torch.no_grad(), weights:
        mean = model(batch(HELD_OUT, 0)[rank::size].to(device)) / size
    dist.all_reduce(mean)
    if rank == 0:
        print(f"held-out loss of the {name} weights {mean.item():.3f}")
dist.destroy_process_group()
