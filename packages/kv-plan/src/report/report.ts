import type { KvCacheKind, KvError, KvErrorCode } from "@kv/interface";
import type { BlockOrder, ReceiveConversion, TransferForm } from "@kv/plan";
import type { ProofResult } from "@kv/plan/prove";
import type { PoolState } from "./sample-request.js";

/** Version of the JSON that `kv-plan --json` prints. */
export const REPORT_VERSION = 1;

/** One engine of the pair. */
export interface EngineReport {
  readonly tpSize: number;
  readonly ppSize: number;
  /** Tokens in a kernel block. */
  readonly kernelBlockSize: number;
  /** Tokens in a logical block. */
  readonly blockSize: number;
  /** Tokens in each group's logical block, where they differ from `blockSize`. */
  readonly groupBlockTokens: readonly number[] | null;
  /** A rank's caches by KV cache group; null where the input describes no model. */
  readonly caches: readonly CacheReport[] | null;
  readonly layout: string;
  readonly attentionBackend: string;
  /** Regions of a rank over all stages. */
  readonly regions: number;
  /** Kernel blocks in the smallest region. */
  readonly numBlocks: number;
  /** Cache bytes of the largest rank: stages may differ in layers. */
  readonly bytesPerRank: number;
}

/** A rank of the prefill engine. */
export interface PrefillRank {
  readonly prefillRank: number;
  /** Pipeline stage; 0 for an engine without stages. */
  readonly prefillStage: number;
}

/** One prefill stage's caches and the ranks that read them. */
export interface StageReport {
  readonly stage: number;
  /** Names of the stage's regions, in decode's order. */
  readonly regions: readonly string[];
  /** Prefill ranks of the stage that are read. */
  readonly read: readonly number[];
  /** Decode ranks that read them. */
  readonly readers: readonly number[];
}

/** One decode rank's read from a prefill rank for the sample request. */
export interface ReadReport extends PrefillRank {
  readonly groups: readonly number[];
  /** KV heads of the model: the first, and one past the last. */
  readonly heads: readonly [number, number];
  /** Number of regions read. */
  readonly layers: number;
  readonly lengthBytes: number;
  readonly descriptors: number;
  /** Descriptors left after merging neighbours that are adjacent in memory on both sides. */
  readonly merged: number;
}

/** One decode rank. */
export interface RankReport {
  readonly decodeRank: number;
  /** KV heads of the rank: the first, and one past the last. */
  readonly heads: readonly [number, number];
  readonly reads: readonly ReadReport[];
  /** Prefill ranks that are notified but not read. */
  readonly notifyOnly: readonly PrefillRank[];
  readonly lengthBytes: number;
  /** Blocks per region that the receive pass puts in order. */
  readonly permutedBlocks: number;
  /** Blocks per region that the receive pass zeroes, whole or in part. */
  readonly zeroedBlocks: number;
  /** `hashPlan` of the rank's plan. */
  readonly planHash: string;
}

/**
 * The sources of one block's bytes. A group's first region on a pipeline stage stands for all its
 * regions.
 */
export interface BlockReport {
  readonly decodeRank: number;
  readonly group: number;
  /** Prefill's pipeline stage that holds the region. */
  readonly stage: number;
  /** Kernel block id of decode. */
  readonly block: number;
  /** First token of the block in the sequence. */
  readonly firstToken: number;
  readonly lengthBytes: number;
  /** The receive pass puts the block in order. */
  readonly permuted: boolean;
  /** First zeroed token of the block; null for none. */
  readonly zeroFrom: number | null;
  /**
   * In offset order: `lengthBytes` bytes at `offset` come from byte `remoteOffset` of block
   * `remoteBlock`.
   */
  readonly pieces: readonly (PrefillRank & {
    readonly offset: number;
    readonly lengthBytes: number;
    readonly remoteBlock: number;
    readonly remoteOffset: number;
  })[];
}

/** Layers of one KV cache group with caches of one shape, on one rank, with vLLM's names. */
export interface CacheReport {
  readonly group: number;
  /** vLLM's class of the cache, such as "SlidingWindowSpec". */
  readonly class: string;
  readonly layers: number;
  readonly blockTokens: number;
  /** Padded bytes of one layer's block. */
  readonly pageBytes: number;
  /** Bytes of `pageBytes` that hold something. */
  readonly usedBytes: number;
  /** KV heads of the rank; null for a state. */
  readonly numKvHeads: number | null;
  /** Elements of a head's K, or of a latent; null for a state. */
  readonly headSize: number | null;
  /** Elements of a head's V, 0 for a latent; null for a state. */
  readonly headSizeV: number | null;
  /** Tokens of a sliding window or chunk; null where the whole sequence is kept. */
  readonly windowTokens: number | null;
  /** A state's shapes; null for attention. */
  readonly shapes: readonly (readonly number[])[] | null;
  readonly dtypes: readonly string[];
}

