// The page of `headgate report`: tables that sort, a tau for all runs, records that open. No network, no storage.
"use strict";

const studies = JSON.parse(document.getElementById("studies").textContent);
const percent = (share, digits) => (100 * share).toFixed(digits) + " %";

function sortBy(button) {
  const head = button.closest("th");
  const down = head.getAttribute("aria-sort") !== "descending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  sortRows(head);
}

function sortRows(head) {
  const rows = [...head.closest("table").tBodies[0].rows];
  const column = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute("aria-sort") === "descending";
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const number = (text) => (text === "" ? Number.NEGATIVE_INFINITY : Number(text));
  rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = Number.isNaN(number(x)) || Number.isNaN(number(y)) ? x.localeCompare(y) : number(x) - number(y);
    return down ? -order : order;
  });
  head.closest("table").tBodies[0].append(...rows);
}

function moveTau(place) {
  for (const [number, study] of studies.entries()) {
    if (!study.sweep) continue;
    const point = study.sweep[place];
    const row = document.getElementById(`moved-${number}`);
    const put = (what, value, text) => {
      const cell = row.querySelector(`[data-what=${what}]`);
      cell.textContent = text;
      cell.dataset.value = value;
    };
    const time = point.milliseconds?.median_ms;
    put("accuracy", point.accuracy, percent(point.accuracy, 2));
    put("macs", point.macs_fraction, percent(point.macs_fraction, 1));
    put("milliseconds", time ?? "", time === undefined ? "" : time.toFixed(2));
    const tau = point.tau < 0.99 ? point.tau.toFixed(2) : String(Number(point.tau.toPrecision(6)));
    document.getElementById("tau").textContent = tau;
    document.getElementById("slider").setAttribute("aria-valuetext", "tau " + tau);
    study.sweep.forEach((_, each) => {
      const dot = document.getElementById(`trade_off-tau-${number}-${each}`);
      if (dot) dot.classList.toggle("now", each === place);
    });
  }
  const sorted = document.querySelector("[id^=moved-]")?.closest("table").querySelector("th[aria-sort]");
  if (sorted) sortRows(sorted); // as the reader has asked for, whatever tau is
}

function openRecord(details) {
  const into = details.querySelector("pre");
  if (!details.open || into.textContent) return;
  const shown = studies.filter((_, number) => details.dataset.runs.split(" ").includes(String(number)));
  const record = shown.map((study) =>
    Object.fromEntries(["name", "provenance", ...details.dataset.shows.split(" ")].map((key) => [key, study[key]])));
  into.textContent = JSON.stringify(record.length === 1 ? record[0] : record, null, 1);
}

document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => sortBy(button)));
document.querySelectorAll("details[data-shows]").forEach((details) =>
  details.addEventListener("toggle", () => openRecord(details)));
const slider = document.getElementById("slider");
if (slider) {
  slider.addEventListener("input", () => moveTau(Number(slider.value)));
  moveTau(Number(slider.value));
}
