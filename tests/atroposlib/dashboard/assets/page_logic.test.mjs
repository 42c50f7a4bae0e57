// Run by test_page_assets.py with node's own test runner, in a copy of the page's modules.

import assert from "node:assert/strict";
import test from "node:test";

import { compared, distance, fieldsOf, hexOf } from "./bits.js";
import { accuracyOf, vitals, wantedNames } from "./figures.js";
import * as format from "./format.js";
import { address } from "./http.js";
import { order } from "./runs.js";
import * as series from "./series.js";
import { aged, pictureOf, sentence, signText } from "./stack.js";

const answer = (step, reward, more = {}) => ({ run: "a", generation: 1, exact: true, step, series: { reward: { mean: reward, low: null, high: null } }, ...more });

test("smoothing keeps a constant, follows its first value, and skips what is not known", () => {
  assert.deepEqual(series.smoothed([1, 5], 0), [1, 5]);
  for (const value of series.smoothed([2, 2, null, 2], 0.9)) {
    assert.ok(value === null || Math.abs(value - 2) < 1e-12);
  }
  const [first, second] = series.smoothed([1, 3], 0.5);
  assert.equal(first, 1);
  assert.ok(Math.abs(second - (0.25 * 1 + 0.5 * 3) / 0.75) < 1e-12);
});

test("smoothing stays between the lowest and highest value", () => {
  let state = 7;
  const random = () => ((state = (state * 16807) % 2147483647) / 2147483647);
  for (let round = 0; round < 50; round += 1) {
    const values = Array.from({ length: 30 }, () => (random() < 0.2 ? null : random() * 10 - 5));
    const known = values.filter((value) => value !== null);
    for (const value of series.smoothed(values, random() * 0.98)) {
      assert.ok(value === null || (value >= Math.min(...known) - 1e-9 && value <= Math.max(...known) + 1e-9));
    }
  }
});

test("rows are appended once, in order, only to columns of the same file, and not for ever", () => {
  const columns = series.columnsOf(answer([1, 2], [0.1, 0.2]));
  assert.ok(series.appendRows(columns, { generation: 1, new: [{ step: 2, reward: 9 }, { step: 3, reward: "NaN" }, { step: 4, reward: 0.4 }] }));
  assert.deepEqual(columns.step, [1, 2, 3, 4]);
  assert.deepEqual(columns.columns.reward.mean, [0.1, 0.2, null, 0.4]);
  assert.ok(!series.appendRows(columns, { generation: 2, new: [] }));
  assert.ok(!series.appendRows(columns, { generation: 1, new: null }));
  assert.ok(!series.appendRows(series.columnsOf(answer([10], [1])), { generation: 1, new: [{ step: 4 }] }));
  assert.ok(!series.appendRows(columns, { generation: 1, new: [{ step: 5 }] }, 4));
  const points = series.columnsOf({ run: "a", generation: 1, exact: false, step: [10], series: { reward: { mean: [2], low: [1], high: [3] } } });
  assert.ok(series.appendRows(points, { generation: 1, new: [{ step: 9, reward: 7 }, { step: 11, reward: 4 }, {}] }), "point 10 holds step 9");
  assert.deepEqual([points.step, points.columns.reward], [[10, 11], { mean: [2, 4], low: [1, 4], high: [3, 4] }]);
});

test("what is said later of a step is added to it, and nothing that was known is changed", () => {
  const columns = series.columnsOf({ run: "a", generation: 1, exact: true, step: [1, 2], series: { reward: { mean: [0.1, 0.2], low: null, high: null }, "environment/a": { mean: [0.5, null], low: null, high: null } } });
  assert.ok(series.appendRows(columns, { generation: 1, new: [{ step: 1, "environment/a": 9 }, { step: 2, "environment/a": 0.75 }, { step: 3, reward: 0.3 }] }));
  assert.deepEqual([columns.step, columns.columns.reward.mean, columns.columns["environment/a"].mean], [[1, 2, 3], [0.1, 0.2, 0.3], [0.5, 0.75, null]]);
});

test("lines of several runs come on one axis: undefined where a run has no such step, null where it knows no value", () => {
  const lines = [{ step: [1, 3], values: [10, null] }, { step: [2, 3], values: [20, 30] }];
  assert.deepEqual(series.onOneAxis(lines), [[1, 2, 3], [10, undefined, null], [undefined, 20, 30]]);
  assert.deepEqual(series.onOneAxis([lines[0], { step: [1, 3], values: [1, 2] }]), [[1, 3], [10, null], [1, 2]]);
});

test("a band is stacked, and as shares it ends at 1", () => {
  const columns = [[1, null], [3, 4]];
  assert.deepEqual(series.stacked(columns), [[1, 0], [4, 4]]);
  assert.deepEqual(series.stacked(series.shares(columns)).at(-1), [1, 1]);
  assert.deepEqual(series.shares([[0], [0]]), [[0], [0]]);
});

