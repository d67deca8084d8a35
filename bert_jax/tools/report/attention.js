"use strict";
// A map has a head's T × T weights, a row per query. Weights are stored as bytes: 255 times their
// square root, which the colors show.

const data = JSON.parse(document.getElementById("data").textContent);
const { tokens, segments, layers, heads, columns } = data;
const T = tokens.length;
const SIDE = 70; // size of a small map in pixels, as in attention.css
const FIGURES = {
  entropy: { caption: "Entropy (nats)", unit: "nats", digits: 2 },
  distance: { caption: "Distance (word pieces)", unit: "word pieces", digits: 1 },
};
const find = (id) => document.getElementById(id);
const weight = (q) => (q / 255) ** 2;
const percent = (q) => `${(100 * weight(q)).toFixed(weight(q) < 0.0995 ? 1 : 0)}%`;
const named = (i) => `${tokens[i]} (${i})`;
const within = (value, below) => Math.min(Math.max(value, 0), below - 1);
const modified = (event) => event.altKey || event.ctrlKey || event.metaKey;

let maps; // bytes [layers, columns, T, T]
let chosen = { layer: 0, column: 0 };
let followed = null; // row of the selected map, or null for all rows
const overlaid = new Set(); // heads whose lines are drawn over each other, instead of the selected map's
const map = (layer = chosen.layer, column = chosen.column) => {
  const at = (layer * columns.length + column) * T * T;
  return maps.subarray(at, at + T * T);
};

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}

// Children are elements or texts; texts are never parsed as HTML.
function make(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

// A color of CSS, or of the style sheet by its variable, as [red, green, blue].
function color(name) {
  const probe = make("span", { style: `color: ${name.startsWith("--") ? `var(${name})` : name}` });
  document.body.append(probe);
  const parts = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
  probe.remove();
  return parts;
}

const isDark = matchMedia("(prefers-color-scheme: dark)");

// The color of a column: heads have hues of their own, in order around the color wheel.
function hue(column) {
  if (column >= heads) return "var(--quiet)";
  return `hsl(${Math.round((360 * column) / heads + 210) % 360} 70% ${isDark.matches ? 66 : 42}%)`;
}

const rgb = (column) => color(hue(column));

// Transparent, to fit any background. A pixel that covers several pairs of tokens shows the largest
// weight.
function paint(canvas, weights, side, [red, green, blue]) {
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  const pixel = Array.from(tokens, (_, i) => Math.floor((i * side) / T));
  for (let i = 0; i < T; i++) {
    for (let j = 0; j < T; j++) {
      const at = 4 * (pixel[i] * side + pixel[j]);
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = Math.max(image.data[at + 3], weights[i * T + j]);
    }
  }
  context.putImageData(image, 0, 0);
}

// Scale a canvas to the resolution of the screen; drawing uses CSS pixels.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// A table with a cell per layer and column. The selection is shared by all tables.
function grid(table, count, titles, cell) {
  table.setAttribute("role", "grid");
  const corner = make("th", { scope: "col", "aria-label": "layer" });
  table.append(
    make("thead", {}, make("tr", {}, corner, ...titles.map((t) => make("th", { scope: "col" }, t)))),
    make("tbody", {}, ...Array.from({ length: layers }, (_, layer) =>
      make("tr", {}, make("th", { scope: "row" }, `layer ${layer + 1}`),
        ...Array.from({ length: count }, (_, column) => {
          const td = cell(layer, column);
          Object.assign(td.dataset, { layer, column });
          td.setAttribute("role", "gridcell");
          return td;
        })))),
  );
  table.addEventListener("click", (event) => {
    const at = event.target.closest("td");
    if (at) choose(Number(at.dataset.layer), Number(at.dataset.column));
  });
  table.addEventListener("keydown", (event) => {
    const { layer, column } = event.target.dataset;
    const [down, right] = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      Home: [0, -count], End: [0, count], Enter: [0, 0], " ": [0, 0],
    }[event.key] ?? [];
    if (down === undefined || layer === undefined || modified(event)) return;
    event.preventDefault();
    choose(within(Number(layer) + down, layers), within(Number(column) + right, count));
    table.querySelector("td[tabindex='0']").focus();
  });
}

