import { EVENTS } from "../../bench/upstream-answers.js";
import { startProxy } from "../attacks/victims.js";
import type { PartOptions } from "../main.js";
import { ObservedProcess } from "../observed-process.js";
import type { Check } from "../row.js";
import { Cut, changeInstance, endProxy, send, soak, Tally } from "./soak.js";

const PAIRS = 3;
const VERSIONS = ["0.32.0", "0.33.0"];
const WORD = '" word"';
const MESSAGES = { messages: [{ role: "user", content: "some words" }] };
const INPUT = { input: "some words" };
/** Routes without the end of a stream go to D alone. */
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

type Pair = Awaited<ReturnType<typeof startPair>>;

async function startPair(
  { prefill, decode, sideChannel }: Record<"prefill" | "decode" | "sideChannel", number>,
  version: number,
  lies: boolean,
) {
  const about = [prefill, decode, sideChannel, VERSIONS[version], lies].map(String);
  const process = new ObservedProcess("tools/bench/proxy-upstream.ts", about);
  return {
    process,
    ports: JSON.parse(await process.line()) as Parameters<typeof startPair>[0],
    version,
  };
}

/**
 * The instances end and start again, each time as the other of two versions that do not fit. A
 * request that fails before its client has received a byte could have been retried, so there must
 * be none; nor may one go to a pair that does not fit. The publishers of the first pair lie.
 */
export async function proxySoak(options: PartOptions): Promise<Check[]> {
  const free = { prefill: 0, decode: 0, sideChannel: 0 };
  const pairs = await Promise.all(
    Array.from({ length: PAIRS }, (_, at) => startPair(free, at % 2, at === 0)),
  );
  const addresses = (role: "prefill" | "decode") =>
    pairs.map(({ ports }) => `127.0.0.1:${ports[role]}`);
  const sideChannels = pairs.map(({ ports }) => String(ports.sideChannel));
  const { proxy, proxyUrl, adminUrl } = await startProxy(
    addresses("prefill"),
    addresses("decode"),
    [
      "--prefill-side-channel-port",
      ...sideChannels,
      "--decode-side-channel-port",
      ...sideChannels,
      "--routing",
      "prefix-aware",
      "--disaggregate-above",
      "0",
    ],
  );
  const tally = new Tally();

  async function ask() {
    const chance = Math.random();
    const [path, prompt, streamEnd] = ROUTES[Math.floor(Math.random() * ROUTES.length)] ?? ["", {}];
    const stream = streamEnd !== undefined && chance < 0.9;
    const n = stream && chance < 0.1 && path.endsWith("completions") ? 2 : 1;
    const leaves = chance > 0.8 && chance < 0.9;
    const signal = leaves ? AbortSignal.timeout(Math.ceil(20 * Math.random())) : undefined;
    const pauseMs = chance > 0.9 ? 300 * Math.random() : 0;
    const body = { model: "m", ...prompt, n, stream };
    try {
      const { status, text } = await send(proxyUrl + path, body, { signal, pauseMs });
      const words = text.split(WORD).length - 1;
      if (status !== 200) tally.add("lost", `${status} ${text}`);
      else if (!text.endsWith(stream ? streamEnd : "}")) tally.add("cut");
      else tally.add(words === n * EVENTS ? "complete" : "wrong", `${words} words`);
    } catch (error) {
      if (leaves) tally.add("left");
      else if (error instanceof Cut) tally.add("cut");
      else tally.add("lost", String(error));
    }
  }

  async function changePair(what: "add" | "drain", { ports }: Pair) {
    for (const role of ["prefill", "decode"] as const)
      await changeInstance(adminUrl, what, role, `http://127.0.0.1:${ports[role]}`);
  }

  /**
   * By turns a death and a rollout. What drains is ended when it has no requests, so no stream may
   * break off.
   */
  async function change(turn: number) {
    const pair = pairs[turn % PAIRS] as Pair;
    const drains = turn % 2 === 1;
    if (drains) await changePair("drain", pair);
    const before = tally.of("cut");
    await pair.process.end();
    pairs[turn % PAIRS] = await startPair(pair.ports, 1 - pair.version, turn % PAIRS === 0);
    if (!drains) return tally.add("deaths");
    await changePair("add", pair);
    if (tally.of("cut") > before) tally.add("cut in a rollout");
    tally.add("rollouts");
  }

  const memory = await soak(options, proxy, ask, change);
  const end = await endProxy(proxy, proxyUrl);
  return [...tally.checks("complete", ["lost", "wrong", "cut in a rollout"]), ...memory, ...end];
}
