// SPDX-License-Identifier: Apache-2.0
// How far a job is: its stages, a bar, and what a screen reader is told of it.

import { $, capital, el, show } from "./dom.js";

const STAGES = { queued: "Waiting", encode: "Encode", denoise: "Denoise", decode: "Decode", export: "Export" };

let reached = [];
let told = "";
let clock = 0;

/** Show a job that begins; `encodes`: whether it has an image to encode. */
export function begin(prompt, { encodes, measured }) {
  reached = [];
  told = "";
  $("work-prompt").textContent = prompt;
  const named = Object.entries(STAGES).filter(([stage]) => encodes || stage !== "encode");
  $("stages").replaceChildren(...named.map(([stage, name]) => el("li", { "data-stage": stage }, name)));
  show($("stages"), measured);
  $("progress").classList.toggle("unmeasured", !measured);
  $("progress").removeAttribute("aria-valuenow");
  $("progress").removeAttribute("aria-valuetext");
  $("percent").textContent = "";
  show($("work"));
  if (measured) advance({ status: "queued", stage: null, progress: 0 });
  else wait();
}

/** Show where the job is; its progress never falls. */
export function advance({ status, stage, progress }) {
  const now = status === "queued" ? "queued" : stage ?? "queued";
  const before = Number($("progress").getAttribute("aria-valuenow") ?? 0);
  const percent = Math.max(before, progress);
  if (!reached.includes(now)) reached.push(now);
  for (const item of $("stages").children) {
    const current = item.dataset.stage === now;
    item.className = current ? "current" : reached.includes(item.dataset.stage) ? "done" : "";
    if (current) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
  }
  const bar = $("progress");
  bar.setAttribute("aria-valuenow", percent);
  bar.setAttribute("aria-valuetext", `${percent} percent, ${STAGES[now].toLowerCase()}`);
  $("fill").style.width = `${percent}%`;
  $("percent").textContent = `${percent} %`;
  if (now !== told) say(STAGES[now]);
  told = now;
}

/** Say something to a screen reader, when it has time for it. */
export function say(text) {
  $("said").textContent = capital(text);
}

export function end() {
  clearInterval(clock);
  show($("work"), false);
}

/** A request that waits for its images tells nothing on the way. */
function wait() {
  const begun = performance.now();
  const tick = () => { $("percent").textContent = `${Math.floor((performance.now() - begun) / 1000)} s`; };
  clearInterval(clock);
  clock = setInterval(tick, 1000);
  tick();
  $("fill").style.width = "";
  $("progress").setAttribute("aria-valuetext", "working");
  say("working");
}
