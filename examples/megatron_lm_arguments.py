"""Trains with the calls of Megatron-LM's pretrain(), whose arguments set the sharding level.

    PYTHONPATH=. torchrun --nproc-per-node 2 examples/megatron_lm_arguments.py --use-torch-fsdp2
    PYTHONPATH=. torchrun --nproc-per-node 2 examples/megatron_lm_arguments.py --every-row

The arguments are Megatron-LM's, by name and meaning. :func:`get_model`, :func:`make_optimizer` and
:func:`train` make the calls of ``megatron/training/training.py`` to megatron-core, in its order;
:data:`OURS` lists the names that are swapped. Megatron-LM's ``pretrain()`` itself needs a GPU and
is not called here. A small ``GPTModel`` learns to count. Runs on CPU ranks, over the stand-ins for
CUDA of ``tests/megatron/core_on_cpu.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp_engine.megatron
from tests.megatron.core_on_cpu import on_cpu

VOCABULARY = 64
# Each row of the table in docs/internals/megatron.md: arguments, and the level that they choose.
ROWS = (
    ("", "no_shard"),
    ("--use-distributed-optimizer", "optim"),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", "no_shard"),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "optim"),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "optim_grads"),
    (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        "optim_grads_params",
    ),
    ("--use-torch-fsdp2", "optim_grads_params"),
    ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "optim_grads_params"),
)


class Wrappers(NamedTuple):
    """Names that ``megatron/training/training.py`` imports and that a user replaces."""

    DDP: Any
    megatron_FSDP: Any
    torch_FSDP: Any
    finalize_model_grads: Any
    get_megatron_optimizer: Any


OURS = Wrappers(
    fsdp_engine.megatron.DistributedDataParallel,
    fsdp_engine.megatron.FullyShardedDataParallel,
    fsdp_engine.megatron.TorchFullyShardedDataParallel,
    fsdp_engine.megatron.finalize_model_grads,
    fsdp_engine.megatron.get_megatron_optimizer,
)


class Trained(NamedTuple):
    """A short run on one rank: its chunks and optimizer, and the loss and norm of each step."""

    chunks: list[Any]
    optimizer: Any
    losses: list[float]
    norms: list[float]


def make_parser() -> argparse.ArgumentParser:
    """Megatron-LM's arguments, as far as they matter here, and ``--every-row``."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT by Megatron-Core's loop and Megatron-LM's arguments.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--num-layers", type=int, default=2, help="transformer layers")
    add("--hidden-size", type=int, default=32, help="width")
    add("--num-attention-heads", type=int, default=2, help="attention heads")
    add("--seq-length", type=int, default=16, help="tokens of a sequence")
    add("--micro-batch-size", type=int, default=2, help="sequences of a rank's microbatch")
    add("--global-batch-size", type=int, default=8, help="sequences of a step")
    add("--train-iters", type=int, default=10, help="steps")
    add("--optimizer", choices=("adam", "sgd"), default="adam", help="name")
    add("--lr", type=float, default=1e-2, help="learning rate")
    add("--bf16", action="store_true", help="weights and activations in bf16")
    add("--untie-embeddings-and-output-weights", action="store_true", help="separate weights")
    add("--calculate-per-token-loss", action="store_true", help="losses are sums over tokens")
    add("--transformer-impl", choices=("local",), default="local", help="implementation of layers")
    add("--tensor-model-parallel-size", type=int, default=1, help="tensor-parallel ranks")
    add("--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages")
    add("--use-distributed-optimizer", action="store_true", help="shard optimizer state")
    add("--num-distributed-optimizer-instances", type=int, default=1, help="copies of the state")
    add("--overlap-grad-reduce", action="store_true", help="reduce within backward")
    add("--overlap-param-gather", action="store_true", help="gather within forward")
    add("--align-param-gather", action="store_true", help="gather if start_param_sync is called")
    add("--accumulate-allreduce-grads-in-fp32", action="store_true", help="reduce in fp32")
    add("--ddp-bucket-size", type=int, help="elements of a bucket")
    add("--ddp-num-buckets", type=int, help="instead of a bucket size")
    add("--use-megatron-fsdp", action="store_true", help="Megatron-FSDP's wrapper")
    levels = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    add("--data-parallel-sharding-strategy", choices=levels, default="no_shard", help="level")
    add("--outer-dp-sharding-strategy", choices=levels, default="no_shard", help="outer level")
    add("--use-torch-fsdp2", action="store_true", help="FSDP2's wrapper")
    add(
        "--torch-fsdp2-no-reshard-after-forward",
        action="store_false",
        dest="torch_fsdp2_reshard_after_forward",
        help="keep gathered parameters for backward",
    )
    add("--every-row", action="store_true", help="train with the arguments of each row of ROWS")
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse Megatron-LM's arguments, and set those that ``validate_args`` derives."""
    args = make_parser().parse_args(arguments)
    if args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    return args


