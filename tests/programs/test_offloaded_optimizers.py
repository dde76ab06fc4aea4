"""Optimizers of other packages step with their state on a disk as they do with it in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from tests.pool import Ranks
from tests.programs import optimizer_catalogue as catalogue
from tests.programs.packages import needs

LIBRARIES = ("schedulefree", "pytorch_optimizer", "bitsandbytes")
LEVELS = ("optim", "optim_grads_params")
SAVED_AFTER, NUM_STEPS = 3, 5
# Errors of saves, for state in memory or on disk.
NOT_SAVED = (
    "optimizer: expected state of parameters; found state of",
    "optimizer: expected tensors and numbers in the state of",
)
# These optimizers look elementwise in some steps, but sum over parameters or over slices.
SUM = {
    f"pytorch_optimizer.{name}"
    for name in ("ASGD", "AdaNorm", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion")
} | {"pytorch_optimizer.Prodigy", "pytorch_optimizer.SWATS"}
# Some of those that shall step with state on a disk.
STEP = {"schedulefree.AdamWScheduleFree", "bitsandbytes.AdamW", "bitsandbytes.Lion"} | {
    f"pytorch_optimizer.{name}" for name in ("Adan", "Lion", "MADGRAD", "QHAdam")
}
# Some of those that are refused, and a part of their error.
REFUSED = {
    "schedulefree.AdamWScheduleFreeClosure": "missing 1 required positional argument: 'closure'",
    "pytorch_optimizer.AggMo": "found 'momentum_buffer' of dict",
    "pytorch_optimizer.FlashAdamW": "found 'exp_avg::scales' of shape",
    "bitsandbytes.AdamW8bit": "",
}

pytestmark = [*needs(*LIBRARIES), pytest.mark.timeout(1800)]


class Job:
    """A sharded model and its optimizer, which has stepped ``num_steps`` times."""

    num_steps = 0

    def __init__(self, kind: Any, use: catalogue.Use, level: str, folder: str | None) -> None:
        self._use, self._mesh = use, init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = catalogue.model_of(use)
        on_disk = [] if folder is None else [fe.Offload(optimizer_state="disk", folder=folder)]
        options = {"options": fe.Options(min_unit_size=0), "extensions": on_disk}
        self.engine = fe.shard(self.model, self._mesh, strategy=level, **options)
        self.optimizer = catalogue.made(kind, self.model)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        fe.shard_optimizer(self.optimizer, elementwise=True)

    def train(self, until: int) -> None:
        mesh, steps = self._mesh, range(self.num_steps, until)
        rank, size = mesh.get_local_rank(), mesh.size()
        catalogue.train(self.model, self.optimizer, self._use, rank, size, steps)
        self.num_steps = until

    def values(self) -> dict[str, Any]:
        packed = self.optimizer.state_dict()
        state = {key: value for key, value in packed["state"].items() if value != {}}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in packed["param_groups"]
        ]
        return copied({"state": state, "groups": groups, "weights": self.model.state_dict()})


def copied(value: Any) -> Any:
    """Slices as plain tensors that later steps do not change."""
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    value = getattr(value, "local", value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def differing(found: Any, expected: Any, name: str = "") -> list[str]:
    """Names of values that are not equal in every bit."""
    if type(found) is not type(expected):
        return [f"{name}: {type(found).__name__}, not {type(expected).__name__}"]
    if isinstance(expected, dict):
        keys = {*found, *expected}
        pairs = [(found.get(k), expected.get(k), f"{name}/{k}") for k in sorted(keys, key=str)]
        return [each for pair in pairs for each in differing(*pair)]
    if isinstance(expected, list):
        pairs = [(*pair, f"{name}/{k}") for k, pair in enumerate(zip(found, expected, strict=True))]
        return [each for pair in pairs for each in differing(*pair)]
    if isinstance(expected, Tensor):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        same = found == expected or (found != found and expected != expected)
    return [] if same else [name]


def outcome(library: str, name: str, folder: str) -> str:
    kind = catalogue.classes(library)[name]
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = catalogue.in_one_process(kind)
        if isinstance(alone, str):
            return f"not in one process: {alone}"
        use, expected = alone
        word, text = catalogue.tried(kind, use, expected, "optim", catalogue.CLAIMED)
        if word != "exact":
            return f"not elementwise: {word} {text}"
        outcomes = [of_level(kind, use, level, folder) for level in LEVELS]
        return next((each for each in outcomes if each != "same"), "same")


def of_level(kind: Any, use: catalogue.Use, level: str, folder: str) -> str:
    plain = Job(kind, use, level, None)
    plain.train(NUM_STEPS)
    try:
        job = Job(kind, use, level, folder)
    except ValueError as error:
        return f"refused: {error}"
    job.train(SAVED_AFTER)
    saved = Path(folder) / f"{kind.__name__}-{level}"
    checkpointer = fe.Checkpointer(saved, job.engine, job.optimizer)
    try:
        checkpointer.save(SAVED_AFTER)
        is_saved = True
    except ValueError as error:  # the same save fails with state in memory
        is_saved = False
        if not str(error).startswith(NOT_SAVED):
            raise
    checkpointer.close()
    job.train(NUM_STEPS)
    if found := differing(job.values(), plain.values()):
        return f"differs at {level}: {found[:3]}"
    if not is_saved:
        return "same"
    resumed = Job(kind, use, level, folder)
    with closing(fe.Checkpointer(saved, resumed.engine, resumed.optimizer)) as checkpointer:
        checkpointer.load()
    resumed.num_steps = SAVED_AFTER
    resumed.train(NUM_STEPS)
    if found := differing(resumed.values(), plain.values()):
        return f"resumed, differs at {level}: {found[:3]}"
    return "same"


@pytest.fixture(scope="module")
def found(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    folder = str(tmp_path_factory.mktemp("state"))
    return {
        f"{library}.{name}": set(
            ranks.run(outcome, library, name, folder, world_size=2, timeout=120)
        )
        for library in LIBRARIES
        for name in catalogue.classes(library)
    }


def test_steps_have_the_bits_of_state_in_memory_or_are_refused(found: dict[str, set[str]]) -> None:
    others = ("refused: ", "not in one process: ", "not elementwise: ")
    differ = {
        name: outcomes
        for name, outcomes in found.items()
        if not all(each == "same" or each.startswith(others) for each in outcomes)
    }
    assert differ.keys() == SUM, differ
    assert {name for name in STEP if found[name] != {"same"}} == set()


def test_refusals_say_why(found: dict[str, set[str]]) -> None:
    for name, text in REFUSED.items():
        (error,) = found[name]
        assert error.startswith("refused: optimizer: expected"), error
        assert text in error


def test_a_value_that_differs_is_seen() -> None:
    one = {"state": [torch.zeros(2), 1], "weights": {"a": torch.ones(1)}}
    other = {"state": [torch.tensor([0.0, 1.0]), 1], "weights": {"a": torch.ones(1).double()}}
    assert differing(one, one) == []
    assert differing(other, one) == ["/state/0", "/weights/a"]
