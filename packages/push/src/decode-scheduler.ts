import {
  createGenerations,
  type HeartbeatOrder,
  heartbeatOrders,
  missingBlocks,
  type RemoteRequest,
} from "@kv/connector";
import {
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type MatchedTokens,
  type RequestFinished,
} from "@kv/interface";
import { producerToTell, type RemotePrefill, readRemotePrefill } from "./remote-prefill.js";
import type { RegistrationOrder } from "./step-metadata.js";

/**
 * The consumer's half of the scheduler side: says how many tokens will be written here, offers the blocks for them, and keeps them from
 * everybody else until the workers say that no WRITE can come any more.
 */
export interface DecodeScheduler {
  /** The engine has queued a request: heartbeats begin. `matched` does it too, for engines that do not say so. */
  queued(request: ConnectorRequest): void;
  matched(request: ConnectorRequest, numComputedTokens: number): MatchedTokens;
  allocated(request: ConnectorRequest, blockIds: BlockIds, externalTokens: number): void;
  finished(request: ConnectorRequest): RequestFinished;
  /** Every rank has its part, or has given up. `blocksAtRisk`: given up, and a WRITE may yet come. */
  received(requestId: string, blocksAtRisk: boolean): void;
  takeStep(): DecodeStep;
  hasStep(): boolean;
  readonly requests: number;
  readonly heartbeats: number;
  close(): void;
}

export interface DecodeStep {
  readonly registrations: readonly RegistrationOrder[];
  readonly withdrawals: readonly string[];
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

export interface DecodeSchedulerOptions {
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  /** Where producers shake hands; known once the listener is open. */
  sideChannel(): { readonly host: string; readonly port: number };
}

/**
 * queued: nothing is asked of the workers yet. registered: blocks are offered. leaving: the engine gave the request up, a producer may
 * write yet. at-risk: the request failed, the engine has not ended it, and a producer may write yet. over: nothing is outstanding;
 * kept until the engine ends the request so that it is not offered twice.
 */
type Phase = "queued" | "registered" | "leaving" | "at-risk" | "over";

interface State {
  phase: Phase;
  readonly prefill: RemotePrefill | undefined;
  readonly refusal: KvError | undefined;
  numComputedTokens: number;
}

export function createDecodeScheduler(options: DecodeSchedulerOptions): DecodeScheduler {
  const { clock, config } = options;
  const states = new Map<string, State>();
  const generations = createGenerations({ clock });
  /** Of open generations, in ascending order. */
  const openGenerations = new Set<number>();
  let registrations: RegistrationOrder[] = [];
  let withdrawals: string[] = [];
  /** The set may be another one than the workers were told last. */
  let heartbeatsChanged = false;
  let toldHeartbeats = "[]";

  function* keptAlive(): Iterable<RemoteRequest> {
    for (const { phase, prefill } of states.values()) {
      if (prefill !== undefined && (phase === "queued" || phase === "registered")) yield prefill.remote;
    }
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
    const params = request.kvTransferParams ?? {};
    let prefill: RemotePrefill | undefined;
    let refusal: KvError | undefined;
    try {
      prefill = readRemotePrefill(params, config);
    } catch (error) {
      refusal = KvError.from(error, "KV_REQUEST_INVALID", `request ${request.requestId}`);
      release(request, producerToTell(params));
    }
    const phase = refusal === undefined ? "queued" : "over";
    const state: State = { phase, prefill, refusal, numComputedTokens: 0 };
    states.set(request.requestId, state);
    if (prefill !== undefined) heartbeatsChanged = true;
    return state;
  }

  function order(
    { requestId }: ConnectorRequest,
    remote: RemoteRequest,
    blocks: Pick<RegistrationOrder, "localBlockIds" | "localComputedBlocks" | "numTokens" | "awaited"> & {
      readonly remoteBlockIds?: BlockIds;
    },
  ): void {
    const { wireId, generation } = generations.begin(requestId);
    openGenerations.add(generation);
    const [oldestOpen = generation] = openGenerations;
    const { host, port } = options.sideChannel();
    registrations.push({ requestId, wireId, generation, oldestOpen, remote, ...blocks, host, port });
    if (!blocks.awaited) endGeneration(requestId);
  }

  function endGeneration(requestId: string): void {
    const generation = generations.byRequestId(requestId);
    if (generation === undefined) return;
    openGenerations.delete(generation.generation);
    generations.end(requestId);
  }

  /** An offer of nothing: the producer may free the blocks. */
  function release(request: ConnectorRequest, remote: RemoteRequest | undefined): void {
    if (remote === undefined) return;
    order(request, remote, {
      localBlockIds: [],
      localComputedBlocks: [],
      numTokens: request.numPromptTokens,
      awaited: false,
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
      if (state.phase !== "queued" || state.prefill === undefined) return { tokens: 0, async: false };
      state.numComputedTokens = numComputedTokens;
      const { numPromptTokens } = request;
      const tokens =
        Math.min(numPromptTokens, state.prefill.numTokens ?? numPromptTokens) - numComputedTokens;
      return tokens > 0 ? { tokens, async: true } : { tokens: 0, async: false };
    },
    allocated(request, blockIds, externalTokens) {
      const state = see(request);
      const { prefill } = state;
      if (state.phase !== "queued" || prefill === undefined) return;
      if (externalTokens === 0) {
        // All of it is in the local prefix cache: nothing to write, and nothing that the engine waits for.
        release(request, prefill.remote);
        leave(state, "over");
        return;
      }
      const numTokens = state.numComputedTokens + externalTokens;
      order(request, prefill.remote, {
        ...missingBlocks(blockIds, state.numComputedTokens, numTokens, config),
        numTokens,
        awaited: true,
        ...(prefill.blockIds === undefined ? {} : { remoteBlockIds: prefill.blockIds }),
      });
      state.phase = "registered";
    },
    finished(request) {
      const { requestId } = request;
      const state = states.get(requestId) ?? see(request);
      if (state.phase === "registered") {
        const unsent = registrations.findIndex((each) => each.requestId === requestId && each.awaited);
        if (unsent < 0) {
          withdrawals.push(requestId);
          leave(state, "leaving");
          return { keepBlocks: true };
        }
        // The workers have not heard of it: nobody can write.
        registrations.splice(unsent, 1);
        release(request, state.prefill?.remote);
      } else if (state.phase === "queued") release(request, state.prefill?.remote);
      else if (state.phase === "at-risk") {
        leave(state, "leaving");
        return { keepBlocks: true };
      } else if (state.phase === "leaving") return { keepBlocks: true };
      states.delete(requestId);
      heartbeatsChanged = true;
      return { keepBlocks: false };
    },
    received(requestId, blocksAtRisk) {
      const state = states.get(requestId);
      if (state === undefined) return;
      if (blocksAtRisk) {
        if (state.phase === "registered") leave(state, "at-risk");
        return;
      }
      endGeneration(requestId);
      if (state.phase === "leaving") {
        states.delete(requestId);
        heartbeatsChanged = true;
      } else leave(state, "over");
    },
    takeStep() {
      const heartbeats = newHeartbeats();
      if (heartbeats !== null) toldHeartbeats = JSON.stringify(heartbeats);
      heartbeatsChanged = false;
      const step = { registrations, withdrawals, heartbeats };
      registrations = [];
      withdrawals = [];
      return step;
    },
    hasStep: () => registrations.length + withdrawals.length > 0 || newHeartbeats() !== null,
    close() {
      states.clear();
      generations.clear();
      openGenerations.clear();
      registrations = [];
      withdrawals = [];
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
