import { request as httpRequest, type IncomingMessage } from "node:http";
import { type Clock, systemClock, type Timer } from "@kv/interface";
import { createProxy, type ProxyOptions } from "../../src/index.js";
import { type Case, faultyLegs, truthful } from "./cases.js";
import { FaultyPair } from "./faulty-pair.js";
import { until } from "./until.js";

/** A clock that counts the timers that run. */
function countingClock(): Clock & { running(): number } {
  const clock = systemClock();
  const timers = new Set<Timer>();
  return {
    now: () => clock.now(),
    setTimer(callback, ms, options) {
      const own = clock.setTimer(
        () => {
          timers.delete(timer);
          callback();
        },
        ms,
        options,
      );
      const timer: Timer = {
        cancel() {
          timers.delete(timer);
          own.cancel();
        },
      };
      timers.add(timer);
      return timer;
    },
    running: () => timers.size,
  };
}

const SETTINGS: Readonly<Record<Case["strategy"], ProxyOptions>> = {
  pull: {},
  push: { mode: "push" },
  "push, prefill first": { mode: "push", pushLegs: "prefill-first" },
  auto: { mode: "auto" },
  readback: { readback: {} },
  conditional: { disaggregateAbove: 1000 },
  single: { policy: { unsplittable: "decode-computes" } },
  "other route": {},
};

/** Room for two copies of a case's body. */
const BODIES_BYTES = 128 * 1024;
/** More than the memory for bodies leaves uncounted. */
const PADDING = "u".repeat(40 * 1024);

/** Runs one case. Returns what is wrong. */
export async function runCase(one: Case): Promise<string[]> {
  const faulty = faultyLegs(one);
  const pair = new FaultyPair(one, faulty);
  const [prefillers, decoders] = [await pair.start("P"), await pair.start("D")];
  const clock = countingClock();
  const limitMs = one.fault === "silence" ? 1000 : 20_000;
  const stallMs = one.client === "does not read" ? 400 : 20_000;
  const limits = { prefillMs: limitMs, firstByteMs: limitMs, stallMs };
  const isSidecar = one.frontEnd === "sidecar";
  const proxy = createProxy({
    ...SETTINGS[one.strategy],
    clock,
    prefillers: isSidecar ? [] : prefillers,
    decoders,
    sidecar: isSidecar ? { allow: ["127.0.0.0/8"] } : undefined,
    health: { intervalMs: 0 },
    pairing: { mode: "off" },
    routing: { prefill: "round-robin", decode: "round-robin" },
    timeouts: { ...limits, coolDownMs: 1, maxCoolDownMs: 1 },
    // The next request finds a place and memory only where this one holds none.
    limits: {
      requestsInFlight: one.n,
      requestsPerClient: one.n,
      bodyLengthBytes: BODIES_BYTES,
      bodiesLengthBytes: BODIES_BYTES,
      bodiesPerClientLengthBytes: BODIES_BYTES,
    },
  });
  const wrong: string[] = [];
  try {
    const { url } = await proxy.listen({ port: 0 });
    const named = prefillers.map((prefiller) => new URL(prefiller.url).host).join(",");
    const headers = isSidecar ? { "x-prefiller-host-port": named } : {};
    const result = await ask(one, url, headers, pair);
    const isAtEnd = one.client === "stays";
    if (isAtEnd && !truthful(one).has(result))
      wrong.push(`the client got ${result}, not ${[...truthful(one)].join(" or ")}`);
    const level = () => {
      const { requests, prefillers: ps, decoders: ds } = proxy.status();
      const visits = [...ps, ...ds].reduce((sum, { in_flight: count }) => sum + count, 0);
      return [...pair.held(), requests.in_flight, visits, pair.open].join(", ");
    };
    await until(() => level() === "0, 0, 0");
    if (level() !== "0, 0, 0") wrong.push(`held, requests, visits and open: ${level()}`);
    // vLLM too holds the blocks of a leg whose answer nobody reads.
    if (isAtEnd && pair.leasesEnded() > pair.cutLegs)
      wrong.push(`${pair.leasesEnded()} leases ended, ${pair.cutLegs} legs were cut`);
    const refusal = await mayAsk(url);
    if (refusal !== undefined) wrong.push(refusal);
    wrong.push(...pair.violations);
    const { prefillers: ps, decoders: ds } = proxy.status();
    if (one.client === "does not read") return wrong;
    if (one.fault === "none" || ["408", "413", "499", "501"].includes(one.fault))
      for (const { failures, url: failed } of [...ps, ...ds])
        if (failures > 0) wrong.push(`${failed} has ${failures} failures that it has not caused`);
    for (const { failures, url: failed } of [...ps.slice(1), ...ds.slice(1)])
      if (failures > 0) wrong.push(`${failed}, which does its part, has ${failures} failures`);
  } finally {
    await proxy.close({ graceMs: 0 });
    wrong.push(...(await pair.close()));
  }
  await until(() => clock.running() === 0);
  if (clock.running() > 0) wrong.push(`${clock.running()} timers run`);
  return wrong;
}

