// The stack as a picture: environments, rollout service, trainer and vLLM servers, what flows between them, how each one is.

import { h, keyed, renew, withCode } from "./dom.js";
import { ago, bytes, clock, count, modelName, number, seconds } from "./format.js";

const STATES = { good: "good", faulty: "faulty", gone: "gone", starting: "starting", ended: "ended", silent: "no sign" };
export const BADGES = { good: "good", faulty: "bad", gone: "bad", starting: "warn", ended: "", "no sign": "warn" };
const QUIET = 5; // seconds; asking is their habit

/**
 * The picture's contents, from `GET /ui/api/stack`. Pure.
 *
 * Returns boxes by their place in the picture: {id, name, title, state, `said`, facts: [[what, value], …], parts: boxes inside}. They come
 * with the texts of the arrows between them. `now`: Unix time, for how long ago the last sign of a process was.
 */
export function pictureOf(stack, now = stack.time) {
  const faulty = new Set(stack.faults.filter((fault) => fault.severity === "error").map((fault) => fault.part));
  const state = (part, gone = false) => (gone ? STATES.gone : faulty.has(part) ? STATES.faulty : STATES.good);
  const boxes = [environmentBox(stack, state), serviceBox(stack, state), trainerBox(stack, state), serverBox(stack, state)];
  return {
    boxes: boxes.map((box) => (box.parts ? { ...box, parts: box.parts.map((part) => signed(part, stack, now)) } : signed(box, stack, now))),
    arrows: {
      groups: stack.queue.groups ? `${count(stack.queue.groups, "group")} queued` : "groups",
      batches: stack.leases.length ? `${number(stack.leases.length)} leased` : "batches",
      weights: stack.trainer.version === null || stack.trainer.version === undefined ? "weights" : `weights, version ${number(stack.trainer.version)}`,
      tokens: "tokens, logprobs, versions",
    },
  };
}

/** A box as it is where its process has ended, or gives no sign any more. */
function signed(box, stack, now) {
  const sign = stack.signs?.[box.id];
  if (!sign || (box.id === "service" && stack.lost)) {
    return box;
  }
  return { ...box, state: STATES[sign.state], said: signText(sign, now) };
}

/** The text of a sign, such as `no sign for 5 min` or `the run has ended, at 18:03:12`. Pure. */
export function signText(sign, now) {
  if (sign.state === "silent") {
    return sign.seen === null ? "no sign" : `no sign for ${seconds(Math.max(0, Math.round(now - sign.seen)))}`;
  }
  return sign.seen === null ? sign.text : `${sign.text}, ${sign.text.startsWith("no sign") ? "last seen" : "at"} ${clock(sign.seen, now)}`;
}

function environmentBox(stack, state) {
  const parts = stack.environments.map((environment) => {
    const gone = environment.connected === false;
    const name = environment.wandb_name ?? `environment ${environment.env_id}`;
    const now = gone ? STATES.gone : state(`environment ${name}`);
    return {
      id: `environment-${environment.env_id}`,
      name: "environment",
      title: name,
      state: now,
      said: environment.connected === false ? "disconnected" : "",
      facts: [
        ["accepted", count(environment.groups_accepted, "group")],
        ["queued", count(environment.groups_queued, "group")],
        ["heard", environment.seconds_silent > QUIET ? `${seconds(Math.round(environment.seconds_silent))} ago` : "just now"],
      ],
    };
  });
  return { id: "environments", title: parts.length === 1 ? "Environment" : "Environments", parts, empty: "None has registered." };
}

function serviceBox(stack, state) {
  const { queue, service } = stack;
  const facts = [
    ["queue", `${count(queue.groups, "group")}, ${number(queue.sequences)} sequences`],
    ["leases", stack.leases.length ? stack.leases.map((lease) => `batch ${lease.batch_id} (${count(lease.groups, "group")})`).join(", ") : "none"],
    ["held", `${bytes(queue.held_bytes)} of ${bytes(queue.max_bytes)}`],
    ["handed out", count(service.step, "batch", "batches")],
  ];
  if (queue.oldest_version !== null && queue.oldest_version !== undefined) {
    facts.push(["oldest", `version ${number(queue.oldest_version)}`]);
  }
  const dropped = stack.dropped.reduce((sum, drop) => sum + drop.groups, 0);
  if (dropped) {
    facts.push(["dropped", stack.dropped.map((drop) => `${number(drop.groups)} ${drop.reason}`).join(", ")]);
  }
  const gone = stack.lost !== null && stack.lost !== undefined;
  const now = gone ? STATES.gone : faultyOf(["service", "queue"], state);
  const said = gone ? `does not answer since ${clock(stack.lost, stack.lost)}` : (service.waiting_because ?? "");
  return { id: "service", name: "service", title: "Rollout service", state: now, said, facts, fill: queue.max_groups ? queue.groups / queue.max_groups : 0 };
}

