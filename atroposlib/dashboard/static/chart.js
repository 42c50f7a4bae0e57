// One chart over steps: lines of one or several runs, or a stacked band, drawn by uPlot. It has a legend that reads the values out at the
// cursor, events on its axis, and buttons that save it. `Desk` has what all charts of a page share (zoom, smoothing, cursor, events).

import { colour, h, replace, withCode } from "./dom.js";
import { eventAt, eventPlugin } from "./events.js";
import { saveCsv, savePng } from "./export.js";
import { number, percent } from "./format.js";
import { extent, fileName, knownCount, lastKnown, onOneAxis, shares, smoothed, stacked } from "./series.js";
import uPlot from "./vendor/uplot/uPlot.esm.js";

const HEIGHT = 168;
const TALL = 320;
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const SYNC = "steps";

/** The common state of the charts of a page. `changed` is called when a person zooms: (first, last), or (null, null) for everything. */
export class Desk {
  constructor(changed) {
    this.charts = [];
    this.smoothing = 0;
    this.zoom = null;
    this.events = [];
    this.band = "seconds";
    this.changed = changed;
    window.addEventListener("theme", () => this.redraw());
    let waiting = 0;
    new ResizeObserver(() => {
      window.cancelAnimationFrame(waiting);
      waiting = window.requestAnimationFrame(() => this.charts.forEach((chart) => chart.fit()));
    }).observe(document.body);
  }

  add(chart) {
    this.charts.push(chart);
    return chart;
  }

  setZoom(first, last) {
    this.zoom = first === null ? null : [first, last];
    this.changed(first, last);
    this.redraw();
  }

  redraw() {
    this.charts.forEach((chart) => chart.draw());
  }
}

/**
 * A chart in a figure of its own.
 *
 * `spec`: {id, title, unit, lines: [{name, label}], band, log, fromZero, form, empty}. Its `band`: stacked or not. `log`: may be shown by
 * powers of ten. `form`: number to text. `empty`: the text while there is nothing.
 */
export class Chart {
  constructor(desk, spec) {
    this.desk = desk;
    this.spec = spec;
    this.runs = [];
    this.plot = null;
    this.shape = "";
    this.log = false;
    this.wide = false;
    this.form = spec.form ?? number;
    this.build();
  }

  build() {
    const { title, unit, log } = this.spec;
    this.legend = h("ul", { class: "legend" });
    this.at = h("span", { class: "at muted" });
    this.surface = h("div", { class: "surface", tabindex: "0", role: "img", onkeydown: (event) => this.key(event), onblur: () => this.desk.charts.forEach((chart) => chart.point(null)) });
    this.nothing = h("p", { class: "empty" }, withCode(this.spec.empty ?? "Nothing yet."));
    this.tip = h("div", { class: "tip", hidden: true });
    this.spoken = h("p", { class: "unseen", "aria-live": "polite" });
    const button = (text, said, act, pressed) => h("button", { type: "button", class: "plain", title: said, "aria-label": `${said}: ${title}`, "aria-pressed": pressed, onclick: act }, text);
    this.logButton = log ? button("log", "By powers of ten", () => this.toggle("log"), "false") : null;
    this.wideButton = button("⤢", "Larger", () => this.toggle("wide"), "false");
    this.figure = h(
      "figure",
      { class: "card chart", id: `chart-${this.spec.id}`, "aria-label": title },
      h(
        "header",
        {},
        h("h2", {}, title, unit ? h("span", { class: "muted unit" }, ` ${unit}`) : null, " ", this.at),
        h("div", { class: "acts" }, this.logButton, button("CSV", "Save as CSV", () => this.saveCsv()), button("PNG", "Save as PNG", () => this.savePng()), this.wideButton),
      ),
      this.legend,
      h("div", { class: "frame" }, this.surface, this.tip, this.spoken),
      this.nothing,
    );
  }

