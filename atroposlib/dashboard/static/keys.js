// Keyboard shortcuts: single keys, but where a person types. `?` shows them all.

import { $, h } from "./dom.js";

const shortcuts = new Map();

/** `act(event)` on that key. `what` is its description under `?`. */
export function shortcut(key, what, act) {
  shortcuts.set(key, { what, act });
}

/** Show what can be typed on this page. */
export function showShortcuts() {
  const list = $("keys-list");
  list.replaceChildren(...[...shortcuts].flatMap(([key, { what }]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
  $("keys").showModal();
}

function typing(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(input|select|textarea)$/i.test(target.tagName)) && target.type !== "checkbox" && target.type !== "range";
}

document.addEventListener("keydown", (event) => {
  const found = shortcuts.get(event.key);
  if (found && !event.ctrlKey && !event.metaKey && !event.altKey && !typing(event.target) && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    found.act(event);
  }
});
