// Figures over steps as charts want them: appended to, smoothed, several runs on one axis, stacked, as CSV. Pure: no document.

/**
 * The columns of a run as `GET /ui/api/series` answers them, kept so that rows can be appended.
 *
 * `step`: numbers, rising. `columns[name]`: {mean, low, high} of equal length; low and high are null where every point is one row.
 */
export function columnsOf(answer) {
  return {
    run: answer.run,
    generation: answer.generation,
    exact: answer.exact,
    step: [...answer.step],
    columns: Object.fromEntries(Object.entries(answer.series).map(([name, { mean, low, high }]) => [name, { mean: [...mean], low: low && [...low], high: high && [...high] }])),
  };
}

/**
 * Append new rows of metrics.jsonl to columns, in place: each is a point of its own, also where those before stand for several rows. A row
 * of a step that is there already adds values that were not known. The step came with an answer to the page before, or the environment has
 * sent the values since.
 *
 * Returns whether they could be appended. They cannot if the file was begun again or a step does not follow. Nor if there were more than
 * `most` points: then it is time to ask for fewer.
 */
export function appendRows(columns, message, most = Infinity) {
  if (message.generation !== columns.generation || message.new === null || columns.step.length + message.new.length > most) {
    return false;
  }
  for (const row of message.new) {
    if (!Number.isInteger(row.step)) {
      continue;
    }
    const isNew = !columns.step.length || row.step > columns.step.at(-1);
    const place = isNew ? columns.step.length : columns.step.lastIndexOf(row.step);
    if (place < 0) {
      if (!columns.exact) {
        continue; // it is part of a point
      }
      return false;
    }
    columns.step[place] = row.step;
    for (const [name, column] of Object.entries(columns.columns)) {
      const value = typeof row[name] === "number" && Number.isFinite(row[name]) ? row[name] : null;
      if (isNew || column.mean[place] === null) {
        column.mean[place] = value;
        for (const bound of [column.low, column.high].filter(Boolean)) {
          bound[place] = value;
        }
      }
    }
  }
  return true;
}

/**
 * Exponential moving average, corrected for its beginning: the first value is itself, and none is drawn towards 0.
 *
 * `weight` from 0 (as it is) to below 1. An unknown value stays unknown and counts for nothing.
 */
export function smoothed(values, weight) {
  if (weight <= 0) {
    return values;
  }
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) {
      return value;
    }
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/**
 * Several lines, each with steps of its own, on one axis.
 *
 * `lines`: [{step, values}, …]. Returns [steps of all, values of line 1, …]. A value is undefined where a line has no such step (a chart
 * draws on through it). It is null where its value is not known (a gap).
 */
export function onOneAxis(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.step))].sort((a, b) => a - b);
  const alike = lines.every((line) => line.step.length === steps.length);
  if (alike) {
    return [steps, ...lines.map((line) => line.values)];
  }
  const place = new Map(steps.map((step, index) => [step, index]));
  return [
    steps,
    ...lines.map((line) => {
      const values = new Array(steps.length).fill(undefined);
      line.step.forEach((step, index) => {
        values[place.get(step)] = line.values[index];
      });
      return values;
    }),
  ];
}

/** Columns added up from the first to the last, for a stacked band. An unknown value counts as 0. */
export function stacked(columns) {
  const sums = [];
  for (const column of columns) {
    const below = sums.at(-1);
    sums.push(column.map((value, index) => (value ?? 0) + (below ? below[index] : 0)));
  }
  return sums;
}

/** The same columns as shares of their sum, point by point; 0 where the sum is 0. */
export function shares(columns) {
  const totals = columns.length ? columns[0].map((_, index) => columns.reduce((sum, column) => sum + (column[index] ?? 0), 0)) : [];
  return columns.map((column) => column.map((value, index) => (totals[index] > 0 ? (value ?? 0) / totals[index] : 0)));
}

/** The last value that is known, or null. */
export function lastKnown(values) {
  for (let place = values.length - 1; place >= 0; place -= 1) {
    if (values[place] !== null && values[place] !== undefined) {
      return values[place];
    }
  }
  return null;
}

/** The number of known values. */
export function knownCount(values) {
  return values.reduce((count, value) => count + (value !== null && value !== undefined ? 1 : 0), 0);
}

/**
 * The lowest and highest of an axis that shows these values: with room above and below, and never empty.
 *
 * `fromZero`: 0 is on the axis, for quantities that cannot be below it.
 */
export function extent(low, high, fromZero) {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) {
    return [0, 1];
  }
  const bottom = fromZero ? Math.min(0, low) : low;
  const top = fromZero ? Math.max(0, high) : high;
  const size = top - bottom || Math.abs(top) || 1;
  const flat = top === bottom;
  return [fromZero && bottom === 0 ? 0 : bottom - size * (flat ? 0.5 : 0.06), fromZero && top === 0 && bottom < 0 ? 0 : top + size * (flat ? 0.5 : 0.08)];
}

/**
 * A table as CSV (RFC 4180). `header`: names; `columns`: as many lists. An unknown value is an empty cell, numbers have all their digits.
 * A text that a spreadsheet would take for a formula gets an apostrophe before it.
 */
export function toCsv(header, columns) {
  const lines = [header.map(cell).join(",")];
  const rows = Math.max(0, ...columns.map((column) => column.length));
  for (let row = 0; row < rows; row += 1) {
    lines.push(columns.map((column) => cell(column[row])).join(","));
  }
  return `${lines.join("\r\n")}\r\n`;
}

function cell(value) {
  if (value === null || value === undefined) {
    return "";
  }
  if (typeof value === "number") {
    return String(value);
  }
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** The part of a name that a file may have on any system. */
export function fileName(...parts) {
  return parts.map((part) => part.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^-+|-+$/g, "")).filter(Boolean).join("_");
}
