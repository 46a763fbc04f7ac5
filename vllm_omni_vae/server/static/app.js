// SPDX-License-Identifier: Apache-2.0
// The page: asks what the model is, sends requests, follows them and shows what came of them.

import { ApiError, call, follow, getJson, isLive } from "./api.js";
import { $, capital, el, show } from "./dom.js";
import { clearFormProblem, enableSettings, request, setUp, showFormProblem, takesImage } from "./form.js";
import { addImages, drop, refresh, setUpGallery } from "./gallery.js";
import { advance, begin, end, say } from "./progress.js";
import { clear, showFailure, showImages, showProblem, showVideo } from "./result.js";

const HEALTH_MS = 2000;

let video = true;
let known = false;
let remixed = null;
// What the result's place is about; another one stops the work on it.
let current = null;

function turnTo(id) {
  current?.stop.abort();
  current = { id, stop: new AbortController() };
  return current;
}

function fail(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) throw error;
  showProblem(error);
}

async function submit(event) {
  event.preventDefault();
  clearFormProblem();
  if (!known) return start();
  if (!video) return makeImages(request());
  $("submit").disabled = true;
  try {
    const asked = remixed ? remix() : request();
    const job = await (await call(asked.path, asked.options)).json();
    stopRemix();
    refresh();
    await followVideo(job, asked.encodes);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showFormProblem(error);
  } finally {
    $("submit").disabled = false;
  }
}

function remix() {
  const body = JSON.stringify({ prompt: $("prompt").value });
  const headers = { "Content-Type": "application/json" };
  const path = `v1/videos/${remixed.id}/remix`;
  return { path, options: { method: "POST", headers, body }, encodes: takesImage() };
}

function startRemix(job) {
  remixed = job;
  $("remixed").textContent = job.prompt;
  show($("remixing"));
  enableSettings(false);
  $("image").required = false;
  $("prompt").value = job.prompt;
  $("prompt").focus();
  $("prompt").select();
}

function stopRemix() {
  if (!remixed) return;
  remixed = null;
  show($("remixing"), false);
  enableSettings(true);
  $("image").required = $("image").dataset.required === "true";
}

/** Follow a job in the result's place; does not wait for its end. */
function followVideo(job, encodes) {
  const { id, stop } = turnTo(job.id);
  clear();
  begin(job.prompt, { encodes, measured: true });
  $("result-title").scrollIntoView({ block: "nearest" });
  (async () => {
    for await (const state of follow(id, stop.signal)) {
      if (state.name === "deleted") {
        end();
        refresh();
        return showProblem({ message: "The video was deleted." });
      }
      advance(state);
    }
    if (stop.signal.aborted) return;
    const done = await getJson(`v1/videos/${id}`, { signal: stop.signal });
    end();
    refresh();
    await present(done);
    say(done.status === "completed" ? "the video is ready" : "the video failed");
  })().catch((error) => {
    if (current?.id === id) end();
    fail(error);
  });
}

/** Show a job that is over, or follow one that is not. */
async function present(job) {
  if (isLive(job)) return followVideo(job, takesImage());
  if (current?.id !== job.id) turnTo(job.id);
  end();
  const button = (name, onclick) => el("button", { type: "button", class: "plain", onclick }, name);
  const removal = button("Delete", () => remove(job));
  if (job.status === "failed") return showFailure(job, [removal]);
  await showVideo(job, [button("Remix", () => startRemix(job)), removal], () => current?.id === job.id);
}

async function open(job) {
  try {
    if (video) await present(job);
    else showImages(job, []);
    $("result-title").focus({ preventScroll: true });
    $("result-title").scrollIntoView({ block: "nearest" });
  } catch (error) {
    fail(error);
  }
}

