import {
  createDecodeRequests,
  createGenerations,
  type DecodeScheduler,
  type HeartbeatOrder,
  type RemoteRequest,
  remoteToTell,
} from "@kv/connector";
import type { BlockIds, Clock, KvCacheConfig } from "@kv/interface";
import { type RemotePrefill, readRemotePrefill } from "./remote-prefill.js";
import type { RegistrationOrder } from "./step-metadata.js";

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
 * The consumer's half of the scheduler side: offers blocks, each time under a generation of its own, and keeps the generation open until
 * the workers say that no WRITE can come any more.
 */
export function createDecodeScheduler(options: DecodeSchedulerOptions): DecodeScheduler<DecodeStep> {
  const { clock, config } = options;
  const generations = createGenerations({ clock });
  /** Of open generations, in ascending order. */
  const openGenerations = new Set<number>();
  let registrations: RegistrationOrder[] = [];
  let withdrawals: string[] = [];

  function order(
    requestId: string,
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

  const requests = createDecodeRequests<RemotePrefill>({
    clock,
    config,
    orders: {
      read: (params) => readRemotePrefill(params, config),
      toTell: (params) => remoteToTell(params, "push"),
      fetch(requestId, prefill, { localBlockIds, localComputedBlocks, numTokens }) {
        order(requestId, prefill.remote, {
          localBlockIds,
          localComputedBlocks,
          numTokens,
          awaited: true,
          ...(prefill.blockIds === undefined ? {} : { remoteBlockIds: prefill.blockIds }),
        });
      },
      release({ requestId, numPromptTokens }, remote) {
        // An offer of nothing: the producer may free the blocks.
        order(requestId, remote, {
          localBlockIds: [],
          localComputedBlocks: [],
          numTokens: numPromptTokens,
          awaited: false,
        });
      },
      unfetch(requestId) {
        const unsent = registrations.findIndex((each) => each.requestId === requestId && each.awaited);
        if (unsent >= 0) registrations.splice(unsent, 1);
        return unsent >= 0;
      },
      abort: (requestId) => void withdrawals.push(requestId),
      over: endGeneration,
    },
  });

  function takeOrders() {
    const orders = { registrations, withdrawals };
    registrations = [];
    withdrawals = [];
    return orders;
  }

  return {
    ...requests,
    takeStep: () => ({ ...takeOrders(), heartbeats: requests.takeHeartbeats() }),
    hasStep: () => registrations.length + withdrawals.length > 0 || requests.hasHeartbeats(),
    close() {
      requests.close();
      generations.clear();
      openGenerations.clear();
      takeOrders();
    },
    get requests() {
      return requests.requests;
    },
    get heartbeats() {
      return requests.heartbeats;
    },
  };
}
