/**
 * A case that vLLM 0.33 refuses and this project supports. It is not counted as `passed`:
 * `packages/plan/test/bytes/kinds-move-the-right-bytes.test.ts` moves its bytes.
 */
export interface BeyondRule {
  readonly name: string;
  readonly family: string;
  readonly reason: string;
  /** Empty for an unnamed assertion. */
  readonly refusal: RegExp;
  matches(input: Input): boolean;
}

type Input = Readonly<Record<string, unknown>>;

const number = (input: Input, key: string) => Number(input[key]);
const prefillHasMoreRanks = (input: Input) =>
  number(input, "remote_tp_size") > number(input, "tp_size");
const isDenseAttention = (input: Input) =>
  input["is_mla"] !== true && input["has_mamba"] !== true && input["mamba"] !== true;

const text = (input: Input, key: string) => String(input[key]);
const blocksDivide = (input: Input) =>
  number(input, "block_size") % number(input, "remote_block_size") === 0;
/** Several prefill ranks fill each part of a local block. */
const fillsPartsOfBlocks = (input: Input) =>
  prefillHasMoreRanks(input) &&
  number(input, "block_size") > number(input, "remote_block_size") &&
  blocksDivide(input);
const ORDER: Readonly<Record<string, string>> = {
  LBHNC: "heads first",
  BLHNC: "heads first",
  LBNHC: "tokens first",
  BLNHC: "tokens first",
};
const hasPlainTokens = (input: Input) =>
  text(input, "backend") !== "CPU_ATTN" && text(input, "remote_backend") !== "CPU_ATTN";
/** Both layouts keep a block of one layer together, in an order that is known. */
const ordersAreKnown = (input: Input) =>
  text(input, "layout") in ORDER && text(input, "remote_layout") in ORDER && hasPlainTokens(input);
const hasOneHead = (input: Input) =>
  input["is_mla"] === true ||
  ["tp_size", "remote_tp_size"].every(
    (size) => number(input, "kv_heads") < 2 * number(input, size),
  );
/** Equal bytes per head and token. For hybrids neither check compares this. */
const pagesAgree = (input: Input) => {
  const [bytes, remoteBytes] = ["", "remote_"].map((side) => {
    const [heads, size] = [number(input, "kv_heads"), number(input, `${side}tp_size`)];
    const held = input["is_mla"] === true || heads < size ? 1 : heads / size;
    return number(input, `${side}block_len`) / (held * number(input, `${side}block_size`));
  });
  return bytes === remoteBytes;
};
/** Heads and tokens of a block are known, and no DCP group distributes the tokens. */
const canBeCut = (input: Input) =>
  (ordersAreKnown(input) || (hasOneHead(input) && hasPlainTokens(input))) &&
  pagesAgree(input) &&
  number(input, "dcp_size") === 1 &&
  number(input, "remote_dcp_size") === 1;
const sameOrder = (input: Input) =>
  ORDER[text(input, "layout")] === ORDER[text(input, "remote_layout")];

