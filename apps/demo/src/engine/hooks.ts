import type { KvTransferParams } from "@kv/interface";

/** What an observer is told of a request whose KV crosses between instances. */
export interface KvEvent {
  readonly requestId: string;
  readonly kvTransferParams: KvTransferParams;
  /** Blocks that hold the prompt. */
  readonly blockIds: readonly number[];
  /** Tokens of the prompt whose KV is there. */
  readonly tokens: number;
  /** Spent in forward passes. */
  readonly forwardMs: number;
}

export interface KvReceivedEvent extends KvEvent {
  /** Blocks at the begin that came from the local prefix cache. */
  readonly cachedBlocks: number;
  /** When the step began that asked for the KV; nothing of it was transferred before. By the engine's clock. */
  readonly askedAtMs: number;
}

/**
 * Places where the demo looks into the engine, to compare what was sent with what was received and to damage it on purpose. The
 * engine waits for them, and works the same without.
 */
export interface EngineHooks {
  /** The request has been computed; a peer may read the blocks as soon as this has resolved. */
  beforeSend?(event: KvEvent): Promise<void>;
  /** A peer has what it wanted of the request, or wants it no longer; the blocks are about to be freed. */
  afterSend?(event: Pick<KvEvent, "requestId" | "blockIds">): void;
  /** A peer's KV is in place and not used yet. Answering `damaged` keeps it out of the prefix cache. */
  afterReceive?(event: KvReceivedEvent): Promise<{ damaged: boolean }>;
}
