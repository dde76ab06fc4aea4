"""Trials that determine which part of a model one step of an optimizer needs at once.

[Note: Trial of an optimizer]
Whether a rank may step its slice of a parameter, or needs the full tensor, or all tensors, depends
on the optimizer's code, which may be of any package. So the engine runs trial steps on small
parameters with the hyperparameters of a group and the number of dims of its parameters:

    steps on      are compared with steps on            if they are equal, the optimizer steps
    one tensor    flat slices of it, one of them empty  each element by itself
    two tensors   each of them alone, and the first     each tensor by itself
                  beside a tensor of other values
    two groups    the same, with groups                 each group by itself

Equal means equal up to rounding. The trial compares the changes of the parameters over some steps
and the numbers that the steps store in groups, attributes and state, because some optimizers
(Prodigy, SWATS) compute sums from the first step on but use them much later. For the same reason, a
step needs the tensor if its state has objects, or tensors of another shape than the parameter's. A
step that raises for slices needs the tensor. A step that never changes anything is assumed to need
all tensors. If a step requires a closure, the closure returns a linear loss with the trial's
gradients.

The scale of gradients differs between the slices and between steps, so that sums over a slice
(norms, means, factored moments, Gram matrices) do not agree with sums over the tensor by chance.
Some gradients are orthogonal to the parameter (AdamP projects these). Each comparison is made on
parameters of usual size and on very small ones, in which small updates are not lost by rounding.
Gradients of the small ones have a trend, from which optimizers that adapt their step size learn
(Prodigy).

Whether the time of a step grows with the number of elements of a matrix, or with this number times
the shorter side, is determined from the operations of the step. The shorter side counts if the step
contains a product all of whose dims are at least as long as that side, or a decomposition.

If the trial on a small tensor finds an elementwise step, one on a larger tensor follows. Its dims
exceed the size from which known optimizers factor their state (128), and its slices start at
multiples of 256 elements, the blocks in which 8-bit state is quantised.
"""

from __future__ import annotations

import copy
import enum
import inspect
import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp_engine.accelerator import is_accelerator
from fsdp_engine.extensions.whole_tensor_optimizers.ownership import shorter_side
from fsdp_engine.memory import allocator
from fsdp_engine.optim.chunked_step import Shadows, entries_of
from fsdp_engine.optim.state_leaves import is_plain, leaves_of

_DIMS = (24, 161)  # maximum dims of the small and the large tensor
_BLOCK = 256
_SCALES = (1.0, 1e-6)  # scales of the initial values of trial parameters
_LEAST_RATE = 0.01  # minimum learning rate of trial steps, since a schedule may start at 0
_NUM_STEPS = 12
_MOST_STEPS = 36  # for optimizers that only collect statistics at first
# Two changes are equal if the norm of their difference is at most this share of the norm of one.
_TOLERANCE = 1e-5
# The same for comparisons in which products of one matrix and of a batch of matrices may differ by
# rounding to 16 bits.
_TOLERANCE_OF_BATCHES = 1e-3
# Operations of aten that multiply matrices.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_NOT_OF_MATRICES = ("linalg_vector_norm", "linalg_cross")


class Needs(enum.IntEnum):
    """Set of values that a step needs at once."""

    ELEMENT = 0
    TENSOR = 1
    GROUP = 2
    ALL = 3


class Found(NamedTuple):
    """Result of a trial for one parameter.

    Attributes:
        needs: The set of values that its step needs at once.
        multiplies: Whether the step multiplies or decomposes matrices of the parameter's size.
    """

    needs: Needs
    multiplies: bool


class TrialFailed(Exception):
    """A step of a trial raised an exception, which is the cause of this one."""