export const BEYOND_RULES: readonly BeyondRule[] = [
  {
    name: "prefill-tp-above-kv-heads",
    family: "validate",
    refusal: /^$/,
    reason:
      "dense attention with more prefill ranks than KV heads: one rank of each head is read, and its replicas are notified",
    matches: (input) =>
      isDenseAttention(input) &&
      prefillHasMoreRanks(input) &&
      number(input, "remote_tp_size") > number(input, "kv_heads") &&
      blocksDivide(input),
  },
  {
    name: "prefill-tp-larger-and-blocks-smaller",
    family: "validate",
    refusal: /^Different local\/remote block sizes are not supported when P TP > D TP/,
    reason:
      "several prefill ranks fill each part of a local block, and the receive pass orders heads and tokens at once",
    matches: (input) => isDenseAttention(input) && fillsPartsOfBlocks(input),
  },
  {
    name: "prefill-tp-larger-and-blocks-of-a-hybrid-smaller",
    family: "descs",
    refusal:
      /^Head-sharded attention reads with P_TP > D_TP and heterogeneous block sizes are not supported/,
    reason:
      "as above for a hybrid's attention; its states are divided evenly among the source ranks",
    matches: (input) => input["mamba"] === true && fillsPartsOfBlocks(input),
  },
  {
    name: "prefill-tp-larger-and-blocks-smaller",
    family: "descs",
    refusal:
      /^Head-sharded attention reads with P_TP > D_TP and heterogeneous block sizes are not supported/,
    reason: "as above: the local share of a source is a share of each part of a block",
    matches: (input) => isDenseAttention(input) && fillsPartsOfBlocks(input),
  },
  {
    name: "decode-blocks-smaller-or-not-a-multiple",
    family: "validate",
    refusal: /^Local block size \d+ is not divisible by remote block size \d+ or vice versa/,
    reason:
      "a descriptor for each head of each greatest common part of both sides' blocks: the direct form",
    matches: (input) => input["has_mamba"] !== true && canBeCut(input) && !blocksDivide(input),
  },
  {
    name: "decode-blocks-of-a-hybrid-smaller-or-not-a-multiple",
    family: "validate",
    refusal: /^Local block size \d+ is not divisible by remote block size \d+ or vice versa/,
    reason:
      "as above for its attention; states are moved by logical block, with any kernel block size",
    matches: (input) => input["has_mamba"] === true && canBeCut(input) && !blocksDivide(input),
  },
  {
    name: "decode-blocks-smaller",
    family: "descs",
    refusal: /^Local block size \d+ is not divisible by remote block size \d+ or vice versa/,
    reason: "as above, for attention and for hybrids",
    matches: (input) => !blocksDivide(input),
  },
  {
    name: "host-memory-and-other-blocks",
    family: "validate",
    refusal: /^Heterogeneous block sizes are not supported with host buffer/,
    reason:
      "a plan does not depend on the memory type: host memory is split and reordered like any other",
    matches: canBeCut,
  },
  {
    name: "layouts-of-one-order",
    family: "validate",
    refusal: /^Heterogeneous TP expects same kv_cache_layout/,
    reason:
      "the layouts differ in the position of blocks, not in their content: strides give the position",
    matches: (input) => input["is_mla"] !== true && ordersAreKnown(input) && sameOrder(input),
  },
  {
    name: "layouts-turned-by-descriptors",
    family: "validate",
    refusal:
      /^(Heterogeneous TP expects same kv_cache_layout|HMA does not support block size post processing)/,
    reason:
      "heads before tokens on one side, tokens before heads on the other: a descriptor per head and token",
    matches: (input) => input["is_mla"] !== true && ordersAreKnown(input) && !sameOrder(input),
  },
  {
    name: "token-major-blocks-split",
    family: "validate",
    refusal: /^Heterogeneous TP head-dimension splitting requires contiguous heads/,
    reason: "a token's shared heads are contiguous: a descriptor per token",
    matches: (input) => input["is_mla"] !== true && ordersAreKnown(input) && sameOrder(input),
  },
  {
    name: "one-head-in-any-layout",
    family: "validate",
    refusal: /^Heterogeneous TP head-dimension splitting requires contiguous heads/,
    reason: "a rank's block has one head on both sides, so it is not split",
    matches: (input) => input["is_mla"] !== true && hasOneHead(input) && canBeCut(input),
  },
];

/** Why a case that vLLM's function takes is refused here. It counts as passed. */
export const STRICTER_RULES: readonly BeyondRule[] = [
  {
    name: "states-larger-than-blocks",
    family: "descs",
    refusal: /a state of .* bytes is larger than a logical block's/,
    reason:
      "vLLM's function gives descriptors that reach into other blocks; no engine has such memory",
    matches: (input) =>
      ["local", "remote"].some((side) => {
        const strides = input[`${side}_block_strides`] as readonly number[];
        return (
          stateBytes(input, side) > Math.min(...strides) * number(input, PER_LOGICAL[side] ?? "")
        );
      }),
  },
];

const PER_LOGICAL: Readonly<Record<string, string>> = { local: "ppl", remote: "remote_ppl" };

/** The convolution of a rank is its share of the model's. */
function stateBytes(input: Input, side: string): number {
  const [convBytes = 0, recurrentBytes = 0] = input["remote_ssm_sizes"] as readonly number[];
  if (side === "remote") return convBytes + recurrentBytes;
  const ofModel = convBytes * number(input, "remote_tp_size");
  return ofModel / number(input, "tp_size") + number(input, "local_ssm_bytes");
}
