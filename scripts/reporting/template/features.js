"use strict";
// What features tell: figures, nearest neighbours, doubtful labels, near duplicates, a map. One run at a time.

const FIRST_CARDS = 21;
const MAP = { width: 900, height: 620, margin: 24 };
const MOST_NAMED = 30; // classes whose names stand on the map

/** A card of an image; `row` is a place in the run's `rows`. */
function featureCard(of, row, lines) {
  const [id, picture, label, size] = of.rows[row];
  return card(pictureOf(picture, null, size, id, `an image of ${of.classes[label]}`), id, lines);
}

function neighbourRow(of, [row, near]) {
  const [, , label] = of.rows[row];
  const verdict = (text, right) => make("b", { class: right ? "right-ink" : "wrong-ink" }, named(text));
  return make("ul", { class: "gallery neighbours" },
    featureCard(of, row, make("p", { class: "verdict" }, make("b", {}, named(of.classes[label])))),
    near.map(([other, cosine]) => featureCard(of, other, [
      make("p", { class: "verdict" }, verdict(of.classes[of.rows[other][2]], of.rows[other][2] === label)),
      make("p", { class: "soft small" }, `cosine ${cosine.toFixed(3)}`),
    ])));
}

function doubtCard(of, [row, label, likely, own, share, votes, split, confident]) {
  return () => featureCard(of, row, [
    make("p", { class: "verdict" }, make("b", { class: "wrong-ink" }, named(of.classes[label])), ", or rather ",
      make("b", { class: "right-ink" }, named(of.classes[likely])), "?"),
    bars(of.classes, [[label, own, "var(--miss)"], [likely, share, "var(--hit)"]]),
    make("p", { class: "soft small facts" }, `${votes} of ${of.neighbourCount} neighbours agree; ${split}${confident ? ", confident joint" : ""}`),
  ]);
}

function duplicatePair(of, [first, second, likeness, cosine, splits]) {
  const same = of.rows[first][2] === of.rows[second][2];
  const one = (row, split) => featureCard(of, row, [
    make("p", { class: "verdict" }, make("b", { class: same ? null : "wrong-ink" }, named(of.classes[of.rows[row][2]]))),
    make("p", { class: "soft small" }, `${split}; likeness ${likeness.toFixed(3)}, cosine ${cosine.toFixed(3)}`),
  ]);
  return () => make("li", { class: "copy" }, make("ul", { class: "gallery" }, one(first, splits[0]), one(second, splits[1])));
}

const classColour = (label, classes) => `hsl(${Math.round((360 * label) / classes)} 65% 50%)`;

function drawMap(of) {
  const { x, y, label, id, doubted } = of.map, count = of.classes.length;
  const scale = (values, size) => {
    const low = Math.min(...values), span = Math.max(...values) - low || 1;
    return (value) => MAP.margin + ((value - low) / span) * (size - 2 * MAP.margin);
  };
  const left = scale(x, MAP.width), top = scale(y, MAP.height);
  const dots = x.map((_, n) => draw("circle", {
    cx: left(x[n]).toFixed(1), cy: top(y[n]).toFixed(1), r: 3.6, class: doubted[n] ? "dot doubted" : "dot",
    style: { fill: classColour(label[n], count) },
    onpointermove: (event) => showTip(event.clientX, event.clientY, make("div", {}, make("b", {}, named(of.classes[label[n]])),
      doubted[n] ? " (doubtful)" : ""), make("div", { class: "small" }, id[n])),
    onpointerleave: hideTip,
  }));
  const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const names = count > MOST_NAMED ? [] : of.classes.map((name, one) => {
    const own = label.map((value, n) => (value === one ? n : -1)).filter((n) => n >= 0);
    if (!own.length) return null;
    const at = [left(median(own.map((n) => x[n]))), top(median(own.map((n) => y[n])))];
    const wide = Math.min(name.length, 18) * 4.6;
    const centre = Math.max(wide, Math.min(MAP.width - wide, at[0]));
    return draw("text", { x: centre.toFixed(1), y: at[1].toFixed(1), "text-anchor": "middle" },
      name.length > 18 ? `${name.slice(0, 17)}…` : name);
  }).filter(Boolean);
  byId("feature-map").replaceChildren(draw("svg", {
    viewBox: `0 0 ${MAP.width} ${MAP.height}`, role: "img", "aria-label": of.mapWords, class: "map",
  }, dots, names));
}

function showFeatures(of) {
  const rows = of.figures.map(([name, value, interval, apart, method]) => make("tr", {},
    make("th", { scope: "row" }, name), [value, interval, apart].map((text) => make("td", { class: "number" }, text)),
    make("td", { class: "soft small how" }, method)));
  const [figure, interval] = of.heads;
  const heads = ["Classifier", `${figure}, ${of.scored}`, interval, "without copies", "How"];
  byId("feature-figures").replaceChildren(
    make("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "Accuracy of the features" },
      make("table", {}, make("thead", {}, make("tr", {}, heads.map((head, n) =>
        make("th", { scope: "col", class: n && n < 4 ? "number" : null }, head)))), make("tbody", {}, rows))),
    ...of.notes.map((note) => make("p", { class: "note" }, note)));
  byId("neighbours").replaceChildren(...of.neighbours.map((one) => neighbourRow(of, one)));
  byId("doubtful-words").textContent = of.doubtfulWords;
  fill("doubtful-list", of.doubtful.map((one) => doubtCard(of, one)), FIRST_CARDS, "No label is doubted.");
  byId("duplicates-words").textContent = of.duplicatesWords;
  fill("duplicates-list", of.duplicates.map((one) => duplicatePair(of, one)), FIRST_CARDS, "There are none.", "copies");
  byId("map-words").textContent = of.mapWords;
  drawMap(of);
}

function startFeatures() {
  const all = DATA.features.map((of) => ({ ...of, classes: DATA.classes[of.classes] }));
  if (!all.length) return;
  byId("feature-runs").append(...runChooser("features of", all, showFeatures));
  showFeatures(all[0]);
}
