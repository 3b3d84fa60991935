import type { KvCacheLayout } from "@kv/interface";

/**
 * Order of heads and tokens within a local block. `opaque`: the order is unknown here, so no part
 * of a block is moved or zeroed.
 */
export type BlockOrder = "head-major" | "token-major" | "opaque";

/**
 * Order of heads and tokens within one layer's block. The two opaque layouts spread a block of one
 * layer over memory.
 */
const ORDER_OF_LAYOUT: Readonly<Record<KvCacheLayout, BlockOrder>> = {
  LBHNC: "head-major",
  BLHNC: "head-major",
  LBNHC: "token-major",
  BLNHC: "token-major",
  LHBNC: "opaque",
  BHLNC: "opaque",
};

/**
 * Attention backends with an order of their own within a head: vLLM's CPU kernels pack tokens for
 * their instructions. CPU_ATTN has one layout, LBHNC (vLLM 0.33, `supported_kv_cache_layouts`), so
 * the conversion "hnd-to-nhd" never applies to it. The handshake's check alone accepts the two
 * together; a plan with both is refused.
 */
const BACKENDS_WITH_OWN_TOKEN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

/** Order of heads and tokens within a block of one layer. */
export function orderOfLayout(layout: KvCacheLayout): BlockOrder {
  return ORDER_OF_LAYOUT[layout];
}

/** `orderOfLayout` for a block of `heads` heads: a single head lies together in every layout. */
export function orderOfBlock(layout: KvCacheLayout, heads: number): BlockOrder {
  const order = orderOfLayout(layout);
  return heads === 1 && order === "opaque" ? "head-major" : order;
}

/** Whether the tokens within a head are in the order of their positions. */
export function hasPlainTokens(attentionBackend: string): boolean {
  return !BACKENDS_WITH_OWN_TOKEN_ORDER.has(attentionBackend);
}
