// Light, dark, or what the system has. A classic script in the head: it runs before the page is painted, which then never flashes.
"use strict";

(() => {
  const KEY = "lockstep-theme";
  const NAMES = ["system", "light", "dark"];

  function stored() {
    try {
      const name = window.localStorage.getItem(KEY);
      return NAMES.includes(name) ? name : "system";
    } catch {
      return "system"; // storage is switched off: a choice lasts as long as the page
    }
  }

  function show(name) {
    const root = document.documentElement;
    if (name === "system") {
      delete root.dataset.theme;
    } else {
      root.dataset.theme = name;
    }
    window.dispatchEvent(new CustomEvent("theme"));
  }

  show(stored());
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new CustomEvent("theme")));
  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = stored();
    select.addEventListener("change", () => {
      try {
        window.localStorage.setItem(KEY, select.value);
      } catch {
        // as above
      }
      show(select.value);
    });
  });
})();