function choose(layer, column) {
  chosen = { layer, column };
  for (const table of document.querySelectorAll("table.choice")) {
    const cells = [...table.querySelectorAll("td")];
    const at = cells.find((td) => Number(td.dataset.layer) === layer && Number(td.dataset.column) === column);
    for (const td of cells) {
      td.setAttribute("aria-selected", td === at);
      // Tab focuses one cell of a table; arrow keys move from there.
      td.tabIndex = td === (at ?? cells[0]) ? 0 : -1;
    }
  }
  const figures = column < heads
    ? Object.entries(FIGURES).map(([name, f]) => `${name} ${data[name][layer][column].toFixed(f.digits)} ${f.unit}`)
    : [];
  find("chosen").textContent = [`Layer ${layer + 1}, ${columns[column]}`, ...figures].join(" · ");
  document.documentElement.style.setProperty("--head", hue(column));
  follow(followed);
}

// Show row i of the selected map, or all rows for null; `j` is the key under the pointer.
function follow(i, j = null) {
  followed = i;
  const weights = map();
  const row = followed === null ? null : weights.subarray(followed * T, followed * T + T);
  [...find("from").children].forEach((item, i) => {
    item.setAttribute("aria-selected", i === followed);
    item.tabIndex = i === (followed ?? 0) ? 0 : -1;
  });
  [...find("to").children].forEach((item, i) => {
    item.style.setProperty("--share", row ? row[i] / 255 : 0);
    item.querySelector("small").textContent = row && weight(row[i]) >= 0.01 ? percent(row[i]) : "";
  });
  let text = "";
  if (row) {
    const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a]);
    const top = order.slice(0, 5).map((i) => `${named(i)} ${percent(row[i])}`);
    text = `${named(followed)} attends to ${top.join(", ")}`;
    if (j !== null) text += `; ${percent(row[j])} to ${named(j)}`;
  }
  find("weights").textContent = text;
  drawLines(weights, row);
  drawSquare(weights);
}

function drawLines(weights, row) {
  const list = find("from").getBoundingClientRect();
  const width = 176;
  const context = sized(find("between"), width, list.height);
  const middle = (i) => ((i + 0.5) * list.height) / T;
  context.lineWidth = row ? 2 : 1.5;
  // Small weights are drawn for a single row only: all lines of a long text would take half a minute
  // and hide each other.
  const opacity = (q) => (row ? q / 255 : weight(q));
  const least = row ? 0 : T > 128 ? 4 / T : 1 / 255;
  const selected = overlaid.size ? [...overlaid] : [chosen.column];
  for (const column of selected) {
    const drawn = overlaid.size ? map(chosen.layer, column) : weights;
    context.strokeStyle = `rgb(${rgb(column)})`;
    const paths = new Map(); // one path for all lines of the same style
    for (let i = followed ?? 0; i <= (followed ?? T - 1); i++) {
      for (let j = 0; j < T; j++) {
        const q = drawn[i * T + j];
        if (q === 0 || opacity(q) < least) continue;
        if (!paths.has(q)) paths.set(q, new Path2D());
        const path = paths.get(q);
        path.moveTo(0, middle(i));
        path.bezierCurveTo(width / 3, middle(i), (2 * width) / 3, middle(j), width, middle(j));
      }
    }
    for (const [q, path] of paths) {
      context.globalAlpha = opacity(q);
      context.stroke(path);
    }
  }
  for (const mark of document.querySelectorAll("#opacity span"))
    mark.style.left = `${100 * (row ? Math.sqrt(mark.dataset.share) : mark.dataset.share)}%`;
}

const CELL = Math.min(26, Math.max(3, Math.floor(560 / T)));
let margin = 0; // width of the labels of the large map, in CSS pixels

function drawSquare(weights) {
  const canvas = find("large");
  const every = Math.ceil(9 / CELL); // label only some rows if they are narrow
  const font = `${every > 1 ? 9 : Math.min(12, CELL)}px system-ui, sans-serif`;
  let context = canvas.getContext("2d");
  context.font = font;
  margin = 8 + Math.ceil(Math.max(...tokens.map((token) => context.measureText(token).width)));
  context = sized(canvas, margin + T * CELL + 1, margin + T * CELL + 1);
  context.font = font;
  context.textBaseline = "middle";
  const [ink, line] = [color("--ink"), color("--line")].map((parts) => `rgb(${parts})`);
  for (let i = 0; i < T; i += every) {
    const at = margin + (i + 0.5) * CELL;
    context.fillStyle = ink;
    context.globalAlpha = followed === null || followed === i ? 1 : 0.45;
    context.textAlign = "right";
    context.fillText(tokens[i], margin - 4, at);
    context.globalAlpha = 1;
    context.save();
    context.translate(at, margin - 4);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(tokens[i], 0, 0);
    context.restore();
  }
  const small = document.createElement("canvas");
  paint(small, weights, T, rgb(chosen.column));
  context.imageSmoothingEnabled = false;
  context.drawImage(small, margin, margin, T * CELL, T * CELL);
  context.strokeStyle = line;
  context.strokeRect(margin - 0.5, margin - 0.5, T * CELL + 1, T * CELL + 1);
  if (followed !== null) {
    context.strokeStyle = ink;
    context.strokeRect(margin - 0.5, margin + followed * CELL - 0.5, T * CELL + 1, CELL + 1);
  }
  canvas.setAttribute("aria-label", `attention weights of ${find("chosen").textContent}; each row is a word piece`);
}

