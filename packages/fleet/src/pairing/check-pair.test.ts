import type { AgentMetadata } from "@kv/protocol";
import { RECORDED_METADATA } from "@kv/testing/http/side-channel";
import { expect, test } from "vitest";
import { checkPair } from "./check-pair.js";
import type { EngineFacts } from "./engine-facts.js";

const METADATA = { ...RECORDED_METADATA, attentionBackend: "FLASH_ATTN" };

/** An engine with blocks of other sizes than the recorded one's 32 tokens of 4 heads. */
function engine(
  change: Partial<AgentMetadata>,
  heads: number,
  tpSize: number,
  isVllm = true,
): EngineFacts {
  const { blockSize = METADATA.blockSize } = change;
  const lengths = METADATA.blockLengthsBytes.map((bytes) => (bytes * blockSize * heads) / (32 * 4));
  return {
    engineId: "e",
    identity: "e",
    compatibilityHash: "same",
    metadata: { ...METADATA, ...change, blockLengthsBytes: lengths, blockStridesBytes: lengths },
    factors: { num_kv_heads: 4, cache_dtype: "auto" },
    vllmVersion: "0.33.0",
    models: ["m"],
    tpSize,
    mode: "pull",
    isVllm,
  };
}

test.each<[string, [number, number, number], [number, number, number]]>([
  ["32 to 16", [32, 4, 1], [16, 4, 1]],
  ["32 to 48", [32, 4, 1], [48, 4, 1]],
  ["16 to 32 with more ranks at prefill", [16, 2, 2], [32, 4, 1]],
])(
  "vllm#42895: kernel blocks of %s are no pair for a D of vLLM, and one for a D of ours",
  (_, p, d) => {
    const prefill = engine({ blockSize: p[0] }, p[1], p[2]);
    const refused = checkPair(prefill, engine({ blockSize: d[0] }, d[1], d[2]));
    expect(refused).toMatchObject({
      fits: false,
      differences: [{ factor: "block_size", prefill: p[0], decode: d[0] }],
    });
    expect(checkPair(prefill, engine({ blockSize: d[0] }, d[1], d[2], false))).toMatchObject({
      fits: true,
    });
  },
);

test("field.md P2: a vLLM whose reads fail on each request, because its regions belong to other groups, is no partner", () => {
  const regionGroupIds = METADATA.baseAddresses.map((_, region) => region % 2);
  const prefill = engine({ regionGroupIds }, 4, 1);
  expect(checkPair(prefill, engine({}, 4, 1))).toMatchObject({
    fits: false,
    differences: [
      { factor: "region_group_ids", prefill: regionGroupIds.join(), decode: "0,0,0,0" },
    ],
  });
});
