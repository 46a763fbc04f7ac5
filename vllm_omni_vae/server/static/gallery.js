// SPDX-License-Identifier: Apache-2.0
// Recent jobs: those that the server keeps, or of an image model what this page has made.

import { ApiError, getJson, isLive, media } from "./api.js";
import { $, el, show } from "./dom.js";

const PAGE = 12;
const POLL_MS = 2000;

let cards = new Map();
let last = null;
let timer = 0;
let actions = null;

/** `open` and `remove` are called with a job. */
export function setUpGallery({ open, remove, title }) {
  actions = { open, remove };
  $("gallery-title").textContent = title;
  $("older").addEventListener("click", older);
}

/** Show the newest jobs as they are now, and go on while one of them waits or runs. Returns the newest. */
export async function refresh() {
  clearTimeout(timer);
  try {
    const { data, has_more: more } = await getJson(`v1/videos?limit=${PAGE}`);
    if (cards.size <= PAGE) {
      for (const id of cards.keys()) if (!data.some((job) => job.id === id)) drop(id);
      last = data.at(-1)?.id ?? null;
      show($("older"), more);
    }
    for (const job of data.toReversed()) put(job, true);
    show($("gallery-empty"), !cards.size);
    if (data.some(isLive)) timer = setTimeout(refresh, POLL_MS);
    return data;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (!error.status) timer = setTimeout(refresh, POLL_MS);
    return [];
  }
}

/** Add what an image model has made. */
export function addImages(made) {
  const card = { job: made, node: el("li", { class: "card" }), release() {} };
  cards.set(made.id, card);
  const image = el("img", { src: made.images[0].url, alt: "", class: "transparent" });
  card.node.append(opener(card, image, made.size.replace("x", " × ")));
  $("gallery").prepend(card.node);
  show($("gallery-empty"), false);
}

/** Remove a job's card. */
export function drop(id) {
  const card = cards.get(id);
  if (!card) return;
  card.release();
  card.node.remove();
  cards.delete(id);
  show($("gallery-empty"), !cards.size);
}

async function older() {
  const { data, has_more: more } = await getJson(`v1/videos?limit=${PAGE}&after=${last}`);
  const first = data.find((job) => !cards.has(job.id));
  for (const job of data) put(job, false);
  last = data.at(-1)?.id ?? last;
  show($("older"), more);
  if (first) cards.get(first.id).node.querySelector("button").focus();
}

function put(job, newest) {
  let card = cards.get(job.id);
  if (card && card.job.status === job.status) {
    card.job = job;
    if (isLive(job)) {
      card.node.querySelector(".state").textContent = stateOf(job);
      card.node.querySelector(".open").setAttribute("aria-label", `Show: ${job.prompt}, ${stateOf(job)}`);
    }
    return;
  }
  if (!card) {
    card = { job, node: el("li", { class: "card" }), release() {} };
    cards.set(job.id, card);
    if (newest) $("gallery").prepend(card.node);
    else $("gallery").append(card.node);
  }
  card.job = job;
  const verb = isLive(job) ? "Cancel" : "Delete";
  const focused = card.node.contains(document.activeElement);
  const frame = job.status === "completed" ? el("img", { alt: "" }) : el("span", { class: "blank" });
  card.node.replaceChildren(opener(card, frame, stateOf(job)),
    el("button", { type: "button", class: "plain small", "aria-label": `${verb}: ${job.prompt}`,
      onclick: () => actions.remove(card.job) }, verb));
  if (focused) card.node.querySelector("button").focus();
  if (job.status === "completed") thumbnail(card, frame);
}

function opener(card, frame, state) {
  const { prompt } = card.job;
  const name = `Show: ${prompt}, ${state}`;
  return el("button", { type: "button", class: "open", "aria-label": name, onclick: () => actions.open(card.job) },
    frame, el("span", { class: "words" }, prompt), el("span", { class: "state" }, state));
}

function stateOf(job) {
  if (job.status === "queued") return "waiting";
  if (job.status === "in_progress") return `${job.progress} %`;
  if (job.status === "failed") return `failed: ${job.error.code}`;
  return `${job.size.replace("x", " × ")}, ${(job.num_frames / job.fps).toFixed(1)} s`;
}

async function thumbnail(card, image) {
  try {
    const { url, release } = await media(`v1/videos/${card.job.id}/content?variant=thumbnail`);
    if (cards.get(card.job.id) !== card) return release();
    image.src = url;
    card.release = release;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
  }
}
