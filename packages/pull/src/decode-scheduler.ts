import { type HeartbeatOrder, heartbeatOrders, missingBlocks } from "@kv/connector";
import {
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type MatchedTokens,
  type RequestFinished,
} from "@kv/interface";
import { readRemoteBlocks, remoteToTell } from "./remote-blocks.js";
import type { ReceiveOrder, RemoteBlocks } from "./step-metadata.js";

/**
 * The consumer's half of the scheduler side: says how many tokens a peer supplies, hands the workers what to read, and keeps
 * the peer's lease alive from the first sight of a request until its KV is here. vLLM 0.33 marks progress in the request's
 * own parameters (`do_remote_prefill` becomes false); here it is a state per request.
 */
export interface DecodeScheduler {
  /** The engine has queued a request: heartbeats begin. `matched` does it too, for engines that do not say so. */
  queued(request: ConnectorRequest): void;
  matched(request: ConnectorRequest, numComputedTokens: number): MatchedTokens;
  allocated(request: ConnectorRequest, blockIds: BlockIds, externalTokens: number): void;
  finished(request: ConnectorRequest): RequestFinished;
  /** Every rank has its part, or has given up. */
  received(requestId: string): void;
  takeStep(): DecodeStep;
  hasStep(): boolean;
  readonly requests: number;
  readonly heartbeats: number;
  close(): void;
}

export interface DecodeStep {
  readonly receives: readonly ReceiveOrder[];
  readonly aborts: readonly string[];
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

/**
 * queued: nothing is asked of the workers yet. receiving: blocks are being filled. aborting: the engine gave the request up, the
 * workers have its blocks still. over: nothing is outstanding; kept until the engine ends the request so that it is not read twice.
 */
type Phase = "queued" | "receiving" | "aborting" | "over";

interface State {
  phase: Phase;
  readonly remote: RemoteBlocks | undefined;
  readonly refusal: KvError | undefined;
  readonly seenAtMs: number;
  numComputedTokens: number;
}

export function createDecodeScheduler({
  clock,
  config,
}: {
  clock: Clock;
  config: KvCacheConfig;
}): DecodeScheduler {
  const states = new Map<string, State>();
  let receives: ReceiveOrder[] = [];
  let aborts: string[] = [];
  /** The set may be another one than the workers were told last. */
  let heartbeatsChanged = false;
  let toldHeartbeats = "[]";

  function* keptAlive(): Iterable<RemoteBlocks> {
    for (const state of states.values())
      if (isKeptAlive(state) && state.remote !== undefined) yield state.remote;
  }

  /** The set, if the workers do not know it yet. */
  function newHeartbeats(): HeartbeatOrder[] | null {
    if (!heartbeatsChanged) return null;
    const orders = heartbeatOrders(keptAlive());
    heartbeatsChanged = JSON.stringify(orders) !== toldHeartbeats;
    return heartbeatsChanged ? orders : null;
  }

  function see(request: ConnectorRequest): State {
    const known = states.get(request.requestId);
    if (known !== undefined) return known;
    let remote: RemoteBlocks | undefined;
    let refusal: KvError | undefined;
    try {
      remote = readRemoteBlocks(request.kvTransferParams ?? {}, config);
    } catch (error) {
      refusal = KvError.from(error, "KV_REQUEST_INVALID", `request ${request.requestId}`);
      tellOnly(request, remoteToTell(request.kvTransferParams ?? {}));
    }
    const state: State = {
      phase: refusal === undefined ? "queued" : "over",
      remote,
      refusal,
      seenAtMs: clock.now(),
      numComputedTokens: 0,
    };
    states.set(request.requestId, state);
    if (remote !== undefined) heartbeatsChanged = true;
    return state;
  }

  /** A read of nothing: the workers tell the peer that it may free the blocks. */
  function tellOnly({ requestId }: ConnectorRequest, remote: RemoteBlocks | undefined): void {
    if (remote === undefined) return;
    receives.push({
      requestId,
      remote,
      localBlockIds: [],
      localComputedBlocks: [],
      awaited: false,
      seenAtMs: clock.now(),
    });
  }

  function leave(state: State, phase: Phase): void {
    state.phase = phase;
    heartbeatsChanged = true;
  }

  return {
    queued: (request) => void see(request),
    matched(request, numComputedTokens) {
      const state = see(request);
      if (state.refusal !== undefined) throw state.refusal;
      if (state.phase !== "queued" || state.remote === undefined) return { tokens: 0, async: false };
      state.numComputedTokens = numComputedTokens;
      const tokens = remoteTokens(request, state.remote) - numComputedTokens;
      return tokens > 0 ? { tokens, async: true } : { tokens: 0, async: false };
    },
    allocated(request, blockIds, externalTokens) {
      const state = see(request);
      const { remote } = state;
      if (state.phase !== "queued" || remote === undefined) return;
      if (externalTokens === 0) {
        // All of it is in the local prefix cache: nothing to read, and nothing that the engine waits for.
        tellOnly(request, remote);
        leave(state, "over");
        return;
      }
      const numTokens = state.numComputedTokens + externalTokens;
      const wanted = missingBlocks(blockIds, state.numComputedTokens, numTokens, config);
      receives.push({
        requestId: request.requestId,
        remote: { ...remote, numTokens: Math.min(numTokens, remote.numTokens ?? numTokens) },
        ...wanted,
        awaited: true,
        seenAtMs: state.seenAtMs,
      });
      state.phase = "receiving";
    },
    finished(request) {
      const state = states.get(request.requestId) ?? see(request);
      if (state.phase === "receiving") {
        const unsent = receives.findIndex(({ requestId }) => requestId === request.requestId);
        if (unsent >= 0) {
          // The workers have not heard of it: nothing touches the blocks.
          receives.splice(unsent, 1);
          tellOnly(request, state.remote);
        } else {
          aborts.push(request.requestId);
          leave(state, "aborting");
          return { keepBlocks: true };
        }
      } else if (state.phase === "queued") {
        tellOnly(request, state.remote);
      } else if (state.phase === "aborting") {
        return { keepBlocks: true };
      }
      states.delete(request.requestId);
      heartbeatsChanged = true;
      return { keepBlocks: false };
    },
    received(requestId) {
      const state = states.get(requestId);
      if (state === undefined) return;
      if (state.phase === "aborting") {
        states.delete(requestId);
        heartbeatsChanged = true;
      } else if (state.phase === "receiving") leave(state, "over");
    },
    takeStep() {
      const heartbeats = newHeartbeats();
      if (heartbeats !== null) toldHeartbeats = JSON.stringify(heartbeats);
      heartbeatsChanged = false;
      const step = { receives, aborts, heartbeats };
      receives = [];
      aborts = [];
      return step;
    },
    hasStep: () => receives.length + aborts.length > 0 || newHeartbeats() !== null,
    close() {
      states.clear();
      receives = [];
      aborts = [];
      heartbeatsChanged = false;
    },
    get requests() {
      return states.size;
    },
    get heartbeats() {
      return [...keptAlive()].length;
    },
  };
}

/** The peer's tokens that can be used: not more than it holds, not more than the prompt. */
function remoteTokens(request: ConnectorRequest, remote: RemoteBlocks): number {
  return Math.min(request.numPromptTokens, remote.numTokens ?? request.numPromptTokens);
}

function isKeptAlive({ phase, remote }: State): boolean {
  return remote !== undefined && (phase === "queued" || phase === "receiving");
}
