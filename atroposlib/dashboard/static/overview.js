// The overview: how the run is in one sentence, its faults, the stack, and the charts, kept up to date by the stream.

import { Chart, Desk } from "./chart.js";
import { $, h, keyed, renew, replace, say } from "./dom.js";
import { GROUPS, chosen, fillEvents } from "./events.js";
import { CHARTS, accuracyOf, chartOf, vitals, wantedNames } from "./figures.js";
import { clock, count } from "./format.js";
import { RefusedError, address, getJson, shownRun } from "./http.js";
import { shortcut } from "./keys.js";
import * as live from "./live.js";
import { appendRows, columnsOf } from "./series.js";
import { aged, drawFaults, drawStack, sentence } from "./stack.js";

const POINTS = 2000;
const MOST_POINTS = 2 * POINTS; // of a page that has been open for long; then it asks for POINTS again
const MOST_EVENTS = 5000;
const MOST_RUNS = 8;
const DRAW_EVERY = 250;
const AGE_EVERY = 5000;
const STREAM_SAID = {
  lost: "The rollout service does not answer; the page shows its last answers.",
  full: "Too many pages are open, and this one gets nothing new: close some of the others.",
};
const RANGES = [
  ["all", null],
  ["last 1,000", 1000],
  ["last 100", 100],
];
const asked = new URLSearchParams(window.location.search);

const page = {
  run: shownRun(),
  runs: new Map(),
  others: (asked.get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST_RUNS - 1),
  catalogue: [],
  events: [],
  leftOut: 0,
  groups: new Set(GROUPS.map((group) => group.id)),
  stack: null,
  told: 0,
  connection: "offline",
  lost: null,
  range: null,
  extra: (asked.get("figures") ?? "").split(",").filter(Boolean),
};
const desk = new Desk(zoomed);
const charts = CHARTS.map((spec) => desk.add(new Chart(desk, { ...spec })));

/** Load the columns that a chart needs of a run and that were not requested yet. */
async function load(id, zoom = null) {
  const { names } = await getJson("/ui/api/names", { run: id });
  const wanted = wantedNames([...CHARTS, ...page.extra.map(chartOf)], names);
  const [first, last] = zoom ?? [null, null];
  const [series, evaluations] = await Promise.all([
    wanted.length ? getJson("/ui/api/series", { run: id, names: wanted, points: POINTS, first, last }) : { run: id, generation: 0, exact: true, step: [], series: {} },
    getJson("/ui/api/evaluations", { run: id }),
  ]);
  const before = page.runs.get(id);
  const columns = columnsOf(series);
  page.runs.set(id, {
    id,
    names,
    columns,
    ranged: zoom !== null,
    whole: zoom === null ? series.exact : before?.whole,
    lastStep: series.last_step ?? null,
    newest: { step: series.last_step ?? null, ...series.newest },
    evaluations: evaluations.evaluations,
  });
}

async function loadAll() {
  const ids = [page.run, ...page.others];
  const results = await Promise.allSettled(ids.map((id) => load(id, desk.zoom && !page.runs.get(id)?.whole ? desk.zoom : null)));
  results.forEach((result, place) => {
    if (result.status === "rejected") {
      if (place > 0) {
        page.others = page.others.filter((id) => id !== ids[place]);
      }
      complain(result.reason);
    }
  });
}

async function start() {
  const [stack, events, runs] = await Promise.all([getJson("/ui/api/stack", { run: page.run }), getJson("/ui/api/events", { run: page.run }), getJson("/ui/api/runs"), loadAll()]);
  take(stack);
  page.events = events.events;
  page.leftOut = events.left_out;
  page.catalogue = runs.runs;
  page.own = page.run || runs.current;
  fillCompare();
  draw();
}

// ---- drawing

let timer = 0;
let drawnAt = 0;

/** Draw soon; many calls are one drawing. */
function schedule() {
  if (!timer) {
    timer = window.setTimeout(() => window.requestAnimationFrame(draw), Math.max(0, drawnAt + DRAW_EVERY - Date.now()));
  }
}

function shown() {
  return ["", ...page.others]
    .map((id, place) => {
      const run = page.runs.get(place === 0 ? page.run : id);
      return run && { ...run, id: run.columns.run ?? run.id, label: labelOf(run.columns.run ?? run.id), colour: `--s${(place % 8) + 1}` };
    })
    .filter(Boolean);
}

function labelOf(id) {
  return page.catalogue.find((run) => run.id === id)?.name ?? id;
}

