/**
 * Cases where vLLM 0.33 refuses and we do the work. Each is counted apart from `passed`, and each is covered by tests that move real
 * bytes: `test` names them.
 */
export interface BeyondRule {
  readonly name: string;
  /** The family of vectors, as in `families.ts`. */
  readonly family: string;
  readonly reason: string;
  readonly test: string;
  /** The message of vLLM's refusal; an unnamed assertion has none. */
  readonly refusal: RegExp;
  matches(input: Readonly<Record<string, unknown>>): boolean;
}

const MOVES_BYTES = "packages/plan/test/moves-the-right-bytes.test.ts";

const number = (input: Readonly<Record<string, unknown>>, key: string) => Number(input[key]);
const prefillHasMoreRanks = (input: Readonly<Record<string, unknown>>) =>
  number(input, "remote_tp_size") > number(input, "tp_size");
const isDenseAttention = (input: Readonly<Record<string, unknown>>) =>
  input["is_mla"] !== true && input["has_mamba"] !== true && input["mamba"] !== true;

export const BEYOND_RULES: readonly BeyondRule[] = [
  {
    name: "prefill-tp-above-kv-heads",
    family: "validate",
    refusal: /^$/,
    reason:
      "dense attention with more prefill ranks than KV heads: one rank of each head is read, its copies are notified",
    test: MOVES_BYTES,
    matches: (input) =>
      isDenseAttention(input) &&
      prefillHasMoreRanks(input) &&
      number(input, "remote_tp_size") > number(input, "kv_heads") &&
      number(input, "block_size") % number(input, "remote_block_size") === 0,
  },
  {
    name: "prefill-tp-larger-and-blocks-smaller",
    family: "validate",
    refusal: /^Different local\/remote block sizes are not supported when P TP > D TP/,
    reason:
      "several prefill ranks fill each part of a local block, and the receive pass orders heads and tokens at once",
    test: MOVES_BYTES,
    matches: (input) =>
      isDenseAttention(input) &&
      prefillHasMoreRanks(input) &&
      number(input, "block_size") > number(input, "remote_block_size") &&
      number(input, "block_size") % number(input, "remote_block_size") === 0,
  },
  {
    name: "prefill-tp-larger-and-blocks-smaller",
    family: "descs",
    refusal: /^Head-sharded attention reads with P_TP > D_TP and heterogeneous block sizes are not supported/,
    reason: "as above: the local share of a source is a share of each part of a block",
    test: MOVES_BYTES,
    matches: (input) =>
      isDenseAttention(input) &&
      prefillHasMoreRanks(input) &&
      number(input, "block_size") > number(input, "remote_block_size") &&
      number(input, "block_size") % number(input, "remote_block_size") === 0,
  },
];
