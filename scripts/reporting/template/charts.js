"use strict";
// Line charts of all runs over epoch, step or hours: one SVG each, drawn again when its width changes.
// Runs without a finished epoch say nothing of epochs and hours.
const AXES = DATA.runs.some((run) => run.axis.ends.length > 1) ? ["epoch", "step", "hours"] : ["step"];
const shown = { axis: AXES[0], hidden: new Set() };
const MARGIN = { left: 50, right: 14, top: 10, bottom: 24 };
const HEIGHT = 226;
const MOST_VALUES = 12; // beside the pointer

/** Where step `step` of a run lies on the chosen axis; null if the run does not say. */
function place(run, step) {
  if (shown.axis === "step") return step;
  const { ends, [shown.axis]: values } = DATA.runs[run].axis;
  if (ends.length < 2) return null;
  const found = ends.findIndex((end) => end >= step);
  const after = found < 0 ? ends.length - 1 : Math.max(1, found); // the epoch that still goes on is like the one before
  const part = (step - ends[after - 1]) / (ends[after] - ends[after - 1] || 1);
  return values[after - 1] + part * (values[after] - values[after - 1]);
}

function ticks(low, high, most) {
  const raw = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const marks = [];
  for (let n = Math.ceil(low / size - 1e-9); n * size <= high + size * 1e-9; n++) marks.push(Number((n * size).toPrecision(12)));
  return marks;
}

function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / 6)), marks = [];
  for (let power = first; power <= last; power += every) marks.push(10 ** power);
  if (marks.length > 1) return marks;
  const fine = [];
  for (let power = first - 1; power <= last + 1; power++) for (const n of [1, 2, 3, 5]) fine.push(n * 10 ** power);
  return fine.filter((mark) => mark >= low * 0.999 && mark <= high * 1.001);
}

/** The curves to draw: points on the chosen axis, without those that cannot be shown. */
function visible(chart) {
  return chart.curves.filter((curve) => !shown.hidden.has(curve.run)).map((curve) => {
    const points = [];
    curve.x.forEach((step, n) => {
      const x = place(curve.run, step), y = curve.y[n];
      const usable = x !== null && y !== null && (!chart.log || y > 0);
      points.push(usable ? { x, y, step, low: curve.low ? curve.low[n] : y, high: curve.high ? curve.high[n] : y } : null);
    });
    return { ...curve, points };
  });
}

function range(curves, chart) {
  const points = curves.flatMap((curve) => curve.points).filter(Boolean);
  if (!points.length) return null;
  // What a curve's points stand for may reach far up in a single step; the curve itself decides the range.
  let low = Math.min(...points.map((p) => p.y)), high = Math.max(...points.map((p) => p.y));
  const left = Math.min(...points.map((p) => p.x)), right = Math.max(...points.map((p) => p.x));
  if (chart.log) {
    if (low === high) { low /= 2; high *= 2; }
    return { low: low / 1.1, high: high * 1.1, left: Math.min(0, left), right: right || 1 };
  }
  if (chart.zero) low = Math.min(0, low);
  const space = (high - low || Math.abs(high) || 1) * 0.06;
  const least = low >= 0 ? 0 : -Infinity;
  const most = chart.unit === "%" && high <= 100 ? 100 : Infinity;
  return { low: Math.max(least, low - space), high: Math.min(most, high + space), left: Math.min(0, left), right: right || 1 };
}

