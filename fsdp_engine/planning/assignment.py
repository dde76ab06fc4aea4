"""Which modules are units, and which unit owns which parameter.

A parameter belongs to the smallest unit that contains every module that refers to it: its own
unit, for a tied parameter the unit that contains both places, else the root. So each parameter is
in exactly one unit, however units nest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamRecord
from fsdp_engine.devices import memory
from fsdp_engine.patterns import compile_pattern

UnitSelector = type[nn.Module] | str | Callable[[str, nn.Module], bool]

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def collect_records(model: nn.Module) -> list[ParamRecord]:
    """Every parameter of ``model`` once, with all its names and places, in registration order."""
    records: dict[int, ParamRecord] = {}
    seen_sites: set[tuple[int, str]] = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            record = records.setdefault(id(param), ParamRecord(name, param))
            record.aliases.append(name)
            if (id(module), attribute) not in seen_sites:
                seen_sites.add((id(module), attribute))
                record.sites.append((module, attribute))
    return list(records.values())


def check_memory(model: nn.Module, records: Sequence[ParamRecord]) -> None:
    """Whether each parameter has its elements to itself.

    Raises:
        ValueError: two parameters, or a parameter and a buffer, share elements; names both. What
            is written to one would no longer be seen in the other.
    """
    tensors = [(record.name, record.param.detach()) for record in records]
    num_params = len(tensors)
    tensors += [(name, buffer) for name, buffer in model.named_buffers()]
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for index, (_, tensor) in enumerate(tensors):
        # Other tensors have memory of their own kind, which no address tells.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if address := tensor.untyped_storage().data_ptr():
            start = int(tensor.storage_offset()) * tensor.itemsize
            by_storage.setdefault(address, []).append((start, start + _extent(tensor), index))
    for spans in by_storage.values():
        spans.sort()
        for place, (_, stop, first) in enumerate(spans):
            for start, _, second in spans[place + 1 :]:
                if start >= stop:
                    break
                pair = tensors[min(first, second)], tensors[max(first, second)]
                if min(first, second) < num_params and _share_elements(pair[0][1], pair[1][1]):
                    is_buffer = max(first, second) >= num_params
                    raise ValueError(
                        f"{pair[0][0]}: expected a parameter with memory of its own; found the "
                        f"{'buffer' if is_buffer else 'parameter'} {pair[1][0]} over the same "
                        "elements. Tie parameters by assigning one nn.Parameter to both modules, "
                        "or clone() one of the two"
                    )


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Whether tensors, whose spans in one storage overlap, have an element in common: those that
    are columns of one matrix, say, have not."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    if first.itemsize != second.itemsize:
        return True
    pair = (first, second)
    offsets = [int(each.storage_offset()) for each in pair]
    starts = [offset - min(offsets) for offset in offsets]
    num_elements = max(start + _extent(each) for start, each in zip(starts, pair, strict=True))
    seen = memory.zeros(num_elements, torch.bool, "cpu")
    views = [
        seen.as_strided(each.shape, each.stride(), start)
        for each, start in zip(pair, starts, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def find_units(
    model: nn.Module, selectors: UnitSelector | Iterable[UnitSelector] | None
) -> dict[str, nn.Module]:
    """The unit modules by name, in module order, without the root.

    Args:
        model: the root.
        selectors: module classes, name patterns and predicates ``(name, module) -> bool``, one or
            several. In a pattern ``*`` stands for one part of a dotted name and ``**`` for any
            number: ``"blocks.*"`` is every child of ``blocks``. None: the children of every
            ``nn.ModuleList`` and ``nn.Sequential`` that is not itself within a unit.

    Raises:
        TypeError: a selector is none of these.
        ValueError: a selector matches no module with parameters, or one without a forward.
    """
    if selectors is None:
        return dict(_default_units("", model))
    if isinstance(selectors, (str, type)) or callable(selectors):
        selectors = [selectors]
    chosen: dict[str, nn.Module] = {}
    modules = [(name, module) for name, module in model.named_modules() if name]
    for selector in selectors:
        matches = _matcher(selector)
        found = [(n, m) for n, m in modules if matches(n, m) and _has_parameters(m)]
        if not found:
            raise ValueError(
                f"units: expected {_describe(selector)} to match a module with parameters; "
                f"found none among {len(modules)} modules of {type(model).__name__}"
            )
        for name, module in found:
            if isinstance(module, _WITHOUT_FORWARD):
                raise ValueError(
                    f"units: expected modules that have a forward; {_describe(selector)} matches "
                    f"{name}, a {type(module).__name__}, which is never called"
                )
            chosen[name] = module
    return {name: module for name, module in modules if name in chosen}


def assign(
    model: nn.Module, units: dict[str, nn.Module], records: Sequence[ParamRecord]
) -> dict[str, list[ParamRecord]]:
    """The records of each unit by its name; the root, "", takes what no unit contains."""
    containing: dict[int, list[tuple[int, str]]] = {}
    for name, module in {"": model, **units}.items():
        inside = list(module.modules())
        for each in inside:
            containing.setdefault(id(each), []).append((len(inside), name))
    owned: dict[str, list[ParamRecord]] = {"": [], **{name: [] for name in units}}
    for record in records:
        candidates = set.intersection(*(set(containing[id(m)]) for m, _ in record.sites))
        owned[min(candidates)[1]].append(record)
    return owned


def _default_units(prefix: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        is_listed = isinstance(module, (nn.ModuleList, nn.Sequential))
        if is_listed and not isinstance(child, _WITHOUT_FORWARD):
            if _has_parameters(child):
                yield name, child
        else:
            yield from _default_units(f"{name}.", child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _matcher(selector: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, type):
        if not issubclass(selector, nn.Module):
            raise TypeError(f"units: expected module classes; found {selector!r}")
        return lambda name, module: isinstance(module, selector)
    if isinstance(selector, str):
        pattern = compile_pattern(selector)
        return lambda name, module: pattern.fullmatch(name) is not None
    if callable(selector):
        return selector
    raise TypeError(
        "units: expected module classes, name patterns or predicates(name, module) -> bool; "
        f"found {selector!r}"
    )


def _describe(selector: Any) -> str:
    if isinstance(selector, type):
        return f"class {selector.__name__}"
    if isinstance(selector, str):
        return f"pattern {selector!r}"
    return f"predicate {getattr(selector, '__name__', selector)}"
