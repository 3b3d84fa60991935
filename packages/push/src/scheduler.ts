import { createHmac, randomBytes } from "node:crypto";
import {
  ConnectorScheduler,
  type DecodeOrders,
  engineKey,
  type FetchOrder,
  Generations,
  type RemoteRequest,
  readRemoteRequest,
} from "@kv/connector/building-blocks";
import {
  ambient,
  type BlockIds,
  type ConnectorRequest,
  type KvCacheConfig,
  KvError,
  type KvTransferParams,
  type SchedulerOptions,
} from "@kv/interface";
import { promptContent, promptDigest } from "@kv/protocol";
import { PUSH, type RegisteredBlocks, type RegistrationOrder } from "./step-metadata.js";

/** The scheduler side of push. */
export type PushScheduler = ConnectorScheduler<RemotePrefill>;

/**
 * Creates the scheduler side of push, for P and D.
 * @throws `KV_CONFIG_INVALID`.
 */
export function createPushScheduler(options: SchedulerOptions): PushScheduler {
  return new ConnectorScheduler(options, {
    name: PUSH,
    transferMode: "push",
    createDecodeOrders: (given, address) => new PushDecodeOrders(given, address),
  });
}

type OwnAddress = Pick<RegistrationOrder, "host" | "port" | "registrationGeneration">;

const noOrders = () => ({
  registrations: [] as RegistrationOrder[],
  withdrawals: [] as string[],
});

type DecodeStep = ReturnType<typeof noOrders>;

/** P's address and, where known, its response. */
interface RemotePrefill {
  readonly remote: RemoteRequest;
  /** Undefined until P responds, where both legs were sent at once. */
  readonly numTokens?: number | undefined;
  /** Per group; undefined until P responds. */
  readonly blockIds?: BlockIds | undefined;
}

/**
 * Orders the registrations. Each has a new generation, which stays open until the workers report
 * that no WRITE can arrive.
 */
class PushDecodeOrders implements DecodeOrders<RemotePrefill, DecodeStep> {
  readonly maxReaders = 1;
  readonly #cache: KvCacheConfig;
  readonly #address: () => OwnAddress;
  /** Makes the secrets of D's registrations. */
  readonly #key = randomBytes(32);
  /** A WRITE may still reach the blocks of open ones. */
  readonly #generations: Generations;
  #step = noOrders();

  constructor(options: SchedulerOptions, address: () => OwnAddress) {
    this.#cache = options.cache;
    this.#address = address;
    this.#generations = new Generations({ clock: ambient(options).clock });
  }

  read(params: KvTransferParams, numPromptTokens: number): RemotePrefill {
    return readRemotePrefill(params, this.#cache, numPromptTokens);
  }

  fetch(requestId: string, { remote, blockIds }: RemotePrefill, order: FetchOrder): void {
    const { localBlockIds, localComputedBlocks, numTokens, prompt } = order;
    this.#register(requestId, remote, {
      localBlockIds,
      localComputedBlocks,
      numTokens,
      promptDigest: prompt?.digest,
      isAwaited: true,
      remoteBlockIds: blockIds,
    });
  }

  cancelFetch(requestId: string): boolean {
    const { registrations } = this.#step;
    const index = registrations.findIndex(
      (order) => order.requestId === requestId && order.isAwaited,
    );
    if (index >= 0) registrations.splice(index, 1);
    return index >= 0;
  }

  abort(requestId: string): void {
    this.#step.withdrawals.push(requestId);
  }

  release(request: ConnectorRequest, remote: RemoteRequest, numTokens: number): void {
    const content = promptContent(request);
    this.#register(request.requestId, remote, {
      localBlockIds: [],
      localComputedBlocks: [],
      numTokens,
      promptDigest: content && promptDigest(content, numTokens),
      isAwaited: false,
    });
  }

  ended(requestId: string): void {
    this.#generations.end(requestId);
  }

  takeStep(): DecodeStep {
    const step = this.#step;
    this.#step = noOrders();
    return step;
  }

  get hasOrders(): boolean {
    return this.#step.registrations.length + this.#step.withdrawals.length > 0;
  }

  outstanding(): Record<"generations", number> {
    return { generations: this.#generations.size };
  }

  close(): void {
    this.#generations.clear();
    this.takeStep();
  }

  #register(requestId: string, remote: RemoteRequest, blocks: RegisteredBlocks): void {
    const { wireId, generation } = this.#generations.begin(requestId);
    const { oldestOpen = generation } = this.#generations;
    const { host, port, registrationGeneration } = this.#address();
    this.#step.registrations.push({
      requestId,
      wireId,
      secret: this.#secretFor(remote),
      generation,
      oldestOpen,
      remote,
      host,
      port,
      registrationGeneration,
      ...blocks,
    });
    if (!blocks.isAwaited) this.ended(requestId);
  }

  /**
   * A P learns only its own secret, so it cannot act on D's registrations at another P. All ranks
   * of D send the same one.
   */
  #secretFor(producer: RemoteRequest): string {
    return createHmac("sha256", this.#key)
      .update(engineKey(producer))
      .digest()
      .subarray(0, 16)
      .toString("base64url");
  }
}

/**
 * Reads P's response or, where both legs were sent at once, only its address from the proxy.
 * @throws `KV_REQUEST_INVALID`, naming the key and its value.
 */
function readRemotePrefill(
  params: KvTransferParams,
  config: KvCacheConfig,
  numPromptTokens: number,
): RemotePrefill {
  const { remote, parsed } = readRemoteRequest(params, "push", numPromptTokens);
  const { remoteBlockIds: blockIds, remoteNumTokens: numTokens } = parsed;
  if (blockIds.length > 0 && blockIds.length !== config.groups.length) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: remote_block_ids has ${blockIds.length} KV cache groups, this engine has ${config.groups.length}`,
      { hint: "serve the same model on both sides" },
    );
  }
  return { remote, numTokens, blockIds: blockIds.length === 0 ? undefined : blockIds };
}