class LineChart {
  constructor(chart) {
    this.chart = chart;
    this.svg = draw("svg", { tabindex: 0, role: "img" });
    const head = make("div", { class: "head" }, make("h3", {}, chart.title), make("span", { class: "soft" }, chart.unit));
    this.card = make("div", { class: "card chart" }, head, this.svg, chart.note ? make("p", {}, chart.note) : null);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => LineChart.leave());
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => LineChart.leave());
  }

  render() {
    const width = Math.max(240, Math.round(this.svg.getBoundingClientRect().width) || 380);
    this.curves = visible(this.chart);
    this.range = range(this.curves, this.chart);
    this.width = width;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.description());
    if (!this.range) {
      const advice = shown.axis === "step" ? "" : ` over ${shown.axis === "epoch" ? "epochs" : "hours"}: choose steps`;
      const why = this.curves.length ? `nothing to show${advice}` : "all runs are hidden";
      this.svg.replaceChildren(draw("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, why));
      return;
    }
    this.cross = draw("line", { class: "cross", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    this.dots = draw("g", {});
    this.svg.replaceChildren(this.grid(), ...this.curves.map((curve) => this.curve(curve)), this.cross, this.dots);
  }

  x(value) {
    const { left, right } = this.range;
    return MARGIN.left + ((value - left) / (right - left || 1)) * (this.width - MARGIN.left - MARGIN.right);
  }

  y(value) {
    const { low, high } = this.range, scale = this.chart.log ? Math.log : (v) => v;
    const part = (scale(value) - scale(low)) / (scale(high) - scale(low) || 1);
    const inside = Math.max(-0.02, Math.min(1.02, part));
    return HEIGHT - MARGIN.bottom - inside * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  grid() {
    const { low, high, left, right } = this.range, group = draw("g", {});
    for (const mark of this.chart.log ? logTicks(low, high) : ticks(low, high, 5)) {
      const y = this.y(mark);
      group.append(draw("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      group.append(draw("text", { x: MARGIN.left - 7, y: y + 4, "text-anchor": "end" }, compact(mark)));
    }
    const marks = ticks(left, right, this.width > 330 ? 6 : 4);
    for (const mark of marks) {
      group.append(draw("text", { x: this.x(mark), y: HEIGHT - 6, "text-anchor": "middle" }, compact(mark)));
    }
    const base = HEIGHT - MARGIN.bottom;
    group.append(draw("line", { class: "axis", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: base, y2: base }));
    return group;
  }

  curve(curve) {
    const colour = runColour(curve.run), group = draw("g", { style: { color: colour } });
    const dash = curve.run >= 8 ? { "stroke-dasharray": "6 3" } : {};
    const validates = curve.style === "points";
    for (const part of pieces(curve.points)) {
      if (curve.low) {
        const upper = part.map((p) => `${this.x(p.x)},${this.y(p.high)}`);
        const lower = part.map((p) => `${this.x(p.x)},${this.y(p.low)}`).reverse();
        group.append(draw("polygon", { points: [...upper, ...lower].join(" "), fill: "currentColor", "fill-opacity": 0.12 }));
      }
      const line = part.map((p) => `${this.x(p.x).toFixed(1)},${this.y(p.y).toFixed(1)}`).join(" ");
      group.append(draw("polyline", {
        points: line, fill: "none", stroke: "currentColor", "stroke-width": validates ? 2.2 : 1.4,
        "stroke-opacity": validates || this.single() ? 1 : 0.55, "stroke-linejoin": "round", ...dash,
      }));
      if (part.length === 1 || (validates && part.length <= 60)) {
        for (const p of part) group.append(draw("circle", { cx: this.x(p.x), cy: this.y(p.y), r: 2.6, fill: "currentColor" }));
      }
    }
    return group;
  }

  /** Whether a run has one curve in this chart, which then needs no paler companion. */
  single() {
    return new Set(this.chart.curves.map((curve) => curve.name)).size === 1;
  }

  description() {
    const parts = this.curves.map((curve) => {
      const points = curve.points.filter(Boolean);
      if (!points.length) return "";
      const who = DATA.runs.length > 1 ? `${DATA.runs[curve.run].name}, ` : "";
      return `${who}${curve.name} from ${compact(points[0].y)} to ${compact(points.at(-1).y)}`;
    });
    return `${this.chart.title}. ${parts.filter(Boolean).join("; ")}. Left and right arrow keys read the points.`;
  }

  point(event) {
    if (!this.range) return;
    const box = this.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * this.width;
    const { left, right } = this.range;
    this.read(left + ((at - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * (right - left), event.clientX, event.clientY);
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this.range) return;
    event.preventDefault();
    const places = [...new Set(this.curves.flatMap((curve) => curve.points).filter(Boolean).map((p) => p.x))].sort((a, b) => a - b);
    const now = places.findIndex((x) => x >= (this.at ?? -Infinity));
    const next = places[Math.max(0, Math.min(places.length - 1, this.at === undefined ? 0 : now + step))];
    const box = this.svg.getBoundingClientRect();
    this.read(next, box.left + (this.x(next) / this.width) * box.width, box.top + box.height / 2);
    this.at = next;
  }

  /** Show the values of all curves nearest to `at`, and the same place in every other chart. */
  read(at, clientX, clientY) {
    const found = this.curves.map((curve) => [curve, closest(curve.points, at)]).filter(([, p]) => p);
    if (!found.length) return;
    const lead = found.map(([, p]) => p).sort((a, b) => Math.abs(a.x - at) - Math.abs(b.x - at))[0];
    const least = (this.range.right - this.range.left) * 0.003;
    const nearest = found.filter(([curve, p]) => Math.abs(p.x - lead.x) <= Math.max(least, reach(curve.points, p)));
    this.dots.replaceChildren(...nearest.map(([curve, p]) =>
      draw("circle", { cx: this.x(p.x), cy: this.y(p.y), r: 4, style: { fill: runColour(curve.run) } })));
    LineChart.all.forEach((chart) => chart.mark(lead.x));
    const box = this.svg.getBoundingClientRect(), pointed = ((clientY - box.top) / box.height) * HEIGHT;
    const away = ([, p]) => Math.abs(this.y(p.y) - pointed);
    const listed = new Set([...nearest].sort((a, b) => away(a) - away(b)).slice(0, MOST_VALUES));
    const rows = nearest.filter((one) => listed.has(one)).map(([curve, p]) => {
      const who = DATA.runs.length > 1 ? `${DATA.runs[curve.run].name}: ${curve.name}` : curve.name;
      const swatch = make("i", { class: "swatch", style: { "--c": runColour(curve.run) } });
      const spread = p.low !== p.high ? ` (${compact(p.low)} to ${compact(p.high)})` : "";
      return make("div", { class: "row" }, make("span", {}, swatch, named(who)), make("b", {}, `${compact(p.y)}${spread}`));
    });
    const head = shown.axis === "step" ? `step ${whole(lead.x)}` : `${shown.axis} ${compact(lead.x)}, step ${whole(lead.step)}`;
    const rest = nearest.length - rows.length;
    if (rest) rows.push(make("div", { class: "row" }, make("span", {}, `and ${whole(rest)} more; those nearest to the pointer are shown`)));
    showTip(clientX, clientY, make("div", { class: "row" }, make("span", {}, head)), ...rows);
  }

  mark(at) {
    if (!this.range || !this.cross) return;
    const inside = at >= this.range.left && at <= this.range.right;
    this.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    this.cross.setAttribute("x1", this.x(at));
    this.cross.setAttribute("x2", this.x(at));
  }

  static leave() {
    hideTip();
    LineChart.all.forEach((chart) => {
      chart.at = undefined;
      chart.cross?.setAttribute("visibility", "hidden");
      chart.dots?.replaceChildren();
    });
  }
}
LineChart.all = [];

/** The runs of points between gaps. */
function pieces(points) {
  const parts = [[]];
  for (const point of points) {
    if (point) parts.at(-1).push(point);
    else if (parts.at(-1).length) parts.push([]);
  }
  return parts.filter((part) => part.length);
}

function closest(points, at) {
  let best = null;
  for (const p of points) if (p && (!best || Math.abs(p.x - at) < Math.abs(best.x - at))) best = p;
  return best;
}

/** How far a point speaks for its curve: half way to the farther of its neighbours. */
function reach(points, point) {
  const places = points.filter(Boolean).map((p) => p.x), n = places.indexOf(point.x);
  return Math.max(n > 0 ? point.x - places[n - 1] : 0, n + 1 < places.length ? places[n + 1] - point.x : 0) / 2;
}

/** A chip for each run, in the groups of what differs; a group's name shows or hides all of its runs. */
function startLegend(renderAll) {
  const groups = new Map();
  DATA.runs.forEach(({ group }, number) => groups.set(group, [...(groups.get(group) || []), number]));
  const chips = DATA.runs.map((run, number) => make("button", {
    class: "plain chip", type: "button", title: `show or hide ${run.name}`, onclick: () => toggle([number]),
  }, make("i", { class: "swatch", style: { "--c": runColour(number) } }), named(run.label)));
  const toggle = (numbers) => {
    const hide = numbers.some((number) => !shown.hidden.has(number));
    numbers.forEach((number) => (hide ? shown.hidden.add(number) : shown.hidden.delete(number)));
    update();
    renderAll();
  };
  const update = () => chips.forEach((chip, number) => chip.setAttribute("aria-pressed", String(!shown.hidden.has(number))));
  byId("legend").append(...[...groups].map(([group, numbers]) => make("div", { class: "tools", role: "group", "aria-label": group || "runs" },
    group ? make("button", { class: "plain group", type: "button", title: "show or hide these runs", onclick: () => toggle(numbers) }, named(group)) : null,
    numbers.map((number) => chips[number]))));
  update();
}

function startCharts() {
  const box = byId("charts");
  if (!box) return;
  LineChart.all = DATA.charts.map((chart) => new LineChart(chart));
  box.append(...LineChart.all.map((chart) => chart.card));
  const renderAll = () => LineChart.all.forEach((chart) => chart.render());
  byId("chart-tools").append(chooser("over", AXES.map((axis) => [axis, axis]), (axis) => { shown.axis = axis; renderAll(); }));
  if (DATA.runs.length > 1) startLegend(renderAll);
  new ResizeObserver(renderAll).observe(box);
  renderAll();
}
