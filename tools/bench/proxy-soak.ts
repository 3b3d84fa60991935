// npm run soak:proxy [-- --minutes 30 --clients 16 --every-s 20]; with --engines memory|nixl see
// engine-soak.ts: requests through kv-proxy, with pairing, KV events, token ids and the
// disaggregation rule, while its instances are killed, or drained, and started again, each time as
// the other of two versions that do not fit. A request that fails before its client has received a
// byte could have been retried, so there must be none; nor may one go to a pair that does not fit.
// Clients use all routes, stream, ask for two choices, read slowly, or leave; the publishers of the
// first pair lie. With --readback: conversations whose turns are read back (readback-soak.ts). Each
// complete answer must have all its words; memory must not grow; at the end nothing is in flight.
import { type ChildProcess, spawn } from "node:child_process";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { Agent } from "undici";
import { firstLine } from "./child-processes.js";
import { engineSoak } from "./engine-soak.js";
import { soakReadback } from "./readback-soak.js";
import { change, inFlightAtEnd, Reasons, startProxy } from "./soak-admin.js";
import { EVENTS } from "./upstream-answers.js";

const { values } = parseArgs({
  options: {
    minutes: { type: "string", default: "30" },
    clients: { type: "string", default: "16" },
    "every-s": { type: "string", default: "20" },
    engines: { type: "string" },
    connector: { type: "string", default: "NixlConnector" },
    readback: { type: "boolean" },
  },
});
const durationMs = Number(values.minutes) * 60_000;
const everyMs = Number(values["every-s"]) * 1_000;
if (values.engines === "memory" || values.engines === "nixl") {
  const soak = {
    transport: values.engines,
    connector: values.connector,
    durationMs,
    everyMs,
  } as const;
  const good = await engineSoak({ ...soak, clients: Number(values.clients) });
  console.log(
    good ? "ok" : "not ok: different, late, held, and without deaths also failed, must be 0",
  );
  process.exit(good ? 0 : 1);
}
if (values.readback === true) {
  const isGood = await soakReadback(durationMs, Number(values.clients), everyMs);
  console.log(isGood ? "ok" : "not ok");
  process.exit(isGood ? 0 : 1);
}
const GROWTH_LIMIT = 1.25;
const PAIRS = 3;

interface Pair {
  readonly child: ChildProcess;
  /** Of prefill, decode and the side channel. */
  readonly ports: readonly [number, number, number];
  readonly version: number;
}

const upstreamScript = fileURLToPath(new URL("./proxy-upstream.ts", import.meta.url));

const VERSIONS = ["0.32.0", "0.33.0"];

async function startUpstream(ports: Pair["ports"], version: number, lies: boolean): Promise<Pair> {
  const about = [...ports.map(String), VERSIONS[version] ?? "", String(lies)];
  const args = ["--import", "tsx", upstreamScript, ...about];
  const child = spawn(process.execPath, args, { stdio: ["pipe", "pipe", "inherit"] });
  const { prefill, decode, sideChannel } = JSON.parse(await firstLine(child)) as Record<
    string,
    number
  >;
  return { child, ports: [prefill ?? 0, decode ?? 0, sideChannel ?? 0], version };
}

const pairs = await Promise.all(
  Array.from({ length: PAIRS }, (_, at) => startUpstream([0, 0, 0], at % 2, at === 0)),
);
const urls = (at: 0 | 1) => pairs.map(({ ports }) => `127.0.0.1:${ports[at]}`);
const sideChannels = pairs.map(({ ports }) => String(ports[2]));
const proxy = await startProxy([
  "--prefill",
  ...urls(0),
  "--decode",
  ...urls(1),
  "--prefill-side-channel-port",
  ...sideChannels,
  "--decode-side-channel-port",
  ...sideChannels,
  "--routing",
  "prefix-aware",
  "--disaggregate-above",
  "0",
  "--admin-port",
  "0",
]);

const counts = { complete: 0, cut: 0, lost: 0, left: 0, wrong: 0, deaths: 0, rollouts: 0 };
const agent = new Agent({ connections: Number(values.clients), pipelining: 1 });
const endAtMs = Date.now() + durationMs;

/** The error messages of lost requests. */
const why = new Reasons();

type End = "complete" | "cut" | "lost" | "left" | "wrong";

const WORD = '" word"';
const MESSAGES = { messages: [{ role: "user", content: "some words" }] };
const INPUT = { input: "some words" };
/**
 * What each route is sent, and how its stream ends. Routes without an end go to D alone, and are
 * not streamed.
 */
