"use strict";
// Puts the parts together: charts, and the predictions of one run at a time.

function prepared(detail) {
  if (detail.several) return detail;
  const [truths, predictions, counts] = detail.matrix;
  const key = (truth, predicted) => truth * detail.classes.length + predicted;
  const cells = truths.map((truth, place) => [truth, predictions[place], counts[place]]);
  const countOf = new Map(cells.map(([truth, predicted, count]) => [key(truth, predicted), count]));
  const shown = new Map(detail.shownCells.map(([truth, predicted, rows]) => [key(truth, predicted), rows]));
  return { ...detail, key, cells, shown, count: (truth, predicted) => countOf.get(key(truth, predicted)) || 0 };
}

function showDetail(detail) {
  fillGallery("mistakes", detail, detail.mistakes, "No mistake: every image is recognised.");
  fillGallery("unsure", detail, detail.unsure, detail.several ? "No image gets all of its labels and no other." : "No image is recognised.");
  if (detail.several) {
    startTogether(detail);
    startClasses(labelRows(detail));
    return;
  }
  byId("cell").hidden = true;
  byId("matrix-note").textContent = detail.matrixNote;
  startMatrix(detail);
  startClasses(classRows(detail));
  startReliability(detail);
}

/** A button for each of several runs that shows its part; none for a single one. */
function runChooser(words, parts, show) {
  if (parts.length < 2) return [];
  const buttons = parts.map((part, number) => make("button", {
    class: "plain chip choice", type: "button", "aria-pressed": String(!number),
    onclick: (event) => {
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.currentTarget)));
      show(part);
    },
  }, make("i", { class: "swatch", style: { "--c": runColour(part.run) } }), named(DATA.runs[part.run].name)));
  return [make("span", { class: "soft small" }, words), ...buttons];
}

function startDetails() {
  const details = DATA.details.map((detail) => ({ ...detail, classes: DATA.classes[detail.classes] })).map(prepared);
  if (!details.length) {
    if (DATA.classTable) startClasses(DATA.classTable);
    return;
  }
  byId("detail-runs").append(...runChooser("predictions of", details, showDetail));
  showDetail(details[0]);
}

/** Mark in the navigation which part is in view. */
function startNavigation() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const inView = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) isIntersecting ? inView.add(target.id) : inView.delete(target.id);
    const first = [...links.keys()].find((id) => inView.has(id));
    links.forEach((link, id) => (id === first ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  }, { rootMargin: "-70px 0px -45% 0px" });
  links.forEach((_, id) => byId(id) && observer.observe(byId(id)));
}

startCharts();
startDetails();
startFeatures();
startNavigation();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => startMatrix.again?.());
