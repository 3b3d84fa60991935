import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";
import { compareFactors, explainCompatibility } from "@kv/protocol";
import type { EngineFacts } from "./engine-facts.js";
import {
  assumedGroups,
  CONVERSIONS,
  hasMla,
  hasStates,
  type PairToPlan,
  planRanks,
  vllmLimit,
} from "./plan-pair.js";

/** A value that prevents two engines from being a pair, at both. */
export interface PairDifference {
  /**
   * A factor of the compatibility hash (`vllm_version`, `dtype`, …), a size or a layout of the plan
   * (`tp_size`, `block_size`, `kv_cache_layout`, …), `label`, `side_channel`, or
   * `compatibility_hash` where the factor is not known.
   */
  readonly factor: string;
  readonly prefill: unknown;
  readonly decode: unknown;
}

/** Whether a prefill and a decode engine are a pair. */
export type PairCheck =
  | {
      readonly fits: true;
      /**
       * What the check rests on: hash and plan, the hash alone, labels, or nothing (`unverified`).
       */
      readonly basis: "plan" | "hash" | "label" | "unverified";
      /** What could not be checked, and why. */
      readonly note?: string | undefined;
    }
  | {
      readonly fits: false;
      readonly differences: readonly PairDifference[];
      /** One sentence about a plan that cannot be built. */
      readonly note?: string | undefined;
    };

/** Compares two engines: equal hashes, and a plan that can be built. */
export function checkPair(prefill: EngineFacts, decode: EngineFacts): PairCheck {
  if (prefill.compatibilityHash !== decode.compatibilityHash)
    return { fits: false, differences: hashDifferences(prefill, decode) };
  const key = planKey(prefill) * 2 ** 26 + planKey(decode);
  let check = plans.get(key);
  if (check === undefined) {
    check = checkPlan(prefill, decode);
    if (plans.size >= MAX_PLANS) plans.clear();
    plans.set(key, check);
  }
  return check;
}

/** Equal for engines that have equal checks with every other. */
export function checkKey(facts: EngineFacts): string {
  return `${planKey(facts)} ${facts.factors !== undefined} ${facts.compatibilityHash}`;
}

/**
 * Whether a search for the factors of a hash decides or explains a pair: the hashes differ, or
 * heads are split and the type of the cache is not known.
 */
export function needsFactors(prefill: EngineFacts, decode: EngineFacts): boolean {
  if (prefill.compatibilityHash !== decode.compatibilityHash)
    return knownDifferences(prefill, decode).length === 0;
  const [p, d] = [prefill.metadata, decode.metadata];
  const isKnown = (prefill.factors ?? decode.factors) !== undefined;
  return !isKnown && !hasMla(p) && bytesPerToken(p) !== bytesPerToken(d);
}

function hashDifferences(prefill: EngineFacts, decode: EngineFacts): readonly PairDifference[] {
  const known = knownDifferences(prefill, decode);
  if (known.length > 0) return known;
  // When only one side's factors are known, the other hash is searched among similar factors.
  for (const [one, other] of [
    [prefill, decode],
    [decode, prefill],
  ] as const) {
    if (one.factors === undefined) continue;
    const { differences } = explainCompatibility(one.factors, { hash: other.compatibilityHash });
    if (differences.length > 0)
      return differences.map(({ factor, ours, theirs }) =>
        one === prefill
          ? { factor, prefill: ours, decode: theirs }
          : { factor, prefill: theirs, decode: ours },
      );
  }
  const short = ({ compatibilityHash }: EngineFacts) => `${compatibilityHash.slice(0, 16)}…`;
  return [{ factor: "compatibility_hash", prefill: short(prefill), decode: short(decode) }];
}

function knownDifferences(prefill: EngineFacts, decode: EngineFacts): readonly PairDifference[] {
  if (prefill.factors !== undefined && decode.factors !== undefined) {
    return compareFactors(prefill.factors, decode.factors).map(({ factor, ours, theirs }) => ({
      factor,
      prefill: ours,
      decode: theirs,
    }));
  }
  const pairs: readonly PairDifference[] = [
    { factor: "vllm_version", prefill: prefill.vllmVersion, decode: decode.vllmVersion },
    {
      factor: "attn_backend_name",
      prefill: prefill.metadata.attentionBackend,
      decode: decode.metadata.attentionBackend,
    },
    { factor: "transfer_mode", prefill: prefill.mode, decode: decode.mode },
  ];
  return pairs.filter(
    (pair) =>
      pair.prefill !== undefined && pair.decode !== undefined && pair.prefill !== pair.decode,
  );
}

