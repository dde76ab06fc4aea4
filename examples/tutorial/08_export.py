"""Step 8: export the averages of step 7, and use them without the engine."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fsdp_engine as fe

SUMS = [f"{a} + {b} = {a + b}\n" for a in range(100) for b in range(100)]
random.Random(0).shuffle(SUMS)
TEXT = torch.tensor(list("".join(SUMS).encode()))  # a token is a byte
HELD_OUT = TEXT[-10_000:]
LENGTH = 32


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
ema = fe.EMA(engine, decay=0.9)
checkpointer = fe.Checkpointer("runs/tutorial_ema", engine, optimizer, extra={"ema": ema})
checkpointer.load()
checkpointer.close()
with ema.swapped():  # the model has the averages
    fe.export_safetensors(engine, "runs/export")  # writes model.safetensors
    state = engine.full_state_dict(rank0_only=True)
if engine.mesh.rank == 0:
    torch.save(state, "runs/export/model.pt")
    plain = GPT()  # without the engine
    plain.load_state_dict(torch.load("runs/export/model.pt"))
    with torch.no_grad():
        loss = plain.eval()(batch(HELD_OUT, 0))
    print(f"held-out loss of the exported weights {loss.item():.3f}")
dist.destroy_process_group()
