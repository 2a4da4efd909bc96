"use strict";
// The address after # says what is shown: #sort=peak_error&tp=2&name=part; sort=-... turns the order around.
const table = document.getElementById("cases");
const form = document.getElementById("filters");
const cases = [...table.tBodies];
const fields = [...form.elements].filter((element) => element.name);
const heads = [...table.querySelectorAll("th button")];

const state = () => new URLSearchParams(location.hash.slice(1));

function go(changes) {
  const next = state();
  next.delete("case");
  for (const [key, value] of Object.entries(changes)) value ? next.set(key, value) : next.delete(key);
  location.hash = next.toString();
}

function shown(row, wanted) {
  return fields.every(({ name }) => {
    const value = wanted.get(name);
    if (!value) return true;
    if (name === "name") return row.dataset.case.toLowerCase().includes(value.toLowerCase());
    return row.getAttribute(`data-${name}`) === value;
  });
}

function order(row, field) {
  const value = row.querySelector(`td[data-field="${field}"]`).dataset.order;
  return value === "" ? null : value;
}

function sorted(sort) {
  const backwards = sort.startsWith("-");
  const field = sort.replace("-", "");
  const head = heads.find((button) => button.dataset.sort === field);
  for (const button of heads) {
    button.setAttribute("aria-pressed", button === head);
    button.classList.toggle("reversed", button === head && backwards);
  }
  if (!head) return cases;
  const isText = head.parentElement.classList.contains("text");
  const turn = backwards ? -1 : 1;
  const compare = (a, b) => (isText ? a.localeCompare(b) : b - a) * turn;
  return cases
    .map((row) => [row, order(row, field)])
    .sort(([, a], [, b]) => (a === null || b === null ? (a === null) - (b === null) : compare(a, b)))
    .map(([row]) => row);
}

function show() {
  const wanted = state();
  for (const element of fields) {
    element.value = wanted.get(element.name) ?? "";
    element.classList.toggle("set", element.value !== "");
  }
  let n = 0;
  for (const row of sorted(wanted.get("sort") ?? "")) {
    row.hidden = !shown(row, wanted);
    n += !row.hidden;
    table.append(row);
  }
  document.getElementById("shown").value = `${n} of ${cases.length}`;
  for (const row of document.querySelectorAll(".axis tbody tr")) {
    const [[axis, value]] = new URLSearchParams(row.querySelector("a").hash.slice(1));
    row.classList.toggle("chosen", wanted.get(axis) === value);
  }
  const named = cases.find((row) => row.dataset.case === wanted.get("case"));
  if (named) {
    named.rows[1].hidden = false;
    named.scrollIntoView({ block: "center" });
  }
}

form.addEventListener("input", ({ target }) => go({ [target.name]: target.value }));
form.addEventListener("reset", () => { location.hash = ""; });
form.addEventListener("submit", (event) => event.preventDefault());
table.addEventListener("click", ({ target }) => {
  const row = target.closest(".case > tr:first-child");
  if (row) row.nextElementSibling.hidden = !row.nextElementSibling.hidden;
});
for (const button of heads) {
  button.addEventListener("click", () => {
    const field = button.dataset.sort;
    go({ sort: state().get("sort") === field ? `-${field}` : field });
  });
}
for (const link of document.querySelectorAll(".axis a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const [[axis, value]] = new URLSearchParams(link.hash.slice(1));
    go({ [axis]: state().get(axis) === value ? "" : value });
    table.scrollIntoView();
  });
}
for (const link of document.querySelectorAll("figure a")) {
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = decodeURIComponent(link.getAttribute("xlink:href")).replace("#case=", "");
  link.prepend(title);
}
addEventListener("hashchange", show);
show();
