// Asking the service. Every request ends within a deadline, and every refusal names the request and the answer.

const SECONDS = 30;

let leaving = false; // requests are then cut off, and no person is there to read why
globalThis.addEventListener?.("pagehide", () => (leaving = true));
globalThis.addEventListener?.("pageshow", () => (leaving = false));

export class RefusedError extends Error {
  /** `status`: of HTTP, 0 if no answer came. */
  constructor(message, status) {
    super(message);
    this.name = "RefusedError";
    this.status = status;
  }
}

/** `/ui/api/series?run=a&names=x,y`; parameters that are null or empty are left out, lists are joined by commas. */
export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    const text = Array.isArray(value) ? value.join(",") : value;
    if (text !== null && text !== undefined && text !== "") {
      query.set(name, text);
    }
  }
  const asked = query.toString().replaceAll("%7E", "~").replaceAll("%2C", ","); // for people who read it
  return asked ? `${path}?${asked}` : path;
}

/**
 * The JSON that an address answers. Where the session has ended the page goes to the sign-in.
 *
 * Throws RefusedError: no answer, one that is not JSON, or another one than 200.
 */
export async function getJson(path, parameters = {}) {
  const url = address(path, parameters);
  let answer;
  try {
    answer = await fetch(url, { headers: { Accept: "application/json" }, credentials: "same-origin", signal: AbortSignal.timeout(SECONDS * 1000) });
  } catch (error) {
    if (leaving) {
      return new Promise(() => undefined);
    }
    const why = error.name === "TimeoutError" ? `no answer in ${SECONDS} s` : "the service does not answer";
    throw new RefusedError(`${url}: ${why}`, 0);
  }
  const told = await answer.json().catch(() => null);
  if (told === null && leaving) {
    return new Promise(() => undefined);
  }
  if (answer.status === 401) {
    toSignIn();
  }
  if (!answer.ok || told === null) {
    const what = answer.ok ? "the answer was cut off, or is not JSON" : `status ${answer.status}`;
    throw new RefusedError(told?.error ?? `${url}: ${what}`, answer.status);
  }
  return told;
}

/** Show a refusal in an element; another error is thrown again. */
export function refusalIn(element) {
  return (error) => {
    if (!(error instanceof RefusedError)) {
      throw error;
    }
    element.textContent = error.message;
  };
}

/** Leave for the sign-in, which leads back here. */
export function toSignIn() {
  const here = window.location.pathname + window.location.search;
  window.location.assign(address("/ui/sign-in", { next: here }));
}

/** The run that the page shows: that of its address, empty for the live (or newest) one. */
export function shownRun() {
  return new URLSearchParams(window.location.search).get("run") ?? document.body.dataset.run ?? "";
}
