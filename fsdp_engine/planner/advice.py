"""What to take, in words: why not the next faster one, what holds it up, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_engine.planner.outcome import ACTIVATIONS, Outcome, Setting, Times, Trial, is_faster
from fsdp_engine.terminal import format_bytes, format_count, format_seconds

# Below this share of a step, what is waited for is not worth a word.
_LITTLE = 0.05


def advice(setting: Setting, outcomes: Sequence[Outcome], trials: Sequence[Trial]) -> str:
    """Sentences for people, one a line.

    Args:
        setting: the job.
        outcomes: sorted, see :class:`~fsdp_engine.planner.planning.Planning`.
        trials: of the first of these.
    """
    lines = []
    if setting.why_unknown:
        lines.append(f"Activations and times are unknown: {setting.why_unknown}")
    first = outcomes[0]
    if first.lacking:
        return "\n".join([*lines, *_nothing_fits(setting, outcomes)])
    if first.times is None:
        return "\n".join([*lines, *_fit_is_unknown(setting, first)])
    lines.append(_choice(setting, first, first.times))
    lines.append(_next_faster(first, outcomes))
    lines.append(_bottleneck(setting, first, first.times))
    lines += _help(setting, first, first.times, trials)
    return "\n".join(lines)


def _fit_is_unknown(setting: Setting, first: Outcome) -> list[str]:
    sent = format_bytes(sum(first.sent.values()))
    held, there = format_bytes(first.peak_bytes), format_bytes(setting.memory)
    return [
        "Whether anything fits is unknown, too.",
        f"Of those whose weights, gradients and optimizer state fit, {first.candidate} sends least "
        f"({sent} a step); it holds {held} of {there}, activations not counted.",
    ]


def _choice(setting: Setting, chosen: Outcome, times: Times) -> str:
    held = format_bytes(chosen.peak_bytes)
    there = format_bytes(setting.memory)
    rate = f"{format_count(chosen.rate)} {setting.item}/s"
    step = format_seconds(times.step)
    return f"Take {chosen.candidate}: {step} a step, {rate}, at most {held} of {there}."


def _next_faster(chosen: Outcome, outcomes: Sequence[Outcome]) -> str:
    faster = [each for each in outcomes if each.lacking and is_faster(each, chosen)]
    if not faster:
        return "Nothing that does not fit would be faster."
    nearest = min(faster, key=lambda each: each.rate)
    how = f"is {nearest.rate / chosen.rate - 1:.1%} faster"
    return f"The next faster one, {nearest.candidate}, {how} and does not fit: {_lack(nearest)}."


def _lack(outcome: Outcome) -> str:
    kind = outcome.largest_kind
    return (
        f"it needs {format_bytes(outcome.lacking)} more than there is, and most of what it holds "
        f"is {kind} ({format_bytes(outcome.memory[kind])})"
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
    told = [f"{names[name]} {share:.0%}" for name, share in waits.items() if share >= _LITTLE]
    most = "compute" if shares["compute"] >= waits[worst] else names[worst]
    spent = ", ".join([f"compute takes {shares['compute']:.0%} of the step", *told])
    end = "" if told else ", and next to nothing is waited for"
    return f"Bottleneck: {most}; {spent}{end}."


def _link(setting: Setting, chosen: Outcome, *, inner: bool) -> str:
    mesh = chosen.candidate.mesh
    ranks = mesh[-1] if inner else setting.world_size
    return "within a node" if ranks <= setting.ranks_per_node else "between nodes"


def _help(setting: Setting, chosen: Outcome, times: Times, trials: Sequence[Trial]) -> list[str]:
    lines = []
    for trial in trials:
        fits = "fits" if not trial.lacking else f"lacks {format_bytes(trial.lacking)}"
        lines.append(
            f"With {trial.change}: {trial.speedup:.2f} times the {setting.item}/s; {fits}."
        )
    if times.shares()["host"] >= 2 * _LITTLE:
        lines.append(
            "The host issues work too slowly: larger microbatches, fewer and larger operations "
            "(torch.compile) or CUDA graphs help."
        )
    return lines


def _nothing_fits(setting: Setting, outcomes: Sequence[Outcome]) -> list[str]:
    nearest = outcomes[0]
    kind = nearest.largest_kind
    lines = [
        f"Nothing fits {format_bytes(setting.memory)}. The nearest is {nearest.candidate}: "
        f"{_lack(nearest)}."
    ]
    if kind == ACTIVATIONS:
        recompute = "" if nearest.candidate.checkpointing else "activation checkpointing, "
        lines.append(f"What would help: {recompute}a smaller microbatch, or a shorter sequence.")
    elif kind == "transient":
        lines.append(
            "What would help: smaller units (`units=`), or a smaller "
            "suggested_communication_unit_size."
        )
    else:
        lines.append(
            "What would help: more ranks, or state of fewer bytes (an optimizer with less of it, "
            "lower precision). Nothing is offloaded to the host."
        )
    return lines