  toggle(what) {
    this[what] = !this[what];
    this[`${what}Button`].setAttribute("aria-pressed", String(this[what]));
    this.figure.classList.toggle(what, this[what]);
    this.shape = "";
    this.draw();
  }

  /** Show these runs: [{id, label, colour (a custom property), columns (of series.js)}], the first one being the page's own. */
  show(runs) {
    this.runs = runs;
    this.draw();
  }

  /** The lines that have something to show, in their order: a run's by the names of `spec`, for a band the first run's alone. */
  lines() {
    const several = this.runs.length > 1 && !this.spec.band;
    const found = [];
    for (const run of this.spec.band ? this.runs.slice(0, 1) : this.runs) {
      this.spec.lines.forEach((line, place) => {
        const column = run.columns.columns[line.name];
        if (column && knownCount(column.mean) > 0) {
          found.push({
            label: several ? `${run.label}${this.spec.lines.length > 1 ? ` ${line.label}` : ""}` : line.label,
            line: line.label,
            name: line.name,
            run: run.id,
            step: run.columns.step,
            raw: column.mean,
            low: column.low,
            high: column.high,
            colour: several ? run.colour : `--s${(place % 8) + 1}`,
            dash: several ? DASHES[place % DASHES.length] : [],
          });
        }
      });
    }
    return found;
  }

