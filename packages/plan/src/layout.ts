import type { KvCacheLayout } from "@kv/interface";
import type { BlockOrder } from "./engine-plan-types.js";

/** Order of heads and tokens within one layer's block. The two others spread a block of one layer over memory. */
const ORDER_OF_LAYOUT: Readonly<Record<KvCacheLayout, BlockOrder>> = {
  LBHNC: "head-major",
  BLHNC: "head-major",
  LBNHC: "token-major",
  BLNHC: "token-major",
  LHBNC: "opaque",
  BHLNC: "opaque",
};

/** Backends that order the tokens within a head in a way of their own (vLLM's CPU kernels pack them for their instructions). */
const BACKENDS_WITH_OWN_TOKEN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

export function orderOfLayout(layout: KvCacheLayout): BlockOrder {
  return ORDER_OF_LAYOUT[layout];
}

export function hasPlainTokens(attentionBackend: string): boolean {
  return !BACKENDS_WITH_OWN_TOKEN_ORDER.has(attentionBackend);
}
