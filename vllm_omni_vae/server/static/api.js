// SPDX-License-Identifier: Apache-2.0
// Requests to the server that this page came from, with a key once the server asks for one.

import { $, show } from "./dom.js";

// The page may be behind a path prefix, so that addresses are relative to where this file is.
const BASE = new URL("../", import.meta.url);
const SLOT = `vllm-omni-vae key of ${BASE.pathname}`;
const RETRY_MS = 1000;

let key = sessionStorage.getItem(SLOT) ?? "";
let asking = null;

export class ApiError extends Error {
  constructor(message, { status = 0, code = "", param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

/** Return the answer to a request. Throws an `ApiError`, and an `AbortError` when the options' signal says so. */
export async function call(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = new Headers(options.headers);
    if (sent) headers.set("Authorization", `Bearer ${byteString(sent)}`);
    const response = await reach(path, { ...options, headers });
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401) throw problem;
    if (key !== sent) continue;
    asking ??= askForKey(sent !== "").finally(() => { asking = null; });
    if (!(await asking)) throw problem;
  }
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

/** Yield a job's events until it is over, also over a lost connection. */
export async function* follow(id, signal) {
  for (;;) {
    try {
      for await (const event of events(`v1/videos/${id}/events`, signal)) {
        yield event;
        if (event.name === "deleted" || !isLive(event)) return;
      }
    } catch (error) {
      if (signal.aborted || (error instanceof ApiError && error.status)) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    if (signal.aborted) return;
  }
}

export function isLive(job) {
  return job.status === "queued" || job.status === "in_progress";
}

/** Return an address for a file of a job, and what to call once it is not shown any more. */
export async function media(path) {
  if (!key) return { url: new URL(path, BASE).href, release() {} };
  const url = URL.createObjectURL(await (await call(path)).blob());
  return { url, release: () => URL.revokeObjectURL(url) };
}

async function reach(path, options) {
  try {
    return await fetch(new URL(path, BASE), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", { code: "unreachable" });
  }
}

async function problemOf(response) {
  const { status } = response;
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { status, code: error.code, param: error.param });
  } catch {
    return new ApiError(`The server answered ${status}.`, { status, code: String(status) });
  }
}

async function* events(path, signal) {
  // EventSource can send no header, so there would be no key.
  const { body } = await call(path, { signal });
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = /^data: (.*)$/m.exec(block);
      if (data) yield { name: /^event: (.*)$/m.exec(block)?.[1], ...JSON.parse(data[1]) };
    }
  }
}

/** A header takes characters of one byte each; the server compares the bytes of UTF-8. */
function byteString(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

function askForKey(wrong) {
  const dialog = $("key-dialog");
  show($("key-wrong"), wrong);
  $("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok";
      if (given) {
        key = $("key").value;
        if ($("keep").checked) sessionStorage.setItem(SLOT, key);
        else sessionStorage.removeItem(SLOT);
      }
      $("key").value = "";
      resolve(given);
    }, { once: true });
  });
}