  draw() {
    const lines = this.lines();
    this.nothing.hidden = lines.length > 0;
    this.surface.hidden = this.legend.hidden = lines.length === 0;
    if (!lines.length) {
      this.plot?.destroy();
      this.plot = null;
      this.shape = "";
      this.told([]);
      return;
    }
    const model = this.spec.band ? this.bandModel(lines) : this.lineModel(lines);
    const shape = JSON.stringify([model.series.map((series) => [series.label, series.role, series.colour]), this.log, this.spec.band && this.desk.band, getComputedStyle(document.documentElement).colorScheme, matchMedia("(prefers-color-scheme: dark)").matches]);
    if (shape !== this.shape || !this.plot) {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(model), model.data, this.surface);
      this.shape = shape;
    } else {
      this.plot.setData(model.data);
    }
    this.model = model;
    this.told(lines);
    this.read(null);
  }

  /** uPlot's series of lines: the smoothed line in front, the measured one faint behind, the range of a bucket as a band. */
  lineModel(lines) {
    const weight = this.desk.smoothing;
    const series = [];
    const parts = [];
    const bands = [];
    const ranged = lines.length <= 2 && lines.every((line) => line.low);
    for (const line of lines) {
      if (ranged) {
        parts.push({ step: line.step, values: line.high }, { step: line.step, values: line.low });
        series.push({ ...line, role: "edge" }, { ...line, role: "edge" });
        bands.push({ series: [series.length - 1, series.length], fill: faint(colour(line.colour), 0.16) });
      }
      if (weight > 0) {
        parts.push({ step: line.step, values: line.raw });
        series.push({ ...line, role: "raw" });
      }
      parts.push({ step: line.step, values: smoothed(line.raw, weight) });
      series.push({ ...line, role: "main" });
    }
    return { series, data: onOneAxis(parts), bands };
  }

  bandModel(lines) {
    const weight = this.desk.smoothing;
    const columns = lines.map((line) => smoothed(line.raw, weight));
    const parts = this.desk.band === "share" ? shares(columns) : columns;
    const sums = stacked(parts);
    const series = lines.map((line) => ({ ...line, role: "band" }));
    const bands = sums.slice(1).map((_, place) => ({ series: [place + 2, place + 1], fill: faint(colour(lines[place + 1].colour), 0.55) }));
    return { series, data: [lines[0].step, ...sums], bands, parts };
  }

  options(model) {
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: `11px ${getComputedStyle(document.body).fontFamily}` };
    const form = this.spec.band && this.desk.band === "share" ? percent : this.form;
    const whole = (_, splits) => splits.map((split) => (Number.isInteger(Math.log10(split)) ? split : null));
    return {
      width: Math.max(120, this.surface.clientWidth),
      height: this.height(),
      padding: [10, 20, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: SYNC, setSeries: false }, drag: { x: true, y: false, setScale: false }, y: false, points: { size: 6 } },
      scales: { x: { time: false, range: (_, low, high) => this.range(low, high) }, y: this.scale() },
      axes: [
        { ...axis, size: 26, space: 60, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en-US") : "")) },
        { ...axis, ...(this.log ? { grid: { ...axis.grid, filter: whole }, filter: whole } : {}), size: 52, gap: 4, space: 28, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : form(tick, 3))) },
      ],
      series: [{ label: "step" }, ...model.series.map((series, place) => this.drawn(series, place))],
      bands: model.bands,
      plugins: [eventPlugin(() => this.desk.events)],
      hooks: {
        setCursor: [(plot) => this.moved(plot)],
        setSelect: [(plot) => this.selected(plot)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.desk.setZoom(null, null))],
      },
    };
  }

  drawn(series, place) {
    const stroke = colour(series.colour);
    if (series.role === "edge") {
      return { stroke: "transparent", width: 0, points: { show: false } };
    }
    if (series.role === "raw") {
      return { stroke: faint(stroke, 0.3), width: 1, points: { show: false } };
    }
    const fill = series.role === "band" && place === 0 ? faint(stroke, 0.55) : undefined;
    const single = { show: (plot, at) => plot.data[at].length === 1 || knownCount(plot.data[at]) === 1, size: 5, fill: stroke };
    return { stroke, width: series.role === "band" ? 1 : 1.6, dash: series.dash, fill, points: single };
  }

  scale() {
    const fromZero = this.spec.fromZero || this.spec.band;
    if (this.log) {
      return { distr: 3, log: 10, clamp: 1e-12 };
    }
    return { range: (_, low, high) => extent(low, high, fromZero) };
  }

  range(low, high) {
    if (this.desk.zoom) {
      return this.desk.zoom;
    }
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  height() {
    return this.wide ? TALL : HEIGHT;
  }

  fit() {
    const width = this.surface.clientWidth;
    if (this.plot && width > 0 && (this.plot.width !== width || this.plot.height !== this.height())) {
      this.plot.setSize({ width, height: this.height() });
    }
  }

  /** Describe in words, and in attributes, what is drawn. */
  told(lines) {
    const first = lines[0];
    const last = first ? lastKnown(first.raw) : null;
    this.figure.dataset.points = first ? knownCount(first.raw) : 0;
    this.figure.dataset.value = last ?? "";
    const steps = first ? `steps ${first.step[0]} to ${first.step.at(-1)}; last: ${lines.map((line) => `${line.label} ${this.form(lastKnown(line.raw))}`).join(", ")}` : "nothing yet";
    this.surface.setAttribute("aria-label", `${this.spec.title}, ${steps}. Arrow keys read out points, Escape shows all steps.`);
  }

  /** The legend, with the values at a point, or the last ones. */
  read(at) {
    const { series, data, parts } = this.model;
    const mains = series.map((one, place) => ({ ...one, place })).filter((one) => one.role === "main" || one.role === "band");
    const valueAt = (one) => {
      const values = parts ? parts[one.place] : data[one.place + 1];
      return at === null ? lastKnown(values) : values[at];
    };
    this.at.textContent = at === null ? "" : this.stepsOf(data[0], at);
    // If there are several runs, every line has one entry, with a value in the colour of each run: their names stand above the charts.
    const lines = new Map();
    for (const one of mains) {
      lines.set(one.line, [...(lines.get(one.line) ?? []), one]);
    }
    const swatch = (one) => h("i", { style: { background: `var(${one.colour})` }, class: one.dash?.length ? "dashed" : "" });
    replace(
      this.legend,
      [...lines].map(([label, ones]) => h("li", {}, ones.length === 1 ? [swatch(ones[0]), `${label} `, h("b", {}, this.formed(valueAt(ones[0])))] : [label ? `${label} ` : "", ones.map((one) => h("span", { class: "of-run", title: one.label }, swatch(one), h("b", {}, this.formed(valueAt(one)))))])),
    );
  }

  /** The step of a point, or the steps that it stands for. */
  stepsOf(steps, at) {
    const severalRows = this.runs.length === 1 && this.runs[0].columns.exact === false && at > 0;
    const first = severalRows ? steps[at - 1] + 1 : steps[at];
    return first < steps[at] ? `steps ${number(first)} to ${number(steps[at])}` : `step ${number(steps[at])}`;
  }

  formed(value) {
    return this.spec.band && this.desk.band === "share" ? `${((value ?? 0) * 100).toFixed(0)} %` : this.form(value ?? null);
  }

  moved(plot) {
    const { idx, left } = plot.cursor;
    const inside = idx !== null && idx !== undefined && left >= 0;
    this.read(inside ? idx : null);
    const event = inside && plot.cursor.event ? eventAt(this.desk.events, plot, left) : null;
    this.tip.hidden = event === null;
    if (event) {
      replace(this.tip, h("b", {}, event.kind.replaceAll("_", " ")), ` at step ${number(event.step)}: ${event.text}`);
      this.tip.style.setProperty("left", `${Math.min(Math.max(0, left), this.surface.clientWidth - 60)}px`);
      this.tip.classList.toggle("left", left > this.surface.clientWidth / 2);
    }
  }

  selected(plot) {
    if (plot.select.width < 6) {
      return;
    }
    const [first, last] = [plot.select.left, plot.select.left + plot.select.width].map((place) => plot.posToVal(place, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (last - first >= 1) {
      this.desk.setZoom(Math.floor(first), Math.ceil(last));
    }
  }

  key(event) {
    const steps = this.plot?.data[0] ?? [];
    const now = this.plot?.cursor.idx ?? steps.length - 1;
    const target = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: steps.length - 1, PageUp: now - 10, PageDown: now + 10 }[event.key];
    if (event.key === "Escape") {
      this.desk.setZoom(null, null);
    } else if (target !== undefined && steps.length) {
      event.preventDefault();
      const place = Math.min(steps.length - 1, Math.max(0, target));
      this.desk.charts.forEach((chart) => chart.point(steps[place]));
      this.spoken.textContent = `${this.at.textContent}: ${[...this.legend.children].map((line) => line.textContent).join(", ")}`;
    }
  }

  /** Put the cursor at a step; null: nowhere. */
  point(step) {
    this.plot?.setCursor(step === null ? { left: -10, top: -10 } : { left: this.plot.valToPos(step, "x"), top: 1 });
  }

  saveCsv() {
    const lines = this.lines();
    const several = this.runs.length > 1;
    const parts = lines.flatMap((line) => [
      { name: several ? `${line.run} ${line.name}` : line.name, step: line.step, values: line.raw },
      ...(line.low ? [{ name: `${several ? `${line.run} ` : ""}${line.name} lowest`, step: line.step, values: line.low }, { name: `${several ? `${line.run} ` : ""}${line.name} highest`, step: line.step, values: line.high }] : []),
    ]);
    saveCsv(this.file(), ["step", ...parts.map((part) => part.name)], onOneAxis(parts));
  }

  async savePng() {
    if (this.plot) {
      const shown = this.model.series.filter((one) => one.role === "main" || one.role === "band").map((one) => ({ label: one.label, colour: colour(one.colour) }));
      await savePng(this.file(), this.plot.ctx.canvas, this.spec.title, this.subtitle(), shown);
    }
  }

  subtitle() {
    const smooth = this.desk.smoothing > 0 ? `, smoothed ${this.desk.smoothing}` : "";
    return `${this.runs.map((run) => run.label).join(", ")}${smooth}`;
  }

  file() {
    return fileName(this.runs[0]?.id ?? "run", this.spec.id);
  }
}

function faint(rgb, alpha) {
  return rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