async function remove(job) {
  if (!isLive(job) && !(await confirmed(job.prompt))) return;
  try {
    await call(`v1/videos/${job.id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) return fail(error);
  }
  if (current?.id === job.id) {
    turnTo(null);
    end();
    clear();
    show($("empty"));
  }
  drop(job.id);
  say(isLive(job) ? "cancelled" : "deleted");
  $("gallery-title").focus({ preventScroll: true });
  refresh();
}

function confirmed(prompt) {
  const dialog = $("delete-dialog");
  $("delete-prompt").textContent = prompt;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
  });
}

function cancel() {
  if (video) return remove({ id: current.id, status: "in_progress" });
  current.stop.abort();
  end();
  show($("empty"));
  say("cancelled");
  $("submit").focus();
}

async function makeImages({ path, options, prompt }) {
  const { stop } = turnTo(crypto.randomUUID());
  clear();
  begin(prompt, { measured: false });
  $("result-title").scrollIntoView({ block: "nearest" });
  try {
    const response = await call(path, { ...options, signal: stop.signal });
    const answer = await response.json();
    const made = imagesOf(answer, prompt, response.headers);
    end();
    addImages(made);
    showImages(made, []);
    say("the images are ready");
  } catch (error) {
    if (error.name === "AbortError") return;
    end();
    if (!(error instanceof ApiError)) throw error;
    show($("empty"));
    showFormProblem(error);
  }
}

function imagesOf(answer, prompt, headers) {
  const layered = answer.data.some((item) => item.layer !== undefined);
  const images = answer.data.map((item, place) => {
    const bytes = Uint8Array.from(atob(item.b64_json), (character) => character.charCodeAt(0));
    const [kind, number] = layered ? ["layer", item.layer + 1] : ["image", place + 1];
    const label = `${capital(kind)} ${number}${layered && number === 1 ? " (bottom)" : ""}`;
    const url = URL.createObjectURL(new Blob([bytes], { type: `image/${answer.output_format}` }));
    return { url, label, name: `${kind}-${number}.${answer.output_format}` };
  });
  return {
    id: headers.get("X-Request-Id"), status: "completed", prompt, images, size: answer.size, seed: answer.seed,
    vae: answer.vae, vae_use: answer.vae_use, stage_durations: JSON.parse(headers.get("X-Stage-Durations") ?? "{}"),
  };
}

async function watchHealth() {
  const pill = $("health");
  let ready = false;
  try {
    const response = await fetch(new URL("../health", import.meta.url));
    ready = response.ok;
    const text = ready ? "ready" : (await response.json()).error.message;
    if (pill.textContent !== text) pill.textContent = text;
  } catch {
    pill.textContent = "not reached";
  }
  pill.classList.toggle("good", ready);
  setTimeout(watchHealth, ready ? 10 * HEALTH_MS : HEALTH_MS);
}

/** Ask what the model is, and show the page for it. */
async function start() {
  let entry;
  try {
    [entry] = (await getJson("v1/models")).data;
  } catch (error) {
    showFormProblem(error);
    return;
  }
  known = true;
  const { medium, pipeline, vae_ranks: ranks } = entry.capabilities;
  video = medium === "video";
  $("model").textContent = entry.id.split("/").at(-1);
  $("model").title = entry.id;
  document.title = `${$("model").textContent} - vllm-omni-vae`;
  $("pipeline").textContent = `${pipeline}, VAE on ${ranks} ${ranks === 1 ? "rank" : "ranks"}`;
  setUp(entry);
  $("image").dataset.required = $("image").required;
  setUpGallery({ open, remove, title: video ? "Recent videos" : "Made on this page" });
  document.body.dataset.ready = "";
  if (!video) return show($("gallery-empty"));
  const running = (await refresh()).findLast(isLive);
  if (running && !current) followVideo(running, takesImage());
}

$("form").addEventListener("submit", submit);
$("cancel").addEventListener("click", cancel);
$("remix-stop").addEventListener("click", () => { stopRemix(); $("prompt").focus(); });
watchHealth();
getJson("version").then(({ version }) => { $("version").textContent = version; }).catch(fail);
start();
