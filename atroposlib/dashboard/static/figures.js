// Which figures of a run are charts, and what stands in the row of vital signs. Pure data: to add a chart, add a line.

import { bytes, number, percent, seconds } from "./format.js";
import { lastKnown, onOneAxis } from "./series.js";

/** One a chart. `lines`: columns of metrics.jsonl. `group(names)` adds lines that only some runs have. */
export const CHARTS = [
  { id: "reward", title: "Reward", lines: [{ name: "reward_mean", label: "mean" }], group: (names) => several(names, "reward/") },
  {
    id: "success",
    title: "Solved items",
    empty: "No environment reports which items are solved (`successes` of its groups).",
    fromZero: true,
    form: percent,
    lines: [{ name: "success_rate", label: "of all with a known success" }],
    group: (names) => several(names, "success/"),
  },
  { id: "accuracy", title: "Accuracy", lines: [], fromZero: true, evaluations: true, empty: "No evaluation yet: environments measure every `--env.steps_per_eval` steps." },
  {
    id: "length",
    title: "Response length",
    unit: "tokens",
    fromZero: true,
    lines: [
      { name: "response_length_mean", label: "mean" },
      { name: "response_length_p95", label: "95th percentile" },
      { name: "response_length_max", label: "longest" },
    ],
  },
  {
    id: "kl",
    title: "KL from the sampler",
    unit: "nats",
    log: true,
    lines: [
      { name: "kl", label: "of what was sampled" },
      { name: "mismatch_kl", label: "at equal weights" },
      { name: "reference_kl", label: "from the reference" },
    ],
  },
  { id: "entropy", title: "Entropy", unit: "nats", fromZero: true, lines: [{ name: "entropy", label: "of the policy" }] },
  {
    id: "clip",
    title: "Clip fractions",
    fromZero: true,
    form: percent,
    lines: [
      { name: "clip_fraction", label: "both" },
      { name: "clip_fraction_low", label: "ratio fell" },
      { name: "clip_fraction_high", label: "ratio rose" },
    ],
  },
  {
    id: "time",
    title: "Where time goes",
    unit: "a step",
    band: true,
    form: seconds,
    lines: [
      { name: "seconds_wait", label: "wait" },
      { name: "seconds_train", label: "train" },
      { name: "seconds_sync", label: "sync" },
    ],
  },
  {
    id: "speed",
    title: "Tokens a second",
    fromZero: true,
    log: true,
    lines: [
      { name: "tokens_per_second", label: "trained" },
      { name: "forwarded_tokens_per_second", label: "forwarded, while it computes" },
    ],
  },
  { id: "mfu", title: "Model FLOPs utilisation", fromZero: true, form: percent, empty: "Not known on this device, or no step yet.", lines: [{ name: "mfu", label: "while it computes" }] },
  {
    id: "age",
    title: "Age of the data",
    unit: "versions",
    fromZero: true,
    lines: [
      { name: "age_mean", label: "mean" },
      { name: "age_max", label: "oldest" },
    ],
  },
  {
    id: "ratio",
    title: "Ratio of trainer to sampler",
    log: true,
    lines: [
      { name: "ratio_p50", label: "median" },
      { name: "ratio_p99", label: "99th percentile" },
      { name: "ratio_max", label: "largest" },
    ],
  },
  {
    id: "experts",
    title: "Load of the busiest expert by the mean",
    fromZero: true,
    empty: "No mixture of experts, or no step yet.",
    lines: [
      { name: "expert_load", label: "mean of the layers" },
      { name: "expert_load_max", label: "worst layer" },
    ],
  },
  {
    id: "unused_experts",
    title: "Experts without a token",
    fromZero: true,
    empty: "No mixture of experts, or no step yet.",
    lines: [{ name: "unused_experts", label: "of all layers" }],
  },
  { id: "grad", title: "Gradient norm", fromZero: true, log: true, lines: [{ name: "grad_norm", label: "before clipping" }] },
];

