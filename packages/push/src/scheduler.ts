import {
  createDecodeRequests,
  createGenerations,
  createPairScheduler,
  type DecodeScheduler,
  type HeartbeatOrder,
  type PairScheduler,
  type RemoteRequest,
  readRemoteRequest,
  remoteToTell,
} from "@kv/connector";
import {
  type BlockIds,
  type Clock,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  type SchedulerOptions,
} from "@kv/interface";
import { PUSH, type RegistrationOrder } from "./step-metadata.js";

/** The scheduler side of push, one per engine. It serves both roles: each request says whether the engine produces or consumes its KV. */
export type PushScheduler = PairScheduler;

/** Creates the scheduler side of push. Errors: those of `createPairScheduler`. */
export function createPushScheduler(options: SchedulerOptions): PushScheduler {
  return createPairScheduler(options, {
    name: PUSH,
    transferMode: "push",
    createDecode: ({ clock, address }) =>
      createDecodeScheduler({ clock, config: options.cache, sideChannel: address }),
  });
}

/** The consumer's part of a step. */
export interface DecodeStep {
  /** Blocks that are registered with producers. */
  readonly registrations: readonly RegistrationOrder[];
  /** Requests that the engine gave up before their KV arrived. */
  readonly withdrawals: readonly string[];
  /** The whole set of heartbeats; null if it has not changed since the last step. */
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

/** What the consumer's half of the scheduler side is made of. */
export interface DecodeSchedulerOptions {
  readonly clock: Clock;
  readonly config: KvCacheConfig;
  /** Where producers reach this engine's handshake listener. Called only once the listener is open. */
  sideChannel(): { readonly host: string; readonly port: number };
}

/** The producer of a request's prompt, and what is known of its answer. */
interface RemotePrefill {
  readonly remote: RemoteRequest;
  /** The tokens that the producer has computed. Undefined if it has not answered: both legs of the request were sent at once. */
  readonly numTokens?: number | undefined;
  /** The producer's blocks per group. Undefined if it has not answered. */
  readonly blockIds?: BlockIds | undefined;
}

/**
 * The consumer's half of the scheduler side. It registers blocks under a new generation each time, and keeps the generation open until
 * the workers report that no WRITE can arrive any more.
 */
export function createDecodeScheduler(options: DecodeSchedulerOptions): DecodeScheduler<DecodeStep> {
  const { clock, config } = options;
  const generations = createGenerations({ clock });
  /** In ascending order. */
  const openGenerations = new Set<number>();
  let registrations: RegistrationOrder[] = [];
  let withdrawals: string[] = [];

  function register(
    requestId: string,
    remote: RemoteRequest,
    blocks: Pick<
      RegistrationOrder,
      "localBlockIds" | "localComputedBlocks" | "numTokens" | "awaited" | "remoteBlockIds"
    >,
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
      fetch(requestId, { remote, blockIds }, { localBlockIds, localComputedBlocks, numTokens }) {
        register(requestId, remote, {
          localBlockIds,
          localComputedBlocks,
          numTokens,
          awaited: true,
          remoteBlockIds: blockIds,
        });
      },
      release({ requestId, numPromptTokens }, remote) {
        // A registration of no blocks: the producer frees its own.
        register(requestId, remote, {
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

  function takeOrders(): Pick<DecodeStep, "registrations" | "withdrawals"> {
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

/**
 * Reads the producer of a request from `kv_transfer_params`: either the producer's answer, or, if both legs were sent at once, the
 * coordinates that the proxy knows beforehand, without blocks. Errors: `KV_REQUEST_INVALID`, naming the key and its value.
 */
function readRemotePrefill(params: KvTransferParams, config: KvCacheConfig): RemotePrefill {
  const { remote, parsed } = readRemoteRequest(
    { ...params, remote_block_ids: params.remote_block_ids ?? [] },
    "push",
  );
  const { remoteBlockIds: blockIds, remoteNumTokens: numTokens } = parsed;
  if (blockIds.length > 0 && blockIds.length !== config.groups.length) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: remote_block_ids has ${blockIds.length} KV cache groups, this engine has ${config.groups.length}`,
    );
  }
  return { remote, numTokens, blockIds: blockIds.length === 0 ? undefined : blockIds };
}
