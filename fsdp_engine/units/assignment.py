"""Finds the units of a model, and the unit that owns each parameter.

A unit is a set of modules. It is entered when one of them is called, and left when that call
returns. A parameter belongs to the smallest unit that contains every module that holds it, wherever
this module occurs in the model. This is usually the module's own unit. For a tied parameter, or a
parameter of a module that two blocks share, it is the unit that contains both places, or else the
root. Each parameter is therefore in exactly one unit, however units nest.

[Note: Default units]
Blocks, the children of the outermost ``nn.ModuleList`` and ``nn.Sequential``, are units. Each run
of consecutive modules before, between or after the blocks (embeddings; final norm and head) is one
unit. The root therefore owns only parameters that its own forward reads: parameters of modules that
contain blocks, and parameters that tie a block to another module. Runs that share a tied parameter
(an embedding and a head) form one unit.

    embedding, positions | block 0 | block 1 | .. | block n | norm, head          not tied
    embedding, positions, norm, head | block 0 | block 1 | .. | block n           tied

Modules outside of blocks are *loose*: the model's forward may read their weights without calling
them (a head that multiplies with ``self.embedding.weight``). See ``runtime/model_hooks.py``.

[Note: Size of a unit]
Each unit costs one collective per gather and per reduction, and host time for submissions. With
more units, collectives start earlier and memory is freed earlier. The first gather and the last
reduction are always exposed, and take longer with larger units. Measurements
(``benchmarks/unit_size.py``; tables in docs/internals/benchmarks.md, "Size of a unit"):

- Simulated H100s, 8 and 64 ranks, 16,384 tokens a rank: up to 3 M elements a block the host
  determines the step time, and joining blocks saves 5 to 15 %. From 5 M on, compute determines the
  step time; joining adds up to 1 % for pairs, and 3 to 8 % if all sixteen blocks are one unit.
- 1 M elements in bf16, 2 MB, take 44 us on a 400 Gb/s link; the hops of a ring over eight nodes
  take 42 us. The time of smaller collectives is mostly latency.
- Two gloo ranks, eight blocks: compared with a unit per block, a step with a single unit takes 0.60
  (level 0) to 0.46 (level 3) of the time at 33 k elements a block, and 0.87 to 0.60 at 526 k.

Default units therefore have at least 1 M elements. This is far below the blocks of usual models (7
M in the smallest GPT-2), which are not joined. A joined unit is larger than its largest member by
less than 1 M elements, or by less than 2 M if a small remainder has joined it.

Units are joined in module order: the units that follow a small one are joined with it until the sum
is large enough, whatever the size of the last one.

Parameters outside of units are split into *buckets*. A bucket ends with the tensor with which it
reaches the given size, so no tensor is split, and only the last bucket may be smaller. Worked
example, sizes 5, 5, 8, 2 and 4: with ``size=10`` the buckets are (5, 5), (8, 2), (4); with
``num_buckets=2``, for 24 elements in all, they are (5, 5, 8) and (2, 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.spec import ParamRecord
from fsdp_engine.memory import allocator
from fsdp_engine.patterns import compile_pattern, joined_names


def split_by_size(sizes: Sequence[int], size: int) -> list[range]:
    """Returns the positions of the tensors in each bucket, for buckets of at least ``size``.

    Only the last bucket may be smaller.
    """
    buckets: list[range] = []
    start = held = 0
    for position, numel in enumerate(sizes):
        held += numel
        if held >= size:
            buckets.append(range(start, position + 1))
            start, held = position + 1, 0
    if start < len(sizes):
        buckets.append(range(start, len(sizes)))
    return buckets


def split_by_count(sizes: Sequence[int], num_buckets: int) -> list[range]:
    """Returns the positions of the tensors in each of ``num_buckets`` buckets.

    A bucket ends with the tensor with which it reaches an equal share of the remaining elements.
    There are fewer buckets if there are too few tensors.
    """
    buckets: list[range] = []
    start = held = 0
    left = sum(sizes)
    for position, numel in enumerate(sizes):
        held += numel
        shares = num_buckets - len(buckets)
        if shares > 1 and held * shares >= left:
            buckets.append(range(start, position + 1))
            start, left, held = position + 1, left - held, 0
    if start < len(sizes):
        buckets.append(range(start, len(sizes)))
    return buckets


def bucket_multiple(num_ranks: int, *, padded: bool) -> int:
    """Returns the number of elements that divides the size of every bucket.

    It is the least common multiple of the number of ranks and 128, so that shards are equal and
    every rank's transfers are aligned. With ``padded`` it is 2^16 for each rank, for which NCCL's
    rings are fastest. Both are Megatron-Core's rules.
    """
    return num_ranks * 2**16 if padded else math.lcm(num_ranks, 128)


Selector = type[nn.Module] | nn.Module | str | Callable[[str, nn.Module], bool]
UnitSelector = Selector | tuple[Selector, ...]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _is_container(module: nn.Module) -> bool:
    """Returns whether ``module`` is one of torch's containers. A subclass with a forward of its own
    is not."""
    has_none = getattr(module.forward, "__func__", None) is nn.Module.forward
    return isinstance(module, _CONTAINERS) and has_none


def collect_records(model: nn.Module) -> list[ParamRecord]:
    """Returns each parameter once, with all its names and holders, in registration order."""
    records: dict[int, ParamRecord] = {}
    seen: set[tuple[int, str]] = set()
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            name = f"{module_name}.{attribute}" if module_name else attribute
            record = records.setdefault(id(param), ParamRecord(name, param))
            record.aliases.append(name)
            if (id(module), attribute) not in seen:
                seen.add((id(module), attribute))
                record.holders.append((module, attribute))
    return list(records.values())


def check_memory(model: nn.Module, records: Sequence[ParamRecord]) -> None:
    """Check that no parameter shares elements with another parameter or with a buffer.

    Raises:
        ValueError: Two tensors share elements, so that an update of one would not reach the other
            after sharding. The message names both.
    """
    params = [(record.name, "parameter", record.shard.detach()) for record in records]
    buffers = [(name, "buffer", buffer) for name, buffer in model.named_buffers()]
    by_storage: dict[int, list[tuple[str, str, Tensor]]] = {}
    for each in (*params, *buffers):
        tensor = each[2]
        # Tensor subclasses, and tensors without strides, have no address that identifies memory.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if address := tensor.untyped_storage().data_ptr():
            by_storage.setdefault(address, []).append(each)
    for together in by_storage.values():
        for first, second in itertools.combinations(together, 2):
            if first[1] == "parameter" and _share_elements(first[2], second[2]):
                raise ValueError(
                    f"{first[0]}: expected a parameter with memory of its own; found the "
                    f"{second[1]} {second[0]} over the same elements. Tie parameters by assigning "
                    "one nn.Parameter to both modules, or clone() one of the two"
                )


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors over one storage have a byte in common.

    Two columns of a matrix have none, although their ranges of addresses overlap.
    """
    pair = (first, second)
    starts = [int(each.storage_offset()) * each.itemsize for each in pair]
    stops = [
        start
        + (1 + sum((n - 1) * s for n, s in zip(each.shape, each.stride(), strict=True)))
        * each.itemsize
        for start, each in zip(starts, pair, strict=True)
    ]
    if starts[0] >= stops[1] or starts[1] >= stops[0]:
        return False
    if all(each.is_contiguous() for each in pair) or first.itemsize != second.itemsize:
        return True
    seen = allocator.zeros((max(stops) - min(starts)) // first.itemsize, torch.bool, "cpu")
    views = [
        seen.as_strided(each.shape, each.stride(), (start - min(starts)) // each.itemsize)
        for each, start in zip(pair, starts, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


@dataclass(frozen=True)
class ModuleSet:
    """The modules of one unit.

    Attributes:
        names: Fully qualified names of the modules.
        modules: The modules. None of them is inside another.
        loose: The loose modules among them; see [Note: Default units].
    """

    names: tuple[str, ...]
    modules: list[nn.Module]
    loose: tuple[nn.Module, ...] = ()

    @property
    def name(self) -> str:
        """The names of the modules, joined to one."""
        return joined_names(self.names)


def find_units(
    model: nn.Module,
    selectors: UnitSelector | Iterable[UnitSelector] | None,
    records: Sequence[ParamRecord],
) -> list[ModuleSet]:
    """Returns the units in module order, without the root.

    Args:
        model: The root module.
        selectors: Module classes, modules, name patterns and predicates ``(name, module) -> bool``,
            one or several. Each module that matches is a unit. If one of several selectors is a
            tuple of selectors, all modules that match it form one unit. In a pattern ``*`` matches
            one component of a dotted name and ``**`` any number: ``"blocks.*"`` matches every child
            of ``blocks``. None: see [Note: Default units].
        records: The model's parameters.

    Raises:
        TypeError: A selector is of another type.
        ValueError: A selector matches no module with parameters, or matches one without a forward;
            or a module is in two units, or inside another module of its unit.
    """
    if selectors is None:
        return _default_units(model, records)
    if isinstance(selectors, (str, type, nn.Module)) or callable(selectors):
        selectors = [selectors]
    if not isinstance(selectors, Iterable):
        raise TypeError(
            "units: expected module classes, modules, name patterns or functions, one or several; "
            f"found {selectors!r}"
        )
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    sets: dict[tuple[str, ...], dict[str, nn.Module]] = {}
    set_of: dict[str, tuple[str, ...]] = {}
    for selector in selectors:
        if isinstance(selector, tuple):
            matched = {n: m for each in selector for n, m in _select(model, each).items()}
            matched = dict(sorted(matched.items(), key=lambda item: places[item[0]]))
            found = [matched]
        else:
            found = [{name: module} for name, module in _select(model, selector).items()]
        for modules in found:
            names = tuple(modules)
            for name in names:
                if set_of.setdefault(name, names) != names:
                    raise ValueError(
                        f"units: expected each module in one unit; found {name} in "
                        f"({', '.join(set_of[name])}) and in ({', '.join(names)})"
                    )
                inner = [each for each in names if each.startswith(f"{name}.")]
                if inner:
                    raise ValueError(
                        "units: expected no module of a unit inside another module of the same "
                        f"unit; found {inner[0]} inside {name}"
                    )
            sets[names] = modules
    ordered = sorted(sets.items(), key=lambda item: places[item[0][0]])
    return [ModuleSet(names, list(modules.values())) for names, modules in ordered]


def assign(
    model: nn.Module, units: Sequence[ModuleSet], records: Sequence[ParamRecord]
) -> dict[str, list[ParamRecord]]:
    """Returns the records of each unit by its name.

    The root, "", owns the parameters that no other unit contains.
    """
    all_units = [ModuleSet(("",), [model]), *units]
    sizes = [sum(1 for module in unit.modules for _ in module.modules()) for unit in all_units]
    containing = _containing(model, [unit.modules for unit in all_units])
    owned: dict[str, list[ParamRecord]] = {"": [], **{unit.name: [] for unit in units}}
    for record in records:
        candidates = set.intersection(*(containing[id(module)] for module, _ in record.holders))
        smallest = min((sizes[number], all_units[number].name) for number in candidates)
        owned[smallest[1]].append(record)
    return owned


def _containing(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> dict[int, set[int]]:
    """Returns the indices of the units that contain each module, by the ``id`` of the module.

    A unit contains a module if every path from the root to the module passes through a module of
    the unit. The unit is then entered before each call of the module, also if blocks share it.

    Args:
        model: The root module.
        units: The modules of each unit. One of the units has the root module.
    """
    starts: dict[int, set[int]] = {}
    for number, modules in enumerate(units):
        for module in modules:
            starts.setdefault(id(module), set()).add(number)
    parents: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    found: dict[int, set[int]] = {}

    def containing(module: nn.Module) -> set[int]:
        if id(module) not in found:
            above = [containing(parent) for parent in parents.get(id(module), ())]
            shared = set.intersection(*above) if above else set()
            found[id(module)] = starts.get(id(module), set()) | shared
        return found[id(module)]

    for module in model.modules():
        containing(module)
    return found


@dataclass(frozen=True)
class Expected:
    """The expected order of uses of a model's units, before execution has shown the real order.

    Modules are expected to be called in the order in which they were registered.

    Attributes:
        forward: Indices of units in the order in which forward enters them. A unit occurs once for
            each of its modules.
        backward: Indices of units in the order of backward: the unit that forward leaves last is
            the first.
        around: For each unit, the units that contain modules of it.
    """

    forward: list[int]
    backward: list[int]
    around: list[set[int]]

    @property
    def containing(self) -> set[int]:
        """The units that contain modules of other units."""
        return set().union(*self.around)

    def num_gathers(self, unit: int) -> int:
        """Returns how often a unit with sharded parameters is gathered in a microbatch.

        The unit stays full between two uses if only units that contain it, or that it contains, are
        used between them.
        """
        count, is_full = 0, False
        for used in (*self.forward, *self.backward):
            if used == unit:
                count += not is_full
                is_full = True
            elif used not in self.around[unit] and unit not in self.around[used]:
                is_full = False
        return count


def expect(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> Expected:
    """Returns the expected order of uses; ``units`` are the modules of each unit."""
    units_of: dict[int, list[int]] = {}
    for index, modules in enumerate(units):
        for module in modules:
            units_of.setdefault(id(module), []).append(index)
    around: list[set[int]] = [set() for _ in units]
    for index, modules in enumerate(units):
        own = {id(module) for module in modules}
        inside = dict.fromkeys(id(each) for module in modules for each in module.modules())
        for inner in inside:
            for each in units_of.get(inner, ()) if inner not in own else ():
                around[each].add(index)
    forward: list[int] = []
    backward: list[int] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        own = units_of.get(id(module), [])
        forward.extend(own)
        for child in module.children():
            visit(child)
        if own and reads_weights_in_backward(module):
            backward.extend(reversed(own))

    visit(model)
    return Expected(forward, backward[::-1], around)


def reads_weights_in_backward(module: nn.Module) -> bool:
    """Returns whether backward through a call of ``module`` needs its weights.

    An embedding's backward does not: it computes the gradient of the weights from the indices and
    from the gradient of the output.
    """
    holders = [each for each in module.modules() if any(True for _ in each.parameters(False))]
    return not holders or not all(_only_looks_up(each) for each in holders)


def _only_looks_up(module: nn.Module) -> bool:
    """Returns whether ``module`` is an ``nn.Embedding``, or a subclass, with torch's forward."""
    is_own = type(module).forward is not nn.Embedding.forward or "forward" in vars(module)
    return isinstance(module, nn.Embedding) and not is_own


def _select(model: nn.Module, selector: Any) -> dict[str, nn.Module]:
    """Returns the modules that ``selector`` matches, by name, in module order."""
    matches = _matcher(selector)
    modules = [(name, module) for name, module in model.named_modules() if name]
    found = [(n, m) for n, m in modules if matches(n, m) and has_parameters(m)]
    if not found:
        children = [name for name, _ in itertools.islice(model.named_children(), 13)]
        if len(children) == 13:
            children[-1] = "..."
        raise ValueError(
            f"units: expected {_describe(selector)} to match a module with parameters; found none "
            f"among {len(modules)} modules of {type(model).__name__} ({', '.join(children)})"
        )
    for name, module in found:
        if _is_container(module):
            raise ValueError(
                f"units: expected modules that have a forward; found {name}, a "
                f"{type(module).__name__} without one, for {_describe(selector)}. Name its children"
            )
    return dict(found)


def _default_units(model: nn.Module, records: Sequence[ParamRecord]) -> list[ModuleSet]:
    """Returns the units of [Note: Default units]."""
    blocks = dict(_blocks("", model))
    if not blocks:
        return []
    runs: list[dict[str, nn.Module]] = [{}]
    seen: set[int] = set()
    for name, module in _pieces("", model, {id(block) for block in blocks.values()}):
        if name in blocks:
            runs.append({})
        elif id(module) not in seen:
            runs[-1][name] = module
            seen.add(id(module))
    # A block in two lists is one unit, with its first name.
    firsts = {id(module): name for name, module in reversed(blocks.items())}
    sets = [ModuleSet((name,), [blocks[name]]) for name in reversed(firsts.values())]
    for run in _tied_together([run for run in runs if run], records):
        sets.append(ModuleSet(tuple(run), list(run.values()), loose=tuple(run.values())))
    places = {id(module): place for place, module in enumerate(model.modules())}
    return sorted(sets, key=lambda each: places[id(each.modules[0])])


def _blocks(prefix: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        is_listed = isinstance(module, (nn.ModuleList, nn.Sequential))
        if is_listed and not _is_container(child):
            if has_parameters(child):
                yield name, child
        else:
            yield from _blocks(f"{name}.", child)


def _pieces(
    prefix: str, module: nn.Module, blocks: Collection[int]
) -> Iterable[tuple[str, nn.Module]]:
    """Yields the blocks and the largest modules that contain no block, in module order."""
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        holds_blocks = any(id(each) in blocks for each in child.modules())
        if id(child) not in blocks and (holds_blocks or _is_container(child)):
            yield from _pieces(f"{name}.", child, blocks)
        elif has_parameters(child):
            yield name, child


def _tied_together(
    runs: Sequence[dict[str, nn.Module]], records: Sequence[ParamRecord]
) -> list[dict[str, nn.Module]]:
    """Join the runs that share a tied parameter, and return all runs."""
    runs_of: dict[int, set[int]] = {}  # a module has several entries if runs share it
    for number, run in enumerate(runs):
        for module in run.values():
            for each in module.modules():
                runs_of.setdefault(id(each), set()).add(number)
    first = list(range(len(runs)))  # first[i]: the first run that is tied to run i, also indirectly
    for record in records:
        tied = set().union(*(runs_of.get(id(module), {-1}) for module, _ in record.holders))
        if -1 not in tied:
            known = {first[each] for each in tied}
            first = [min(known) if each in known else each for each in first]
    joined: dict[int, dict[str, nn.Module]] = {}
    for number, run in enumerate(runs):
        joined.setdefault(first[number], {}).update(run)
    return list(joined.values())


def has_parameters(module: nn.Module) -> bool:
    """Returns whether ``module``, or a module in it, has a parameter."""
    return next(module.parameters(), None) is not None


def _matcher(selector: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, nn.Module):
        return lambda name, module: module is selector
    if isinstance(selector, type):
        if not issubclass(selector, nn.Module):
            raise TypeError(f"units: expected module classes; found {selector!r}")
        return lambda name, module: isinstance(module, selector)
    if isinstance(selector, str):
        pattern = compile_pattern(selector)
        return lambda name, module: pattern.fullmatch(name) is not None
    if callable(selector):
        predicate: Callable[[str, nn.Module], bool] = selector
        return predicate
    raise TypeError(
        "units: expected module classes, name patterns or predicates(name, module) -> bool; "
        f"found {selector!r}"
    )


def _describe(selector: Any) -> str:
    if isinstance(selector, type):
        return f"class {selector.__name__}"
    if isinstance(selector, str):
        return f"pattern {selector!r}"
    if isinstance(selector, nn.Module):
        return f"the given {type(selector).__name__}"
    return f"predicate {getattr(selector, '__name__', selector)}"


# A default unit with fewer elements is joined with a neighbour: see [Note: Size of a unit].
MIN_UNIT_SIZE = 1_000_000


def join_small(
    model: nn.Module, sets: Sequence[ModuleSet], records: Sequence[ParamRecord], least: int | None
) -> list[ModuleSet]:
    """Returns the units in module order, with neighbours joined until each has ``least`` elements.

    A unit that owns no parameter is not joined, and neither is a unit that contains another one or
    is inside another one. No units are joined across such a unit.

    Args:
        model: The root module.
        sets: The default units, in module order.
        records: The model's parameters.
        least: Minimum number of elements. 0: no units are joined. None: ``MIN_UNIT_SIZE``.

    Worked example: units of 2, 3, 9, 1 and 2 elements with ``least=5`` become (2, 3), (9), (1, 2)
    and, since the last is too small, (2, 3), (9, 1, 2).
    """
    least = MIN_UNIT_SIZE if least is None else least
    if least == 0:
        return list(sets)
    owned = assign(model, sets, records)
    sizes = {each.name: sum(r.param.numel() for r in owned[each.name]) for each in sets}
    if min(sizes.values(), default=least) >= least:
        return list(sets)
    places = {id(module): place for place, module in enumerate(model.modules())}
    expected = expect(model, [each.modules for each in sets])
    nested = [bool(inside) or n in expected.containing for n, inside in enumerate(expected.around)]
    alone = {each.name for each, is_nested in zip(sets, nested, strict=True) if is_nested}
    alone |= {name for name, size in sizes.items() if not size}
    result: list[ModuleSet] = []
    for is_alone, stretch in groupby(sets, lambda each: each.name in alone):
        members = list(stretch)
        if is_alone:
            result += members
            continue
        for run in split_by_least([sizes[each.name] for each in members], least):
            result.append(_joined([members[place] for place in run], places))
    return result


def split_by_least(sizes: Sequence[int], least: int) -> list[range]:
    """Returns the positions of each run. A run ends with the size with which it reaches ``least``.

    A smaller remainder at the end joins the previous run.
    """
    runs = split_by_size(sizes, least)
    if len(runs) > 1 and sum(sizes[place] for place in runs[-1]) < least:
        last = runs.pop()
        runs[-1] = range(runs[-1].start, last.stop)
    return runs


def _joined(members: Sequence[ModuleSet], places: dict[int, int]) -> ModuleSet:
    """Returns one set of the modules of all ``members``, in module order."""
    if len(members) == 1:
        return members[0]
    named = [pair for each in members for pair in zip(each.names, each.modules, strict=True)]
    named.sort(key=lambda pair: places[id(pair[1])])
    loose = tuple(module for each in members for module in each.loose)
    return ModuleSet(tuple(name for name, _ in named), [module for _, module in named], loose)
