"""Weights that modules write in forward, e.g. forced weight normalization or clamps in hooks.

Modules write full compute weights. When the full parameters of a unit are removed from the modules,
their version counters are compared, and written values are copied into this rank's main weights. So
the gather for backward and the next forward use them, and the optimizer steps from them. Each rank
copies its own shard, which is correct if all ranks wrote the same values; this is checked when the
forward or backward ends.

A write through ``param.data`` changes no version counter. So the values themselves are compared in
some uses of each unit, and in all uses once such a write was found: see :class:`Comparisons`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from fsdp_engine import backend
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.fingerprints import checksums, fingerprint
from fsdp_engine.comm.groups import timeout_of_group
from fsdp_engine.comm.lanes import is_capturing
from fsdp_engine.comm.rendezvous import meet
from fsdp_engine.engine import Engine
from fsdp_engine.memory import allocator
from fsdp_engine.runtime.parameter_watch import ModelWatch, UnitWatch

_version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
_WHAT = "weights that a module wrote in forward"


class Comparisons:
    """Decides in which uses of a unit values are compared: in the 1st, 2nd, 4th, 8th use and so on,
    or only in the 1st. Uses with and without gradients are counted separately. After a write was
    found, values are compared in all uses.

    Args:
        repeats: Whether to compare after the 1st use, too. On an accelerator each comparison is a
            host sync.
    """

    __slots__ = ("_always", "_gaps", "_left", "_repeats")

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._gaps = [1, 1]
        self._left = [1, 1]
        self._always = False

    def is_due(self) -> bool:
        """Count a use that begins; returns whether values are compared in it."""
        if self._always:
            return True
        kind = int(torch.is_grad_enabled())
        self._left[kind] -= 1
        if self._left[kind]:
            return False
        if not self._repeats:
            return True  # `_left` is negative from the next use on, so no other use is due.
        self._left[kind] = self._gaps[kind]
        self._gaps[kind] *= 2
        return True

    def compare_always(self) -> int:
        """Compare values in all further uses, because a write was found. Returns an upper bound of
        the number of uses since the previous comparison, whose writes were not detected."""
        num_unseen = 0 if self._always else max(self._gaps) // 4 - 1
        self._always = True
        return max(num_unseen, 0)


class UnitWrites(UnitWatch):
    """Finds full parameters of one unit that modules have written.

    Args:
        buffers: The buffers of the unit.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer]) -> None:
        # Full parameters that forward may write, and their versions at the last check.
        self._writable = [buffer for buffer in buffers if _can_write(buffer)]
        self._watched = [param for buffer in self._writable for param in buffer.full_params]
        self._versions = list(map(_version_of, self._watched))
        self._comparisons: Comparisons | None = None
        self._prints: list[int] = []
        self._label = ""
        self._on_written: Callable[[ParamAndGradBuffer, Sequence[int]], object] | None = None

    def tell(
        self, on_written: Callable[[ParamAndGradBuffer, Sequence[int]], object], label: str
    ) -> None:
        """Set a function to call after written values are in the main weights.

        Args:
            on_written: Called with a buffer and the indices of its full parameters that were
                written.
            label: Name of the unit in messages.
        """
        self._on_written, self._label = on_written, label

    def compare_values(self, *, repeats: bool) -> None:
        """Compare values of full parameters before and after some uses, since versions do not count
        writes through ``param.data``. See :class:`Comparisons`."""
        self._comparisons = Comparisons(repeats=repeats) if self._watched else None

    def begin(self) -> None:
        """See :class:`UnitWatch`."""
        if self._comparisons is None or not self._comparisons.is_due():
            return
        if not is_capturing(self._watched[0].device, [None]):
            self._prints = checksums(self._watched)

    def end(self) -> None:
        """See :class:`UnitWatch`. Copies values that modules have written to the main weights."""
        versions = list(map(_version_of, self._watched))
        if not self._prints and versions == self._versions:
            return
        prints, self._prints = self._prints, []
        pairs = zip(versions, self._versions, strict=True)
        changed = [after != before for after, before in pairs]
        self._versions = versions
        if prints:
            now = checksums(self._watched)
            unseen = [one != other for one, other in zip(prints, now, strict=True)]
            hidden = [each and not seen for each, seen in zip(unseen, changed, strict=True)]
            if any(hidden):
                self._note_hidden_writes(hidden)
            changed = [one or other for one, other in zip(unseen, changed, strict=True)]
        each = iter(changed)
        for buffer in self._writable:
            indices = [index for index, _ in enumerate(buffer.full_params) if next(each)]
            if indices:
                _take_written(buffer, indices)
                if self._on_written is not None:
                    self._on_written(buffer, indices)

    def reset(self) -> None:
        """See :class:`UnitWatch`."""
        self._versions, self._prints = list(map(_version_of, self._watched)), []

    def _note_hidden_writes(self, hidden: Sequence[bool]) -> None:
        """Compare values in all further uses, and warn if earlier writes may be lost."""
        assert self._comparisons is not None
        num_unseen = self._comparisons.compare_always()
        if not num_unseen:
            return
        records = [record for buffer in self._writable for record in buffer.records]
        name = records[hidden.index(True)].name
        warnings.warn(
            f"{name}: expected forward to write weights in a way that autograd counts; found that "
            "it wrote this one through .data or a NumPy array. Writes of the last "
            f"{num_unseen} uses of unit {self._label} may be lost; later writes are kept. Write "
            "by operations in place under torch.no_grad()",
            stacklevel=2,
        )


