import {
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  type MatchedTokens,
  type RequestFinished,
} from "@kv/interface";
import { createHeartbeatSet } from "./heartbeat-set.js";
import { missingBlocks } from "./blocks-to-fetch.js";
import type { HeartbeatOrder, RemoteRequest } from "./step-types.js";

/**
 * The consumer's requests on the scheduler side, whichever way their KV comes: how many tokens a peer supplies, which blocks are missing,
 * whose leases are kept alive, and when the engine may have the blocks back. vLLM 0.33 marks progress in the request's own parameters
 * (`do_remote_prefill` becomes false); here it is a state per request. What is asked of the workers is the connector's (`DecodeOrders`).
 */
export interface DecodeRequests {
  /** The engine has queued a request: heartbeats begin. `matched` does it too, for engines that do not say so. */
  queued(request: ConnectorRequest): void;
  matched(request: ConnectorRequest, numComputedTokens: number): MatchedTokens;
  allocated(request: ConnectorRequest, blockIds: BlockIds, externalTokens: number): void;
  finished(request: ConnectorRequest): RequestFinished;
  /** Every rank has its part, or has given up. `blocksAtRisk`: given up, and a peer may write to the blocks yet. */
  received(requestId: string, blocksAtRisk?: boolean): void;
  takeHeartbeats(): readonly HeartbeatOrder[] | null;
  hasHeartbeats(): boolean;
  readonly requests: number;
  readonly heartbeats: number;
  close(): void;
}

/** Who has a prompt's KV, or will have it. */
export interface PromptSource {
  readonly remote: RemoteRequest;
  /** Tokens that it has; absent where it has not said. */
  readonly numTokens?: number | undefined;
}

/** Blocks of this engine that a peer's KV goes into. */
export interface AwaitedBlocks {
  /** Per group, those of the local prefix hit left out. */
  readonly localBlockIds: BlockIds;
  /** How many were left out, per group. */
  readonly localComputedBlocks: readonly number[];
  /** Tokens from the prompt's begin whose KV will be here. */
  readonly numTokens: number;
  /** When the request was first seen, on this clock. */
  readonly seenAtMs: number;
}

/** What a connector asks of its workers for a request, until a step takes it to them. */
export interface DecodeOrders<Source extends PromptSource> {
  /** Errors: `KV_REQUEST_INVALID`. */
  read(params: KvTransferParams): Source;
  /** Whom to tell that parameters which `read` refused will not be used. */
  toTell(params: KvTransferParams): Source["remote"] | undefined;
  /** The engine waits for this. */
  fetch(requestId: string, source: Source, blocks: AwaitedBlocks): void;
  /** Nothing is wanted: the producer may free what it has. */
  release(request: ConnectorRequest, remote: Source["remote"]): void;
  /** Takes `fetch` back; false when the workers have it already. */
  unfetch(requestId: string): boolean;
  /** The engine gave the request up while the workers had it. */
  abort(requestId: string): void;
  /** Nobody touches the request's blocks any more. */
  over?(requestId: string): void;
}

/**
 * queued: nothing is asked of the workers yet. fetching: blocks are being filled. leaving: the engine gave the request up, its blocks may be
 * filled yet. at-risk: the request failed, the engine has not ended it, and a peer may write yet. over: nothing is outstanding; kept until
 * the engine ends the request so that it is not fetched twice.
 */
type Phase = "queued" | "fetching" | "leaving" | "at-risk" | "over";

interface State<Source> {
  phase: Phase;
  readonly source: Source | undefined;
  readonly refusal: KvError | undefined;
  readonly seenAtMs: number;
  numComputedTokens: number;
}