def model_provider(args: argparse.Namespace) -> Any:
    """This rank's part of the model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    config = TransformerConfig(
        **{name: value for name, value in vars(args).items() if name in names},
        pipeline_dtype=args.params_dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        # Compiling fused kernels would take a minute.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(1)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def make_ddp_config(args: argparse.Namespace, num_parameters: int) -> Any:
    """Returns the config that Megatron-LM's ``get_model`` makes."""
    from megatron.core import distributed, parallel_state

    core: Any = distributed
    if args.use_torch_fsdp2:
        return core.TorchFullyShardedDataParallelConfig(
            reshard_after_forward=args.torch_fsdp2_reshard_after_forward
        )
    names = {field.name for field in dataclasses.fields(core.DistributedDataParallelConfig)}
    kwargs = {name: value for name, value in vars(args).items() if name in names}
    kwargs["grad_reduce_in_fp32"] = args.accumulate_allreduce_grads_in_fp32
    kwargs["bucket_size"] = args.ddp_bucket_size
    if args.ddp_num_buckets is not None:
        kwargs["bucket_size"] = num_parameters // args.ddp_num_buckets
    ddp_config = core.DistributedDataParallelConfig(**kwargs)
    if ddp_config.bucket_size is None:
        num_ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        ddp_config.bucket_size = max(40_000_000, 1_000_000 * num_ranks)
    if not ddp_config.overlap_grad_reduce:
        ddp_config.bucket_size = None
    return ddp_config


def get_model(args: argparse.Namespace, wrappers: Wrappers) -> list[Any]:
    """Wrap the model as Megatron-LM's ``get_model`` does."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    model = [model_provider(args)]
    for module in model:
        for param in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    num_parameters = sum(param.nelement() for module in model for param in module.parameters())
    config = get_model_config(model[0])
    if args.bf16:
        model = [Float16Module(config, module) for module in model]
    if args.use_torch_fsdp2:
        wrapper = wrappers.torch_FSDP
    elif args.use_megatron_fsdp:
        wrapper = wrappers.megatron_FSDP
    else:
        wrapper = wrappers.DDP
    ddp_config = make_ddp_config(args, num_parameters)
    return [
        wrapper(
            config=config,
            ddp_config=ddp_config,
            module=module,
            disable_bucketing=index > 0,
        )
        for index, module in enumerate(model)
    ]


def make_optimizer(args: argparse.Namespace, model: list[Any], wrappers: Wrappers) -> Any:
    """Build the optimizer as ``setup_model_and_optimizer`` does.

    The level of the model's wrapper determines how its state is sharded.
    """
    from megatron.core.optimizer import OptimizerConfig

    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    kwargs = {name: value for name, value in vars(args).items() if name in names}
    return wrappers.get_megatron_optimizer(OptimizerConfig(**kwargs), model)


def train(args: argparse.Namespace, wrappers: Wrappers = OURS) -> Trained:
    """Train as Megatron-LM's ``train`` and ``train_step`` do, over ``parallel_state``'s groups."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    model = get_model(args, wrappers)
    optimizer = make_optimizer(args, model, wrappers)
    config = get_model_config(model[0])
    for module in model:
        module.train()
    config.grad_scale_func = optimizer.scale_loss
    if isinstance(model[0], (wrappers.megatron_FSDP, wrappers.DDP)) and args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = model[0].start_param_sync
    config.finalize_model_grads_func = wrappers.finalize_model_grads
    num_ranks = parallel_state.get_data_parallel_world_size()
    num_microbatches = args.global_batch_size // (args.micro_batch_size * num_ranks)
    trained = Trained(model, optimizer, [], [])
    for iteration in range(args.train_iters):
        for chunk in model:
            chunk.zero_grad_buffer()
            chunk.force_all_reduce = False
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, args),
            data_iterator=batches(args, iteration, num_microbatches),
            model=model,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=None,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        trained.norms.append(float(norm))
        trained.losses.append(mean_loss(losses))
    for chunk in model:
        if hasattr(chunk, "stop_communication"):
            chunk.stop_communication()
    return trained


