// SPDX-License-Identifier: Apache-2.0
// Small helpers for the elements and the numbers of the page.

export const $ = (id) => document.getElementById(id);

/** Make an element; `attributes` may hold listeners (`onclick`), what is null or false is left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for an element of an SVG picture. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function show(node, visible = true) {
  node.hidden = !visible;
}

export function seconds(value) {
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${step ? value.toFixed(1) : value} ${units[step]}`;
}

export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

export function capital(word) {
  return word.charAt(0).toUpperCase() + word.slice(1);
}
