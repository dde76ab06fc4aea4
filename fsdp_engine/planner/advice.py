"""The recommendation as text: the choice, the next faster candidate, the bottleneck, and changes
that would help."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_engine.planner.outcome import ACTIVATIONS, Outcome, Setting, Times, Trial, is_faster
from fsdp_engine.terminal import format_bytes, format_count, format_seconds

# Waits below this fraction of a step are not mentioned.
_MIN_SHARE = 0.05


def advice(setting: Setting, outcomes: Sequence[Outcome], trials: Sequence[Trial]) -> str:
    """The recommendation, one sentence per line.

    Args:
        setting: the job.
        outcomes: sorted; see :class:`~fsdp_engine.planner.strategy_plan.StrategyPlan`.
        trials: variations of the first outcome.
    """
    lines = []
    if setting.why_unknown:
        lines.append(f"Activations and times are unknown: {setting.why_unknown}")
    first = outcomes[0]
    if first.lacking:
        return "\n".join([*lines, *_nothing_fits(setting, outcomes)])
    if first.times is None:
        return "\n".join([*lines, *_unknown_fit(setting, first)])
    lines.append(_choice(setting, first, first.times))
    lines.append(_next_faster(first, outcomes))
    lines.append(_bottleneck(setting, first, first.times))
    lines += _help(setting, first, first.times, trials)
    return "\n".join(lines)


def _unknown_fit(setting: Setting, first: Outcome) -> list[str]:
    sent = format_bytes(sum(first.sent.values()))
    held, limit = format_bytes(first.peak_bytes), format_bytes(setting.memory)
    return [
        "Whether any candidate fits is therefore unknown.",
        f"Of the candidates whose weights, gradients and optimizer state fit, {first.candidate} "
        f"sends the fewest bytes ({sent} per step); it holds {held} of {limit}, without "
        "activations.",
    ]


def _choice(setting: Setting, chosen: Outcome, times: Times) -> str:
    held = format_bytes(chosen.peak_bytes)
    limit = format_bytes(setting.memory)
    rate = f"{format_count(chosen.rate)} {setting.item}/s"
    step = format_seconds(times.step)
    return f"Use {chosen.candidate}: {step} per step, {rate}, at most {held} of {limit}."


def _next_faster(chosen: Outcome, outcomes: Sequence[Outcome]) -> str:
    faster = [each for each in outcomes if each.lacking and is_faster(each, chosen)]
    if not faster:
        return "No candidate that does not fit would be faster."
    nearest = min(faster, key=lambda each: each.rate)
    speedup = f"is {nearest.rate / chosen.rate - 1:.1%} faster"
    return (
        f"The next faster candidate, {nearest.candidate}, {speedup} and does not fit: "
        f"{_missing_memory(nearest)}."
    )


def _missing_memory(outcome: Outcome) -> str:
    kind = outcome.largest_kind
    return (
        f"it exceeds the limit by {format_bytes(outcome.lacking)}, and the largest part of its "
        f"memory is {kind} ({format_bytes(outcome.memory[kind])})"
    )


def _bottleneck(setting: Setting, chosen: Outcome, times: Times) -> str:
    shares = times.shares()
    waits = {name: share for name, share in shares.items() if name != "compute"}
    worst = max(waits, key=lambda name: waits[name])
    names = {
        "inner link": f"the inner link ({_link(setting, chosen, inner=True)})",
        "outer link": f"the outer link ({_link(setting, chosen, inner=False)})",
        "host": "the host",
    }
    listed = [f"{names[name]} {share:.0%}" for name, share in waits.items() if share >= _MIN_SHARE]
    most = "compute" if shares["compute"] >= waits[worst] else names[worst]
    spent = ", ".join([f"compute takes {shares['compute']:.0%} of the step", *listed])
    end = "" if listed else ", and waits are negligible"
    return f"Bottleneck: {most}; {spent}{end}."


def _link(setting: Setting, chosen: Outcome, *, inner: bool) -> str:
    mesh = chosen.candidate.mesh
    ranks = mesh[-1] if inner else setting.world_size
    return "within a node" if ranks <= setting.ranks_per_node else "between nodes"


def _help(setting: Setting, chosen: Outcome, times: Times, trials: Sequence[Trial]) -> list[str]:
    lines = []
    for trial in trials:
        fits = "fits" if not trial.lacking else f"needs {format_bytes(trial.lacking)} more"
        lines.append(
            f"With {trial.change}: {trial.speedup:.2f} times the {setting.item}/s; {fits}."
        )
    if times.shares()["host"] >= 2 * _MIN_SHARE:
        lines.append(
            "The host issues work too slowly: larger microbatches, fewer and larger operations "
            "(torch.compile) or CUDA graphs help."
        )
    return lines


def _nothing_fits(setting: Setting, outcomes: Sequence[Outcome]) -> list[str]:
    nearest = outcomes[0]
    kind = nearest.largest_kind
    lines = [
        f"No candidate fits {format_bytes(setting.memory)}. The nearest is {nearest.candidate}: "
        f"{_missing_memory(nearest)}."
    ]
    if kind == ACTIVATIONS:
        recompute = "" if nearest.candidate.checkpointing else "activation checkpointing, "
        lines.append(f"Possible changes: {recompute}a smaller microbatch, or a shorter sequence.")
    elif kind == "transient":
        lines.append(
            "Possible changes: smaller units (`units=`), or a smaller "
            "suggested_communication_unit_size."
        )
    else:
        lines.append(
            "Possible changes: more ranks, or less state (another optimizer, lower precision). "
            "Offloading to the host is not supported."
        )
    return lines
