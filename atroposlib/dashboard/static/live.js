// One stream of server-sent events for all parts of the page. It reconnects by itself, more slowly each time.

import { address, shownRun, toSignIn } from "./http.js";

const KINDS = ["hello", "rows", "stack", "event", "evaluation", "weights", "rollouts", "heartbeat", "bye"];
const FIRST_WAIT = 1000;
const LONGEST_WAIT = 15000;
const SILENCE = 30000; // the service sends something every ten seconds
const FIRST_LOAD = 1500;
const RELOAD_EVERY = 5000;

const listeners = new Map();
let source = null;
let wait = FIRST_WAIT;
let state = "offline";
let heard = 0;
let greeting = null;

/**
 * Listen to a kind of event: a kind of the contract, or one of these.
 *   `connected`: {…hello}, at the start and after every reconnect: ask for everything again.
 *   `state`: "connecting", "live", "lost", "full" while too many pages are open, or "offline" where the page is of files.
 */
export function on(kind, listener) {
  if (!listeners.has(kind)) {
    listeners.set(kind, []);
  }
  listeners.get(kind).push(listener);
  if (kind === "state") {
    listener(state);
  }
  if (kind === "connected" && greeting !== null) {
    listener(greeting); // the shell opens the stream, and may have been faster than the page
  }
}

/**
 * Load a page when its stream is there, and again after each reconnect; where no stream comes, soon all the same.
 *
 * Returns a function that loads it again within RELOAD_EVERY, however often it is called until then.
 */
export function loads(load, complain) {
  const begin = () => load().then(() => (document.body.dataset.ready = "true"), complain);
  let waiting = 0;
  on("connected", begin);
  window.setTimeout(() => document.body.dataset.ready || begin(), document.body.dataset.live === "true" ? FIRST_LOAD : 0);
  return () => {
    waiting ||= window.setTimeout(() => {
      waiting = 0;
      begin();
    }, RELOAD_EVERY);
  };
}

/** Open the stream. Called once by the shell, on pages of a run that is live. */
export function open() {
  close();
  tell("state", state === "offline" ? "connecting" : state);
  source = new EventSource(address("/ui/api/stream", { run: shownRun() }));
  const mine = source;
  for (const kind of KINDS) {
    mine.addEventListener(kind, (message) => {
      if (mine === source) {
        take(kind, message.data);
      }
    });
  }
  mine.addEventListener("open", () => {
    heard = Date.now();
  });
  mine.addEventListener("error", () => {
    if (mine === source) {
      again();
    }
  });
}

function take(kind, text) {
  heard = Date.now();
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    console.error(`an event of kind ${kind} is not JSON: ${error.message}`);
    return;
  }
  if (kind === "hello") {
    wait = FIRST_WAIT;
    tell("state", "live");
    greeting = data;
    tell("connected", data);
  } else if (kind === "bye") {
    close();
    if (data.reason === "signed_out" || data.reason === "expired") {
      toSignIn();
    } else if (data.reason === "renew") {
      open();
    } else {
      again();
    }
  }
  tell(kind, data);
}

function tell(kind, data) {
  if (kind === "state") {
    if (data === state) {
      return;
    }
    state = data;
  }
  for (const listener of listeners.get(kind) ?? []) {
    listener(data);
  }
}

function close() {
  source?.close();
  source = null;
}

function again() {
  close();
  greeting = null;
  if (state !== "full") {
    tell("state", "lost");
  }
  window.setTimeout(async () => {
    // An EventSource does not give the reason of a refusal; a session that has ended shall lead to the sign-in.
    const answer = await fetch("/ui/api/page", { credentials: "same-origin", signal: AbortSignal.timeout(10000) }).catch(() => null);
    if (answer?.status === 401) {
      toSignIn();
      return;
    }
    const told = answer?.ok ? await answer.json().catch(() => null) : null;
    if (told === null || told.full) {
      tell("state", told === null ? "lost" : "full");
      again();
    } else {
      open();
    }
  }, wait);
  wait = Math.min(LONGEST_WAIT, wait * 1.6);
}

/** A page whose service has stopped in mid-sentence, or whose connection has gone without a word, would look live for ever. */
function listenForSilence() {
  if (source !== null && state === "live" && Date.now() - heard >= SILENCE) {
    again();
  }
}

window.setInterval(listenForSilence, 5000);
