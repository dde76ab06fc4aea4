"""Trace a training step: ``python -m tools.traced_step [--fsdp2]`` prints what ran, as JSON.

The program shards three blocks at level 3 over two ranks (one process, a fake group), with bf16
compute weights over fp32 main weights, clipping and AdamW. It trains five steps, and traces the
building of the engine, the fourth step and the fifth. ``tools/structure.py`` reads the result:

- ``shard``, ``step``: lines, functions and files of the package that ran, also those that run when
  a module is imported;
- ``gather``, ``reduction``: the path of calls from a hook to a collective that passes the most
  files: its numbers of files, of changes of file and of calls, and its files in order;
- ``loaded``: modules of the package that are loaded at the end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

# Functions of torch that communicate, in Python and in its bindings.
COLLECTIVES = {
    *("all_gather_single", "_allgather_base", "all_gather_into_tensor", "allgather", "all_gather"),
    *("reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter"),
    *("all_reduce", "allreduce", "all_to_all_single", "alltoall_base"),
    *("isend", "irecv", "send", "recv"),
}
WIDTH = 64


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Coverage:
    """A trace function that records lines, functions and files below ``root``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._lines: set[tuple[str, int]] = set()
        self._functions: set[tuple[str, str, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._root):
            return None
        if event == "call":
            self._functions.add((code.co_filename, code.co_name, code.co_firstlineno))
        elif event == "line":
            self._lines.add((code.co_filename, frame.f_lineno))
        return self

    def run(self, function: Callable[[], Any]) -> Any:
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(None)

    @property
    def counts(self) -> dict[str, int]:
        files = {file for file, _, _ in self._functions}
        return {
            "lines": len(self._lines),
            "functions": len(self._functions),
            "files": len(files),
        }


class Paths:
    """A profile function that records calls below ``root`` from an outermost one to a collective.

    Args:
        root: The folder of the package.
        reduces: Whether to follow reductions. False: gathers.
    """

    def __init__(self, root: str, *, reduces: bool) -> None:
        self._root, self._reduces = root, reduces
        self._depth, self._has_sent = 0, False
        self._calls: list[str] = []
        self._found: list[list[str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_inside = code.co_filename.startswith(self._root)
        if event == "call" and is_inside:
            if not self._depth:
                self._calls, self._has_sent = [], False
            self._depth += 1
            self._calls.append(code.co_filename[len(self._root) + 1 :])
        elif event == "call" and self._depth and code.co_name in COLLECTIVES:
            self._sends(code.co_name)
        elif event == "return" and is_inside:
            self._depth -= 1
        elif event == "c_call" and self._depth and getattr(argument, "__name__", "") in COLLECTIVES:
            self._sends(argument.__name__)

    def _sends(self, name: str) -> None:
        if not self._has_sent and ("reduce" in name) == self._reduces:
            self._found.append(list(self._calls))
        self._has_sent = True

    def run(self, function: Callable[[], Any]) -> Any:
        sys.setprofile(self)
        try:
            return function()
        finally:
            sys.setprofile(None)

    @property
    def longest(self) -> dict[str, Any]:
        calls = max(self._found, key=lambda each: (len(set(each)), len(each)))
        order = [file for file, _ in groupby(calls)]
        return {
            "files": len(set(calls)),
            "switches": len(order) - 1,
            "calls": len(calls),
            "order": order,
        }


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fsdp2", action="store_true", help="trace torch's fully_shard")
    is_fsdp2 = parser.parse_args().fsdp2
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    clip: Callable[[float], Any]
    if is_fsdp2:
        import torch.distributed.fsdp._fully_shard as package
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        def build() -> Callable[[float], Any]:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (*model, model):
                fully_shard(module, mp_policy=policy)
            return lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)

        source = package.__file__
    else:
        import fsdp_engine as fe

        importlib.import_module("fsdp_engine.sharding")  # not part of the call

        def build() -> Callable[[float], Any]:
            engine = fe.shard(
                model,
                strategy="optim_grads_params",
                mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
                initial_values="rank0",
                options=fe.Options(min_unit_size=0),
            )
            return engine.clip_grad_norm_

        source = fe.__file__
    assert source is not None
    root = str(Path(source).parent)
    building, step = Coverage(root), Coverage(root)
    gather, reduction = Paths(root, reduces=False), Paths(root, reduces=True)
    clip = building.run(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(4, WIDTH)

    def forward() -> Tensor:
        loss: Tensor = model(data).float().square().mean()
        return loss

    def finish() -> None:
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    def train() -> None:
        forward().backward()
        finish()

    for _ in range(3):
        train()
    loss = gather.run(forward)
    reduction.run(loss.backward)
    finish()
    step.run(train)
    found = {
        "shard": building.counts,
        "step": step.counts,
        "gather": gather.longest,
        "reduction": reduction.longest,
        "loaded": sorted(each for each in sys.modules if each.partition(".")[0] == "fsdp_engine"),
    }
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # without the finalizers of a group that has one process


if __name__ == "__main__":
    main()
