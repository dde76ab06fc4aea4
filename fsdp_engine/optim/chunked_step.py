"""Runs an optimizer's unmodified ``step`` once for each of several chunks of its parameters.

[Note: Steps in chunks]
The step pre-hook runs after all other pre-hooks of the optimizer, which may clip gradients or set
hyperparameters. It runs ``step`` once for each chunk, on a shadow ([Note: Shadow optimizer] in
``sharded_step.py``) that holds the parameters and the state of the chunk. Then torch runs ``step``
on groups without parameters. Every chunk reads the hyperparameters that groups had before the step.
Values that steps store in a group, in the optimizer, or in the state under a key that is not a
parameter (a counter) are stored once, after the last chunk. Each chunk has a copy of tensors of one
element in groups and attributes, because a step may change them in place. A closure is called once,
before the first chunk. :func:`step_in_turn` overlaps the step of a chunk with the copies of its
neighbours.

If an attribute of the optimizer is a list of its parameters (``_params`` of LBFGS), the list of a
shadow has the parameters of its chunk.
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.optim.shadow import Shadow, StepHook, method_of, shadow_class
from fsdp_engine.optim.state_leaves import is_plain


class ChunkShadow(Shadow):
    """A shadow with the parameters and the state of one chunk.

    Attributes:
        chunk_groups: The param groups.
        chunk_states: The state.
        chunk_start: Copies of the groups, and of the attributes, before the step.
    """

    __slots__ = ()

    chunk_groups: list[dict[str, Any]]
    chunk_states: dict[Any, Any]
    chunk_start: list[dict[str, Any]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, with parameters of the chunk."""
        return self.chunk_groups

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the chunk's parameters, and copies of entries whose key is not a tensor."""
        return self.chunk_states


class Stored(NamedTuple):
    """Values that steps store outside the state of parameters.

    Attributes:
        groups: Values in param groups, by index of the group and key.
        attributes: Attributes of the optimizer, by name.
        entries: Entries of the optimizer's state whose keys are not parameters.
    """

    groups: dict[Any, Any]
    attributes: dict[Any, Any]
    entries: dict[Any, Any]


class Shadows:
    """Makes the shadows of one optimizer, and collects the values that steps store in them.

    Args:
        optimizer: The optimizer. No reference to it is kept.

    Attributes:
        function: The method ``step`` of the optimizer's class.
        lists: Attributes of the optimizer that are lists of its parameters.
        stepped: Indices of the param groups of shadows that were stepped.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._class = shadow_class(
            ChunkShadow, optimizer, ("chunk_groups", "chunk_states", "chunk_start")
        )
        self.function: Callable[..., Any] = method_of(type(optimizer), "step")
        self.lists: dict[str, list[Tensor]] = {}
        self.stepped: set[int] = set()
        self.refresh(optimizer)
        self._stored = Stored({}, {}, {})

    def refresh(self, optimizer: Optimizer) -> None:
        """Update ``lists`` after the parameters of the optimizer have changed."""
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self.lists = {
            name: value
            for name, value in vars(optimizer).items()
            if isinstance(value, list) and value and all(id(each) in ids for each in value)
        }

    def make(
        self,
        optimizer: Any,
        groups: list[dict[str, Any]],
        states: dict[Any, Any],
        local_of: Mapping[int, Tensor],
    ) -> Any:
        """Make the shadow with ``groups`` and ``states``.

        Args:
            optimizer: The optimizer, whose other attributes the shadow shares.
            groups: The param groups of the shadow.
            states: The state of the shadow.
            local_of: Tensors of the chunk that replace parameters, by ``id`` of the parameter.
        """
        shadow = object.__new__(self._class)
        shadow.__dict__ = {key: _own(value) for key, value in vars(optimizer).items()}
        for name, params in self.lists.items():
            held = [local_of[id(param)] for param in params if id(param) in local_of]
            shadow.__dict__[name] = held
        groups = [{key: _own(value) for key, value in group.items()} for group in groups]
        shadow.chunk_groups, shadow.chunk_states = groups, states
        shadow.chunk_start = [*map(dict, groups), dict(vars(shadow))]
        return shadow

    def keep(
        self,
        shadow: Any,
        numbers: Collection[int],
        known: Collection[int] = (),
    ) -> None:
        """Keep values that a step has stored in ``shadow``, unless another step has stored them.

        Args:
            shadow: The shadow, which was stepped.
            numbers: Indices of its groups in the optimizer.
            known: The groups whose values other steps have already stored. If there are any, those
                steps have also stored the values outside of groups.
        """
        *starts, start = shadow.chunk_start
        is_all = not known  # tested now, because ``known`` may be ``stepped``, which changes below
        for number, group, before in zip(numbers, shadow.chunk_groups, starts, strict=True):
            for key, value in _changed(before, group) if number not in known else ():
                self._stored.groups.setdefault((number, key), value)
        self.stepped.update(numbers)
        if not is_all:
            return
        for key, value in _changed(start, vars(shadow)):
            if key not in self.lists:
                self._stored.attributes.setdefault(key, value)
        for key, value in shadow.chunk_states.items():
            if not isinstance(key, Tensor):
                self._stored.entries.setdefault(key, value)

    @property
    def values(self) -> Iterator[Any]:
        """All values that steps have stored."""
        return chain.from_iterable(each.values() for each in self._stored)

    @property
    def stored(self) -> Stored:
        """The numbers, strings and one-element tensors that steps have stored."""
        small = ({k: v for k, v in each.items() if _is_small(v)} for each in self._stored)
        return Stored(*small)

    def adopt(self, stored: Stored) -> None:
        """Keep values that steps have stored on another rank."""
        for mine, others in zip(self._stored, stored, strict=True):
            mine.update(others)

    def store(self, optimizer: Any) -> None:
        """Store the kept values in the optimizer."""
        for (number, key), value in self._stored.groups.items():
            _store(optimizer.param_groups[number], key, value)
        for name, value in self._stored.attributes.items():
            _store(vars(optimizer), name, value)
        optimizer.state.update(self._stored.entries)
        self.clear()

    def clear(self) -> None:
        """Discard the record of steps, and the values that they have stored."""
        self.stepped.clear()
        for each in self._stored:
            each.clear()


class StepChunk:
    """Copies of a chunk's tensors to the device for its step. In this class, none are needed."""

    def start_copies(self) -> None:
        """Start to copy the tensors that the step needs to the device."""

    def wait_for_copies(self) -> None:
        """Make compute wait for the copies of :meth:`start_copies`."""

    def leave(self) -> None:
        """Free the memory on the device, after changed tensors are copied back."""


