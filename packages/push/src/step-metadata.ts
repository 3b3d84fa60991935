import type { HeartbeatOrder, LeaseOrder, RemoteRequest, SendableRequest } from "@kv/connector";
import { type BlockIds, KvError, type StepMetadata } from "@kv/interface";

/** What the scheduler side asks of every worker in one step. Plain data: the sides may live in different processes. */
export interface PushStepMetadata extends StepMetadata {
  readonly connector: typeof PUSH;
  /** The scheduler's clock when this was built. Other processes' clocks have other origins: workers rebase deadlines by it. */
  readonly schedulerClockMs: number;
  /** Which process the engine is, as its side channel tells our own peers. */
  readonly incarnation: string;
  /** Prefill: requests that run and may be asked for. */
  readonly inBatch: readonly SendableRequest[];
  /** Prefill: requests that ended without anything to write. */
  readonly notSent: readonly string[];
  /** Prefill: requests that finished; their blocks wait for a registration, or go where one waits for them. */
  readonly leases: readonly LeaseOrder[];
  /** Decode: blocks to offer to a producer, and producers that are to write nothing. */
  readonly registrations: readonly RegistrationOrder[];
  /** Decode: requests that ended before their KV arrived. */
  readonly withdrawals: readonly string[];
  /** Decode: leases to keep alive, whole; null when nothing changed since the last step. */
  readonly heartbeats: readonly HeartbeatOrder[] | null;
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

/** Narrows what the engine passed on. Errors: `KV_INTERNAL` for another connector's metadata, which only a wiring mistake brings here. */
export function pushStepMetadata(step: StepMetadata): PushStepMetadata {
  const { inBatch, notSent, leases, registrations, withdrawals, heartbeats, schedulerClockMs } = step;
  const lists = [inBatch, notSent, leases, registrations, withdrawals].every(Array.isArray);
  if (
    step.connector !== PUSH ||
    !lists ||
    typeof schedulerClockMs !== "number" ||
    typeof step.incarnation !== "string" ||
    !(heartbeats === null || Array.isArray(heartbeats))
  ) {
    throw new KvError(
      "KV_INTERNAL",
      `step ${step.step} carries metadata of connector "${step.connector}"; this worker is of "${PUSH}"`,
      { hint: "build the scheduler side and the worker side from the same connector name" },
    );
  }
  return step as PushStepMetadata;
}
