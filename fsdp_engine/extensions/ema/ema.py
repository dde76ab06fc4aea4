"""An exponential moving average (EMA) of the weights of a sharded model.

Each rank averages its own shards, in memory beside its main weights. Nothing is communicated, and
an update is one or two operations per flat buffer, whatever the number of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_engine.buffers.full_values import set_main
from fsdp_engine.buffers.main_views import main_views, part_like
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.published_gradients import local_part
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.memory import allocator
from fsdp_engine.optim.step_listeners import add_step_check
from fsdp_engine.runtime.gradient_observer import GradientObserver
from fsdp_engine.strategies import Role

_SHADOW = "shadow"
_BUFFERS = "buffers"
_COUNTS = ("num_calls", "num_updates")
# The role under which `Engine.memory_bytes` reports the averages.
_ROLE = "ema"


class EMA:
    """An exponential moving average of the weights of a sharded model.

    ::

        engine = fe.shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ema = fe.EMA(engine, decay=0.999)
        for batch in data:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        with ema.swapped():  # the model has the averages
            evaluate(model)
            fe.save_pretrained(engine, "averages")

    Each update computes ``average = d * average + (1 - d) * weights``, where ``d`` is the decay of
    that update. The averages start as the weights at construction. Frozen parameters have none.

    ``fe.Checkpointer(..., extra={"ema": ema})`` saves and restores the averages, also with another
    number of ranks or other levels.

    Args:
        engine: The engine of the model. All parameters must have values.
        decay: The decay ``d``, in [0, 1).
        every: Update the averages on every ``every``-th call of ``update``; other calls do nothing.
        dtype: The dtype of the averages of weights. None: the dtype of the main weights, but at
            least fp32: in 16 bits, adding ``1 - d`` of the difference rounds to no change. Averages
            of buffers have the dtype of the buffer, but at least fp32.
        warmup: Use ``d = min(decay, (1 + n) / (10 + n))`` for update ``n`` = 0, 1, ..., so that
            early weights are soon forgotten (TensorFlow's ``ExponentialMovingAverage`` with
            ``num_updates``).
        average_buffers: Also average the model's floating-point buffers (e.g. BatchNorm's running
            statistics). False: within ``swapped`` the model keeps its current buffers.
        copy_first: The first update copies the weights, as in torch's ``AveragedModel``. False: the
            first update averages them with the weights at construction.

    Attributes:
        decay, every, warmup, copy_first: The arguments.
        num_updates: Number of updates so far.

    Raises:
        TypeError, ValueError: An argument is invalid.
        RuntimeError: The model has parameters without values.
    """

    def __init__(
        self,
        engine: Engine,
        decay: float = 0.999,
        every: int = 1,
        *,
        dtype: torch.dtype | None = None,
        warmup: bool = False,
        average_buffers: bool = False,
        copy_first: bool = False,
    ) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(
                "engine: expected the result of fe.shard; found a " + type(engine).__name__
            )
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number of at least 0 and below 1; found {decay!r}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected an integer of at least 1; found {every!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"dtype: expected a floating-point torch.dtype or None; found {dtype!r}"
            )
        engine.missing_values.check()
        self.decay = float(decay)
        self.every = every
        self.warmup = warmup
        self.copy_first = copy_first
        self.num_updates = 0
        self._num_calls = 0
        self._engine = engine
        self._averages = [
            _Average(buffer, dtype) for buffer in engine.buffers if buffer.grads is not None
        ]
        self._buffers: dict[str, Tensor] = {}
        if average_buffers:
            self._buffers = {
                name: buffer.to(torch.float32 if buffer.itemsize < 4 else buffer.dtype, copy=True)
                for name, buffer in self._model_buffers().items()
            }
        engine.extension(_BackwardCheck)
        add_step_check(_refuse_averages)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights. Call it after each optimizer step.

        Raises:
            RuntimeError: ``update`` is called within ``swapped`` or ``engine.unsharded()``.
        """
        self._engine.check_trained_weights("EMA.update()")
        self._engine.check_sharded("EMA.update()")
        self._num_calls += 1
        if self._num_calls % self.every:
            return
        decay = self._decay_now()
        for average in self._averages:
            average.move_towards_main(1 - decay)
        current = self._model_buffers() if self._buffers else {}
        for name, buffer in self._buffers.items():
            buffer.lerp_(current[name].to(buffer.dtype), 1 - decay)
        self.num_updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context within which the averages are the model's weights, to evaluate or save them.
        Afterwards the model has its trained weights again, bit for bit. Collective: all ranks
        enter it together.

        Training within the context is not allowed. Temporary memory: if averages and main weights
        have the same dtype, a copy of one flat buffer; otherwise a copy of this rank's main
        weights.

        Raises:
            RuntimeError: A forward or a backward is running, the context is entered twice or within
                ``engine.unsharded()``, or other ranks are in another call. (``engine.unsharded()``
                within ``swapped`` gives full averages.)
                Within the context: a backward begins, an optimizer steps, or ``update`` is called.
        """
        self._engine.check_trained_weights("EMA.swapped()")
        engine = self._engine
        engine.scheduler.check_at_rest("EMA.swapped()")
        engine.check_sharded("EMA.swapped()")
        engine.missing_values.check()
        engine.await_ranks()
        # Other ranks gather this rank's shards, so all ranks meet before the shards change.
        if engine.strategy.depth(Role.OPTIM):
            agree("EMA.swapped()", None, engine.ranks.control_group)
        current = self._model_buffers() if self._buffers else {}
        with ExitStack() as stack:
            for average in self._averages:
                stack.enter_context(average.in_model())
            for name, buffer in self._buffers.items():
                stack.enter_context(_replaced(current[name], buffer))
            stack.enter_context(engine.hold_other_weights("averages, within EMA.swapped()"))
            _SWAPPED.append(engine)
            stack.callback(_SWAPPED.remove, engine)
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages, buffers and counts. The averages are sharded tensors by parameter
        name; they share memory with this object.

        Raises:
            RuntimeError: ``state_dict`` is called within ``swapped``.
        """
        self._engine.check_trained_weights("EMA.state_dict()")
        shadow = {
            name: each for average in self._averages for name, each in average.by_name.items()
        }
        counts = {"num_calls": self._num_calls, "num_updates": self.num_updates}
        return {_SHADOW: shadow, _BUFFERS: dict(self._buffers), **counts}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that ``state_dict`` returned for the same parameters. Averages may also
        be full plain tensors.

        Raises:
            ValueError: An entry is missing or unexpected, or has another shape; names the entry.
                Nothing is loaded.
            RuntimeError: ``load_state_dict`` is called within ``swapped``.
        """
        own = self.state_dict()
        for key in (_SHADOW, _BUFFERS):
            found, expected = state_dict.get(key, {}).keys(), own[key].keys()
            if key == _BUFFERS and bool(found) != bool(expected) and self._model_buffers():
                raise ValueError(
                    f"EMA.load_state_dict(): expected average_buffers={bool(found)}, with which "
                    f"the averages were saved; found average_buffers={bool(expected)}"
                )
            if differ := sorted(found ^ expected):
                kind = "is missing" if differ[0] in expected else "is unexpected"
                raise ValueError(
                    f"EMA.load_state_dict(): expected {len(expected)} {key} entries, those of this "
                    f"model; found {len(found)}: {differ[0]!r} {kind}"
                )
            for name, target in own[key].items():
                if (shape := state_dict[key][name].shape) != target.shape:
                    raise ValueError(
                        f"EMA.load_state_dict(): {name}: expected shape {tuple(target.shape)}; "
                        f"found {tuple(shape)}"
                    )
        if missing := [key for key in _COUNTS if key not in state_dict]:
            raise ValueError(f"EMA.load_state_dict(): expected {missing[0]!r}; found none")
        for key in (_SHADOW, _BUFFERS):
            for name, target in own[key].items():
                given = state_dict[key][name]
                if given is not target:
                    local_part(target).copy_(part_like(given, target))
        self._num_calls = int(state_dict["num_calls"])
        self.num_updates = int(state_dict["num_updates"])

    def _decay_now(self) -> float:
        if self.copy_first and not self.num_updates:
            return 0.0
        if not self.warmup:
            return self.decay
        return min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))

    def _model_buffers(self) -> dict[str, Tensor]:
        """Returns the floating-point buffers of the model by name."""
        return {
            name: buffer
            for name, buffer in self._engine.model.named_buffers()
            if buffer.is_floating_point()
        }


# The engines whose models currently hold averages.
_SWAPPED: list[Engine] = []


def _refuse_averages(optimizer: Optimizer) -> None:
    """Raise if a model that ``optimizer`` is about to step currently holds averages."""
    for engine in _SWAPPED:
        if engine.is_stepped_by(optimizer):
            engine.check_trained_weights("optimizer.step()")


@contextmanager
def _replaced(tensor: Tensor, values: Tensor) -> Iterator[None]:
    """Context within which ``tensor`` holds ``values``, rounded to its dtype. At its end, the
    elements of ``tensor`` that have changed are copied to ``values``, and ``tensor`` has its former
    values again."""
    before = tensor.clone()
    with torch.no_grad():
        tensor.copy_(values)
    try:
        yield
    finally:
        with torch.no_grad():
            is_same = tensor == values.to(tensor.dtype)
            values.copy_(torch.where(is_same, values, tensor.to(values.dtype)))
            tensor.copy_(before)


class _BackwardCheck(GradientObserver):
    """Observer that refuses backwards while averages are in the model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        engine.reductions.observers.append(self)

    def begin_backward(self) -> None:
        """See the base class.

        Raises:
            RuntimeError: Averages are in the model.
        """
        if (engine := self._engine()) is not None:
            engine.check_trained_weights("backward")


