"""transformers' ``Trainer`` over the engine, with loaders that end at different times on each rank,
compared with one process that has the batches of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.integrations.trainer_scene import (
    FULL,
    LEVELS,
    VOCAB,
    Stream,
    arguments,
    as_launched,
    check_weights,
    num_ranks,
    shared_folder,
    trainer,
)
from tests.pool import Ranks, on_ranks

SHORTEST, LONGEST = 3, 9
Batch = dict[str, Tensor]


class Tokens(nn.Module):
    """Predicts each token's label, in fp64. Its loss is divided by ``num_items_in_batch``."""

    num_blocks = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(self.num_blocks))
        self.head = nn.Linear(8, VOCAB)
        self.double()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
        )
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}

    def hidden(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class MeanOfBatch(Tokens):
    """A :class:`Tokens` without ``num_items_in_batch``: the trainer takes the mean over batches."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, labels, attention_mask)


def text(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(SHORTEST, LONGEST, (1,), generator=generator))
    tokens = torch.randint(3, VOCAB, (length,), generator=generator)
    labels = torch.randint(3, VOCAB, (length,), generator=generator)
    labels[: seed % 3] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def collate(texts: list[Batch]) -> Batch:
    return {
        name: nn.utils.rnn.pad_sequence([each[name] for each in texts], True, value)
        for name, value in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))
    }


class Case(NamedTuple):
    """Sizes of each rank's batches, whether loaders are streams of unknown length, and microbatches
    of a step."""

    sizes: tuple[tuple[int, ...], ...]
    streams: bool = False
    per_step: int = 1

    @property
    def num_batches(self) -> int:
        return max(map(len, self.sizes))

    def batches(self, rank: int) -> list[list[Batch]]:
        return [
            [text(1000 * rank + 10 * number + row) for row in range(size)]
            for number, size in enumerate(self.sizes[rank])
        ]

    def batches_of_all(self) -> list[list[Batch]]:
        """Microbatches of the single process: each has the batches of all ranks."""
        by_rank = [self.batches(rank) for rank in range(len(self.sizes))]
        return [[*itertools.chain(*each)] for each in itertools.zip_longest(*by_rank, fillvalue=[])]


CASES = {
    "one ends early": Case(((3, 1), (2, 2, 4, 1, 3))),
    "accumulation": Case(((3, 1, 2), (2, 2, 4, 1, 3)), per_step=2),
    "none on one rank": Case(((2, 3), ()), per_step=2),
    "streams": Case(((3, 1), (2, 2, 4, 1)), streams=True, per_step=2),
    "three ranks": Case(((1,), (2, 3, 1, 1, 2), (3, 2, 1)), per_step=3),
}


def with_loader(made: Any, loader: Callable[[], Any]) -> Any:
    """The trainer, with a loader of each rank's own."""
    for name in ("train", "eval", "test"):
        setattr(made, f"get_{name}_dataloader", lambda data_set=None: loader())
    return made


def loader_of(batches: list[list[Batch]], streams: bool) -> Any:
    if streams:
        return DataLoader(Stream([collate(each) for each in batches]), batch_size=None)
    return DataLoader([collate(each) for each in batches], batch_size=None)  # type: ignore[arg-type]


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    tokens_seen: int
    evaluated: dict[str, float]
    # For each sample, its labels other than -100 and the logits there.
    predicted: list[tuple[tuple[int, ...], list[float]]]


def hits(prediction: Any) -> dict[str, float]:
    counts = prediction.label_ids != -100
    right = (prediction.predictions.argmax(-1) == prediction.label_ids) & counts
    return {"hits": float(np.sum(right)), "labels": float(np.sum(counts))}


class HitsByBatch:
    """Counts :func:`hits` batch by batch (``batch_eval_metrics``)."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(("hits", "labels"), 0.0)

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        labels, logits = prediction.label_ids.numpy(), prediction.predictions.numpy()
        found = hits(SimpleNamespace(predictions=logits, label_ids=labels))
        self._sums = {name: value + found[name] for name, value in self._sums.items()}
        if not compute_result:
            return {}
        sums, self._sums = self._sums, dict.fromkeys(self._sums, 0.0)
        return sums


def weights_of(made: Any) -> dict[str, Tensor]:
    engine = getattr(made, "engine", None)
    state = made.model.state_dict() if engine is None else engine.full_state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def train(kind: str, case: Case, model: type[nn.Module], options: dict[str, Any]) -> Trained:
    """Train, evaluate and predict on this rank's batches; a single process has those of all
    ranks."""
    as_launched()
    batches = case.batches_of_all() if num_ranks() == 1 else case.batches(dist.get_rank())
    changes = {
        "gradient_accumulation_steps": case.per_step,
        "max_steps": -(-case.num_batches // case.per_step) if case.streams else -1,
        "num_train_epochs": 1 if case.streams else 2,
        "eval_strategy": "no",
        "include_num_input_tokens_seen": "non_padding",
        **options,
    }
    given = {"model": model(), "compute_metrics": hits, **changes.pop("trainer", {})}
    args = arguments(shared_folder(), **changes)
    made = with_loader(trainer(kind, args, **given), lambda: loader_of(batches, case.streams))
    made.train()
    log = made.state.log_history
    found = made.evaluate([0])
    predicted = made.predict([0])
    rows = [
        (tuple(labels[labels != -100].tolist()), logits[labels != -100].ravel().tolist())
        for labels, logits in zip(predicted.label_ids, predicted.predictions, strict=True)
    ]
    assert kind == "plain" or predicted.metrics["test_hits"] == found["eval_hits"]
    return Trained(
        weights_of(made),
        [row["loss"] for row in log if "loss" in row],
        [row["grad_norm"] for row in log if "grad_norm" in row],
        made.state.num_input_tokens_seen,
        {name: found[f"eval_{name}"] for name in ("loss", "hits", "labels")},
        sorted(rows),
    )


_alone: dict[Any, Trained] = {}


def train_alone(ranks: Ranks, name: str) -> Trained:
    if name not in _alone:
        given = ("plain", CASES[name], Tokens, {})
        (_alone[name],) = ranks.run(train, *given, world_size=1, group=False)
    return _alone[name]


def evaluation_loss(model: type[nn.Module], weights: dict[str, Tensor], case: Case) -> float:
    made = model()
    made.load_state_dict(weights)
    batches = [batch for rank in range(len(case.sizes)) for batch in case.batches(rank)]
    with torch.no_grad():
        losses = [made(**collate(batch))["loss"].item() * len(batch) for batch in batches]
    return sum(losses) / sum(map(len, batches))


FEW = [("accumulation", "no_shard"), ("none on one rank", FULL), ("streams", FULL)]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=() if (name, level) in FEW else pytest.mark.thorough)
        for name in CASES
        for level in LEVELS
    ],
)
def test_a_run_is_that_of_one_process(ranks: Ranks, name: str, level: str) -> None:
    case, alone = CASES[name], train_alone(ranks, name)
    loss = evaluation_loss(Tokens, alone.weights, case)
    for found in ranks.run(train, level, case, Tokens, {}, world_size=len(case.sizes)):
        check_weights(found.weights, alone.weights)
        assert found.losses == pytest.approx(alone.losses, rel=1e-6)
        assert found.norms == pytest.approx(alone.norms, rel=1e-9)
        assert found.tokens_seen == alone.tokens_seen
        expected = {**alone.evaluated, "loss": pytest.approx(loss, rel=1e-9)}
        assert found.evaluated == expected
        for (labels, ours), (others, theirs) in zip(found.predicted, alone.predicted, strict=True):
            assert labels == others
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def by_hand(case: Case, divided_by: str, epochs: int) -> tuple[dict[str, Tensor], list[float]]:
    """One process: the mean over ranks of the means over their labels, or the mean over batches."""
    model = Tokens()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    by_rank = [case.batches(rank) for rank in range(len(case.sizes))]
    for begin in [*range(0, case.num_batches, case.per_step)] * epochs:
        parts = [each[begin : begin + case.per_step] for each in by_rank]
        parts = [part for part in parts if part]
        if divided_by == "rank":
            means = [model(**collate([row for batch in part for row in batch])) for part in parts]
        else:
            means = [model(**collate(batch)) for part in parts for batch in part]
        loss = torch.stack([each["loss"] for each in means]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.parametrize("divided_by", ["rank", "batch"])
@pytest.mark.parametrize("name", ["accumulation", "none on one rank"])
def test_means_of_ranks_or_batches_are_those_of_the_batches_that_exist(
    ranks: Ranks, name: str, divided_by: str
) -> None:
    case = CASES[name]
    weights, losses = by_hand(case, divided_by, epochs=2)
    options: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}
    options |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options["average_tokens_across_devices"] = divided_by != "rank"
    model = Tokens if divided_by == "rank" else MeanOfBatch
    for each in ranks.run(train, FULL, case, model, options, world_size=2):
        check_weights(each.weights, weights)
        assert each.losses == pytest.approx(losses, rel=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "metrics by batch": {"batch_eval_metrics": True, "trainer": {"compute_metrics": HitsByBatch()}},
    "checkpointed steps, and results to the CPU in between": {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_accumulation_steps": 1,
    },
    "an evaluation within training": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "trainer": {"eval_dataset": [0]},
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_uneven_runs(ranks: Ranks, name: str) -> None:
    case, alone = CASES["accumulation"], train_alone(ranks, "accumulation")
    for found in ranks.run(train, FULL, case, Tokens, OPTIONS[name], world_size=2):
        check_weights(found.weights, alone.weights)
        for key in ("hits", "labels"):
            assert found.evaluated[key] == alone.evaluated[key]


class Texts(Dataset[Batch]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Batch:
        return text(index)


def train_shared(kind: str, batch: int, accelerator: dict[str, Any], resumed: bool) -> Any:
    """Weights, and an evaluation. accelerate distributes the data set over ranks."""
    as_launched()
    folder = shared_folder()
    for path in (None, f"{folder}/checkpoint-3")[: 1 + resumed]:
        args = arguments(
            folder,
            per_device_train_batch_size=batch // num_ranks(),
            per_device_eval_batch_size=batch // num_ranks(),
            max_steps=-1,
            num_train_epochs=2,
            eval_strategy="no",
            save_strategy="steps",
            save_steps=1,
            train_sampling_strategy="sequential",
            accelerator_config=accelerator,
        )
        given = {"model": Tokens(), "train_dataset": Texts(), "eval_dataset": Texts()}
        given |= {"data_collator": collate, "compute_metrics": hits}
        made = trainer(kind, args, **given)
        made.train(resume_from_checkpoint=path)
    evaluated = made.evaluate()
    return weights_of(made), {name: evaluated[f"eval_{name}"] for name in ("hits", "labels")}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_data_set_is_dealt_without_samples_that_count_twice(
    ranks: Ranks, split: bool, resumed: bool
) -> None:
    # Two ranks share 11 samples, in batches of 2 each or of 4 that are split; the last batch has 3
    # samples.
    given = {"even_batches": False, "split_batches": split}
    ((weights, evaluated),) = ranks.run(
        train_shared, "plain", 4, {}, False, world_size=1, group=False
    )
    # With split_batches, the trainer's batch size is that of all ranks together.
    batch = 8 if split else 4
    for found, metrics in ranks.run(train_shared, FULL, batch, given, resumed, world_size=2):
        check_weights(found, weights)
        assert metrics == evaluated


class Towers(Tokens):
    num_blocks = 3

    def hidden(self, input_ids: Tensor) -> Tensor:
        block = self.blocks[int(input_ids.sum()) % len(self.blocks)]
        return torch.tanh(block(self.embed(input_ids)))


def test_ranks_use_different_modules_in_uneven_runs(ranks: Ranks) -> None:
    case, given = CASES["accumulation"], {"trainer": {"different_modules": True}}
    expected = ranks.run(train, "no_shard", case, Towers, given, world_size=2)
    found = ranks.run(train, FULL, case, Towers, given, world_size=2)
    for ours, theirs in zip(found, expected, strict=True):
        check_weights(ours.weights, theirs.weights)
        assert ours.evaluated == pytest.approx(theirs.evaluated, rel=1e-9)


@on_ranks(2)
def test_an_error_of_one_loader_is_raised_on_all_ranks() -> None:
    as_launched()
    for method, *given in (("train",), ("evaluate", [0]), ("predict", [0])):
        args = arguments(shared_folder(), max_steps=4, eval_strategy="no")
        batches = Stream([collate([text(number)]) for number in range(2)], fails=True)
        made = trainer(FULL, args, Tokens())
        with_loader(made, lambda batches=batches: DataLoader(batches, batch_size=None))
        with pytest.raises(OSError, match="disk on fire"):
            getattr(made, method)(*given)
