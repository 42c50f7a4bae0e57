// The tokens of one rollout, by pieces: read from the service as they are scrolled to, shaded, and shown with all numbers where one points.

import { h, replace } from "./dom.js";
import { count, number } from "./format.js";
import { getJson, shownRun } from "./http.js";
import { shadeToken, shadedBy } from "./shading.js";
import { fillVisibly, visible } from "./visible.js";

const MOST_CHUNKS = 12;

/**
 * One rollout's transcript.
 *
 * `chunk`: tokens that are asked for at a time. `onFacts(facts)`: a token is pointed at, by mouse, focus or keyboard. `onLoad()`: tokens
 * came. If a rollout is very long, only the chunks around the reader stay in the page.
 */
export class TokenView {
  constructor(group, rollout, { chunk = 1000, onFacts = () => {}, onLoad = () => {} } = {}) {
    Object.assign(this, { group, rollout, chunk, onFacts, onLoad });
    this.length = null;
    this.loading = false;
    this.shade = "logprob";
    this.scale = 0;
    this.active = null;
    this.chunks = [];
    this.earlier = h("button", { type: "button", hidden: true, onclick: () => this.loadEarlier() }, "Earlier tokens");
    this.later = h("button", { type: "button", hidden: true, onclick: () => this.loadLater() }, "More tokens");
    this.body = h("div", {});
    this.element = h(
      "div",
      { class: "transcript", tabindex: "0", role: "group", "data-response": rollout, "aria-label": `Tokens of rollout ${rollout}: arrow keys go from one to the next` },
      this.earlier,
      this.body,
      this.later,
    );
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.element.addEventListener("pointerover", (event) => this.point(event.target.closest("[data-token]"), false));
    this.element.addEventListener("click", (event) => this.point(event.target.closest("[data-token]"), true));
    this.element.addEventListener("focus", () => this.point(this.active ?? this.element.querySelector("[data-token]"), false));
  }

  /** Ask for the tokens around a position, in the place of the shown ones. */
  async show(position = 0) {
    this.chunks = [];
    this.active = null;
    replace(this.body);
    await this.load(Math.floor(position / this.chunk) * this.chunk, false);
  }

  loadLater() {
    return this.load(this.chunks.length ? this.chunks.at(-1).end : 0, false);
  }

  loadEarlier() {
    return this.load(Math.max(0, this.chunks[0].begin - this.chunk), true);
  }

  async load(begin, before) {
    if (this.loading) {
      return;
    }
    this.loading = true;
    this.body.querySelector(":scope > [role=alert]")?.remove();
    try {
      const wanted = before ? this.chunks[0].begin - begin : this.chunk;
      const told = await getJson(`/ui/api/rollouts/${this.group}/${this.rollout}`, { run: shownRun(), begin, count: wanted });
      this.length = told.length;
      const element = h("div", {}, told.runs.map((run) => this.turn(run, told)));
      const known = this.chunks.findIndex((one) => one.begin >= told.begin);
      this.body.insertBefore(element, before && known >= 0 ? this.chunks[known].element : null);
      this.chunks.splice(before ? 0 : this.chunks.length, 0, { begin: told.begin, end: told.end, element, told });
      this.forgetFar(before);
      this.reshade(this.shade, this.scale);
      this.onLoad();
    } catch (error) {
      this.body.append(h("p", { class: "bad", role: "alert" }, error.message));
    } finally {
      this.loading = false;
      this.tellRest();
    }
  }

  forgetFar(before) {
    while (this.chunks.length > MOST_CHUNKS) {
      (before ? this.chunks.pop() : this.chunks.shift()).element.remove();
    }
  }

  tellRest() {
    const first = this.chunks[0]?.begin ?? 0;
    const left = this.length === null ? 0 : this.length - (this.chunks.at(-1)?.end ?? 0);
    this.earlier.hidden = first === 0;
    this.earlier.textContent = `Earlier: ${count(first, "token")}`;
    this.later.hidden = left <= 0;
    this.later.textContent = `More: ${count(left, "token")} left`;
  }

  turn(run, told) {
    const tokens = h("span", { class: "tokens" });
    const changes = new Map(told.boundaries);
    let at = run.begin;
    for (const [text, size] of run.pieces) {
      for (let place = at; place < at + size; place += 1) {
        if (changes.has(place)) {
          tokens.append(h("span", { class: "boundary", title: "the weights changed here, in the middle of the response" }, `version ${changes.get(place)}`));
        }
      }
      const ids = told.columns.token?.slice(at - told.begin, at - told.begin + size) ?? [];
      const piece = h("span", { "data-token": ids.join(","), "data-at": at, id: this.nameOf(at) });
      tokens.append(fillVisibly(piece, text));
      at += size;
    }
    const tags = run.tags.map((tag) => h("span", { class: tag.kind }, visible(tag.text)));
    return h("div", { class: run.given ? "turn given" : "turn sampled" }, tags.length ? h("div", { class: "tags" }, tags) : null, tokens);
  }

