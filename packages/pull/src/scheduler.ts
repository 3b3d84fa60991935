import {
  ConnectorScheduler,
  type DecodeOrders,
  type FetchOrder,
  type RemoteRequest,
  readRemoteRequest,
} from "@kv/connector/building-blocks";
import {
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  type SchedulerOptions,
} from "@kv/interface";
import { joinsGroups } from "@kv/plan";
import {
  PULL,
  type PullStepMetadata,
  type ReceiveOrder,
  type RemoteBlocks,
} from "./step-metadata.js";

/** The scheduler side of pull. */
export type PullScheduler = ConnectorScheduler<PullSource>;

/** A request's KV at P. */
interface PullSource {
  readonly remote: RemoteRequest;
  readonly numTokens: number | undefined;
  readonly blocks: Pick<RemoteBlocks, "blockIds" | "expirySeconds">;
}

/**
 * Creates the scheduler side of pull, for P and D.
 * @throws `KV_CONFIG_INVALID`.
 */
export function createPullScheduler(options: SchedulerOptions): PullScheduler {
  return new ConnectorScheduler(options, {
    name: PULL,
    transferMode: "pull",
    createDecodeOrders: ({ cache }) => new PullDecodeOrders(cache),
  });
}

type DecodeStep = Pick<PullStepMetadata, "receives" | "releases" | "aborts">;

/** D's orders: the requests that the workers read, and the blocks that they tell P's to free. */
class PullDecodeOrders implements DecodeOrders<PullSource, DecodeStep> {
  readonly maxReaders = Number.POSITIVE_INFINITY;
  readonly #cache: KvCacheConfig;
  #receives: ReceiveOrder[] = [];
  #releases: RemoteRequest[] = [];
  #aborts: string[] = [];

  constructor(cache: KvCacheConfig) {
    this.#cache = cache;
  }

  read(params: KvTransferParams, numPromptTokens: number): PullSource {
    return readSource(params, this.#cache, numPromptTokens);
  }

  fetch(
    requestId: string,
    { remote, blocks }: PullSource,
    { numTokens, prompt, ...order }: FetchOrder,
  ): void {
    const remoteBlocks = { ...remote, ...blocks, numTokens, prompt };
    this.#receives.push({ requestId, remote: remoteBlocks, ...order });
  }

  cancelFetch(requestId: string): boolean {
    const index = this.#receives.findIndex((order) => order.requestId === requestId);
    if (index >= 0) this.#receives.splice(index, 1);
    return index >= 0;
  }

  abort(requestId: string): void {
    this.#aborts.push(requestId);
  }

  release(_request: ConnectorRequest, remote: RemoteRequest): void {
    this.#releases.push(remote);
  }

  fetched(remote: RemoteRequest): void {
    this.#releases.push(remote);
  }

  takeStep(): DecodeStep {
    const step = { receives: this.#receives, releases: this.#releases, aborts: this.#aborts };
    this.#receives = [];
    this.#releases = [];
    this.#aborts = [];
    return step;
  }

  get hasOrders(): boolean {
    return this.#receives.length + this.#releases.length + this.#aborts.length > 0;
  }

  close(): void {
    this.takeStep();
  }
}

/**
 * The blocks that hold a request's KV at P.
 * @throws `KV_REQUEST_INVALID`, naming the key and its value.
 */
function readSource(
  params: KvTransferParams,
  config: KvCacheConfig,
  numPromptTokens: number,
): PullSource {
  const { remote, parsed } = readRemoteRequest(params, "pull", numPromptTokens);
  // How P groups the layers of an MLA model is known only after the handshake.
  const groups = parsed.remoteBlockIds.length;
  const mayDiffer = groups > 0 && joinsGroups(config.groups.map(({ kind }) => kind));
  if (groups !== config.groups.length && !mayDiffer) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: remote_block_ids has ${groups} KV cache groups, this engine has ${config.groups.length}`,
      { hint: "serve the same model on both sides" },
    );
  }
  return {
    remote,
    numTokens: parsed.remoteNumTokens,
    blocks: {
      blockIds: parsed.remoteBlockIds,
      expirySeconds: parsed.remoteBlocksExpiryTime,
    },
  };
}