const ROUTES: readonly (readonly [path: string, body: object, end?: string])[] = [
  ["/v1/completions", { prompt: "some words" }, "data: [DONE]\n\n"],
  ["/v1/chat/completions", MESSAGES, "data: [DONE]\n\n"],
  ["/v1/responses", INPUT, '"output":[]}}\n\n'],
  ["/v1/messages", { ...MESSAGES, max_tokens: 99 }, '"message_stop"}\n\n'],
  ["/v1/messages/count_tokens", MESSAGES],
  ["/v1/embeddings", INPUT],
  ["/v1/rerank", { query: "some", documents: ["words"] }],
  ["/tokenize", { prompt: "some words" }],
];

/** One random request: some ask for two choices, read slowly, or leave. */
function ask(): Promise<End> {
  return new Promise((resolve) => {
    let [seen, status, words] = ["", 0, 0];
    const lost = (reason: string) => {
      why.add(reason);
      resolve("lost");
    };
    const chance = Math.random();
    const [path, prompt, streamEnd] = ROUTES[Math.floor(Math.random() * ROUTES.length)] ?? ["", {}];
    const stream = streamEnd !== undefined && chance < 0.9;
    const [n, isSlow, leaves] = [
      stream && chance < 0.1 && path.endsWith("completions") ? 2 : 1,
      chance > 0.9,
      chance > 0.8 && chance < 0.9,
    ] as const;
    agent.dispatch(
      {
        origin: proxy.url,
        path,
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ model: "m", ...prompt, n, stream }),
      },
      {
        onRequestStart(controller) {
          if (!leaves) return;
          setTimeout(() => {
            controller.abort(new Error("left"));
            resolve("left");
          }, 20 * Math.random());
        },
        onResponseStart(controller, given) {
          status = given;
          if (!isSlow) return;
          controller.pause();
          setTimeout(() => controller.resume(), 300 * Math.random());
        },
        onResponseData(_controller, chunk) {
          const text = chunk.toString("latin1");
          // A read may end within a word.
          words += (seen.slice(1 - WORD.length) + text).split(WORD).length - 1;
          seen = (seen + text).slice(-400);
        },
        onResponseEnd() {
          if (status !== 200) lost(`${status} ${seen}`);
          else if (!seen.endsWith(stream ? streamEnd : "}")) resolve("cut");
          else resolve(words === n * EVENTS ? "complete" : "wrong");
        },
        onResponseError(_controller, error) {
          if (leaves) resolve("left");
          else if (seen === "") lost(error.message);
          else resolve("cut");
        },
      },
    );
  });
}

async function client(): Promise<void> {
  while (Date.now() < endAtMs) counts[await ask()] += 1;
}

/**
 * Changes both instances of a pair at the admin routes. Resolves with the requests that they have.
 */
async function changePair(what: "add" | "drain", { ports }: Pair): Promise<number> {
  const [prefill, decode] = ports.map((port) => `http://127.0.0.1:${port}`);
  const ofPrefill = await change(proxy.adminUrl, what, "prefill", prefill ?? "");
  return ofPrefill + (await change(proxy.adminUrl, what, "decode", decode ?? ""));
}

/**
 * By turns a death and a rollout, of one pair after another. What drains is ended when it has no
 * requests, so no stream may break off.
 */
async function chaos(): Promise<void> {
  for (let turn = 0; Date.now() + everyMs < endAtMs; turn += 1) {
    await sleep(everyMs);
    const pair = pairs[turn % PAIRS];
    if (pair === undefined) return;
    const drains = turn % 2 === 1;
    if (drains) while ((await changePair("drain", pair)) > 0) await sleep(20);
    const { cut } = counts;
    pair.child.kill("SIGKILL");
    await once(pair.child, "close");
    pairs[turn % PAIRS] = await startUpstream(pair.ports, 1 - pair.version, turn % PAIRS === 0);
    if (drains) {
      await changePair("add", pair);
      counts.wrong += counts.cut - cut;
    }
    counts[drains ? "rollouts" : "deaths"] += 1;
  }
}

await Promise.all([chaos(), ...Array.from({ length: Number(values.clients) }, client)]);
const { early, late } = proxy.memory.ended();
await agent.close();
const inFlight = await inFlightAtEnd(proxy.url);
const code = await proxy.end();
for (const { child } of pairs) child.kill("SIGKILL");

const growth = late / early;
console.log(
  JSON.stringify({
    ...counts,
    early_mib: Math.round(early),
    late_mib: Math.round(late),
    exit_code: code,
  }),
);
why.print((reason, count) => `lost ${count}: ${reason}`);
const good =
  counts.lost === 0 &&
  counts.wrong === 0 &&
  inFlight === 0 &&
  counts.complete > 0 &&
  growth <= GROWTH_LIMIT &&
  code === 0;
console.log(
  good
    ? "ok"
    : `not ok: lost and wrong must be 0, and ${inFlight} in flight; growth ${growth.toFixed(2)} at most ${GROWTH_LIMIT}, exit code 0`,
);
process.exitCode = good ? 0 : 1;
