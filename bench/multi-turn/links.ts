import { worldOf } from "../push-vs-pull/links/sweep.js";
import { openVirtualDeployment } from "../push-vs-pull/links/virtual-deployment.js";
import { AGENTS, converse, type EndedTurn, promptTokensOf, readTurns, recordRequests } from "./traffic.js";

export const LINKS_GBITS = [25, 100, 400] as const;
const HOP_MS = 0.1;
/** D reads 16 GB of weights for each token of a batch. */
const DECODE_STEP_MS = 8;
const READBACK = { bidirectional_kv_xfer: true, kv_recompute_threshold: 16, decoder_kv_blocks_ttl: 480 };

const BLOCK_TOKENS = 16;

export interface Held {
  readonly turns: readonly EndedTurn[];
  readonly read: ReturnType<typeof readTurns>;
  readonly computedTokens: number;
}

/** The conversations on one link, in virtual time: with `isOn` P reads ended turns back from D. */
export async function onLink(linkGbits: number, caches: boolean, isOn: boolean): Promise<Held> {
  const { records, log } = recordRequests();
  const deployment = await openVirtualDeployment("pull", "contiguous", worldOf(linkGbits, HOP_MS), {
    hitsAt: caches ? "prefill" : "decode",
    decodeStepMs: DECODE_STEP_MS,
    cluster: { cacheTokens: 240_000, extraConfig: isOn ? READBACK : {} },
    proxy: isOn ? { readback: { cachePercent: 40, minTokens: 16 } } : {},
    requestDone: (fields) => log.info("request-done", fields),
  });
  try {
    const before = promptTokensOf(await deployment.prefillMetrics());
    const { clock, send, settled } = deployment;
    const sleep = (ms: number) =>
      new Promise<void>((resolve) => void clock.setTimer(resolve, ms, { ref: true }));
    const turns = await settled(converse({ send, sleep, now: () => clock.now() }, AGENTS, 1));
    const after = promptTokensOf(await deployment.prefillMetrics());
    const computedTokens = (after["local_compute"] ?? 0) - (before["local_compute"] ?? 0);
    return { turns, read: readTurns(turns, records, BLOCK_TOKENS), computedTokens };
  } finally {
    await deployment.close();
  }
}
