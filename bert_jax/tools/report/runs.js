"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 240, LEFT = 50, RIGHT = 8, TOP = 12, BOTTOM = 36;
const figures = [...document.querySelectorAll("figure[data-plot]")];
const control = (name) => document.querySelector(`input[name=${name}]`);
const isShown = (run) => run === null || document.querySelector(`input[name=run][value="${run}"]`).checked;
const plotOf = (figure) => data.plots[figure.dataset.plot];
const colorOf = (run) => data.colors[run ?? 0];
const views = new Map(); // what is drawn in each figure
let zoom = null; // [x0, x1] on the selected axis

// The x axis of a plot: the selected one, or the only one available.
function axisOf(plot) {
  const chosen = document.querySelector("input[name=axis]:checked").value;
  return plot.axes.includes(chosen) ? chosen : plot.axes[0];
}

function add(parent, name, attributes, text) {
  const element = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function number(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e6 ? value.toLocaleString("en", { maximumSignificantDigits: 5 }) : value.toExponential(3);
}

function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${letter}`;
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential().replace("e-", "e−") : `${Number(value.toPrecision(4))}`;
}

// Round numbers between low and high; of a log scale also 2 and 5 times powers of ten.
function ticks(low, high, log, most) {
  if (log && high >= 4 * low) {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of [1, 2, 5]) all.push({ digit, value: digit * 10 ** power });
    const inside = all.filter(({ value }) => value >= low * 0.999 && value <= high * 1.001);
    const powers = inside.filter(({ digit }) => digit === 1);
    const kept = inside.length <= most + 2 ? inside : powers.filter((_, i) => i % Math.ceil(powers.length / most) === 0);
    return kept.map(({ value }) => value);
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// A function from values to pixels.
function scale(low, high, from, to, log) {
  const of = log ? Math.log : (value) => value;
  return (value) => from + ((to - from) * (of(value) - of(low))) / (of(high) - of(low));
}

// The value at a share of the way from low to high on a scale.
function invert(low, high, share, log) {
  return log ? low * (high / low) ** share : low + (high - low) * share;
}

// Exponential moving average, without a bias to the first value.
function smoothed(points, factor) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    sum = factor * sum + (1 - factor) * y;
    weight = factor * weight + (1 - factor);
    return [x, sum / weight];
  });
}

function range(values, log, padding) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = log ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  if (log) return [low / (high / low) ** padding, high * (high / low) ** padding];
  return [low - (high - low) * padding, high + (high - low) * padding];
}

// What a figure shows: its points, limits and scales. null if there is nothing to show.
function view(figure) {
  const plot = plotOf(figure), axis = axisOf(plot), bars = axis === "length";
  const logX = !bars && control("logx").checked, logY = !bars && (plot.log || control("logy").checked);
  const width = Math.max(figure.clientWidth, 200);
  const lines = plot.lines
    .filter((line) => axis in line.x && isShown(line.run))
    .map((line) => ({ ...line, points: line.x[axis].map((x, i) => [x, line.y[i]]).filter(([x, y]) => (!logX || x > 0) && (!logY || y > 0)) }))
    .filter((line) => line.points.length);
  if (!lines.length) return null;
  let [x0, x1] = range(lines.flatMap((line) => [line.points[0][0], line.points.at(-1)[0]]), logX, 0.02);
  const zoomed = zoom && !bars && zoom[0] < x1 && zoom[1] > x0 && (!logX || zoom[0] > 0);
  if (zoomed) [x0, x1] = zoom;
  const inside = lines.flatMap((line) => line.points).filter(([x]) => x >= x0 && x <= x1).map(([, y]) => y);
  const levels = Object.entries(plot.levels).filter(([, y]) => !zoomed || (y >= Math.min(...inside) && y <= Math.max(...inside)));
  const ys = [...(inside.length ? inside : lines.flatMap((line) => line.points.map(([, y]) => y))), ...levels.map(([, y]) => y)];
  const [y0, y1] = bars ? [0, Math.max(...ys) * 1.05 || 1] : range(ys, logY, 0.05);
  const box = [LEFT, TOP, width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM];
  return {
    plot, axis, bars, lines, levels, width, box, logX, logY, limits: [x0, x1, y0, y1],
    x: scale(x0, x1, box[0], box[0] + box[2], logX),
    y: scale(y0, y1, box[1] + box[3], box[1], logY),
  };
}

const path = (points, v) => points.map(([x, y], i) => `${i ? "L" : "M"}${v.x(x).toFixed(2)} ${v.y(y).toFixed(2)}`).join("");

function draw(figure) {
  const v = view(figure), chart = figure.querySelector(".chart");
  views.set(figure, v);
  chart.replaceChildren();
  forget(figure);
  if (!v) return void add(chart, "p", { class: "quiet" }, "nothing to show");
  chart.dataset.axis = v.axis;
  const [left, top, wide, high] = v.box, [x0, x1, y0, y1] = v.limits;
  const svg = add(chart, "svg:svg", { viewBox: `0 0 ${v.width} ${HEIGHT}`, "font-family": "sans-serif", "font-size": 11, fill: "currentColor" });
  const clip = add(add(svg, "svg:clipPath", { id: `clip-${figure.dataset.plot}` }), "svg:rect", {});
  for (const [key, value] of Object.entries({ x: left, y: top - 4, width: wide, height: high + 8 })) clip.setAttribute(key, value);
  const rule = (parent, a, b, c, d, more) => add(parent, "svg:line", { x1: a, y1: b, x2: c, y2: d, stroke: "currentColor", ...more });
  for (const x of ticks(x0, x1, v.logX, Math.max(Math.floor(wide / 70), 2))) {
    rule(svg, v.x(x), top, v.x(x), top + high, { "stroke-opacity": 0.12 });
    add(svg, "svg:text", { x: v.x(x), y: top + high + 15, "text-anchor": "middle" }, short(x));
  }
  for (const y of ticks(y0, y1, v.logY, 5)) {
    rule(svg, left, v.y(y), left + wide, v.y(y), { "stroke-opacity": 0.12 });
    add(svg, "svg:text", { x: left - 6, y: v.y(y) + 4, "text-anchor": "end" }, short(y));
  }
  rule(svg, left, top + high, left + wide, top + high, {});
  add(svg, "svg:text", { x: left + wide / 2, y: HEIGHT - 5, "text-anchor": "middle" }, data.axes[v.axis] + (v.logX ? " (log scale)" : ""));
  const drawn = add(svg, "svg:g", { "clip-path": `url(#clip-${figure.dataset.plot})` });
  for (const [label, y] of v.levels) {
    rule(drawn, left, v.y(y), left + wide, v.y(y), { "stroke-dasharray": "2 3", "stroke-opacity": 0.8 });
    add(drawn, "svg:text", { x: left + wide - 3, y: v.y(y) - 3, "text-anchor": "end", "font-size": 10 }, `${label} ${number(Number(y.toFixed(3)))}`);
  }
  const factor = Number(control("smooth").value);
  for (const line of v.lines) {
    const group = add(drawn, "svg:g", line.run === null ? {} : { "data-run": line.run });
    const color = colorOf(line.run), { points } = line;
    if (v.bars) {
      const half = Math.max((v.x(1) - v.x(0)) / 2, 0.5);
      for (const [x, y] of points)
        if (y) add(group, "svg:rect", { x: v.x(x) - half, y: v.y(y), width: 2 * half, height: top + high - v.y(y), fill: color });
      continue;
    }
    const heldout = line.split === "heldout", smooth = factor > 0 && !heldout && points.length > 2;
    const style = { fill: "none", stroke: color, "stroke-linejoin": "round" };
    add(group, "svg:path", { d: path(points, v), ...style, "stroke-width": heldout ? 2 : 1.1, "stroke-opacity": smooth ? 0.25 : heldout ? 1 : 0.75 });
    if (smooth) add(group, "svg:path", { d: path(smoothed(points, factor), v), ...style, "stroke-width": 1.6 });
    const every = Math.ceil(points.length / 40);
    if (heldout || points.length === 1)
      points.forEach(([x, y], i) => i % every || add(group, "svg:circle", { cx: v.x(x), cy: v.y(y), r: 3, fill: color }));
  }
  if (v.bars) return;
  for (const [run, incidents] of data.incidents.entries())
    for (const incident of isShown(run) ? incidents : []) {
      const x = incident.x[v.axis];
      if (x === undefined || x < x0 || x > x1) continue;
      const mark = add(svg, "svg:g", { class: "incident", "data-run": run });
      rule(mark, v.x(x), top, v.x(x), top + high, { stroke: colorOf(run), "stroke-dasharray": "4 3" });
      add(mark, "svg:path", { d: `M${v.x(x) - 5} ${top - 8}h10l-5 8z`, fill: colorOf(run) });
      add(mark, "svg:title", {}, incident.text);
    }
}

function drawAll() {
  control("reset").hidden = !zoom;
  figures.forEach(draw);
}

// Index of the point whose x is nearest to a number.
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle; else high = middle;
  }
  return x - points[low][0] <= points[high][0] - x ? low : high;
}

