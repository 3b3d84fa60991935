import type { BlockIds, KvErrorCode } from "@kv/interface";
import type { RemoteLease } from "../transfer-params/transfer-params.js";

/** A registration of D's blocks for one request, as P decodes it. */
export interface Registration {
  /** D's name of the request in notifications: P's completion and answers carry it. */
  readonly wireId: string;
  /**
   * D's engine-wide id of the request, which P compares with its own ids (vLLM: the base request
   * id).
   */
  readonly matchId: string;
  /** `transfer_id` of D's parameters, see `readTransferId`. */
  readonly transferId?: string | undefined;
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  /**
   * Logical block ids per KV cache group that P writes into; empty when D wants nothing (any more).
   */
  readonly blockIds: BlockIds;
  /** Engine id of the P that shall write. */
  readonly producerEngineId: string;
  /** Only from `@kv` peers. */
  readonly own?: RegistrationExtension | undefined;
}

/** The part that an `@kv` D adds to a registration. */
export interface RegistrationExtension {
  readonly rank: number;
  /** D's decode-context-parallel size. @default 1 */
  readonly dcpSize?: number | undefined;
  readonly incarnation: string;
  /**
   * D's secret for this P, in the form of a capability. Messages about the registration count only
   * with it.
   */
  readonly secret: string;
  /** Which use of D's blocks this is; a later registration of the same blocks has a higher one. */
  readonly generation: number;
  /** D's lowest generation that is still valid: P may forget everything about lower ones. */
  readonly oldestOpen: number;
  /**
   * How often D has registered its KV cache: P shakes hands again when it is higher than at the
   * last handshake. Absent from older peers.
   */
  readonly registrationGeneration?: number | undefined;
  readonly numTokens: number;
  /**
   * Of these tokens, see `promptDigest`; undefined where D's engine does not know them. P then
   * writes nothing.
   */
  readonly promptDigest?: string | undefined;
  /** Blocks per group at the start of the prompt that D has already. */
  readonly computedBlocks: readonly number[];
  /**
   * The request at P that P's `kv_transfer_params` named; absent when D registered before P
   * responded.
   */
  readonly prefill?: (RemoteLease & { readonly wireId: string }) | undefined;
}

/**
 * P's notice to one rank of D: no WRITE for this registration is in flight, and none will follow.
 */
export interface RegistrationEnded {
  readonly wireId: string;
  readonly incarnation: string;
  readonly generation: number;
  readonly secret: string;
  readonly code: KvErrorCode;
  /** The reason as text; at most 500 characters. */
  readonly message: string;
}

/** P's notice to one rank of D: its share of the blocks was written. */
export interface RegistrationWritten {
  readonly wireId: string;
  /** How many of these notices the rank waits for: P's tensor-parallel size. */
  readonly readers: number;
  readonly secret: string;
}

/** A rank of D that registers blocks. */
export interface Registrant {
  readonly engineId: string;
  readonly tpSize: number;
  /** D's decode-context-parallel size. @default 1 */
  readonly dcpSize?: number | undefined;
  readonly tpRank: number;
  readonly incarnation: string;
}

/** The blocks that D registers for one request. */
export interface RegistrationRequest {
  readonly requestId: string;
  /** D's name of the request in notifications. */
  readonly wireId: string;
  /** As `RegistrationExtension.secret`. */
  readonly secret: string;
  /** As `RegistrationExtension.generation`. */
  readonly generation: number;
  /** As `RegistrationExtension.oldestOpen`. */
  readonly oldestOpen: number;
  /** Logical block ids per KV cache group. */
  readonly localBlockIds: BlockIds;
  /** As `RegistrationExtension.computedBlocks`. */
  readonly localComputedBlocks: readonly number[];
  readonly numTokens: number;
  /** As `RegistrationExtension.promptDigest`. */
  readonly promptDigest?: string | undefined;
  readonly host: string;
  readonly port: number;
  /** As `RegistrationExtension.registrationGeneration`. */
  readonly registrationGeneration?: number | undefined;
  readonly remote: {
    readonly engineId: string;
    readonly host: string;
    readonly port: number;
    readonly tpSize: number;
    readonly ppSize: number;
    readonly requestId: string;
    /** As `Registration.transferId`. */
    readonly transferId?: string | undefined;
    /** P's process and generation, where `kv_transfer_params` named them. */
    readonly lease?: RemoteLease | undefined;
  };
}
