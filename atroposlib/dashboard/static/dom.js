// Elements from data. Text is always set as text: nothing that a model or an environment wrote is ever parsed as HTML. A character that
// cannot be seen in it, or would turn the order of a line, is shown as a sign.

import { visible } from "./visible.js";

const SVG = "http://www.w3.org/2000/svg";

/** The element of that id. */
export function $(id) {
  return document.getElementById(id);
}

/**
 * A new element.
 *
 * `attributes`: names as in HTML. `onX` adds a listener. `class`, `data-…` and `aria-…` work as they are. `style` is an object that is
 * set through CSSOM (the page's policy refuses style attributes). True is an empty attribute; false, null and undefined leave it out.
 * `children`: elements, texts, numbers, lists of those; null and false are left out.
 */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Put these in the place of all that the element holds. */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

const shown = new WeakMap();

/**
 * Fill an element with what `make()` gives, if `what` (the shown data) is other than the last time. A text that a person has
 * selected, or that is being read out, is left alone while nothing of it changes.
 */
export function renew(element, what, make) {
  const key = JSON.stringify(what);
  if (shown.get(element) !== key) {
    shown.set(element, key);
    replace(element, make());
  }
}

/** The same for a line of text, even if other code has written there. */
export function say(element, text) {
  if (element.textContent !== visible(text)) {
    element.textContent = visible(text);
  }
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) {
      continue;
    }
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (name === "style") {
      for (const [property, setting] of Object.entries(value)) {
        element.style.setProperty(property, setting);
      }
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) {
      continue;
    }
    element.append(child instanceof Node ? child : visible(String(child)));
  }
}

/** Text in which what stands between backquotes is code. */
export function withCode(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/**
 * The list of an element brought up to date, with one child for each item. A child is kept where its key is the same, so that focus,
 * selection and open details survive an update.
 *
 * `make(item)` gives a new element, `update(element, item)` fills it.
 */
export function keyed(element, items, key, make, update) {
  const before = new Map([...element.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => {
    const name = String(key(item));
    let child = before.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    before.delete(name);
    update(child, item);
    return child;
  });
  for (const gone of before.values()) {
    gone.remove();
  }
  wanted.forEach((child, place) => {
    if (element.children[place] !== child) {
      element.insertBefore(child, element.children[place] ?? null);
    }
  });
}

/** The colour that a custom property of the stylesheet stands for now; a canvas knows no `var()`. */
export function colour(name) {
  const probe = $("colour-probe") ?? document.body.appendChild(h("span", { id: "colour-probe", hidden: true }));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
