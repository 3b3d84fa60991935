import { setTimeout as sleep } from "node:timers/promises";
import { createProxy } from "@kv/proxy";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { startVllm } from "../../tools/vllm/server.js";
import {
  converse,
  type EndedTurn,
  equalTurns,
  promptTokensOf,
  readTurns,
  recordRequests,
  type Traffic,
} from "./traffic.js";

/** As much as the tiny model's context of 1,024 tokens holds. */
const TRAFFIC: Traffic = {
  ...{ conversations: 4, turns: 7, firstTokens: 200, outputTokens: 16, pauseMs: 100 },
  addedTokens: [60, 150, 90],
};
const EXTRA = { bidirectional_kv_xfer: true, kv_recompute_threshold: 32, decoder_kv_blocks_ttl: 480 };
/** vLLM's on the CPU, of the tiny model. */
const BLOCK_TOKENS = 32;
const ROUNDS = 3;

export interface LiveTurns {
  readonly on: readonly EndedTurn[];
  readonly off: readonly EndedTurn[];
  readonly read: ReturnType<typeof readTurns>;
  readonly computed: { readonly on: number; readonly off: number };
  readonly equal: number;
  readonly traffic: Traffic;
}

/** Conversations through a P (without a prefix cache) and a D of vLLM 0.33, with and without readback in turn. */
export async function liveTurns(): Promise<LiveTurns> {
  const kind = { version: "0.33", mode: "pull" } as const;
  const [p, d] = await Promise.all([
    startVllm({ kind, name: "turns-p", blocks: 400, extra: EXTRA, args: ["--no-enable-prefix-caching"] }),
    // Without readback nobody has its blocks freed, so the cache holds those of all turns.
    startVllm({ kind, name: "turns-d", blocks: 4000, extra: EXTRA }),
  ]);
  const turns: Record<"on" | "off", EndedTurn[]> = { on: [], off: [] };
  const computed = { on: 0, off: 0 };
  const { records, log } = recordRequests();
  let sent = 0;
  const computedByP = async () =>
    promptTokensOf(await (await fetch(`${p.url}/metrics`)).text())["local_compute"] ?? 0;
  try {
    for (let round = 0; round <= ROUNDS; round += 1)
      for (const way of ["on", "off"] as const) {
        const proxy = createProxy({
          ...{ prefillers: [p.url], decoders: [d.url], mode: "pull", log },
          ...(way === "on" ? { readback: { minTokens: 32 } } : {}),
        });
        const { url } = await proxy.listen({ port: 0 });
        const before = await computedByP();
        const send = (prompt: readonly number[], maxTokens: number) => {
          sent += 1;
          return complete({ url, requestId: `turns-${sent}`, promptTokens: prompt, maxTokens });
        };
        const ended = await converse(
          { send, sleep: (ms) => sleep(ms), now: () => performance.now() },
          TRAFFIC,
          10 * round + 1,
        );
        // The first round warms up.
        if (round > 0) {
          turns[way].push(...ended);
          computed[way] += (await computedByP()) - before;
        }
        await proxy.close();
      }
    const equal = equalTurns(turns.on, turns.off);
    return { ...turns, read: readTurns(turns.on, records, BLOCK_TOKENS), computed, equal, traffic: TRAFFIC };
  } finally {
    await Promise.all([p.stop(), d.stop()]);
  }
}
