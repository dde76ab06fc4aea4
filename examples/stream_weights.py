"""Train on some ranks while another process generates text with the current weights.

    torchrun --nproc-per-node 2 examples/stream_weights.py --steps 60

Rank 0 starts a *receiver*, a process without a process group that stands for an inference engine.
Each rank connects to it, and after every few steps sends the changes of the weights that it
holds, in bf16 (``fe.weight_stream`` with ``changed_since``); nothing is gathered. The receiver
applies the changes, evaluates held-out text, and returns a checksum of its weights, which must
equal that of the trainer's ``full_state_dict``.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
from collections.abc import Iterable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from corpus import BatchPlan, printable, read_corpus
from gpt import GPT, GPTConfig
from settings import LEVELS

DTYPE = torch.bfloat16
# Messages are pickles. Where other users can connect, use a secret key.
KEY = b"weights"
HELD_OUT_SEQUENCES = 4


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the hash of the tensors' names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        digest.update(name.encode())
        digest.update(bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


# --- the receiver ---


def receive(told: Connection, num_ranks: int, config: GPTConfig) -> None:
    """Run the receiver: apply the changes that ranks send, and answer rank 0 after each round.

    Args:
        told: Connection on which to send this process's address.
        num_ranks: Number of ranks that will connect.
        config: Config of the model.
    """
    torch.set_num_threads(1)
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        told.send(listener.address)
        accepted = [listener.accept() for _ in range(num_ranks)]
    by_rank = {each.recv(): each for each in accepted}
    connections = [by_rank[rank] for rank in range(num_ranks)]
    first = connections[0]
    model = GPT(config).to(DTYPE).requires_grad_(False)
    weights = model.state_dict()
    text = read_corpus().held_out
    batch = BatchPlan(HELD_OUT_SEQUENCES, 1, 1, config.sequence_length).held_out_batch(
        text, 1, 0, 0
    )
    while True:
        for connection in connections:
            if not apply(connection, weights):
                return
        answer = {
            "checksum": checksum(weights.items()),
            "loss": float(model(batch.tokens, batch.targets).loss),
            "text": written(model, text[: config.sequence_length // 2].long()),
        }
        first.send(answer)


def apply(connection: Connection, weights: dict[str, Tensor]) -> bool:
    """Apply one rank's changes. Returns False at the end of the run."""
    while True:
        head = connection.recv()
        if head is None:
            return True
        if head == "the end":
            return False
        name, places, count = head
        if places is None:
            places = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.int32)
        values = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=DTYPE)
        assert values.numel() == count
        weights[name].view(-1)[places] = values


def written(model: GPT, prompt: Tensor) -> str:
    """What the model adds to a prompt."""
    tokens = model.generate(prompt, 32, 0.8, torch.Generator().manual_seed(0))
    return printable(bytes(tokens[prompt.numel() :].tolist()))


# --- the trainer ---


def send(connection: Connection, stream: fe.WeightStream) -> int:
    """Send this rank's changes. Returns their size in bytes."""
    num_bytes = 0
    for name, indices, values in stream:
        is_range = isinstance(indices, slice)
        connection.send((name, indices if is_range else None, values.numel()))
        for tensor in (values,) if is_range else (indices, values):
            content = tensor.cpu().view(torch.uint8).numpy()
            connection.send_bytes(content)
            num_bytes += content.nbytes
    connection.send(None)
    return num_bytes


def train(settings: argparse.Namespace, connection: Connection, config: GPTConfig) -> None:
    """Train, and send changed weights after every few steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text = read_corpus().train
    plan = BatchPlan(settings.batch_size, 1, size, config.sequence_length)
    torch.manual_seed(0)
    model = GPT(config)
    engine = fe.shard(model, strategy=settings.strategy)
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=settings.lr))
    stream = fe.weight_stream(engine, DTYPE, fe.WeightVersion("cpu"))
    for step in range(settings.steps + 1):
        if step % settings.send_every == 0 or step == settings.steps:
            num_bytes = torch.tensor(send(connection, stream))
            dist.all_reduce(num_bytes)
            report(engine, connection, step, int(num_bytes))
        if step < settings.steps:
            batch = plan.train_batch(text, step, 0, rank)
            model(batch.tokens, batch.targets).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    connection.send("the end")


def report(engine: fe.Engine, connection: Connection, step: int, num_bytes: int) -> None:
    """Check that the receiver has the trainer's weights, and print its loss and text."""
    state = engine.full_state_dict(rank0_only=True)
    if dist.get_rank() > 0:
        return
    expected = checksum((name, tensor.to(DTYPE)) for name, tensor in state.items())
    answer: dict[str, Any] = connection.recv()
    if answer["checksum"] != expected:
        raise RuntimeError(
            f"step {step}: expected the receiver to have weights {expected}; "
            f"found {answer['checksum']}"
        )
    whole = sum(tensor.numel() for tensor in state.values()) * DTYPE.itemsize
    print(
        f"step {step:4d}  sent {num_bytes / whole:6.1%} of {whole:,} bytes, got the same weights  "
        f"held-out loss {answer['loss']:.3f}  {answer['text']!r}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Start the receiver on rank 0, connect, train."""
    parser = argparse.ArgumentParser(
        description="Train, and stream weights to another process that generates text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--strategy", choices=LEVELS, default="optim_grads_params")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--send-every", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=64)
    settings = parser.parse_args(arguments)
    config = GPTConfig(
        num_layers=settings.layers, width=settings.width, sequence_length=settings.sequence_length
    )
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # without torchrun: one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    receiver = None
    address: list[Any] = [None]
    if dist.get_rank() == 0:
        context = multiprocessing.get_context("spawn")
        told, tells = context.Pipe(duplex=False)
        receiver = context.Process(
            target=receive, args=(tells, dist.get_world_size(), config), daemon=True
        )
        receiver.start()
        tells.close()  # then recv() raises if the receiver dies
        address = [told.recv()]
    dist.broadcast_object_list(address)
    with Client(address[0], authkey=KEY) as connection:
        connection.send(dist.get_rank())
        train(settings, connection, config)
        if receiver is not None:
            receiver.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
