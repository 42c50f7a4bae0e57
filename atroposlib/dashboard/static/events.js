// The events of a run, on the axis of its charts and in a table: evaluations, restarts, refused updates, dropped groups.

import { colour, h, keyed, renew } from "./dom.js";
import { clock, number } from "./format.js";

const COLOURS = { info: "--muted", warning: "--warn", error: "--bad" };
const REACH = 5;
const SHOWN = 200;

/** Groups of kinds that a person switches on and off, in the order of the switches. */
export const GROUPS = [
  { id: "evaluations", label: "evaluations", kinds: ["evaluation"] },
  { id: "restarts", label: "restarts", kinds: ["service_restarted", "trainer_registered", "resumed", "run_ended", "server_restarted", "server_lost", "server_back", "environment_joined", "environment_silent", "environment_back", "environment_left"] },
  { id: "updates", label: "refused updates", kinds: ["refused_update", "quarantine", "mismatch"] },
  { id: "drops", label: "dropped groups", kinds: ["dropped_groups", "skipped_batch"] },
];

/** The events of the groups that are switched on, newest last; kinds that no group names are always shown. */
export function chosen(events, groups) {
  const hidden = new Set(GROUPS.filter((group) => !groups.has(group.id)).flatMap((group) => group.kinds));
  return events.filter((event) => !hidden.has(event.kind));
}

/** Draws events as thin lines with a mark at the top. `events()` gives the ones that are switched on. */
export function eventPlugin(events) {
  return {
    hooks: {
      drawClear: (plot) => {
        const { ctx, bbox } = plot;
        const { min, max } = plot.scales.x;
        const ratio = window.devicePixelRatio || 1;
        const drawn = new Map();
        ctx.save();
        for (const event of events()) {
          if (event.step === null || event.step === undefined || event.step < min || event.step > max) {
            continue;
          }
          const x = Math.round(plot.valToPos(event.step, "x", true));
          if (drawn.get(x) === event.severity || drawn.get(x) === "error") {
            continue; // ten thousand events are as many lines as the chart has pixels
          }
          drawn.set(x, event.severity);
          ctx.strokeStyle = ctx.fillStyle = colours()[event.severity] ?? colours().info;
          ctx.globalAlpha = event.severity === "info" ? 0.45 : 0.8;
          ctx.lineWidth = ratio;
          ctx.setLineDash([2 * ratio, 3 * ratio]);
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.globalAlpha = 1;
          mark(ctx, x, bbox.top, 3.5 * ratio, event.severity);
        }
        ctx.restore();
      },
    },
  };
}

let known = null;

function colours() {
  known ??= Object.fromEntries(Object.entries(COLOURS).map(([severity, name]) => [severity, colour(name)]));
  return known;
}

window.addEventListener("theme", () => {
  known = null;
});

function mark(ctx, x, y, size, severity) {
  ctx.beginPath();
  if (severity === "info") {
    ctx.arc(x, y, size * 0.7, 0, 2 * Math.PI);
  } else {
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y - size);
    ctx.lineTo(x, y + size);
  }
  ctx.fill();
}

/** The event that the cursor is at, the gravest of several; null if there is none within a few pixels. */
export function eventAt(events, plot, left) {
  const near = events.filter((event) => typeof event.step === "number" && Math.abs(plot.valToPos(event.step, "x") - left) <= REACH);
  const order = ["info", "warning", "error"];
  return near.sort((a, b) => order.indexOf(b.severity) - order.indexOf(a.severity))[0] ?? null;
}

/** Fill the table of events: the newest first, the last two hundred. */
export function fillEvents(body, note, events, leftOut, now) {
  const rows = events.slice(-SHOWN).reverse();
  keyed(
    body,
    rows,
    (event) => event.id,
    () => h("tr"),
    (row, event) => {
      const grave = event.severity === "error" ? "bad" : event.severity === "warning" ? "warn" : "";
      const at = clock(event.time, now);
      renew(row, [event, at], () => [
        h("td", { class: "number" }, at),
        h("td", { class: "number" }, typeof event.step === "number" ? number(event.step) : ""),
        h("td", {}, h("span", { class: `badge ${grave}` }, event.kind.replaceAll("_", " "))),
        h("td", {}, event.text, event.remedy ? h("span", { class: "muted" }, ` · ${event.remedy}`) : null),
      ]);
    },
  );
  body.closest("table").hidden = rows.length === 0;
  const hidden = events.length - rows.length + leftOut;
  note.textContent = rows.length === 0 ? "None yet." : hidden > 0 ? `${number(hidden)} older ones are not listed.` : "";
}
