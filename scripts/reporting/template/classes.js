"use strict";
// Figures of each class as a table with bars, and the reliability diagram.
const LOW = 0.5; // an accuracy below this is drawn as a warning

const CLASS_COLUMNS = [
  ["class", "Class", (row) => row.name], ["count", "Images", (row) => row.support], ["share", "Accuracy (recall)", (row) => row.accuracy, "no images"],
  ["part", "Precision", (row) => row.precision], ["part", "F1", (row) => row.f1], ["pair", "Most often taken for", (row) => (row.pair ? row.pair.count / row.support : 0)],
];
const LABEL_COLUMNS = [
  ["class", "Label", (row) => row.name], ["count", "Images with it", (row) => row.support], ["share", "Average precision", (row) => row.ap, "on no image"],
  ["part", "AUROC", (row) => row.auroc], ["part", "F1 at 0.5", (row) => row.f1], ["plain", "Threshold", (row) => row.threshold],
  ["count", "Missing", (row) => row.missed], ["count", "Superfluous", (row) => row.superfluous], ["count", "Known", (row) => row.known],
];

function startClasses(rows) {
  const shown = (column) => (column[0] === "pair" ? rows.some((row) => row.pair) : rows.some((row) => column[2](row) !== undefined));
  const columns = (rows[0].several ? LABEL_COLUMNS : CLASS_COLUMNS).filter(shown);
  const body = make("tbody", {});
  const heads = columns.map(([kind, text]) => make("th", { scope: "col", class: ["count", "part", "plain"].includes(kind) ? "number" : null },
    make("button", { type: "button", class: "sort" }, text)));
  const show = (sorted) => body.replaceChildren(...sorted.map((row) => make("tr", {}, columns.map((column) => classCell(column, row)))));
  const state = { column: 2, up: true, filter: "" };
  const update = () => {
    const value = columns[state.column][2], sign = state.up ? 1 : -1;
    const order = (a, b) => (typeof value(a) === "string" ? value(a).localeCompare(value(b), "en", { numeric: true }) : (value(a) ?? 2) - (value(b) ?? 2));
    const wanted = rows.filter((row) => row.name.toLowerCase().includes(state.filter));
    show([...wanted].sort((a, b) => sign * order(a, b) || a.number - b.number));
    heads.forEach((head, n) => (n === state.column ? head.setAttribute("aria-sort", state.up ? "ascending" : "descending") : head.removeAttribute("aria-sort")));
  };
  heads.forEach((head, n) => head.firstChild.addEventListener("click", () => {
    state.up = n === state.column ? !state.up : columns[n][0] === "class" || n === 2;
    state.column = n;
    update();
  }));
  const table = make("table", {}, make("thead", {}, make("tr", {}, heads)), body);
  const filter = make("input", {
    type: "search", placeholder: "filter classes", "aria-label": "filter classes",
    oninput: (event) => { state.filter = event.target.value.toLowerCase(); update(); },
  });
  byId("classes").replaceChildren(make("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Figures of each class" }, table));
  byId("class-tools").replaceChildren(...(rows.length > 20 ? [filter] : []));
  update();
}

/** A cell of a class's row; `data-name` names a figure where a narrow page has no columns. */
function classCell([kind, text, value, none], row) {
  if (kind === "class") return make("th", { scope: "row" }, named(row.name));
  if (kind === "share") {
    const share = value(row);
    if (share === null) return make("td", { class: "soft wide" }, none);
    return make("td", { class: "wide" }, make("div", { class: share < LOW ? "share low" : "share" },
      make("i", { style: { "--p": cssPercent(share) } }), make("span", { class: "number" }, percent(share))));
  }
  if (kind === "pair") {
    return make("td", { class: "wide", "data-name": text }, row.pair ? [named(row.pair.name), make("span", { class: "soft" }, ` ${percent(row.pair.count / row.support)}`)] : "\u2013");
  }
  const words = { count: whole, plain: compact, part: percent }[kind];
  return make("td", { class: "number", "data-name": text }, value(row) === null ? "\u2013" : words(value(row)));
}

