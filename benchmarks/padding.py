"""Padding of planned layouts on the shapes of published models, worlds of 8 to 4,096 ranks.

    python benchmarks/padding.py

It prints one table and the targets, and writes ``benchmarks/results/padding.json``. No weights are
allocated: a unit is a list of shapes, planned as in the engine, with all ranks on the inner axis.

Columns, as percent of a model's elements:

    default   granule 1, the default of ``fe.shard``
    rows      no boundary within rows (the last dim) of tensors of two or more dims
    blocks    no boundary within 128 rows if a tensor's rows are a multiple of 128, else within rows
    LCM       for rows and for blocks: shards are a multiple of the least common multiple of all
              granules of the unit, with tensors in order
    Shard(0)  each parameter's dim 0 padded to a multiple of the world size. Boundaries are not
              within rows, but can be within blocks; "with blocks" pads dim 0 to avoid these
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median

from _published_shapes import MODELS, Model, Shapes, UnitKind
from rich.console import Console
from rich.table import Table

from fsdp_engine.layout import ALIGNMENT, Layout, round_up
from fsdp_engine.layout.placement import PERCENT_PER_BUFFER, TensorRequest, plan_layouts

WORLDS = tuple(8 * 2**power for power in range(10))
BLOCK_ROWS = 128
RESULTS = Path(__file__).parent / "results" / "padding.json"
DEFAULT_TARGET_PERCENT = 0.1
DEFAULT_TARGET_SHARD = 64 * 1024  # elements: units with smaller shards have no target

Granule = Callable[[tuple[int, ...]], int]
Prices = list[dict[str, float]]
Times = dict[str, float]


def one_element(shape: tuple[int, ...]) -> int:
    return 1


def one_row(shape: tuple[int, ...]) -> int:
    return shape[-1] if len(shape) > 1 else 1


def one_block(shape: tuple[int, ...]) -> int:
    rows = math.prod(shape[:-1])
    return one_row(shape) * (BLOCK_ROWS if len(shape) > 1 and rows % BLOCK_ROWS == 0 else 1)


def planned(
    shapes: Shapes, granule: Granule, world: int, percent_per_buffer: float = PERCENT_PER_BUFFER
) -> tuple[Layout, ...]:
    return plan_layouts(
        [TensorRequest(name, shape, granule(shape)) for name, shape in shapes.items()],
        inner_size=world,
        outer_size=1,
        percent_per_buffer=percent_per_buffer,
    )


def total(layouts: Sequence[Layout]) -> int:
    return sum(layout.numel for layout in layouts)


def lcm_rule_numel(shapes: Shapes, granule: Granule, world: int) -> int:
    """Elements of one buffer whose shards are a multiple of every granule, tensors in order.

    Tensors start at a multiple of the alignment of planned layouts, and of their own granule,
    since boundaries would be within granules otherwise.
    """
    end, steps = 0, [ALIGNMENT]
    for shape in shapes.values():
        steps.append(math.lcm(granule(shape), ALIGNMENT))
        end = round_up(end, steps[-1]) + math.prod(shape)
    return world * round_up(-(-end // world), math.lcm(*steps))


def shard0_numel(shapes: Shapes, world: int, keep_blocks: bool = False) -> int:
    """Elements of all parameters with dim 0 padded to a multiple of ``world``.

    With ``keep_blocks`` a rank's shard also consists of full blocks. For fused experts it consists
    of full experts, which are full blocks.
    """
    numel = 0
    for shape in shapes.values():
        blocks = keep_blocks and len(shape) == 2 and one_block(shape) > one_row(shape)
        dim0 = round_up(shape[0], world * (BLOCK_ROWS if blocks else 1))
        numel += dim0 * math.prod(shape[1:])
    return numel


@dataclass(frozen=True)
class UnitRow:
    """Results of one kind of unit for one world size: elements, or a number of buffers."""

    unit: str
    count: int
    num_elements: int
    default: int
    default_shard: int
    rows: int
    rows_buffers: int
    rows_if_buffers_were_free: int
    rows_lcm: int
    blocks: int
    blocks_buffers: int
    blocks_if_buffers_were_free: int
    blocks_lcm: int
    blocks_floor: int  # a shard holds at least one of the largest blocks
    shard0: int
    shard0_with_blocks: int


def measure_unit(unit: UnitKind, world: int) -> UnitRow:
    shapes = unit.shapes
    (default,) = planned(shapes, one_element, world)
    rows, blocks = planned(shapes, one_row, world), planned(shapes, one_block, world)
    return UnitRow(
        unit=unit.name,
        count=unit.count,
        num_elements=unit.num_elements,
        default=default.numel,
        default_shard=default.shard_numel,
        rows=total(rows),
        rows_buffers=len(rows),
        rows_if_buffers_were_free=total(planned(shapes, one_row, world, 0)),
        rows_lcm=lcm_rule_numel(shapes, one_row, world),
        blocks=total(blocks),
        blocks_buffers=len(blocks),
        blocks_if_buffers_were_free=total(planned(shapes, one_block, world, 0)),
        blocks_lcm=lcm_rule_numel(shapes, one_block, world),
        blocks_floor=max(unit.num_elements, world * max(map(one_block, shapes.values()))),
        shard0=shard0_numel(shapes, world),
        shard0_with_blocks=shard0_numel(shapes, world, keep_blocks=True),
    )


@dataclass(frozen=True)
class Row:
    """A model at one world size."""

    model: str
    world: int
    units: tuple[UnitRow, ...]

    def padding(self, column: str) -> int:
        """Padding elements of the full model as an integer, for exact comparisons."""
        return sum(unit.count * (getattr(unit, column) - unit.num_elements) for unit in self.units)

    def percent(self, column: str) -> float:
        elements = sum(unit.count * unit.num_elements for unit in self.units)
        return 100 * self.padding(column) / elements

    def buffers(self, column: str) -> str:
        return "/".join(str(getattr(unit, f"{column}_buffers")) for unit in self.units)


# The fields of UnitRow that count elements with padding.
PERCENT_COLUMNS = tuple(
    field.name
    for field in fields(UnitRow)
    if field.name.split("_")[0] in ("default", "rows", "blocks", "shard0")
    and not field.name.endswith(("_shard", "_buffers"))
)


def measure() -> list[Row]:
    return [
        Row(model.name, world, tuple(measure_unit(unit, world) for unit in model.units))
        for model in MODELS
        for world in WORLDS
    ]


@dataclass(frozen=True)
class Target:
    """A target: the number of tested cases, and the missed cases with the reason."""

    text: str
    num_tested: int
    misses: tuple[str, ...]
    note: str = ""


def default_target(rows: Sequence[Row]) -> Target:
    """Default layout: at most 0.1 % where a unit's shard holds at least 64k elements."""
    tested, misses = 0, []
    for row in rows:
        for unit in row.units:
            if unit.default_shard >= DEFAULT_TARGET_SHARD:
                tested += 1
                percent = 100 * (unit.default - unit.num_elements) / unit.num_elements
                if percent > DEFAULT_TARGET_PERCENT:
                    misses.append(f"{row.model}, {unit.unit}, {row.world} ranks: {percent:.3f} %")
    text = (
        f"default at most {DEFAULT_TARGET_PERCENT} % in every unit whose shard holds at least "
        f"{DEFAULT_TARGET_SHARD:,} elements"
    )
    return Target(text, tested, tuple(misses))