test("an axis has room, and is never empty", () => {
  for (const [low, high] of [[0, 1], [3, 3], [0, 0], [-2, 5], [null, null], [1e-9, 1e9]]) {
    const [bottom, top] = series.extent(low, high, false);
    assert.ok(bottom < top && (low === null || (bottom <= low && top >= high)));
  }
  assert.equal(series.extent(2, 4, true)[0], 0);
});

test("CSV has every digit, empty cells for what is not known, and no formulas", () => {
  const text = series.toCsv(["step", 'a "b", c'], [[1, 2], [0.1 + 0.2, null]]);
  assert.equal(text, 'step,"a ""b"", c"\r\n1,0.30000000000000004\r\n2,\r\n');
  assert.equal(series.toCsv(["=cmd()"], [["+1", "a\nb"]]), "'=cmd()\r\n'+1\r\n\"a\nb\"\r\n");
  assert.equal(series.fileName("run/../a b", "kl:1"), "run-..-a-b_kl-1");
});

test("numbers, shares, times and sizes as a person reads them", () => {
  assert.deepEqual([0, 12345, 0.12345, 1.9e-12, null, NaN, 2.5e7].map((value) => format.number(value)), ["0", "12,345", "0.1235", "1.9e-12", "–", "–", "25 M"]);
  assert.deepEqual([0.0004, 0.35, 12.345, 600, 9000, 400000].map(format.seconds), ["0.4 ms", "350 ms", "12.3 s", "10 min", "2.5 h", "4.63 d"]);
  assert.deepEqual([0, 999, 9155840, 2e12].map(format.bytes), ["0 B", "999 B", "9.16 MB", "2 TB"]);
  assert.equal(format.percent(0.6823), "68.2 %");
  assert.equal(format.ago(100, 101), "just now");
  assert.equal(format.count(1, "group"), "1 group");
  assert.deepEqual(["/a/b/starter_model/", "Qwen/Qwen3-0.6B", null].map(format.modelName), ["starter_model", "Qwen/Qwen3-0.6B", ""]);
  assert.equal(format.quoted(' a"\u202e<b>\n'), '" a\\"\\u202e<b>\\n"');
});

test("float32 bits: what differs is found, and how far apart two numbers are", () => {
  assert.equal(hexOf(-0.9162907600402832), "0xbf6a9208");
  assert.equal(distance(-0.9162907600402832, -0.916290819644928), 1);
  assert.equal(distance(1.5, 1.5), 0);
  assert.equal(distance(-0, 0), 0);
  assert.equal(distance(NaN, 0), null);
  assert.deepEqual(fieldsOf(1), ["0", "01111111", "0".repeat(23)]);
  assert.deepEqual(compared("abc", "axc"), [["a", true], ["b", false], ["c", true]]);
});

test("evaluations stand at the weights that were measured, with what environments count beside them", () => {
  const evaluations = [
    { id: 2, name: "math", step: 9, weight_version: 8, metrics: { "eval/percent_correct": 0.5, seconds: 3 } },
    { id: 1, name: "math", step: 2, weight_version: null, metrics: { "eval/percent_correct": 0.25 } },
  ];
  const columns = { step: [1, 8], columns: { "environment/percent_correct": { mean: [0.1, 0.4] }, reward: { mean: [1, 2] } } };
  const { columns: found, lines } = accuracyOf("a", evaluations, columns);
  assert.deepEqual(found.step, [1, 2, 8]);
  assert.deepEqual(lines.map((line) => line.label), ["math eval/percent_correct", "training: percent correct"]);
  assert.deepEqual(found.columns["math eval/percent_correct"].mean, [undefined, 0.25, 0.5]);
  assert.deepEqual(accuracyOf("a", [], null).lines, []);
  const training = accuracyOf("a", [], columns);
  const accuracy = (newest) => vitals(newest, training, null).find(([what]) => what === "accuracy")[1];
  assert.deepEqual([accuracy({}), accuracy({ "environment/percent_correct": 0.75 })], ["40 %", "75 %"], "the last row's, and not the last point's");
  assert.deepEqual(wantedNames([{ lines: [{ name: "kl" }, { name: "gone" }] }], ["kl", "other", "environment/percent_correct"]), ["kl", "environment/percent_correct"]);
});

test("runs: the live one first, then as asked, what is not known last", () => {
  const runs = [
    { id: "a", name: "run 10", live: false, state: "ended", steps: 5, reward_last: null },
    { id: "b", name: "run 9", live: false, state: "ended", steps: 50, reward_last: 0.5, model: "Qwen" },
    { id: "c", name: "now", live: true, state: "running", steps: 1, reward_last: 0.1 },
  ];
  assert.deepEqual(order(runs, "", "steps").map((run) => run.id), ["c", "b", "a"]);
  assert.deepEqual(order(runs, "", "reward_last").map((run) => run.id), ["c", "b", "a"]);
  assert.deepEqual(order(runs, "", "name").map((run) => run.id), ["c", "b", "a"]);
  assert.deepEqual(order(runs, "qwen ended", "name").map((run) => run.id), ["b"]);
});

