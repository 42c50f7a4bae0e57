// Weights and bits: which weights every server has, how they came there, and in deterministic mode whether the bits agree.

import { compared, distance, fieldsOf, hexOf } from "./bits.js";
import { Chart, Desk } from "./chart.js";
import { $, h, keyed, renew, say } from "./dom.js";
import { bytes, clock, count, number, quoted, seconds, words } from "./format.js";
import { address, getJson, refusalIn, shownRun } from "./http.js";
import * as live from "./live.js";
import { BADGES, signText } from "./stack.js";

const SHOWN = 500;
const PHASES = 8;
const STILL = ["stalled", "halted", "resume"]; // for how long nothing was sampled: parts of several phases, and no phase
const PLAIN = ["bytes_moved", "compared_tokens", "mismatched_tokens", "older_tokens"]; // figures of an update that are charted as they are
const PLACES = [
  ["weight_version", "weight version"],
  ["batch_group", "group of the batch"],
  ["sequence", "rollout of the group"],
  ["position", "position"],
  ["token", "token"],
];

const desk = new Desk(() => undefined);
const page = { weights: null, stack: null };
const charts = {
  phases: desk.add(new Chart(desk, { id: "sync-phases", title: "What handing over takes", unit: "a step, by phase", band: true, form: seconds, lines: [] })),
  gaps: desk.add(new Chart(desk, { id: "halted", title: "Longest halt of an engine", unit: "by version", fromZero: true, form: seconds, lines: [], empty: "No server has reported an update yet." })),
  bits: desk.add(new Chart(desk, { id: "compared", title: "Tokens compared", unit: "a step", fromZero: true, form: whole, lines: [{ name: "compared_tokens", label: "compared" }, { name: "mismatched_tokens", label: "that differ" }, { name: "older_tokens", label: "of older weights" }], empty: "Not in deterministic mode." })),
  moved: desk.add(new Chart(desk, { id: "moved", title: "Bytes moved", unit: "a step", fromZero: true, form: bytes, lines: [{ name: "bytes_moved", label: "to all servers" }] })),
};

async function start() {
  const [weights, stack] = await Promise.all([getJson("/ui/api/weights", { run: shownRun() }), getJson("/ui/api/stack", { run: shownRun() })]);
  page.weights = weights;
  page.stack = stack.time === null ? null : stack;
  draw();
}

function draw() {
  const { servers, updates, deterministic } = page.weights;
  const newest = updates.at(-1);
  say($("headline"), sentence(servers, newest));
  $("no-servers").hidden = servers.length > 0;
  keyed($("servers"), servers, (server) => server.url, () => h("li", { class: "card" }), (element, server) => fillServer(element, server, newest, servers));
  drawCharts(servers, updates);
  drawBits(deterministic);
  drawUpdates(updates);
}

/** A sentence: do all serve the same, and what has the trainer sent? */
function sentence(servers, newest) {
  if (!servers.length) {
    return newest ? `The trainer's last update was step ${number(newest.step)}.` : "No update yet.";
  }
  const known = servers.filter((server) => server.weight_version !== null);
  const versions = [...new Set(known.map((server) => server.weight_version))].sort((a, b) => a - b);
  const equal = newest && known.every((server) => server.checksums.includes(newest.checksum));
  const who = known.length === servers.length ? (servers.length === 1 ? "The server" : `All ${servers.length} servers`) : `${known.length} of ${servers.length} servers`;
  const serve = `${who} ${known.length === 1 ? "serves" : "serve"} ${versions.length === 1 ? "version" : "versions"} ${versions.map((version) => number(version)).join(" and ")}`;
  const failures = servers.map((server) => server.failures).filter((failed) => typeof failed === "number");
  const sum = failures.reduce((all, failed) => all + failed, 0);
  const told = failures.length === 0 ? "" : sum ? `; ${count(sum, "failed update")}` : "; no update failed";
  return `${known.length ? serve : "No server says what it serves"}${equal && known.length ? ", with the checksum that the trainer has" : ""}${told}.`;
}

