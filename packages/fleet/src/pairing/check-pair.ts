import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";
import { compareFactors, explainCompatibility, type FactorDifference } from "@kv/protocol";
import { getOrAdd } from "../instances/pooled-instance.js";
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

interface PairDifference {
  /**
   * A factor of the compatibility hash (`vllm_version`, `dtype`, …), a size or layout of the plan
   * (`tp_size`, `block_size`, `kv_cache_layout`, …), `label`, `side_channel`, or
   * `compatibility_hash` if the factor is unknown.
   */
  readonly factor: string;
  readonly prefill: unknown;
  readonly decode: unknown;
}

export interface PairCheck {
  readonly fits: boolean;
  /** Empty if they fit. */
  readonly differences: readonly PairDifference[];
  /** What could not be checked, and why; or why they do not fit. */
  readonly note?: string | undefined;
}

export function misfit(differences: readonly PairDifference[], note?: string): PairCheck {
  return { fits: false, differences, note };
}

export function fitting(note?: string): PairCheck {
  return { fits: true, differences: [], note };
}

/** Engines fit if their hashes are equal and a plan can be built. */
export function checkPair(prefill: EngineFacts, decode: EngineFacts): PairCheck {
  try {
    return prefill.compatibilityHash === decode.compatibilityHash
      ? checkPlan(prefill, decode)
      : misfit(hashDifferences(prefill, decode));
  } catch (thrown) {
    const { message } = KvError.from(thrown, "KV_INTERNAL", "the check failed");
    return misfit([{ factor: "plan", prefill: message, decode: message }], message);
  }
}

/**
 * Whether to search for a hash's factors: the hashes differ, or heads are split and the type of the
 * cache is unknown.
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
  const searched = (own: EngineFacts, { compatibilityHash: hash }: EngineFacts) =>
    own.factors === undefined ? [] : explainCompatibility(own.factors, { hash }).differences;
  const atPrefill = searched(prefill, decode);
  if (atPrefill.length > 0) return atPrefill.map(oursAtPrefill);
  const atDecode = searched(decode, prefill);
  if (atDecode.length > 0)
    return atDecode.map(({ factor, ours, theirs }) => ({ factor, prefill: theirs, decode: ours }));
  const short = ({ compatibilityHash }: EngineFacts) => `${compatibilityHash.slice(0, 16)}…`;
  return [{ factor: "compatibility_hash", prefill: short(prefill), decode: short(decode) }];
}

const oursAtPrefill = ({ factor, ours, theirs }: FactorDifference): PairDifference => ({
  factor,
  prefill: ours,
  decode: theirs,
});

function knownDifferences(prefill: EngineFacts, decode: EngineFacts): readonly PairDifference[] {
  if (prefill.factors !== undefined && decode.factors !== undefined)
    return compareFactors(prefill.factors, decode.factors).map(oursAtPrefill);
  return differing({
    vllm_version: [prefill.vllmVersion, decode.vllmVersion],
    attn_backend_name: [prefill.metadata.attentionBackend, decode.metadata.attentionBackend],
    transfer_mode: [prefill.mode, decode.mode],
  }).filter((pair) => pair.prefill !== undefined && pair.decode !== undefined);
}

/** `sides`: the values at prefill and at decode, by factor. */
function differing(sides: Readonly<Record<string, readonly [unknown, unknown]>>): PairDifference[] {
  return Object.entries(sides)
    .map(([factor, [prefill, decode]]) => ({ factor, prefill, decode }))
    .filter(({ prefill, decode }) => prefill !== decode);
}

const checkKeys = new WeakMap<EngineFacts, string>();

/** Equal keys mean equal checks: they leave out addresses and numbers of blocks. */
export function checkKey(facts: EngineFacts): string {
  return getOrAdd(checkKeys, facts, () => {
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
      factors !== undefined,
      String(factors?.["num_kv_heads"]),
      String(factors?.["cache_dtype"]),
      facts.compatibilityHash,
    ];
    return createHash("sha256").update(JSON.stringify(all)).digest("base64");
  });
}

/** Larger engines are not planned: a peer could make that take any time. */
const MAX_REGIONS = 4096;
const MAX_TP = 256;

function checkPlan(prefill: EngineFacts, decode: EngineFacts): PairCheck {
  const [p, d] = [prefill.metadata, decode.metadata];
  const unplanned = (why: string) => fitting(`no plan was tried: ${why}`);
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
    return misfit([{ factor, prefill: ours, decode: theirs }], text);
  }
  // All ranks are like rank 0, but the last one's place differs.
  const ranks = [...new Set([0, sizes.decodeTp - 1])];
  try {
    planRanks(pair, [], ranks);
    return fitting();
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the plan failed");
    if (error.code === "KV_PLAN_INVALID") return unplanned(error.message);
    try {
      const [plan] = planRanks(pair, CONVERSIONS, ranks);
      const conversions = plan?.conversions.join(", ");
      return fitting(`needs a conversion at decode (${conversions}): ${error.message}`);
    } catch {
      return misfit([planDifference(error, pair)], error.message);
    }
  }
}

const bytesPerToken = ({ blockLengthsBytes, blockSize }: AgentMetadata) =>
  (blockLengthsBytes[0] ?? 0) / blockSize;

const textOf = (value: unknown) => (typeof value === "string" ? value : undefined);

function isStageOf(prefill: AgentMetadata, decode: AgentMetadata): boolean {
  const all = new Set(decode.regionNames);
  return prefill.regionNames?.every((name) => all.has(name)) ?? true;
}

/**
 * TP sizes and KV heads. An unknown TP size follows from the other and the blocks' lengths. If both
 * are unknown, a plan needs only their ratio. Text if nothing follows.
 */
function tpSizes(prefill: EngineFacts, decode: EngineFacts) {
  const [p, d] = [prefill.metadata, decode.metadata];
  const heads = prefill.factors?.["num_kv_heads"] ?? decode.factors?.["num_kv_heads"];
  const headsAreKnown = typeof heads === "number" && Number.isSafeInteger(heads) && heads > 0;
  // Heads of a rank of P per head of a rank of D.
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

/** In a plan's error, decode is local and prefill remote. */
function planDifference(
  error: KvError,
  { prefill, decode, prefillTp, decodeTp }: PairToPlan,
): PairDifference {
  const { local, remote } = error.details;
  const values = differing({
    block_size: [prefill.blockSize, decode.blockSize],
    kv_cache_layout: [prefill.kvCacheLayout, decode.kvCacheLayout],
    attn_backend_name: [prefill.attentionBackend, decode.attentionBackend],
    dcp_size: [prefill.dcpSize, decode.dcpSize],
    tp_size: [prefillTp, decodeTp],
    regions: [prefill.baseAddresses.length, decode.baseAddresses.length],
  });
  if (local === undefined && remote === undefined)
    return values[0] ?? { factor: "plan", prefill: error.message, decode: null };
  const named = values.find((value) => value.prefill === remote && value.decode === local);
  return named ?? { factor: "plan", prefill: remote, decode: local };
}