export function createDecodeRequests<Source extends PromptSource>(options: {
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  readonly orders: DecodeOrders<Source>;
}): DecodeRequests {
  const { clock, config, orders } = options;
  const states = new Map<string, State<Source>>();
  const heartbeats = createHeartbeatSet(keptAlive);

  function* keptAlive(): Iterable<RemoteRequest> {
    for (const { phase, source } of states.values()) {
      if (source !== undefined && (phase === "queued" || phase === "fetching")) yield source.remote;
    }
  }

  function see(request: ConnectorRequest): State<Source> {
    const known = states.get(request.requestId);
    if (known !== undefined) return known;
    const params = request.kvTransferParams ?? {};
    let source: Source | undefined;
    let refusal: KvError | undefined;
    try {
      source = orders.read(params);
    } catch (error) {
      refusal = KvError.from(error, "KV_REQUEST_INVALID", `request ${request.requestId}`);
      release(request, orders.toTell(params));
    }
    const phase = refusal === undefined ? "queued" : "over";
    const state = { phase, source, refusal, seenAtMs: clock.now(), numComputedTokens: 0 } as State<Source>;
    states.set(request.requestId, state);
    if (source !== undefined) heartbeats.touch();
    return state;
  }

  function release(request: ConnectorRequest, remote: Source["remote"] | undefined): void {
    if (remote !== undefined) orders.release(request, remote);
  }

  function enter(state: State<Source>, phase: Phase): void {
    state.phase = phase;
    heartbeats.touch();
  }

  function forget(requestId: string): void {
    states.delete(requestId);
    heartbeats.touch();
  }

  return {
    queued: (request) => void see(request),
    matched(request, numComputedTokens) {
      const state = see(request);
      if (state.refusal !== undefined) throw state.refusal;
      if (state.phase !== "queued" || state.source === undefined) return { tokens: 0, async: false };
      state.numComputedTokens = numComputedTokens;
      const { numPromptTokens } = request;
      // A full prefix hit: the last token is computed here in any case, its logits say how to go on.
      if (numComputedTokens >= numPromptTokens - 1 && numPromptTokens > 1) return { tokens: 0, async: false };
      // Not more than the peer has, not more than the prompt.
      const tokens = Math.min(numPromptTokens, state.source.numTokens ?? numPromptTokens) - numComputedTokens;
      return tokens > 0 ? { tokens, async: true } : { tokens: 0, async: false };
    },
    allocated(request, blockIds, externalTokens) {
      const state = see(request);
      const { source, numComputedTokens, seenAtMs } = state;
      if (state.phase !== "queued" || source === undefined) return;
      if (externalTokens === 0) {
        // All of it is in the local prefix cache: nothing to fetch, and nothing that the engine waits for.
        release(request, source.remote);
        enter(state, "over");
        return;
      }
      const numTokens = numComputedTokens + externalTokens;
      orders.fetch(request.requestId, source, {
        ...missingBlocks(blockIds, numComputedTokens, numTokens, config),
        numTokens,
        seenAtMs,
      });
      state.phase = "fetching";
    },
    finished(request) {
      const { requestId } = request;
      const state = states.get(requestId) ?? see(request);
      if (state.phase === "fetching") {
        if (!orders.unfetch(requestId)) {
          orders.abort(requestId);
          enter(state, "leaving");
          return { keepBlocks: true };
        }
        // The workers have not heard of it: nothing touches the blocks.
        release(request, state.source?.remote);
      } else if (state.phase === "queued") {
        release(request, state.source?.remote);
      } else if (state.phase === "at-risk") {
        enter(state, "leaving");
        return { keepBlocks: true };
      } else if (state.phase === "leaving") {
        return { keepBlocks: true };
      }
      forget(requestId);
      return { keepBlocks: false };
    },
    received(requestId, blocksAtRisk = false) {
      const state = states.get(requestId);
      if (state === undefined) return;
      if (blocksAtRisk) {
        if (state.phase === "fetching") enter(state, "at-risk");
        return;
      }
      orders.over?.(requestId);
      if (state.phase === "leaving") forget(requestId);
      else if (state.phase !== "queued") enter(state, "over");
    },
    takeHeartbeats: () => heartbeats.take(),
    hasHeartbeats: () => heartbeats.untold() !== null,
    close() {
      states.clear();
      heartbeats.clear();
    },
    get requests() {
      return states.size;
    },
    get heartbeats() {
      return heartbeats.size;
    },
  };
}
