"use strict";
(() => {
  // The table: sorted by a click on a heading.
  const table = document.getElementById("plan");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);

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
    // The keyboard reaches the heading's button.
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => sortBy(head, column));
    head.setAttribute("aria-sort", "none");
  });

  // The zoom of the timeline.
  const zoom = document.getElementById("zoom");
  if (zoom !== null) {
    document.getElementById("zooming").hidden = false;
    zoom.addEventListener("input", () => {
      document.getElementById("step").style.setProperty("--zoom", zoom.value);
    });
  }
})();
