"use strict";
// The confusion matrix: rows are the true classes, columns what the network takes them for. A table of buttons for few
// classes; a canvas that draws the part in view for many.
const FEW = 30;
const LABEL_CELL = 11; // from this size on, a row has room for its name
const ORDERS = [
  ["given", "by class number"], ["similar", "confused classes together"], ["worst", "worst accuracy first"],
  ["many", "most images first"], ["name", "by name"],
];

function orderOf(detail, order) {
  const numbers = detail.classes.map((_, n) => n);
  const accuracy = (n) => (detail.support[n] ? detail.hits[n] / detail.support[n] : 2);
  if (order === "similar") return detail.order || numbers;
  if (order === "worst") return numbers.sort((a, b) => accuracy(a) - accuracy(b) || a - b);
  if (order === "many") return numbers.sort((a, b) => detail.support[b] - detail.support[a] || a - b);
  if (order === "name") return numbers.sort((a, b) => detail.classes[a].localeCompare(detail.classes[b], "en", { numeric: true }));
  return numbers;
}

/** How strongly a cell is coloured: by the root of its share of the true class, so that rare mistakes show, too. */
const strength = (share) => (share > 0 ? 0.12 + 0.88 * Math.sqrt(Math.min(1, share)) : 0);

const channels = (colour) => (colour.startsWith("#") ? [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)) : colour.split(" ").map(Number));

