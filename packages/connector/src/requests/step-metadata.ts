import type { BlockIds, StepMetadata } from "@kv/interface";
import type { EncodedPrompt } from "@kv/protocol";
import type { EngineAddress, HeartbeatRequest } from "./references.js";

// Plain data: the scheduler side and the workers may be different processes.

/** A request that runs on P and may be handed to a D. */
export interface SendableRequest {
  readonly requestId: string;
  /** D's notifications name the request by it. */
  readonly wireId: string;
  readonly generation: number;
  /**
   * Proves that a peer may act on the request, see `newCapability`. Undefined where only the id is
   * known.
   */
  readonly capability?: string | undefined;
  readonly blockIds: BlockIds;
  /** `transfer_id`, by which push finds the registration. */
  readonly transferId?: string | undefined;
  readonly traceparent?: string | undefined;
  /** Prompt tokens that the blocks will hold; for a running request only with layerwise push. */
  readonly numTokens?: number | undefined;
  /** A D gets these, per group. */
  readonly promptBlockIds?: BlockIds | undefined;
  /**
   * Push workers compare it with D's prompt. Undefined where the engine does not know its tokens.
   */
  readonly prompt?: EncodedPrompt | undefined;
}

/** Orders P's workers to keep a finished request's blocks. */
export interface LeaseOrder extends SendableRequest {
  readonly numTokens: number;
  readonly promptBlockIds: BlockIds;
  /** On the scheduler's clock. */
  readonly expiresAtMs: number;
  /** Without heartbeats, on the scheduler's clock. */
  readonly unattendedExpiresAtMs?: number | undefined;
}

/** Orders D's workers to begin or end heartbeats at one engine. */
export interface HeartbeatChange extends EngineAddress {
  readonly begin: readonly HeartbeatRequest[];
  readonly end: readonly HeartbeatRequest[];
}

/** What every worker gets in a step. Connectors add their own orders. */
export interface ConnectorStepMetadata extends StepMetadata {
  /** Workers convert deadlines with it. */
  readonly schedulerClockMs: number;
  /** Identifies the scheduler's process to `@kv` peers. */
  readonly incarnation: string;
  /** P: requests that run for a D. One may complete before its lease is granted. */
  readonly inBatch: readonly SendableRequest[];
  /** P: engine ids of those that ended with nothing to send. */
  readonly notSent: readonly string[];
  /** P: finished requests whose blocks wait for readers. */
  readonly leases: readonly LeaseOrder[];
  /**
   * P: engine ids of kept blocks that lost their KV. The worker reports them as sent. @default none
   */
  readonly lost?: readonly string[] | undefined;
  readonly heartbeats: readonly HeartbeatChange[];
}
