"use strict";
const rows = [...document.querySelectorAll("#calls tbody tr")];
const text = rows.map(row => row.textContent.toLowerCase());
const parts = rows.map(row => document.querySelector(row.querySelector("a").getAttribute("href")));
const filter = document.getElementById("filter"), kind = document.getElementById("kind");
function show() {
  const words = filter.value.toLowerCase().split(/\s+/);
  let count = 0;
  rows.forEach((row, index) => {
    const fits = words.every(word => text[index].includes(word)) && (!kind.value || row.dataset.kind === kind.value);
    row.hidden = parts[index].hidden = !fits;
    count += fits;
  });
  document.getElementById("shown").textContent = `${count} of ${rows.length} shown`;
}
function sort(button) {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending", at = head.cellIndex;
  const keys = [...body.rows].map(row => {
    const cell = row.cells[at], value = cell.dataset.v;
    const number = value === undefined ? parseFloat(cell.textContent) : parseFloat(value);
    return {row, text: cell.textContent, number, numeric: head.classList.contains("n")};
  });
  const order = new Intl.Collator("en", {numeric: true});
  keys.sort((a, b) => {
    if (!a.numeric) return (up ? 1 : -1) * order.compare(a.text, b.text);
    if (isNaN(a.number) || isNaN(b.number)) return isNaN(a.number) - isNaN(b.number);
    return (up ? 1 : -1) * (a.number - b.number);
  });
  body.append(...keys.map(key => key.row));
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
}
function follow() {
  const part = /^#c\d+$/.test(location.hash) && document.querySelector(location.hash);
  if (!part) return;
  part.open = true;
  part.scrollIntoView();
  // Parts get their final height when they come near the window, which moves the target.
  requestAnimationFrame(() => requestAnimationFrame(() => part.scrollIntoView()));
}
document.addEventListener("click", event => {
  const button = event.target.closest(".sort th button");
  if (button) sort(button);
  if (event.target.closest("#calls a")) setTimeout(follow);
});
filter.addEventListener("input", show);
kind.addEventListener("change", show);
document.getElementById("unfold").onclick = () => parts.forEach(part => { part.open = !part.hidden; });
document.getElementById("fold").onclick = () => parts.forEach(part => { part.open = false; });
window.addEventListener("hashchange", follow);
document.querySelector(".tools").hidden = false;
show();
follow();
