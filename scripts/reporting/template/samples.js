"use strict";
// Pictures with the network's answers: the galleries, and the images of a cell of the confusion matrix.

/** A card: a picture with lines below it, and the image's name. */
function card(picture, id, ...words) {
  return make("li", { class: "sample" }, picture,
    make("div", { class: "words" }, words, make("p", { class: "id", title: id }, make("bdi", {}, id))));
}

/** Probabilities as bars; `answers` holds a class, its probability and the bar's colour each. */
function bars(classes, answers) {
  return make("div", { class: "odds" }, answers.map(([one, share, colour]) => [
    make("span", { class: "class", title: classes[one], style: { "--p": cssPercent(share), "--bar": colour } }, named(classes[one])),
    make("span", { class: "number" }, percent(share)),
  ]));
}

/** A picture with its truth and likeliest classes. `detail` is the run's data, `row` a place in its `rows`. */
function sampleCard(detail, row) {
  if (detail.several) return labelCard(detail, row);
  const [id, picture, truth, likely, ofTruth, size, heat] = detail.rows[row];
  const predicted = likely[0][0];
  const answers = likely.some(([one]) => one === truth) ? likely : [...likely.slice(0, 2), [truth, ofTruth]];
  const words = [make("b", { class: "right-ink" }, named(detail.classes[truth]))];
  if (truth !== predicted) words.push(" taken for ", make("b", { class: "wrong-ink" }, named(detail.classes[predicted])));
  return card(pictureOf(picture, heat, size, id, `an image of ${detail.classes[truth]}`), id, make("p", { class: "verdict" }, words),
    bars(detail.classes, answers.map(([one, share]) => [one, share, one === truth ? "var(--hit)" : "var(--miss)"])));
}

function pictureOf(picture, heat, size, id, words) {
  if (picture === null) return make("div", { class: "picture" }, "no picture");
  const one = (place, text) => make("img", {
    src: DATA.images[place], alt: text, title: id, loading: "lazy", decoding: "async", class: size <= 64 ? "small-pixels" : null,
  });
  const images = [one(picture, words)];
  if (heat !== null && heat !== undefined) images.push(one(heat, "heat map of the prediction"));
  return make("div", { class: images.length > 1 ? "picture double" : "picture" }, images);
}

/** The kind of a gallery of these samples: wide if there are heat maps beside the pictures. */
const widthOf = (detail, rows) => (rows.some((row) => detail.rows[row].at(-1) !== null) ? "wide" : "");

/** Fill a part of the page with cards, made by functions, of which the first are shown, or with why there is none. */
function fill(id, cards, first, none, kind = "") {
  if (!cards.length) return byId(id).replaceChildren(make("p", { class: "soft" }, none));
  const list = make("ul", { class: `gallery ${kind}` }, cards.slice(0, first).map((one) => one())), more = cards.slice(first);
  const button = make("button", {
    class: "plain more", type: "button", onclick: () => { list.append(...more.map((one) => one())); button.remove(); },
  }, `Show ${more.length} more`);
  return byId(id).replaceChildren(list, ...(more.length ? [button] : []));
}

function fillGallery(id, detail, rows, none) {
  const wide = widthOf(detail, rows);
  const first = innerWidth < 620 ? 8 : wide ? 15 : 16; // whole rows, also of wider cards
  fill(id, rows.map((row) => () => sampleCard(detail, row)), first, none, wide);
}

/** The images of the cell (truth, predicted) under the matrix. */
function showCell(detail, truth, predicted) {
  const count = detail.count(truth, predicted);
  const rows = detail.shown.get(detail.key(truth, predicted)) || [];
  const right = truth === predicted;
  const head = right
    ? [named(detail.classes[truth]), ` recognised: ${plural(count, "image")}`]
    : [named(detail.classes[truth]), " taken for ", named(detail.classes[predicted]), `: ${plural(count, "image")}`];
  const of = detail.support[truth] ? percent(count / detail.support[truth]) : "-";
  let which = `${of} of this class. `;
  if (!rows.length && count) which += "Its pictures had no room in this file.";
  else if (rows.length < count) which += `The ${rows.length} of which the network is ${right ? "least" : "most"} sure:`;
  const box = byId("cell");
  const close = make("button", { class: "plain", type: "button", onclick: () => { box.hidden = true; detail.mark(null); } }, "Close");
  const title = make("h3", { tabindex: -1 }, head);
  box.hidden = false;
  box.replaceChildren(make("div", { class: "head" }, make("div", {}, title, make("p", { class: "soft small" }, which)), close),
    make("ul", { class: `gallery compact ${widthOf(detail, rows)}` }, rows.map((row) => sampleCard(detail, row))));
  detail.mark([truth, predicted]);
  title.focus({ preventScroll: true });
  box.scrollIntoView({ block: "nearest" });
}
