// A chart as a file: PNG of what is seen, CSV of the numbers behind it.

import { colour, h } from "./dom.js";
import { toCsv } from "./series.js";

const MARGIN = 14;
const TITLE_SIZE = 15;
const LEGEND_SIZE = 12;
const LINE_HEIGHT = 20;

/** Let the browser save these bytes. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  window.setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/** Save a table as CSV. */
export function saveCsv(name, header, columns) {
  save(new Blob([toCsv(header, columns)], { type: "text/csv;charset=utf-8" }), `${name}.csv`);
}

/**
 * Save a chart as PNG, in its colours, with title and legend.
 *
 * `canvas`: of uPlot, in device pixels. `legend`: [{label, colour}, …]. `subtitle`: run and steps.
 */
export async function savePng(name, canvas, title, subtitle, legend) {
  const picture = pictureOf(canvas, title, subtitle, legend);
  const blob = await new Promise((done) => picture.toBlob(done, "image/png"));
  if (blob === null) {
    throw new Error(`${title}: the browser made no PNG of ${picture.width} × ${picture.height} pixels`);
  }
  save(blob, `${name}.png`);
}

/** A canvas with title, legend and chart. */
export function pictureOf(canvas, title, subtitle, legend) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.width / ratio + 2 * MARGIN;
  const family = getComputedStyle(document.body).fontFamily;
  const picture = document.createElement("canvas");
  const context = picture.getContext("2d");
  const legendFont = `${LEGEND_SIZE}px ${family}`;
  context.font = legendFont;
  const rows = wrapped(legend, (item) => context.measureText(item.label).width + 34, width - 2 * MARGIN);
  const head = MARGIN + LINE_HEIGHT + rows.length * LINE_HEIGHT + 4;

  picture.width = Math.ceil(width * ratio);
  picture.height = Math.ceil((head + canvas.height / ratio + MARGIN) * ratio);
  context.scale(ratio, ratio);
  context.fillStyle = colour("--panel");
  context.fillRect(0, 0, width, picture.height / ratio);
  context.textBaseline = "middle";
  context.fillStyle = colour("--text");
  context.font = `600 ${TITLE_SIZE}px ${family}`;
  context.fillText(title, MARGIN, MARGIN + LINE_HEIGHT / 2);
  const titleWidth = context.measureText(title).width;
  context.font = legendFont;
  context.fillStyle = colour("--muted");
  context.fillText(subtitle, MARGIN + titleWidth + 12, MARGIN + LINE_HEIGHT / 2, Math.max(0, width - 2 * MARGIN - titleWidth - 12));
  rows.forEach((row, at) => drawLegend(context, row, MARGIN + LINE_HEIGHT * (at + 1.5)));
  context.drawImage(canvas, MARGIN, head, canvas.width / ratio, canvas.height / ratio);
  return picture;
}

function wrapped(items, widthOf, most) {
  const rows = [];
  let left = 0;
  for (const item of items) {
    const width = widthOf(item);
    if (!rows.length || width > left) {
      rows.push([]);
      left = most;
    }
    rows.at(-1).push({ ...item, width });
    left -= width;
  }
  return rows;
}

function drawLegend(context, row, y) {
  let x = MARGIN;
  for (const item of row) {
    context.fillStyle = item.colour;
    context.fillRect(x, y - 2, 14, 4);
    context.fillStyle = colour("--text");
    context.fillText(item.label, x + 20, y);
    x += item.width;
  }
}
