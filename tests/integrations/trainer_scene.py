"""Shared by tests of trainers: small models, data, and runs with and without the engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from tests import reference
from tests.checkpoint import scene as checkpoint_scene
from tests.without_te import import_without_te

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FULL = "optim_grads_params"
VOCAB = 48
Rows = list[dict[str, Tensor]]


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama of three layers and some 20,000 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "eos_token_id": 2, **changes}))


def rows(count: int, seed: int = 1) -> Rows:
    """Sequences of 12 tokens. Some begin without labels, so numbers of labels differ by rank."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        tokens = torch.randint(3, VOCAB, (12,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(0, 9, (1,), generator=generator))] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def as_launched() -> None:
    """Set the environment as torchrun does, and make accelerate forget earlier runs."""
    import_without_te("transformers.trainer_seq2seq")
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        os.environ |= {"LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def shared_folder() -> Path:
    return Path(checkpoint_scene.shared_folder())


def arguments(folder: Path, cls: Any = None, **changes: Any) -> Any:
    """Training arguments: 5 steps of 8 sequences in 2 microbatches over all ranks."""
    import transformers

    as_launched()
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4 // num_ranks(),
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
    }
    return (cls or transformers.TrainingArguments)(**{**given, **changes})


def trainer(kind: str, args: Any, model: Any = None, **changes: Any) -> Any:
    import transformers

    from fsdp_engine.integrations import transformers as ours

    given = {"train_dataset": rows(40), "eval_dataset": rows(7, seed=2), "args": args, **changes}
    if model is not None or "model_init" not in changes:
        given["model"] = llama() if model is None else model
    shard = given.pop("shard", {})
    seq2seq = isinstance(args, transformers.Seq2SeqTrainingArguments)
    if kind == "plain":
        cls = transformers.Seq2SeqTrainer if seq2seq else transformers.Trainer
    else:
        cls = ours.FSDPEngineSeq2SeqTrainer if seq2seq else ours.FSDPEngineTrainer
        given["shard"] = {"strategy": kind, "min_unit_size": 0, **shard}
    made = cls(**given)
    made.remove_callback(transformers.trainer_callback.PrinterCallback)
    return made


_FIGURES = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_hits")


def figures(made: Any) -> dict[tuple[int, str], float]:
    return {
        (row["step"], name): row[name]
        for row in made.state.log_history
        for name in _FIGURES
        if name in row
    }


def run(kind: str, folder: Path | None = None, **changes: Any) -> dict[tuple[int, str], float]:
    """Train; returns the log. ``trainer=``: a dict of further arguments of the trainer, or a
    function that returns one."""
    given = changes.pop("trainer", {})
    args = arguments(folder or shared_folder(), **changes)
    made = trainer(kind, args, **(given() if callable(given) else given))
    made.train()
    return figures(made)


@functools.cache
def _plain(size: int) -> dict[tuple[int, str], float]:
    return run("plain")


def run_plain() -> dict[tuple[int, str], float]:
    return _plain(num_ranks())


def assert_same(found: Any, expected: Any, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Both have the same steps and names, and values equal up to the order of sums."""
    assert expected
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert abs(found[key] - value) <= atol + rtol * abs(value), (key, found[key], value)


class Stream(IterableDataset[Any]):
    """A loader without a length; it may fail on rank 1 after its first batch."""

    def __init__(self, batches: list[Any], fails: bool = False) -> None:
        self._batches, self._fails = batches, fails

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            if number and self._fails and dist.get_rank() == 1:
                raise OSError("disk on fire")
            yield batch


def check_weights(found: dict[str, Tensor], alone: dict[str, Tensor]) -> None:
    """Weights in fp64 are those of one process."""
    for name, right in alone.items():
        assert reference.relative_error(found[name], right) < 1e-11, name
