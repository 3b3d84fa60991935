import { worldOf } from "../push-vs-pull/links/sweep.js";
import { openVirtualDeployment } from "../push-vs-pull/links/virtual-deployment.js";
import { Replacements } from "./replacements.js";
import {
  AGENTS,
  computedTokens,
  converse,
  type EndedTurn,
  promptTokensOf,
  readTurns,
  recordRequests,
} from "./traffic.js";

export const LINKS_GBITS = [25, 100, 400] as const;
/** The link on which instances are replaced, one after so many requests. */
export const REPLACED_GBITS = 100;
export const REPLACED_EVERY = 50;
const HOP_MS = 0.1;
/** D reads 16 GB of weights for each token of a batch. */
const DECODE_STEP_MS = 8;
/** From the end of an instance until another one is in its place. */
const GONE_MS = 500;
const READBACK = {
  bidirectional_kv_xfer: true,
  kv_recompute_threshold: 16,
  decoder_kv_blocks_ttl: 480,
};

const BLOCK_TOKENS = 16;

export interface Held {
  readonly turns: readonly EndedTurn[];
  /** Where instances are replaced, of the turns whose D was not. */
  readonly read: ReturnType<typeof readTurns>;
  readonly computed: number;
  readonly replaced: number;
}

interface LinkOptions {
  readonly linkGbits: number;
  /** P has a prefix cache. */
  readonly caches?: boolean;
  /** P reads ended turns back from D. */
  readonly isOn: boolean;
  /** There are two P and two D, and they are replaced. */
  readonly replaces?: boolean;
}

/** The conversations on one link, in virtual time. */
export async function onLink(options: LinkOptions): Promise<Held> {
  const { linkGbits, caches = false, isOn, replaces = false } = options;
  const { records, log } = recordRequests();
  const deployment = await openVirtualDeployment("pull", "contiguous", worldOf(linkGbits, HOP_MS), {
    hitsAt: caches ? "prefill" : "decode",
    decodeStepMs: DECODE_STEP_MS,
    cluster: {
      cacheTokens: 240_000,
      extraConfig: isOn ? READBACK : {},
      ...(replaces ? { prefills: 2, decodes: 2 } : {}),
    },
    spares: replaces ? 2 : 0,
    proxy: {
      ...(isOn ? { readback: { cachePercent: 40, minTokens: 16 } } : {}),
      ...(replaces ? { health: { intervalMs: 100 } } : {}),
    },
    requestDone: (fields) => log.info("request-done", fields),
  });
  try {
    const { clock, send, settled, instances } = deployment;
    const sleep = (ms: number) =>
      new Promise<void>((resolve) => void clock.setTimer(resolve, ms, { ref: true }));
    const [p1, p2, d1, d2] = instances;
    const victims = [d1, p1, d2, p2].flatMap((one) => one ?? []);
    const replacements = new Replacements(
      replaces ? REPLACED_EVERY : Number.POSITIVE_INFINITY,
      victims.map(({ url, replace }) => ({ url, replace: () => replace(GONE_MS) })),
      { send, sleep, now: () => clock.now() },
    );
    const before = promptTokensOf(await deployment.prefillMetrics());
    const turns = await settled(converse(replacements.client, AGENTS, 1));
    await settled(replacements.ended());
    const after = promptTokensOf(await deployment.prefillMetrics());
    const computed = (after["local_compute"] ?? 0) - (before["local_compute"] ?? 0);
    const whole = turns.filter((turn) => replacements.hadItsDecode(turn, records));
    return {
      turns,
      read: readTurns(whole, records, BLOCK_TOKENS),
      replaced: replacements.count,
      // What a replaced P has computed nobody can ask.
      computed: replaces ? computedTokens(turns, records) : computed,
    };
  } finally {
    await deployment.close();
  }
}
