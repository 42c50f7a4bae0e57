// Text from outside, as nodes of text: what a terminal or the order of writing would act on is shown as a sign.

const SIGNS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udfff](?![\udc00-\udfff])/gu;

/** The sign for a character that cannot be seen: `␛` for escape, `‹U+202E›` for one that turns the direction of text. */
export function signOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) {
    return String.fromCodePoint(0x2400 + code);
  }
  return code === 0x7f ? "\u2421" : `\u2039U+${code.toString(16).toUpperCase().padStart(4, "0")}\u203a`;
}

/** The parts of a text: [text, whether it stands for something that cannot be seen]. */
export function visibleParts(text) {
  const parts = [];
  let begin = 0;
  for (const found of text.matchAll(SIGNS)) {
    if (found.index > begin) {
      parts.push([text.slice(begin, found.index), false]);
    }
    parts.push([signOf(found[0]), true]);
    begin = found.index + found[0].length;
  }
  if (begin < text.length) {
    parts.push([text.slice(begin), false]);
  }
  return parts;
}

/** The same as one text, for titles and labels. */
export function visible(text) {
  return visibleParts(text).map(([part]) => part).join("");
}

/** Fill an element with a text. */
export function fillVisibly(element, text) {
  for (const [part, made] of visibleParts(text)) {
    if (made) {
      const sign = document.createElement("span");
      sign.className = "made-visible";
      sign.textContent = part;
      element.append(sign);
    } else {
      element.append(document.createTextNode(part));
    }
  }
  return element;
}
