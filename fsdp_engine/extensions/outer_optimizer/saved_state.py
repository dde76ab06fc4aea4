"""The saved state of outer optimizers, which does not depend on fragments.

weights      outer weights by parameter name
optimizer    for each key of the outer optimizers' state, values by parameter name: tensors
             sharded like the parameter, or a number that a fragment's parameters share
pending      mean movements by parameter name, for exchanges whose outer step has not been taken
fragments    for each fragment: names of its parameters, the inner step of the last exchange, the
             inner step after which a pending exchange ends, and the class and hyperparameters of
             the outer optimizer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fsdp_engine.extensions.outer_optimizer.fragment import Fragment

_WHAT = "state of OuterOptimizer"
_COUNTS = ("count", "replica", "replicas")
_MAPPINGS = ("weights", "optimizer", "pending")


def pack(fragments: Iterable[Fragment]) -> dict[str, Any]:
    """Returns the state of all fragments. Tensors share memory with them."""
    weights: dict[str, Tensor] = {}
    pending: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    rows = []
    for fragment in fragments:
        weights |= fragment.weights()
        pending |= fragment.pending()
        for key, values in fragment.state().items():
            optimizer.setdefault(key, {}).update(values)
        rows.append(
            {
                "names": fragment.names,
                "exchanged_at": fragment.exchanged_at,
                "due": None if fragment.exchange is None else fragment.exchange.due,
                "kind": type(fragment.optimizer).__name__,
                "group": fragment.group,
            }
        )
    found = {"weights": weights, "optimizer": optimizer, "pending": pending}
    return {**found, "fragments": rows}


def unpack(state: Mapping[str, Any], fragments: Iterable[Fragment], *, has_exchanges: bool) -> None:
    """Load a state that :func:`check_state` has checked.

    Args:
        state: The state.
        fragments: The fragments.
        has_exchanges: Load exchanges that have begun. False: they are dropped.
    """
    rows = _rows_by_name(state)
    for fragment in fragments:
        row, name = rows[fragment.names[0]], fragment.names[0]
        optimizer = {key: each for key, each in state["optimizer"].items() if name in each}
        due = row["due"] if has_exchanges else None
        fragment.load(state["weights"], optimizer, row["group"], state["pending"], due)
        fragment.exchanged_at = row["exchanged_at"]


def check_state(state: Mapping[str, Any], fragments: Sequence[Fragment]) -> None:
    """Check a state against the fragments of this run.

    Raises:
        TypeError, ValueError: See :meth:`.OuterTraining.load_state_dict`.
    """
    for key in (*_COUNTS, *_MAPPINGS, "fragments"):
        if key not in state:
            raise ValueError(f"{_WHAT}: expected {key!r}; found none")
        kind = int if key in _COUNTS else list if key == "fragments" else dict
        if not isinstance(state[key], kind):
            raise TypeError(
                f"{_WHAT}: expected {key!r} of type {kind.__name__}; found a "
                f"{type(state[key]).__name__}"
            )
    own = {name: each for part in fragments for name, each in part.weights().items()}
    _check_tensors("outer weights", state["weights"], own)
    rows = _rows_by_name(state)
    if missing := sorted(own.keys() - rows.keys()):
        raise ValueError(f"{_WHAT}: expected {missing[0]} in a fragment; found it in none")
    for fragment in fragments:
        names, row = fragment.names, rows[fragment.names[0]]
        for name in names:
            for key in ("exchanged_at", "due", "kind", "group"):
                if rows[name][key] != row[key]:
                    raise ValueError(
                        f"{_WHAT}: expected the same {key} for all parameters of a fragment; found "
                        f"{row[key]} for {names[0]} and {rows[name][key]} for {name}. Load it with "
                        "the fragments of the run that saved it"
                    )
        own_kind = type(fragment.optimizer).__name__
        if row["kind"] != own_kind:
            raise ValueError(
                f"{_WHAT}: expected state of the outer optimizer {own_kind}; found state of "
                f"{row['kind']}"
            )
        targets = {name: own[name] for name in names}
        if row["due"] is not None:
            found = {name: each for name, each in state["pending"].items() if name in targets}
            _check_tensors("movements", found, targets)
        for key, values in state["optimizer"].items():
            present = {name: values[name] for name in names if name in values}
            if present:
                _check_values(key, present, targets)


def _check_values(key: str, found: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    """Check one key of an optimizer's state for the parameters of a fragment."""
    if missing := sorted(targets.keys() - found.keys()):
        raise ValueError(f"{_WHAT}: expected {key} of {missing[0]}; found none")
    first_name, first = next(iter(found.items()))
    if isinstance(first, Tensor):
        _check_tensors(key, found, targets)
        return
    for name, value in found.items():
        if isinstance(value, Tensor) or value != first:
            raise ValueError(
                f"{_WHAT}: expected the same {key} for all parameters of a fragment; found "
                f"{first} for {first_name} and {value} for {name}"
            )


def _check_tensors(what: str, found: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    if differ := sorted(found.keys() ^ targets.keys()):
        raise ValueError(
            f"{_WHAT}: expected {what} of {len(targets)} parameters; found {len(found)}: "
            f"{differ[0]} is {'missing' if differ[0] in targets else 'unexpected'}"
        )
    for name, target in targets.items():
        value = found[name]
        if not isinstance(value, Tensor) or value.shape != target.shape:
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{_WHAT}: {what} of {name}: expected shape {tuple(target.shape)}; found {shown}"
            )


def _rows_by_name(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: row for row in state["fragments"] for name in row["names"]}
