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
    chosen = outcomes[0]
    if not chosen.fits:
        return "\n".join([*lines, *_nothing_fits(setting, outcomes)])
    lines.append(_choice(setting, chosen))
    lines.append(_next_faster(setting, chosen, outcomes))
    if chosen.times is not None:
        lines.append(_bottleneck(setting, chosen, chosen.times))
    lines += _help(setting, chosen, trials)
    return "\n".join(lines)


def _choice(setting: Setting, chosen: Outcome) -> str:
    held = format_bytes(chosen.peak_bytes)
    there = format_bytes(setting.memory)
    if chosen.times is None:
        sent = format_bytes(sum(chosen.sent.values()))
        return (
            f"Take {chosen.candidate}: it sends least ({sent} a step) of those whose weights, "
            f"gradients and optimizer state fit, and holds {held} of {there}, activations not "
            "counted."
        )
    rate = f"{format_count(chosen.rate)} {setting.item}/s"
    step = format_seconds(chosen.times.step)
    return f"Take {chosen.candidate}: {step} a step, {rate}, at most {held} of {there}."


def _next_faster(setting: Setting, chosen: Outcome, outcomes: Sequence[Outcome]) -> str:
    faster = [each for each in outcomes if not each.fits and is_faster(each, chosen)]
    if not faster:
        return "Nothing that does not fit would be faster."
    nearest = min(faster, key=lambda each: each.rate)
    how = "sends less"
    if chosen.times is not None:
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


def _help(setting: Setting, chosen: Outcome, trials: Sequence[Trial]) -> list[str]:
    lines = []
    for trial in trials:
        fits = "fits" if not trial.lacking else f"lacks {format_bytes(trial.lacking)}"
        lines.append(
            f"With {trial.change}: {trial.speedup:.2f} times the {setting.item}/s; {fits}."
        )
    if chosen.times is not None and chosen.times.shares()["host"] >= 2 * _LITTLE:
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
