import { type BlockIds, KvError, type StepMetadata } from "@kv/interface";
import type { EncodedPrompt, PromptPrefix, RemoteLease } from "@kv/protocol";
import type { EngineAddress } from "../handshake/engine-address.js";

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

/** A request at P, as `kv_transfer_params` name it. */
export interface RemoteRequest extends EngineAddress {
  /** P's id of the request. */
  readonly requestId: string;
  /**
   * `transfer_id`, the front end's name of the prompt; undefined where the parameters have none.
   */
  readonly transferId?: string | undefined;
  /** P's process and the use of its blocks; undefined where P is vLLM. */
  readonly lease?: RemoteLease | undefined;
  /** Parent of the spans about the request. */
  readonly traceparent?: string | undefined;
  /**
   * The blocks and tokens that the parameters name, see `blocksDigest`; undefined where they name
   * no blocks.
   */
  readonly blocks?: string | undefined;
  /** The prompt whose KV is fetched; undefined where D's engine does not know its tokens. */
  readonly prompt?: PromptPrefix | undefined;
}

/** A request as heartbeats name it. */
export interface HeartbeatRequest {
  /** P's id of the request. */
  readonly requestId: string;
  /** The request's capability; undefined where P is vLLM. */
  readonly capability?: string | undefined;
}

/**
 * Identifies a request of an engine. One id may come with several capabilities, of which only one
 * is right.
 */
export function heartbeatKey({ requestId, capability = "" }: HeartbeatRequest): string {
  return `${capability} ${requestId}`;
}

/** A request as heartbeats name it. */
export function heartbeatRequest({ requestId, lease }: RemoteRequest): HeartbeatRequest {
  const capability = lease?.capability;
  return capability === undefined ? { requestId } : { requestId, capability };
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

/**
 * Checks that step metadata is this connector's; `lists` are the keys of the connector's own lists.
 * Errors: `KV_INTERNAL` for another connector's metadata, which only a wiring mistake can cause.
 */
export function connectorStepMetadata<Step extends ConnectorStepMetadata>(
  step: StepMetadata,
  connector: string,
  lists: readonly (keyof Step & string)[],
): Step {
  const { schedulerClockMs, incarnation } = step;
  if (
    step.connector !== connector ||
    !["inBatch", "notSent", "leases", "heartbeats", ...lists].every((name) =>
      Array.isArray(step[name]),
    ) ||
    typeof schedulerClockMs !== "number" ||
    typeof incarnation !== "string"
  ) {
    throw new KvError(
      "KV_INTERNAL",
      `step ${step.step} carries metadata of connector "${step.connector}"; this worker belongs to "${connector}"`,
      { hint: "build the scheduler side and the worker side from the same connector name" },
    );
  }
  return step as Step;
}
