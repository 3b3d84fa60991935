import { readFileSync } from "node:fs";
import { expect, it, test } from "vitest";
import { type BlockHashAlgorithm, blockHashes, offloadKey } from "./block-hashes.js";

interface Case {
  readonly algorithm: BlockHashAlgorithm;
  readonly seed: string;
  readonly blockSize: number;
  readonly tokens: readonly number[];
  readonly extraKeys: readonly (readonly (string | number)[])[] | null;
  readonly hashes: readonly string[];
}

// Made by vLLM 0.33's `hash_block_tokens`: two blocks each, the first one with the extra keys.
const file = new URL("../test/block-hashes-0.33.json", import.meta.url);
const CASES = JSON.parse(readFileSync(file, "utf8")) as readonly Case[];

test.each(CASES.map((each) => [`${each.algorithm}, ${each.blockSize} tokens`, each] as const))(
  "%s: the hashes are vLLM's",
  (_, { tokens, hashes, extraKeys, ...rest }) => {
    const keys = extraKeys === null ? {} : { extraKeys: [extraKeys] };
    const ours = blockHashes(tokens, { ...rest, ...keys });
    expect(ours.map((hash) => Buffer.from(hash).toString("hex"))).toEqual(hashes);
  },
);

it("hashes whole blocks only", () => {
  expect(blockHashes([1, 2, 3], { blockSize: 2 })).toHaveLength(1);
  expect(blockHashes([1], { blockSize: 2 })).toEqual([]);
  expect(() => blockHashes([1], { blockSize: 0 })).toThrow("blocks of 0 tokens");
});

it("a key is the hash and the group", () => {
  expect(offloadKey(new Uint8Array(2).fill(9), 258)).toEqual(Buffer.of(9, 9, 0, 0, 1, 2));
});
