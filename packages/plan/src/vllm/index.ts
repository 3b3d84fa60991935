import { isMlaModel } from "../engine/compatibility.js";
import type { ModelGeometry } from "../geometry/rank-geometry.js";
import type { CheckedPair, CheckedSide, Looked, VllmLimit, VllmRefusal } from "./checked-pair.js";
import { ENGINE_REFUSALS, LIST_REFUSALS, packedRow, readsPackedRows } from "./engine-refusals.js";
import { HANDSHAKE_REFUSALS } from "./handshake-refusals.js";
import { REQUEST_REFUSALS } from "./request-refusals.js";

/**
 * `@kv/plan/vllm`: the checks at which vLLM's own connector refuses a pair of engines that has a
 * plan.
 */
export {
  type CheckedPair,
  type CheckedRequest,
  type CheckedSide,
  checkedSide,
  type VllmLimit,
  type VllmRefusal,
} from "./checked-pair.js";

/**
 * vLLM's checks of a pair, in their order (0.31 to 0.33). `tools/vllm/refusals.ts` compares them
 * with vLLM's code.
 */
export const VLLM_REFUSALS: readonly VllmRefusal[] = [
  ...ENGINE_REFUSALS,
  ...HANDSHAKE_REFUSALS,
  ...LIST_REFUSALS,
  ...REQUEST_REFUSALS,
];

/** 33 for "0.33.1". */
const minorOf = (version: string) => Number(version.split(".")[1]);

/**
 * Returns the check at which a vLLM of `version`, such as "0.33.0", refuses a pair; undefined where
 * it takes it. Versions before 0.31 count as 0.31.
 */
export function refusalOf(pair: CheckedPair, version: string): VllmRefusal | undefined {
  const minor = minorOf(version);
  const looked: Looked = {
    ...pair,
    permutesToAny: minor < 32,
    // Before 0.33 a draft model's cache counts as the target's.
    draftKvHeads: minor < 33 ? null : pair.draftKvHeads,
  };
  const has = ({ since }: VllmRefusal) => since === undefined || minor >= minorOf(since);
  const split = minor < 33 ? looked : withSplitBlocks(withSplitRows(looked));
  return (
    ENGINE_REFUSALS.find((row) => has(row) && row.refuses(looked)) ??
    VLLM_REFUSALS.slice(ENGINE_REFUSALS.length).find((row) => has(row) && row.refuses(split))
  );
}

/** From 0.33 on, a vLLM with a region for each layer sees pages of the other's rows as regions. */
function withSplitRows(pair: Looked): Looked {
  if (!readsPackedRows(pair)) return pair;
  const { local, remote } = pair;
  const { packedMembers = {}, regionNames = [] } = remote;
  const names = local.regionNames ?? [];
  const at = (name: string) =>
    Object.hasOwn(packedMembers, name) ? packedRow(pair) : regionNames.indexOf(name);
  const each = <T>(values: readonly T[]) => names.flatMap((name) => values[at(name)] ?? []);
  return {
    ...pair,
    remote: {
      ...remote,
      regionNames: names,
      packedMembers: {},
      blockLengthsBytes: names.map(
        (name) => packedMembers[name]?.[1] ?? remote.blockLengthsBytes[at(name)] ?? 0,
      ),
      blockStridesBytes: each(remote.blockStridesBytes),
      regionGroupIds: each(remote.regionGroupIds),
      memoryTypes: each(remote.memoryTypes),
    },
  };
}

/** The most parts that 0.33 cuts a block of latents into. */
const MAX_SPLIT = 128;

/**
 * From 0.33 on, a vLLM that reads latents beside states cuts the other's blocks so that they divide
 * its own.
 */
function withSplitBlocks(pair: Looked): Looked {
  const { local, remote, hasStates, isMla, isPush } = pair;
  const unit = greatestCommonDivisor(local.blockSize, remote.blockSize);
  const split = remote.blockSize / unit;
  const isWhole = remote.blockLengthsBytes.every(
    (bytes, region) => bytes % split === 0 && bytes === remote.blockStridesBytes[region],
  );
  const isCut =
    hasStates && isMla && !isPush && split > 1 && isWhole && remote.pleBlockLengthBytes == null;
  if (!isCut || Math.max(split, local.blockSize / unit) > MAX_SPLIT) return pair;
  const lengths = remote.blockLengthsBytes.map((bytes) => bytes / split);
  return {
    ...pair,
    remote: {
      ...remote,
      blockSize: unit,
      kernelsPerLogical: remote.kernelsPerLogical * split,
      blockLengthsBytes: lengths,
      blockStridesBytes: lengths,
    },
  };
}

function greatestCommonDivisor(one: number, other: number): number {
  return other === 0 ? one : greatestCommonDivisor(other, one % other);
}

/** Two engines, and what vLLM's checks need besides their ranks. */
export interface RanksToCheck {
  /** The vLLM that checks. */
  readonly local: CheckedSide;
  readonly remote: CheckedSide;
  readonly model: ModelGeometry;
  readonly hasStates: boolean;
  readonly mode: "pull" | "push";
  readonly checking: "prefill" | "decode";
}

/** Settings that no handshake carries get the values with which vLLM refuses least. */
function pairOfRanks({
  local,
  remote,
  model,
  hasStates,
  mode,
  checking,
}: RanksToCheck): CheckedPair {
  const { numKvHeads, groups, cacheDtype = "auto" } = model;
  return {
    local,
    remote,
    numKvHeads,
    cacheDtype,
    hasStates,
    isPush: mode === "push",
    writes: mode === "push" && checking === "prefill",
    isMla: isMlaModel(groups),
    isCsaLinear: groups.includes("circular"),
    needsHma: groups.length > 1,
    prefixCaching: false,
    usesHostBuffer: false,
    permutes: true,
    draftKvHeads: null,
  };
}

/**
 * Returns why a vLLM of `version` refuses a pair that a plan does not; undefined where it takes the
 * pair.
 */
export function vllmLimitOf(ranks: RanksToCheck, version: string): VllmLimit | undefined {
  const pair = pairOfRanks(ranks);
  const limit = refusalOf(pair, version)?.limit?.(pair);
  if (limit === undefined) return undefined;
  const { values, ...said } = limit;
  const [remote, local] = values;
  const [prefill, decode] = ranks.checking === "decode" ? [remote, local] : [local, remote];
  return { ...said, prefill, decode };
}