def below_target(rows: Sequence[Row], column: str, peer: str) -> Target:
    """``column`` has less padding than ``peer`` if that has any; other cases are in the note."""
    tested = [row for row in rows if row.padding(peer) > 0]
    others = [row.percent(column) for row in rows if row.padding(peer) == 0]
    misses = tuple(
        f"{row.model}, {row.world} ranks: {show(row.percent(column))} % "
        f"{'equals' if row.padding(column) == row.padding(peer) else 'is above'} "
        f"{show(row.percent(peer))} %; {reason(row, column, peer)}"
        for row in tested
        if row.padding(column) >= row.padding(peer)
    )
    note = f"in the other {len(others)}: at most {show(max(others))} %" if others else ""
    text = f"{LABELS[column]} pad less than {LABELS[peer]}"
    return Target(text, len(tested), misses, note)


def reason(row: Row, column: str, peer: str) -> str:
    """The cause of a miss: the price of a buffer, the granules themselves, or the alignment."""
    free = f"{column}_if_buffers_were_free"
    if row.padding(free) < row.padding(peer):
        return (
            f"with free buffers {show(row.percent(free))} %, but each extra one has to save "
            f"{PERCENT_PER_BUFFER:g} % of a unit"
        )
    if column == "blocks" and peer == "shard0":
        if row.padding("blocks_floor") >= row.padding(peer):
            return f"Shard(0) divides blocks; one a rank pads {show(row.percent('blocks_floor'))} %"
        whole = show(row.percent("shard0_with_blocks"))
        return f"Shard(0) divides blocks; with whole blocks it pads {whole} %"
    if row.padding("default") >= row.padding(peer):
        return (
            f"with free buffers {show(row.percent(free))} %; the alignment of shards to "
            f"{ALIGNMENT} elements pads {show(row.percent('default'))} % even with granule 1"
        )
    return "no grouping of the granules into buffers pads less"


LABELS = {
    "rows": "rows",
    "blocks": "blocks",
    "rows_lcm": "LCM of rows",
    "blocks_lcm": "LCM of blocks",
    "shard0": "Shard(0)",
    "shard0_with_blocks": "Shard(0) with blocks",
}