class _Average:
    """The averages of the parameters of one buffer, for this rank's shard of the main weights.

    Args:
        buffer: The buffer to average.
        dtype: The dtype of the averages; see ``EMA``.

    Attributes:
        by_name: The average of each parameter, sharded like the parameter.
    """

    def __init__(self, buffer: ParamAndGradBuffer, dtype: torch.dtype | None) -> None:
        self._buffer = buffer
        main = buffer.weights.main
        if dtype is None:
            dtype = torch.promote_types(main.tensor.dtype, torch.float32)
        memory = buffer.context.memory
        if main.tensor.device == memory.device:
            self._flat = memory.persistent(main.tensor.numel(), dtype, _ROLE)
            weakref.finalize(self, memory.unregister, self._flat, _ROLE)
        else:  # The main weights are offloaded.
            self._flat = allocator.zeros(main.tensor.numel(), dtype, main.tensor.device)
        self._flat.copy_(main.tensor)
        self.by_name = main_views(buffer, self._flat)

    def move_towards_main(self, weight: float) -> None:
        """Add ``weight * (main - average)`` to the averages."""
        main = self._buffer.weights.main.tensor
        if main.dtype == self._flat.dtype:
            self._flat.lerp_(main, weight)
        else:
            self._flat.mul_(1 - weight).add_(main, alpha=weight)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context within which the main weights hold the averages."""
        main, average = self._buffer.weights.main.tensor, self._flat
        trained = main.clone()
        set_main(self._buffer, average, temporary=True)
        if trained.dtype == average.dtype:
            # Store the trained weights in the memory of the averages until the context ends.
            average.copy_(trained)
            trained = average
        try:
            yield
        finally:
            averages = self._buffer.weights.main.tensor.clone() if trained is average else None
            set_main(self._buffer, trained, temporary=True)
            if averages is not None:
                average.copy_(averages)
