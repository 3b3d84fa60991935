import { buildEngineTransferPlan, type RankGeometry, registerCacheKind } from "@kv/plan";
import { proveEnginePlans, registerCacheSemantics } from "@kv/plan/prove";
import { computeTpMapping } from "@kv/topology";
import { expect, test } from "vitest";
import { chunked } from "../src/index.js";

const KV_HEADS = 8;

registerCacheKind(chunked);
registerCacheSemantics("chunked", { sharing: "heads", lists: "sequence" });

/** The ranks of an engine whose blocks hold `tokens` tokens, 512 bytes for each head and token. */
function engine(tpSize: number, tokens: number): RankGeometry[] {
  const blockBytes = Math.max(1, KV_HEADS / tpSize) * tokens * 512;
  return Array.from({ length: tpSize }, (_, tpRank) => ({
    tpRank,
    tpSize,
    kernelBlockSize: tokens,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "FLASH_ATTN",
    deviceId: tpRank,
    regions: ["model.layers.0", "model.layers.1"].map((name, index) => ({
      name,
      baseAddress: 2 ** 32 * (index + 1),
      numBlocks: 10_000,
      blockLengthBytes: blockBytes,
      blockStrideBytes: blockBytes,
      groupId: 0,
      memoryType: "VRAM" as const,
    })),
  }));
}

test.each([
  { decode: engine(1, 16), prefill: engine(1, 16) },
  { decode: engine(2, 16), prefill: engine(8, 16) },
  { decode: engine(16, 16), prefill: engine(4, 16) },
  { decode: engine(4, 64), prefill: engine(2, 16) },
])("decode TP $decode.length, prefill TP $prefill.length", ({ decode, prefill }) => {
  const model = { numKvHeads: KV_HEADS, groups: ["chunked"] };
  const plans = decode.map((local) => {
    const { tpRank, tpSize } = local;
    const remoteTpSize = prefill.length;
    const { handshakeRanks } = computeTpMapping({
      tpRank,
      tpSize,
      remoteTpSize,
      isMla: false,
      ...model,
    });
    const remotes = prefill.filter((remote) => handshakeRanks.includes(remote.tpRank));
    return buildEngineTransferPlan({ local, remotes, ...model });
  });
  const result = proveEnginePlans(plans, { remotes: prefill, numKvHeads: KV_HEADS });
  expect(result).toMatchObject({ proven: true });
});
