"""Parameters with owners, and the exchanges of a step between the ranks that share them."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_engine.comm.collectives import Communicator, all_reduce_, gather_objects
from fsdp_engine.comm.groups import group_of_ranks
from fsdp_engine.comm.host_message import HostMessage
from fsdp_engine.comm.lanes import Lanes, Ticket
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.extensions.whole_tensor_optimizers.owner_messages import ROLE, ChunkMessages, Owned
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.layout.layout import RangesOfRanks
from fsdp_engine.memory.allocator import Memory, storage_keys
from fsdp_engine.optim.chunked_step import StepChunk, Stored
from fsdp_engine.optim.state_leaves import leaves_of, map_leaves
from fsdp_engine.optim.step_placement import StatePlace

_TAGS = 2, 3  # tags of messages of gradients and of weights
_version_of = attrgetter("_version")


class TensorLeaf(NamedTuple):
    """Description of a tensor in the state of a parameter, for ranks that do not own it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class NumberLeaf(NamedTuple):
    """Description of a number in the state, whose value ranks exchange after each step."""

    kind: type


class OtherLeaf(NamedTuple):
    """Description of another object in the state, which ranks exchange when it changes."""

    value: Any


def described(value: Any) -> Any:
    """Returns the description of a value in the state of a parameter, for other ranks."""
    if isinstance(value, Tensor):
        return TensorLeaf(tuple(value.shape), value.dtype)
    if isinstance(value, bool | int | float):
        return NumberLeaf(type(value))
    return OtherLeaf(value if value is None or isinstance(value, str) else type(value).__name__)


@dataclass(eq=False)
class OwnedParam:
    """A parameter that has an owner.

    Attributes:
        param: The parameter of the model.
        owned: Its site and its owner.
        name: Name for messages.
        is_mine: Whether this rank is the owner.
        groups: Numbers of its param groups. Empty: it is not stepped.
        whole: On the owner, the full tensor that is stepped.
        known: Description of its state. None: it has no state.
        numbers: On ranks that do not own it, the numbers in its state, in order.
    """

    param: Tensor
    owned: Owned
    name: str
    is_mine: bool
    groups: list[int] = field(default_factory=list)
    whole: Tensor | None = None
    known: Any = None
    numbers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._local = _memory_of(self.param)

    @property
    def is_current(self) -> bool:
        """Whether the memory of the parameter is unchanged, i.e. it was not converted."""
        return _memory_of(self.param) == self._local

    @property
    def local(self) -> Tensor:
        """This rank's slice, 1-D."""
        return flat_slice(self.param)

    def placement(self, shape: Sequence[int]) -> FlatPlacement:
        """Returns the placement of a state tensor: the owner has all elements, other ranks none."""
        mesh = self.owned.site.buffer.mesh
        numel = torch.Size(shape).numel()
        groups = () if mesh.control_group is None else (mesh.control_group,)
        return FlatPlacement(
            torch.Size(shape),
            0,
            numel if self.is_mine else 0,
            mesh.device_mesh,
            groups,
            mesh.device_mesh.ndim,
            name=self.name,
            ranges=RangesOfRanks(self.owned.owner, numel, 0),
        )


def _memory_of(param: Any) -> tuple[object, int, torch.dtype]:
    """Returns an identifier of the memory of a parameter."""
    local = param._local_tensor if isinstance(param, FlatDTensor) else param
    key = storage_keys(local)[0] if local.numel() else None
    return key, int(local.storage_offset()), local.dtype


def flat_slice(tensor: Any) -> Tensor:
    """Returns this rank's elements of a tensor, 1-D."""
    if isinstance(tensor, FlatDTensor):
        return tensor.local
    detached: Tensor = tensor.detach()
    return detached.view(-1) if detached.is_contiguous() else detached.reshape(-1)


