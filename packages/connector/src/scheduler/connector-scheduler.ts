import {
  ambient,
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  type EngineIdentity,
  type FinishReason,
  type KvCacheConfig,
  KvError,
  type LoadFailurePolicy,
  type Log,
  type MatchedTokens,
  type RequestFinished,
  type SchedulerConnector,
  type SchedulerOptions,
  type StepMetadata,
  type WorkerHandshakeMetadata,
  type WorkerOutput,
} from "@kv/interface";
import { namesReadback, readFirstToken, readTransferId, type TransferMode } from "@kv/protocol";
import { connectorSettings, encryptedSideChannel } from "../config/connector-settings.js";
import { prefillBackoff, ShortenedPrompts } from "../config/prefill-backoff.js";
import { type TransferGroups, transferGroups } from "../config/transfer-groups.js";
import { EngineListener, type ListenerAddress } from "../handshake/engine-listener.js";
import { type DecodeOrders, DecodeRequests, type PromptSource } from "./decode-requests.js";
import { PrefillScheduler } from "./prefill-scheduler.js";

/**
 * How long D refuses a reference that it has released. A vLLM 0.33 P does not say when its lease
 * ends (`remote_blocks_expiry_time` is null), so D takes a reference for fresh when it has
 * forgotten it.
 */
const REMEMBER_MS = 600_000;

/** A connector, as `ConnectorScheduler` needs it. */
export interface ConnectorSchedulerOptions<Source extends PromptSource> {
  readonly name: string;
  readonly transferMode: TransferMode;
  /**
   * Creates D's half. `address`: where peers shake hands with this engine, once the side channel is
   * open; `KV_INTERNAL` before.
   */
  createDecodeOrders(
    options: SchedulerOptions,
    address: () => ListenerAddress,
  ): DecodeOrders<Source, object>;
}

/**
 * The scheduler side of a connector. It has both halves: each request decides whether the engine is
 * its P (`do_remote_decode`) or its D (`do_remote_prefill`). With `bidirectional_kv_xfer` a request
 * may need both: D keeps the KV of a finished request, and P fetches it for the next turn.
 */
