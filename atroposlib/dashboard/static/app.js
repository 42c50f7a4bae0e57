// The shell of every page: the stream of events, the dot that shows it, the run's name, the shortcuts that lead elsewhere.

import { $ } from "./dom.js";
import { getJson, shownRun } from "./http.js";
import { shortcut, showShortcuts } from "./keys.js";
import * as live from "./live.js";

const PAGES = [
  ["1", "Overview", "/ui"],
  ["2", "Rollouts", "/ui/rollouts"],
  ["3", "Weights", "/ui/weights"],
  ["4", "History", "/ui/history"],
];
const SAID = { connecting: "connecting", live: "live", lost: "connection lost, trying again", full: "too many pages are open", offline: "from files" };

function showState(state) {
  const dot = $("live");
  if (dot) {
    dot.dataset.state = state;
    dot.textContent = SAID[state];
  }
  document.body.dataset.connection = state;
}

function leadElsewhere() {
  for (const [key, name, path] of PAGES) {
    shortcut(key, name, () => window.location.assign(document.querySelector(`.tabs a[href^="${path}"]`)?.href ?? path));
  }
  shortcut("t", "light, dark, or as the system has it", () => {
    const select = $("theme");
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    select.dispatchEvent(new Event("change"));
  });
  shortcut("?", "this list", showShortcuts);
  $("help")?.addEventListener("click", showShortcuts);
}

async function nameTheRun() {
  const page = await getJson("/ui/api/page");
  const run = shownRun() || page.run || "";
  const name = page.name && run === page.run ? page.name : run.split("~")[0]; // the rest only separates runs of one name
  $("run-name").textContent = name;
  $("run-name").title = page.folder ? `run ${name}, in ${page.folder}` : `run ${name}`;
  if (name && !document.title.startsWith(name)) {
    document.title = `${document.title.split(" · ")[0]} · ${name} · Lockstep`;
  }
}

const isLive = document.body.dataset.live === "true";
if (!["sign-in", "error"].includes(document.body.dataset.page)) {
  leadElsewhere();
  live.on("state", showState);
  nameTheRun().catch((error) => console.warn(error.message));
  if (isLive) {
    live.open();
  }
}