function standingOf(server) {
  const row = page.stack?.servers.find((other) => other.url === server.url);
  const sign = page.stack?.signs?.[`server-${server.url}`];
  if (sign) {
    return [sign.state === "silent" ? "no sign" : sign.state, signText(sign, Date.now() / 1000)];
  }
  if (!page.stack?.live) {
    return [null, ""];
  }
  if (row?.health === "silent" || row?.standing === "away") {
    return ["gone", row.reason || row.detail];
  }
  if (server.quarantine || row?.health === "bad" || row?.standing === "quarantined") {
    return ["faulty", server.quarantine || row?.reason || row?.detail];
  }
  return row?.standing === "joining" ? ["starting", row.reason] : ["good", ""];
}

/** The part of a stack that changes when a server has more to report. */
function troubles(stack) {
  return JSON.stringify(stack.servers.map((server) => [server.url, server.health, server.standing, server.failures, server.last_error]));
}

/** A server that has the same version of as many ranks, and other weights; undefined if there is none, as it should be. */
function disagreeing(server, servers) {
  const alike = (other) => other.weight_version === server.weight_version && other.weight_epoch === server.weight_epoch && other.checksums.length === server.checksums.length;
  return servers.find((other) => alike(other) && other.checksums.some((checksum, rank) => checksum !== server.checksums[rank]));
}

