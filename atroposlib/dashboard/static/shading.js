// The shade of a token's number, and its legend. Pure but for the legend.

import { h, replace } from "./dom.js";
import { number } from "./format.js";

const LEAST_DIFFERENCE = 1e-4;
const MOST_ENTROPY = 3;

/** The numbers that can shade a token: `depth(value, scale)` from 0 to 1, `sign` is true if low and high differ, `legend` has examples. */
export const SHADES = {
  logprob: {
    what: "probability under the sampler",
    depth: (value) => Math.min(1, -value / Math.LN10 / 3),
    sign: () => "low",
    legend: () => [1, 0.5, 0.1, 0.01, 0.001].map((p) => [Math.log(p), `p = ${p}`]),
  },
  entropy: {
    what: "entropy where the trainer predicts the token",
    depth: (value) => Math.min(1, value / MOST_ENTROPY),
    sign: () => "low",
    legend: () => [0, 0.5, 1, 2, 3].map((nats) => [nats, `${nats} nats`]),
  },
  advantage: {
    what: "advantage",
    depth: (value, scale) => (scale ? Math.min(1, Math.abs(value) / scale) : 0),
    sign: (value) => (value < 0 ? "low" : "high"),
    legend: (scale) => (scale ? [-scale, -scale / 2, 0, scale / 2, scale] : [0]).map((a) => [a, number(a, 3)]),
  },
  difference: {
    what: "logprob of the trainer less that of the sampler",
    depth: (value) => (value === 0 ? 0 : Math.max(0, Math.min(1, 1 + Math.log10(Math.abs(value)) / -Math.log10(LEAST_DIFFERENCE)))),
    sign: (value) => (value < 0 ? "low" : "high"),
    legend: () => [-1, -0.1, -0.01, 0, 0.01, 0.1, 1].map((d) => [d, d > 0 ? `+${d}` : String(d)]),
  },
};

/** The number of a token that it is shaded by; null where it is not known. */
export function shadedBy(name, facts) {
  if (name === "difference") {
    return facts.trainer === null || facts.logprob === null ? null : facts.trainer - facts.logprob;
  }
  return facts[name] ?? null;
}

/** Shade a token. */
export function shadeToken(element, name, facts, scale) {
  const value = name === "none" ? null : shadedBy(name, facts);
  if (value === null) {
    delete element.dataset.shade;
    element.style.removeProperty("--depth");
    return;
  }
  element.dataset.shade = SHADES[name].sign(value);
  element.style.setProperty("--depth", SHADES[name].depth(value, scale).toFixed(3));
}

/** Show what the shades mean. */
export function showLegend(element, name, scale) {
  element.hidden = name === "none";
  if (name === "none") {
    return;
  }
  const shade = SHADES[name];
  const examples = shade.legend(scale);
  element.setAttribute("aria-label", `${shade.what}: no shade at ${examples.find(([value]) => shade.depth(value, scale) < 0.01)?.[1] ?? "0"}, deepest at ${examples.at(-1)[1]}`);
  replace(
    element,
    examples.map(([value, label]) =>
      h("span", { "data-shade": shade.sign(value), style: { "--depth": shade.depth(value, scale).toFixed(3) } }, label),
    ),
  );
}
