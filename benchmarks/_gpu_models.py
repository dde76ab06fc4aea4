"""The models of ``gpu.py``: a GPT without sharding, under FSDP2 and under this engine, on one
device.

Several ranks are emulated on rank 0: the process group is fake, and collectives are device copies
of the same size, by the same functions for both engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2Policy
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_engine as fe
from fsdp_engine.buffers import sharded_buffer
from fsdp_engine.codecs import CodecRule
from fsdp_engine.comm.collectives import Communicator, Steps
from gpt import GPT, GPTConfig

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LEVEL_3_ONE_AHEAD = "level 3, one unit ahead"
BF16 = torch.bfloat16
# Bytes per parameter of all engines of a section together, at rest, without activations.
RESIDENT_BYTES = 104

# A step: a function that runs forward and backward and returns the loss, and the optimizer's step.
StepParts = tuple[Callable[[], Tensor], Callable[[], None]]


def on_cuda() -> bool:
    return torch.cuda.is_available()


def card() -> str:
    """The name of the GPU in names of files: "h200" for an "NVIDIA H200"."""
    return torch.cuda.get_device_name().split()[1].lower()


def the_device() -> torch.device:
    return torch.device("cuda", 0) if on_cuda() else torch.device("cpu")


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()


def mark() -> Any:
    """The current time on the device (an event), or on the host's clock."""
    if not on_cuda():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(first: Any, second: Any) -> float:
    """Milliseconds between two marks that have been reached."""
    if isinstance(first, float):
        waited: float = (second - first) * 1e3
        return waited
    elapsed: float = first.elapsed_time(second)
    return elapsed


# Collectives of several ranks, emulated for rank 0.


def emulate_gather(full: Tensor, own: Tensor, num_ranks: int) -> None:
    """Write all of ``full`` (1-D). ``own`` is this rank's shard, and may be a view of ``full``."""
    size = full.numel() // num_ranks
    if own.data_ptr() != full.data_ptr():
        full[:size].copy_(own)
    others = full[size:].view(num_ranks - 1, size)
    others.copy_(full[:size].expand(num_ranks - 1, size))


