import type { KvCacheKind, KvError, KvErrorCode } from "@kv/interface";
import type { BlockOrder, ReceiveConversion, TransferForm } from "@kv/plan";
import type { ProofResult } from "@kv/plan/prove";
import type { PoolState } from "./sample-request.js";

/** Version of the JSON that `kv-plan --json` prints. */
export const REPORT_VERSION = 1;

/** One engine of the pair. */
export interface EngineReport {
  /** Tensor-parallel size. */
  readonly tpSize: number;
  /** Pipeline stages. */
  readonly ppSize: number;
  /** Tokens in a kernel block. */
  readonly kernelBlockSize: number;
  /** Tokens in a logical block. */
  readonly blockSize: number;
  /** Tokens in a logical block of each group, where they differ from `blockSize`. */
  readonly groupBlockTokens: readonly number[] | null;
  /** The caches of a rank by KV cache group; null where the input does not describe a model. */
  readonly caches: readonly CacheReport[] | null;
  /** KV cache layout. */
  readonly layout: string;
  /** Attention backend. */
  readonly attentionBackend: string;
  /** Regions of a rank, over all stages. */
  readonly regions: number;
  /** Kernel blocks in the smallest region. */
  readonly numBlocks: number;
  /** Cache bytes of the largest rank: pipeline stages may have more or fewer layers. */
  readonly bytesPerRank: number;
}

/** A rank of the prefill engine. */
export interface PrefillRank {
  /** Tensor-parallel rank. */
  readonly prefillRank: number;
  /** Pipeline stage; 0 for an engine without stages. */
  readonly prefillStage: number;
}

/** The caches of one pipeline stage of prefill, and the ranks that read them. */
export interface StageReport {
  /** Pipeline stage of prefill. */
  readonly stage: number;
  /** Names of the regions that the stage holds, in decode's order. */
  readonly regions: readonly string[];
  /** Prefill ranks of the stage that are read. */
  readonly read: readonly number[];
  /** Decode ranks that read them. */
  readonly readers: readonly number[];
}

/** One read of a decode rank from a prefill rank, for the sample request. */
export interface ReadReport extends PrefillRank {
  /** KV cache groups that are read. */
  readonly groups: readonly number[];
  /** KV heads of the model: the first, and one past the last. */
  readonly heads: readonly [number, number];
  /** Regions that are read. */
  readonly layers: number;
  /** Bytes of the read. */
  readonly lengthBytes: number;
  /** Descriptors of the read. */
  readonly descriptors: number;
  /**
   * Descriptors that remain when neighbours that are adjacent in memory on both sides are merged.
   */
  readonly merged: number;
}

/** One decode rank. */
export interface RankReport {
  /** Tensor-parallel rank. */
  readonly decodeRank: number;
  /** KV heads of the rank: the first, and one past the last. */
  readonly heads: readonly [number, number];
  /** Reads of the sample request. */
  readonly reads: readonly ReadReport[];
  /** Prefill ranks that get a notification and are not read. */
  readonly notifyOnly: readonly PrefillRank[];
  /** Bytes of all reads. */
  readonly lengthBytes: number;
  /** Blocks that the receive pass puts in order, in each region. */
  readonly permutedBlocks: number;
  /** Blocks that the receive pass zeroes, whole or in part, in each region. */
  readonly zeroedBlocks: number;
  /** `hashPlan` of the rank's plan. */
  readonly planHash: string;
}

/**
 * The sources of the bytes of one block. The first region of a group on a pipeline stage stands for
 * all its regions.
 */
export interface BlockReport {
  /** Tensor-parallel rank of decode. */
  readonly decodeRank: number;
  /** KV cache group. */
  readonly group: number;
  /** Pipeline stage of prefill that holds the region. */
  readonly stage: number;
  /** Kernel block id of decode. */
  readonly block: number;
  /** First token of the block in the sequence. */
  readonly firstToken: number;
  /** Bytes of the block. */
  readonly lengthBytes: number;
  /** The receive pass puts the block in order. */
  readonly permuted: boolean;
  /** First token of the block that is zeroed; null where none is. */
  readonly zeroFrom: number | null;
  /**
   * Pieces in the order of their offsets: `lengthBytes` bytes at `offset` come from byte
   * `remoteOffset` of block `remoteBlock`.
   */
  readonly pieces: readonly (PrefillRank & {
    readonly offset: number;
    readonly lengthBytes: number;
    readonly remoteBlock: number;
    readonly remoteOffset: number;
  })[];
}

/**
 * The layers of one KV cache group that have caches of one shape, on one rank, with vLLM's names.
 */