function draw() {
  timer = 0;
  drawnAt = Date.now();
  const now = Date.now() / 1000;
  const runs = shown();
  if (page.range !== null) {
    follow(page.range);
  }
  desk.events = chosen(page.events, page.groups);
  const measured = runs.map((run) => accuracyOf(run.id, run.evaluations, run.columns));
  for (const chart of charts) {
    if (chart.spec.evaluations) {
      chart.spec.lines = measured.flatMap((one) => one.lines).filter((line, at, all) => all.findIndex((other) => other.name === line.name) === at);
      chart.show(runs.map((run, place) => ({ ...run, columns: measured[place].columns })));
    } else {
      chart.spec.lines = linesOf(chart.spec, runs);
      chart.show(runs);
    }
  }
  drawVitals(runs[0], measured[0]);
  drawStatus(now);
  fillEvents($("events"), $("events-note"), desk.events, page.leftOut, now);
  replace($("run-legend"), runs.length > 1 ? runs.map((run) => h("li", {}, h("i", { style: { background: `var(${run.colour})` } }), run.label)) : []);
}

function linesOf(spec, runs) {
  const original = CHARTS.find((chart) => chart.id === spec.id)?.lines ?? spec.lines;
  return [...original, ...(spec.group?.(runs[0]?.names ?? []) ?? [])];
}

function drawVitals(run, measured) {
  const rows = vitals(run?.newest ?? {}, measured ?? { lines: [], columns: { columns: {} } }, page.stack);
  keyed($("vitals"), rows, ([what]) => what, ([what]) => h("div", {}, h("dt", {}, what), h("dd", {})), (row, [, value, how]) => renew(row.lastElementChild, [value, how], () => [value, how ? h("small", {}, ` ${how}`) : null]));
}

/** The service has sent the state of the stack. */
function take(stack) {
  page.stack = stack.time === null ? null : stack;
  page.told = Date.now() / 1000;
}

function drawStatus(now) {
  const stack = page.stack && aged(page.stack, (page.lost ?? now) - (page.stack.live ? page.told : page.stack.time), page.lost);
  $("stack-section").hidden = stack === null;
  drawFaults($("faults"), stack?.live ? stack.faults : [], now);
  if (stack !== null) {
    drawStack($("stack"), stack, now);
  }
  const own = page.catalogue.find((run) => run.id === page.own);
  const written = own ? `${labelOf(own.id)}: ${count(own.steps, "step")}, ${own.state === "ended" ? "ended, " : ""}last written ${clock(own.updated, now)}` : "No steps yet";
  say($("headline"), STREAM_SAID[page.connection] ?? sentence(stack, written, now));
}

function complain(error) {
  if (!(error instanceof RefusedError)) {
    throw error;
  }
  console.warn(error.message);
  say($("headline"), error.message);
}

// ---- what a person changes

function setAddress() {
  const here = address(window.location.pathname, { run: page.run, runs: page.others, figures: page.extra, smooth: desk.smoothing || null });
  window.history.replaceState(null, "", here);
}

function setSmoothing(value) {
  desk.smoothing = value;
  $("smoothing").value = value;
  $("smoothing-value").textContent = value > 0 ? value.toFixed(2) : "off";
  desk.redraw();
}

/** A person chose these steps in a chart. */
function zoomed() {
  page.range = null;
  fillRanges();
  refine();
}

let zooms = 0;

/** Where points stand for several rows, the rows of what is shown now are asked for. */
async function refine() {
  const turn = ++zooms;
  if ([...page.runs.values()].some((run) => run.whole === false)) {
    await loadAll();
  }
  if (turn === zooms) {
    schedule();
  }
}

/** The last so many steps; they move on with the run. Null: all. */
function follow(steps) {
  const last = page.runs.get(page.run)?.lastStep ?? null;
  desk.zoom = steps === null || last === null ? null : [Math.max(0, last - steps), Math.max(last, 1)];
}

function segment(host, choices, current, act) {
  replace($(host), choices.map(([label, value]) => h("button", { type: "button", "aria-pressed": String(value === current), onclick: () => act(value) }, label)));
}

function fillRanges() {
  segment("ranges", RANGES, desk.zoom && page.range === null ? undefined : page.range, (steps) => {
    page.range = steps;
    follow(steps);
    fillRanges();
    refine();
  });
}

function fillBands() {
  segment("bands", [["seconds", "seconds"], ["share", "share"]], desk.band, (value) => {
    desk.band = value;
    fillBands();
    desk.redraw();
  });
}

function fillGroups() {
  replace(
    $("event-groups"),
    GROUPS.map((group) =>
      h("label", {}, h("input", { type: "checkbox", checked: page.groups.has(group.id), onchange: (event) => {
        page.groups[event.target.checked ? "add" : "delete"](group.id);
        draw();
      } }), group.label),
    ),
  );
}

function fillCompare() {
  const others = page.catalogue.filter((run) => run.id !== page.own);
  $("compare-count").textContent = page.others.length ? `(${page.others.length})` : "";
  replace(
    $("compare-list"),
    others.length
      ? others.map((run) =>
          h("label", {}, h("input", { type: "checkbox", checked: page.others.includes(run.id), disabled: !page.others.includes(run.id) && page.others.length >= MOST_RUNS - 1, onchange: (event) => compare(run.id, event.target.checked) }), h("span", {}, run.name, h("span", { class: "muted" }, ` ${count(run.steps, "step")}`))),
        )
      : h("p", { class: "muted" }, "No other run is known here."),
  );
}