def step_in_turn(steps: Sequence[tuple[StepChunk, Callable[[], object]]]) -> None:
    """Step chunks one after the other.

    While a chunk is stepped, the next chunk is copied to the device and the previous one is copied
    back, so that two chunks have memory at a time.

    Args:
        steps: Each chunk, with the function that steps it and starts to copy changed tensors back.
    """
    chunks = [chunk for chunk, _ in steps]
    for number, (chunk, step) in enumerate(steps):
        if number:
            chunks[number - 1].leave()
        else:
            chunk.start_copies()
        for following in chunks[number + 1 : number + 2]:
            following.start_copies()
        chunk.wait_for_copies()
        step()
    for chunk in chunks[-1:]:
        chunk.leave()


class ChunkedStep(StepHook):
    """Step hooks of an optimizer that is stepped in chunks. See [Note: Steps in chunks].

    Args:
        optimizer: The optimizer.
    """

    takes_moved_state = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._shadows = Shadows(optimizer)
        self._groups: list[list[Tensor]] = []  # the parameters of each param group

    def finish(self, optimizer: Any) -> None:
        """See :class:`StepHook`. torch has stepped groups without parameters."""
        self._shadows.store(optimizer)

    def _changed_groups(self, optimizer: Any) -> list[list[Tensor]] | None:
        """Returns the parameters of each param group. None: they are equal to ``_groups``."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        is_same = [*map(len, groups)] == [*map(len, self._groups)]
        if is_same and all(map(operator.is_, chain(*groups), chain(*self._groups))):
            return None
        return groups

    def _step_members(
        self,
        optimizer: Any,
        members: Mapping[int, Sequence[Tensor]],
        states: dict[Any, Any],
        local_of: Mapping[int, Tensor],
        arguments: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Step a shadow, and keep the values that it stores outside the state of parameters.

        Args:
            optimizer: The optimizer.
            members: The parameters of the shadow, by index of a param group.
            states: Their state, which the step changes.
            local_of: See :meth:`Shadows.make`.
            arguments: The positional arguments of the step.
            kwargs: The keyword arguments of the step.
        """
        groups = [{**optimizer.param_groups[n], "params": list(members[n])} for n in members]
        shadow = self._shadows.make(optimizer, groups, states, local_of)
        self._shadows.function(shadow, *arguments, **kwargs)
        self._shadows.keep(shadow, members)

    def _without_parameters(self, optimizer: Any, others: Mapping[int, Tensor]) -> Any:
        """Make the shadow for torch's own call of ``step``. If that raises, no post-hook runs.

        Args:
            optimizer: The optimizer.
            others: Tensors that replace parameters, by ``id`` of the parameter. Groups have no
                other parameters.
        """
        groups = [
            {**group, "params": [others[id(p)] for p in group["params"] if id(p) in others]}
            for group in optimizer.param_groups
        ]
        return self._shadows.make(optimizer, groups, entries_of(optimizer), others)


def _own(value: Any) -> Any:
    """Returns ``value``, or a copy if it is a tensor of one element.

    A step may change such tensors in place.
    """
    is_number = isinstance(value, Tensor) and value.numel() == 1
    return value.detach().clone() if is_number and not value.requires_grad else value


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values that a step has stored in a dict of :func:`_own` values."""
    for key, value in after.items():
        is_new = before.get(key, after) is not value
        in_place = isinstance(value, Tensor) and value.numel() == 1 and value._version > 0
        if key != "params" and (is_new or (in_place and not value.requires_grad)):
            yield key, value


@torch.no_grad()
def _store(target: dict[str, Any], key: str, value: Any) -> None:
    """Store a value. A tensor of the same shape, dtype and device is overwritten in place."""
    before = target.get(key)
    if (
        isinstance(value, Tensor)
        and isinstance(before, Tensor)
        and (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device)
    ):
        before.copy_(value)
    else:
        target[key] = value


def _is_small(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else is_plain(value)


def entries_of(optimizer: Any) -> defaultdict[Any, Any]:
    """Returns copies of the state entries whose keys are not tensors. Each chunk may change its
    copies."""
    states: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            states[key] = copy.deepcopy(value)
    return states


def called_once(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Call ``closure``, and return a closure that returns the same result to each chunk."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def with_closures(
    args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of ``step`` after ``self``, with ``change`` applied to closures."""
    arguments = [change(each) if callable(each) else each for each in args[1:]]
    return arguments, {
        key: change(value) if key == "closure" and value else value for key, value in kwargs.items()
    }
