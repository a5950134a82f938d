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
  const answers = labels.map(([label, share, state]) => [label, share, `var(${STATES[state][0]})`]);
  const more = count > labels.length ? make("p", { class: "soft" }, `and ${count - labels.length} more`) : null;
  const names = labels.map(([label]) => detail.classes[label]).join(", ") || "an image without a label";
  return card(pictureOf(picture, heat, size, id, names), id, words, bars(detail.classes, answers), more);
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
  const names = detail.together.labels.map((label) => detail.classes[label]);
  const cell = (row, column) => {
    const count = counts[row][column], alpha = row === column ? 0 : strength(count / most);
    const text = row === column ? [named(names[row]), `: ${plural(count, "image")}`] : [named(names[row]), " and ", named(names[column]), `: ${plural(count, "image")} ${words}`];
    return make("span", {
      class: row === column ? "cell own" : "cell",
      style: alpha ? { background: `rgb(var(--hit) / ${alpha.toFixed(3)})`, color: inkOn("--hit", alpha) } : {},
      onpointermove: (event) => showTip(event.clientX, event.clientY, make("span", {}, text)), onpointerleave: hideTip,
    }, count ? (count > 9999 ? compact(count) : String(count)) : "");
  };
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Labels together: ${words}` },
    matrixTable(names, byId("together-true").clientWidth, 130, 52, cell));
}

/** Rows of the table of labels from predictions. */
function labelRows(detail) {
  return detail.classes.map((name, number) => ({
    name, number, several: true, support: detail.support[number], known: detail.known[number], ap: detail.precision[number], auroc: detail.auroc[number],
    f1: detail.f1[number], threshold: detail.thresholds[number], missed: detail.missed[number], superfluous: detail.superfluous[number],
  }));
}
