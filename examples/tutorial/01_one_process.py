"""Step 1: train a small GPT in one process, without the engine."""

import random

import torch
from torch import nn
from torch.nn import functional as F

SUMS = [f"{a} + {b} = {a + b}\n" for a in range(100) for b in range(100)]
random.Random(0).shuffle(SUMS)
TEXT = torch.tensor(list("".join(SUMS).encode()))  # a token is a byte
STEPS, LENGTH = 40, 32


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
        return F.cross_entropy(self.head(x).flatten(0, 1), rows[:, 1:].flatten())


def batch(text: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)  # a step has the same 16 rows in every run
    starts = torch.randint(len(text) - LENGTH, (16, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


torch.manual_seed(0)
model = GPT()
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    loss = model(batch(TEXT, step).to(device))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}  loss {loss.item():.3f}")
