import type { KvCacheKind, KvErrorCode } from "@kv/interface";
import type { BlockOrder, ReceiveConversion, TransferForm } from "../../engine/engine-plan-types.js";
import type { ProofResult } from "../../prove/proof-result.js";
import type { PoolState } from "./sample-request.js";

/** Of the JSON that `kv-plan --json` prints. */
export const REPORT_VERSION = 1;

export interface EngineReport {
  readonly tpSize: number;
  readonly ppSize: number;
  readonly kernelBlockSize: number;
  readonly blockSize: number;
  /** Tokens in a block of each group, where they are not `blockSize`. */
  readonly groupBlockTokens: readonly number[] | null;
  readonly layout: string;
  readonly attentionBackend: string;
  readonly regions: number;
  /** Kernel blocks in the smallest region. */
  readonly numBlocks: number;
  /** Of the largest rank: pipeline stages may have more or fewer layers. */
  readonly bytesPerRank: number;
}

/** A rank of the prefill engine: 0 is the stage of an engine without stages. */
export interface PrefillRank {
  readonly prefillRank: number;
  readonly prefillStage: number;
}

/** The caches that one pipeline stage of prefill has, and who reads them there. */
export interface StageReport {
  readonly stage: number;
  /** Names of decode's regions, in its order. */
  readonly regions: readonly string[];
  /** Prefill's ranks of the stage that are read, and decode's that read them. */
  readonly read: readonly number[];
  readonly readers: readonly number[];
}

/** What one decode rank reads from one prefill rank for the sample request. */
export interface ReadReport extends PrefillRank {
  readonly groups: readonly number[];
  /** KV heads of the model, first and one past the last. */
  readonly heads: readonly [number, number];
  readonly layers: number;
  readonly lengthBytes: number;
  readonly descriptors: number;
  /** Descriptors that remain when those that are adjacent in memory on both sides are merged. */
  readonly merged: number;
}

export interface RankReport {
  readonly decodeRank: number;
  readonly heads: readonly [number, number];
  readonly reads: readonly ReadReport[];
  /** Prefill ranks that get a notification and are not read. */
  readonly notifyOnly: readonly PrefillRank[];
  readonly lengthBytes: number;
  readonly permutedBlocks: number;
  readonly zeroedBlocks: number;
  readonly planHash: string;
}

/** Where the bytes of one block come from: the first region of a group on a pipeline stage stands for all. */
export interface BlockReport {
  readonly decodeRank: number;
  readonly group: number;
  /** Of prefill, that has the region. */
  readonly stage: number;
  readonly block: number;
  readonly firstToken: number;
  readonly lengthBytes: number;
  readonly permuted: boolean;
  /** First token that is zeroed, counted within the block. */
  readonly zeroFrom: number | null;
  readonly pieces: readonly (PrefillRank & {
    readonly offset: number;
    readonly lengthBytes: number;
    readonly remoteBlock: number;
    readonly remoteOffset: number;
  })[];
}

export interface PlanReport {
  readonly version: typeof REPORT_VERSION;
  readonly outcome: "planned";
  readonly title: string;
  readonly groups: readonly KvCacheKind[];
  readonly numKvHeads: number;
  readonly prefill: EngineReport;
  readonly decode: EngineReport;
  readonly form: TransferForm;
  readonly formReason: string;
  /** Tokens of a decode kernel block / those of a prefill one. */
  readonly blockSizeRatio: number;
  readonly blockOrder: BlockOrder;
  readonly uncovered: "zeroed" | "masked";
  readonly conversions: readonly ReceiveConversion[];
  readonly request: {
    readonly numTokens: number;
    readonly computedBlocks: number;
    readonly pool: PoolState;
    readonly lengthBytes: number;
    readonly descriptors: number;
    readonly merged: number;
    /** Largest share of one decode rank, moved at `bandwidthGBps`. */
    readonly transferMs: number;
    readonly bandwidthGBps: number;
  };
  /** Prefill's pipeline stages, in order; one where it has none. */
  readonly stages: readonly StageReport[];
  readonly ranks: readonly RankReport[];
  /** Per prefill rank: notifications that it waits for, and the decode ranks that send them. */
  readonly notifications: readonly (PrefillRank & {
    readonly awaits: number;
    readonly from: readonly number[];
  })[];
  readonly blocks: readonly BlockReport[];
  /** Blocks of the request that `blocks` leaves out. */
  readonly blocksLeftOut: number;
  readonly proof: ProofResult;
  /** Why a vLLM decode worker refuses the pair although it has a plan, as far as known. */
  readonly refusedByVllm: readonly string[];
  readonly assumed: readonly string[];
}

/** The pair cannot be served: why, and what would. */
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
  readonly assumed: readonly string[];
}

export type PairReport = PlanReport | RefusalReport;
