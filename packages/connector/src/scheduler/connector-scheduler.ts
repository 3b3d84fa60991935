import {
  ambient,
  type BlockIds,
  type Clock,
  type ConnectorRequest,
  type EngineIdentity,
  type FinishReason,
  type KvCacheConfig,
  KvError,
  type KvRole,
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
import { cacheKind } from "@kv/plan";
import {
  namesReadback,
  promptContent,
  readFirstToken,
  readTransferId,
  type TransferMode,
} from "@kv/protocol";
import { connectorSettings, encryptedSideChannel } from "../config/connector-settings.js";
import { prefillBackoff, ShortenedPrompts } from "../config/prefill-backoff.js";
import { type TransferGroups, transferGroups } from "../config/transfer-groups.js";
import { EngineListener, type ListenerAddress } from "../handshake/engine-listener.js";
import { type DecodeOrders, DecodeRequests, type PromptSource } from "./decode-requests.js";
import { PrefillScheduler } from "./prefill-scheduler.js";

/**
 * How long a released reference is refused. A vLLM 0.33 P does not announce the end of its lease.
 */
const REMEMBER_MS = 600_000;

export interface ConnectorSchedulerOptions<Source extends PromptSource> {
  readonly name: string;
  readonly transferMode: TransferMode;
  /**
   * `address`: where peers shake hands with this engine; throws `KV_INTERNAL` before it is open.
   */
  createDecodeOrders(
    options: SchedulerOptions,
    address: () => ListenerAddress,
  ): DecodeOrders<Source, object>;
}

/**
 * The scheduler side of a connector. A request makes the engine its P (`do_remote_decode`) or its D
 * (`do_remote_prefill`), and with `bidirectional_kv_xfer` both: D keeps a finished request's KV,
 * and P fetches it for the next turn.
 */
export class ConnectorScheduler<Source extends PromptSource>
  implements SchedulerConnector, AsyncDisposable
{
  readonly name: string;
  readonly loadFailurePolicy: LoadFailurePolicy;
  readonly #clock: Clock;
  readonly #log: Log;
  readonly #readsBack: boolean;
  readonly #seedsFirstToken: boolean;
  readonly #incarnation: string;
  readonly #listener: EngineListener;
  readonly #prefill: PrefillScheduler;
  readonly #orders: DecodeOrders<Source, object>;
  readonly #decode: DecodeRequests<Source>;
  readonly #shortened: ShortenedPrompts | undefined;
  readonly #groups: TransferGroups | undefined;
  readonly #role: KvRole;
  #hasContradicted = false;
  readonly #cache: KvCacheConfig;
  readonly #dcpSize: number;
  #address: ListenerAddress | undefined;
  #step = 0;

  /** @throws `KV_CONFIG_INVALID`. */
  constructor(given: SchedulerOptions, connector: ConnectorSchedulerOptions<Source>) {
    this.#groups = transferGroups(given.cache);
    const options = { ...given, cache: this.#groups?.config ?? given.cache };
    const { config, engine, cache, sideChannel } = options;
    const { dcpSize = 1 } = engine;
    this.#role = config.role;
    this.#cache = cache;
    this.#dcpSize = dcpSize;
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
      // After a shortened prompt, P samples a token of the prompt.
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
    // A vLLM P does not send its sampling key.
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

  matchedTokens(
    request: ConnectorRequest,
    numComputedTokens: number,
    computedTokens?: readonly number[],
  ): MatchedTokens {
    this.#sayContradiction(request);
    if (asks(request, "do_remote_decode")) {
      this.#shortened?.require(request);
      readTransferId(request.kvTransferParams);
    }
    if (!this.#transfers(request)) return { tokens: 0, async: false };
    requirePrompt(request);
    if (!this.#fetches(request)) return { tokens: 0, async: false };
    if (this.#seeds(request)) readFirstToken(request.kvTransferParams);
    try {
      const byGroup = computedTokens && this.#transferred(computedTokens);
      return this.#decode.matched(request, numComputedTokens, byGroup);
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
    if (!this.#transfers(request)) return;
    const blocks = this.#transferred(blockIds);
    requirePrompt(request);
    const { requestId } = request;
    requireAllocated(requestId, blocks, this.#cache, { dcpSize: this.#dcpSize });
    const isDecode = asks(request, "do_remote_prefill");
    if (!isDecode && asks(request, "do_remote_decode")) this.#shortened?.require(request);
    if (this.#fetches(request)) {
      const computed = computedTokens && this.#transferred(computedTokens);
      this.#decode.allocated(request, blocks, externalTokens, computed);
    }
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
    // Blocks that KV is arriving in hold nothing for a peer yet.
    const ended = isArriving ? "aborted" : reason;
    const isUnverified = fetched?.isUnverified === true;
    const half = { isDecode, isUnverified };
    let blocks: BlockIds = [];
    try {
      if (isWhole && !isArriving) blocks = this.#offered(request, blockIds, isDecode);
    } catch (error) {
      this.#prefill.finished(request, [], "error", half);
      throw error;
    }

    const kept = this.#prefill.finished(request, blocks, ended, half);
    return isArriving ? { keepBlocks: true } : kept;
  }

  applyWorkerOutput(output: WorkerOutput): void {
    const unverified = new Set(output.unverifiedReceiving);
    const atRisk = output.failedReceiving.filter(({ blocksAtRisk }) => blocksAtRisk === true);
    const isAtRisk = (id: string) => atRisk.some(({ requestId }) => requestId === id);
    for (const requestId of output.finishedSending) this.#prefill.sent(requestId);
    for (const requestId of output.finishedReceiving)
      this.#decode.received(requestId, isAtRisk(requestId), unverified.has(requestId));
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
      ...this.#orders.outstanding?.(),
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

  /**
   * The blocks of a finished request that a peer may have; an engine may pass none at all.
   * @throws `KV_REQUEST_INVALID`, `KV_BLOCKS_MISMATCH`, `KV_INTERNAL`.
   */
  #offered(request: ConnectorRequest, blockIds: BlockIds, isDecode: boolean): BlockIds {
    const blocks = blockIds.length === 0 ? [] : this.#transferred(blockIds);
    if (blocks.every((ids) => ids.length === 0)) return blocks;
    const { requestId, numPromptTokens, numComputedTokens } = request;
    const numTokens = isDecode ? numComputedTokens : numPromptTokens;
    requirePrompt(request);
    requireAllocated(requestId, blocks, this.#cache, { numTokens, dcpSize: this.#dcpSize });
    return blocks;
  }

  /** `kv_role` decides nothing, as in vLLM: the router's parameters do. */
  #sayContradiction(request: ConnectorRequest): void {
    const isDecode = asks(request, "do_remote_prefill");
    const isPrefill = !isDecode && asks(request, "do_remote_decode");
    const contradicts =
      (isDecode && this.#role === "kv_producer") || (isPrefill && this.#role === "kv_consumer");
    if (!contradicts || this.#hasContradicted) return;
    this.#hasContradicted = true;
    this.#log.warn("role-contradicted", {
      requestId: request.requestId,
      key: "kv_role",
      value: this.#role,
      reason: `the router sends this engine requests to ${isDecode ? "decode" : "prefill"}, and it serves them`,
    });
  }

  #transfers(request: ConnectorRequest): boolean {
    return asks(request, "do_remote_decode") || this.#fetches(request);
  }

  #seeds(request: ConnectorRequest): boolean {
    return this.#seedsFirstToken && asks(request, "do_remote_prefill");
  }

  #fetches(request: ConnectorRequest): boolean {
    return (
      asks(request, "do_remote_prefill") ||
      (this.#readsBack && namesReadback(request.kvTransferParams))
    );
  }

  #transferred<T>(given: readonly T[]): readonly T[] {
    return this.#groups?.select(given) ?? given;
  }

  #requireAddress(): ListenerAddress {
    if (this.#address !== undefined) return this.#address;
    throw new KvError(
      "KV_INTERNAL",
      "a request came before setHandshakeMetadata had opened the side channel",
      { hint: "await setHandshakeMetadata before the first request" },
    );
  }
}

/** @throws `KV_CONFIG_INVALID`. */
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

/** The parameters are validated later, where they are read. */
function asks(
  { kvTransferParams }: ConnectorRequest,
  key: "do_remote_prefill" | "do_remote_decode",
): boolean {
  const value = kvTransferParams?.[key];
  return value !== undefined && value !== null && value !== false;
}

/** An engine may ask for a waiting request in every step. */
const checked = new WeakSet<ArrayLike<number>>();

/** @throws `KV_REQUEST_INVALID` for a malformed token id, or another number of them. */
function requirePrompt(request: ConnectorRequest): void {
  const { requestId, numPromptTokens, promptTokenIds: ids } = request;
  if (ids === undefined) return;
  if (ids.length !== numPromptTokens) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `request ${requestId} has ${numPromptTokens} prompt tokens, and its engine passes the ids of ${ids.length}`,
      { details: { numPromptTokens, given: ids.length } },
    );
  }
  if (checked.has(ids)) return;
  promptContent(request);
  checked.add(ids);
}

/** vLLM's null block, which fills the places outside a sliding window. */
const NULL_BLOCK = 0;

/**
 * Checks a request's blocks by group. `numTokens`: those of the blocks; without, an engine may have
 * allocated less.
 * @throws `KV_BLOCKS_MISMATCH` with both values.
 */
function requireAllocated(
  requestId: string,
  blockIds: BlockIds,
  { groups, blockSize }: KvCacheConfig,
  { numTokens = 0, dcpSize }: { readonly numTokens?: number | undefined; readonly dcpSize: number },
): void {
  const refuse = (what: string, details: Readonly<Record<string, unknown>>): never => {
    throw new KvError("KV_BLOCKS_MISMATCH", `request ${requestId}: its engine passes ${what}`, {
      details,
    });
  };
  if (blockIds.length !== groups.length) {
    const [given, expected] = [blockIds.length, groups.length];
    refuse(`blocks of ${given} KV cache groups, and has ${expected}`, { given, expected });
  }
  for (const [group, { kind, blockSize: own }] of groups.entries()) {
    const ids = blockIds[group] ?? [];
    const seen = new Set<number>();
    for (const block of ids) {
      if (!Number.isSafeInteger(block) || block < 0)
        refuse(`block ${block} in KV cache group ${group}`, { group, block });
      if (seen.has(block) && block !== NULL_BLOCK)
        refuse(`block ${block} twice in KV cache group ${group}`, { group, block });
      seen.add(block);
    }
    const { extent } = cacheKind(kind);
    const isWhole = extent === "state" || extent === "whole";
    const all = Math.ceil(numTokens / ((own ?? blockSize) * dcpSize));
    const needed = isWhole ? Math.min(1, numTokens) : all;
    if (ids.length < needed)
      refuse(
        `${ids.length} blocks of KV cache group ${group}, and ${numTokens} tokens need ${needed}`,
        {
          group,
          given: ids.length,
          needed,
        },
      );
  }
}