def batches(args: argparse.Namespace, iteration: int, count: int) -> Iterator[Tensor]:
    """This rank's microbatches of a step. The global batch is the same for any number of ranks."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    for index in range(rank * count, (rank + 1) * count):
        dice = torch.Generator().manual_seed(1000 * iteration + index)
        first = torch.randint(0, VOCABULARY, (args.micro_batch_size, 1), generator=dice)
        yield (first + torch.arange(args.seq_length + 1)) % VOCABULARY


def forward_step(args: argparse.Namespace, data: Iterator[Tensor], model: Any) -> Any:
    """Returns the tokens' losses and the function that reduces them, as ``pretrain_gpt.py``."""
    batch = next(data)
    tokens, labels = batch[:, :-1], batch[:, 1:]
    positions = torch.arange(args.seq_length)[None].expand_as(tokens)
    mask = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool).triu(1)
    output = model(tokens, positions, mask, labels=labels)

    def loss_func(losses: Tensor) -> Any:
        total, num_tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        report = {"lm loss": torch.stack([total.detach(), num_tokens.float()])}
        if args.calculate_per_token_loss:
            return total, num_tokens, report
        return total / num_tokens, report

    return output, loss_func


def mean_loss(losses: list[dict[str, Tensor]]) -> float:
    """The mean over the step's tokens. Only ranks of the last stage have losses."""
    sums = torch.zeros(2)
    for report in losses:  # none on other stages
        sums += report["lm loss"]
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@contextlib.contextmanager
def megatron_core(args: argparse.Namespace) -> Iterator[None]:
    """Context in which Megatron-Core runs on CPU ranks, with the groups that the arguments set."""
    with on_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        )
        try:
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()


def show(arguments: str, trained: Trained) -> None:
    """Print a line: arguments, wrapper, level, bytes of rank 0, and the last loss."""
    chunk = trained.chunks[0]
    held = chunk.engine.memory_bytes()
    parts = [each.optimizer for each in trained.optimizer.chained_optimizers]
    states = [state for part in parts if part is not None for state in part.state.values()]
    tensors = [each for state in states for each in state.values() if each.ndim]
    state = sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)
    weights = sum(size for role, size in held.items() if role != "grad")
    if dist.get_rank() == 0:
        print(
            f"{arguments or '(none)':72} {type(chunk).__name__:29} "
            f"{chunk.engine.strategy.inner.name:18} {weights:8} {held['grad']:9} {state:8} "
            f"{trained.losses[-1]:.4f}",
            flush=True,
        )


def main() -> None:
    """Join the other ranks, if torchrun started some, and train."""
    args = parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() == 0:
        print(
            f"{'arguments':72} {'wrapper':29} {'level':18} {'weights':>8} {'gradients':>9} "
            f"{'state':>8} loss"
        )
    rows = [each for each, _ in ROWS] if args.every_row else [""]
    given = [each for each in sys.argv[1:] if each != "--every-row"]
    for row in rows:
        arguments = [*row.split(), *given]
        with megatron_core(args):
            show(row or " ".join(given), train(parse_args(arguments)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
