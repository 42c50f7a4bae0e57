// A group: its rollouts side by side, or one of them alone, and a link to any token of it.

import { $, h, replace } from "./dom.js";
import { clock, number } from "./format.js";
import { address, getJson, shownRun } from "./http.js";
import { shortcut } from "./keys.js";
import { SHADES, showLegend } from "./shading.js";
import { TokenView, factsShown } from "./tokens.js";
import { visible } from "./visible.js";

const group = Number($("group").dataset.group);
const asked = new URLSearchParams(window.location.search);
const KEPT = "lockstep-shade";
const views = [];
let alone = asked.has("rollout") ? Number(asked.get("rollout")) : null;
let heads = [];

function here(rollout, position = null) {
  const path = address(`/ui/rollouts/${group}`, { run: shownRun(), rollout });
  return position === null ? path : `${path}#r${rollout ?? 0}t${position}`;
}

/** The token that the address names: `#r2t123`, or `#t123` of the rollout that is shown alone. */
function named() {
  const found = /^#(?:r(\d+))?t(\d+)$/.exec(window.location.hash);
  return found ? { rollout: Number(found[1] ?? alone ?? 0), position: Number(found[2]) } : null;
}

function showFacts(facts) {
  const output = $("facts");
  output.hidden = false;
  replace(
    output,
    h("span", {}, h("code", {}, visible(facts.text))),
    factsShown(facts).map(([term, value]) => h("span", {}, term ? `${term} ` : null, h("b", {}, value))),
  );
  for (const view of views) {
    if (view.rollout !== facts.rollout && view.active) {
      view.active.removeAttribute("data-active");
      view.active = null;
    }
  }
  if (facts.chosen) {
    window.history.replaceState(null, "", here(alone, facts.position).replace(/#.*/, `#r${facts.rollout}t${facts.position}`));
  }
}

function shade() {
  const name = $("shade").value;
  const scale = name === "advantage" ? Math.max(0, ...views.map((view) => view.largest(name))) : 0;
  views.forEach((view) => view.reshade(name, scale));
  showLegend($("legend"), name, scale);
  const known = name === "none" || views.some((view) => view.knows(name));
  const needed = name === "logprob" ? "No logprobs came with this group." : "The trainer has not reported this group: it reports a few sequences of each step (--report-sequences).";
  $("shade-note").textContent = known ? "" : needed;
  $("shade-note").hidden = known;
}

function card(head, best, worst) {
  const view = new TokenView(group, head.rollout, { chunk: alone === null ? 500 : 2000, onFacts: showFacts, onLoad: shade });
  view.shade = $("shade").value;
  views.push(view);
  const rank = best !== worst ? { [best]: "good", [worst]: "bad" }[head.score] : undefined;
  const versions = head.oldest === null ? null : head.oldest === head.newest ? `version ${head.oldest}` : `versions ${head.oldest} to ${head.newest}`;
  const said = [
    `${number(head.sampled)} sampled of ${number(head.tokens)} tokens`,
    head.mean_logprob === null ? null : `mean logprob ${number(head.mean_logprob)}`,
    head.drift === null ? null : `drift ${number(head.drift)}`,
    versions,
    head.trained_version === null ? null : `trained at version ${head.trained_version}`,
    head.finish_reason ? `ended by ${visible(head.finish_reason)}` : null,
    head.sampling ? visible(head.sampling) : null,
  ];
  return h(
    "article",
    { class: "card rollout", "aria-label": `Rollout ${head.rollout}`, "data-rollout": head.rollout },
    h(
      "header",
      {},
      h("h2", {}, h("a", { href: here(head.rollout) }, `Rollout ${head.rollout}`)),
      h("span", { class: rank ? `badge ${rank}` : "badge", "data-score": head.score }, `score ${number(head.score)}`),
    ),
    h("p", { class: "vitals-line" }, said.filter(Boolean).map((text) => h("span", {}, text))),
    view.element,
  );
}

async function open() {
  const told = await getJson(`/ui/api/rollouts/${group}`, { run: shownRun() });
  heads = told.rollouts;
  if (alone !== null && !heads[alone]) {
    alone = null;
  }
  const shown = alone === null ? heads : [heads[alone]];
  const scores = heads.map((head) => head.score).filter((score) => score !== null);
  const came = clock(told.time, Date.now() / 1000);
  $("said").textContent = `${told.environment ? `${visible(told.environment)}, ` : ""}${heads.length} rollouts of one problem, came ${came}`;
  const list = $("rollouts");
  list.classList.toggle("one", shown.length === 1);
  replace(list, shown.map((head) => card(head, Math.max(...scores), Math.min(...scores))));
  for (const [id, number_] of [["older", told.older], ["newer", told.newer]]) {
    $(id).hidden = number_ === null;
    $(id).href = address(`/ui/rollouts/${number_}`, { run: shownRun() });
  }
  $("all").hidden = alone === null;
  loadWhenSeen();
  const wanted = named();
  const view = wanted && views.find((one) => one.rollout === wanted.rollout);
  await Promise.all(views.slice(0, 2).map((one) => (one === view ? null : one.show())));
  if (view) {
    await view.go(wanted.position);
  }
  shade();
  document.body.dataset.ready = "true";
}

/** The tokens of a rollout are asked for when it comes into sight. */
function loadWhenSeen() {
  const watch = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      const view = views.find((one) => one.element === target);
      if (isIntersecting && view) {
        watch.unobserve(target);
        if (!view.chunks.length && !view.loading) {
          view.show();
        }
      }
    }
  }, { rootMargin: "300px" });
  views.slice(2).forEach((view) => watch.observe(view.element));
}

async function copyLink() {
  const said = $("copy");
  try {
    await navigator.clipboard.writeText(window.location.href);
    said.textContent = "Copied";
  } catch {
    said.textContent = "Copy it from the address bar"; // without https a browser lets no page write there
  }
}

function keptShade() {
  const wanted = asked.get("shade");
  try {
    return wanted ?? window.localStorage.getItem(KEPT);
  } catch {
    return wanted;
  }
}

const kept = keptShade();
$("shade").value = kept in SHADES || kept === "none" ? kept : "logprob";
$("shade").addEventListener("change", () => {
  shade();
  try {
    window.localStorage.setItem(KEPT, $("shade").value);
  } catch {
    // a browser that keeps nothing
  }
});
$("copy").addEventListener("click", copyLink);
$("all").addEventListener("click", () => window.location.assign(here(null)));
window.addEventListener("hashchange", () => {
  const wanted = named();
  views.find((one) => one.rollout === wanted?.rollout)?.go(wanted.position);
});
shortcut("s", "shade by the next number", () => {
  const select = $("shade");
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.dispatchEvent(new Event("change"));
});
shortcut("j", "older group", () => $("older").hidden || $("older").click());
shortcut("k", "newer group", () => $("newer").hidden || $("newer").click());
shortcut("a", "all rollouts side by side", () => $("all").hidden || $("all").click());

open().catch((error) => {
  $("said").textContent = error.message;
  $("said").className = "bad";
  document.body.dataset.ready = "true";
});
