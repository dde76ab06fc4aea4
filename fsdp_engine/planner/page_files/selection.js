// The selected row: its memory and times, and the answers for it to the numbers in the fields.

let selected = plan.rows[0];

const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className !== undefined) made.className = className;
  return made;
};

// A row of a list of parts: a colour and a name, a text, and a bar. `share` is of the longest bar.
const partRow = (name, colour, text, share) => {
  const row = element("tr");
  const head = element("th");
  head.scope = "row";
  const swatch = element("i", undefined, "swatch");
  if (colour) swatch.style.background = colour;
  head.append(swatch, name);
  const bar = element("i");
  bar.style.width = `${100 * share}%`;
  if (colour) bar.style.background = colour;
  const place = element("td", undefined, "share");
  place.append(bar);
  row.append(head, element("td", text, "number"), place);
  return row;
};

const showParts = (id, parts, whole, textOf) => {
  const longest = Math.max(...parts.map((part) => part.value)) || 1;
  const rows = parts.filter((part) => part.value > 0).map((part) => partRow(
    part.name, part.colour, `${textOf(part.value)}, ${fixed(100 * part.value / whole, 0)}%`,
    part.value / longest));
  byId(id).replaceChildren(...rows);
};

const showWhatIfs = () => {
  byId("selected-what-ifs-panel").hidden = selected.whatIfs.length === 0;
  const rows = selected.whatIfs.map((each) => {
    const row = element("tr");
    const head = element("th", each.isFastest ? `${each.name} \u2714` : each.name);
    head.scope = "row";
    row.append(head, element("td", milliseconds(each.step), "number"),
      element("td", formatCount(each.rate), "number"));
    return row;
  });
  byId("selected-what-ifs").replaceChildren(...rows);
};

// The number in a field. An optional field that is empty is null; a wrong one is NaN, and marked.
const numberIn = (id) => {
  const field = byId(id);
  // A field with a text that is no number has an empty value, too.
  const isEmpty = field.value === "" && !field.validity.badInput;
  if (isEmpty && field.dataset.optional !== undefined) {
    field.removeAttribute("aria-invalid");
    return null;
  }
  const number = Number(field.value);
  const isValid = !isEmpty && number > 0 && Number.isFinite(number);
  if (isValid) field.removeAttribute("aria-invalid");
  else field.setAttribute("aria-invalid", "true");
  return isValid ? number : NaN;
};

// Texts of a list of answers by id. A number that is not known, or not finite, is a dash.
const showAnswers = (answers) => {
  Object.entries(answers).forEach(([id, [number, text]]) => {
    const isKnown = number !== null && Number.isFinite(number);
    byId(id).textContent = isKnown ? text(number) : "-";
    byId(id).dataset.value = isKnown ? String(number) : "";
  });
};

const showTraining = () => {
  const items = numberIn("tokens");
  const price = numberIn("price");
  const run = trainingRun(selected, items, price);
  showAnswers({
    "run-items": [items, (number) => `${formatCount(number)} ${plan.item}`],
    "run-steps": [run.steps, (number) => fixed(number, 0)],
    "run-time": [run.seconds, (number) => `${formatDuration(number)} ${plan.mark}`],
    "run-gpu-hours": [run.gpuHours, formatCount],
    "run-mfu": [run.mfu, percent],
    "run-flops": [run.modelFlops, (number) => number.toExponential(2)],
    "run-cost": [run.cost, (number) => `$${formatCount(number)}`],
  });
};

const showCheckpoints = () => {
  const count = plan.failing[byId("mtbf-of").value];
  const found = checkpointInterval(
    selected, plan.bandwidthUnit * numberIn("bandwidth"), numberIn("mtbf"), count,
    numberIn("restart"));
  showAnswers({
    "checkpoint-size": [selected.checkpointBytes, formatBytes],
    "checkpoint-save": [found.save, formatDuration],
    "checkpoint-mtbf": [found.mtbf, formatDuration],
    "checkpoint-interval": [found.interval, formatDuration],
    "checkpoint-young": [found.young, formatDuration],
    "checkpoint-steps": [found.steps, (number) => fixed(number, 0)],
    "checkpoint-overhead": [found.overhead, percent],
  });
};

const showSelected = (row, fits) => {
  selected = row;
  byId("selected-label").textContent = fits ? row.label : `${row.label}: does not fit`;
  showParts("selected-memory", row.memory, row.peak, formatBytes);
  byId("selected-elsewhere").textContent = row.elsewhere
    .map((each) => `On the ${each.name}: ${formatBytes(each.value)}.`).join(" ");
  if (row.step === null) return;
  showParts("selected-times", row.times, row.step, milliseconds);
  showWhatIfs();
  showTraining();
  if (byId("bandwidth") !== null) showCheckpoints();
};

byId("selection").hidden = false;
if (byId("tokens") !== null) {
  ["tokens", "price"].forEach((id) => byId(id).addEventListener("input", showTraining));
}
if (byId("bandwidth") !== null) {
  ["bandwidth", "mtbf", "mtbf-of", "restart"].forEach(
    (id) => byId(id).addEventListener("input", showCheckpoints));
}