// Show and mark the point of each curve that is nearest to x.
function read(figure, x) {
  forget(figure);
  const v = views.get(figure);
  if (!v) return;
  const points = v.lines.map((line) => { const [x_, y] = line.points[nearest(line.points, x)]; return { line, x: x_, y }; });
  const at = points.map((point) => point.x).reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
  const marks = add(figure.querySelector("svg"), "svg:g", { class: "marks" });
  const across = v.x(at), [left, top, wide, high] = v.box;
  add(marks, "svg:line", { x1: across, x2: across, y1: top, y2: top + high, stroke: "currentColor", "stroke-opacity": 0.5 });
  const box = figure.querySelector(".reading");
  add(box, "strong", {}, `${data.axes[v.axis]} ${number(at)}`);
  for (const { line, x: where, y } of points) {
    const color = colorOf(line.run);
    if (where >= v.limits[0] && where <= v.limits[1]) add(marks, "svg:circle", { cx: v.x(where), cy: v.y(y), r: 3.5, fill: color });
    const row = add(box, "span", {});
    add(row, "i", { style: `background: ${color}` });
    const who = line.run === null ? line.split : `${data.runs[line.run]}${line.split === "heldout" ? ", held-out" : ""}`;
    add(row, "span", {}, `${who} `);
    add(row, "b", {}, number(y));
    if (where !== at) add(row, "span", { class: "quiet" }, ` at ${number(where)}`);
  }
  // On the side opposite to the pointer.
  box.classList.toggle("left", across > left + wide / 2);
  figure.dataset.at = at;
}

