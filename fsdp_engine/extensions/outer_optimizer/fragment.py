"""The outer weights of one fragment of a model, and their steps.

A fragment is a set of units. Each rank stores the outer weights of its shards of these units in one
flat tensor, which is the only parameter of the fragment's outer optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fsdp_engine.buffers.full_values import present_main, set_main
from fsdp_engine.buffers.main_views import main_views, part_like
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.published_gradients import local_part
from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import HOST, Memory

# DiLoCo's outer optimizer (https://arxiv.org/abs/2311.08105, section 3).
NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
_CHECKED = 2**20  # number of words that a checksum sums at a time
# The role under which `Engine.memory_bytes` reports outer weights.
_ROLE = "outer weights"


@dataclass
class Exchange:
    """An exchange that has begun.

    Attributes:
        movement: The outer weights minus this replica's main weights, 1-D. Once ``ticket`` is done,
            their mean over replicas.
        ticket: The end of the communication; None: it is done.
        due: The number of the inner step after which the outer optimizer steps.
    """

    movement: Tensor
    ticket: Ticket | None
    due: int


class Fragment:
    """The outer weights of some units on this rank.

    Args:
        number: The index of the fragment.
        buffers: The trainable buffers of its units.
        make_optimizer: Function that makes the outer optimizer from a list of one parameter.
        memory: The memory of the engine.
        on_host: Whether outer weights are in memory of the host.

    Attributes:
        number: See above.
        names: Names of the parameters.
        optimizer: The outer optimizer.
        exchange: The exchange that has begun and whose outer step has not been taken.
        exchanged_at: The number of the inner step after which the last exchange began.
    """

    def __init__(
        self,
        number: int,
        buffers: Sequence[ParamAndGradBuffer],
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        memory: Memory,
        *,
        on_host: bool,
    ) -> None:
        self.number = number
        self.names = [record.name for buffer in buffers for record in buffer.records]
        self.exchange: Exchange | None = None
        self.exchanged_at = 0
        self._buffers = buffers
        self._device = memory.device
        mains = [buffer.weights.main.tensor for buffer in buffers]
        dtype = torch.float32
        for main in mains:
            dtype = torch.promote_types(dtype, main.dtype)
        self._sizes = [main.numel() for main in mains]
        are_on_disk = not all(buffer.weights.main_shard.is_resident for buffer in buffers)
        if on_host or are_on_disk or any(main.device != memory.device for main in mains):
            flat = allocator.zeros(sum(self._sizes), dtype, "cpu")
            memory.book_elsewhere(self, HOST, _ROLE, flat)
        else:
            flat = memory.persistent(sum(self._sizes), dtype, _ROLE)
        self._outer = nn.Parameter(flat)
        self.optimizer = make_optimizer([self._outer])

    @property
    def checksum(self) -> int:
        """A number that depends on the bits and the places of all outer weights."""
        words = self._outer.detach().view(torch.uint8).view(torch.int32)
        total = 0
        for part in words.split(_CHECKED):
            # Sums of integers do not depend on the order of summation. The sum of running sums
            # multiplies each word by a different number, so it depends on their order.
            total = (31 * total + int(part.long().cumsum(0).sum())) % 2**63
        return total

    @property
    def group(self) -> dict[str, Any]:
        """The hyperparameters of the outer optimizer, by name."""
        (group,) = self.optimizer.param_groups
        return {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }

    @property
    def hyperparameters(self) -> str:
        """The class and the hyperparameters of the outer optimizer as text, for comparisons."""
        return f"{type(self.optimizer).__name__} with {self.group}"

    @torch.no_grad()
    def take_main(self) -> None:
        """Set the outer weights to the main weights."""
        for buffer, part in self._parts(self._outer.detach()):
            part.copy_(present_main(buffer).tensor)

    @torch.no_grad()
    def movement(self) -> Tensor:
        """Returns outer weights minus main weights in new memory of the device, 1-D: the gradient
        of the outer optimizer, before it is averaged."""
        found = self._outer.detach().to(self._device, copy=True)
        for buffer, part in self._parts(found):
            part.sub_(present_main(buffer).tensor.to(part))
        return found

    @torch.no_grad()
    def step(self, movement: Tensor, alpha: float) -> None:
        """Step the outer optimizer, and move main weights to the outer weights. Parameters that
        were frozen since ``shard()`` keep their outer weights and their outer optimizer state.

        Args:
            movement: The mean of :meth:`movement` over replicas.
            alpha: The share of this replica's present main weights in the new ones.
        """
        self._outer.grad = movement.to(self._outer.device)
        flats = [self._outer.detach(), *self._elementwise_state()]
        kept = [(part, part.clone()) for flat in flats for part in self._frozen_parts(flat)]
        self.optimizer.step()
        for part, values in kept:
            part.copy_(values)
        self._outer.grad = None
        self.write_main(alpha)

    @torch.no_grad()
    def write_main(self, alpha: float = 0.0) -> None:
        """Set main weights to ``alpha * main + (1 - alpha) * outer``."""
        for buffer, outer in self._parts(self._outer.detach()):
            values = outer
            if alpha:
                main = present_main(buffer).tensor
                values = torch.lerp(outer.to(main.device), main.to(outer.dtype), alpha)
            set_main(buffer, values)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context within which the main weights are the outer weights."""
        kept = [present_main(buffer).tensor.clone() for buffer in self._buffers]
        for buffer, outer in self._parts(self._outer.detach()):
            set_main(buffer, outer, temporary=True)
        try:
            yield
        finally:
            for buffer, values in zip(self._buffers, kept, strict=True):
                set_main(buffer, values, temporary=True)

    def weights(self) -> dict[str, Tensor]:
        """Returns the outer weights as sharded tensors by parameter name. They share memory with
        this object."""
        return self._views(self._outer.detach())

    def pending(self) -> dict[str, Tensor]:
        """Returns the mean movement of an exchange whose outer step has not been taken, by
        parameter name. Empty: there is none. The communication must be done."""
        return {} if self.exchange is None else self._views(self.exchange.movement)

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the state of the outer optimizer: for each of its keys, the values by parameter
        name. A value without an element per weight is the same for all parameters of the
        fragment."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.optimizer.state.get(self._outer, {}).items():
            if self._is_elementwise(value):
                found[key] = self._views(value)
            elif value is not None:
                plain = value.item() if isinstance(value, Tensor) else value
                found[key] = dict.fromkeys(self.names, plain)
        return found

    @torch.no_grad()
    def load(
        self,
        weights: dict[str, Any],
        state: dict[str, dict[str, Any]],
        group: dict[str, Any],
        pending: dict[str, Any],
        due: int | None,
    ) -> None:
        """Replace outer weights, the outer optimizer's state and hyperparameters, and the pending
        exchange.

        Args:
            weights, state, group, pending: As :meth:`weights`, :meth:`state`, :attr:`group` and
                :meth:`pending` return them, possibly with further names, or full plain tensors.
            due: The inner step after which the outer step of the pending exchange is taken. None:
                there is no pending exchange.
        """
        self._copy(weights, self._outer.detach())
        own: dict[str, Any] = {}
        for key, values in state.items():
            first = values[self.names[0]]
            if isinstance(first, Tensor):
                outer = self._outer
                own[key] = allocator.zeros(outer.numel(), outer.dtype, outer.device)
                self._copy(values, own[key])
            else:
                own[key] = torch.tensor(float(first)) if isinstance(first, int | float) else first
        groups = [{**group, "params": [0]}]
        self.optimizer.load_state_dict({"state": {0: own} if own else {}, "param_groups": groups})
        self.exchange = None
        if due is not None:
            movement = allocator.zeros(self._outer.numel(), self._outer.dtype, self._device)
            self._copy(pending, movement)
            self.exchange = Exchange(movement, None, due)

    def flat_state(self) -> dict[str, Any]:
        """Returns this rank's outer weights and the state of the outer optimizer. They share memory
        with this object."""
        return {"weights": self._outer.detach(), "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_flat(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`flat_state` of a rank with the same shards."""
        self._outer.copy_(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _copy(self, values: dict[str, Any], flat: Tensor) -> None:
        for name, target in self._views(flat).items():
            if values[name] is not target:
                local_part(target).copy_(part_like(values[name], target))

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for buffer, part in self._parts(flat):
            found |= main_views(buffer, part)
        return found

    def _elementwise_state(self) -> list[Tensor]:
        state = self.optimizer.state.get(self._outer, {}).values()
        return [value for value in state if self._is_elementwise(value)]

    def _is_elementwise(self, value: Any) -> bool:
        """Whether a value of the optimizer's state has an element for each outer weight."""
        return isinstance(value, Tensor) and value.shape == self._outer.shape

    def _frozen_parts(self, flat: Tensor) -> Iterator[Tensor]:
        """Yields the parts of ``flat`` for parameters that were frozen since ``shard()``."""
        for buffer, part in self._parts(flat):
            if all(param.requires_grad for param in buffer.sharded_params):
                continue
            views = main_views(buffer, part).values()
            for param, view in zip(buffer.sharded_params, views, strict=True):
                if not param.requires_grad:
                    yield local_part(view)

    def _parts(self, flat: Tensor) -> Iterator[tuple[ParamAndGradBuffer, Tensor]]:
        """Yields each buffer with its range of ``flat``."""
        return zip(self._buffers, flat.split(self._sizes), strict=True)