function faultyOf(parts, state) {
  return parts.map((part) => state(part)).find((found) => found !== STATES.good) ?? STATES.good;
}

function trainerBox(stack, state) {
  const { trainer, service } = stack;
  if (!trainer.registered) {
    const [now, said] = service.run_ended ? [STATES.ended, "the run has ended"] : [STATES.starting, "has not registered yet"];
    return { id: "trainer", name: "trainer", title: "Trainer", state: now, said, facts: [] };
  }
  const facts = [
    ["step", trainer.of_steps ? `${number(trainer.step)} of ${number(trainer.of_steps)}` : number(trainer.step)],
    ["version", number(trainer.version)],
    ["last step", trainer.seconds_since_step === null ? "none yet" : `${seconds(Math.round(trainer.seconds_since_step))} ago`],
    ["batch", trainer.batch_size === null ? "–" : count(trainer.batch_size, "sequence")],
    ["staleness", trainer.max_staleness === null || trainer.max_staleness === undefined ? "any" : `at most ${number(trainer.max_staleness)}`],
  ];
  const share = trainer.of_steps ? trainer.step / trainer.of_steps : null;
  return { id: "trainer", name: "trainer", title: "Trainer", state: state("trainer"), said: modelName(trainer.model), facts, fill: share };
}

function serverBox(stack, state) {
  const parts = stack.servers.map((server) => {
    const gone = server.health === "silent" || server.standing === "away";
    const bad = server.health === "bad" || server.standing === "quarantined";
    const now = gone ? STATES.gone : bad ? STATES.faulty : server.standing === "joining" ? STATES.starting : state(`server ${server.url}`);
    const past = gone || Boolean(stack.signs?.[`server-${server.url}`]);
    const facts = [[past ? "served last" : "serves", server.weight_version === null ? "not known" : `version ${number(server.weight_version)}`]];
    if (server.running !== null && server.running !== undefined) {
      facts.push(["requests", server.waiting === null || server.waiting === undefined ? `${number(server.running)} under way` : `${number(server.running)} run, ${number(server.waiting)} wait`]);
    }
    const since = server.standing && !gone ? server.standing_since : server.since;
    if (since) {
      const how = server.standing && !gone ? server.standing : server.health;
      facts.push([past && !gone ? `was ${how}` : how, `since ${clock(since, stack.time)}`]);
    }
    return { id: `server-${server.url}`, name: "vllm", title: server.url.replace(/^https?:\/\//, ""), state: now, said: server.reason || server.detail || "", facts };
  });
  return { id: "servers", title: parts.length === 1 ? "vLLM server" : "vLLM servers", parts, empty: "None is known." };
}

/**
 * The stack as it is now, some time after the service sent it. Pure.
 *
 * `passed`: seconds since it was sent; `lost`: Unix time since which the service does not answer, null while it does. The others' states
 * are as old as the service's last answer, so their ages stand still from there on.
 */
export function aged(stack, passed, lost = null) {
  const older = (age) => (age === null || age === undefined ? age : age + Math.max(0, passed));
  return {
    ...stack,
    trainer: { ...stack.trainer, seconds_since_step: older(stack.trainer.seconds_since_step) },
    environments: stack.environments.map((one) => ({ ...one, seconds_silent: older(one.seconds_silent) })),
    faults: lost === null ? stack.faults : [silence(lost), ...stack.faults],
    lost,
  };
}

/**
 * The state of the run, in a sentence. Pure.
 *
 * `written`: what is known of it from its files, for a run without a service.
 */
export function sentence(stack, written, now) {
  const { servers = [], environments = [], trainer = {}, service = {}, faults = [] } = stack ?? {};
  if (!stack?.live) {
    return `${written}. Read from its files${stack ? `; the stack as it was ${ago(stack.time, now)}` : ""}.`;
  }
  if (faults.length) {
    return `${count(faults.length, "thing")} to look at.`;
  }
  if (service.run_ended) {
    return `The run has ended after ${count(trainer.step ?? 0, "step")}.`;
  }
  const serving = servers.filter((server) => server.health === "good").length;
  const parts = [`${count(environments.filter((environment) => environment.connected !== false).length, "environment")}`, `${number(serving)} of ${count(servers.length, "server")} well`];
  return trainer.registered ? `Training: ${parts.join(", ")}.` : `Waiting for a trainer: ${parts.join(", ")}.`;
}

/** The one fault that the service cannot report of itself. */
function silence(since) {
  const remedy = "See its log (`scripts/logs.sh service`). Its process is gone? `scripts/start.sh --resume service`: it goes on with what it has stored.";
  return { part: "service", severity: "error", text: "It does not answer.", remedy, since };
}

/** Draw the picture into a list. */
export function drawStack(list, stack, now) {
  const { boxes, arrows } = pictureOf(stack, now);
  const [environments, service, trainer, servers] = boxes;
  const arrow = (id, text) => ({ id: `arrow-${id}`, arrow: id, text });
  const items = [environments, arrow("groups", arrows.groups), service, arrow("batches", arrows.batches), trainer, arrow("weights", arrows.weights), servers, arrow("tokens", arrows.tokens)];
  keyed(
    list,
    items,
    (item) => item.id,
    (item) => h("li", { class: item.arrow ? `arrow ${item.arrow}` : `place ${item.id}`, role: item.arrow ? "presentation" : null }),
    (element, item) => (item.arrow ? renew(element, item.text, () => h("span", {}, item.text)) : fillPlace(element, item)),
  );
}

function fillPlace(element, place) {
  if (!place.parts) {
    fillBox(element, place);
    return;
  }
  if (!element.firstElementChild) {
    element.append(h("h3", {}), h("ul", { class: "parts" }), h("p", { class: "muted none" }));
  }
  const [title, list, none] = element.children;
  title.textContent = place.title;
  none.textContent = place.parts.length ? "" : place.empty;
  none.hidden = place.parts.length > 0;
  keyed(list, place.parts, (part) => part.id, () => h("li", {}), fillBox);
}

function fillBox(element, box) {
  element.classList.add("box");
  element.dataset.state = box.state;
  element.setAttribute("aria-label", box.name);
  renew(element, box, () => [
    h("h3", {}, box.title, " ", h("span", { class: `badge ${BADGES[box.state]}` }, box.state)),
    box.fill === null || box.fill === undefined ? null : h("div", { class: "meter" }, h("i", { style: { width: `${Math.round(100 * Math.min(1, Math.max(0, box.fill)))}%` } })),
    h("dl", { class: "facts" }, box.facts.map(([what, value]) => [h("dt", {}, what), h("dd", {}, value)])),
    box.said ? h("p", { class: "said" }, box.said) : null,
  ]);
}

/** Each fault in words, with its remedy. */
export function drawFaults(element, faults, now) {
  keyed(
    element,
    faults,
    (fault) => `${fault.part} ${fault.text.replace(/[\d.]+/g, "#")}`,
    (fault) => h("div", { class: "fault", role: fault.severity === "error" ? "alert" : "status" }),
    (row, fault) => {
      row.dataset.severity = fault.severity === "error" ? "bad" : "warn";
      const since = fault.since ? ` Since ${clock(fault.since, now)}.` : ""; // and not how long ago, or an alert would be read out again and again
      renew(row, [fault, since], () => [h("p", {}, h("strong", {}, nameOf(fault)), fault.text, h("span", { class: "since" }, since)), fault.remedy ? h("p", { class: "remedy" }, withCode(fault.remedy)) : null]);
    },
  );
}

/** The beginning of a fault: its part, but for a name that its sentence has already. */
function nameOf(fault) {
  const [kind, ...rest] = fault.part.split(" ");
  const said = rest.length > 0 && fault.text.includes(rest.join(" "));
  return `${{ server: "vLLM server" }[kind] ?? kind}${rest.length && !said ? ` ${rest.join(" ")}` : ""}: `;
}