class Chunk(StepChunk):
    """Parameters that are stepped together, over all ranks of a mesh.

    Args:
        params: The parameters, in the same order on all ranks.
        messages: The messages of these parameters.
        lanes: The lanes of the engine.
        place: The place for the state of parameters that this rank owns.

    Attributes:
        params, messages, place: The arguments.
        mine: The parameters that this rank owns, by number.
        gradients: Within a step, this rank's slice of each parameter's gradient. None: no rank has
            a gradient of the parameter.
    """

    def __init__(
        self,
        params: Sequence[OwnedParam],
        messages: ChunkMessages,
        lanes: Lanes,
        place: StatePlace,
    ) -> None:
        self.params = params
        self.messages = messages
        self.place = place
        self.mine = {number: params[number] for number in messages.mine}
        self.gradients: Sequence[Tensor | None] = ()
        self._brings_weights = False
        self._lanes = lanes
        self._brought: Ticket | None = None
        self._returned: Ticket | None = None

    def begin(self, gradients: Mapping[int, Tensor | None], *, brings_weights: bool) -> None:
        """Prepare a step.

        Args:
            gradients: This rank's gradient slices, by ``id`` of the parameter.
            brings_weights: Whether slices of weights were changed outside of steps, so that they
                are sent to the owners first.
        """
        self.gradients = [gradients.get(id(each.param)) for each in self.params]
        self._brings_weights = brings_weights

    def start_copies(self) -> None:
        """Start to copy the inputs of the step to this rank: the state of parameters that it owns,
        gradients, and weights if they changed outside of steps."""
        self.place.start_copies()
        self.bring_messages()

    def bring_messages(self) -> None:
        """Start to copy like :meth:`start_copies`, but without state."""
        lanes, messages = self._lanes, self.messages
        messages.fill(lanes.compute)
        now = lanes.compute.record()
        if self._brings_weights:
            now = messages.bring_weights(lanes.inner_reduce, now, self.locals, self.wholes)
        self._brought = messages.bring_gradients(lanes.inner_reduce, now, self.gradients)

    def wait_for_copies(self) -> None:
        """Make compute wait for the copies that :meth:`start_copies` started."""
        assert self._brought is not None
        self._lanes.compute.wait(self._brought)
        self._brought = None

    def return_weights(self) -> None:
        """Start to send stepped weights to all ranks that hold slices of them."""
        lanes = self._lanes
        self.messages.fill(lanes.compute)
        self._returned = self.messages.return_weights(
            lanes.inner_gather, lanes.compute.record(), self.locals, self.wholes
        )

    def await_weights(self) -> None:
        """Make compute wait for :meth:`return_weights`, and free the memory of messages."""
        compute = self._lanes.compute
        assert self._returned is not None
        compute.wait(self._returned)
        self._returned = None
        self.drop_messages()

    def drop_messages(self) -> None:
        """Free the memory of messages and the gradients."""
        self.gradients = ()
        self.messages.free(self._lanes.compute)

    def leave(self) -> None:
        """Make compute wait for :meth:`return_weights`, and free the device memory of the step."""
        self.await_weights()
        self.place.leave()

    def abandon(self) -> None:
        """Free memory like :meth:`leave`, after the lanes have finished all operations."""
        self._brought = self._returned = None
        self.drop_messages()
        self.place.abandon()

    @property
    def locals(self) -> list[Tensor]:
        """This rank's slices of the parameters."""
        return [each.local for each in self.params]

    @property
    def wholes(self) -> dict[int, Tensor]:
        """Flat full tensors of the parameters that this rank owns, by number."""
        return {
            n: each.whole.detach().view(-1)
            for n, each in self.mine.items()
            if each.whole is not None
        }


