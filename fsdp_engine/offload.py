"""Where an engine's state lies while it is not used."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp_engine import backend
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import find_module
from fsdp_engine.memory.allocator import DEVICE as DEVICE
from fsdp_engine.memory.allocator import DISK as DISK
from fsdp_engine.memory.allocator import HOST as HOST
from fsdp_engine.memory.allocator import PLACES as PLACES

# Fields that are places.
ROLES = ("optimizer_state", "main_weights", "gradients")


@dataclass(frozen=True)
class Offload(EngineExtension):
    """Places of state between its uses. See ``docs/offload.md``.

    Each is "device"; or "host": pinned memory, from which each unit's part comes to the device and
    to which it returns; or "disk": a file. On a CPU "host" is where state is anyway.

    Attributes:
        optimizer_state: of :func:`~fsdp_engine.shard_optimizer`'s optimizers.
        folder: of a local disk, for "disk". Files in it have no names, and are gone with the
            process.
        main_weights: the weights that optimizers step, of which gathers take this rank's shard.
            Those that are compute weights, and are kept full, stay on the device.
        gradients: reduced ones, which have to be sharded: the inner level is "optim_grads" or
            "optim_grads_params".
        pin_memory: of the host. False: copies take longer, and the host waits for them.
        step_on: "host": optimizers step in host memory, where all of the above lie then, by code
            of the optimizer's own.
        overlap_forward: of an accelerator with ``optimizer_state="host"`` alone: steps run beside
            the next forward, whose gathers wait for the step of their unit. Gradients are freed
            then. Slices of parameters and gradients that were taken before ``step()`` must not be
            used after it: take them anew.

    Raises:
        ValueError: a place is unknown, or "disk" lacks a folder.
    """

    optimizer_state: str = DEVICE
    folder: str | Path | None = None
    main_weights: str = field(default=DEVICE, kw_only=True)
    gradients: str = field(default=DEVICE, kw_only=True)
    step_on: str = field(default=DEVICE, kw_only=True)
    pin_memory: bool = field(default=True, kw_only=True)
    overlap_forward: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for role in ROLES:
            if (place := getattr(self, role)) not in PLACES:
                raise ValueError(f"offload.{role}: expected one of {PLACES}; found {place!r}")
        if DISK in self.places.values() and self.folder is None:
            raise ValueError("offload.folder: expected one for 'disk'; found None")
        if self.step_on not in (DEVICE, HOST):
            raise ValueError(
                f"offload.step_on: expected one of {(DEVICE, HOST)}; found {self.step_on!r}"
            )
        expected = {"optimizer_state": HOST, "main_weights": DEVICE, "gradients": DEVICE}
        if self.overlap_forward:
            for role, place in expected.items():
                if (found := getattr(self, role)) != place:
                    raise ValueError(
                        f"offload.{role}: expected {place!r} with overlap_forward, since the host "
                        f"sees weights and gradients at their homes; found {found!r}"
                    )
        if self.step_on == HOST:
            for role in ROLES:
                if (place := getattr(self, role)) != HOST:
                    raise ValueError(
                        f"offload.{role}: expected 'host', since optimizers step there (step_on); "
                        f"found {place!r}"
                    )

    @property
    def places(self) -> dict[str, str]:
        """By role, those that are not the device."""
        found = {role: getattr(self, role) for role in ROLES}
        return {role: place for role, place in found.items() if place != DEVICE}

    def signature(self) -> str:
        """See :class:`EngineExtension`: folders may differ from node to node."""
        return f"offload={self.places}, step_on={self.step_on}"

    def check(self, setup: Any) -> None:
        """See :class:`EngineExtension`."""
        self.check_plan(setup.plan, setup.axis_plans, setup.data.device)
        if self.places:
            take_files = _module("checks").take_files
            setup.kept[self] = take_files(
                setup.plan, setup.axis_plans, self, setup.data, setup.experts
            )

    def prepare(self, setup: Any, resources: Any) -> None:
        """See :class:`EngineExtension`."""
        resources.placement = self.placed(resources, setup.kept.get(self)).placement

    def start(self, engine: Any) -> None:
        """See :class:`EngineExtension`."""
        _module("").keep_offload(engine, self)

    def check_plan(self, plan: Any, axis_plans: Any, device: torch.device) -> None:
        """Check that weights, gradients and state of ``plan`` can lie at these places.

        Args:
            plan: a :class:`~.units.plan.Plan`.
            axis_plans: a :class:`~.units.plan.AxisPlans`.
            device: where the model computes.

        Raises:
            ValueError: they cannot.
        """
        if self.places:
            _module("checks").check_homes(plan, axis_plans, self, device)

    def placed(self, resources: Any, files: Any = None) -> Any:
        """Returns ``resources`` (:class:`~.units.build.Resources`) for units whose shards lie at
        these places. ``files``: those on a disk that there are already, by role."""
        return _module("placing").placed(resources, self, files) if self.places else resources

    def check_device(self, device: torch.device, *, shards_gradients: bool) -> None:
        """Whether it can be had.

        Args:
            device: where the model computes.
            shards_gradients: whether the inner level does.

        Raises:
            ValueError: no file can be made in the folder, or gradients are not sharded.
        """
        self.check_levels(shards_gradients=shards_gradients)
        if computes_elsewhere(device):
            self.check_pair()
        if DISK not in self.places.values() or not backend.current().has_values:
            return
        assert self.folder is not None
        if not (os.path.isdir(self.folder) and os.access(self.folder, os.W_OK | os.X_OK)):
            raise ValueError(
                f"offload.folder: expected a folder that can be written; found {self.folder}"
            )

    def check_levels(self, *, shards_gradients: bool) -> None:
        """Whether it can be had at a level.

        Args:
            shards_gradients: whether the inner level does.

        Raises:
            ValueError: gradients are not sharded.
        """
        if self.gradients != DEVICE and not shards_gradients:
            raise ValueError(
                "offload.gradients: expected 'device', or the inner level optim_grads or "
                f"optim_grads_params; found {self.gradients!r} with gradients that are not sharded"
            )

    def check_pair(self) -> None:
        """Whether an accelerator's weights and gradients are tensors of one device.

        Raises:
            ValueError: they do not.
        """
        if (self.main_weights == DEVICE) != (self.gradients == DEVICE):
            raise ValueError(
                f"offload.gradients: expected {self.main_weights!r}, where main_weights lie, since "
                f"torch wants a parameter and its .grad on one device; found {self.gradients!r}"
            )

    def main_leaves(self, strategy: Any, codec: Any) -> bool:
        """Whether main weights lie elsewhere.

        Args:
            strategy: their :class:`~.strategies.Strategy`.
            codec: their :class:`~.codecs.ParamCodec`.
        """
        leaves = self.main_weights != DEVICE
        return leaves and bool(_module("homed_main").can_leave_device(strategy, codec))

    def is_cast_by_host(self, strategy: Any, codec: Any) -> bool:
        """Whether compute weights lie in host memory beside main weights; see
        :meth:`main_leaves`."""
        is_there = self.main_weights == HOST and self.main_leaves(strategy, codec)
        return is_there and bool(_module("homed_main").is_cast_at_home(strategy, codec))

    def moves(self, role: str, device: torch.device) -> bool:
        """Whether ``role`` lies elsewhere than where ``device`` computes."""
        place = getattr(self, role)
        return place == DISK or (place == HOST and computes_elsewhere(device))


def computes_elsewhere(device: torch.device) -> bool:
    """Whether ``device`` does not compute in host memory."""
    return backend.current().runs_ahead(device)


def _module(name: str) -> Any:
    """A module of the extension that moves state."""
    return find_module(f"offload.{name}".rstrip("."), "offload")
