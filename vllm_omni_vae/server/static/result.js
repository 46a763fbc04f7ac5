// SPDX-License-Identifier: Apache-2.0
// What came of a job: the clip or the images, what it took, and who did what.

import { media } from "./api.js";
import { $, bytes, capital, count, el, seconds, show } from "./dom.js";
import { partsFigure, rankClass } from "./parts.js";

const STAGES = ["encode", "denoise", "decode", "export"];

let releases = [];

/** Show nothing. */
export function clear() {
  releases.forEach((release) => release());
  releases = [];
  $("made").replaceChildren();
  show($("made"), false);
  show($("problem"), false);
  show($("empty"), false);
}

export function showProblem({ message, code }) {
  $("problem").replaceChildren(message, ...(code ? [" ", el("code", {}, code)] : []));
  show($("problem"));
}

/** Show why a job failed, and what can be done about it: `actions` are buttons. */
export function showFailure(job, actions) {
  clear();
  showProblem(job.error);
  $("made").replaceChildren(el("p", { class: "prompt" }, job.prompt), el("p", { class: "buttons" }, ...actions));
  show($("made"));
}

/** Show a finished clip; `actions` are buttons. */
export async function showVideo(job, actions, isWanted) {
  const [file, poster] = await Promise.all([
    media(`v1/videos/${job.id}/content`), media(`v1/videos/${job.id}/content?variant=thumbnail`),
  ]);
  if (!isWanted()) {
    file.release();
    poster.release();
    return;
  }
  clear();
  releases = [file.release, poster.release];
  const [width, height] = job.size.split("x");
  const player = el("video", {
    controls: true, loop: true, playsinline: true, preload: "auto", src: file.url, poster: poster.url, width, height,
    "aria-label": `Video: ${job.prompt}`,
  });
  const download = el("a", { class: "button", href: file.url, download: `${job.id}.mp4` }, "Download");
  reveal(job.prompt, player, [download, ...actions], {
    Size: job.size.replace("x", " × "),
    Length: `${count(job.num_frames, "frame")} at ${job.fps} per second, ${seconds(job.num_frames / job.fps)}`,
    Seed: job.seed,
    ...stageRows(job.stage_durations),
  }, job);
}

/** Show the images of an answer, each `{url, name, label}`. */
export function showImages(made, actions) {
  clear();
  const figures = made.images.map(({ url, name, label }) => el("figure", {},
    el("img", { src: url, alt: `${label}: ${made.prompt}`, class: "transparent" }),
    el("figcaption", {}, label, " ",
      el("a", { href: url, download: name, "aria-label": `Download ${label}` }, "Download"))));
  reveal(made.prompt, el("div", { class: "images" }, ...figures), actions, {
    Size: made.size.replace("x", " × "), Seed: made.seed, ...stageRows(made.stage_durations),
  }, made);
}

function reveal(prompt, main, actions, facts, job) {
  const figures = (job.vae ?? []).map(partsFigure);
  $("made").replaceChildren(
    main,
    el("p", { class: "prompt" }, prompt),
    actions.length ? el("p", { class: "buttons" }, ...actions) : "",
    el("dl", { class: "facts" }, ...Object.entries(facts).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))),
    figures.length ? el("section", { class: "who", "aria-labelledby": "who-title" },
      el("h3", { id: "who-title" }, "Which rank made which part"),
      el("div", { class: "figures" }, ...figures), rankTable(job)) : "");
  show($("made"));
}

function stageRows(durations) {
  const known = STAGES.filter((stage) => durations?.[stage] !== undefined);
  return Object.fromEntries(known.map((stage) => [capital(stage), seconds(durations[stage])]));
}

/** The legend of the pictures, and what each rank had to do. */
function rankTable(job) {
  const uses = job.vae_use ?? [];
  const owners = (job.vae ?? []).flatMap((decision) => decision.owners ?? []);
  const peaks = Array.isArray(job.peak_memory_mb) ? job.peak_memory_mb : [];
  const ranks = [...new Set([...uses.map((use) => use.rank), ...owners])].sort((a, b) => a - b);
  if (!ranks.length) return "";
  const operations = ["encode", "decode"].filter((one) => uses.some((use) => use.operation === one));
  const sum = (rank, field, operation) => uses
    .filter((use) => use.rank === rank && (!operation || use.operation === operation))
    .reduce((total, use) => total + use[field], 0);
  const columns = [
    ["Parts", (rank) => owners.filter((owner) => owner === rank).length],
    ...operations.map((one) => [capital(one), (rank) => seconds(sum(rank, "seconds", one))]),
    ...(uses.length ? [["Sent", (rank) => bytes(sum(rank, "sent_bytes"))]] : []),
    ...(peaks.length ? [["Peak memory", (rank) => bytes((peaks[rank] ?? 0) * 2 ** 20)]] : []),
  ];
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Work of each rank" },
    el("table", {},
      el("caption", { class: "hidden" }, "Work of each rank"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Rank"),
        ...columns.map(([name]) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...ranks.map((rank) => el("tr", {},
        el("th", { scope: "row" }, el("span", { class: `swatch ${rankClass(rank)}` }, String(rank))),
        ...columns.map(([, value]) => el("td", {}, String(value(rank)))))))));
}