function paintMaps() {
  for (const td of find("maps").querySelectorAll("td")) {
    const weights = map(Number(td.dataset.layer), Number(td.dataset.column));
    paint(td.firstChild, weights, Math.min(T, SIDE), rgb(Number(td.dataset.column)));
  }
  document.querySelectorAll("i[data-column]").forEach((i) => (i.style.background = hue(Number(i.dataset.column))));
}

// A box per head: those that are checked are drawn over each other.
function buildLegend() {
  const boxes = Array.from({ length: heads }, (_, head) => {
    const box = make("input", { type: "checkbox", name: "overlay", value: head });
    box.addEventListener("change", () => {
      overlaid[box.checked ? "add" : "delete"](head);
      follow(followed);
    });
    find("overlay").append(make("label", {}, box, make("i", { "data-column": head }), ` ${head + 1}`));
    return box;
  });
  const all = make("button", { type: "button" }, "all heads");
  const none = make("button", { type: "button" }, "only the selected one");
  for (const [button, checked] of [[all, true], [none, false]])
    button.addEventListener("click", () => {
      boxes.forEach((box, head) => {
        box.checked = checked;
        overlaid[checked ? "add" : "delete"](head);
      });
      follow(followed);
    });
  find("overlay").append(all, " ", none);
  for (const share of [0.1, 0.25, 0.5, 1])
    find("opacity").append(make("span", { "data-share": share }, `${100 * share}%`));
}

function build() {
  for (const share of [0.01, 0.1, 0.25, 0.5, 1]) {
    const style = `left: ${100 * Math.sqrt(share)}%`;
    find("scale").append(make("span", { style }, `${100 * share}%`));
  }
  find("maps").setAttribute("aria-label", "attention of every layer and head");
  grid(find("maps"), columns.length, columns, (layer, column) =>
    make("td", { "aria-label": `layer ${layer + 1}, ${columns[column]}` }, make("canvas")));
  for (const [name, { caption, digits }] of Object.entries(FIGURES)) {
    const least = Math.min(...data[name].flat());
    const range = Math.max(...data[name].flat()) - least || 1;
    find(name).append(make("caption", {}, caption));
    grid(find(name), heads, columns.slice(0, heads), (layer, column) => {
      const value = data[name][layer][column];
      return make("td", { style: `--share: ${(value - least) / range}` }, value.toFixed(digits));
    });
  }
  [...find("maps").tHead.rows[0].cells].slice(1).forEach((th, column) => th.prepend(make("i", { "data-column": column })));
  buildLegend();
  find("lines").style.setProperty("--row", T > 64 ? "16px" : "24px");
  tokens.forEach((token, i) => {
    const second = segments[i] ? "second" : "";
    const number = make("small", {}, `${i} `);
    const item = make("li", { role: "option", class: second }, number, token);
    item.addEventListener("mouseenter", () => follow(i));
    item.addEventListener("focus", () => follow(i));
    find("from").append(item);
    find("to").append(make("li", { class: second }, token, make("small")));
  });
  find("from").addEventListener("mouseleave", () => follow(null));
  find("from").addEventListener("keydown", (event) => {
    const items = [...find("from").children], at = items.indexOf(event.target);
    const to = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: T - 1 }[event.key];
    if (event.key === "Escape") follow(null);
    if (to === undefined || modified(event)) return;
    event.preventDefault();
    items[within(to, T)].focus();
  });
  find("large").addEventListener("mousemove", (event) => {
    const [j, i] = [event.offsetX, event.offsetY].map((at) => Math.floor((at - margin) / CELL));
    const inside = i >= 0 && j >= 0 && i < T && j < T;
    follow(inside ? i : null, inside ? j : null);
  });
  find("large").addEventListener("mouseleave", () => follow(null));
}

unpack(data.maps).then((bytes) => {
  maps = bytes;
  build();
  paintMaps();
  choose(0, 0);
  isDark.addEventListener("change", () => {
    paintMaps();
    choose(chosen.layer, chosen.column);
  });
  document.body.dataset.ready = "";
});