export interface CacheReport {
  /** Index of the KV cache group. */
  readonly group: number;
  /** vLLM's class of the cache, such as "SlidingWindowSpec". */
  readonly class: string;
  /** Layers of this shape in the group. */
  readonly layers: number;
  /** Tokens in a block. */
  readonly blockTokens: number;
  /** Bytes of a block of one layer, with padding. */
  readonly pageBytes: number;
  /** Of these, bytes that hold something. */
  readonly usedBytes: number;
  /** KV heads of the rank; null for a state. */
  readonly numKvHeads: number | null;
  /** Elements of the K of a head, or of a latent; null for a state. */
  readonly headSize: number | null;
  /** Elements of the V of a head, 0 of a latent; null for a state. */
  readonly headSizeV: number | null;
  /** Tokens of a sliding window or of a chunk; null where the whole sequence is kept. */
  readonly windowTokens: number | null;
  /** Shapes of a state; null for attention. */
  readonly shapes: readonly (readonly number[])[] | null;
  /** Types of the elements. */
  readonly dtypes: readonly string[];
}

/** The layers of a model that keep the same kind of cache, on one decode rank. */
export interface KindReport {
  /** Such as "full attention", "windows of 1024 tokens", "states". */
  readonly name: string;
  /** Layers with such a cache. */
  readonly layers: number;
  /** Bytes of one block in all these layers, without padding. */
  readonly blockBytes: number;
  /** Bytes of the sample request's blocks in all these layers. */
  readonly requestBytes: number;
}

/** Descriptors of a read. */
export interface DescriptorCount {
  /** One for each piece of a block that is read. */
  readonly descriptors: number;
  /**
   * What remains when neighbours that are adjacent in memory on both sides are merged, as NIXL does
   * before it posts them.
   */
  readonly merged: number;
}

/**
 * What it costs to post the sample request's descriptors, at the decode rank that has most of them.
 * Each rank posts its own.
 */
export interface PostingReport extends DescriptorCount {
  /** Tensor-parallel rank. */
  readonly decodeRank: number;
  /**
   * What remains after merging in pools of each state; null where a pool is too small. In a
   * scattered pool nothing merges.
   */
  readonly mergedByPool: Readonly<Record<PoolState, number | null>>;
  /**
   * Milliseconds of the posting thread by measured costs: of the merged descriptors, and of all of
   * them.
   */
  readonly estimates: readonly {
    readonly transport: string;
    readonly source: string;
    readonly microsecondsEach: number;
    readonly mergedMs: number;
    readonly scatteredMs: number;
  }[];
  /** Changes with which there are fewer, each on its own: the fewest first. */
  readonly fewer: readonly (DescriptorCount & { readonly change: string })[];
}

/** The report of a pair that has a plan. */
export interface PlanReport {
  /** `REPORT_VERSION`. */
  readonly version: typeof REPORT_VERSION;
  /** The pair has a plan. */
  readonly outcome: "planned";
  /** Title of the pair. */
  readonly title: string;
  /**
   * The source of the geometry, such as vLLM's rules for an architecture; null where the pair does
   * not say it.
   */
  readonly plannedFrom: string | null;
  /** Kind of each KV cache group. */
  readonly groups: readonly KvCacheKind[];
  /** KV heads of the model. */
  readonly numKvHeads: number;
  /** The prefill engine. */
  readonly prefill: EngineReport;
  /** The decode engine. */
  readonly decode: EngineReport;
  /** Kinds of the caches; none where the input does not describe a model. */
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
  /** The sample request: its settings, and totals over all decode ranks. */
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
  /** The cost of posting the request's descriptors, and what would make them fewer. */
  readonly posting: PostingReport;
  /** The pipeline stages of prefill, in order. An engine without stages has one. */
  readonly stages: readonly StageReport[];
  /** The decode ranks. */
  readonly ranks: readonly RankReport[];
  /**
   * Per prefill rank: the number of notifications that it awaits, and the decode ranks that send
   * them.
   */
  readonly notifications: readonly (PrefillRank & {
    /** KV heads of the rank: the first, and one past the last. */
    readonly heads: readonly [number, number];
    readonly awaits: number;
    readonly from: readonly number[];
  })[];
  /** Blocks of the sample request, up to a limit per rank and group. */
  readonly blocks: readonly BlockReport[];
  /** Number of blocks beyond that limit. */
  readonly blocksLeftOut: number;
  /** The proof of all plans. */
  readonly proof: ProofResult;
  /** Known reasons for which a vLLM decode worker refuses the pair although it has a plan. */
  readonly refusedByVllm: readonly string[];
  /** Assumptions that no input states. */
  readonly assumed: readonly string[];
}

/** The report of a pair that has no plan. */
export interface RefusalReport {
  /** `REPORT_VERSION`. */
  readonly version: typeof REPORT_VERSION;
  /** The planner refuses the pair. */
  readonly outcome: "refused";
  /** Title of the pair. */
  readonly title: string;
  /** Code of the error. */
  readonly code: KvErrorCode;
  /** Message of the error. */
  readonly reason: string;
  /** Hint of the error. */
  readonly hint: string | null;
  /** Details of the error. */
  readonly details: unknown;
  /** Changes with which the pair has a plan, each on its own. */
  readonly wouldWork: readonly string[];
  /** Assumptions that no input states. */
  readonly assumed: readonly string[];
}

/** The report of `kv-plan` for a pair. */
export type PairReport = PlanReport | RefusalReport;

/** The report of a model or a pair that is refused with an error. */
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
