// What a turn costs that is read back from D (kv-proxy --readback). `links`: in virtual time, with
// the times of a model of 8 billion parameters; `live`: vLLM 0.33 on the CPU. `pools`: what a pool
// saves where instances are replaced.
import { type LogFields, silentLog } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { startVllm, type VllmServer } from "../vllm/server.js";
import { converse, type EndedTurn, sendTo, type Traffic } from "./conversations.js";
import { BLOCK_TOKENS } from "./deployments.js";
import {
  computedTokens,
  converseWhileReplaced,
  INSTANCES,
  REPLACED_EVERY,
} from "./replaced-engines.js";
import { median, type Row, rowOf } from "./report.js";
import type { Run } from "./run.js";
import { openVirtual } from "./virtual-deployment.js";

/** Of an agent: each turn has the answer of a tool, and the model says a little. */
const AGENTS: Traffic = {
  conversations: 8,
  turns: 20,
  firstTokens: 500,
  addedTokens: [50, 200, 500, 100, 350],
  outputTokens: 16,
  pauseMs: 100,
};
const SHORT: Traffic = { ...AGENTS, conversations: 4, turns: 5 };
const LINKS_GBITS = [25, 100, 400];
const HOP_MS = 0.1;
/** D reads 16 GB of weights for each token of a batch. */
const DECODE_STEP_MS = 8;
const READBACK = {
  bidirectional_kv_xfer: true,
  kv_recompute_threshold: 16,
  decoder_kv_blocks_ttl: 480,
};
/** Of further turns, in which P computes the new tokens and less than a block. */
const NEW_ONLY_SHARE = 0.99;
/** Of D with readback. */
const [DECODE_RATIO, THROUGHPUT_RATIO] = [1.03, 0.97];
/** Of the tokens that are computed again where instances are replaced. */
const AGAIN_RATIO = 0.1;
const LENGTHS = [1000, 2000, 4000, 8000];

interface Held {
  readonly turns: readonly EndedTurn[];
  readonly records: ReadonlyMap<string, LogFields>;
  readonly computed: number;
}

function recordRequests() {
  const records = new Map<string, LogFields>();
  const info = (event: string, fields: LogFields = {}) => {
    if (event === "request-done") records.set(String(fields["requestId"]), fields);
  };
  return { records, log: { ...silentLog, info } };
}

/** Turns after the first, with readback and without. */
function rowsOf(name: string, on: Held, off: Held, blockTokens: number, wanted?: number) {
  const further = (held: Held, [above, most] = [0, Number.POSITIVE_INFINITY]) =>
    held.turns.filter(
      ({ turn, promptTokens }) => turn > 1 && promptTokens > above && promptTokens <= most,
    );
  const ttft = (what: string, turns: readonly (readonly EndedTurn[])[]): Row =>
    figures(
      what,
      turns.map((some) => median(some.map(({ ttftMs }) => ttftMs))),
      " ms",
      1,
    );
  const lengths = LENGTHS.flatMap((most, at) => {
    const turns = [on, off].map((held) => further(held, [LENGTHS[at - 1] ?? 0, most]));
    const what = `${name}: TTFT of further turns of up to ${most} tokens`;
    return turns.every(({ length }) => length > 0) ? [ttft(what, turns)] : [];
  });
  const all = further(on);
  const newOnly = all.filter(({ requestId, promptTokens, newTokens }) => {
    const { readback, readbackTokens = 0 } = on.records.get(requestId) ?? {};
    return readback === "used" && promptTokens - Number(readbackTokens) < newTokens + blockTokens;
  }).length;
  return [
    ttft(`${name}: TTFT of turns after the first`, [all, further(off)]),
    ...lengths,
    rowOf(
      `${name}: turns in which P computed the new tokens and less than a block`,
      [`${newOnly} of ${all.length}`, "-"],
      newOnly / all.length,
      ">=",
      wanted,
    ),
    figures(`${name}: tokens that P computed`, [on.computed, off.computed], "", 0),
  ];
}

function figures(
  what: string,
  [on = Number.NaN, off = Number.NaN]: readonly number[],
  unit: string,
  digits: number,
  relation?: "<=" | ">=",
  bound?: number,
): Row {
  const show = (value: number) => `${value.toFixed(digits)}${unit}`;
  return rowOf(what, [show(on), show(off)], on / off, relation, bound);
}

async function links({ short }: Run) {
  const rows: Row[] = [];
  for (const linkGbits of short ? [100] : LINKS_GBITS)
    for (const prefillCaches of [false, true]) {
      const name = `${linkGbits} Gb/s, P ${prefillCaches ? "with" : "without"} a prefix cache`;
      process.stderr.write(`  ${name}\n`);
      const hold = (isOn: boolean) =>
        onLink(linkGbits, prefillCaches, isOn, short ? SHORT : AGENTS);
      const [on, off] = [await hold(true), await hold(false)];
      rows.push(
        ...rowsOf(name, on, off, BLOCK_TOKENS, NEW_ONLY_SHARE),
        ...decodeRows(name, on.turns, off.turns),
      );
    }
  return rows;
}

async function onLink(
  linkGbits: number,
  prefillCaches: boolean,
  isOn: boolean,
  traffic: Traffic,
): Promise<Held> {
  const { records, log } = recordRequests();
  await using deployment = await openVirtual({
    linkGbits,
    hopMs: HOP_MS,
    prefillCaches,
    decodeStepMs: DECODE_STEP_MS,
    cluster: { cacheTokens: 240_000, extraConfig: isOn ? READBACK : {} },
    proxy: isOn ? { readback: { cachePercent: 40, minTokens: 16 } } : {},
    info: log.info,
  });
  const { clock, send, settled, prefillMetrics } = deployment;
  const before = computedTokens(await prefillMetrics());
  const turns = await settled(converse(send.proxy, traffic, 1, clock));
  return { turns, records, computed: computedTokens(await prefillMetrics()) - before };
}

