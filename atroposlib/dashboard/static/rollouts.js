// The list of rollouts, in every order, by environment and text, a page at a time.

import { $, h, replace } from "./dom.js";
import { clock, count, number } from "./format.js";
import { address, getJson, shownRun } from "./http.js";
import { shortcut } from "./keys.js";
import * as live from "./live.js";
import { visible } from "./visible.js";

const FIELDS = ["sort", "environment", "text"];
const LIMIT = 50;
const RENEW_SECONDS = 3;
let next = null;
let searched = 0;
let asking = 0;
let askedAt = 0;
let searching = false;

function wanted() {
  return Object.fromEntries(FIELDS.map((name) => [name, $(name).value]));
}

/** The address of this list, which another person can open. */
function remember() {
  const { sort, environment, text } = wanted();
  const path = address("/ui/rollouts", { run: shownRun(), sort: sort === "newest" ? "" : sort, environment, text });
  window.history.replaceState(null, "", path);
}

function row(head) {
  const versions = head.oldest === null ? number(null) : head.oldest === head.newest ? String(head.oldest) : `${head.oldest}–${head.newest}`;
  const link = address(`/ui/rollouts/${head.group}`, { run: shownRun(), rollout: head.rollout });
  return h(
    "tr",
    { "data-id": head.id },
    h("td", {}, h("a", { href: link }, `${head.group}.${head.rollout}`), " ", h("a", { href: address(`/ui/rollouts/${head.group}`, { run: shownRun() }), class: "muted" }, "group")),
    h("td", { class: "number" }, number(head.score)),
    h("td", { class: "number" }, number(head.sampled)),
    h("td", { class: "number" }, number(head.mean_logprob)),
    h("td", { class: "number" }, number(head.drift)),
    h("td", { class: "number" }, versions),
    h("td", {}, visible(head.environment)),
    h("td", {}, clock(head.time, Date.now() / 1000)),
    h("td", { class: "begins" }, visible(head.preview)),
  );
}

function nameEnvironments(names) {
  const select = $("environment");
  const chosen = select.value;
  const known = [...select.options].map((option) => option.value);
  for (const name of names) {
    if (name && !known.includes(name)) {
      select.append(h("option", { value: name }, visible(name)));
    }
  }
  select.value = chosen;
}

function nothing({ sort, text }, total) {
  if (!total) {
    return "No rollout is kept yet: they come as environments post them.";
  }
  if (sort === "drifted") {
    return "The trainer has reported no rollout here: it reports a few sequences of each step (--report-sequences).";
  }
  return text ? "No rollout has this text." : "No rollout is like this.";
}

/** Ask for a page of the list. A search answers with what it has found by then. Ask it until the page is full, it ends or is stopped. */
async function ask(from = null) {
  const mine = ++asking;
  const query = wanted();
  let found = 0;
  next = from;
  searching = query.text !== "";
  $("more").disabled = !searching;
  try {
    do {
      askedAt = Date.now();
      const told = await getJson("/ui/api/rollouts", { run: shownRun(), ...query, cursor: next, limit: LIMIT - found });
      if (mine !== asking) {
        return;
      }
      if (from === null && found === 0 && next === null) {
        replace($("list"));
        searched = 0;
        $("fresh").hidden = true;
      }
      found += told.rollouts.length;
      next = told.next;
      searching &&= next !== null && found < LIMIT;
      show(query, told);
    } while (searching);
  } catch (error) {
    if (mine === asking) {
      searching = false;
      $("said").textContent = error.message;
      $("said").className = "bad";
    }
  } finally {
    if (mine === asking) {
      $("more").disabled = false;
      document.body.dataset.ready = "true";
    }
  }
}

/** Show what has come. */
function show(query, told) {
  searched += told.searched;
  $("list").append(...told.rollouts.map(row));
  nameEnvironments(told.environments);
  const shown = $("list").children.length;
  $("none").hidden = shown > 0 || next !== null;
  $("none").textContent = nothing(query, told.total);
  $("said").className = "";
  const leftOut = told.left_out ? `; ${count(told.left_out, "group")} came faster than groups are kept for the page` : "";
  $("said").textContent = `${count(shown, "rollout")} of ${number(told.total)}${leftOut}`;
  $("more").hidden = next === null;
  $("more").textContent = searching ? "Stop" : query.text ? "Search on" : "More";
  $("searched").textContent = query.text ? `${count(searched, "rollout")} searched${searching ? " …" : ""}` : "";
}

/** Go on with the list, or stop the search that is under way. */
function goOn() {
  if (searching) {
    asking += 1;
    searching = false;
    $("more").textContent = "Search on";
    $("searched").textContent = `${count(searched, "rollout")} searched`;
  } else {
    ask(next);
  }
}

function again() {
  remember();
  return ask();
}

async function begin() {
  const query = new URLSearchParams(window.location.search);
  if (query.get("environment")) {
    nameEnvironments([query.get("environment")]);
  }
  for (const name of FIELDS) {
    if (query.get(name)) {
      $(name).value = query.get(name);
    }
  }
  if ($("sort").selectedIndex < 0) {
    $("sort").value = "newest";
  }
  await ask();
}

function move(step) {
  const links = [...$("list").querySelectorAll("td:first-child a:first-child")];
  const place = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, place + step))]?.focus();
}

$("filters").addEventListener("submit", (event) => {
  event.preventDefault();
  again();
});
$("sort").addEventListener("change", again);
$("environment").addEventListener("change", again);
$("text").addEventListener("search", again);
$("more").addEventListener("click", goOn);
$("fresh").addEventListener("click", () => ask());
live.on("rollouts", (told) => {
  if ($("sort").value !== "newest" || $("text").value || Date.now() - askedAt < 1000 * RENEW_SECONDS) {
    return;
  }
  if (window.scrollY === 0 && $("list").children.length <= LIMIT && !$("list").contains(document.activeElement)) {
    ask();
  } else {
    $("fresh").hidden = false;
    $("fresh").textContent = `Show newer ones, up to group ${told.newest}`;
  }
});
shortcut("j", "next rollout", () => move(1));
shortcut("k", "the one before", () => move(-1));
shortcut("/", "search for a text", () => $("text").focus());
shortcut("m", "more of the list", () => $("more").hidden || $("more").click());
shortcut("r", "reload the list", () => ask());

begin();