/** Black or white, whichever reads better on a colour laid over the card: at least 4.5 to 1. */
function inkOn(colour, alpha) {
  const below = channels(colourOf("--card"));
  const parts = channels(colourOf(colour)).map((one, n) => (alpha * one + (1 - alpha) * below[n]) / 255);
  const [red, green, blue] = parts.map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

function cellWords(detail, truth, predicted) {
  const count = detail.count(truth, predicted);
  const share = detail.support[truth] ? ` (${percent(count / detail.support[truth])})` : "";
  const what = truth === predicted ? [named(detail.classes[truth]), " recognised"]
    : [named(detail.classes[truth]), " taken for ", named(detail.classes[predicted])];
  const unknown = detail.matrixNote && !count && truth !== predicted;
  return [...what, unknown ? ": no image, or too few to be shown" : `: ${plural(count, "image")}${share}`];
}

/** A table with `cell(row, column)` in each cell, at most `largest` pixels wide, and names at most `widest` wide. */
function matrixTable(names, room, widest, largest, cell) {
  const longest = Math.max(...names.map((name) => name.length)), labels = Math.min(8 * longest + 8, innerWidth < 620 ? 72 : widest);
  const size = Math.max(22, Math.min(largest, Math.floor((room - labels - 12) / names.length - 2)));
  const title = (name, scope) => make("th", { scope, title: name }, make("span", {}, named(name)));
  return make("table", {
    class: `matrix-table ${longest > 3 ? "turned" : ""} ${size < 28 ? "small" : ""}`, style: { "--cell": `${size}px`, "--labels": `${labels}px` },
  }, make("thead", {}, make("tr", {}, make("td", {}), names.map((name) => title(name, "col")))),
  make("tbody", {}, names.map((name, row) => make("tr", {}, title(name, "row"), names.map((_, column) => make("td", {}, cell(row, column)))))));
}

/** Press the button of one key, and no other. */
function press(buttons, key) {
  for (const [one, button] of buttons) button.setAttribute("aria-pressed", String(one === key));
}

class TableMatrix {
  constructor(detail) {
    this.detail = detail;
    this.box = make("div", { class: "scroll" });
  }

  render(order) {
    this.buttons = new Map();
    const names = order.map((one) => this.detail.classes[one]), button = (row, column) => this.button(order[row], order[column]);
    this.box.replaceChildren(matrixTable(names, byId("matrix").clientWidth, 150, 66, button));
    if (this.marked) this.mark(this.marked);
  }

  button(truth, predicted) {
    const { detail } = this, count = detail.count(truth, predicted);
    const share = detail.support[truth] ? count / detail.support[truth] : 0, alpha = strength(share);
    const colour = truth === predicted ? "--hit" : "--miss";
    const button = make("button", {
      type: "button", disabled: !count,
      "aria-label": cellWords(detail, truth, predicted).map((part) => part.textContent ?? part).join(""),
      style: count ? { background: `rgb(var(${colour}) / ${alpha.toFixed(3)})`, color: inkOn(colour, alpha) } : {},
      onclick: () => showCell(detail, truth, predicted),
      onpointermove: (event) => showTip(event.clientX, event.clientY, make("span", {}, cellWords(detail, truth, predicted))),
      onpointerleave: hideTip,
    }, count > 9999 ? compact(count) : String(count));
    this.buttons.set(detail.key(truth, predicted), button);
    return button;
  }

  mark(cell) {
    this.marked = cell;
    press(this.buttons, cell && this.detail.key(...cell));
  }
}

class CanvasMatrix {
  constructor(detail) {
    this.detail = detail;
    this.canvas = make("canvas", {});
    this.space = make("div", { class: "space" });
    this.view = make("div", {
      class: "viewport", tabindex: 0, role: "group",
      "aria-label": "Confusion matrix. Arrow keys move over its cells, Enter shows their images. The table of pairs beside it has the most frequent in words.",
    }, this.canvas, this.space);
    this.words = make("p", { class: "small", role: "status", "aria-live": "polite" });
    this.box = make("div", {}, this.view, this.words);
    this.cell = 0; // pixels; 0: all classes in view
    this.view.addEventListener("scroll", () => this.paint());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.view.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.order && this.resize()).observe(this.view);
  }

  render(order) {
    this.order = order;
    this.positions = new Array(order.length);
    order.forEach((one, n) => { this.positions[one] = n; });
    this.resize();
  }

  resize() {
    this.width = this.view.clientWidth;
    this.height = this.view.clientHeight;
    this.size = this.cell || this.fit();
    this.left = this.margin(this.size);
    const pixels = this.left + this.size * this.order.length;
    this.space.style.width = `${pixels}px`;
    this.space.style.height = `${pixels}px`;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.paint();
  }

  /** The size with which all classes are in view: with their names if these have room then. */
  fit() {
    const room = (size) => (Math.min(this.width, this.height) - this.margin(size)) / this.order.length;
    return room(LABEL_CELL) >= LABEL_CELL ? room(LABEL_CELL) : Math.min(room(0), LABEL_CELL - 0.01);
  }

  /** Room for names at the left and on top, where cells are large enough to have any. */
  margin(size) {
    return size >= LABEL_CELL ? Math.min(120, this.width * 0.3) : 20;
  }

  /** Make cells larger or smaller by a factor, and keep the middle where it is; 0 shows all classes. */
  zoom(factor) {
    const middle = [this.view.scrollLeft + this.width / 2 - this.left, this.view.scrollTop + this.height / 2 - this.left]
      .map((at) => at / this.size);
    this.cell = factor ? Math.min(40, this.size * factor) : 0;
    this.resize();
    this.view.scrollLeft = middle[0] * this.size + this.left - this.width / 2;
    this.view.scrollTop = middle[1] * this.size + this.left - this.height / 2;
    this.paint();
  }

  /** Bring a class's row and column to the middle. */
  centre(one) {
    const at = this.positions[one] * this.size + this.left;
    this.view.scrollTop = at - this.height / 2;
    this.view.scrollLeft = at - this.width / 2;
  }

  paint() {
    const { detail, size, left } = this, paint = this.canvas.getContext("2d"), ratio = devicePixelRatio || 1;
    const x0 = left - this.view.scrollLeft, y0 = left - this.view.scrollTop;
    const hit = colourOf("--hit").split(" ").join(","), miss = colourOf("--miss").split(" ").join(",");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.fillStyle = colourOf("--card");
    paint.fillRect(0, 0, this.width, this.height);
    const gap = size > 6 ? 1 : 0, side = Math.max(1.4, size - gap), faintest = size < 4 ? 0.55 : 0.3;
    for (const [truth, predicted, count] of detail.cells) {
      const x = x0 + this.positions[predicted] * size, y = y0 + this.positions[truth] * size;
      if (x + side < left || y + side < left || x > this.width || y > this.height) continue;
      const alpha = Math.max(faintest, strength(count / detail.support[truth]));
      paint.fillStyle = `rgba(${truth === predicted ? hit : miss},${alpha.toFixed(3)})`;
      paint.fillRect(x, y, side, side);
      if (size >= 22) {
        paint.fillStyle = inkOn(truth === predicted ? "--hit" : "--miss", alpha);
        paint.font = "11px system-ui, sans-serif";
        paint.textAlign = "center";
        paint.fillText(compact(count), x + side / 2, y + side / 2 + 4);
      }
    }
    if (this.marked) {
      paint.strokeStyle = colourOf("--accent");
      paint.lineWidth = 2;
      const x = x0 + this.positions[this.marked[1]] * size, y = y0 + this.positions[this.marked[0]] * size;
      const around = Math.max(size, 7);
      paint.strokeRect(x + (size - around) / 2 - 1, y + (size - around) / 2 - 1, around + 1, around + 1);
    }
    this.paintNames(paint, x0, y0);
  }

  paintNames(paint, x0, y0) {
    const { left, size, detail } = this;
    paint.fillStyle = colourOf("--card");
    paint.fillRect(0, 0, this.width, left - 1);
    paint.fillRect(0, 0, left - 1, this.height);
    paint.fillStyle = colourOf("--soft");
    paint.font = `${Math.min(12, Math.max(9, size - 2))}px system-ui, sans-serif`;
    if (size < LABEL_CELL) {
      paint.font = "11.5px system-ui, sans-serif";
      paint.textAlign = "center";
      paint.fillText("taken for", (left + this.width) / 2, 14);
      paint.translate(14, (left + this.height) / 2);
      paint.rotate(-Math.PI / 2);
      paint.fillText("true class", 0, 0);
      return;
    }
    this.order.forEach((one, n) => {
      const at = n * size + size / 2, name = shortened(paint, detail.classes[one], left - 12);
      if (y0 + at > left && y0 + at < this.height) {
        paint.textAlign = "right";
        paint.fillText(name, left - 6, y0 + at + 4);
      }
      if (x0 + at > left && x0 + at < this.width) {
        paint.save();
        paint.translate(x0 + at + 4, left - 6);
        paint.rotate(-Math.PI / 2);
        paint.textAlign = "left";
        paint.fillText(name, 0, 0);
        paint.restore();
      }
    });
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left + this.view.scrollLeft) / this.size);
    const row = Math.floor((event.clientY - box.top - this.left + this.view.scrollTop) / this.size);
    if (event.clientX - box.left < this.left || event.clientY - box.top < this.left) return null;
    return this.nearest(row, column);
  }

  /** The cell at a place; where cells are smaller than a fingertip, the fullest one around it that is not empty. */
  nearest(row, column) {
    const reach = this.size >= 8 ? 0 : Math.ceil(4 / this.size), n = this.order.length;
    let best = null, most = 0;
    for (let r = Math.max(0, row - reach); r <= Math.min(n - 1, row + reach); r++) {
      for (let c = Math.max(0, column - reach); c <= Math.min(n - 1, column + reach); c++) {
        const count = this.detail.count(this.order[r], this.order[c]);
        const near = count / (1 + Math.hypot(r - row, c - column));
        if (near > most) { best = [this.order[r], this.order[c]]; most = near; }
      }
    }
    return best || (row >= 0 && column >= 0 && row < n && column < n ? [this.order[row], this.order[column]] : null);
  }

  hover(event) {
    const cell = this.at(event);
    if (cell) showTip(event.clientX, event.clientY, make("span", {}, cellWords(this.detail, ...cell)));
    else hideTip();
  }

  click(event) {
    const cell = this.at(event);
    if (cell && this.detail.count(...cell)) showCell(this.detail, ...cell);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter" && this.marked && this.detail.count(...this.marked)) return showCell(this.detail, ...this.marked);
    if (!moves[event.key]) return undefined;
    event.preventDefault();
    const inside = (at) => Math.max(0, Math.min(this.order.length - 1, at));
    const [row, column] = this.marked ? this.marked.map((one) => this.positions[one]) : [0, -moves[event.key][1]];
    this.mark([this.order[inside(row + moves[event.key][0])], this.order[inside(column + moves[event.key][1])]]);
    this.words.replaceChildren(...cellWords(this.detail, ...this.marked));
    return undefined;
  }

  /** Outline a cell, and bring it into view. */
  mark(cell) {
    this.marked = cell;
    if (cell) {
      const into = (position, scroll, length) => {
        const start = position * this.size, room = length - this.left - this.size;
        return start < scroll ? start : start > scroll + room ? start - room : scroll;
      };
      this.view.scrollTop = into(this.positions[cell[0]], this.view.scrollTop, this.height);
      this.view.scrollLeft = into(this.positions[cell[1]], this.view.scrollLeft, this.width);
    }
    this.paint();
  }
}

