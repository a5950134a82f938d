"use strict";

const $ = (id) => document.getElementById(id);
const COARSE = 64; // pixels: an image that is not wider is enlarged
const LIVE_PAUSE = 60; // milliseconds between two images of the camera
const HINT = $("hint").textContent; // of an image without a heat map it says why
let model = null;
let current = null; // the file that is shown
let stream = null; // of the camera
let asked = 0; // the latest image's number; answers to earlier ones are dropped

// ---------------------------------------------------------------------------- the server

async function ask(path, body) {
  let response;
  try {
    response = await fetch(path, body ? { method: "POST", body } : {});
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || `The server answered ${response.status}`);
  return answer;
}

async function begin() {
  model = await ask("/model");
  $("arch").textContent = model.arch;
  document.title = `${model.arch}: try it out`;
  const views = model.tta === "none" ? "" : `, test-time augmentation ${model.tta}`;
  const [height, width = height] = [model.image_size].flat();
  $("about").textContent =
    `${model.classes.length} classes, ${height} × ${width} pixels${views}, ${model.checkpoint}`;
}

// ---------------------------------------------------------------------------- an image

async function take(file) {
  stopCamera();
  const number = ++asked;
  current = file;
  showPicture(file);
  $("views").hidden = true;
  $("heat").hidden = true;
  if (model && file.size > 1e6 * model.megabytes) {
    fail(new Error(`The file has more than ${model.megabytes} MB.`));
    return;
  }
  say("Looking at it …", "quiet");
  try {
    const began = performance.now();
    const answer = await ask("/predict", file);
    if (number !== asked) return;
    showClasses(answer);
    const milliseconds = Math.round(performance.now() - began);
    $("facts").textContent = `${answer.width} × ${answer.height} pixels, answered in ${milliseconds} ms`;
    $("hint").textContent = HINT;
    $("hint").hidden = false;
    $("views").hidden = false;
    showHeat(answer.top[0].index);
  } catch (error) {
    if (number === asked) fail(error);
  }
}

function showPicture(file) {
  const picture = $("picture");
  if (picture.dataset.image) URL.revokeObjectURL(picture.dataset.image);
  picture.dataset.image = URL.createObjectURL(file);
  picture.onload = () => {
    picture.hidden = false; // the server's picture, where the browser could not show the file
    picture.classList.toggle("coarse", picture.naturalWidth <= COARSE);
  };
  picture.onerror = () => (picture.hidden = true); // the server says why
  delete picture.dataset.seen;
  showView();
  $("invitation").hidden = true;
  $("stage").hidden = picture.hidden = false;
  $("drop").classList.add("full");
}

function showClasses(answer) {
  const labels = answer.labels || []; // of a network that gives several: those from their thresholds on, perhaps none
  const given = new Set(labels.map((one) => one.index));
  const share = percent(answer.probability);
  if (answer.labels) say(labels.map((one) => one.class).join(", ") || "No label reaches its threshold.");
  else say(answer.rejected ? `None of the classes; likeliest is ${answer.rejected}, ${share}` : `${answer.class}, ${share}`);
  const others = answer.top.filter((one) => !given.has(one.index));
  $("classes").replaceChildren(...[...labels, ...others].map((one) => row(one, given.has(one.index))));
}

function row(one, given) {
  const button = document.createElement("button");
  button.type = "button";
  button.classList.toggle("given", given);
  button.dataset.index = one.index;
  button.setAttribute("aria-pressed", "false");
  button.append(bar(one.probability), text(one.class), text(percent(one.probability), "share"));
  button.onclick = () => showHeat(one.index, true);
  const item = document.createElement("li");
  item.append(button);
  return item;
}

function bar(share) {
  const name = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(name, "svg");
  const rectangle = document.createElementNS(name, "rect");
  rectangle.setAttribute("width", `${100 * share}%`);
  rectangle.setAttribute("height", "100%");
  svg.setAttribute("aria-hidden", "true");
  svg.append(rectangle);
  return svg;
}