def targets(rows: Sequence[Row]) -> list[Target]:
    return [
        default_target(rows),
        below_target(rows, "rows", "rows_lcm"),
        below_target(rows, "rows", "shard0"),
        below_target(rows, "blocks", "blocks_lcm"),
        below_target(rows, "blocks", "shard0"),
        below_target(rows, "blocks", "shard0_with_blocks"),
    ]


def most_frequent(model: Model) -> UnitKind:
    return max(model.units, key=lambda unit: unit.count)


def price_table(prices: Sequence[float] = (0, 0.1, 0.25, 0.5, 1)) -> Prices:
    """Results of the row granule for other prices of buffers, over all models and world sizes."""
    found = []
    for price in prices:
        buffers, percents = [], []
        for block, world in itertools.product(map(most_frequent, MODELS), WORLDS):
            layouts = planned(block.shapes, one_row, world, price)
            buffers.append(len(layouts))
            percents.append(100 * (total(layouts) / block.num_elements - 1))
        found.append(
            {
                "percent_per_buffer": price,
                "mean_buffers_of_a_block": mean(buffers),
                "median_percent_of_a_block": median(percents),
            }
        )
    return found


def planning_ms(repeats: int = 5) -> Times:
    """Median milliseconds to plan the most frequent unit in the largest world, 128-row blocks."""
    found = {}
    for model in MODELS:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            planned(most_frequent(model).shapes, one_block, WORLDS[-1])
            times.append(1e3 * (time.perf_counter() - start))
        found[model.name] = round(median(times), 3)
    return found


def show(percent: float) -> str:
    """A percentage with its significant digits; ``0`` only for exactly 0."""
    if percent == 0:
        return "0"
    if percent < 0.001:
        return "<0.001"
    return f"{percent:.3f}" if percent < 10 else f"{percent:,.1f}"


def padding_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Padding, percent of a model's elements (buffers: by unit, root last)")
    table.add_column("model", no_wrap=True)
    for heading in ("ranks", "default", "rows", "buffers", "LCM", "Shard(0)"):
        table.add_column(heading, justify="right")
    for heading in ("128-row blocks", "buffers", "LCM", "Shard(0)\nwith blocks"):
        table.add_column(heading, justify="right")
    labels = {(model.name, WORLDS[0]): model.name for model in MODELS}
    labels |= {(m.name, WORLDS[1]): f"{m.num_elements / 1e9:.2f} billion" for m in MODELS}
    for row in rows:
        percents = {column: show(row.percent(column)) for column in PERCENT_COLUMNS}
        table.add_row(
            labels.get((row.model, row.world), ""),
            f"{row.world:,}",
            percents["default"],
            percents["rows"],
            row.buffers("rows"),
            percents["rows_lcm"],
            percents["shard0"],
            percents["blocks"],
            row.buffers("blocks"),
            percents["blocks_lcm"],
            percents["shard0_with_blocks"],
            end_section=row.world == WORLDS[-1],
        )
    return table


def print_report(
    rows: Sequence[Row], found: Sequence[Target], prices: Prices, times: Times
) -> None:
    console = Console(width=max(Console().width, 120))
    console.print(padding_table(rows))
    for target in found:
        verdict = "[red]NOT MET[/]" if target.misses else "[green]MET[/]"
        num_met = target.num_tested - len(target.misses)
        console.print(f"\n{verdict}, {num_met} of {target.num_tested} cases: {target.text}")
        if target.note:
            console.print(f"  ({target.note})")
        for miss in target.misses:
            console.print(f"  {miss}", highlight=False)
    console.print("\nThe most frequent block with row granules, by the price of an extra buffer:")
    for price in prices:
        console.print(
            f"  {price['percent_per_buffer']:g} %: {price['mean_buffers_of_a_block']:.2f} buffers "
            f"on average, median padding {show(price['median_percent_of_a_block'])} %"
        )
    shown = ", ".join(f"{name} {ms:g}" for name, ms in times.items())
    console.print(f"\nms to plan a block with 128-row blocks on {WORLDS[-1]:,} ranks: {shown}")


def write_results(
    rows: Sequence[Row], found: Sequence[Target], prices: Prices, times: Times
) -> None:
    results = {
        "percent_per_buffer": PERCENT_PER_BUFFER,
        "block_rows": BLOCK_ROWS,
        "models": {model.name: model.num_elements for model in MODELS},
        "rows": [
            {
                "model": row.model,
                "world": row.world,
                "percent": {column: row.percent(column) for column in PERCENT_COLUMNS},
                "units": [asdict(unit) for unit in row.units],
            }
            for row in rows
        ],
        "targets": [asdict(target) for target in found],
        "prices": prices,
        "planning_ms": times,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    rows = measure()
    found = targets(rows)
    prices, times = price_table(), planning_ms()
    print_report(rows, found, prices, times)
    write_results(rows, found, prices, times)


if __name__ == "__main__":
    main()
