"""Runs an optimizer's unmodified ``step`` once for each of several chunks of its parameters.

[Note: Steps in chunks]
The step pre-hook runs behind all others of the optimizer, which may clip gradients or set
hyperparameters. ``step`` runs once for each chunk, on a shadow ([Note: Shadow optimizer] in
``sharded_step.py``) that holds the parameters and the state of the chunk; then torch runs it on
groups without parameters. Every chunk sees the hyperparameters that groups had before the step;
what a step stores in a group, in the optimizer, or in the state under a key that is no parameter (a
counter), is stored once, after the last chunk; tensors of one element in groups and attributes are
copies in each chunk, which a step may change in place. A closure is called once, before the first.
:func:`step_in_turn` overlaps the step of a chunk with the copies of its neighbours.

Attributes of the optimizer that are lists of its parameters (``_params`` of LBFGS) hold those of
the chunk in its shadow.
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
    """A shadow with the parameters and the state of one chunk."""

    __slots__ = ()

    chunk_groups: list[dict[str, Any]]
    chunk_states: dict[Any, Any]
    chunk_start: list[dict[str, Any]]  # the groups, and the attributes, before the step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer with parameters in the chunk."""
        return self.chunk_groups

    @property
    def state(self) -> dict[Any, Any]:
        """By parameters of the chunk; keys that are no tensors have copies of the optimizer's."""
        return self.chunk_states


class Stored(NamedTuple):
    """What steps store elsewhere than in the state of parameters.

    Attributes:
        groups: by number and key of a param group.
        attributes: of the optimizer, by name.
        entries: of its state, by keys that are no parameters.
    """

    groups: dict[Any, Any]
    attributes: dict[Any, Any]
    entries: dict[Any, Any]


class Shadows:
    """Makes the shadows of one optimizer, and gathers what steps store on them.

    Args:
        optimizer: is not kept.

    Attributes:
        function: its step.
        lists: its attributes that are lists of its parameters.
        stepped: numbers of the param groups of shadows that were stepped.
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
        """Param groups have other parameters."""
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
        """The shadow with ``groups`` and ``states``.

        Args:
            optimizer: whose other attributes it shares.
            groups: its param groups.
            states: its state.
            local_of: by ``id`` of a parameter, the tensor of the chunk that replaces it.
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
        """Keep what a step on ``shadow`` stored, unless another step stored it.

        Args:
            shadow: The shadow, which was stepped.
            numbers: The numbers of its groups in the optimizer.
            known: Those of these groups of which other steps stored everything. If there are any,
                these steps have also stored all that is in no group.
        """
        *starts, start = shadow.chunk_start
        is_all = not known  # ``known`` may be ``stepped``
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
        """What steps stored."""
        return chain.from_iterable(each.values() for each in self._stored)

    @property
    def stored(self) -> Stored:
        """Numbers and small values that steps stored."""
        small = ({k: v for k, v in each.items() if _is_small(v)} for each in self._stored)
        return Stored(*small)

    def adopt(self, stored: Stored) -> None:
        """Remember what steps stored on another rank."""
        for mine, others in zip(self._stored, stored, strict=True):
            mine.update(others)

    def store(self, optimizer: Any) -> None:
        """Store in the optimizer what steps of its shadows stored there."""
        for (number, key), value in self._stored.groups.items():
            _store(optimizer.param_groups[number], key, value)
        for name, value in self._stored.attributes.items():
            _store(vars(optimizer), name, value)
        optimizer.state.update(self._stored.entries)
        self.clear()

    def clear(self) -> None:
        """Forget the steps, and what they stored."""
        self.stepped.clear()
        for each in self._stored:
            each.clear()


class StepChunk:
    """Memory on the device that the step of a chunk needs. Each method does nothing here."""

    def bring(self) -> None:
        """Begin to bring what the step needs to the device."""

    def await_brought(self) -> None:
        """Let compute wait for what :meth:`bring` began."""

    def leave(self) -> None:
        """Free the memory when what the step changed has returned."""


def step_in_turn(steps: Sequence[tuple[StepChunk, Callable[[], object]]]) -> None:
    """Step chunks. While one is stepped, the next one is brought, and the one before it returns, so
    that two of them have memory at a time.

    Args:
        steps: Each chunk, and the function that steps it and begins to return what changed.
    """
    chunks = [chunk for chunk, _ in steps]
    for number, (chunk, step) in enumerate(steps):
        if number:
            chunks[number - 1].leave()
        else:
            chunk.bring()
        for following in chunks[number + 1 : number + 2]:
            following.bring()
        chunk.await_brought()
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
        """See :class:`StepHook`: torch has stepped groups without parameters."""
        self._shadows.store(optimizer)

    def _changed_groups(self, optimizer: Any) -> list[list[Tensor]] | None:
        """The parameters of each param group; None: they are those of ``_groups``."""
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
        """Step a shadow, and keep what it stores elsewhere than in the state of parameters.

        Args:
            optimizer: The optimizer.
            members: The shadow's parameters by number of a param group.
            states: Their state, which the step changes.
            local_of: See :meth:`Shadows.make`.
            arguments: The arguments of the step.
            kwargs: Those that have a keyword.
        """
        groups = [{**optimizer.param_groups[n], "params": list(members[n])} for n in members]
        shadow = self._shadows.make(optimizer, groups, states, local_of)
        self._shadows.function(shadow, *arguments, **kwargs)
        self._shadows.keep(shadow, members)

    def _without_parameters(self, optimizer: Any, others: Mapping[int, Tensor]) -> Any:
        """The shadow for torch's own call of the step, which no hook sees fail.

        Args:
            optimizer: The optimizer.
            others: Tensors that replace parameters, by ``id`` of the parameter. Groups have no
                other members.
        """
        groups = [
            {**group, "params": [others[id(p)] for p in group["params"] if id(p) in others]}
            for group in optimizer.param_groups
        ]
        return self._shadows.make(optimizer, groups, entries_of(optimizer), others)


def _own(value: Any) -> Any:
    """A copy of a tensor of one element, since a step may change it in place."""
    is_number = isinstance(value, Tensor) and value.numel() == 1
    return value.detach().clone() if is_number and not value.requires_grad else value


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a step stored in a dict of :func:`_own` values."""
    for key, value in after.items():
        is_new = before.get(key, after) is not value
        in_place = isinstance(value, Tensor) and value.numel() == 1 and value._version > 0
        if key != "params" and (is_new or (in_place and not value.requires_grad)):
            yield key, value


@torch.no_grad()
def _store(target: dict[str, Any], key: str, value: Any) -> None:
    """Store a value; a tensor keeps its identity."""
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
    """Copies of state under keys that are no parameters, since each chunk may change it."""
    states: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            states[key] = copy.deepcopy(value)
    return states


def called_once(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Call ``closure``, and return one that returns its result to each chunk."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def with_closures(
    args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of ``step`` without the optimizer, with closures changed."""
    arguments = [change(each) if callable(each) else each for each in args[1:]]
    return arguments, {
        key: change(value) if key == "closure" and value else value for key, value in kwargs.items()
    }
