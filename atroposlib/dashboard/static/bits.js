// Float32 numbers as the bits that they are: what deterministic mode compares. Pure.

/** The 32 bits of a number after rounding to float32, as hexadecimal: `0xbf6a9208`. */
export function hexOf(value) {
  return `0x${bitsOf(value).toString(16).padStart(8, "0")}`;
}

/** The 32 bits as sign, exponent and fraction: three strings of 0 and 1. */
export function fieldsOf(value) {
  const bits = bitsOf(value).toString(2).padStart(32, "0");
  return [bits.slice(0, 1), bits.slice(1, 9), bits.slice(9)];
}

/** The count of float32 numbers between two, of any signs; 0 if their bits are equal, null if one is not a number. */
export function distance(a, b) {
  if (!Number.isFinite(a) || !Number.isFinite(b)) {
    return null;
  }
  const ordered = (value) => {
    const bits = bitsOf(value);
    return bits & 0x80000000 ? -(bits & 0x7fffffff) : bits;
  };
  return Math.abs(ordered(a) - ordered(b));
}

/** For each character of `one` whether `other` has the same at its place: [[text, same], …], runs of equal kind together. */
export function compared(one, other) {
  const runs = [];
  [...one].forEach((character, place) => {
    const same = character === other[place];
    if (runs.length && runs.at(-1)[1] === same) {
      runs.at(-1)[0] += character;
    } else {
      runs.push([character, same]);
    }
  });
  return runs;
}

function bitsOf(value) {
  const view = new DataView(new ArrayBuffer(4));
  view.setFloat32(0, value);
  return view.getUint32(0);
}
