// SPDX-License-Identifier: Apache-2.0
// The form: shows what the model can be asked for, and turns it into a request.

import { $, el, show } from "./dom.js";

// Where an error about a request's field is shown, for those that are not named like an element.
const FIELDS = {
  width: "size", height: "size", seconds: "length", num_frames: "length", fps: "length", input_reference: "image",
  image_reference: "image", negative_prompt: "negative", num_inference_steps: "steps", n: "count", num_images: "count",
  guidance_scale: "guidance", true_cfg_scale: "guidance",
};
const NAMED = ["negative_prompt", "num_inference_steps", "seed"];

let model = null;
let previews = [];

/** Fit the form to a model, an entry of `v1/models`. */
export function setUp(entry) {
  model = entry.capabilities;
  const { takes, defaults } = model;
  const video = model.medium === "video";
  $("ask-title").textContent = `Make ${video ? "a video" : "an image"}`;
  show($("image-field"), takesImage());
  $("image").required = needsImage();
  const most = video ? 1 : model.max_references;
  $("image").multiple = most > 1;
  $("image-label").textContent = `${video ? "First frame" : "Reference image"}${needsImage() ? "" : " (optional)"}`;
  $("image-hint").textContent = `PNG, JPEG or WebP${most > 1 ? `, up to ${most}` : ""}`;
  const size = `${defaults.width}x${defaults.height}`;
  $("size").value = video ? size : "";
  const otherwise = video ? "" : `. Empty: the model’s own, usually ${size}`;
  $("size-hint").textContent = `Width x height, multiples of ${model.spatial_multiple}${otherwise}`;
  show($("length-field"), video);
  show($("count-field"), !video);
  show($("negative-field"), takes.includes("negative_prompt"));
  show($("guidance-field"), guidanceName() !== null);
  show($("layers-field"), takes.includes("layers"));
  $("layers").value = takes.includes("layers") ? defaults.layers ?? "" : "";
  $("steps").value = model.fixed_steps || defaults.num_inference_steps;
  $("steps").readOnly = model.fixed_steps > 0;
  if (video) {
    $("unit").value = "num_frames";
    $("length").value = defaults.num_frames;
    tellLength();
  }
}

export function takesImage() {
  return model.tasks.some((task) => task.startsWith("image-to-"));
}

function needsImage() {
  return model.tasks.every((task) => task.startsWith("image-to-"));
}

function guidanceName() {
  return ["true_cfg_scale", "guidance_scale"].find((name) => model.takes.includes(name)) ?? null;
}

/** Return what the form asks for: `{path, options, prompt, encodes}`. */
export function request() {
  const fields = { prompt: $("prompt").value };
  for (const name of NAMED) fields[name] = $(FIELDS[name] ?? name).value.trim();
  fields.size = $("size").value.trim();
  if (guidanceName()) fields[guidanceName()] = $("guidance").value.trim();
  const files = takesImage() ? [...$("image").files] : [];
  if (model.medium === "video") {
    fields[$("unit").value] = $("length").value.trim();
    return post("v1/videos", fields, files.map((file) => ["input_reference", file]));
  }
  fields.n = $("count").value;
  fields.layers = $("layers").value;
  return post(`v1/images/${files.length ? "edits" : "generations"}`, fields,
    files.map((file) => [files.length > 1 ? "image[]" : "image", file]));
}

function post(path, fields, files) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) if (value !== "") body.append(name, value);
  for (const [name, file] of files) body.append(name, file);
  return { path, options: { method: "POST", body }, prompt: fields.prompt, encodes: files.length > 0 };
}

/** Show an error of the request, at its field if it names one. */
export function showFormProblem({ message, code, param }) {
  clearFormProblem();
  $("form-problem").replaceChildren(message, ...(code ? [" ", el("code", {}, code)] : []));
  show($("form-problem"));
  const field = $(FIELDS[param] ?? param);
  if (!field || !$("form").contains(field) || field.closest("[hidden]")) return;
  const details = field.closest("details");
  if (details) details.open = true;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-errormessage", "form-problem");
  field.focus();
}

export function clearFormProblem() {
  show($("form-problem"), false);
  for (const field of $("form").querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-errormessage");
  }
}

/** The number of frames that the server takes for a length in seconds. */
function nearestFrames(length) {
  const ratio = model.temporal_ratio;
  return 1 + Math.max(0, Math.floor((length * model.defaults.fps - 1) / ratio + 0.5)) * ratio;
}

/** Say how many frames a number of seconds becomes, and the other way round. */
function tellLength() {
  const { fps } = model.defaults;
  const value = Number($("length").value);
  if (!fps || !(value > 0)) {
    $("length-hint").textContent = "";
    return;
  }
  const ratio = model.temporal_ratio;
  const inFrames = $("unit").value === "num_frames";
  const frames = inFrames ? value : nearestFrames(value);
  const rule = ratio > 1 ? `, 1 + a multiple of ${ratio}` : "";
  $("length-hint").textContent = inFrames
    ? `${(frames / fps).toFixed(2)} s at ${fps} per second${rule}` : `${frames} frames at ${fps} per second`;
}

function changeUnit() {
  const { fps } = model.defaults;
  const value = Number($("length").value);
  if (fps && value > 0) {
    $("length").value = $("unit").value === "num_frames" ? nearestFrames(value) : Number((value / fps).toFixed(2));
  }
  tellLength();
}

function preview() {
  previews.forEach((url) => URL.revokeObjectURL(url));
  const files = [...$("image").files];
  previews = files.map((file) => URL.createObjectURL(file));
  const items = files.map(({ name }, place) =>
    el("li", {}, el("img", { src: previews[place], alt: `Preview of ${name}` })));
  const remove = el("button", { type: "button", class: "plain", onclick: removeImages },
    files.length > 1 ? "Remove images" : "Remove image");
  $("previews").replaceChildren(...items, ...(files.length ? [el("li", {}, remove)] : []));
}

function removeImages() {
  $("image").value = "";
  preview();
  $("image").focus();
}

/** Whether settings can be changed: not those of a video that is made again. */
export function enableSettings(enabled) {
  $("settings").disabled = !enabled;
}

$("image").addEventListener("change", preview);
$("length").addEventListener("input", tellLength);
$("unit").addEventListener("change", changeUnit);
$("form").addEventListener("input", clearFormProblem);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