function text(content, kind = "") {
  const span = document.createElement("span");
  span.textContent = content;
  span.className = kind;
  return span;
}

function percent(share) {
  if (share > 0.9995 || share < 0.0005) return share < 0.5 ? "< 0.1 %" : "> 99.9 %";
  return `${(100 * share).toFixed(1)} %`;
}

function say(line, kind = "") {
  $("status").textContent = line;
  $("status").className = kind;
}

function fail(error) {
  say(error.message, "bad");
  $("classes").replaceChildren();
  $("hint").hidden = true;
  $("facts").textContent = "";
}

// ---------------------------------------------------------------------------- the heat map

async function showHeat(index, chosen = false) {
  if (!current || stream) return;
  const number = asked;
  try {
    const answer = await ask(`/heat_map?class=${index}`, current);
    if (number !== asked) return;
    $("picture").dataset.seen = answer.seen;
    $("heat").src = answer.heat;
    $("heat").alt = `Where the network finds ${answer.class}`;
    for (const button of $("classes").querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.index) === index));
    if (chosen) document.querySelector("input[name=view][value=heat]").checked = true;
    showView();
  } catch (error) {
    if (number !== asked) return;
    $("views").hidden = true;
    $("hint").textContent = `No heat map: ${error.message}`;
  }
}

function showView() {
  const picture = $("picture");
  const view = document.querySelector("input[name=view]:checked").value;
  const whole = view === "image" || !picture.dataset.seen;
  picture.src = whole ? picture.dataset.image : picture.dataset.seen;
  picture.classList.toggle("square", !whole);
  $("heat").hidden = whole || view !== "heat";
  $("strength-label").hidden = view !== "heat";
  $("heat").style.opacity = $("strength").value / 100;
}

// ---------------------------------------------------------------------------- the camera

async function startCamera() {
  if (!navigator.mediaDevices) {
    $("capture").click(); // without https only this machine's own page gets the camera; telephones can take a picture
    return;
  }
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch (error) {
    fail(new Error(`The camera cannot be used (${error.message}).`));
    return;
  }
  current = null;
  $("video").srcObject = stream;
  await $("video").play();
  $("stage").hidden = $("video").hidden = false;
  $("picture").hidden = $("heat").hidden = $("views").hidden = $("invitation").hidden = $("hint").hidden = true;
  $("drop").classList.add("full");
  $("camera").textContent = "Take this picture";
  watch(++asked);
}

async function watch(number) {
  while (stream && number === asked) {
    const began = performance.now();
    try {
      const answer = await ask("/predict", await frame());
      if (number !== asked) return;
      showClasses(answer);
      $("facts").textContent = `Live, answered in ${Math.round(performance.now() - began)} ms`;
    } catch (error) {
      if (number === asked) fail(error);
    }
    await new Promise((done) => setTimeout(done, LIVE_PAUSE));
  }
}

function frame() {
  const video = $("video");
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.95));
}

function stopCamera() {
  if (!stream) return;
  for (const track of stream.getTracks()) track.stop();
  stream = null;
  $("video").srcObject = null;
  $("video").hidden = true;
  $("camera").textContent = "Camera";
}

// ---------------------------------------------------------------------------- a person

function takeFirst(files) {
  const file = [...(files || [])].find((one) => one.type.startsWith("image/")) || (files && files[0]);
  if (file) take(file);
}

$("choose").onclick = () => $("file").click();
$("camera").onclick = async () => (stream ? take(await frame()) : startCamera());
for (const input of [$("file"), $("capture")])
  input.onchange = () => {
    takeFirst(input.files);
    input.value = ""; // so that the same file can be chosen again
  };
for (const view of document.querySelectorAll("input[name=view]")) view.onchange = showView;
$("strength").oninput = showView;
document.addEventListener("paste", (event) => takeFirst(event.clipboardData.files));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").classList.add("over");
});
document.addEventListener("dragleave", () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  takeFirst(event.dataTransfer.files);
});
$("address").textContent = location.origin;
begin().catch(fail);
