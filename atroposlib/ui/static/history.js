// Every run that is known here, the one that goes on and those that ended; each opens the same pages, several are drawn over one another.

import { $, h, keyed, replace } from "./dom.js";
import { clock, count, number, seconds } from "./format.js";
import { address, getJson, refusalIn } from "./http.js";
import { saveCsv } from "./export.js";
import * as live from "./live.js";
import { order } from "./runs.js";

const COLUMNS = ["id", "name", "state", "model", "began", "updated", "steps", "of_steps", "reward_last", "folder"];
const page = { runs: [], picked: new Set() };

async function start() {
  const { runs } = await getJson("/ui/api/runs");
  page.runs = runs;
  draw();
}

function draw() {
  const shown = order(page.runs, $("filter").value, $("sort").value);
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
    cell("model", run.model ?? "–"),
    cell("steps", number(run.steps), run.of_steps ? `of ${number(run.of_steps)}` : ""),
    cell("last reward", number(run.reward_last, 3)),
    cell("last written", clock(run.updated, now), lasted ? `after ${lasted}` : ""),
    h("span", { class: "links" }, h("a", { href: address("/ui/rollouts", { run: run.id }) }, "rollouts"), h("a", { href: address("/ui/weights", { run: run.id }) }, "weights")),
  );
  if (focused) {
    box.focus();
  }
}

function saveList() {
  const runs = order(page.runs, $("filter").value, $("sort").value);
  saveCsv("runs", COLUMNS, COLUMNS.map((name) => runs.map((run) => run[name] ?? null)));
}

$("filter").addEventListener("input", draw);
$("sort").addEventListener("change", draw);
$("csv").addEventListener("click", saveList);
live.on("rows", live.loads(start, refusalIn($("headline"))));
