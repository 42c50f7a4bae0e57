// Numbers, times and sizes as a person reads them. Pure: no document, no clock but what is handed in.

export const UNKNOWN = "–";

/** Four figures of a number: `0.0123`, `12.35`, `1,235`, `1.2e-7`; a dash where it is not known. */
export function number(value, figures = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return UNKNOWN;
  }
  const size = Math.abs(value);
  if (value === 0) {
    return "0";
  }
  if (size < 1e-3 || size >= 1e12) {
    return value.toExponential(Math.max(0, figures - 3));
  }
  if (size >= 1e6) {
    return compact(value);
  }
  if (size >= 1000 || Number.isInteger(value)) {
    return Math.round(value).toLocaleString("en-US");
  }
  return String(Number(value.toPrecision(figures)));
}

/** `1.23 M`. */
export function compact(value) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size) {
      return `${Number((value / size).toPrecision(3))} ${unit}`;
    }
  }
  return String(Number(value.toPrecision(3)));
}

/** A share as `12.3 %`. */
export function percent(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? UNKNOWN : `${Number((100 * value).toPrecision(3))} %`;
}

/** `0.8 ms`, `350 ms`, `2.4 s`, `3 min`, `2.5 h`, `4 d`. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return UNKNOWN;
  }
  const size = Math.abs(value);
  if (size < 1) {
    return size === 0 ? "0 s" : `${Number((1000 * value).toPrecision(3))} ms`;
  }
  if (size < 100) {
    return `${Number(value.toPrecision(3))} s`;
  }
  if (size < 2 * 3600) {
    return `${Math.round(value / 60)} min`;
  }
  return size < 48 * 3600 ? `${Number((value / 3600).toPrecision(3))} h` : `${Number((value / 86400).toPrecision(3))} d`;
}

/** `12.3 MB`, by powers of ten. */
export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return UNKNOWN;
  }
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= size) {
      return `${Number((value / size).toPrecision(3))} ${unit}`;
    }
  }
  return `${value} B`;
}

/** The age of a Unix time: `just now`, `12 s ago`. */
export function ago(time, now) {
  if (time === null || time === undefined) {
    return UNKNOWN;
  }
  const passed = now - time;
  return passed < 2 ? "just now" : `${seconds(Math.round(passed))} ago`;
}

/** A Unix time in the reader's own time zone: `14:03:11` today, `21 Nov 14:03` before. */
export function clock(time, now) {
  if (time === null || time === undefined) {
    return UNKNOWN;
  }
  const at = new Date(time * 1000);
  const sameDay = at.toDateString() === new Date(now * 1000).toDateString();
  const hours = at.toLocaleTimeString("en-GB");
  return sameDay ? hours : `${at.getDate()} ${at.toLocaleString("en-GB", { month: "short" })} ${hours.slice(0, 5)}`;
}

/** `1 group`, `3 groups`. */
export function count(value, word, words = `${word}s`) {
  return value === null || value === undefined ? `${UNKNOWN} ${words}` : `${number(value)} ${value === 1 ? word : words}`;
}

/** A model's name; of one in a folder, the folder's alone: its place does not describe it. */
export function modelName(model) {
  return model?.startsWith("/") ? model.replace(/\/+$/, "").split("/").at(-1) : (model ?? "");
}

/** A name of metrics.jsonl for people: `response_length_mean` is `response length mean`. */
export function words(name) {
  return name.replaceAll("_", " ").replaceAll("/", " · ");
}

/** Text in quotes, with an escape for every character that is not seen or turns what follows it round. */
export function quoted(text) {
  return JSON.stringify(text).replace(/[\u007f-\u00a0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