/** Results of `checkPlan`: fleets have many engines of few geometries. */
const plans = new Map<number, PairCheck>();
const MAX_PLANS = 1000;
const planKeys = new WeakMap<EngineFacts, number>();
/**
 * A number for each geometry, so that a pair is looked up without joining texts. A number is never
 * used for a second one.
 */
const numbers = new Map<string, number>();
let lastNumber = 0;

/**
 * Equal for engines that have the same plans: all of their geometry but addresses and numbers of
 * blocks.
 */
function planKey(facts: EngineFacts): number {
  let key = planKeys.get(facts);
  if (key === undefined) {
    const { metadata, tpSize, mode, isVllm, vllmVersion, factors } = facts;
    const {
      engineId: _,
      agentMetadata: __,
      baseAddresses,
      numBlocks: ___,
      regionNumBlocks: ____,
      rest: _____,
      ...geometry
    } = metadata;
    const all = [
      geometry,
      baseAddresses.length,
      tpSize,
      mode,
      isVllm,
      vllmVersion ?? "",
      String(factors?.["num_kv_heads"]),
      String(factors?.["cache_dtype"]),
    ];
    const hash = createHash("sha256").update(JSON.stringify(all)).digest("base64");
    key = numbers.get(hash) ?? ++lastNumber;
    if (numbers.size >= MAX_PLANS) numbers.clear();
    numbers.set(hash, key);
    planKeys.set(facts, key);
  }
  return key;
}

/** A pair of larger engines is not planned here: what is announced decides how long it takes. */
const MAX_REGIONS = 4096;
const MAX_TP = 256;

function checkPlan(prefill: EngineFacts, decode: EngineFacts): PairCheck {
  const [p, d] = [prefill.metadata, decode.metadata];
  const unplanned = (why: string): PairCheck => ({
    fits: true,
    basis: "hash",
    note: `no plan was tried: ${why}`,
  });
  if (p.baseAddresses.length > MAX_REGIONS || d.baseAddresses.length > MAX_REGIONS)
    return unplanned(`more than ${MAX_REGIONS} regions`);
  if (hasStates(p) || hasStates(d))
    return unplanned(
      "handshakes do not tell the kinds of cache of a model with state-space layers",
    );
  if ([p, d].some(({ pleBlockLengthBytes }) => pleBlockLengthBytes !== null))
    return unplanned("the model has replicated states (ple_block_len)");
  if (p.baseAddresses.length < d.baseAddresses.length && isStageOf(p, d))
    return unplanned("the prefill engine has pipeline stages, and only the first was asked");
  const sizes = tpSizes(prefill, decode);
  if (typeof sizes === "string") return unplanned(sizes);
  const cacheDtype = textOf(prefill.factors?.["cache_dtype"] ?? decode.factors?.["cache_dtype"]);
  // The result is kept for any two engines of these geometries.
  const ids = { prefill: { ...p, engineId: "prefill" }, decode: { ...d, engineId: "decode" } };
  const pair: PairToPlan = { ...ids, ...sizes, groups: assumedGroups(p), cacheDtype };
  if (Math.max(sizes.prefillTp, sizes.decodeTp) > MAX_TP)
    return unplanned(`a TP size above ${MAX_TP}`);
  const limit = vllmLimit(pair, {
    isPush: prefill.mode === "push" || decode.mode === "push",
    hasVllm: prefill.isVllm || decode.isVllm,
    decodeIsVllm: decode.isVllm,
    prefillIsVllm: prefill.isVllm,
    decodeVersion: decode.isVllm ? decode.vllmVersion : undefined,
  });
  if (limit !== undefined) {
    const { factor, prefill: ours, decode: theirs, text } = limit;
    return { fits: false, differences: [{ factor, prefill: ours, decode: theirs }], note: text };
  }
  // All ranks are like rank 0; the last one differs in its place alone.
  const ranks = [...new Set([0, sizes.decodeTp - 1])];
  try {
    planRanks(pair, [], ranks);
    return { fits: true, basis: "plan" };
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the plan failed");
    if (error.code === "KV_PLAN_INVALID") return unplanned(error.message);
    try {
      const [plan] = planRanks(pair, CONVERSIONS, ranks);
      const note = `needs a conversion at decode (${plan?.conversions.join(", ")}): ${error.message}`;
      return { fits: true, basis: "plan", note };
    } catch {
      return { fits: false, differences: [planDifference(error, pair)], note: error.message };
    }
  }
}