function fillServer(element, server, newest, servers) {
  const [state, why] = standingOf(server);
  element.dataset.state = state ?? "unknown";
  const now = page.stack?.time ?? Date.now() / 1000;
  const phases = Object.entries(server.last_update ?? {}).filter(([name, value]) => value > 0 && !STILL.includes(name));
  const { stalled, halted } = server.last_update ?? {};
  const serves = server.weight_version === null ? "not known" : `version ${number(server.weight_version)}`;
  const same = newest && server.checksums.includes(newest.checksum);
  const other = disagreeing(server, servers);
  renew(element, [{ ...server, history: null }, state, why, same, other?.url], () => [
    h("h3", {}, server.url.replace(/^https?:\/\//, ""), state ? h("span", { class: `badge ${BADGES[state]}` }, state) : null),
    h("p", { class: "version" }, serves),
    h(
      "dl",
      { class: "facts" },
      fact("checksum", server.checksums.length ? h("span", { class: "checksum" }, server.checksums.join(" "), " ", same ? h("span", { class: "badge good" }, "the trainer's") : null, other ? h("span", { class: "badge bad" }, `not that of ${other.url}`) : null) : "–"),
      fact("trainer's life", server.weight_epoch ? clock(server.weight_epoch / 1000, now) : "the checkpoint's"),
      fact("bridge", [server.phase, server.mode, server.transfer].filter(Boolean).map(words).join(", ") || "–"),
      fact("updates", typeof server.updates === "number" ? `${number(server.updates)}, ${number(server.failures)} failed` : "–"),
      fact("moved last", bytes(server.last_bytes ?? null)),
      fact("last gap", seconds(stalled ?? halted)),
      fact("longest gap", server.longest_gap === null || server.longest_gap === undefined ? "–" : `${seconds(server.longest_gap)}${server.longest_gap_at ? `, at ${clock(server.longest_gap_at, now)}` : ""}`),
    ),
    phases.length ? phaseBar(phases) : null,
    why ? h("p", { class: `trouble ${BADGES[state] === "bad" ? "bad" : "muted"}` }, why) : null,
    server.last_error ? h("p", { class: "trouble muted" }, "last failure: ", server.last_error) : null,
  ]);
}

function fact(what, value) {
  return [h("dt", {}, what), h("dd", {}, value)];
}

function phaseBar(phases) {
  const total = phases.reduce((sum, [, value]) => sum + value, 0);
  const shown = [...phases].sort((a, b) => b[1] - a[1]).slice(0, PHASES);
  const drawn = phases.filter((phase) => shown.includes(phase));
  return [
    h("div", { class: "phases", role: "img", "aria-label": `The last update took ${seconds(total)}` }, drawn.map(([, value], place) => h("i", { style: { width: `${(100 * value) / total}%`, background: `var(--s${(place % 8) + 1})` } }))),
    h("ul", { class: "phase-names", "aria-label": "The last update by phase" }, h("li", {}, "last update"), drawn.map(([name, value], place) => h("li", {}, h("i", { style: { background: `var(--s${(place % 8) + 1})` } }), `${words(name)} `, h("b", {}, seconds(value))))),
  ];
}

function drawCharts(servers, updates) {
  const names = [...new Set(updates.flatMap((update) => Object.keys(update.sync ?? {})))];
  const step = updates.map((update) => update.step);
  const columns = Object.fromEntries([...names.map((name) => [name, updates.map((update) => update.sync?.[name] ?? null)]), ...PLAIN.map((name) => [name, updates.map((update) => update[name] ?? null)])].map(([name, mean]) => [name, { mean, low: null, high: null }]));
  const run = { id: shownRun() || "run", label: shownRun() || "this run", colour: "--s1", columns: { step, columns } };
  charts.phases.spec.lines = names.map((name) => ({ name, label: words(name) }));
  charts.phases.show([run]);
  charts.moved.show([run]);
  charts.bits.show([run]);
  charts.gaps.spec.lines = [{ name: "gap", label: "engine stands still" }];
  const told = servers.filter((server) => server.history?.some((row) => typeof row.gap === "number"));
  if (!told.length) {
    const halted = updates.map((update) => update.server?.halted ?? null); // of the slowest server, as the trainer wrote it
    charts.gaps.show([{ ...run, columns: { step, columns: { gap: { mean: halted, low: null, high: null } } } }]);
    return;
  }
  charts.gaps.show(told.map((server, place) => ({ id: server.url, label: server.url.replace(/^https?:\/\//, ""), colour: `--s${(place % 8) + 1}`, columns: gapsOf(server.history) })));
}

/** The gap of each version; of a version that came twice (after a resume) the later one. */
function gapsOf(history) {
  const byVersion = new Map(history.filter((row) => row.version !== null).map((row) => [row.version, row.gap]));
  const step = [...byVersion.keys()].sort((a, b) => a - b);
  return { step, columns: { gap: { mean: step.map((version) => byVersion.get(version) ?? null), low: null, high: null } } };
}

function drawBits(deterministic) {
  const { on, compared: tokens, mismatched, older, first, kernels } = deterministic;
  $("bits-said").textContent = on ? "deterministic mode: every token's logprob is compared, bit by bit" : "not in deterministic mode: sampler and trainer are compared by KL alone (overview)";
  $("bits-figures").hidden = !on && !tokens;
  const rows = [
    ["tokens compared", whole(tokens), ""],
    ["that differ", whole(mismatched), mismatched > 0 ? `1 in ${whole(tokens / mismatched)}` : ""],
    ["of older weights", whole(older), older > 0 ? "compared with nothing" : ""],
  ];
  keyed($("bits-figures"), rows, ([what]) => what, ([what]) => h("div", {}, h("dt", {}, what), h("dd", {})), (row, [what, value, how]) => {
    renew(row.lastElementChild, [value, how], () => [value, how ? h("small", {}, ` ${how}`) : null]);
    row.lastElementChild.className = what === "that differ" && mismatched > 0 ? "bad" : "";
  });
  const said = mismatched > 0 ? h("p", { class: "bad" }, "The first one was not kept here; the trainer's log names it.") : on && tokens ? h("p", { class: "good" }, "Not one differs.") : null;
  drawKernels(kernels);
  renew($("first"), [first, mismatched > 0, on && tokens > 0], () => (first ? mismatch(first) : said));
}

/** The kernels of trainer and servers by operation, whatever operations there are, and each server's self-test. */
function drawKernels(kernels) {
  $("kernels-region").hidden = !kernels;
  if (!kernels) {
    return;
  }
  const servers = Object.entries(kernels.servers).sort(([one], [other]) => one.localeCompare(other));
  const names = [...new Set([kernels.trainer, ...servers.map(([, server]) => server.kernels)].flatMap(Object.keys))].sort();
  const rows = names.map((name) => [name, kernels.trainer[name] ?? "–", ...servers.map(([, server]) => server.kernels[name] ?? "–")]);
  rows.push(["self-test", "–", ...servers.map(([, server]) => selfTest(server))]);
  renew($("kernels-head"), [servers.map(([url]) => url)], () => h("tr", {}, ["kernel", "trainer", ...servers.map(([url]) => url.replace(/^https?:\/\//, ""))].map((title) => h("th", { scope: "col" }, title))));
  keyed($("kernels"), rows, ([name]) => name, () => h("tr"), (row, [name, ...values]) =>
    renew(row, values, () => [h("th", { scope: "row" }, name), values.map((value) => h("td", { class: name !== "self-test" && value !== values[0] ? "bad" : "" }, value))]),
  );
}

function selfTest({ checks, seconds: duration }) {
  return typeof checks === "number" ? `${count(checks, "batch", "batches")} with the same bits, ${seconds(duration ?? null)}` : "–";
}

/** Every digit of a count. */
function whole(value) {
  return Math.round(value ?? 0).toLocaleString("en-US");
}

/** The first token that differed, in full: where it is, both numbers to the last digit and bit, and the way to it. */
function mismatch(first) {
  const { sampled, recomputed } = first;
  const steps = distance(sampled, recomputed);
  const facts = PLACES.filter(([name]) => first[name] !== null && first[name] !== undefined).map(([name, label]) => fact(label, whole(first[name])));
  const pair = [["sampler", sampled, recomputed], ["trainer", recomputed, sampled]];
  const at = `#r${first.sequence ?? 0}t${first.position ?? 0}`;
  return h(
    "div",
    { class: "mismatch", role: "alert" },
    h("h3", {}, "The first token that differs"),
    h("dl", { class: "facts" }, facts, first.text ? fact("its text", h("code", {}, quoted(first.text))) : null),
    h("dl", { class: "pair" }, pair.map(([who, value, other]) => [h("dt", {}, who), h("dd", {}, `${value} ${hexOf(value)}`, h("br"), bitString(value, other))])),
    steps === null ? null : h("p", {}, `${count(steps, "float32 step")} apart, ${Math.abs(sampled - recomputed).toExponential(3)} nats.`),
    typeof first.group === "number" ? h("p", {}, h("a", { href: address(`/ui/rollouts/${first.group}`, { run: shownRun() }) + at }, "Open the rollout at this token")) : null,
  );
}

function bitString(value, other) {
  return compared(fieldsOf(value).join(" "), fieldsOf(other).join(" ")).map(([part, same]) => (same ? part : h("mark", {}, part)));
}

function drawUpdates(updates) {
  const rows = updates.slice(-SHOWN).reverse();
  keyed($("updates"), rows, (update) => update.step, () => h("tr"), (row, update) =>
    renew(row, update, () => [
      h("td", { class: "number" }, number(update.step)),
      h("td", { class: "checksum" }, update.checksum || "–"),
      h("td", { class: "checksum" }, update.weights_sha || "–"),
      h("td", { class: "number" }, seconds(update.seconds_sync ?? null)),
      h("td", { class: "number" }, bytes(update.bytes_moved ?? null)),
    ]),
  );
  $("list-note").textContent = rows.length ? `the last ${count(rows.length, "step")}` : "none yet";
}

const reload = live.loads(start, refusalIn($("headline")));
live.on("rows", reload);
live.on("weights", reload);
live.on("stack", (stack) => {
  if (page.stack && troubles(stack) !== troubles(page.stack)) {
    reload(); // a server's text on its trouble is not in the stack
  }
  page.stack = stack;
  if (page.weights) {
    draw();
  }
});
live.on("state", (state) => {
  if (state === "lost") {
    say($("headline"), "The rollout service does not answer; the page shows its last answers.");
  }
});
$("charts").append(...Object.values(charts).map((chart) => chart.figure));