class _Watch(TorchDispatchMode):
    """Mode that makes collectives raise: owners step different tensors, so a collective within a
    step would wait for ranks that do not call it.

    Attributes:
        largest_product: Maximum, over products and decompositions of matrices, of the smallest dim.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest_product = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(
                f"expected a step without collectives, since each rank steps other tensors; found "
                f"that it calls {func.overloadpacket}"
            )
        name = func.overloadpacket.__name__
        if name in _PRODUCTS or ("linalg" in name and name not in _NOT_OF_MATRICES):
            matrices = [each for each in args if isinstance(each, Tensor) and each.ndim >= 2]
            dims = [min(each.shape[-2:]) for each in matrices]
            if name in _PRODUCTS:
                left, right = matrices[-2:]
                dims = [min(*left.shape[-2:], right.shape[-1])]
            self.largest_product = max([self.largest_product, *dims])
        return func(*args, **(kwargs or {}))


class _Outcome(NamedTuple):
    """Results of some steps.

    Attributes:
        changes: Flat change of each parameter.
        states: State of each parameter.
        common: For each group, its hyperparameters and the values that steps stored elsewhere.
    """

    changes: list[Tensor]
    states: list[dict[Any, Any]]
    common: list[list[Any]]

    @property
    def has_changes(self) -> bool:
        """Whether any parameter changed."""
        return any(bool(change.any()) for change in self.changes)


class Trials:
    """Trials of one optimizer.

    Args:
        optimizer: The optimizer, which is not changed.
        device: The device of trial steps.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer: Any = optimizer
        self._device = device
        self._num_steps = _NUM_STEPS
        self._largest_product = 0
        self._found: dict[tuple[int, tuple[int, ...], torch.dtype], Found] = {}

    @_disable_current_modes()  # A trial needs values, also in a simulation.
    def find(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> Found:
        """Returns how a parameter of group ``number`` is stepped.

        Args:
            number: Number of the param group.
            shape: Shape of the unsharded parameter.
            dtype: Dtype of the parameter.

        Raises:
            TrialFailed: A step raised an exception.
        """
        # An empty parameter is stepped like others with the same number of dims.
        shape = tuple(max(size, 1) for size in shape) or (1,)
        small, large = (tuple(min(size, dim) for size in shape) for dim in _DIMS)
        key = number, large, dtype
        if key not in self._found:
            self._largest_product = 0
            found = Needs.ELEMENT
            if any(self._needs_tensor(number, small, dtype, scale) for scale in _SCALES) or any(
                self._needs_tensor(number, large, dtype, scale) for scale in _SCALES
            ):
                found = Needs.TENSOR
            coupled = (self._needs_others(number, small, dtype, scale) for scale in _SCALES)
            needs = max(found, *coupled)
            self._found[key] = Found(needs, self._largest_product >= shorter_side(small))
        return self._found[key]

    def _needs_tensor(
        self, number: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float
    ) -> bool:
        numel = math.prod(shape)
        values = self._values(shape, dtype, scale, 1)
        cut = numel // 5 * 2 // _BLOCK * _BLOCK or numel // 2
        flat = [value.flatten() for value in values]
        ends = (0, cut, numel, numel)  # The last slice is empty, since ranks may have empty ones.
        parts = [[value[a:b] for value in flat] for a, b in itertools.pairwise(ends)]
        whole = self._run_until_changes([[values]], number)
        try:
            slices = [self._run([[part]], number, self._num_steps) for part in parts]
        except TrialFailed:
            return True
        changes = torch.cat([each.changes[0] for each in slices])
        return (
            _is_structured(whole.states[0], shape)
            or not _equal(whole.changes, [changes], values[0], _TOLERANCE)
            or not all(
                _same_numbers(each.common, whole.common)
                and _same_numbers(
                    _beside_tensors(each.states[0], each.changes[0].shape),
                    _beside_tensors(whole.states[0], shape),
                )
                for each in slices
            )
        )

    def _needs_others(
        self, number: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float
    ) -> Needs:
        first, second, third = (self._values(shape, dtype, scale, seed) for seed in (1, 2, 3))
        beside = self._run_until_changes([[first, second]], number)
        if not beside.has_changes:
            return Needs.ALL  # The trial shows nothing, so assume the most.

        def run(*groups: list[list[Tensor]]) -> _Outcome:
            return self._run(groups, number, self._num_steps)

        alone = run([first]), run([second])
        if _is_sum_of(beside, alone, run([first, third]), first[0]):
            return Needs.ELEMENT
        try:
            together, other = run([first], [second]), run([first], [third])
        except TrialFailed:  # The optimizer accepts only one group.
            return Needs.ALL
        return Needs.GROUP if _is_sum_of(together, alone, other, first[0]) else Needs.ALL

    def _values(
        self, shape: tuple[int, ...], dtype: torch.dtype, scale: float, seed: int
    ) -> list[Tensor]:
        """Returns the initial values, followed by the gradient of each step. In some steps, the
        first 2/5 of the gradient's elements have another scale than the rest."""
        generator = torch.Generator().manual_seed(seed)

        def normal() -> Tensor:
            values = allocator.zeros(tuple(shape), torch.float32, "cpu")
            return values.normal_(generator=generator)

        values = [normal() * scale]
        trend = normal() * (2 if scale < 1 else 0)
        for step in range(_MOST_STEPS):
            grad = trend + normal()
            if step % 2 and grad.numel() > 1:
                grad -= values[0] * ((grad * values[0]).sum() / values[0].square().sum())
            flat, half = grad.view(-1), grad.numel() // 5 * 2
            flat[:half] *= (1.0, 1.0, 0.03, 7.0)[step % 4]
            values.append(grad * (0.3 if (step + seed) % 2 else 2.0))
        return [value.to(self._device, dtype) for value in values]

    def _run_until_changes(self, groups: Sequence[Sequence[list[Tensor]]], number: int) -> _Outcome:
        """Run like :meth:`_run`, with more steps if the parameters do not change at first."""
        self._num_steps = _NUM_STEPS
        found = self._run(groups, number, _NUM_STEPS)
        if found.has_changes:
            return found
        self._num_steps = _MOST_STEPS
        return self._run(groups, number, _MOST_STEPS)

    def _run(
        self, groups: Sequence[Sequence[list[Tensor]]], number: int, num_steps: int
    ) -> _Outcome:
        """Run some steps.

        Args:
            groups: For each group and each parameter, its value and its gradients.
            number: Number of the param group whose hyperparameters are used.
            num_steps: Number of steps.

        Raises:
            TrialFailed: A step raised an exception.
        """
        optimizer = self._optimizer
        like = {**copy.deepcopy(_without_params(optimizer.param_groups[number]))}
        if "lr" in like:
            lr = like["lr"]
            like["lr"] = lr * 0 + max(float(lr), _LEAST_RATE)
        if "train_mode" in like:
            like["train_mode"] = True  # Schedule-free optimizers step only in this mode.
        params = [[nn.Parameter(values[0].clone()) for values in group] for group in groups]
        flat = [param for group in params for param in group]
        shadows = Shadows(optimizer)
        made = [{**copy.deepcopy(like), "params": group} for group in params]
        shadow = shadows.make(optimizer, made, entries_of(optimizer), {})
        _detach_attributes(shadow, optimizer, shadows.lists, flat)
        device = self._device
        devices = [device] if is_accelerator(device) else []
        with torch.random.fork_rng(devices, device_type=device.type):
            torch.manual_seed(0)
            for step in range(num_steps):
                for group, values in zip(params, groups, strict=True):
                    for param, each in zip(group, values, strict=True):
                        param.grad = each[1 + step].clone()
                self._step(shadows, shadow, flat)
        starts = [values[0] for group in groups for values in group]
        changes = [
            (param.detach().double() - start.double()).flatten()
            for param, start in zip(flat, starts, strict=True)
        ]
        kept = {"state", "param_groups", *shadows.lists}
        attributes = {key: value for key, value in vars(shadow).items() if key not in kept}
        entries = {
            key: value for key, value in shadow.chunk_states.items() if not isinstance(key, Tensor)
        }
        states = [shadow.chunk_states[param] for param in flat]
        common = [[_without_params(group), attributes, entries] for group in shadow.param_groups]
        return _Outcome(changes, states, common)

    def _step(self, shadows: Shadows, shadow: Any, params: Sequence[Any]) -> None:
        parameter = inspect.signature(shadows.function).parameters.get("closure")
        needs_closure = parameter is not None and parameter.default is inspect.Parameter.empty
        # A linear loss with the gradients of this step.
        closure = (
            [lambda: sum((p.detach() * p.grad).sum() for p in params)] if needs_closure else []
        )
        try:
            with _Watch() as watch:
                shadows.function(shadow, *closure)
            self._largest_product = max(self._largest_product, watch.largest_product)
        except Exception as error:
            raise TrialFailed from error


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _detach_attributes(
    shadow: Any, optimizer: Any, lists: Collection[str], params: Sequence[Tensor]
) -> None:
    """Copy attributes to the shadow, with lists of parameters replaced by those of the trial."""
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        shadow.__dict__[hooks] = OrderedDict()  # A step may call the step of its parent class.
    for name, value in vars(optimizer).items():
        if name in lists:
            shadow.__dict__[name] = list(params)
        elif name not in ("state", "param_groups", "defaults") and not name.startswith(
            ("_optimizer_", "_zero_grad", "_patch")
        ):
            shadow.__dict__[name] = _copied(value)


def _copied(value: Any) -> Any:
    """Returns a shallow copy of plain containers and tensors; other objects are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (dict, list, tuple, set):
        return copy.copy(value)
    return value


def _is_structured(state: dict[Any, Any], shape: tuple[int, ...]) -> bool:
    """Returns whether the state of a parameter contains anything other than numbers and tensors of
    its shape or of one element."""
    return not all(
        value.shape == shape or value.numel() == 1 if isinstance(value, Tensor) else is_plain(value)
        for value in state.values()
    )


def _is_sum_of(found: _Outcome, alone: Sequence[_Outcome], other: _Outcome, start: Tensor) -> bool:
    """Returns whether steps on two parameters had the same results as steps on each of them.

    Args:
        found: Results of steps on both.
        alone: Results of steps on each.
        other: Results of steps on the first, and on one with other values in place of the second.
        start: Initial values of the first.
    """
    changes = [each.changes[0] for each in alone]
    last = len(found.common) - 1
    return (
        _equal(found.changes[:1], other.changes[:1], start, _TOLERANCE)
        and _equal(found.changes, changes, start, _TOLERANCE_OF_BATCHES)
        and _same_numbers(found.states, [each.states[0] for each in alone])
        and all(
            _same_numbers(found.common[min(number, last)], each.common[0])
            for number, each in enumerate(alone)
        )
    )


def _same_numbers(found: Any, expected: Any) -> bool:
    """Returns whether numbers in nested dicts and lists are equal up to rounding."""
    one, other = list(map(_number, leaves_of(found))), list(map(_number, leaves_of(expected)))
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=_TOLERANCE_OF_BATCHES) or (a != a and b != b)
        for a, b in zip(one, other, strict=True)
    )


def _beside_tensors(state: dict[Any, Any], shape: Sequence[int]) -> list[Any]:
    """Returns the state without tensors of the parameter's shape."""
    return [
        value
        for value in state.values()
        if not isinstance(value, Tensor) or value.shape != torch.Size(shape)
    ]


def _number(leaf: Any) -> float:
    """Returns a number, or the only element of a tensor; 0 for other objects."""
    if isinstance(leaf, Tensor):
        is_one = leaf.numel() == 1 and not leaf.is_complex() and not isinstance(leaf, DTensor)
        return float(leaf) if is_one else 0.0
    return float(leaf) if isinstance(leaf, bool | int | float) else 0.0


def _equal(
    found: Sequence[Tensor], expected: Sequence[Tensor], start: Tensor, tolerance: float
) -> bool:
    """Returns whether changes are equal, up to rounding of parameters like ``start``."""
    if len(found) != len(expected):
        return False
    eps = torch.finfo(start.dtype).eps
    rounding = _NUM_STEPS * eps * start.double().norm()
    relative = max(tolerance, eps)
    return all(
        bool((one - other).norm() <= relative * other.norm() + rounding)
        for one, other in zip(found, expected, strict=True)
    )