function forget(figure) {
  figure.querySelector(".reading").replaceChildren();
  figure.querySelectorAll(".marks").forEach((marks) => marks.remove());
  delete figure.dataset.at;
}

// The share of a figure's width at a pointer, from 0 at the left axis to 1; null outside.
function share(figure, event) {
  const v = views.get(figure), svg = figure.querySelector("svg");
  if (!v || !svg) return null;
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const [left, top, wide, high] = v.box;
  const inside = point.x > left - 5 && point.x < left + wide + 5 && point.y > top - 5 && point.y < top + high + 5;
  return inside ? Math.min(Math.max((point.x - left) / wide, 0), 1) : null;
}

let drag = null; // {figure, from, to}: shares of the width between which to zoom

function move(figure, event) {
  const at = share(figure, event), v = views.get(figure);
  if (drag?.figure === figure) {
    if (at === null) return;
    drag.to = at;
    forget(figure);
    const [left, top, wide, high] = v.box, [a, b] = [drag.from, drag.to].sort((x, y) => x - y);
    const marks = add(figure.querySelector("svg"), "svg:g", { class: "marks" });
    add(marks, "svg:rect", { x: left + wide * a, y: top, width: wide * (b - a), height: high, "fill-opacity": 0.15 });
  } else if (at === null) forget(figure);
  else read(figure, invert(v.limits[0], v.limits[1], at, v.logX));
}

