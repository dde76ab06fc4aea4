// The table: sorted by a click on a heading, a selected row, and the choice for a memory limit.

const table = byId("plan");
const body = table.tBodies[0];
const rows = Array.from(body.rows);
const heads = Array.from(table.tHead.rows[0].cells);
const numbersOf = (row) => plan.rows[row.dataset.order];

// Put the content of a cell into a button, so that the keyboard reaches it.
const makeButton = (cell) => {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...cell.childNodes);
  cell.append(button);
  return button;
};

const sortBy = (head, column) => {
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  heads.forEach((each) => each.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const value = (row) => row.cells[column].dataset.value;
  const compare = head.className === "number"
    ? (a, b) => value(a) - value(b)
    : (a, b) => value(a).localeCompare(value(b));
  rows.sort((a, b) => sign * compare(a, b) || a.dataset.order - b.dataset.order);
  body.append(...rows);
};
heads.forEach((head, column) => {
  if (head.dataset.fixed !== undefined) return;
  makeButton(head).addEventListener("click", () => sortBy(head, column));
  head.setAttribute("aria-sort", "none");
});

const select = (row) => {
  rows.forEach((each) => {
    each.classList.toggle("selected", each === row);
    each.cells[0].firstChild.setAttribute("aria-pressed", String(each === row));
  });
  showSelected(numbersOf(row), !row.classList.contains("lacking"));
};
rows.forEach((row) => {
  makeButton(row.cells[0]);
  // A click on the button arrives here, too.
  row.addEventListener("click", () => select(row));
});

const rates = plan.rows.map((row) => Math.abs(row.rate));
// Rates that differ by less are equal, as in `sorted_outcomes`.
const step = Math.max(...rates) / plan.rateSteps || 1;
const rank = (row) => Math.round(row.rate / step);

const isBetter = (row, best) => rank(row) > rank(best)
  || (rank(row) === rank(best) && row.peak < best.peak);

// Mark the rows that fit a limit, and return the fastest of them; null if none fits.
const choose = (limit) => {
  let best = null;
  let count = 0;
  rows.forEach((row) => {
    const { peak, largest } = numbersOf(row);
    const lacks = peak > limit;
    const cell = row.querySelector(".free");
    row.classList.toggle("lacking", lacks);
    row.classList.remove("chosen");
    cell.textContent = inUnits(limit - peak) + (lacks ? `, ${largest}` : "");
    cell.dataset.value = limit - peak;
    if (lacks) return;
    count += 1;
    if (best === null || isBetter(numbersOf(row), numbersOf(best))) best = row;
  });
  const shown = `${inUnits(limit)} ${plan.unit.name}`;
  let text = `${count} of ${rows.length} candidates fit ${shown}`;
  if (best !== null) {
    best.classList.add("chosen");
    const { label, step: seconds } = numbersOf(best);
    text += `; the fastest is ${label}: ${milliseconds(seconds)} per step`;
  }
  byId("limit-text").textContent = shown;
  byId("verdict").textContent = `${text}.`;
  return best;
};

select(rows[0]);
const slider = byId("limit");
if (slider !== null) {
  // The selection follows the choice, if there is one.
  const chooseAndSelect = (limit) => select(
    choose(limit) || rows.find((row) => row.classList.contains("selected")));
  byId("what-if").hidden = false;
  slider.addEventListener("input", () => chooseAndSelect(Number(slider.value) * plan.unit.bytes));
  byId("reset").addEventListener("click", () => {
    slider.value = plan.limit / plan.unit.bytes;
    chooseAndSelect(plan.limit);
  });
  chooseAndSelect(plan.limit);
}
