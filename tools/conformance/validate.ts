import { KV_CACHE_LAYOUTS, type KvCacheLayout } from "@kv/interface";
import type { checkCompatibility, RankGeometry } from "@kv/plan";
import { fields } from "./fields.js";
import { Difference, type Replay } from "./outcome.js";

/** vLLM's `_validate_remote_agent_handshake`. The vectors give every region of a side the same geometry, at address 0. */
export function replayValidate(check: typeof checkCompatibility): Replay {
  return (input) => {
    const read = fields(input);
    const side = (
      prefix: "" | "remote_",
      tpRank: number,
      names: readonly string[],
      stride: number,
    ): RankGeometry => ({
      tpRank,
      tpSize: read.number(`${prefix}tp_size`),
      dcpSize: read.number(`${prefix}dcp_size`),
      kernelBlockSize: read.number(`${prefix}block_size`),
      physicalBlocksPerLogical: read.number(`${prefix}ppl`),
      layout: layout(read.string(`${prefix}layout`)),
      attentionBackend: read.string(`${prefix}backend`),
      deviceId: 0,
      regions: names.map((name) => ({
        name,
        baseAddress: 0,
        numBlocks: 8,
        blockLengthBytes: read.number(`${prefix}block_len`),
        blockStrideBytes: stride,
        groupId: 0,
        memoryType: "DRAM",
      })),
    });
    const isMla = read.boolean("is_mla");
    const kind = isMla ? "mla" : "full";
    const permute = read.boolean("enable_permute_local_kv");
    const local = side("", read.number("tp_rank"), ["l0", "l1"], read.number("block_len"));
    const remoteNames = read.strings("remote_names");
    if (remoteNames.length !== read.number("remote_regions"))
      throw new Difference("as many names as regions are expected");
    const facts = check({
      local,
      remote: side("remote_", 0, remoteNames, read.number("remote_block_stride")),
      numKvHeads: read.number("kv_heads"),
      groups: read.boolean("has_mamba") ? [kind, "mamba"] : [kind],
      conversions: ["attention-order", ...(permute ? (["hnd-to-nhd"] as const) : [])],
      hybridCache: read.boolean("is_hma_required"),
      prefixCaching: read.boolean("prefix_caching"),
    });
    return {
      ok: true,
      enable_permute_local_kv: facts.conversions.includes("hnd-to-nhd"),
      // vLLM records different attention backends only when the local one is its CPU backend.
      hetero_attn_post_process:
        facts.conversions.includes("attention-order") && local.attentionBackend === "CPU_ATTN",
    };
  };
}

function layout(name: string): KvCacheLayout {
  const found = KV_CACHE_LAYOUTS.find((one) => one === name);
  if (found === undefined) throw new Difference(`layout "${name}" is not known here`);
  return found;
}
