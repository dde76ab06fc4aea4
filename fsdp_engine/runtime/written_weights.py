"""Weights that modules write in forward: forced weight normalization, clamps in hooks, and so on.

Modules write full compute weights. When a unit's full parameters leave the modules, their version
counters are compared, and written values are taken into this rank's main weights
(``Unit.uninstall``). So the gather for backward and the next forward use them, and the optimizer
steps from them. Each rank takes its own slice, which is right if all ranks wrote the same values:
that is checked when the forward or backward ends.

A write through ``param.data`` changes no version counter. So values themselves are compared
in some uses of each unit, and in all uses of one that was found to write so: see
:class:`.unit.Comparisons`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine import backend
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.fingerprints import fingerprint
from fsdp_engine.comm.groups import timeout_of_group
from fsdp_engine.comm.rendezvous import meet
from fsdp_engine.flat_dtensor import versions_of
from fsdp_engine.memory import allocator
from fsdp_engine.runtime.unit import Unit

_WHAT = "weights that a module wrote in forward, on every rank the same"


class WrittenWeights:
    """See the module docstring.

    Args:
        units: all of them.
        device: of the weights.
        groups: returns the groups of the engine's collectives.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        groups: Callable[[], Sequence[ProcessGroup]],
    ) -> None:
        self._device = device
        self._groups = groups
        # Fingerprints of values to compare, by name, for each set of ranks that share them.
        self._written: dict[ProcessGroup, dict[str, Tensor]] = {}
        self._ranks: dict[ProcessGroup, list[int]] = {}
        # Full parameters that are the sharded ones, too, with their versions as forward began.
        self._plain = [each for unit in units for each in unit.buffers if each.is_plain]
        self._plain_params = [param for each in self._plain for param in each.full_params]
        self._plain_versions: list[int] = []
        is_plain = type(allocator.empty(0, torch.uint8, device)) is Tensor
        has_values = is_plain and backend.current().has_values
        for unit in units:
            unit.on_written = self.add
            groups_of = [each.control_group for each in unit.buffers]
            if has_values and not any(map(_is_fake, groups_of)):
                unit.compare_values(repeats=device.type == "cpu")

    def begin_forward(self) -> None:
        """A forward begins."""
        self._plain_versions = versions_of(self._plain_params)

    def end_forward(self) -> None:
        """A forward is over: find the parameters that it wrote and that are not gathered."""
        versions = versions_of(self._plain_params)
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
        """A module wrote full parameters of ``buffer``."""
        group = buffer.control_group
        if group is None or _is_fake(group):
            return
        self._ranks[group] = buffer.mesh.ranks
        written = self._written.setdefault(group, {})
        for index in indices:
            written[buffer.records[index].name] = fingerprint(buffer.full_params[index])

    def check(self, *, ranks_differ: bool = False) -> None:
        """Check that ranks wrote the same values. Collective, if a rank wrote any. Ranks within
        nested backwards may differ, so it is called after the outermost one.

        Raises:
            ValueError, RuntimeError: they did not, or some ranks wrote none; on all ranks. Or it
                cannot be checked, since ranks use different modules (``ranks_differ``).
        """
        written, self._written = self._written, {}
        for group, prints in written.items():
            names = ", ".join(list(prints)[:8])
            if ranks_differ:
                raise RuntimeError(
                    f"{names}: expected weights that forward does not write within "
                    "engine.together(), where ranks use different modules; found some that were "
                    "written. Write them between steps"
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
                groups=self._groups(),
            )

    def reset(self) -> None:
        """Drop fingerprints that are not compared yet, after an exception."""
        self._written.clear()


def _is_fake(group: ProcessGroup | None) -> bool:
    """Whether collectives of ``group`` send nothing."""
    return group is not None and dist.get_backend(group) == "fake"