function decodeRows(name: string, on: readonly EndedTurn[], off: readonly EndedTurn[]) {
  const tokenMs = (turns: readonly EndedTurn[]) => median(turns.map((turn) => turn.tokenMs));
  const tokensPerSecond = (turns: readonly EndedTurn[]) => {
    const startMs = Math.min(...turns.map(({ startedAtMs }) => startedAtMs));
    const endMs = Math.max(...turns.map(({ endedAtMs }) => endedAtMs));
    return (1000 * turns.length * AGENTS.outputTokens) / (endMs - startMs);
  };
  const further = `${name}: D's time for each further token`;
  const rate = `${name}: D's tokens a second`;
  return [
    figures(further, [tokenMs(on), tokenMs(off)], " ms", 2, "<=", DECODE_RATIO),
    figures(rate, [tokensPerSecond(on), tokensPerSecond(off)], "", 0, ">=", THROUGHPUT_RATIO),
  ];
}

/** D keeps the last turn of each conversation. */
const VLLM = { blockTokens: 32, blocks: 4000, blockBytes: 131_072 } as const;
/** The tiny model has 2,048, which 20 turns do not fit in. */
const MAX_MODEL_LEN = 8192;
const VLLM_ARGS = [
  "--max-model-len",
  `${MAX_MODEL_LEN}`,
  "--kv-cache-memory-bytes",
  `${VLLM.blocks * VLLM.blockBytes}`,
  "--hf-overrides",
  JSON.stringify({ max_position_embeddings: MAX_MODEL_LEN }),
];

/** The pair without the setting is another one. Then P answers alone. */
async function live({ short }: Run) {
  const traffic = short ? SHORT : AGENTS;
  const extra = { ...READBACK, kv_recompute_threshold: VLLM.blockTokens };
  const on = await withVllm(extra, (p, d) => throughVllm(traffic, p, d, true));
  const { off, reference } = await withVllm({}, async (p, d) => ({
    off: await throughVllm(traffic, p, d, false),
    reference: await converse(sendTo(p.url, "alone"), traffic, 1),
  }));
  const answerOf = ({ conversation, turn, tokens }: EndedTurn) =>
    `${conversation} ${turn} ${tokens.join()}`;
  const answers = new Set(reference.map(answerOf));
  const all = on.turns.length;
  const equal = on.turns.filter((turn) => answers.has(answerOf(turn))).length;
  const what = "one P, one D of vLLM: turns with the tokens of one engine";
  return [
    ...rowsOf("one P, one D of vLLM", on, off, VLLM.blockTokens),
    rowOf(what, [`${equal} of ${all}`, "-"], equal / all, ">=", 1),
  ];
}

async function withVllm<T>(
  extra: Readonly<Record<string, unknown>>,
  run: (p: VllmServer, d: VllmServer) => Promise<T>,
): Promise<T> {
  const kind = { version: "0.33", mode: "pull" } as const;
  const options = { kind, blocks: VLLM.blocks, extra };
  const starting = [
    startVllm({ ...options, name: "turns-p", args: [...VLLM_ARGS, "--no-enable-prefix-caching"] }),
    startVllm({ ...options, name: "turns-d", args: VLLM_ARGS }),
  ] as const;
  try {
    return await run(...(await Promise.all(starting)));
  } finally {
    for (const one of await Promise.allSettled(starting))
      if (one.status === "fulfilled") await one.value.stop();
  }
}

async function throughVllm(
  traffic: Traffic,
  p: VllmServer,
  d: VllmServer,
  isOn: boolean,
): Promise<Held> {
  const { records, log } = recordRequests();
  await using proxy = createProxy({
    prefillers: [p.url],
    decoders: [d.url],
    mode: "pull",
    log,
    ...(isOn ? { readback: { cachePercent: 50, minTokens: 32, timeoutMs: 60_000 } } : {}),
  });
  const { url } = await proxy.listen({ port: 0 });
  const computed = async () => computedTokens(await (await fetch(`${p.url}/metrics`)).text());
  const warmUp = sendTo(url, "warm-up");
  const handshake = () => converse(warmUp, { ...SHORT, conversations: 1, turns: 2 }, 2);
  // The first handshake may take longer than vLLM waits for it.
  await handshake().catch(handshake);
  const before = await computed();
  const turns = await converse(sendTo(url, "turn"), traffic, 1);
  return { turns, records, computed: (await computed()) - before };
}

async function pools() {
  const on = await converseWhileReplaced(true, AGENTS);
  const off = await converseWhileReplaced(false, AGENTS);
  const name = `${INSTANCES} P of the demo, one replaced every ${REPLACED_EVERY} requests`;
  const again = [on.computedAgain, off.computedAgain];
  const answerOf = ({ conversation, turn, tokens }: EndedTurn) =>
    `${conversation} ${turn} ${tokens.join()}`;
  const answers = new Set(off.turns.map(answerOf));
  const equal = on.turns.filter((turn) => answers.has(answerOf(turn))).length;
  const all = on.turns.length;
  return [
    figures(`${name}: tokens that P computed again`, again, "", 0, "<=", AGAIN_RATIO),
    figures(`${name}: tokens that P computed`, [on.computed, off.computed], "", 0),
    rowOf(`${name}: turns with the same tokens`, [`${equal} of ${all}`, "-"], equal / all, ">=", 1),
  ];
}

export const multiTurn = (run: Run) => run.parts({ links, live, pools }, run);
