"""Ranks agree on dtypes after a conversion, before any of them sends in another dtype.

[Note: Converted on some ranks]
``model.to(dtype)`` is local: nothing is sent. A rank that skips it would exchange messages of other
lengths with the rest, which gloo answers with an abort and NCCL with a hang or wrong values. So a
conversion is noted for the groups over which its buffers communicate, and before the next
collective over any of them ranks meet in the store (``devices/meeting.py``) and compare the dtypes.
One meeting follows each conversion; steps do not pay for it.

A rank that has not converted does not come to the meeting, but waits in a collective for the ranks
that meet. They ask where it is, leave it their error as the reason of its wait's failure, and close
their connections of the gloo groups, which ends the wait. On NCCL the host does not wait in
collectives: ranks that meet raise after the group's timeout, and NCCL's watchdog ends the others.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.spec import BufferKind
from fsdp_engine.devices.collectives import before_next, end_waits, not_before_next
from fsdp_engine.devices.groups import default_group, timeout_of_group
from fsdp_engine.devices.lanes import is_in_flight
from fsdp_engine.devices.meeting import meet
from fsdp_engine.planning.build import Ladders
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import Axis

_WHAT = (
    "conversion of sharded parameters, which every rank has to make or none (model.to(dtype), "
    ".half(), .double())"
)
_MOST_NAMED = 8

# One for all models of the same ranks, whose groups they may share.
_BY_RANKS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], SameDtypes]] = (
    weakref.WeakKeyDictionary()
)


def note_conversion(
    ladders: Ladders, before: Iterable[tuple[ParamAndGradBuffer, BufferKind]]
) -> None:
    """Let the next communication of converted buffers be preceded by a comparison of dtypes. Not
    collective.

    Args:
        ladders: of the model.
        before: buffers, each with its kind before the conversion.
    """
    group = ladders.ranks.control_group
    if group is None:
        return
    ranks = tuple(ladders.ranks.ranks)
    known = _BY_RANKS.setdefault(default_group(), {})
    if ranks not in known:
        known[ranks] = SameDtypes(ranks, timeout_of_group(group, ladders.ranks.device))
    known[ranks].note(ladders, before)


@dataclass(frozen=True)
class _Change:
    """A buffer, by its first parameter and the number of its ladder, and its dtypes."""

    name: str
    number: int
    now: ParamDtypes
    before: ParamDtypes


class SameDtypes:
    """Conversions of buffers that some ranks communicate over, and that they have not compared.

    Args:
        ranks: global ranks of the model.
        timeout: how long to wait for them.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: timedelta) -> None:
        self._ranks = ranks
        self._timeout = timeout
        # What all ranks agreed on last, and the number of the buffer's ladder.
        self._agreed: weakref.WeakKeyDictionary[ParamAndGradBuffer, tuple[BufferKind, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._groups: list[weakref.ref[dist.ProcessGroup]] = []

    def note(
        self, ladders: Ladders, before: Iterable[tuple[ParamAndGradBuffer, BufferKind]]
    ) -> None:
        """See :func:`note_conversion`."""
        for buffer, kind in before:
            self._agreed.setdefault(buffer, (kind, ladders.data.number))
        if not self._changes():
            self._settle()
            return
        for group in _groups_of(ladders):
            before_next(group, self.compare)
            self._groups.append(weakref.ref(group))

    def compare(self) -> None:
        """Meet the other ranks. Collective, and collective over all ranks of the model.

        Raises:
            ValueError: dtypes differ.
            RuntimeError: a rank did not come.
        """
        changes = self._changes()
        if changes:
            meet(_WHAT, self._ranks, self._timeout, note=_described(changes), precedence=self)
        self._settle()

    @staticmethod
    def precedes(label: str) -> bool:
        """Whether another rank waits for an operation that this rank has not issued. Operations of
        a model are over on this rank before its conversion."""
        return not is_in_flight(label)

    def end_waits(self) -> None:
        """See :class:`~fsdp_engine.devices.meeting.Precedence`."""
        for group in self._live_groups():
            end_waits(group)

    def _changes(self) -> list[_Change]:
        return [
            _Change(buffer.records[0].name, number, buffer.kind.dtypes, agreed.dtypes)
            for buffer, (agreed, number) in self._agreed.items()
            if buffer.kind.dtypes != agreed.dtypes
        ]

    def _settle(self) -> None:
        for group in self._live_groups():
            not_before_next(group, self.compare)
        self._groups.clear()
        self._agreed.clear()

    def _live_groups(self) -> list[dist.ProcessGroup]:
        return [group for ref in self._groups if (group := ref()) is not None]


def _groups_of(ladders: Ladders) -> list[dist.ProcessGroup]:
    """All groups over which a model's buffers communicate."""
    found = [ladders.ranks.control_group]
    for ladder in (ladders.data, ladders.expert):
        if ladder is not None:
            found.append(ladder.mesh.control_group)
            for axis in Axis:
                place = ladder.mesh.axis(axis)
                found += [place.gather_group, place.reduce_group]
    return [group for group in dict.fromkeys(found) if group is not None]


def _described(changes: Sequence[_Change]) -> str:
    """The changes, in a form that is equal on ranks with equal ones: "torch.float64, before
    torch.float32: units of first.weight (3f2ad45c)". The digest is of all that differs."""
    names_of: dict[str, list[str]] = {}
    for each in changes:
        dtypes = f"{each.now.main}, before {each.before.main}"
        names_of.setdefault(dtypes, []).append(each.name)
    parts = []
    for dtypes, names in sorted(names_of.items()):
        names.sort()
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        parts.append(f"{dtypes}: units of {', '.join(names[:_MOST_NAMED])}{more}")
    digest = hashlib.sha256("\n".join(sorted(map(str, changes))).encode()).hexdigest()
    return f"{'; '.join(parts)} ({digest[:8]})"