async function compare(id, wanted) {
  page.others = wanted ? [...page.others, id] : page.others.filter((other) => other !== id);
  if (!wanted) {
    page.runs.delete(id);
  } else {
    await load(id).catch((error) => {
      page.others = page.others.filter((other) => other !== id);
      complain(error);
    });
  }
  setAddress();
  fillCompare();
  draw();
}

function addChart(name) {
  const chart = desk.add(new Chart(desk, chartOf(name)));
  charts.push(chart);
  $("charts").insertBefore(chart.figure, $("more-figures"));
}

function figureChoice() {
  const select = h("select", { "aria-label": "Add a chart of another figure", onfocus: () => fill(), onchange: async () => {
    const name = select.value;
    if (name) {
      page.extra.push(name);
      addChart(name);
      setAddress();
      await loadAll();
      draw();
    }
    fill();
  } });
  function fill() {
    const names = page.runs.get(page.run)?.names ?? [];
    replace(select, h("option", { value: "" }, "Add a figure…"), names.filter((name) => !page.extra.includes(name)).map((name) => h("option", { value: name }, name)));
  }
  fill();
  return h("div", { class: "figure-choice", id: "more-figures" }, select);
}

// ---- the stream

live.on("rows", async (message) => {
  const run = page.runs.get(page.run);
  if (run) {
    run.lastStep = message.last_step ?? run.lastStep;
    for (const row of message.new ?? []) {
      Object.assign(run.newest, Object.fromEntries(Object.entries(row).filter(([, value]) => typeof value === "number")), { step: run.lastStep });
    }
  }
  // A figure that no row had before needs a column of its own. That is each of them in a page that was opened before the first step.
  const known = new Set(run?.names);
  const more = (message.new ?? []).some((row) => Object.entries(row).some(([name, value]) => typeof value === "number" && name !== "step" && !known.has(name)));
  const past = run?.ranged && page.range === null && message.new !== null && message.generation === run.columns.generation;
  if (run && !more && (past || appendRows(run.columns, message, MOST_POINTS))) {
    schedule(); // of steps of the past nothing is new
  } else {
    reload();
  }
});
live.on("stack", (stack) => {
  take(stack);
  schedule();
});
live.on("event", (event) => {
  const events = [...page.events.filter((known) => known.id !== event.id), event];
  page.events = events.slice(-MOST_EVENTS);
  page.leftOut += events.length - page.events.length;
  schedule();
});
live.on("evaluation", (evaluation) => {
  const run = page.runs.get(page.run);
  if (run && !run.evaluations.some((known) => known.id === evaluation.id && known.time === evaluation.time)) {
    run.evaluations.push(evaluation);
    schedule();
  }
});
live.on("state", (state) => {
  page.connection = state;
  page.lost = state === "lost" ? (page.lost ?? Date.now() / 1000) : null;
  if (state in STREAM_SAID) { // when the stream is there again, the page is loaded again, and drawn then
    drawStatus(Date.now() / 1000);
  }
});
window.setInterval(refresh, AGE_EVERY);

/** Draw how old everything is by now. For a run of files, ask first what has become of its processes. */
async function refresh() {
  if (page.stack && !page.stack.live && !document.hidden) {
    await getJson("/ui/api/stack", { run: page.run }).then(take, complain);
  }
  drawStatus(Date.now() / 1000);
}

let reloading = 0;

/** Ask for everything again, at most every three seconds: what was taken back may have been events, too. */
function reload() {
  reloading ||= window.setTimeout(() => {
    reloading = 0;
    start().catch(complain);
  }, 3000);
}

// ---- begin

$("charts").append(...charts.map((chart) => chart.figure), figureChoice());
page.extra.forEach(addChart);
$("smoothing").addEventListener("input", (event) => setSmoothing(Number(event.target.value)));
$("smoothing").addEventListener("change", setAddress);
setSmoothing(Math.min(0.98, Math.max(0, Number(asked.get("smooth")) || 0)));
fillRanges();
fillBands();
fillGroups();
document.addEventListener("click", (event) => {
  if (!$("compare").contains(event.target)) {
    $("compare").open = false;
  }
});
$("compare").addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    $("compare").open = false;
    $("compare").querySelector("summary").focus();
  }
});
shortcut("s", "smoothing: off, some, much", () => {
  setSmoothing(desk.smoothing === 0 ? 0.6 : desk.smoothing < 0.9 ? 0.9 : 0);
  setAddress();
});
shortcut("a", "all steps", () => desk.setZoom(null, null));
shortcut("b", "where time goes: seconds or share", () => $("bands").querySelector('[aria-pressed="false"]').click());
live.loads(start, complain);
