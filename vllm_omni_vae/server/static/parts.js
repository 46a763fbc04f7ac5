// SPDX-License-Identifier: Apache-2.0
// A picture of which rank made which part of an encode or decode.

import { capital, count, el, svg } from "./dom.js";

const LONGER_SIDE = 240;
// No part is drawn thinner than its number.
const THINNEST = 14;
const COLOURS = 8;
const SPELLED_OUT = 64;

/** The class that gives a rank its colour; its number is always written beside it. */
export function rankClass(rank) {
  return `rank-${rank % COLOURS}`;
}

/** Return a figure for one of a job's `vae` decisions. */
export function partsFigure(decision) {
  const { owners = [], edges = [], operation, strategy, reason, fallback } = decision;
  const divided = owners.length > 0 && edges.length === 3;
  const panels = divided ? stretches(owners, edges) : [];
  const title = el("strong", {}, `${capital(operation)}: ${words(strategy)}`);
  return el("figure", { class: "parts" },
    el("figcaption", {}, title, ` ${summary(decision, divided)}`),
    el("div", { class: "panels" }, ...panels.map((panel) => picture(decision, panel, panels.length))),
    reason ? el("p", { class: "hint" }, fallback ? `Fell back: ${reason}.` : `${capital(reason)}.`) : "");
}

function words(strategy) {
  return strategy.replaceAll("_", " ");
}

function summary(decision, divided) {
  if (!divided) return decision.strategy === "direct" ? "not divided" : "";
  const ranks = new Set(decision.owners).size;
  const [time, rows, cols] = decision.edges.map((edge) => edge.length - 1);
  const over = time > 1 ? `${time} stretches of time with ` : "";
  return `${over}${rows} × ${cols} parts on ${count(ranks, "rank")}`;
}

function stretches(owners, [time, rows, cols]) {
  const area = (rows.length - 1) * (cols.length - 1);
  return time.slice(0, -1).map((_, number) => ({
    number, rows, cols, owners: owners.slice(number * area, (number + 1) * area),
  }));
}

function picture(decision, panel, panels) {
  const { rows, cols } = panel;
  const scale = LONGER_SIDE / Math.max(rows.at(-1), cols.at(-1));
  const [across, down] = [places(cols, scale), places(rows, scale)];
  const [width, height] = [across.at(-1), down.at(-1)];
  const when = panels > 1 ? `, stretch ${panel.number + 1} of ${panels}` : "";
  const drawing = svg("svg", {
    class: "grid", role: "img", "aria-label": `${capital(decision.operation)}${when}: ${spoken(panel)}`,
    viewBox: `-1 -1 ${width + 2} ${height + 2}`, width: width + 2, height: height + 2,
  });
  panel.owners.forEach((owner, place) => {
    const row = Math.floor(place / (cols.length - 1));
    const col = place % (cols.length - 1);
    const [x, y] = [across[col], down[row]];
    const [w, h] = [across[col + 1] - x, down[row + 1] - y];
    drawing.append(svg("g", { class: `cell ${rankClass(owner)}`, "data-rank": owner },
      svg("rect", { x, y, width: w, height: h }),
      svg("text", { x: x + w / 2, y: y + h / 2, "font-size": Math.min(18, 0.7 * h, w / String(owner).length) },
        String(owner)),
      svg("title", {}, `rank ${owner}`)));
  });
  if (panels === 1) return drawing;
  return el("div", {}, drawing, el("p", { class: "hint" }, `${panel.number + 1} of ${panels} in time`));
}

/** Where parts that begin at `edges` are drawn. */
function places(edges, scale) {
  const drawn = [0];
  for (let part = 1; part < edges.length; part += 1) {
    drawn.push(drawn[part - 1] + Math.max(THINNEST, (edges[part] - edges[part - 1]) * scale));
  }
  return drawn;
}

function spoken({ rows, cols, owners }) {
  const high = rows.length - 1;
  const wide = cols.length - 1;
  if (owners.length > SPELLED_OUT) {
    const ranks = [...new Set(owners)].sort((a, b) => a - b);
    const made = (rank) => owners.filter((one) => one === rank).length;
    return ranks.map((rank) => `rank ${rank} made ${count(made(rank), "part")}`).join(", ");
  }
  const lines = Array.from({ length: high }, (_, row) => owners.slice(row * wide, (row + 1) * wide).join(", "));
  return lines.map((line, row) => `row ${row + 1}, ranks ${line}`).join("; ");
}
