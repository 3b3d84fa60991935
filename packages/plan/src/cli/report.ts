import type { KvCacheKind, KvErrorCode } from "@kv/interface";
import type { BlockOrder, ReceiveConversion, TransferForm } from "../engine-plan-types.js";
import type { PlanVerdict } from "../prove/verdict.js";
import type { PoolState } from "./sample-request.js";

/** Of the JSON that `kv-plan --json` prints. */
export const REPORT_VERSION = 1;

export interface EngineReport {
  readonly tpSize: number;
  readonly kernelBlockSize: number;
  readonly blockSize: number;
  /** Tokens in a block of each group, where they are not `blockSize`. */
  readonly groupBlockTokens: readonly number[] | null;
  readonly layout: string;
  readonly attentionBackend: string;
  readonly regions: number;
  /** Kernel blocks in the smallest region. */
  readonly numBlocks: number;
  readonly bytesPerRank: number;
}

/** What one decode rank reads from one prefill rank for the sample request. */
export interface ReadReport {
  readonly prefillRank: number;
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
  readonly notifyOnly: readonly number[];
  readonly lengthBytes: number;
  readonly permutedBlocks: number;
  readonly zeroedBlocks: number;
  readonly planHash: string;
}

/** Where the bytes of one block come from: the first region of a group stands for all. */
export interface BlockReport {
  readonly decodeRank: number;
  readonly group: number;
  readonly block: number;
  readonly firstToken: number;
  readonly lengthBytes: number;
  readonly permuted: boolean;
  /** First token that is zeroed, counted within the block. */
  readonly zeroFrom: number | null;
  readonly pieces: readonly {
    readonly offset: number;
    readonly lengthBytes: number;
    readonly prefillRank: number;
    readonly remoteBlock: number;
    readonly remoteOffset: number;
  }[];
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
  readonly ranks: readonly RankReport[];
  /** Per prefill rank: notifications that it waits for, and the decode ranks that send them. */
  readonly notifications: readonly {
    readonly prefillRank: number;
    readonly awaits: number;
    readonly from: readonly number[];
  }[];
  readonly blocks: readonly BlockReport[];
  /** Blocks of the request that `blocks` leaves out. */
  readonly blocksLeftOut: number;
  readonly proof: PlanVerdict;
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
