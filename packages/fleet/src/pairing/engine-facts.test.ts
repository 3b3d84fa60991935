import { expect, test } from "vitest";
import { type EngineFacts, kvBytesOf } from "./engine-facts.js";

test.each([
  ["FLASH_ATTN", 8, 1, 8],
  ["FLASHMLA", 8, 1, 1],
  ["FLASHMLA", 8, 4, 4],
])(
  "the bytes of blocks of %s at TP %i, DCP %i: those of %i ranks",
  (backend, tpSize, dcpSize, ranks) => {
    const metadata = {
      attentionBackend: backend,
      blockLengthsBytes: [100, 100],
      regionGroupIds: [0, 0],
      physicalBlocksPerLogical: 1,
      dcpSize,
    };
    const facts = { metadata, tpSize } as unknown as EngineFacts;
    expect(kvBytesOf(facts, [[1, 2, 3]])).toBe(3 * 200 * ranks);
  },
);
