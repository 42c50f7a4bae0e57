// Every run that is known here, the live one and ended ones; each opens the same pages, several are drawn over one another.

import { $, h, keyed, replace } from "./dom.js";
import { clock, count, modelName, number, seconds } from "./format.js";
import { address, getJson, refusalIn } from "./http.js";
import { saveCsv } from "./export.js";
import * as live from "./live.js";
import { order } from "./runs.js";

const COLUMNS = ["id", "name", "state", "model", "began", "updated", "steps", "of_steps", "reward_last", "reward_best", "best_step", "folder"];
const ASK_AGAIN = 500;
const page = { runs: [], best: {}, picked: new Set() };
let asking = 0;

async function start() {
  const { runs } = await getJson("/ui/api/runs");
  page.runs = runs;
  draw();
  await askForBest();
}

/** All rows of all runs have to be read for the best ones, which takes several answers where there are many. */
async function askForBest() {
  const turn = ++asking;
  const { best } = await getJson("/ui/api/best");
  page.best = best;
  draw();
  if (Object.values(best).some((one) => !one.is_read)) {
    window.setTimeout(() => turn === asking && askForBest().catch(refusalIn($("headline"))), ASK_AGAIN);
  }
}

/** The runs that match, in their order, with their best rewards. */
function shownRuns() {
  return order(page.runs.map((run) => ({ ...run, ...page.best[run.id] })), $("filter").value, $("sort").value);
}

function draw() {
  const shown = shownRuns();
  $("headline").textContent = `${count(page.runs.length, "run")}, ${number(page.runs.filter((run) => run.live).length)} of them live.`;
  $("none").hidden = shown.length > 0;
  keyed($("runs"), shown, (run) => run.id, () => h("li", { class: "card" }), fillRun);
  const picked = [...page.picked].filter((id) => page.runs.some((run) => run.id === id));
  $("compare").hidden = picked.length < 2;
  $("compare").textContent = `Compare ${picked.length} runs`;
  $("compare").href = address("/ui", { run: picked[0], runs: picked.slice(1) });
}

function fillRun(row, run) {
  const now = Date.now() / 1000;
  const lasted = run.began && run.updated ? seconds(run.updated - run.began) : "";
  const box = row.querySelector("input") ?? h("input", { type: "checkbox", onchange: (event) => {
    page.picked[event.target.checked ? "add" : "delete"](run.id);
    draw();
  } });
  box.checked = page.picked.has(run.id);
  box.setAttribute("aria-label", `Compare ${run.name}`);
  row.classList.toggle("picked", box.checked);
  const focused = document.activeElement === box;
  const cell = (what, value, extra) => h("span", {}, h("span", { class: "what" }, what), value, extra ? h("span", { class: "muted" }, ` ${extra}`) : null);
  replace(
    row,
    box,
    h("span", { class: "title" }, h("a", { class: "name", href: address("/ui", { run: run.id }) }, run.name), " ", run.live || run.state !== "unknown" ? h("span", { class: `badge ${run.live || run.state === "running" ? "good" : ""}` }, run.live ? "live" : run.state) : null, h("span", { class: "folder" }, run.folder)),
    cell("model", modelName(run.model) || "–"),
    cell("steps", number(run.steps), run.of_steps ? `of ${number(run.of_steps)}` : ""),
    cell("last reward", number(run.reward_last, 3)),
    cell("best reward", run.is_read ? number(run.reward_best, 3) : "…", Number.isInteger(run.best_step) && run.is_read ? `at step ${number(run.best_step)}` : ""),
    cell("last written", clock(run.updated, now), lasted ? `after ${lasted}` : ""),
    h("span", { class: "links" }, h("a", { href: address("/ui/rollouts", { run: run.id }) }, "rollouts"), h("a", { href: address("/ui/weights", { run: run.id }) }, "weights")),
  );
  if (focused) {
    box.focus();
  }
}

function saveList() {
  const runs = shownRuns();
  saveCsv("runs", COLUMNS, COLUMNS.map((name) => runs.map((run) => run[name] ?? null)));
}

$("filter").addEventListener("input", draw);
$("sort").addEventListener("change", draw);
$("csv").addEventListener("click", saveList);
live.on("rows", live.loads(start, refusalIn($("headline"))));
