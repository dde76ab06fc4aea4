"""Tensors in the arguments and results of modules, and their replacement by casts and views.

Containers are tuples, lists, dicts, dataclasses and mappings, nested in any way.
``torch.utils._pytree`` is not used, because it treats dataclasses and users' mappings as leaves,
and copies every container.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn


def iter_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``tree``, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from iter_tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from iter_tensors(item)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from iter_tensors(getattr(tree, field.name, None))


def containers_in(values: Iterable[Any]) -> list[Any]:
    """Returns the containers among ``values``, in which :func:`iter_tensors` looks for tensors."""
    return [
        each for each in values if isinstance(each, (list, tuple, Mapping)) or _is_dataclass(each)
    ]


def unknown_part(tree: Any) -> Any:
    """Returns a part of ``tree`` in which :func:`iter_tensors` does not look, although it may hold
    tensors; None: there is no such part."""
    if isinstance(tree, _SIMPLE):
        return None
    if isinstance(tree, (tuple, list, Mapping)) or _is_dataclass(tree):
        items = tree if isinstance(tree, tuple) else [value for _, value in _slots(tree)]
        return next((part for item in items if (part := unknown_part(item)) is not None), None)
    return tree


_SIMPLE = (torch.Tensor, torch.dtype, torch.device, type(None), int, float, str, bytes, enum.Enum)


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor], tree: Any, exchange: Exchange | None = None
) -> Any:
    """Returns ``tree`` with every tensor replaced by ``function`` of it.

    A container without replaced tensors is returned as the same object. Other containers are
    copied. With ``exchange``, mutable containers are changed in place instead.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        items = [map_tensors(function, item, exchange) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return _same_tuple(tree, items)
    changes = [
        (key, value, new)
        for key, value in _slots(tree)
        if (new := map_tensors(function, value, exchange)) is not value
    ]
    if not changes:
        return tree
    if exchange is None or not _is_mutable(tree):
        return _changed_copy(tree, [(key, new) for key, _, new in changes])
    for key, _, new in changes:
        _set(tree, key, new)
    exchange.changed.append((tree, {id(new): (new, old) for _, old, new in changes}))
    return tree


class Exchange:
    """A replacement of tensors within the user's containers, which can be undone.

    A module may change a list, dict or dataclass that is passed to it (a history, a cache), so it
    must receive the user's object. Tuples and other immutable containers are copied if a tensor in
    them is replaced.

    Attributes:
        changed: Each changed container, with the pair (new value, old value) for each ``id`` of a
            new value.
    """

    def __init__(self) -> None:
        self.changed: list[tuple[Any, dict[int, tuple[Any, Any]]]] = []

    def undo(self) -> None:
        """Replace the new values by the old ones. A module may have moved new values within their
        container, so they are found by identity."""
        for tree, old_of in reversed(self.changed):
            for key, value in _slots(tree):
                if id(value) in old_of:
                    _set(tree, key, old_of[id(value)][1])
        self.changed.clear()


def _slots(tree: Any) -> list[tuple[Any, Any]]:
    """Returns the keys and values of a container; an empty list for any other object."""
    if isinstance(tree, list):
        return list(enumerate(tree))
    if isinstance(tree, Mapping):
        return list(tree.items())
    if _is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return []


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _is_mutable(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return isinstance(tree, MutableMapping)
    return isinstance(tree, list) or not type(tree).__dataclass_params__.frozen


def _set(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, (list, MutableMapping)):
        tree[key] = value
    else:
        object.__setattr__(tree, key, value)


def _same_tuple(tree: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Returns a tuple of ``items`` with the type and the attributes of ``tree``."""
    kind = type(tree)
    if hasattr(kind, "n_sequence_fields"):  # types of C, such as torch.return_types.max
        return kind(items)
    # The constructors of namedtuples and of users' classes may have other parameters.
    made = tuple.__new__(kind, items)
    if attributes := getattr(tree, "__dict__", None):
        vars(made).update(attributes)
    return made


def _changed_copy(tree: Any, changes: list[tuple[Any, Any]]) -> Any:
    """Returns a copy of ``tree`` with ``changes`` applied. It has the same type and attributes."""
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return type(tree)({**tree, **dict(changes)})  # type: ignore[call-arg]
    made = copy.copy(tree)
    for key, value in changes:
        _set(made, key, value)
    return made


class Inputs:
    """The arguments of one call, in which tensors are replaced by casts and by views with hooks.

    The module receives the user's containers, because it may have to change them. They contain the
    replacements until the module returns.

    Args:
        tree: The positional and the keyword arguments.
    """

    __slots__ = ("_casts", "_exchanges", "_given", "_known", "_tree")

    def __init__(self, tree: Any) -> None:
        self._given = self._tree = tree
        self._exchanges: list[Exchange] = []
        # The tensor, its cast, and the memory of the cast before the call.
        self._casts: dict[int, tuple[Tensor, Tensor, torch.UntypedStorage | None]] = {}
        self._known: dict[int, tuple[Tensor, int]] = {}

    def cast(self, dtype: torch.dtype) -> None:
        """Cast floating-point tensors to ``dtype``."""

        def cast(tensor: Tensor) -> Tensor:
            if is_of(dtype, tensor):
                return tensor
            if torch.is_inference_mode_enabled():
                # A tensor of inference mode has no version counter, by which changes are found.
                with torch.inference_mode(False), torch.no_grad():
                    new = cast_to(dtype, tensor)
            else:
                new = cast_to(dtype, tensor)
            self._known[id(tensor)] = (tensor, version_of(tensor))
            # A tensor that is passed twice is cast once, as modules compare inputs by identity.
            memory = new.untyped_storage() if torch._C._has_storage(new) else None
            return self._casts.setdefault(id(tensor), (tensor, new, memory))[1]

        self._replace(cast)

    def mark(self, listen: Callable[[Tensor], Tensor]) -> None:
        """Replace tensors that require grad by ``listen(tensor)``, and record the version counters
        of all tensors."""
        views: dict[int, Tensor] = {}
        for tensor in iter_tensors(self._tree):
            self._known[id(tensor)] = (tensor, version_of(tensor))
            if tensor.requires_grad and id(tensor) not in views:
                views[id(tensor)] = listen(tensor)
        if views:
            self._replace(lambda tensor: views.get(id(tensor), tensor))

    def take_back(self) -> None:
        """Put the user's tensors back into the user's containers, when the module has returned.
        Changes of casts are copied into the user's tensors."""
        for exchange in reversed(self._exchanges):
            exchange.undo()
        for tensor, cast, memory in self._casts.values():
            if version_of(cast) > 0:
                if not _is_freed(cast):
                    tensor.copy_(cast)
            elif memory is not None and cast.untyped_storage()._cdata != memory._cdata:
                tensor.data = cast.detach().to(tensor.dtype)  # as forward did with ``cast.data``

    def changed(self) -> list[Tensor]:
        """Returns the inputs that were changed in place."""
        return [tensor for tensor, version in self._known.values() if version_of(tensor) != version]

    def added(self) -> list[Tensor]:
        """Returns the tensors that the module has put into the user's containers."""
        return [tensor for tensor in iter_tensors(self._given) if id(tensor) not in self._known]

    @property
    def arguments(self) -> tuple[Any, Any]:
        """The positional and keyword arguments for the module."""
        args, kwargs = self._tree
        return args, kwargs

    @property
    def given(self) -> Any:
        """The positional and keyword arguments that the caller has passed."""
        return self._given

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        args, kwargs = self._tree
        exchange = Exchange()
        # The dict of keyword arguments is not the user's. Tensors are replaced in a copy of it, so
        # that `given` still has the caller's tensors.
        self._tree = tuple(map_tensors(function, each, exchange) for each in (args, dict(kwargs)))
        self._exchanges.append(exchange)


def version_of(tensor: Tensor) -> int:
    """Returns the version counter of ``tensor``, which in-place changes increase; 0 for tensors of
    inference mode, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def is_of(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Returns whether :func:`cast_to` returns ``tensor`` itself."""
    return tensor.dtype == dtype or not tensor.is_floating_point()


def cast_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Cast ``tensor`` to ``dtype`` if it is floating-point."""
    if is_of(dtype, tensor):
        return tensor
    cast = tensor.to(dtype)
    carry_attributes(tensor, cast)
    return cast


def carry_attributes(source: Tensor, target: Tensor) -> None:
    """Give ``target``, a view or a cast of ``source``, the Python attributes of ``source``. They
    share the dict, so that later changes appear on both, unless the class of ``target`` has
    attributes of its own."""
    if type(source) not in (type(target), nn.Parameter):
        return
    if own := vars(target):
        for name, value in vars(source).items():
            own.setdefault(name, value)
    else:
        target.__dict__ = vars(source)


def _is_freed(tensor: Tensor) -> bool:
    """Returns whether elements of ``tensor`` have no memory."""
    has_storage = torch._C._has_storage(tensor)
    return has_storage and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def follow_views(views: Iterable[tuple[Tensor, Tensor, bool]]) -> str | None:
    """Apply to inputs what forward did to the views that it received in place of them.

    A view shares its memory with the input, so in-place operations have changed the input. But
    ``view.data = ...`` and ``view.set_()`` give only the view other memory.

    Args:
        views: For each view, the input, the view, and whether they shared a storage before forward.

    Returns:
        None, or the message of an error if an input cannot follow its view.
    """
    problem = None
    for tensor, view, share_storage in views:
        if type(view) is not Tensor:
            carry_attributes(view, tensor)
        if not share_storage:
            continue
        memory = view.untyped_storage()
        is_other = memory._cdata != tensor.untyped_storage()._cdata
        if is_other or view.numel() != tensor.numel():
            tensor.data = view.detach()
        elif not memory.nbytes() and _is_freed(view):
            problem = (
                "expected forward to leave the memory of its inputs; found that it has freed an "
                f"input of shape {tuple(tensor.shape)}. Keep the inputs (keep_input=True in "
                "memcnn), or put the blocks that free their inputs and the layer before them into "
                "one module, and pass its class as units="
            )
    return problem