function release() {
  if (!drag) return;
  const { figure, from, to } = drag, v = views.get(figure);
  drag = null;
  if (Math.abs(to - from) * v.box[2] < 8) return;
  zoom = [from, to].sort((a, b) => a - b).map((at) => invert(v.limits[0], v.limits[1], at, v.logX));
  drawAll();
}

function reset() {
  zoom = null;
  drawAll();
}

function press(figure, event) {
  const v = views.get(figure);
  if (event.target !== figure || !v) return;
  if (event.key === "Escape") return forget(figure);
  if (event.key === "0" && zoom) return reset();
  if (event.key === "+" && !v.bars) {
    const at = Number(figure.dataset.at ?? v.limits[1]), quarter = (v.limits[1] - v.limits[0]) / 4;
    zoom = [at - quarter, at + quarter];
    if (v.logX) zoom[0] = Math.max(zoom[0], v.limits[0]);
    return drawAll();
  }
  if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
  event.preventDefault();
  const xs = [...new Set(v.lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const last = xs.length - 1;
  const now = "at" in figure.dataset ? nearest(xs.map((x) => [x]), Number(figure.dataset.at)) : last + 1;
  const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
  read(figure, xs[Math.min(Math.max(next, 0), last)]);
}

// Save the plot as shown, with its title and the names of its runs.
function save(figure) {
  const v = views.get(figure);
  if (!v) return;
  const picture = figure.querySelector("svg").cloneNode(true);
  picture.querySelectorAll(".marks").forEach((part) => part.remove());
  picture.setAttribute("style", "color: black; background: white");
  picture.setAttribute("viewBox", `0 -20 ${v.width} ${HEIGHT + 20}`);
  picture.setAttribute("width", v.width);
  picture.setAttribute("height", HEIGHT + 20);
  add(picture, "svg:text", { x: LEFT, y: -6, "font-weight": "bold" }, v.plot.title);
  const names = add(picture, "svg:text", { x: v.width - RIGHT, y: -6, "text-anchor": "end" });
  for (const run of new Set(v.lines.map((line) => line.run)))
    if (run !== null) add(names, "svg:tspan", { fill: colorOf(run), dx: 8 }, `— ${data.runs[run]}`);
  const text = new XMLSerializer().serializeToString(picture);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  link.download = `${v.plot.file}.svg`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

for (const input of document.querySelectorAll("input[name=axis]"))
  input.addEventListener("change", reset); // the zoom is of another axis
for (const input of document.querySelectorAll("input[name=run], input[name^=log], input[name=smooth]"))
  input.addEventListener("input", drawAll);
control("reset").addEventListener("click", reset);
for (const figure of figures) {
  const chart = figure.querySelector(".chart");
  chart.addEventListener("pointerdown", (event) => {
    const at = share(figure, event), v = views.get(figure);
    if (event.button || at === null || v.bars) return;
    drag = { figure, from: at, to: at };
    if (event.pointerType === "mouse") event.preventDefault(); // selects no text
    figure.focus({ preventScroll: true });
  });
  chart.addEventListener("pointermove", (event) => move(figure, event));
  chart.addEventListener("pointerleave", () => forget(figure));
  chart.addEventListener("dblclick", reset);
  figure.addEventListener("blur", () => forget(figure));
  figure.addEventListener("keydown", (event) => press(figure, event));
  figure.querySelector("button").addEventListener("click", () => save(figure));
}
window.addEventListener("pointerup", release);
window.addEventListener("pointercancel", () => (drag = null));
let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== drawnWidth) drawAll();
  drawnWidth = window.innerWidth;
});
drawAll(); // browsers may restore the inputs when the page is reloaded