class MeshOwners:
    """The owned parameters that the ranks of one mesh share, and their messages.

    Args:
        params: The parameters, in the same order on all ranks.
        chunks: The number of the chunk of each parameter.
        make_place: Returns a place for the state of a chunk.

    Attributes:
        params: The parameters.
        chunks: The chunks.
    """

    def __init__(
        self,
        params: Sequence[OwnedParam],
        chunks: Sequence[int],
        make_place: Callable[[], StatePlace],
    ) -> None:
        buffer = params[0].owned.site.buffer
        self.mesh: DataMesh = buffer.mesh
        self.lanes: Lanes = buffer.lanes
        self.memory: Memory = buffer.memory
        self.params = params
        gradients = weights = None
        if self.mesh.control_group is not None:
            device = self.mesh.device
            ranks = self.mesh.ranks
            like = self.mesh.control_group
            gradients = Communicator(group_of_ranks(ranks, like, device, purpose="owners"), device)
            weights = Communicator(like, device)
        self.chunks: list[Chunk] = []
        for number in range(max(chunks) + 1):
            of_chunk = [p for p, at in zip(params, chunks, strict=True) if at == number]
            owned = [each.owned for each in of_chunk]
            messages = ChunkMessages(owned, self.memory, gradients, weights, _TAGS)
            self.chunks.append(Chunk(of_chunk, messages, self.lanes, make_place()))
        self._before = HostMessage("the beginning of a step", self.mesh)
        self._after = HostMessage("the end of a step", self.mesh)
        self._versions: list[int] | None = None
        self._is_cut = any(each.owned.site.buffer.depth for each in params)
        self._allocate_wholes()

    def _allocate_wholes(self) -> None:
        """Allocate full tensors for owned parameters of which this rank holds only a slice."""
        mine = [each for each in self.params if each.is_mine]
        parts = [each for each in mine if each.local.numel() < each.owned.numel]
        self._wholes: list[Tensor] = []
        for each in mine:
            if each in parts:
                flat = self.memory.persistent(each.owned.numel, each.owned.dtype, ROLE)
                self._wholes.append(flat)
                free = weakref.finalize(each, self.memory.unregister, flat, ROLE)
                free.atexit = False
            else:
                flat = each.local
            each.whole = flat.view(each.owned.site.shape).requires_grad_()

    @property
    def bytes_of_wholes(self) -> int:
        """Bytes of full weights that this rank keeps as an owner, in addition to its slices."""
        return sum(whole.nbytes for whole in self._wholes)

    def tell(self, flag: bool) -> bool:
        """Returns whether ``flag`` is true on any rank. Collective."""
        self._before.start(bytearray([flag]))
        return bool(self._before.finish()[0])

    def share(self, stored: Stored) -> list[Stored]:
        """Returns, for all ranks, the values that their steps stored in groups. Collective."""
        group = self.mesh.control_group
        found = gather_objects(stored, group, "values that a step stored in groups")
        return [each for each in found if isinstance(each, Stored)]

    def mean(self, loss: Any) -> Any:
        """Returns the mean of a loss over ranks, as a tensor without a graph. Collective."""
        if self.mesh.size == 1 or loss is None:
            return loss
        total = torch.as_tensor(loss, device=self.mesh.device).detach().clone()
        what = "the mean loss of a closure"
        return all_reduce_(total, self.mesh.control_group, what=what).div_(self.mesh.size)

    def start(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Start to send which gradients this rank has and whether its weights changed."""
        has = bytes(gradients.get(id(each.param)) is not None for each in self.params)
        changed = self._is_cut and self._versions != self._find_versions()
        self._before.start(bytearray([changed]) + has + bytes(1 - byte for byte in has))

    def finish_start(self) -> bool:
        """Finish :meth:`start`; returns whether weights changed on any rank.

        Raises:
            RuntimeError: A parameter has a gradient on some ranks only.
        """
        changed, *flags = self._before.finish()
        num = len(self.params)
        for each, has, has_not in zip(self.params, flags[:num], flags[num:], strict=True):
            if has and has_not:
                raise RuntimeError(
                    f"{each.name}: expected a gradient on all ranks, or on none, since its owner "
                    "steps it for all; found one on some ranks only"
                )
        return bool(changed)

    def remember_versions(self) -> None:
        """Record that this rank's slices of weights equal the weights that owners keep."""
        self._versions = self._find_versions()

    def forget_versions(self) -> None:
        """Record that this rank's slices may differ from the weights that owners keep."""
        self._versions = None

    def _find_versions(self) -> list[int]:
        return list(map(_version_of, [each.local for each in self.params]))

    def end(self, states: Mapping[Tensor, Any], *, failed: bool) -> bool:
        """Exchange the structure and the numbers of the state of all parameters. Collective.

        Args:
            states: The state of the optimizer.
            failed: Whether the step raised an exception on this rank.

        Returns:
            Whether the step raised an exception on any rank.
        """
        is_new = False
        for each in self.params:
            if each.is_mine:
                state = states.get(each.param)
                known = map_leaves(described, state) if state else None
                if known != each.known:
                    each.known, is_new = known, True
        if self.mesh.size == 1:
            return failed
        self._after.start(bytearray([failed, is_new]))
        failed_somewhere, is_new_somewhere = self._after.finish()
        if is_new_somewhere:
            mine = {n: each.known for n, each in enumerate(self.params) if each.is_mine}
            group = self.mesh.control_group
            for found in gather_objects(mine, group, "the state of owned parameters"):
                assert isinstance(found, dict)
                for number, known in found.items():
                    self.params[number].known = known
        if packed := self._packed_numbers(states):
            self._after.start(packed)
            self._unpack_numbers(bytes(self._after.finish()))
        return bool(failed_somewhere)

    def _packed_numbers(self, states: Mapping[Tensor, Any]) -> bytearray:
        """Returns, as bytes, the numbers in the state of parameters that this rank owns, and zeros
        for other parameters, since ranks exchange the maximum of each byte."""
        packed = bytearray()
        for each in self.params:
            if each.is_mine:
                for value in leaves_of(states.get(each.param, {})):
                    if isinstance(value, bool | int | float):
                        packed += struct.pack("<d" if isinstance(value, float) else "<q", value)
            else:
                numbers = (isinstance(leaf, NumberLeaf) for leaf in leaves_of(each.known))
                packed += bytes(8 * sum(numbers))
        return packed

    def _unpack_numbers(self, packed: bytes) -> None:
        at = 0
        for each in self.params:
            each.numbers = []
            for leaf in leaves_of(each.known):
                if isinstance(leaf, NumberLeaf):
                    code = "<d" if leaf.kind is float else "<q"
                    each.numbers.append(leaf.kind(struct.unpack_from(code, packed, at)[0]))
                    at += 8
