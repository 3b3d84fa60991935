import type { KvCacheLayout } from "@kv/interface";
import type { BlockOrder } from "../engine/engine-plan-types.js";

/** Order of heads and tokens within one layer's block. The two others spread a block of one layer over memory. */
const ORDER_OF_LAYOUT: Readonly<Record<KvCacheLayout, BlockOrder>> = {
  LBHNC: "head-major",
  BLHNC: "head-major",
  LBNHC: "token-major",
  BLNHC: "token-major",
  LHBNC: "opaque",
  BHLNC: "opaque",
};

/**
 * Backends that order the tokens within a head in a way of their own (vLLM's CPU kernels pack them for their instructions). CPU_ATTN has one
 * layout, LBHNC (vLLM 0.33, `supported_kv_cache_layouts`): it never meets the conversion "hnd-to-nhd", though the handshake's check alone
 * would let both through; a plan with both is refused.
 */
const BACKENDS_WITH_OWN_TOKEN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

export function orderOfLayout(layout: KvCacheLayout): BlockOrder {
  return ORDER_OF_LAYOUT[layout];
}

/** The same of a block of so many heads: one head lies together in every layout. */
export function orderOfBlock(layout: KvCacheLayout, heads: number): BlockOrder {
  const order = orderOfLayout(layout);
  return heads === 1 && order === "opaque" ? "head-major" : order;
}

export function hasPlainTokens(attentionBackend: string): boolean {
  return !BACKENDS_WITH_OWN_TOKEN_ORDER.has(attentionBackend);
}