/** Layers with the same kind of cache, on one decode rank. */
export interface KindReport {
  /** Such as "full attention", "windows of 1024 tokens", "states". */
  readonly name: string;
  readonly layers: number;
  /** Bytes of one block in all these layers, without padding. */
  readonly blockBytes: number;
  /** Bytes of the sample request's blocks in all these layers. */
  readonly requestBytes: number;
}

/** Descriptors of a read. */
export interface DescriptorCount {
  /** One per piece of a block. */
  readonly descriptors: number;
  /** What remains after NIXL merges neighbours that are adjacent in memory on both sides. */
  readonly merged: number;
}

/**
 * Posting cost of the sample request at the decode rank with most descriptors. Each rank posts its
 * own.
 */
export interface PostingReport extends DescriptorCount {
  readonly decodeRank: number;
  /**
   * What remains after merging, by state of the pools; null where a pool is too small. In a
   * scattered pool nothing merges.
   */
  readonly mergedByPool: Readonly<Record<PoolState, number | null>>;
  /** Milliseconds of the posting thread by measured costs, for merged and for all descriptors. */
  readonly estimates: readonly {
    readonly transport: string;
    readonly source: string;
    readonly microsecondsEach: number;
    readonly mergedMs: number;
    readonly scatteredMs: number;
  }[];
  /** Single changes with fewer descriptors, fewest first. */
  readonly fewer: readonly (DescriptorCount & { readonly change: string })[];
}

/** The report of a pair that has a plan. */
export interface PlanReport {
  readonly version: typeof REPORT_VERSION;
  readonly outcome: "planned";
  readonly title: string;
  /** Source of the geometry, such as vLLM's rules for an architecture; null where unknown. */
  readonly plannedFrom: string | null;
  readonly groups: readonly KvCacheKind[];
  readonly numKvHeads: number;
  readonly prefill: EngineReport;
  readonly decode: EngineReport;
  /** None where the input describes no model. */
  readonly kinds: readonly KindReport[];
  /** `EngineTransferPlan.form`. */
  readonly form: TransferForm;
  /** `EngineTransferPlan.formReason`. */
  readonly formReason: string;
  /** Tokens of a decode kernel block divided by those of a prefill kernel block. */
  readonly blockSizeRatio: number;
  /** `EngineTransferPlan.blockOrder`. */
  readonly blockOrder: BlockOrder;
  /** `EngineTransferPlan.uncovered`. */
  readonly uncovered: "zeroed" | "masked";
  /** `EngineTransferPlan.conversions`. */
  readonly conversions: readonly ReceiveConversion[];
  /** The sample request's settings, and totals over all decode ranks. */
  readonly request: {
    readonly numTokens: number;
    readonly computedBlocks: number;
    readonly pool: PoolState;
    readonly lengthBytes: number;
    readonly descriptors: number;
    readonly merged: number;
    /** Milliseconds for the bytes of the largest decode rank at `bandwidthGBps`. */
    readonly transferMs: number;
    readonly bandwidthGBps: number;
  };
  readonly posting: PostingReport;
  /** Prefill's pipeline stages in order, at least one. */
  readonly stages: readonly StageReport[];
  readonly ranks: readonly RankReport[];
  /** Per prefill rank: how many notifications it awaits, and from which decode ranks. */
  readonly notifications: readonly (PrefillRank & {
    /** KV heads of the rank: the first, and one past the last. */
    readonly heads: readonly [number, number];
    readonly awaits: number;
    readonly from: readonly number[];
  })[];
  /** Blocks of the sample request, up to a limit per rank and group. */
  readonly blocks: readonly BlockReport[];
  /** Blocks beyond that limit. */
  readonly blocksLeftOut: number;
  readonly proof: ProofResult;
  /** Why a vLLM decode worker refuses the pair although it has a plan. */
  readonly refusedByVllm: readonly string[];
  /** What engines of other TP sizes can share by vLLM's offloading tiers; none without such a page. */
  readonly tiers: readonly string[];
  /** Assumptions that no input states. */
  readonly assumed: readonly string[];
}

/** The report of a pair that has no plan. */
export interface RefusalReport {
  readonly version: typeof REPORT_VERSION;
  readonly outcome: "refused";
  readonly title: string;
  readonly code: KvErrorCode;
  readonly reason: string;
  readonly hint: string | null;
  readonly details: unknown;
  /** Single changes with which the pair has a plan. */
  readonly wouldWork: readonly string[];
  /** Assumptions that no input states. */
  readonly assumed: readonly string[];
}

/** The report of `kv-plan` for a pair. */
export type PairReport = PlanReport | RefusalReport;

export function refusalReport(
  title: string,
  { code, message, hint, details }: KvError,
  { wouldWork, assumed }: Pick<RefusalReport, "wouldWork" | "assumed">,
): RefusalReport {
  return {
    version: REPORT_VERSION,
    outcome: "refused",
    title,
    code,
    reason: message,
    hint: hint ?? null,
    details,
    wouldWork,
    assumed,
  };
}
