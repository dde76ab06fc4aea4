"""Steps of optimizers that need full tensors: one rank, the owner, steps each parameter.

[Note: Owners]
An optimizer such as Muon reads the full matrix that it steps. So each such parameter has an *owner*
among the ranks that share it ([Note: Choice of owners] in ``ownership.py``). The owner receives the
slices of the reduced gradient, runs the unmodified ``step`` on full tensors and sends back the
slices of the weights ([Note: Messages of owners] in ``owner_messages.py``). Each rank steps its own
slices of parameters for which the step is elementwise ([Note: Trial of an optimizer] in
``behaviour.py``). If a step sums over a group, or over all groups, one rank owns all of these
parameters.

    gradients    g0  g1      g2                 gk: gradients of chunk k are sent to owners
    compute      e   s0      s1      s2         e: slices are stepped; sk: full tensors of chunk k
    weights              w0      w1      w2     wk: weights of chunk k are sent back

A chunk has a few parameters of each rank; its messages overlap with the steps of its neighbours.
There is memory for the gradients of two chunks. [Note: Steps in chunks] in ``chunked_step.py``
describes which hyperparameters each chunk uses.

Before a step all ranks exchange, in one message of the hosts, which gradients they have (a gradient
on some ranks only is an error on all) and whether weights changed since the last step. After it
they exchange whether the step failed, and the numbers in the state of the parameters they own.

The optimizer's ``state`` has plain tensors for parameters that this rank owns, of any shape, in any
containers, and ``{}`` for parameters of other owners. ``state_dict()`` has the state of all
parameters on all ranks, with tensors as FlatDTensors of which the owner holds all elements and
other ranks none. ``load_state_dict()`` accepts these, state of any other sharding, and plain full
tensors; all ranks must call it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.extensions.whole_tensor_optimizers.behaviour import (
    Found,
    Needs,
    TrialFailed,
    Trials,
)
from fsdp_engine.extensions.whole_tensor_optimizers.owned_params import (
    Chunk,
    MeshOwners,
    NumberLeaf,
    OwnedParam,
    TensorLeaf,
    described,
    flat_slice,
)
from fsdp_engine.extensions.whole_tensor_optimizers.owner_messages import Owned
from fsdp_engine.extensions.whole_tensor_optimizers.ownership import (
    Item,
    assign_owners,
    in_chunks,
    shares_of,
    step_work,
)
from fsdp_engine.extensions.whole_tensor_optimizers.parameter_sites import ParamSite, site_of
from fsdp_engine.flat_dtensor import FlatDTensor, gradients_of
from fsdp_engine.memory import allocator
from fsdp_engine.optim.chunked_step import (
    ChunkedStep,
    StepChunk,
    called_once,
    entries_of,
    step_in_turn,
    with_closures,
)
from fsdp_engine.optim.shadow import PlainSlot, Slices, Slot, StepHook
from fsdp_engine.optim.state_leaves import leaves_of, map_leaves
from fsdp_engine.optim.step_placement import StepPlacement
from fsdp_engine.optim.whole_tensor_steps import WholeTensorSteps

_MOST_CHUNKS = 8
# Minimum number of elements of one rank in one chunk.
_CHUNK_ELEMENTS = 2**20


def _shape_of(param: Any) -> tuple[int, ...] | None:
    """Returns the shape of a sharded parameter on this rank and its data-parallel peers; None for
    other tensors."""
    if (site := site_of(param)) is not None:
        return site.shape
    return tuple(param.flat_placement.sharded_shape) if isinstance(param, FlatDTensor) else None


def _name_of(param: Any) -> str:
    placement = param.flat_placement if isinstance(param, FlatDTensor) else None
    if placement is not None and placement.name:
        return placement.name
    site = site_of(param)
    return "a parameter" if site is None else site.buffer.layout.slots[site.number].name


def _site(param: Tensor) -> ParamSite:
    site = site_of(param)
    assert site is not None
    return site


def _central_part(site: ParamSite) -> tuple[Sequence[int], int]:
    """Returns the ranks that hold the middle element of a parameter, and the number of elements
    that each of them holds. Returns no ranks if all ranks hold all elements."""
    layout, mesh, depth = site.buffer.layout, site.buffer.mesh, site.buffer.depth
    if depth == 0:
        return (), 0
    slot = layout.slots[site.number]
    inner, place = divmod(slot.offset + slot.numel // 2, layout.numel // layout.inner_size)
    ranks: Sequence[int] = range(inner, mesh.size, mesh.inner.size)
    if depth == 2:
        ranks = (place // layout.shard_numel * mesh.inner.size + inner,)
    start, stop = site.range_of(ranks[0])
    return ranks, stop - start


def _find_needs(
    optimizer: Optimizer, trials: Trials, number: int, param: Tensor, shape: tuple[int, ...]
) -> Found:
    try:
        return trials.find(number, shape, param.dtype)
    except TrialFailed as failure:
        error = failure.__cause__
        kind = type(optimizer).__name__
        raise ValueError(
            f"optimizer: expected one that steps tensors like {_name_of(param)}, of shape {shape}, "
            f"to find out by trial steps which part of the model it needs at once; found that "
            f"{kind} raises {type(error).__name__}: {error}. Pass elementwise=True or "
            "whole=[patterns] to skip the trial"
        ) from error


def _check_whole(param: Any, optimizer: str) -> None:
    """Check that a parameter can have an owner.

    Raises:
        ValueError: The parameter is a DTensor over other mesh dimensions, belongs to no engine, or
            is not on the device.
    """
    name, site = _name_of(param), site_of(param)
    placement = param.flat_placement if isinstance(param, FlatDTensor) else None
    expected, found, advice = "", "", ""
    if site is None:
        expected, found = "a parameter of a sharded model", "a tensor that no engine has sharded"
        advice = "Build the optimizer with the parameters that the model has after fe.shard"
    elif placement is not None and placement.spread is not None:
        expected = "a parameter that is sharded over data-parallel ranks alone"
        found = "a DTensor over other mesh dimensions"
        advice = "Step it with an elementwise optimizer (AdamW)"
    elif placement is not None and param.local.device.type != site.buffer.mesh.device.type:
        expected = f"main weights on {site.buffer.mesh.device}"
        found = f"them on {param.local.device} (offload.main_weights)"
        advice = "Step it with an elementwise optimizer (AdamW)"
    if found:
        raise ValueError(
            f"{name}: expected {expected}, since {optimizer} steps whole tensors; found {found}. "
            f"{advice}"
        )


def _check_together(params: Sequence[Tensor], optimizer: Any) -> None:
    """Check that parameters that are stepped at once are shared by the same ranks.

    Raises:
        ValueError: They are shared by different ranks, so no rank could own all of them.
    """
    if len(params) < 2:
        return
    kind = type(optimizer).__name__
    first, *others = params
    for param in others:
        meshes = [each.buffer.mesh for each in map(site_of, (first, param)) if each is not None]
        if len(meshes) < 2 or meshes[0].ranks != meshes[1].ranks:
            raise ValueError(
                f"{_name_of(param)}: expected a parameter that the same ranks share as "
                f"{_name_of(first)}, since {kind} steps both at once, on one rank; found one of "
                f"{_ranks_of(param)} beside one of {_ranks_of(first)}. Step them with optimizers "
                "of their own, or with one that treats each parameter by itself"
            )


def _ranks_of(param: Tensor) -> str:
    site = site_of(param)
    return "no engine" if site is None else f"ranks {list(site.buffer.mesh.ranks)}"


def _chunks_of(items: Sequence[Item], owners: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the chunk of each item. A rank has about the same share of its work in each chunk."""
    of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for number, owner in enumerate(owners):
        of_rank[owner].append(number)
    most = max(map(len, of_rank))
    elements = max(sum(items[number].numel for number in numbers) for numbers in of_rank)
    num_chunks = max(1, min(most, _MOST_CHUNKS, elements // _CHUNK_ELEMENTS))
    chunks = [0] * len(items)
    for numbers in of_rank:
        numbers.sort(key=lambda number: (-items[number].work, number))
        for number, chunk in zip(
            numbers, in_chunks([items[n].work for n in numbers], num_chunks), strict=True
        ):
            chunks[number] = chunk
    used = {chunk: place for place, chunk in enumerate(sorted(set(chunks)))}
    return [used[chunk] for chunk in chunks]


def _as_number(key: Any) -> tuple[bool, Any]:
    return (not isinstance(key, int), key if isinstance(key, int) else str(key))


def _is_as_kept(leaf: Any, each: OwnedParam) -> bool:
    """Returns whether a loaded value is stored on its owner only, or is plain on all ranks."""
    if isinstance(leaf, FlatDTensor):
        return leaf.flat_placement == each.placement(leaf.shape)
    return not isinstance(leaf, DTensor)


def _whole(each: OwnedParam, gathers: bool, leaf: Any) -> Any:
    """Returns a loaded value: unsharded on its owner; on other ranks only the shape is used."""
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, DTensor):
        if gathers:
            leaf = leaf.full_tensor()
        elif each.is_mine:
            return leaf.local.view(leaf.shape)  # type: ignore[attr-defined]
    return leaf


def _empty(each: OwnedParam, leaf: Any) -> Any:
    """Returns a loaded tensor for ranks that do not own it: without elements."""
    if not isinstance(leaf, Tensor):
        return leaf
    local = allocator.empty(0, leaf.dtype, each.param.device)
    return FlatDTensor.from_flat_local(local, each.placement(leaf.shape))


def _with_full_tensors(now: Any, loaded: Any) -> Any:
    """Returns the state ``now`` with sharded tensors replaced by the full ones of ``loaded``."""
    if isinstance(now, Mapping):
        return {key: _with_full_tensors(value, loaded[key]) for key, value in now.items()}
    if type(now) in (list, tuple):
        return type(now)(_with_full_tensors(*pair) for pair in zip(now, loaded, strict=True))
    return loaded.to(now.dtype) if isinstance(now, DTensor) else now


class OwnedStep(ChunkedStep):
    """Step hooks of an optimizer some of whose parameters have owners. See [Note: Owners].

    Args:
        optimizer: An optimizer whose step needs a tensor, a group or all tensors at once.
        whole: Name patterns of parameters that are stepped as full tensors, each by itself. Trial
            steps find out how other parameters are stepped.
        placement: The place of the state between steps.

    Attributes:
        needs: By name of a parameter, the set of values that its step needs at once.

    Raises:
        ValueError: A trial step failed, or a parameter cannot have an owner.
    """

    def __init__(
        self, optimizer: Optimizer, whole: Sequence[str], placement: StepPlacement
    ) -> None:
        super().__init__(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._placement = placement
        self._place_of_slices = placement.make_place()
        self._patterns = tuple(whole)
        self._owners: list[MeshOwners] = []
        self._owned: dict[int, OwnedParam] = {}  # by id of the parameter
        self._unit_of: dict[int, object] = {}  # parameters that are stepped at once, by id of each
        self._slices = Slices([])
        self._plain: list[Slot] = []
        self._reads: list[Any] = []
        # Parameters whose state was loaded since the last step, with the loaded state.
        self._loaded: list[tuple[OwnedParam, Any]] = []
        self.needs: dict[str, Needs] = {}
        self._work: dict[int, float] = {}  # by id of the parameter
        self._shares: list[str] = []
        self._last: Any = None  # the shadow that torch steps, within a step
        self._refresh(optimizer)
        self._takes_nothing = self._try_without_parameters(optimizer)

    @property
    def has_owners(self) -> bool:
        """Whether any parameter has an owner."""
        return bool(self._owners)

    def keeps_full_state(self, param: Tensor) -> bool:
        """See :class:`StepHook`. Owned parameters have full state."""
        return id(param) in self._owned

    def register(self, optimizer: Optimizer) -> None:
        """Register the hooks of the optimizer."""
        super().register(optimizer)
        optimizer.register_state_dict_post_hook(self._complete_state_dict)
        optimizer.register_load_state_dict_post_hook(self._take_loaded)

    def describe(self, params: Collection[int]) -> str:
        """See :class:`StepHook`. Lists the kinds of steps, and the shares of owners."""
        if self._owned.keys().isdisjoint(params):
            return ""
        kind, needs = type(self._optimizer()).__name__, list(self.needs.values())
        lines = [
            f"{kind}: {needs.count(Needs.ELEMENT):,} parameters are stepped on slices, "
            f"{len(self._owned):,} whole, each on one rank"
        ]
        if self._is_joint:
            lines[0] += " (all on the same, since its step needs all of them at once)"
        lines += self._shares
        kept = sum(owners.bytes_of_wholes for owners in self._owners)
        lines.append(f"owners keep whole weights between steps: {kept:,} bytes on this rank")
        return "; ".join(lines) + "."

    # Owners.

    def _refresh(self, optimizer: Any, *, takes_state: bool = True) -> None:
        """Choose owners for parameters that have none, and record the groups of parameters.

        A parameter that was removed from its group keeps its owner and its state, like in torch,
        and has no gradient until it is in a group again.

        Args:
            optimizer: The optimizer, whose param groups may have changed.
            takes_state: Whether new owners take over the existing state of their parameters.

        Raises:
            RuntimeError: A parameter was converted.
            ValueError: Parameters that are stepped at once have several owners.
        """
        self._check_converted()
        if (groups := self._changed_groups(optimizer)) is None:
            return
        found = self._units_of(optimizer)
        for members in found:
            _check_together([param for _, param in members], optimizer)
            self._check_unit([param for _, param in members], optimizer)
        self._groups = groups
        self._shadows.refresh(optimizer)
        units: dict[int, tuple[DataMesh, list[list[tuple[int, Tensor]]]]] = {}
        slots: list[Slot] = []
        plain: list[Slot] = []
        for members in found:
            first = site_of(members[0][1]) if members else None
            if first is None or id(members[0][1]) in self._owned:
                continue
            mesh = first.buffer.mesh
            units.setdefault(id(mesh), (mesh, []))[1].append(members)
        owned = {id(param) for _, new in units.values() for unit in new for _, param in unit}
        owned |= self._owned.keys()
        for param in chain(*groups):
            if id(param) not in owned:
                owned.add(id(param))
                if isinstance(param, FlatDTensor):
                    slots.append(Slot(param))
                else:
                    plain.append(PlainSlot(param))
        self._slices, self._plain = Slices(slots), plain
        num_before = len(self._owners)
        for mesh, new in units.values():
            self._add_owners(mesh, new)
        for each in self._owned.values():
            each.groups.clear()
        for number, group in enumerate(groups):
            for each in (self._owned[id(param)] for param in group if id(param) in self._owned):
                each.groups.append(number)
        if takes_state:
            self._take_state_of_slices(optimizer, self._owners[num_before:])
        backrefs = (getattr(each.param, "backref", None) for each in self._owned.values())
        reads = {id(each.gradients): each.gradients for each in backrefs if each is not None}
        self._reads = list(reads.values())

    def _check_unit(self, params: Sequence[Tensor], optimizer: Any) -> None:
        """Check that parameters that are stepped at once have the same owner, or all have none.

        Raises:
            ValueError: A parameter was added to such a set, or moved to another one.
        """
        units = [self._unit_of.get(id(param)) for param in params]
        for param, unit in zip(params, units, strict=True):
            if unit is not units[0]:
                kind = type(optimizer).__name__
                raise ValueError(
                    f"{_name_of(param)}: expected the same group of parameters as when the "
                    f"optimizer was passed to fe.shard_optimizer, since {kind} steps them at once, "
                    f"on one rank; found it in a group with {_name_of(params[0])}. Make a new "
                    "optimizer with these groups"
                )

    @torch.no_grad()
    def _take_state_of_slices(self, optimizer: Any, added: Sequence[MeshOwners]) -> None:
        """Move the existing state of parameters to their new owners. Collective."""
        for each in chain.from_iterable(owners.params for owners in added):
            if state := optimizer.state.get(each.param):
                self._put(optimizer, each, map_leaves(partial(_whole, each, True), state))

    def _units_of(self, optimizer: Any) -> list[list[tuple[int, Tensor]]]:
        """Returns sets of parameters that one rank steps together, with numbers of their groups."""
        trials: Trials | None = None
        units: list[list[tuple[int, Tensor]]] = []
        coupled = Needs.ELEMENT
        for number, group in enumerate(optimizer.param_groups):
            of_group: list[tuple[int, Tensor]] = []
            needs_most = Needs.ELEMENT
            for param in group["params"]:
                if (shape := _shape_of(param)) is None:
                    continue
                name = _name_of(param)
                if any(fnmatchcase(name, pattern) for pattern in self._patterns):
                    needs, multiplies = Found(Needs.TENSOR, multiplies=True)
                else:
                    trials = trials or Trials(optimizer, param.device)
                    needs, multiplies = _find_needs(optimizer, trials, number, param, shape)
                self.needs[name] = needs
                self._work[id(param)] = step_work(shape, multiplies=multiplies)
                if needs > Needs.ELEMENT:
                    _check_whole(param, type(optimizer).__name__)
                    of_group.append((number, param))
                needs_most = max(needs_most, needs)
            coupled = max(coupled, needs_most)
            if needs_most == Needs.GROUP:
                units.append([(number, param) for param in group["params"]])
            else:
                units.extend([each] for each in of_group)
        self._is_coupled, self._is_joint = coupled >= Needs.GROUP, coupled == Needs.ALL
        if self._is_joint:
            units = [
                [
                    (number, param)
                    for number, group in enumerate(optimizer.param_groups)
                    for param in group["params"]
                ]
            ]
        return units

    def _add_owners(self, mesh: DataMesh, units: list[list[tuple[int, Tensor]]]) -> None:
        """Choose owners for sets of parameters among the ranks of ``mesh``."""
        items = []
        for unit in units:
            sites = [_site(param) for _, param in unit]
            shapes = [site.shape for site in sites]
            numel = sum(torch.Size(shape).numel() for shape in shapes)
            work = sum(self._work[id(param)] for _, param in unit)
            is_one = len(sites) == 1
            near = _central_part(sites[0]) if is_one else ()
            items.append(Item(work, numel, *near))
        owners = assign_owners(items, mesh.size)
        chunk_of = _chunks_of(items, owners, mesh.size)
        rank = mesh.outer.rank * mesh.inner.size + mesh.inner.rank
        params, chunks = [], []
        for unit, owner, chunk in zip(units, owners, chunk_of, strict=True):
            for _, param in unit:
                site = _site(param)
                owned = Owned(site, owner, param.dtype)
                made = OwnedParam(param, owned, _name_of(param), owner == rank)
                params.append(made)
                chunks.append(chunk)
                self._owned[id(param)] = made
                self._unit_of[id(param)] = unit
        self._owners.append(MeshOwners(params, chunks, self._placement.make_place))
        self._shares.append(_describe_shares(shares_of(items, owners, mesh.size), rank, len(items)))

    def _check_converted(self) -> None:
        for each in self._owned.values():
            if not each.is_current:
                raise RuntimeError(
                    f"{each.name}: expected the memory that the parameter had when its optimizer "
                    "was passed to fe.shard_optimizer; found another one: the model was converted, "
                    "or a tensor was assigned to .data. Convert the model before; copy values "
                    "under torch.no_grad() (param.copy_(values))"
                )
        if not self._slices.are_current:
            self._slices = Slices([*map(Slot, self._slices.params)])

    # Steps.

    def begin(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See :class:`StepHook`."""
        self._refresh(optimizer)
        self._replace_loaded(optimizer)
        self._shadows.clear()
        try:
            if self._is_joint and any(map(callable, (*args[1:], *kwargs.values()))):
                error, loss = self._step_jointly(optimizer, args, kwargs)
                arguments, kwargs = with_closures(args, kwargs, lambda closure: lambda: loss)
            else:
                arguments, kwargs = with_closures(args, kwargs, called_once)
                error = self._step_all(optimizer, arguments, kwargs)
        except BaseException:
            self._abandon()
            raise
        failures = [
            owners.end(optimizer.state, failed=error is not None) for owners in self._owners
        ]
        if self._is_coupled:  # Only the owner of a group has the values that its step stored there.
            for owners in self._owners:
                for stored in owners.share(self._shadows.stored):
                    self._shadows.adopt(stored)
        for each in self._owned.values():
            if each.known is not None and not each.is_mine:
                optimizer.state.setdefault(each.param, {})
        if any(failures):
            for owners in self._owners:
                owners.forget_versions()
            if error is not None:
                raise error
            raise RuntimeError(
                f"{type(optimizer).__name__}: expected its step to succeed on the owners of all "
                "parameters; found that it raised on another rank. See the output of that rank"
            )
        self._last = self._without_parameters(optimizer, self._dummies())
        return (self._last, *arguments), kwargs

    def _step_all(
        self, optimizer: Any, arguments: list[Any], kwargs: dict[str, Any]
    ) -> Exception | None:
        """Step all chunks; returns the first error of a step. Messages continue after an error."""
        self._wait_for_gradients()
        error: Exception | None = None

        def attempt(step: Callable[[], None]) -> None:
            nonlocal error
            if error is None:
                try:
                    step()
                except Exception as caught:  # Continue: other ranks wait for weights.
                    error = caught

        def step_chunk(chunk: Chunk) -> None:
            attempt(partial(self._step_chunk, optimizer, chunk, arguments, kwargs))
            chunk.return_weights()

        of_slices = partial(self._step_slices, optimizer, arguments, kwargs)
        steps: list[tuple[StepChunk, Callable[[], None]]] = [
            (self._place_of_slices, partial(attempt, of_slices))
        ]
        gradients = [self._gradients(owners) for owners in self._owners]
        for owners, found in zip(self._owners, gradients, strict=True):
            owners.start(found)
        for owners, found in zip(self._owners, gradients, strict=True):
            brings_weights = owners.finish_start()
            for chunk in owners.chunks:
                chunk.begin(found, brings_weights=brings_weights)
                steps.append((chunk, partial(step_chunk, chunk)))
        step_in_turn(steps)
        return error

    def _step_jointly(
        self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Exception | None, Any]:
        """Step all parameters on one rank, whose step may call the closure several times, as a line
        search does. All ranks call the closure each time, with the owner's current weights.

        Returns:
            The error of the step on this rank, if any, and the first loss: the mean over ranks.

        Raises:
            BaseException: The closure failed. Raised also if the step handles the error, since
                other ranks do not call the closure again.
        """
        (owners,) = self._owners
        (chunk,) = owners.chunks
        losses: list[Any] = []
        error: Exception | None = None
        closure_error: BaseException | None = None

        def evaluate(closure: Callable[[], Any]) -> Any:
            if losses:
                chunk.return_weights()
                chunk.await_weights()
                self._note_changed()
            with torch.enable_grad():
                loss = owners.mean(closure())
            losses.append(loss)
            self._wait_for_gradients()
            found = self._gradients(owners)
            owners.start(found)
            chunk.begin(found, brings_weights=owners.finish_start() and len(losses) == 1)
            chunk.bring_messages()
            chunk.wait_for_copies()
            for number, each in chunk.mine.items():
                assert each.whole is not None
                grad = chunk.messages.gradients[number]
                each.whole.grad = None if chunk.gradients[number] is None else grad.clone()
            chunk.drop_messages()
            return loss

        def on_owner(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                nonlocal closure_error
                if closure_error is not None:
                    raise closure_error
                owners.tell(True)
                try:
                    return evaluate(closure)
                except BaseException as caught:
                    closure_error = caught
                    raise

            return call

        if chunk.mine:
            chunk.place.start_copies()
            chunk.begin({}, brings_weights=False)  # Each call of the closure sends gradients.
            arguments, named = with_closures(args, kwargs, on_owner)
            try:
                self._step_chunk(optimizer, chunk, arguments, named)
            except Exception as caught:  # Continue: other ranks wait for weights.
                error = caught
            if closure_error is not None:  # Other ranks fail in the closure, and do not wait.
                try:
                    raise closure_error
                finally:
                    closure_error = None  # Its traceback refers to this frame.
            owners.tell(False)
        else:
            closures = [each for each in (*args[1:], *kwargs.values()) if callable(each)]
            while owners.tell(False):
                evaluate(closures[0])
        chunk.return_weights()
        chunk.leave()
        return error, losses[0] if losses else None

    def _wait_for_gradients(self) -> None:
        for reads in self._reads:
            reads.wait()

    @staticmethod
    def _gradients(owners: MeshOwners) -> dict[int, Tensor | None]:
        """Returns this rank's slices of gradients, by id of the parameter."""
        params = [each.param for each in owners.params if each.groups]
        flat = [param for param in params if isinstance(param, FlatDTensor)]
        found = {id(param): param.grad for param in params if not isinstance(param, FlatDTensor)}
        found.update(zip(map(id, flat), gradients_of(flat), strict=True))
        return {key: None if grad is None else flat_slice(grad) for key, grad in found.items()}

    @torch.no_grad()
    def _step_chunk(
        self, optimizer: Any, chunk: Chunk, arguments: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Step the parameters of a chunk that this rank owns."""
        mine = chunk.mine
        if not mine:
            return
        states = entries_of(optimizer)
        members: dict[int, list[Tensor]] = {}
        local_of: dict[int, Tensor] = {}
        for number, each in mine.items():
            assert each.whole is not None
            whole = local_of[id(each.param)] = each.whole
            if chunk.gradients[number] is not None:
                whole.grad = chunk.messages.gradients[number].to(whole.dtype)
            if state := optimizer.state.get(each.param):
                states[whole] = chunk.place.on_device(state)
            for group in each.groups:
                members.setdefault(group, []).append(whole)
        try:
            self._step_members(optimizer, members, states, local_of, arguments, kwargs)
            found = [states.pop(whole, None) for whole in local_of.values()]
            for each, state in zip(mine.values(), chunk.place.take(found), strict=True):
                if state:
                    optimizer.state[each.param] = state
        finally:
            for whole in local_of.values():
                whole.grad = None

    @torch.no_grad()
    def _step_slices(self, optimizer: Any, arguments: list[Any], kwargs: dict[str, Any]) -> None:
        """Step the slices of parameters without an owner, and plain parameters."""
        sharded, place = self._slices.slots, self._place_of_slices
        slots = [*sharded, *self._plain]
        if not slots:
            return
        states = entries_of(optimizer)
        for slot in slots:
            if state := optimizer.state.get(slot.param):
                states[slot.local] = slot.load(state)
        for slot in sharded:
            if state := states.get(slot.local):
                states[slot.local] = place.on_device(state)
        local_of = {id(slot.param): slot.local for slot in slots}
        members = {}
        for number, group in enumerate(self._groups):
            if found := [local_of[id(p)] for p in group if id(p) in local_of]:
                members[number] = found
        self._slices.set_gradients()
        try:
            self._step_members(optimizer, members, states, local_of, arguments, kwargs)
        finally:
            self._slices.clear_gradients()
        stepped = [states.get(slot.local) for slot in slots]
        taken = place.take(stepped[: len(sharded)]) + stepped[len(sharded) :]
        for slot, state in zip(slots, taken, strict=True):
            if state:
                slot.keep(optimizer.state.setdefault(slot.param, {}), state)

    def _dummies(self) -> dict[int, Tensor]:
        """Returns a parameter of one element for each group, by ``id`` of the parameter that it
        replaces. Empty if the step accepts groups without parameters."""
        dummies: dict[int, Tensor] = {}
        for like in (params[0] for params in self._groups if params and not self._takes_nothing):
            shape = (1,) * like.ndim
            dummies[id(like)] = dummy = allocator.zeros(shape, like.dtype, like.device)
            dummy.grad = allocator.zeros(shape, like.dtype, like.device)
        return dummies

    def _try_without_parameters(self, optimizer: Any) -> bool:
        """Returns whether the step accepts groups without parameters."""
        try:
            self._shadows.function(self._without_parameters(optimizer, {}))
        except Exception:
            return False
        return True

    def finish(self, optimizer: Any) -> None:
        """See :class:`StepHook`."""
        if self._takes_nothing and not self._is_coupled:
            # Keep counters that the step stores in groups of which this rank owns no parameter.
            # A coupled step stores wrong sums if it has no parameters, so these are not kept.
            self._shadows.keep(self._last, range(len(self._groups)), self._shadows.stepped)
        self._last = None  # The shadow refers to hooks.
        super().finish(optimizer)
        self._note_changed()
        for owners in self._owners:
            owners.remember_versions()

    def _note_changed(self) -> None:
        """Mark weights as changed, so that the engine gathers them, also on ranks without elements.
        Fused steps do not increment version counters themselves (torch 2.11 to 2.13)."""
        torch.autograd.graph.increment_version(
            [*self._slices.locals, *(each.local for each in self._owned.values())]
        )

    def _abandon(self) -> None:
        """Free all chunks after a failed message. The caller raises the error of the message."""
        self._slices.clear_gradients()
        self._placement.drain()
        self._place_of_slices.abandon()
        for owners in self._owners:
            owners.lanes.drain()
            owners.forget_versions()
            for chunk in owners.chunks:
                chunk.abandon()

    # Saving and loading.

    def target_of(self, param: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """See :class:`StepHook`."""
        if (each := self._owned.get(id(param))) is None:
            return None
        placement = each.placement(shape)
        local = allocator.zeros(placement.numel, dtype, param.device)
        return FlatDTensor.from_flat_local(local, placement)

    def _complete_state_dict(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """State dict post-hook: add the state of parameters that other ranks own."""
        self._placement.wait()
        states = dict(state_dict["state"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for index, param in enumerate(params):
            if (each := self._owned.get(id(param))) is None:
                continue
            states.pop(index, None)
            # On a rank that does not own the parameter, an empty entry stands for the state of the
            # owner. There is no entry if the user has reset the state.
            has_state = (
                bool(optimizer.state.get(param)) if each.is_mine else param in optimizer.state
            )
            if each.known is not None and has_state:
                states[index] = self._state_of(optimizer, each)
        in_order = {key: states[key] for key in sorted(states, key=_as_number)}
        return {**state_dict, "state": in_order}

    @staticmethod
    def _state_of(optimizer: Any, each: OwnedParam) -> Any:
        def of_owner(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
                return leaf
            flat = leaf.detach().contiguous().view(-1)
            return FlatDTensor.from_flat_local(flat, each.placement(leaf.shape))

        numbers = iter(each.numbers)

        def of_other(leaf: Any) -> Any:
            if isinstance(leaf, TensorLeaf):
                local = allocator.empty(0, leaf.dtype, each.param.device)
                return FlatDTensor.from_flat_local(local, each.placement(leaf.shape))
            return next(numbers) if isinstance(leaf, NumberLeaf) else leaf.value

        if each.is_mine:
            return map_leaves(of_owner, optimizer.state[each.param])
        return map_leaves(of_other, each.known)

    @torch.no_grad()
    def _take_loaded(self, optimizer: Any) -> None:
        """Load post-hook: owners keep full tensors, other ranks the structure of the state."""
        for each in self._owned.values():  # A loaded dict may lack the state of some parameters.
            each.known, each.numbers = None, []
        self._refresh(optimizer, takes_state=False)
        self._loaded.clear()
        for owners in self._owners:
            loaded = [optimizer.state.get(each.param) or {} for each in owners.params]
            is_whole = all(
                _is_as_kept(leaf, each)
                for each, state in zip(owners.params, loaded, strict=True)
                for leaf in leaves_of(state)
            )
            gathers = owners.tell(not is_whole)
            for each, state in zip(owners.params, loaded, strict=True):
                if state or each.param in optimizer.state:
                    values = map_leaves(partial(_whole, each, gathers), state)
                    self._put(optimizer, each, values)
                    self._loaded.append((each, values if each.is_mine else {}))
                    if not each.is_mine:
                        optimizer.state[each.param] = map_leaves(partial(_empty, each), values)

    def put_state(self, param: Tensor, state: Any) -> None:
        """See :class:`StepHook`."""
        optimizer = self._optimizer()
        each = self._owned[id(param)]
        self._loaded = [pair for pair in self._loaded if pair[0] is not each]
        self._put(optimizer, each, map_leaves(partial(_whole, each, False), state))

    @staticmethod
    def _put(optimizer: Any, each: OwnedParam, values: Any) -> None:
        each.known = map_leaves(described, values) if values else None
        each.numbers = [n for n in leaves_of(values) if isinstance(n, bool | int | float)]
        optimizer.state[each.param] = values if each.is_mine else {}

    def _replace_loaded(self, optimizer: Any) -> None:
        """Replace loaded state by full tensors, before a step. This is not done in the load hook,
        since an optimizer's own ``load_state_dict`` may read and change the state that torch's has
        loaded (pytorch_optimizer's does)."""
        for each, values in self._loaded:
            now = optimizer.state.get(each.param) or {}
            if each.is_mine and now:
                optimizer.state[each.param] = _with_full_tensors(now, values)
            else:
                optimizer.state[each.param] = {}
        self._loaded.clear()


def _describe_shares(shares: Sequence[Item], rank: int, num_items: int) -> str:
    work, numel = [share.work for share in shares], [share.numel for share in shares]
    mean = sum(work) / len(work) or 1.0
    return (
        f"this rank's share of the work of {num_items:,} is {work[rank] / mean:.2f} of the mean of "
        f"{len(shares):,} ranks ({min(work) / mean:.2f} to {max(work) / mean:.2f}), of their "
        f"elements {numel[rank] * len(shares) / max(sum(numel), 1):.2f}"
    )


class OwnedSteps(WholeTensorSteps):
    """Steps of optimizers that need full tensors. See :class:`WholeTensorSteps`."""

    @staticmethod
    def make_hook(
        optimizer: Optimizer, whole: Sequence[str], placement: StepPlacement
    ) -> StepHook | None:
        """See :class:`WholeTensorSteps`."""
        step = OwnedStep(optimizer, whole, placement)
        if not step.has_owners:
            return None
        placement.check_whole_tensors(type(optimizer).__name__)
        return step
