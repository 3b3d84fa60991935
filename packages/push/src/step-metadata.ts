import { type PairStepMetadata, pairStepMetadata, type RemoteRequest } from "@kv/connector";
import type { BlockIds, StepMetadata } from "@kv/interface";

/** What the scheduler side asks of every worker in one step. */
export interface PushStepMetadata extends PairStepMetadata {
  readonly connector: typeof PUSH;
  /** Decode: blocks to offer to a producer, and producers that are to write nothing. */
  readonly registrations: readonly RegistrationOrder[];
  /** Decode: requests that ended before their KV arrived. */
  readonly withdrawals: readonly string[];
}

/** One request of a consumer, offered to the producer that computes its prompt. */
export interface RegistrationOrder {
  readonly requestId: string;
  /** What the producer calls this request of ours, in its notifications. */
  readonly wireId: string;
  /** Which use of the blocks this is; grows with every order, and never comes back. */
  readonly generation: number;
  /** Every generation before this one is over. */
  readonly oldestOpen: number;
  readonly remote: RemoteRequest;
  /** The producer's blocks, where its answer named them; they only tell how many there are. */
  readonly remoteBlockIds?: BlockIds;
  /** Blocks to be written into, per group; none: the producer is told that it may free. */
  readonly localBlockIds: BlockIds;
  /** Blocks before those, per group, that the local prefix hit supplies. */
  readonly localComputedBlocks: readonly number[];
  /** Tokens from the prompt's begin whose KV will be here. */
  readonly numTokens: number;
  /** The engine waits for the outcome. */
  readonly awaited: boolean;
  /** Where this engine answers handshakes. */
  readonly host: string;
  readonly port: number;
}

/** The name that step metadata carries: a worker refuses another connector's. */
export const PUSH = "push";

/** Errors: those of `pairStepMetadata`. */
export function pushStepMetadata(step: StepMetadata): PushStepMetadata {
  return pairStepMetadata<PushStepMetadata>(step, PUSH, ["registrations", "withdrawals"]);
}