/** Bytes of a token in the first region of a rank. */
const bytesPerToken = ({ blockLengthsBytes, blockSize }: AgentMetadata) =>
  (blockLengthsBytes[0] ?? 0) / blockSize;

const textOf = (value: unknown) => (typeof value === "string" ? value : undefined);

function isStageOf(prefill: AgentMetadata, decode: AgentMetadata): boolean {
  const all = new Set(decode.regionNames);
  return prefill.regionNames?.every((name) => all.has(name)) ?? true;
}

/**
 * TP sizes and KV heads of the pair. A TP size that is not known follows from the other and from
 * the lengths of the blocks; where both are unknown, their ratio does, which is what a plan needs.
 * Text where nothing follows.
 */
function tpSizes(prefill: EngineFacts, decode: EngineFacts) {
  const [p, d] = [prefill.metadata, decode.metadata];
  const heads = prefill.factors?.["num_kv_heads"] ?? decode.factors?.["num_kv_heads"];
  const headsAreKnown = typeof heads === "number" && Number.isSafeInteger(heads) && heads > 0;
  // How many times as many heads a rank of P holds.
  const ratio = hasMla(p) ? 1 : bytesPerToken(p) / bytesPerToken(d);
  const isWhole = Number.isInteger(ratio) || Number.isInteger(1 / ratio);
  const whole = (tp: number) => (Number.isInteger(tp) && tp >= 1 ? tp : undefined);
  let [prefillTp, decodeTp] = [prefill.tpSize, decode.tpSize];
  if (prefillTp !== undefined && decodeTp !== undefined) {
    if (!headsAreKnown && !hasMla(p) && decodeTp / prefillTp !== ratio)
      return "the number of KV heads is not known, and TP sizes and lengths of blocks leave it open";
  } else if (prefillTp !== undefined) decodeTp = whole(prefillTp * ratio) ?? prefillTp;
  else if (decodeTp !== undefined) prefillTp = whole(decodeTp / ratio) ?? decodeTp;
  else [prefillTp, decodeTp] = !isWhole ? [1, 1] : ratio >= 1 ? [1, ratio] : [1 / ratio, 1];
  const numKvHeads = headsAreKnown ? heads : Math.max(prefillTp, decodeTp);
  return { prefillTp, decodeTp, numKvHeads };
}

/**
 * The value in which the sides of a refused plan differ. In a plan's error, decode is local and
 * prefill remote.
 */
function planDifference(
  error: KvError,
  { prefill, decode, prefillTp, decodeTp }: PairToPlan,
): PairDifference {
  const { local, remote } = error.details;
  const values: readonly PairDifference[] = [
    { factor: "block_size", prefill: prefill.blockSize, decode: decode.blockSize },
    { factor: "kv_cache_layout", prefill: prefill.kvCacheLayout, decode: decode.kvCacheLayout },
    {
      factor: "attn_backend_name",
      prefill: prefill.attentionBackend,
      decode: decode.attentionBackend,
    },
    { factor: "dcp_size", prefill: prefill.dcpSize, decode: decode.dcpSize },
    { factor: "tp_size", prefill: prefillTp, decode: decodeTp },
    {
      factor: "regions",
      prefill: prefill.baseAddresses.length,
      decode: decode.baseAddresses.length,
    },
  ];
  const named = values.find((value) => value.prefill === remote && value.decode === local);
  const differing = values.find((value) => value.prefill !== value.decode);
  if (named !== undefined) return named;
  if (local !== undefined || remote !== undefined)
    return { factor: "plan", prefill: remote, decode: local };
  return differing ?? { factor: "plan", prefill: error.message, decode: null };
}
