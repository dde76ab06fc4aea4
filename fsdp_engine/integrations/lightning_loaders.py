"""Gives all ranks of Lightning's Trainer the same number of steps if their loaders differ.

The Trainer gets an :class:`EvenLoader`, which yields the same number of batches on all ranks. Its
strategy takes the step of each batch from the loader, in the order of the batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.integrations.loader_steps import LoaderStep, length_of

_BY_RANK = "fsdp_engine: by rank"


@runtime_checkable
class _Stateful(Protocol):
    """A loader whose position can be saved."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class EvenLoader:
    """Loader that yields as many batches on each rank as the longest loader of any rank has.

    Args:
        engine: The engine of the model.
        loader: The loader of this rank.
        length: The length of the longest loader. None: unknown.
    """

    def __init__(self, engine: Engine, loader: Any, length: int | None) -> None:
        self._engine = engine
        self._loader = loader
        self._length = length
        self._given: deque[LoaderStep] = deque()
        self._lacks_batches = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Lightning looks for private attributes of torch's loaders
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """The attribute of the loader, which Lightning sets."""
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self._loader).__name__} has no len()")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._given.clear()
        is_first = True
        for step in self._engine.even_steps(self._batches()):
            if is_first:
                self._lacks_batches = step.num_ranks < self._engine.ranks.size
                is_first = False
            self._given.append(step)
            yield step.batch

    @property
    def lacks_batches(self) -> bool:
        """Whether some rank had no batch at all in the last iteration."""
        return self._lacks_batches

    def take_step(self) -> LoaderStep | None:
        """Returns the step of the next batch that the Trainer trains or evaluates; None if there is
        no such batch."""
        return self._given.popleft() if self._given else None

    def _batches(self) -> Iterator[Any]:
        return iter(self._loader)


class StatefulEvenLoader(EvenLoader):
    """An :class:`EvenLoader` for a loader whose position can be saved."""

    def __init__(self, engine: Engine, loader: Any, length: int | None) -> None:
        super().__init__(engine, loader, length)
        self._state: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks' loaders after the batches that were yielded last. (The
        loaders themselves are one batch ahead.) The result contains the states of all ranks,
        because Lightning saves only the first rank's result. Collective."""
        state = self._loader.state_dict() if self._state is None else self._state
        group = self._engine.ranks.control_group
        return {_BY_RANK: agree("state_dict() of a loader", None, group, state)}

    def load_state_dict(self, state: Any) -> None:
        """Restore a result of :meth:`state_dict` of the same number of ranks, or a state of the
        loader.

        Raises:
            ValueError: The number of ranks differs.
        """
        self._state = None
        ranks = self._engine.ranks
        if isinstance(state, Mapping) and _BY_RANK in state:
            if len(state[_BY_RANK]) != ranks.size:
                raise ValueError(
                    f"dataloader: expected a checkpoint of {ranks.size} ranks, since it has the "
                    f"position of each rank's loader; found one of {len(state[_BY_RANK])} ranks"
                )
            state = state[_BY_RANK][ranks.rank]
        self._loader.load_state_dict(state)

    def _batches(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            self._state = self._loader.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


def even_loader(engine: Engine, loader: Any) -> Any:
    """Returns ``loader`` if all ranks' loaders have the same known length, else an
    :class:`EvenLoader`. Collective."""
    length = length_of(loader)
    lengths = agree("dataloader", None, engine.ranks.control_group, length)
    if engine.ranks.size == 1 or (length is not None and set(lengths) == {length}):
        return loader
    longest = None if None in lengths else max(lengths)
    kind = StatefulEvenLoader if isinstance(loader, _Stateful) else EvenLoader
    return kind(engine, loader, longest)