/** Rows of the table from predictions. */
function classRows(detail) {
  const worst = new Map();
  for (const [truth, predicted, count] of detail.cells) {
    if (truth !== predicted && !worst.has(truth)) worst.set(truth, { name: detail.classes[predicted], count });
  }
  return detail.classes.map((name, number) => {
    const support = detail.support[number], taken = detail.taken[number], hits = detail.hits[number];
    return {
      name, number, support, accuracy: support ? hits / support : null,
      precision: taken ? hits / taken : support ? 0 : null, f1: support + taken ? (2 * hits) / (support + taken) : null, pair: worst.get(number),
    };
  });
}

const SHARES = [0, 0.25, 0.5, 0.75, 1];

/** Draw both diagrams, now and whenever the width of the page changes. */
function startReliability(detail) {
  byId("calibration-words").textContent = detail.calibration;
  startReliability.observer?.disconnect();
  startReliability.observer = new ResizeObserver(() => {
    const width = byId("reliability").clientWidth;
    if (!width) return; // the page is being left
    byId("reliability").replaceChildren(reliability(detail, width));
    byId("confidences").replaceChildren(confidences(detail, width));
  });
  startReliability.observer.observe(byId("reliability"));
}

/** An empty diagram over the confidence, `width` pixels wide, and what places things in it. */
function overConfidence(width, label) {
  const height = Math.min(340, 0.72 * width), left = 46, top = 10, side = height - 48, wide = width - left - 12;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const x = (share) => left + share * wide, base = top + side;
  for (const mark of SHARES) svg.append(draw("text", { x: x(mark), y: base + 18, "text-anchor": "middle" }, `${100 * mark}`));
  svg.append(draw("text", { x: x(0.5), y: height - 3, "text-anchor": "middle" }, "confidence (%)"));
  const line = (y, text) => svg.append(draw("line", { class: "grid", x1: left, x2: x(1), y1: y, y2: y }),
    draw("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, text));
  const bar = (at, step, words, ...parts) => svg.append(draw("g", {
    onpointermove: (event) => showTip(event.clientX, event.clientY, make("span", {}, words)), onpointerleave: hideTip,
  }, parts.map(([y, tall, fill]) => draw("rect", { x: x(at) + 1, y, width: wide * step - 2, height: Math.max(0, tall), style: { fill } }))));
  return { svg, x, base, side, line, bar };
}

function reliability(detail, width) {
  const { svg, x, base, side, line, bar } = overConfidence(width, `Reliability diagram. ${detail.calibration}`);
  const y = (share) => base - share * side;
  for (const mark of SHARES) line(y(mark), `${100 * mark} %`);
  detail.bins.forEach(([count, confidence, accuracy], n) => {
    if (!count) return;
    const step = 1 / detail.bins.length, low = Math.min(confidence, accuracy), high = Math.max(confidence, accuracy);
    const words = `Confidence ${percent(n * step)} to ${percent(n * step + step)}: ${plural(count, "image")}, on average ${percent(confidence)} sure and ${percent(accuracy)} right`;
    const gap = accuracy > confidence ? "rgb(var(--hit) / .3)" : "rgb(var(--miss) / .4)";
    bar(n * step, step, words, [y(low), y(0) - y(low), "rgb(var(--hit) / .85)"], [y(high), y(low) - y(high), gap]);
  });
  svg.append(draw("line", { x1: x(0), y1: y(0), x2: x(1), y2: y(1), style: { stroke: "var(--soft)", "stroke-dasharray": "5 4" } }));
  return svg;
}

/** Right and wrong answers over the confidence, stacked, on a root scale, so that a few wrong ones show. */
function confidences(detail, width) {
  const [wrong, right] = detail.confidences, most = Math.max(1, ...wrong.map((n, place) => n + right[place]));
  const { svg, base, side, line, bar } = overConfidence(width, "How often the network is how sure, of right and of wrong answers.");
  const y = (n) => base - side * Math.sqrt(n / most);
  const marks = [0.02, 0.1, 0.4, 1].map((share) => Math.round(share * most));
  for (const mark of new Set(marks.filter(Boolean))) line(y(mark), compact(mark));
  wrong.forEach((bad, n) => {
    const step = 1 / wrong.length, good = right[n];
    const words = `Confidence ${percent(n * step)} to ${percent(n * step + step)}: ${whole(good)} right, ${whole(bad)} wrong`;
    bar(n * step, step, words, [y(good + bad), y(bad) - y(good + bad), "rgb(var(--hit) / .85)"], [y(bad), base - y(bad), "rgb(var(--miss))"]);
  });
  return svg;
}
