"use strict";
// Several labels an image: pictures with what is missing and superfluous, and which labels are together.
// By state: right, missing, superfluous, given though nobody knows whether it is there.
const STATES = [["--hit", ""], ["--miss", "missing: "], ["--miss", "superfluous: "], ["--hit", "given, not known: "]];

/** A picture with the labels that it has and gets. */
function labelCard(detail, row) {
  const [id, picture, labels, count, size, heat] = detail.rows[row];
  const words = STATES.map(([, text], state) => {
    const found = labels.filter(([, , one]) => one === state);
    if (!found.length || !state) return null;
    return make("p", { class: "verdict" }, text, found.map(([label], n) => [n ? ", " : "", make("b", { class: state === 3 ? "soft" : "wrong-ink" }, named(detail.classes[label]))]));
  });
  const wrong = labels.some(([, , state]) => state === 1 || state === 2);
  if (!wrong) words.unshift(make("p", { class: "verdict" }, make("b", { class: "right-ink" }, count ? plural(count, "label") : "no label")));
  const bars = labels.map(([label, share, state]) => [
    make("span", { class: "class", title: detail.classes[label], style: { "--p": cssPercent(share), "--bar": `var(${STATES[state][0]})` } }, named(detail.classes[label])),
    make("span", { class: "number" }, odds(share)),
  ]);
  const more = count > labels.length ? make("p", { class: "soft" }, `and ${count - labels.length} more`) : null;
  return make("li", { class: "sample" }, pictureOf(picture, heat, size, id, labels.map(([label]) => detail.classes[label]).join(", ") || "an image without a label"),
    make("div", { class: "words" }, words, make("div", { class: "odds" }, bars), more, make("p", { class: "id", title: id }, make("bdi", {}, id))));
}

/** Both tables of labels that are together, in one scale of colours, and the pairs whose numbers differ most. */
function startTogether(detail) {
  const { labels, true: truth, given } = detail.together;
  const apart = (rows) => rows.flatMap((row, n) => row.filter((_, m) => m !== n));
  const most = Math.max(1, ...apart(truth), ...apart(given));
  const few = labels.length < detail.classes.length ? `The tables show the ${labels.length} most frequent of ${detail.classes.length} labels. ` : "";
  byId("together-words").textContent = `${few}From top left to bottom right: how often a label is there, and given.`;
  const render = () => {
    byId("together-true").replaceChildren(togetherTable(detail, truth, most, "both are in truth"));
    byId("together-given").replaceChildren(togetherTable(detail, given, most, "get both"));
  };
  startMatrix.again = render; // in the colours of the day or of the night
  render();
  const items = detail.pairs.map(([one, two, first, second]) => {
    const bar = (count, colour) => make("span", { class: "bar", style: { "--p": cssPercent(count / Math.max(first, second)), "--bar": colour } });
    return make("li", {}, make("div", {}, make("span", {}, named(detail.classes[one]), make("span", { class: "soft" }, " and "), named(detail.classes[two])),
      make("span", { class: "number" }, make("span", { class: "right-ink" }, whole(first)), "\u2002", make("span", { class: "wrong-ink" }, whole(second))),
      bar(first, "var(--hit)"), bar(second, "var(--miss)")));
  });
  byId("pairs").replaceChildren(...(items.length ? items : [make("li", { class: "soft" }, "Every two labels are given together as often as they are together.")]));
}

function togetherTable(detail, counts, most, words) {
  const { labels } = detail.together, names = labels.map((label) => detail.classes[label]);
  const longest = Math.max(...names.map((name) => name.length)), width = Math.min(8 * longest + 8, innerWidth < 620 ? 72 : 130);
  const size = Math.max(22, Math.min(52, Math.floor((byId("together-true").clientWidth - width - 12) / labels.length - 2)));
  const cell = (row, column) => {
    const count = counts[row][column], alpha = row === column ? 0 : strength(count / most);
    const text = row === column ? [named(names[row]), `: ${plural(count, "image")}`] : [named(names[row]), " and ", named(names[column]), `: ${plural(count, "image")} ${words}`];
    return make("td", {}, make("span", {
      class: row === column ? "cell own" : "cell",
      style: alpha ? { background: `rgb(var(--hit) / ${alpha.toFixed(3)})`, color: inkOn("--hit", alpha) } : {},
      onpointermove: (event) => showTip(event.clientX, event.clientY, make("span", {}, text)), onpointerleave: hideTip,
    }, count ? (count > 9999 ? compact(count) : String(count)) : ""));
  };
  const title = (name) => make("span", {}, named(name));
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Labels together: ${words}` }, make("table", { class: `matrix-table ${longest > 3 ? "turned" : ""} ${size < 28 ? "small" : ""}`, style: { "--cell": `${size}px`, "--labels": `${width}px` } },
    make("thead", {}, make("tr", {}, make("td", {}), names.map((name) => make("th", { scope: "col", title: name }, title(name))))),
    make("tbody", {}, names.map((name, row) => make("tr", {}, make("th", { scope: "row", title: name }, title(name)), names.map((_, column) => cell(row, column)))))));
}

/** Rows of the table of labels from predictions. */
function labelRows(detail) {
  return detail.classes.map((name, number) => ({
    name, number, several: true, support: detail.support[number], known: detail.known[number], ap: detail.precision[number], auroc: detail.auroc[number],
    f1: detail.f1[number], threshold: detail.thresholds[number], missed: detail.missed[number], superfluous: detail.superfluous[number],
  }));
}