function shortened(paint, text, width) {
  if (paint.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && paint.measureText(`${text.slice(0, length)}\u2026`).width > width) length -= 1;
  return `${text.slice(0, length)}\u2026`;
}

function startMatrix(detail) {
  const few = detail.classes.length <= FEW;
  const matrix = few ? new TableMatrix(detail) : new CanvasMatrix(detail);
  detail.mark = (cell) => { matrix.mark(cell); press(detail.pairs, cell && detail.key(...cell)); };
  const tools = byId("matrix-tools");
  // Among many classes, a picture of which ones are confused needs these to stand together.
  const orders = few ? ORDERS : [ORDERS[1], ORDERS[0], ...ORDERS.slice(2)];
  const render = (order) => {
    matrix.render(orderOf(detail, order));
    startMatrix.again = () => render(order); // in the colours of the day or of the night
  };
  tools.replaceChildren(chooser("order", orders, render));
  if (!few) {
    const zoom = (text, title, factor) => make("button", { class: "plain", type: "button", title, "aria-label": title, onclick: () => matrix.zoom(factor) }, text);
    tools.append(zoom("\u2212", "smaller", 1 / 1.6), zoom("+", "larger", 1.6), zoom("All", "all classes in view", 0), finder(detail, matrix));
  }
  byId("matrix").replaceChildren(matrix.box);
  render(orders[0][0]);
  startPairs(detail);
}