const FORMS = { seconds: seconds, bytes: bytes, share: percent };

/** A chart of any one figure, for a person who asks for it. */
export function chartOf(name) {
  const form = FORMS[name.match(/seconds|bytes|share/)?.[0]] ?? number;
  return { id: name, title: name, log: true, form, lines: [{ name, label: "" }] };
}

function several(names, beginning) {
  const found = names.filter((name) => name.startsWith(beginning));
  return found.length > 1 ? found.map((name) => ({ name, label: name.slice(beginning.length) })) : [];
}

/** Names that the charts ask a run for. */
export function wantedNames(charts, names) {
  const wanted = charts.flatMap((chart) => [...chart.lines, ...(chart.group?.(names) ?? [])].map((line) => line.name));
  return [...new Set([...wanted, ...names.filter(isAccuracy), "waiting_share", "queue_size"])].filter((name) => names.includes(name));
}

const ACCURACY = /correct|accuracy|pass@|\/mean$/;

function isAccuracy(name) {
  return name.startsWith("environment/") && ACCURACY.test(name);
}

/**
 * Evaluations, and what environments count of their own rollouts, on one axis: the weight version that was measured.
 *
 * Returns {columns, lines}: columns as `columnsOf` gives them, lines for the chart. The numbers of an evaluation are its accuracies
 * by their names, or all if there are none.
 */
export function accuracyOf(run, evaluations, columns) {
  const found = new Map();
  for (const evaluation of evaluations) {
    const named = Object.keys(evaluation.metrics).filter((name) => ACCURACY.test(name));
    for (const name of named.length ? named : Object.keys(evaluation.metrics)) {
      const key = `${evaluation.name} ${name}`;
      if (!found.has(key)) {
        found.set(key, new Map());
      }
      found.get(key).set(evaluation.weight_version ?? evaluation.step, evaluation.metrics[name]);
    }
  }
  const parts = [...found].map(([name, points]) => {
    const step = [...points.keys()].sort((a, b) => a - b);
    return { name, label: name, step, values: step.map((at) => points.get(at)) };
  });
  for (const [name, column] of Object.entries(columns?.columns ?? {})) {
    if (isAccuracy(name)) {
      parts.push({ name, label: `training: ${name.slice("environment/".length).replaceAll("_", " ")}`, step: columns.step, values: column.mean });
    }
  }
  const shown = parts.slice(0, 6);
  const [step, ...values] = shown.length ? onOneAxis(shown) : [[]];
  return {
    columns: { run, generation: 0, exact: true, step, columns: Object.fromEntries(shown.map((part, at) => [part.name, { mean: values[at], low: null, high: null }])) },
    lines: shown.map(({ name, label }) => ({ name, label })),
  };
}

/** The vital signs of a run's newest step: [[what, value, how], …]. `newest`: what is known last of each figure, {name: value}. */
export function vitals(newest, accuracy, stack) {
  const of = stack?.trainer?.of_steps;
  const [first] = accuracy.lines;
  const measured = first ? (newest[first.name] ?? lastKnown(accuracy.columns.columns[first.name].mean)) : null;
  const oldest = newest.age_max ?? null;
  return [
    ["step", number(newest.step), of ? `of ${number(of)}` : ""],
    ["reward", number(newest.reward_mean, 3), ""],
    ["solved", percent(newest.success_rate), "of the rollouts"],
    ["accuracy", measured === null ? "–" : Math.abs(measured) <= 1 ? percent(measured) : number(measured, 3), ""],
    ["length", number(newest.response_length_mean, 3), "tokens"],
    ["trained", number(newest.tokens_per_second, 3), "tokens/s"],
    ["MFU", percent(newest.mfu), ""],
    ["age", number(newest.age_mean, 2), oldest === null ? "" : `at most ${number(oldest)}`],
    ["waits", percent(newest.waiting_share), "of a step"],
  ];
}