export class ConnectorScheduler<Source extends PromptSource>
  implements SchedulerConnector, AsyncDisposable
{
  readonly name: string;
  readonly loadFailurePolicy: LoadFailurePolicy;
  readonly #clock: Clock;
  readonly #log: Log;
  /** `bidirectional_kv_xfer`. */
  readonly #readsBack: boolean;
  /** `seed_first_token`. */
  readonly #seedsFirstToken: boolean;
  readonly #incarnation: string;
  readonly #listener: EngineListener;
  readonly #prefill: PrefillScheduler;
  readonly #orders: DecodeOrders<Source, object>;
  readonly #decode: DecodeRequests<Source>;
  /** Undefined where P computes whole prompts. */
  readonly #shortened: ShortenedPrompts | undefined;
  /** Undefined where peers exchange all groups of the cache. */
  readonly #groups: TransferGroups | undefined;
  /** Where peers shake hands; undefined until the side channel is open. */
  #address: ListenerAddress | undefined;
  #step = 0;

  /** @throws `KV_CONFIG_INVALID`. */
  constructor(given: SchedulerOptions, connector: ConnectorSchedulerOptions<Source>) {
    this.#groups = transferGroups(given.cache);
    const options = { ...given, cache: this.#groups?.config ?? given.cache };
    const { config, engine, cache, sideChannel } = options;
    const { dcpSize = 1 } = engine;
    requireContextParallel(engine, cache);
    const { clock, log, random } = ambient(options);
    const settings = connectorSettings(config);
    if (settings.readsBack) requireReader(connector.transferMode, engine);
    if (settings.cachesUnverifiedKv) {
      log.warn("unverified-kv-is-cached", {
        key: "kv_connector_extra_config.cache_unverified_kv",
        reason:
          "the prefix cache shares KV of vLLM prefill workers, which nobody compared with its prompt",
      });
    }
    const backoff = prefillBackoff(cache);
    this.#shortened = backoff && new ShortenedPrompts(backoff);
    this.name = connector.name;
    this.loadFailurePolicy = config.loadFailurePolicy;
    this.#clock = clock;
    this.#log = log;
    this.#readsBack = settings.readsBack;
    this.#seedsFirstToken = settings.seedsFirstToken;
    this.#incarnation = random.uuid();
    this.#listener = new EngineListener({
      sideChannel: encryptedSideChannel(sideChannel, settings, { clock, log }),
      clock,
      log,
      config,
      engine,
      settings,
      incarnation: this.#incarnation,
      holds: (query) => this.#prefill.holds(query),
    });
    const address = () => this.#requireAddress();
    this.#orders = connector.createDecodeOrders(options, address);
    this.#decode = new DecodeRequests({
      clock,
      config: cache,
      dcpSize,
      mode: connector.transferMode,
      orders: this.#orders,
      rememberMs: Math.max(REMEMBER_MS, 2 * settings.leaseMs, settings.unattendedLeaseMs ?? 0),
      backoff,
      recomputeThresholdTokens: settings.recomputeThresholdTokens,
    });
    this.#prefill = new PrefillScheduler({
      ...settings,
      ...engine,
      transferMode: connector.transferMode,
      clock,
      config: cache,
      dcpSize,
      incarnation: this.#incarnation,
      isLayerwise: settings.isLayerwise && connector.transferMode === "push",
      // What P samples after a shortened prompt is a token of the prompt.
      seedsFirstToken: settings.seedsFirstToken && this.#shortened === undefined,
      address,
    });
  }

  async setHandshakeMetadata(workers: readonly WorkerHandshakeMetadata[]): Promise<void> {
    const before = this.#address?.registrationGeneration;
    this.#address = await this.#listener.publish(workers);
    if (before !== undefined && before < this.#address.registrationGeneration)
      this.#prefill.cachesLost();
  }

  requestQueued(request: ConnectorRequest): void {
    if (this.#fetches(request)) this.#decode.queued(request);
    else if (namesReadback(request.kvTransferParams)) {
      this.#log.warn("readback-not-enabled", {
        requestId: request.requestId,
        key: "kv_connector_extra_config.bidirectional_kv_xfer",
        reason: "the request names blocks of a decode worker: this engine computes their tokens",
      });
    }
  }

  tokensToPrefill(request: ConnectorRequest): number {
    const isShortened = this.#shortened !== undefined && asks(request, "do_remote_decode");
    return isShortened ? this.#shortened.tokensOf(request) : request.numPromptTokens;
  }

  cacheHitSource(): "p2p" {
    return "p2p";
  }

  firstToken(request: ConnectorRequest): number | undefined {
    const { requestId, kvTransferParams, numPromptTokens, samplingKey } = request;
    const given = this.#seeds(request) ? readFirstToken(kvTransferParams) : undefined;
    if (given === undefined || kvTransferParams === undefined) return undefined;
    const numTokens = kvTransferParams["remote_num_tokens"];
    const isOfPrompt = numTokens === numPromptTokens && this.#shortened === undefined;
    // A vLLM P does not say how it has sampled.
    const isAlike = kvTransferParams["kv_peer"] == null || given.samplingKey === samplingKey;
    if (samplingKey !== undefined && isOfPrompt && isAlike) return given.token;
    const reason =
      samplingKey === undefined
        ? "this request needs more than the token, such as its log probability"
        : isOfPrompt
          ? `P sampled it with ${given.samplingKey}, and this request asks for ${samplingKey}`
          : `P computed ${String(numTokens)} tokens of a prompt of ${numPromptTokens}`;
    this.#log.info("first-token-not-used", { requestId, reason });
    return undefined;
  }

  matchedTokens(request: ConnectorRequest, numComputedTokens: number): MatchedTokens {
    if (asks(request, "do_remote_decode")) {
      this.#shortened?.require(request);
      readTransferId(request.kvTransferParams);
    }
    if (!this.#fetches(request)) return { tokens: 0, async: false };
    if (this.#seeds(request)) readFirstToken(request.kvTransferParams);
    try {
      return this.#decode.matched(request, numComputedTokens);
    } catch (error) {
      const isReadback = !asks(request, "do_remote_prefill");
      if (!isReadback || this.loadFailurePolicy !== "recompute") throw error;
      this.#log.warn("readback-refused", { requestId: request.requestId, error: String(error) });
      return { tokens: 0, async: false };
    }
  }

  afterAllocation(
    request: ConnectorRequest,
    blockIds: BlockIds,
    externalTokens: number,
    computedTokens?: readonly number[],
  ): void {
    const blocks = this.#transferred(blockIds);
    const isDecode = asks(request, "do_remote_prefill");
    if (!isDecode && asks(request, "do_remote_decode")) this.#shortened?.require(request);
    if (this.#fetches(request)) {
      const computed = computedTokens && this.#transferred(computedTokens);
      this.#decode.allocated(request, blocks, externalTokens, computed);
    }
    // The workers know from now on whose blocks a peer may read, and take its notifications.
    if (isDecode ? this.#readsBack : asks(request, "do_remote_decode"))
      this.#prefill.admitted(request, blocks);
  }

  buildStepMetadata(): StepMetadata {
    this.#step += 1;
    return {
      connector: this.name,
      step: this.#step,
      schedulerClockMs: this.#clock.now(),
      incarnation: this.#incarnation,
      ...this.#prefill.takeStep(),
      ...this.#orders.takeStep(),
      heartbeats: this.#decode.takeHeartbeats(),
    };
  }

  requestFinished(
    request: ConnectorRequest,
    blockIds: BlockIds,
    reason: FinishReason,
  ): RequestFinished {
    this.#shortened?.forget(request.requestId);
    const isDecode = asks(request, "do_remote_prefill");
    if (!isDecode && !asks(request, "do_remote_decode")) return { keepBlocks: false };
    const fetched = this.#fetches(request) ? this.#decode.finished(request) : undefined;
    const isArriving = fetched?.keepBlocks === true;
    if (isDecode && !this.#readsBack) return { keepBlocks: isArriving };
    const isWhole = reason === "stopped" || reason === "length";
    if (isDecode && isWhole && request.numComputedTokens === undefined) {
      this.#log.warn("readback-not-offered", {
        requestId: request.requestId,
        reason: "the engine does not say how many tokens its blocks hold (numComputedTokens)",
      });
    }
    // While KV arrives in the blocks, they hold nothing for a peer.
    const ended = isArriving ? "aborted" : reason;
    const isUnverified = fetched?.isUnverified === true;
    const half = { isDecode, isUnverified };
    const kept = this.#prefill.finished(request, this.#transferred(blockIds), ended, half);
    return isArriving ? { keepBlocks: true } : kept;
  }

  applyWorkerOutput(output: WorkerOutput): void {
    const unverified = new Set(output.unverifiedReceiving);
    const atRisk = new Set<string>();
    for (const { requestId, blocksAtRisk } of output.failedReceiving) {
      if (blocksAtRisk === true) atRisk.add(requestId);
    }
    for (const requestId of output.finishedSending) this.#prefill.sent(requestId);
    for (const requestId of output.finishedReceiving)
      this.#decode.received(requestId, atRisk.has(requestId), unverified.has(requestId));
  }

  hasPendingWork(): boolean {
    return this.#prefill.hasStep || this.#orders.hasOrders || this.#decode.hasHeartbeats;
  }

  outstanding(): Readonly<Record<string, number>> {
    return {
      running: this.#prefill.running,
      leases: this.#prefill.leases,
      requests: this.#decode.size,
      heartbeats: this.#decode.heartbeats,
      listeners: this.#listener.listeners,
    };
  }

  async close(): Promise<void> {
    this.#decode.close();
    this.#orders.close?.();
    this.#prefill.close();
    await this.#listener.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #seeds(request: ConnectorRequest): boolean {
    return this.#seedsFirstToken && asks(request, "do_remote_prefill");
  }

  /** Whether a peer may supply KV of the request: D's prompt, or what P reads back. */
  #fetches(request: ConnectorRequest): boolean {
    return (
      asks(request, "do_remote_prefill") ||
      (this.#readsBack && namesReadback(request.kvTransferParams))
    );
  }

  /**
   * Of what the engine has given for each group of its cache, that of the groups which peers
   * exchange.
   */
  #transferred<T>(given: readonly T[]): readonly T[] {
    return this.#groups?.select(given) ?? given;
  }

  /** @throws `KV_INTERNAL` before the side channel is open. */
  #requireAddress(): ListenerAddress {
    if (this.#address !== undefined) return this.#address;
    throw new KvError(
      "KV_INTERNAL",
      "a request came before setHandshakeMetadata had opened the side channel",
      { hint: "await setHandshakeMetadata before the first request" },
    );
  }
}