def _can_write(buffer: ParamAndGradBuffer) -> bool:
    """Returns whether the full parameters of ``buffer`` are plain tensors other than the sharded
    ones, so that modules can write them in forward."""
    if buffer.is_plain or not buffer.weights.can_be_written:
        return False
    plain = (Tensor, nn.Parameter, DTensor)
    return all(type(param) in plain for param in buffer.full_params)


def _take_written(buffer: ParamAndGradBuffer, indices: Sequence[int]) -> None:
    """Copy full parameters that modules have written into the main weights.

    Raises:
        RuntimeError: The encoding of their gathers is not a cast, or a parameter got other memory;
            names the parameter.
    """
    names = [record.name for record in buffer.records]
    buffer.weights.check_written(names[indices[0]])
    for index in indices:
        param, slot = buffer.full_params[index], buffer.weights.params[index]
        if buffer.placement(index).spread is None and not allocator.begin_together(param, slot):
            raise RuntimeError(
                f"{names[index]}: expected a weight that forward writes in place "
                "(copy_ under torch.no_grad()); found that it was given other memory "
                "(.data = ..., set_)"
            )
    if buffer.reads.on_change is not None:
        buffer.reads.on_change()
    buffer.weights.take_full()


class WrittenWeights(ModelWatch):
    """Checks that all ranks write the same values. See the module docstring.

    Args:
        engine: The engine of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._device = engine.mesh.device
        self._communicators = engine.communicators
        # Fingerprints of written values by name, for each group of ranks that share them.
        self._written: dict[ProcessGroup, dict[str, Tensor]] = {}
        self._ranks: dict[ProcessGroup, list[int]] = {}
        # Full parameters that are also the sharded ones, and their versions when forward started.
        self._plain = [each for each in engine.buffers if each.is_plain]
        self._plain_params = [param for each in self._plain for param in each.full_params]
        self._plain_versions: list[int] = []
        is_plain = type(allocator.empty(0, torch.uint8, self._device)) is Tensor
        has_values = is_plain and backend.current().has_values
        for unit in engine.units:
            assert isinstance(unit.watch, UnitWrites)
            unit.watch.tell(self.add, unit.label)
            groups_of = [each.control_group for each in unit.buffers]
            if has_values and not any(map(_is_fake, groups_of)):
                unit.watch.compare_values(repeats=self._device.type == "cpu")

    def begin_forward(self) -> None:
        """See :class:`ModelWatch`."""
        self._plain_versions = list(map(_version_of, self._plain_params))

    def end_forward(self) -> None:
        """See :class:`ModelWatch`. Finds written parameters that are not gathered."""
        versions = list(map(_version_of, self._plain_params))
        if versions != self._plain_versions:
            before = iter(self._plain_versions)
            for buffer in self._plain:
                indices = [
                    index
                    for index, param in enumerate(buffer.full_params)
                    if param._version != next(before)
                ]
                self.add(buffer, indices)

    def add(self, buffer: ParamAndGradBuffer, indices: Sequence[int]) -> None:
        """Record the full parameters of ``buffer`` that a module wrote."""
        group = buffer.control_group
        if group is None or _is_fake(group):
            return
        self._ranks[group] = buffer.mesh.ranks
        written = self._written.setdefault(group, {})
        for index in indices:
            written[buffer.records[index].name] = fingerprint(buffer.full_params[index])

    def check(self, *, ranks_differ: bool) -> None:
        """Check that ranks wrote the same values. Collective if a rank wrote any. It is called
        after the outermost backward, since ranks may differ within nested ones.

        Raises:
            ValueError, RuntimeError: Ranks wrote different values, or some ranks wrote none; raised
                on all ranks. Or ranks use different modules (``ranks_differ``), which prevents the
                check.
        """
        written, self._written = self._written, {}
        for group, prints in written.items():
            names = ", ".join(list(prints)[:8])
            if ranks_differ:
                raise RuntimeError(
                    f"{names}: expected weights that forward does not write within "
                    "engine.together(), where ranks use different modules; found weights that "
                    "forward has written. Write them between steps"
                )
            values = torch.stack(list(prints.values())).tolist()
            found = [
                f"{name}: {value & 0xFFFFFFFF:08x}"
                for name, value in zip(prints, values, strict=True)
            ]
            timeout = timeout_of_group(group, self._device)
            meet(
                f"{_WHAT} ({names})",
                self._ranks[group],
                timeout,
                note=", ".join(found),
                groups=self._communicators.groups,
            )

    def reset(self) -> None:
        """See :class:`ModelWatch`. Drops fingerprints that have not been compared."""
        self._written.clear()


def _is_fake(group: ProcessGroup | None) -> bool:
    """Returns whether collectives of ``group`` send nothing."""
    return group is not None and dist.get_backend(group) == "fake"