/** A field that brings a class's row and column into view. */
function finder(detail, matrix) {
  const list = make("datalist", { id: "class-names" }, detail.classes.map((name) => make("option", { value: name })));
  const find = (event) => {
    const one = detail.classes.indexOf(event.target.value);
    if (one < 0) return;
    if (matrix.size < 18) matrix.zoom(18 / matrix.size);
    matrix.mark([one, one]);
    matrix.centre(one);
  };
  return make("label", {}, make("input", { type: "search", list: "class-names", placeholder: "find a class", "aria-label": "find a class", size: 14, onchange: find }), list);
}

function startPairs(detail) {
  const pairs = detail.cells.filter(([truth, predicted]) => truth !== predicted).slice(0, 20);
  detail.pairs = new Map();
  const items = pairs.map(([truth, predicted, count]) => {
    const share = count / detail.support[truth];
    const button = make("button", { type: "button", "aria-pressed": "false", onclick: () => showCell(detail, truth, predicted) },
      make("span", {}, named(detail.classes[truth]), make("span", { class: "soft" }, " taken for "), named(detail.classes[predicted])),
      make("span", { class: "number" }, `${whole(count)}\u2002`, make("span", { class: "soft" }, percent(share))),
      make("span", { class: "bar", style: { "--p": cssPercent(share) } }));
    detail.pairs.set(detail.key(truth, predicted), button);
    return make("li", {}, button);
  });
  byId("pairs").replaceChildren(...(items.length ? items : [make("li", { class: "soft" }, "No image is taken for another class.")]));
}