/** @throws `KV_CONFIG_INVALID` where `bidirectional_kv_xfer` is set and the engine cannot read. */
function requireReader(transferMode: TransferMode, { ppSize }: EngineIdentity): void {
  const key = "kv_connector_extra_config.bidirectional_kv_xfer";
  if (transferMode === "push") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${key} is true, and with push nobody reads KV: P writes it to D, and no D knows where P wants the last turn`,
      {
        hint: "use NixlConnector (pull) on both sides, or leave it out: vLLM 0.33 refuses it with push too",
      },
    );
  }
  if (ppSize > 1) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${key} is true, and this engine has ${ppSize} pipeline stages: an engine of several stages cannot read KV`,
      { hint: "leave it out, or serve the model with one stage", details: { ppSize } },
    );
  }
}

/** @throws `KV_CONFIG_INVALID` where the ranks cannot share a sequence. */
function requireContextParallel(
  { dcpSize = 1, tpSize }: EngineIdentity,
  { groups }: KvCacheConfig,
): void {
  if (dcpSize === 1) return;
  const refuse = (why: string): never => {
    throw new KvError("KV_CONFIG_INVALID", `decode context parallelism of ${dcpSize}: ${why}`, {
      details: { dcpSize, tpSize },
    });
  };
  if (!Number.isSafeInteger(dcpSize) || dcpSize < 1 || tpSize % dcpSize !== 0)
    refuse(`it does not divide the ${tpSize} tensor-parallel ranks`);
  const other = groups.find(({ kind }) => kind !== "mla");
  if (other !== undefined)
    refuse(`the cache has a group of kind "${other.kind}", and only "mla" can be shared`);
}

/**
 * Any value except false and null counts as true here. The parameters are validated later, where
 * they are read.
 */
function asks(
  { kvTransferParams }: ConnectorRequest,
  key: "do_remote_prefill" | "do_remote_decode",
): boolean {
  const value = kvTransferParams?.[key];
  return value !== undefined && value !== null && value !== false;
}