/** Whether a body of all bytes that bodies may have, the next one, is read and then refused. */
async function mayAsk(url: string): Promise<string | undefined> {
  const body = `"${"b".repeat(BODIES_BYTES - 2)}"`;
  const headers = { "content-type": "application/json" };
  const { status } = await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
  return status === 400 ? undefined : `the next request got ${status}`;
}

/** Asks as the case's client does. Returns the status, and `broken` where the body is incomplete. */
async function ask(
  { strategy, stream, n, client }: Case,
  url: string,
  headers: Readonly<Record<string, string>>,
  pair: FaultyPair,
): Promise<string> {
  const isOther = strategy === "other route";
  const body = isOther
    ? { input: "a", user: PADDING }
    : {
        prompt: "a",
        stream,
        n,
        user: PADDING,
        max_tokens: 5,
        ...(strategy === "single" && { best_of: 2 }),
      };
  const request = httpRequest(url + (isOther ? "/v1/embeddings" : "/v1/completions"), {
    method: "POST",
    agent: false,
    headers: { ...headers, "content-type": "application/json" },
  });
  const left = new Promise<string>((resolve) => {
    request.on("error", () => resolve("none"));
    request.once("close", () => resolve("none"));
  });
  const answered = new Promise<IncomingMessage>((resolve) => request.once("response", resolve));
  request.end(JSON.stringify(body));
  if (client === "leaves at P" || client === "leaves at D") {
    const leaves = pair.reached(client === "leaves at P" ? "P" : "D");
    const ended = answered.then((response) => void response.resume());
    await Promise.race([leaves, ended, left]);
    request.destroy();
    return left;
  }
  const response = await Promise.race([answered, left]);
  if (typeof response === "string") return response;
  // The socket's end is seen only where something is read.
  if (client === "does not read") {
    response.pause();
    await Promise.race([left, new Promise((resolve) => setTimeout(resolve, 1000))]);
    request.destroy();
    return left;
  }
  const status = String(response.statusCode);
  return new Promise((resolve) => {
    response.on("data", () => {
      if (client === "leaves in the answer") request.destroy();
    });
    response.once("error", () => resolve(`${status} broken`));
    response.once("end", () => resolve(status));
    response.once("close", () => resolve(`${status} broken`));
  });
}

/** Sockets, servers, timers and listeners of this process. */
function resources(): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const name of process.getActiveResourcesInfo()) counts[name] = (counts[name] ?? 0) + 1;
  for (const name of process.eventNames())
    counts[`listeners of ${String(name)}`] = process.listenerCount(name);
  return counts;
}

/** Runs cases, many at once. Returns those that are wrong, with what is. */
export async function runCases(cases: readonly Case[]): Promise<string[]> {
  const before = resources();
  const left = [...cases];
  const wrong: string[] = [];
  const work = async () => {
    for (let one = left.shift(); one !== undefined; one = left.shift()) {
      const problems = await runCase(one).catch((error: unknown) => [String(error)]);
      if (problems.length > 0)
        wrong.push(`${Object.entries(one).flat().join(" ")}: ${problems.join("; ")}`);
    }
  };
  await Promise.all(Array.from({ length: 16 }, work));
  const more = () =>
    Object.entries(resources()).filter(([name, count]) => count > (before[name] ?? 0));
  await until(() => more().length === 0);
  wrong.push(...more().map(([name, count]) => `after all cases: ${count} ${name}`));
  return wrong;
}