def emulate_scatter(
    full: Tensor, out: Tensor, num_ranks: int, average: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the sum (or mean) of the parts of ``full`` (1-D). It is in ``out``, unless ``out``
    overlaps ``full`` or its dtype is not ``dtype``."""
    reduce = torch.mean if average else torch.sum
    parts = full.view(num_ranks, -1)
    if dtype in (None, out.dtype) and out.data_ptr() != full.data_ptr():
        return reduce(parts, 0, dtype=out.dtype, out=out)
    return reduce(parts, 0, dtype=dtype or full.dtype)


class EmulatedCommunicator(Communicator):
    """This engine's collectives as device copies; see the module docstring.

    Attributes:
        num_calls: Number of calls of all instances.
    """

    num_calls = 0

    def all_gather(self, full: Tensor, source: Tensor | None = None, tag: int = 0) -> Steps:
        EmulatedCommunicator.num_calls += 1
        emulate_gather(full, self.part(full) if source is None else source, self.size)
        yield from ()

    def reduce_scatter(
        self,
        full: Tensor,
        out: Tensor,
        *,
        reduce_dtype: torch.dtype | None = None,
        average: bool = False,
        divisor: float = 1.0,
        accumulate: bool = False,
        tag: int = 0,
    ) -> Steps:
        EmulatedCommunicator.num_calls += 1
        target = torch.empty_like(out, dtype=full.dtype) if accumulate else out
        if target.dtype != full.dtype:
            target = self.part(full)  # as in the real one: sum in place, then cast
        total = emulate_scatter(full, target, self.size, average, reduce_dtype)
        if divisor != 1.0:
            total.div_(divisor)
        if accumulate:
            out.add_(total)
        elif total is not out:
            out.copy_(total)
        yield from ()

    def all_reduce(self, tensor: Tensor, *, average: bool = False, tag: int = 0) -> Steps:
        EmulatedCommunicator.num_calls += 1
        total = emulate_scatter(tensor, self.part(tensor), self.size, average)
        emulate_gather(tensor, total, self.size)
        yield from ()


class EmulatedFSDP2Comm:
    """FSDP2's collectives as device copies, through its hooks for custom collectives."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class EmulatedFSDP2Gather(EmulatedFSDP2Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        emulate_gather(output_tensor.view(-1), input_tensor.view(-1), self._num_ranks)


class EmulatedFSDP2Scatter(EmulatedFSDP2Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        average = op == dist.ReduceOp.AVG
        emulate_scatter(input_tensor.view(-1), output_tensor.view(-1), self._num_ranks, average)


def start(num_ranks: int) -> DeviceMesh:
    """Create process groups for one rank, or for rank 0 of several emulated ranks."""
    device = the_device()
    if on_cuda():
        torch.cuda.set_device(device)
    if num_ranks == 1:
        backend = "nccl" if on_cuda() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        # The engine makes its communicators in this module.
        assert vars(sharded_buffer)["Communicator"] is Communicator
        vars(sharded_buffer)["Communicator"] = EmulatedCommunicator
    return init_device_mesh(device.type, (num_ranks,))


# The model and its steps.


def model_config() -> tuple[GPTConfig, int]:
    """Sizes of the model, and sequences in a batch."""
    if not on_cuda():
        return GPTConfig(sequence_length=32, num_layers=3, width=64, num_heads=4), 2
    width = 2048
    memory = torch.cuda.get_device_properties(0).total_memory
    layers = min(20, int(0.78 * memory / (RESIDENT_BYTES * 12 * width**2)))
    layers = max(2, layers)
    return GPTConfig(sequence_length=1024, num_layers=layers, width=width, num_heads=16), 4


def make_model(config: GPTConfig) -> GPT:
    """The model with fp32 weights, the same for every engine.

    All are drawn from one distribution, because emulated gathers fill parameters with parts of
    others, and the model should stay finite.
    """
    torch.manual_seed(0)
    with the_device():
        model = GPT(config)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    return model


def make_bare(
    config: GPTConfig, batch: tuple[Tensor, Tensor], *, capturable: bool = False
) -> StepParts:
    """The model without an engine."""
    model = make_model(config)
    main = [param.detach().clone() for param in model.parameters()]
    model.to(BF16)
    params: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(main, lr=1e-4, fused=True, capturable=capturable)

    def update() -> None:
        for weight, param in zip(main, params, strict=True):
            assert param.grad is not None
            weight.grad, param.grad = param.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, main)

    return _forward_backward(model, batch), update


def make_fsdp2(config: GPTConfig, batch: tuple[Tensor, Tensor], mesh: DeviceMesh) -> StepParts:
    """The model under FSDP2, gradients reduced in bf16."""
    model: Any = make_model(config)
    modules = (*model.blocks, model)
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=FSDP2Policy(param_dtype=BF16))
    if mesh.size() > 1:
        for module in modules:
            module.set_custom_all_gather(EmulatedFSDP2Gather(mesh.size()))
            module.set_custom_reduce_scatter(EmulatedFSDP2Scatter(mesh.size()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return _forward_backward(model, batch), update_of(optimizer)


def make_engine(
    config: GPTConfig,
    batch: tuple[Tensor, Tensor],
    mesh: DeviceMesh,
    name: str,
    codec_rules: Sequence[CodecRule] = (),
    *,
    capturable: bool = False,
) -> StepParts:
    """The model under this engine, gradients reduced in bf16."""
    model = make_model(config)
    ahead = sum(p.numel() for p in model.blocks[0].parameters())
    options = fe.Options(
        prefetch_window=ahead if name == LEVEL_3_ONE_AHEAD else None,
        staging_limit=ahead if name == LEVEL_3_ONE_AHEAD else None,
    )
    level = name if name in LEVELS else LEVELS[3]
    policy = fe.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    fe.shard(
        model,
        mesh=mesh,
        strategy=level,
        mp_policy=policy,
        options=options,
        extensions=[fe.CodecRules(codec_rules)],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)
    fe.shard_optimizer(optimizer)
    return _forward_backward(model, batch), update_of(optimizer)


def captured(parts: StepParts) -> StepParts:
    """Capture a whole step into a CUDA graph. Of the returned functions the first one replays the
    graph, and the second one does nothing.

    Args:
        parts: The step, whose optimizer is capturable. It runs twice before the capture.
    """
    if not on_cuda():
        return parts
    forward_backward, update = parts
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward_backward()
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward_backward()
        update()

    def replay() -> Tensor:
        graph.replay()
        return loss

    # The graph reads memory of tensors that `parts` keep alive.
    return replay, lambda kept=parts: None


def _forward_backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        loss: Tensor = model(*batch).loss
        loss.backward()
        return loss.detach()

    return run


def update_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The optimizer's part of a step."""

    def run() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return run
