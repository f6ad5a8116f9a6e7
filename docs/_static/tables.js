// Long tables can be searched, by words in any of their cells, and sorted by a click on a column's head.
"use strict";

const LONG_ROWS = 25;

// "1,024", "-3.6 %" and "16.17 s" by their numbers, all else by its letters.
const valueOf = (row, column) => {
  const text = row.cells[column].textContent.trim();
  const number = /^[-+]?[\d,]*\.?\d+(\s|%|$)/.test(text) ? parseFloat(text.replaceAll(",", "")) : NaN;
  return { text, number };
};

const before = (one, other) =>
  Number.isNaN(one.number) || Number.isNaN(other.number) ? one.text.localeCompare(other.text) : one.number - other.number;

const searchable = (table) => {
  const rows = Array.from(table.tBodies[0].rows);
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = `Search ${rows.length} rows`;
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.before(field);
};

const sortable = (table) => {
  const body = table.tBodies[0];
  Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
    let direction = -1;
    head.style.cursor = "pointer";
    head.addEventListener("click", () => {
      direction = -direction;
      const valued = Array.from(body.rows, (row) => ({ row, value: valueOf(row, column) }));
      valued.sort((one, other) => direction * before(one.value, other.value));
      body.append(...valued.map((one) => one.row));
    });
  });
};

for (const table of document.querySelectorAll(".content table")) {
  if (table.tHead && table.tBodies.length && table.tBodies[0].rows.length >= LONG_ROWS) {
    searchable(table);
    sortable(table);
  }
}
