import type { KvTransferParams } from "@kv/interface";

/** A request whose KV is transferred between instances. */
export interface KvEvent {
  readonly requestId: string;
  readonly kvTransferParams: KvTransferParams;
  readonly blockIds: readonly number[];
  readonly tokens: number;
  readonly forwardMs: number;
  /** From the submission to the first forward pass (sender), or to the admission (receiver). */
  readonly queuedMs: number;
}

export interface KvSentEvent extends KvEvent {
  /**
   * When the first forward pass began, on the engine's clock. Layers may be transferred from then
   * on.
   */
  readonly startedMs: number;
}

export interface KvReceivedEvent extends KvEvent {
  /** Blocks at the start that came from the local prefix cache. */
  readonly cachedBlocks: number;
  readonly admittedMs: number;
}

/**
 * Hooks with which the demo compares the KV that was sent with the KV that was received, and
 * damages KV on purpose. The engine waits for them and works the same without them.
 */
export interface EngineHooks {
  /** The prompt has been computed; a peer may read the blocks as soon as this resolves. */
  beforeSend?(event: KvSentEvent): Promise<void>;
  /** The peer has read the blocks or no longer wants them; they are freed next. */
  afterSend?(event: Pick<KvEvent, "requestId" | "blockIds">): void;
  /**
   * The KV of a peer is in the blocks and has not been used yet. Answer `damaged: true` to keep it
   * out of the prefix cache.
   */
  afterReceive?(event: KvReceivedEvent): Promise<{ damaged: boolean }>;
  /**
   * The first token of a request with KV of a peer has been sampled, `sinceMs` after that KV was
   * taken over.
   */
  afterFirstToken?(event: { readonly requestId: string; readonly sinceMs: number }): void;
}
