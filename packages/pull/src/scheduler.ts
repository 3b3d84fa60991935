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
import { PULL, type ReceiveOrder, type RemoteBlocks } from "./step-metadata.js";

/** The scheduler side of pull. */
export type PullScheduler = ConnectorScheduler<PullSource>;

interface PullSource {
  readonly remote: RemoteRequest;
  readonly numTokens: number | undefined;
  readonly blocks: Pick<RemoteBlocks, "blockIds">;
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

const noOrders = () => ({
  receives: [] as ReceiveOrder[],
  releases: [] as RemoteRequest[],
  aborts: [] as string[],
});

type DecodeStep = ReturnType<typeof noOrders>;

class PullDecodeOrders implements DecodeOrders<PullSource, DecodeStep> {
  readonly maxReaders = Number.POSITIVE_INFINITY;
  readonly #cache: KvCacheConfig;
  #step = noOrders();

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
    this.#step.receives.push({ requestId, remote: remoteBlocks, ...order });
  }

  cancelFetch(requestId: string): boolean {
    const { receives } = this.#step;
    const index = receives.findIndex((order) => order.requestId === requestId);
    if (index >= 0) receives.splice(index, 1);
    return index >= 0;
  }

  abort(requestId: string): void {
    this.#step.aborts.push(requestId);
  }

  release(_request: ConnectorRequest, remote: RemoteRequest): void {
    this.#step.releases.push(remote);
  }

  fetched(remote: RemoteRequest): void {
    this.#step.releases.push(remote);
  }

  takeStep(): DecodeStep {
    const step = this.#step;
    this.#step = noOrders();
    return step;
  }

  get hasOrders(): boolean {
    return Object.values(this.#step).some(({ length }) => length > 0);
  }

  close(): void {
    this.takeStep();
  }
}

/** @throws `KV_REQUEST_INVALID`, naming the key and its value. */
function readSource(
  params: KvTransferParams,
  config: KvCacheConfig,
  numPromptTokens: number,
): PullSource {
  const { remote, parsed } = readRemoteRequest(params, "pull", numPromptTokens);
  // Only the handshake shows how P groups MLA layers.
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
    blocks: { blockIds: parsed.remoteBlockIds },
  };
}
