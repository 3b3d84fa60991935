import type { BlockIds, StepMetadata } from "@kv/interface";
import type { EncodedPrompt } from "@kv/protocol";
import type { EngineAddress, HeartbeatRequest } from "./remote-request.js";

// All types here are plain data: the scheduler side and the workers may live in different
// processes.

/** A request that runs on P and may be handed to a D. */
export interface SendableRequest {
  /** The engine's id of the request. */
  readonly requestId: string;
  /** The id that D's use in notifications. */
  readonly wireId: string;
  /** Which use of its blocks this is. */
  readonly generation: number;
  /**
   * Who holds it may act on the request, see `newCapability`. Undefined where nothing but the id is
   * known.
   */
  readonly capability?: string | undefined;
  /** All blocks of the request, per KV cache group. */
  readonly blockIds: BlockIds;
  /** `transfer_id` of the request's parameters, by which push finds the registration first. */
  readonly transferId?: string | undefined;
  /** Parent of the workers' spans. */
  readonly traceparent?: string | undefined;
  /**
   * Prompt tokens whose KV the blocks will hold; set for a running request only with layerwise
   * push.
   */
  readonly numTokens?: number | undefined;
  /** The blocks of those tokens, per group. A D gets these. */
  readonly promptBlockIds?: BlockIds | undefined;
  /**
   * What the blocks will hold, where the workers compare it with D's prompt (push); undefined where
   * the engine does not know its tokens.
   */
  readonly prompt?: EncodedPrompt | undefined;
}

/** Orders P's workers to keep the blocks of a finished request for its readers. */
export interface LeaseOrder extends SendableRequest {
  readonly numTokens: number;
  readonly promptBlockIds: BlockIds;
  /** End of the lease on the scheduler's clock, in ms. */
  readonly expiresAtMs: number;
  /** End of the lease when no heartbeat names the request, on the scheduler's clock, in ms. */
  readonly unattendedExpiresAtMs?: number | undefined;
}

/** Orders D's workers to begin or end extending the leases of requests at one engine. */
export interface HeartbeatChange extends EngineAddress {
  /** Requests whose leases are extended from now on. */
  readonly begin: readonly HeartbeatRequest[];
  /** Requests whose leases are no longer extended. */
  readonly end: readonly HeartbeatRequest[];
}

/** The orders of the scheduler side to every worker in one step. Connectors add their own. */
export interface ConnectorStepMetadata extends StepMetadata {
  /**
   * The scheduler's clock when the metadata was created, in ms. Workers use it to convert
   * deadlines, because their clocks have other origins.
   */
  readonly schedulerClockMs: number;
  /** Identifies the scheduler's process. The side channel sends it to `@kv` peers. */
  readonly incarnation: string;
  /**
   * P: requests that run and may be handed to a D. A D may complete one before the step that grants
   * its lease.
   */
  readonly inBatch: readonly SendableRequest[];
  /** P: engine ids of those requests that ended with nothing to send. */
  readonly notSent: readonly string[];
  /** P: requests that finished, and whose blocks wait for readers. */
  readonly leases: readonly LeaseOrder[];
  /**
   * P: engine ids of requests whose blocks are kept and hold nothing any more. The worker reports
   * them as sent. @default none
   */
  readonly lost?: readonly string[] | undefined;
  /** D: which leases are extended from this step on, and which no longer; one entry per engine. */
  readonly heartbeats: readonly HeartbeatChange[];
}
