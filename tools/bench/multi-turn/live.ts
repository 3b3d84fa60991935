import { createProxy } from "@kv/proxy";
import { startVllm, type VllmServer } from "../../vllm/server.js";
import { Replacements } from "./replacements.js";
import {
  AGENTS,
  type BothWays,
  clientOf,
  converse,
  type EndedTurn,
  equalTurns,
  promptTokensOf,
  readTurns,
  recordRequests,
  SHORT,
  type Traffic,
} from "./traffic.js";

const EXTRA = {
  bidirectional_kv_xfer: true,
  kv_recompute_threshold: 32,
  decoder_kv_blocks_ttl: 480,
};
/** vLLM's on the CPU, of the tiny model. */
const BLOCK_TOKENS = 32;
/** D keeps the last turn of each conversation, and has room for the next one. */
const BLOCKS = 4000;
const BLOCK_BYTES = 131_072;
/** The tiny model has 2,048, which 20 turns do not fit in. */
const MAX_MODEL_LEN = 8192;
const ARGS = [
  "--max-model-len",
  `${MAX_MODEL_LEN}`,
  "--kv-cache-memory-bytes",
  `${BLOCKS * BLOCK_BYTES}`,
  "--hf-overrides",
  JSON.stringify({ max_position_embeddings: MAX_MODEL_LEN }),
];
const SEED = 1;
/** Of the conversation that makes the handshake. */
const WARM_UP: Traffic = { ...AGENTS, conversations: 1, turns: 2 };

interface Played {
  readonly turns: readonly EndedTurn[];
  readonly read: ReturnType<typeof readTurns>;
  /** By P's metrics. */
  readonly computed: number;
  /** Requests that the client has sent again. */
  readonly failed: number;
}

/**
 * Conversations through a P (without a prefix cache) and a D of vLLM 0.33: with readback; and,
 * without the setting at vLLM and at the router, through another pair. Then P answers them alone.
 */
export async function liveTurns(): Promise<BothWays<Played>> {
  const traffic = process.argv.includes("--short") ? SHORT : AGENTS;
  const on = await withPair(EXTRA, (p, d) => play(traffic, p, d, true));
  return withPair({}, async (p, d) => {
    const off = await play(traffic, p, d, false);
    const reference = await converse(clientOf(p.url, "alone"), traffic, SEED);
    return { traffic, on, off, equal: equalTurns(on.turns, reference) };
  });
}

async function withPair<T>(
  extra: Readonly<Record<string, unknown>>,
  run: (p: VllmServer, d: VllmServer) => Promise<T>,
): Promise<T> {
  const kind = { version: "0.33", mode: "pull" } as const;
  const options = { kind, blocks: BLOCKS, extra };
  const starting = [
    startVllm({ ...options, name: "turns-p", args: [...ARGS, "--no-enable-prefix-caching"] }),
    startVllm({ ...options, name: "turns-d", args: ARGS }),
  ] as const;
  try {
    return await run(...(await Promise.all(starting)));
  } finally {
    for (const one of await Promise.allSettled(starting))
      if (one.status === "fulfilled") await one.value.stop();
  }
}

async function play(
  traffic: Traffic,
  p: VllmServer,
  d: VllmServer,
  isOn: boolean,
): Promise<Played> {
  const { records, log } = recordRequests();
  await using proxy = createProxy({
    prefillers: [p.url],
    decoders: [d.url],
    mode: "pull",
    log,
    ...(isOn ? { readback: { cachePercent: 50, minTokens: 32, timeoutMs: 60_000 } } : {}),
  });
  const { url } = await proxy.listen({ port: 0 });
  const computed = async () =>
    promptTokensOf(await (await fetch(`${p.url}/metrics`)).text())["local_compute"] ?? 0;
  // The first handshake may take longer than vLLM waits for it: then the client asks again.
  const warmUp = new Replacements(Number.POSITIVE_INFINITY, [], clientOf(url, "warm-up"));
  await converse(warmUp.client, WARM_UP, SEED + 1);
  const before = await computed();
  const client = new Replacements(Number.POSITIVE_INFINITY, [], clientOf(url, "turn"));
  const turns = await converse(client.client, traffic, SEED);
  const read = readTurns(turns, records, BLOCK_TOKENS);
  return { turns, read, computed: (await computed()) - before, failed: client.failed };
}
