"use strict";
// Elements are made here alone: text goes through textContent and attributes through setAttribute, so no name of a
// class and no path can become markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function draw(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "style") for (const [name, text] of Object.entries(value)) element.style.setProperty(name, text);
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const named = (text) => make("span", { class: "name" }, text);
const byId = (id) => document.getElementById(id);
const whole = (number) => number.toLocaleString("en-US");
/** A share as CSS takes it. */
const cssPercent = (share) => `${(100 * share).toFixed(2)}%`;
const plural = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
const runColour = (run) => `var(--run-${run % 8})`;
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A share in percent, honest about its ends: what is not quite 1 never reads as 100 %, nor what is not 0 as 0 %. */
function percent(share) {
  if (share > 0.9995 && share < 1) return "> 99.9 %";
  if (share < 0.0005 && share > 0) return "< 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

function compact(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1e4) return whole(Math.round(value));
  return String(Number(value.toPrecision(4)));
}

const tip = byId("tip");
function showTip(x, y, ...lines) {
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(6, y - height - 12) : y + 18}px`;
}
function hideTip() {
  tip.hidden = true;
}
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

/** A select with a label; calls `changed` with the chosen value. */
function chooser(label, options, changed) {
  const items = options.map(([value, text]) => make("option", { value }, text));
  return make("label", {}, label, make("select", { onchange: (event) => changed(event.target.value) }, items));
}
