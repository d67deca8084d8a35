"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const figures = [...document.querySelectorAll("figure[data-plot]")];
const shown = (run) => run === null || document.querySelector(`input[name=run][value="${run}"]`).checked;
const plotOf = (figure) => data.plots[figure.dataset.plot];

// The x axis of a plot: the selected one, or the only one available.
function axisOf(plot) {
  const chosen = document.querySelector("input[name=axis]:checked").value;
  return chosen in plot.limits ? chosen : Object.keys(plot.limits)[0];
}

const pictureOf = (figure) => figure.querySelector(`[data-axis="${axisOf(plotOf(figure))}"] svg`);

// Apply the selected axis and runs.
function apply() {
  for (const figure of figures) {
    const axis = axisOf(plotOf(figure));
    for (const part of figure.querySelectorAll("[data-axis]")) part.hidden = part.dataset.axis !== axis;
    for (const line of figure.querySelectorAll("[data-run]"))
      line.classList.toggle("off", !shown(Number(line.dataset.run)));
    forget(figure);
  }
}

function linesOf(figure) {
  const plot = plotOf(figure), axis = axisOf(plot);
  return plot.lines
    .filter((line) => axis in line.x && shown(line.run))
    .map((line) => ({ ...line, x: line.x[axis] }));
}

// Index of the number nearest to x in a sorted list.
function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle; else high = middle;
  }
  return x - list[low] <= list[high] - x ? low : high;
}

// Position of a data point in the picture.
function place(plot, x, y) {
  const [left, top, width, height] = plot.box, [x0, x1, y0, y1] = plot.limits[axisOf(plot)];
  const scale = plot.log ? Math.log : (value) => value;
  const up = (scale(y) - scale(y0)) / (scale(y1) - scale(y0));
  return [left + (width * (x - x0)) / (x1 - x0), top + height * (1 - up)];
}

function add(parent, name, attributes, text) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function number(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? value.toLocaleString("en", { maximumSignificantDigits: 5 }) : value.toExponential(3);
}

// Show and mark the point of each curve that is nearest to x.
function read(figure, x) {
  forget(figure);
  const plot = plotOf(figure), lines = linesOf(figure), picture = pictureOf(figure);
  if (!lines.length) return;
  const found = lines.map((line) => { const i = nearest(line.x, x); return { line, x: line.x[i], y: line.y[i] }; });
  const at = found.map((point) => point.x).reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
  const axis = axisOf(plot), unit = data.axes[axis];
  const marks = add(picture, "svg:g", { class: "marks" });
  const [across] = place(plot, at, plot.limits[axis][3]);
  add(marks, "svg:line", { x1: across, x2: across, y1: plot.box[1], y2: plot.box[1] + plot.box[3], stroke: "currentColor", "stroke-opacity": 0.5 });
  const box = figure.querySelector(".reading");
  add(box, "strong", {}, `${unit} ${number(at)}`);
  for (const { line, x: where, y } of found) {
    const color = line.run === null ? data.colors[0] : data.colors[line.run];
    const [cx, cy] = place(plot, where, y);
    add(marks, "svg:circle", { cx, cy, r: 3, fill: color });
    const row = add(box, "span", {});
    add(row, "i", { style: `background: ${color}` });
    const who = line.run === null ? line.split : `${data.runs[line.run]}${line.split === "heldout" ? ", held-out" : ""}`;
    add(row, "span", {}, `${who} `);
    add(row, "b", {}, number(y));
    if (where !== at) add(row, "span", { class: "quiet" }, ` at ${number(where)}`);
  }
  // On the side opposite to the pointer.
  box.classList.toggle("left", across > plot.box[0] + plot.box[2] / 2);
  figure.dataset.at = at;
}

function forget(figure) {
  figure.querySelector(".reading").replaceChildren();
  figure.querySelectorAll(".marks").forEach((marks) => marks.remove());
  delete figure.dataset.at;
}

function follow(figure, event) {
  const picture = pictureOf(figure), plot = plotOf(figure);
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
  const [left, top, width, height] = plot.box, [x0, x1] = plot.limits[axisOf(plot)];
  const inside = point.x > left - 5 && point.x < left + width + 5 && point.y > top - 5 && point.y < top + height + 5;
  if (inside) read(figure, x0 + ((point.x - left) / width) * (x1 - x0));
  else forget(figure);
}

function step(figure, event) {
  if (event.target !== figure) return;
  if (event.key === "Escape") return forget(figure);
  if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
  event.preventDefault();
  const xs = [...new Set(linesOf(figure).flatMap((line) => line.x))].sort((a, b) => a - b);
  if (!xs.length) return;
  const last = xs.length - 1;
  const now = "at" in figure.dataset ? nearest(xs, Number(figure.dataset.at)) : last + 1;
  const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
  read(figure, xs[Math.min(Math.max(next, 0), last)]);
}

// Save the plot as shown, with the names of its runs.
function save(figure) {
  const plot = plotOf(figure), picture = pictureOf(figure).cloneNode(true);
  picture.querySelectorAll(".off, .marks").forEach((part) => part.remove());
  picture.setAttribute("style", "color: black; background: white");
  const [, , width, height] = picture.getAttribute("viewBox").split(" ");
  picture.setAttribute("width", `${width}pt`);
  picture.setAttribute("height", `${height}pt`);
  const names = add(picture, "svg:text", { x: plot.box[0] + plot.box[2], y: 11, "text-anchor": "end", "font-size": 9, "font-family": "sans-serif" });
  for (const run of new Set(linesOf(figure).map((line) => line.run)))
    if (run !== null) add(names, "svg:tspan", { fill: data.colors[run], dx: 8 }, `— ${data.runs[run]}`);
  const text = new XMLSerializer().serializeToString(picture);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  link.download = `${plot.file}.svg`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

for (const input of document.querySelectorAll("input[name=axis], input[name=run]")) input.addEventListener("change", apply);
for (const figure of figures) {
  figure.addEventListener("pointermove", (event) => follow(figure, event));
  figure.addEventListener("pointerleave", () => forget(figure));
  figure.addEventListener("blur", () => forget(figure));
  figure.addEventListener("keydown", (event) => step(figure, event));
  figure.querySelector("button").addEventListener("click", () => save(figure));
}
apply(); // browsers may restore the inputs when the page is reloaded
