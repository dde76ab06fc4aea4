"""Small models that are manually sharded over tensor, pipeline and expert ranks, and their layers.

Over one rank each model is the reference for the results of several ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_engine as fe
from fsdp_engine.megatron.process_groups import ModelParallelGroups
from tests.megatron.configs import config_of

DIM, HIDDEN, HEAD, VOCAB, TOKENS = 6, 16, 4, 10, 8


class Chunk(fe.DistributedDataParallel):
    """A wrapped model that counts how often its gradients were finished."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh | None, strategy: str, **options: Any
    ) -> None:
        super().__init__(module, config_of(strategy), mesh, **options)
        self.num_finished = 0

    def finish_grad_sync(self) -> None:
        self.num_finished += 1
        super().finish_grad_sync()


def grid(**sizes: int) -> DeviceMesh:
    """All ranks, by axis: the last axis is the fastest."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def groups_of(mesh: DeviceMesh, **more: Any) -> ModelParallelGroups:
    """Each axis of the mesh as the group of its name."""
    axes = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    return ModelParallelGroups(**axes, **more)


def mark(module: nn.Module, **marks: bool) -> None:
    for param in module.parameters():
        vars(param).update(marks)


class _Gather(torch.autograd.Function):
    """Own tokens to all tokens; gradients of all ranks are summed on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed_part(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    """Partial sums of all tokens to whole sums of own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _summed_part(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


def _gathered(x: Tensor, group: ProcessGroup | None) -> Tensor:
    if group is None:
        return x.clone()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _summed_part(x: Tensor, group: ProcessGroup | None) -> Tensor:
    total = x.clone()
    if group is None:
        return total
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].clone()


# --- tensor parallel, with sequence parallel norms ---


class TensorBlock(nn.Module):
    """Norm on own tokens, column linear, norm of each head, row linear, bias on own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.group: ProcessGroup | None = None
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM) / DIM**0.5)
        self.q_layernorm = nn.LayerNorm(HEAD)
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN) / HIDDEN**0.5)
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, own: Tensor) -> Tensor:
        x = _Gather.apply(self.norm(own), self.group)
        heads = F.linear(x, self.up).unflatten(-1, (-1, HEAD))
        hidden = torch.tanh(self.q_layernorm(heads)).flatten(-2)
        return own + _Scatter.apply(F.linear(hidden, self.down), self.group) + self.bias


class TensorModel(nn.Module):
    """Blocks, and a replicated parameter that every tensor rank uses in the same way."""

    CUTS = {"up": 0, "down": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TensorBlock(), TensorBlock()])
        self.gate = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """The sum over this rank's tokens; ``weight`` (tokens,) is 0 for those that don't count."""
        group = self.blocks[0].group
        place, size = (group.rank(), group.size()) if group is not None else (0, 1)
        own = x.chunk(size)[place]
        for block in self.blocks:
            own = block(own)
        error = (own - target.chunk(size)[place]).square().mean(1)
        penalty = (self.gate.square() * x.square().mean(0)).sum()
        return (error * weight.chunk(size)[place]).sum() + penalty * weight.sum()

    def part(self, group: ProcessGroup) -> TensorModel:
        """The part of one rank of the group, with its marks."""
        part = copy.deepcopy(self)
        for name, param in part.named_parameters():
            cut = self.CUTS.get(name.split(".")[-1])
            if cut is not None:
                param.data = param.data.chunk(group.size(), cut)[group.rank()].clone()
        for block in part.blocks:
            block.group = group
            mark(block.norm, sequence_parallel=True)
            block.bias.sequence_parallel = True
            mark(block.q_layernorm, sequence_parallel=False)  # Megatron-Core sets it everywhere
        part.gate.average_gradients_across_tp_domain = True
        return part


# --- pipeline stages: tied word and position embeddings, and an embedder on each stage ---


class Stage(nn.Module):
    """A stage. The first and the last have embeddings, the last returns the sum of the losses."""

    def __init__(self, place: int, num_stages: int, embedder: nn.Module) -> None:
        super().__init__()
        self.is_first, self.is_last = place == 0, place == num_stages - 1
        self.embedder = embedder
        self.body = nn.Linear(DIM, DIM)
        if self.has_embeddings:
            tied = nn.Embedding(VOCAB, DIM) if self.is_first else nn.Linear(DIM, VOCAB, bias=False)
            self.word, self.position = tied, nn.Embedding(TOKENS, DIM)

    @property
    def has_embeddings(self) -> bool:
        return self.is_first or self.is_last

    def forward(self, x: Tensor | None, tokens: Tensor) -> Tensor:
        x = self.word(tokens) if x is None else x
        if self.has_embeddings:
            x = x + self.position(torch.arange(len(tokens)))
        x = torch.tanh(self.body(x)) + self.embedder(tokens[:, None] / VOCAB)
        return F.cross_entropy(self.word(x), tokens, reduction="sum") if self.is_last else x


class StagedModel(nn.Module):
    def __init__(self, num_stages: int) -> None:
        super().__init__()
        embedder = nn.Linear(1, DIM)
        self.stages = nn.ModuleList([Stage(i, num_stages, embedder) for i in range(num_stages)])
        for name in ("word", "position"):
            getattr(self.stages[-1], name).weight = getattr(self.stages[0], name).weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = None
        for stage in self.stages:
            x = stage(x, tokens)
        return x

    def part(self, place: int) -> Stage:
        part = copy.deepcopy(self.stages[place])
        mark(part.embedder, pipeline_parallel=True)
        if part.has_embeddings:
            mark(part.word, shared_embedding=True)
            mark(part.position, position_embedding=True)
        return part


def run_stage(stage: nn.Module, group: ProcessGroup, tokens: Tensor) -> None:
    """Forward and backward of one stage, with its neighbours; the last gives a loss."""
    place, last = group.rank(), group.size() - 1
    shape, received = (len(tokens), DIM), None
    if place:
        received = torch.empty(shape)
        dist.recv(received, group=group, group_src=place - 1)
        received.requires_grad_()
    out = stage(received, tokens)
    grad = None
    if place != last:
        dist.send(out.detach(), group=group, group_dst=place + 1)
        grad = torch.empty(shape)
        dist.recv(grad, group=group, group_src=place + 1)
    out.backward(grad)
    if received is not None:
        assert received.grad is not None
        dist.send(received.grad, group=group, group_dst=place - 1)


# --- experts, one on each rank of a group ---


class Gate(nn.Module):
    """The dense part: a router with a bias that only steers, and counts of tokens."""

    expert_bias: Tensor
    local_tokens_per_expert: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.score = nn.Linear(DIM, num_experts)
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.register_buffer("local_tokens_per_expert", torch.zeros(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token its expert and the weight of that."""
        scores = self.score(x)
        chosen = (scores + self.expert_bias).argmax(1)
        counts = torch.bincount(chosen, minlength=len(self.expert_bias))
        self.local_tokens_per_expert += counts
        return chosen, scores.gather(1, chosen[:, None]).sigmoid()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def mixture_loss(
    gate: nn.Module, experts: dict[int, nn.Module], x: Tensor, group: ProcessGroup | None
) -> Tensor:
    """The sum over this rank's tokens. ``experts``: those that this rank has, by number."""
    chosen, weight = gate(x)
    everything, routes = _Gather.apply(x, group), _gathered(chosen, group)
    outs = [expert(everything) * (routes == number)[:, None] for number, expert in experts.items()]
    mixed = _Scatter.apply(torch.stack(outs).sum(0), group)
    return (x + weight * mixed).square().mean(1).sum()
