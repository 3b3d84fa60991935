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
import { PUSH, type PushStepMetadata, type RegistrationOrder } from "./step-metadata.js";

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

type DecodeStep = Pick<PushStepMetadata, "registrations" | "withdrawals">;

/** The P of a request's prompt, and the values from its response. */
interface RemotePrefill {
  readonly remote: RemoteRequest;
  /**
   * The tokens that P has computed. Undefined if it has not responded yet, because both legs of the
   * request were sent at once.
   */
  readonly numTokens?: number | undefined;
  /** P's blocks per group. Undefined if it has not responded yet. */
  readonly blockIds?: BlockIds | undefined;
}

/**
 * D's orders: the blocks that the workers register with P. Each registration has a new generation,
 * which stays open until the workers report that no WRITE can arrive any more.
 */
class PushDecodeOrders implements DecodeOrders<RemotePrefill, DecodeStep> {
  readonly maxReaders = 1;
  readonly #cache: KvCacheConfig;
  readonly #address: () => OwnAddress;
  /** Of the secrets of D's registrations. */
  readonly #key = randomBytes(32);
  /** Those that are open have blocks which a WRITE may still reach. */
  readonly #generations: Generations;
  #registrations: RegistrationOrder[] = [];
  #withdrawals: string[] = [];

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
    const index = this.#registrations.findIndex(
      (order) => order.requestId === requestId && order.isAwaited,
    );
    if (index >= 0) this.#registrations.splice(index, 1);
    return index >= 0;
  }

  abort(requestId: string): void {
    this.#withdrawals.push(requestId);
  }

  release(request: ConnectorRequest, remote: RemoteRequest): void {
    const { requestId, numPromptTokens } = request;
    const content = promptContent(request);
    this.#register(requestId, remote, {
      localBlockIds: [],
      localComputedBlocks: [],
      numTokens: numPromptTokens,
      promptDigest: content && promptDigest(content, numPromptTokens),
      isAwaited: false,
    });
  }

  ended(requestId: string): void {
    this.#generations.end(requestId);
  }

  takeStep(): DecodeStep {
    const step = { registrations: this.#registrations, withdrawals: this.#withdrawals };
    this.#registrations = [];
    this.#withdrawals = [];
    return step;
  }

  get hasOrders(): boolean {
    return this.#registrations.length + this.#withdrawals.length > 0;
  }

  close(): void {
    this.#generations.clear();
    this.takeStep();
  }

  #register(
    requestId: string,
    remote: RemoteRequest,
    blocks: Pick<
      RegistrationOrder,
      | "localBlockIds"
      | "localComputedBlocks"
      | "numTokens"
      | "promptDigest"
      | "isAwaited"
      | "remoteBlockIds"
    >,
  ): void {
    const { wireId, generation } = this.#generations.begin(requestId);
    const { oldestOpen = generation } = this.#generations;
    const { host, port, registrationGeneration } = this.#address();
    this.#registrations.push({
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
   * The secret for a P, in the form of a capability. A P learns only its own, so it cannot act on
   * D's registrations at another P. All ranks of D send the same one.
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
 * Reads the P of a request from `kv_transfer_params`: either P's response, or, if both legs were
 * sent at once, P's address as the proxy knows it beforehand, without blocks.
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