  nameOf(position) {
    return `r${this.rollout}t${position}`;
  }

  /** All that is known of the piece that begins at an element: the least likely of its tokens counts. */
  factsOf(element) {
    const at = Number(element.dataset.at);
    const { told } = this.chunks.find((one) => one.begin <= at && at < one.end);
    const size = element.dataset.token.split(",").length;
    const places = Array.from({ length: size }, (_, i) => at - told.begin + i);
    const column = (name) => places.map((place) => told.columns[name]?.[place] ?? null);
    const known = column("logprob").filter((value) => value !== null);
    const chosen = places[Math.max(0, known.length ? column("logprob").indexOf(Math.min(...known)) : 0)];
    const value = (name) => told.columns[name]?.[chosen] ?? null;
    return {
      rollout: this.rollout,
      position: at,
      tokens: element.dataset.token,
      text: element.textContent,
      logprob: value("logprob"),
      trainer: value("trainer"),
      entropy: value("entropy"),
      advantage: value("advantage"),
      version: value("version"),
      trained_version: told.trained_version,
      given: element.closest(".given") !== null,
    };
  }

  /** The largest size of a number among what is shown. */
  largest(name) {
    return [...this.element.querySelectorAll(".sampled [data-token]")].reduce((most, element) => Math.max(most, Math.abs(shadedBy(name, this.factsOf(element)) ?? 0)), 0);
  }

  /** True if anything shown has this number. */
  knows(name) {
    return this.chunks.some(({ told }) => {
      const has = (column) => (told.columns[column] ?? []).some((value) => value !== null);
      return name === "difference" ? has("trainer") && has("logprob") : has(name);
    });
  }

  reshade(name, scale) {
    this.shade = name;
    this.scale = scale;
    for (const element of this.element.querySelectorAll(".sampled [data-token]")) {
      shadeToken(element, name, this.factsOf(element), scale);
    }
  }

  /** Point at a token; `chosen` if the reader means to keep it. */
  point(element, chosen) {
    if (!element) {
      return;
    }
    if (this.active !== element) {
      this.active?.removeAttribute("data-active");
      element.setAttribute("data-active", "");
      this.active = element;
      this.element.setAttribute("aria-activedescendant", element.id);
    }
    this.onFacts({ ...this.factsOf(element), chosen });
  }

  /** Point at the token at a position, which is loaded if it is not there. */
  async go(position) {
    if (!this.chunks.some((one) => one.begin <= position && position < one.end)) {
      await this.show(position);
    }
    const pieces = [...this.element.querySelectorAll("[data-token]")];
    const found = pieces.findLast((element) => Number(element.dataset.at) <= position);
    if (found) {
      this.point(found, true);
      found.scrollIntoView({ block: "center" });
    }
  }

  async onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50, Home: -Infinity, End: Infinity };
    if (event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    if (event.key === "Enter" && this.active) {
      this.point(this.active, true);
    } else if (event.key in steps) {
      event.preventDefault();
      const pieces = [...this.element.querySelectorAll("[data-token]")];
      const place = pieces.indexOf(this.active) + steps[event.key];
      if (place >= pieces.length && event.key === "ArrowRight" && !this.later.hidden) {
        await this.loadLater();
        this.onKey(event);
        return;
      }
      const next = pieces[Math.max(0, Math.min(pieces.length - 1, place))];
      this.point(next, false);
      next?.scrollIntoView({ block: "nearest" });
    }
  }
}

/** The known values of a token, as terms and values. */
export function factsShown(facts) {
  const exact = (value) => (value === null ? null : String(value));
  const rounded = (value) => (value === null ? null : String(Number(value.toPrecision(9)))); // of two numbers of 32 bits
  const probability = facts.logprob === null ? null : `${exact(facts.logprob)} (p = ${number(Math.exp(facts.logprob))})`;
  const difference = shadedBy("difference", facts);
  const of = facts.trained_version === null ? "" : ` at version ${facts.trained_version}`;
  return [
    ["token", facts.tokens ? `${facts.tokens.replaceAll(",", ", ")}, at ${facts.position} of rollout ${facts.rollout}` : `rollout ${facts.rollout}`],
    ["sampler's logprob", probability],
    [`trainer's logprob${of}`, exact(facts.trainer)],
    ["trainer − sampler", rounded(difference)],
    ["entropy", exact(facts.entropy)],
    ["advantage", exact(facts.advantage)],
    ["sampled by version", exact(facts.version)],
    ["", facts.given ? "given, not sampled" : null],
  ].filter(([, value]) => value !== null);
}