test("an address leaves out what is empty", () => {
  assert.equal(address("/ui", { run: "", names: ["a", "b/c"], first: null }), "/ui?names=a,b%2Fc");
  assert.equal(address("/ui"), "/ui");
  assert.equal(address("/ui", { run: "a~1&b" }), "/ui?run=a~1%26b");
});

const stack = (changes = {}) => ({
  time: 1000, live: true, faults: [], leases: [], dropped: [], servers: [], environments: [],
  service: { step: 3, waiting_because: null, run_ended: false },
  trainer: { registered: true, model: "m", step: 3, of_steps: 10, version: 3, max_staleness: 0, batch_size: 8, seconds_since_step: 1 },
  queue: { groups: 2, sequences: 16, held_bytes: 10, max_bytes: 100, max_groups: 10, oldest_version: 2 },
  ...changes,
});

test("the picture says of every part how it is", () => {
  const state = (picture, id) => picture.boxes.flatMap((box) => [box, ...(box.parts ?? [])]).find((box) => box.id === id).state;
  const server = (more) => ({ url: "http://h:1", standing: "good", health: "good", weight_version: 3, ...more });
  const environment = { env_id: 0, wandb_name: "gsm8k", connected: true, seconds_silent: 1, groups_accepted: 4, groups_queued: 1 };
  const faults = [{ part: "trainer", severity: "error", text: "", remedy: "" }, { part: "queue", severity: "warning", text: "", remedy: "" }];
  const well = pictureOf(stack({ servers: [server()], environments: [environment] }));
  assert.deepEqual(["trainer", "service", "server-http://h:1", "environment-0"].map((id) => state(well, id)), ["good", "good", "good", "good"]);
  assert.equal(state(pictureOf(stack({ faults })), "trainer"), "faulty");
  assert.equal(state(pictureOf(stack({ faults })), "service"), "good");
  for (const [more, said] of [[{ health: "silent" }, "gone"], [{ health: "bad" }, "faulty"], [{ standing: "quarantined" }, "faulty"], [{ standing: "joining" }, "starting"]]) {
    assert.equal(state(pictureOf(stack({ servers: [server(more)] })), "server-http://h:1"), said);
  }
  assert.equal(state(pictureOf(stack({ trainer: { registered: false } })), "trainer"), "starting");
  const left = { environments: [{ ...environment, connected: false }] };
  assert.equal(state(pictureOf(stack(left)), "environment-0"), "gone");
  const signs = {
    service: { state: "ended", text: "stopped", seen: 900 },
    trainer: { state: "ended", text: "the run has ended", seen: null },
    "environment-0": { state: "silent", text: "", seen: 700 },
    "server-http://h:1": { state: "ended", text: "no sign since the end of the run", seen: 800 },
  };
  const later = pictureOf(stack({ servers: [server()], environments: [environment], signs }), 1000);
  const ids = Object.keys(signs);
  assert.deepEqual(ids.map((id) => state(later, id)), ["ended", "ended", "no sign", "ended"]);
  const said = later.boxes.flatMap((box) => box.parts ?? [box]).map((box) => box.said).sort();
  assert.equal(said.length, 4);
  assert.ok(said.includes("no sign for 5 min") && said.includes("the run has ended"));
  assert.match(said.find((text) => text.startsWith("stopped")), /^stopped, at /);
  assert.match(said.find((text) => text.startsWith("no sign since")), /^no sign since the end of the run, last seen /);
  assert.equal(signText({ state: "silent", text: "", seen: null }, 1000), "no sign");
  assert.equal(signText({ state: "silent", text: "", seen: 2000 }, 1000), "no sign for 0 s", "a clock that is ahead");
});

test("what the service said last gets older, and its own silence is a fault that it cannot tell", () => {
  const environment = { env_id: 0, wandb_name: "gsm8k", connected: true, seconds_silent: 3, groups_accepted: 4, groups_queued: 1 };
  const told = stack({ environments: [environment] });
  const later = aged(told, 60);
  assert.deepEqual([later.environments[0].seconds_silent, later.trainer.seconds_since_step, later.faults], [63, 61, []]);
  assert.equal(sentence(later, "", 1060), "Training: 1 environment, 0 of 0 servers well.");
  const alone = aged(told, 60, 1060);
  assert.deepEqual(alone.faults.map((fault) => [fault.part, fault.since]), [["service", 1060]]);
  assert.match(alone.faults[0].remedy, /start\.sh/);
  assert.equal(pictureOf(alone).boxes.find((box) => box.id === "service").state, "gone");
  assert.equal(sentence(null, "a: 3 steps", 0), "a: 3 steps. Read from its files.");
});
