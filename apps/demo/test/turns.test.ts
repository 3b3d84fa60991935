import { describe, expect, it } from "vitest";
import type { ClusterOptions } from "../src/cluster/cluster-plan.js";
import {
  areEqual,
  type Conversation,
  playConversation,
  prepareConversation,
  READBACK,
} from "../src/run/turns.js";
import { startPair } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";

const absence = await nixlAbsence();
const TURNS = 4;
let prepared: Promise<Conversation> | undefined;
const conversation = () =>
  (prepared ??= prepareConversation(TURNS, {}, { maxTokens: 16, say: () => {} }));

async function play(options: Partial<ClusterOptions>) {
  const spoken = await conversation();
  await using cluster = await startPair({ extraConfig: READBACK, readback: true, ...options });
  return await playConversation(cluster, spoken);
}

// Prompts of 100, 136, 172 and 208 tokens. D has 115, 151 and 187 of them.
const PROMPTS = [100, 136, 172, 208];

describe("a conversation of four turns through kv-proxy --readback", () => {
  it("a P without a prefix cache reads what D has, and computes the new tokens only; the tokens are those of one engine", async () => {
    const turns = await play({ prefillInstance: { prefixCaching: false } });
    expect(turns).toEqual(
      PROMPTS.map((tokens, turn) => ({
        prompt_tokens: tokens,
        cached_tokens: 0,
        output_tokens: 16,
        tokens_equal: true,
        read_back_tokens: turn === 0 ? 0 : tokens - 21,
        computed_tokens: turn === 0 ? 100 : 21,
      })),
    );
  });

  it("a P with a prefix cache reads the output, and two P's in turns read what the other has computed", async () => {
    const [, alone] = await play({});
    expect(alone).toMatchObject({
      cached_tokens: 96,
      read_back_tokens: 19,
      computed_tokens: 21,
      tokens_equal: true,
    });
    const [, ...turns] = await play({ prefills: 2, prefillTp: 2, decodeBlockSize: 32 });
    for (const { computed_tokens, tokens_equal } of turns)
      expect([computed_tokens, tokens_equal]).toEqual([21, true]);
  });

  it.skipIf(absence !== undefined)("over NIXL", async () => {
    const turns = await play({ transport: "nixl", prefillInstance: { prefixCaching: false } });
    expect(turns.map(({ computed_tokens }) => computed_tokens)).toEqual([100, 21, 21, 21]);
    expect(areEqual(turns)).toBe(true);
  });
});
