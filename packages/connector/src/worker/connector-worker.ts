import {
  ambient,
  type ComputedLayer,
  type FailedReceive,
  type KvCaches,
  KvError,
  type Registration,
  type StepMetadata,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
  type WorkerOptions,
  type WorkerOutput,
} from "@kv/interface";
import type { KvNotification } from "@kv/protocol";
import {
  type ConnectorSettings,
  connectorSettings,
  encryptedSideChannel,
} from "../config/connector-settings.js";
import { transferredCaches } from "../config/transfer-groups.js";
import { ConnectorHandshake } from "../handshake/connector-handshake.js";
import { localGeometry, modelGeometry } from "../handshake/rank-geometry.js";
import { idleWithinGrace, TaskTracker } from "../peers/background-work.js";
import { NotificationSender, receiveNotifications } from "../peers/messages.js";
import type { PeerContext } from "../peers/remote-engine.js";
import { SharedLocalLists, SharedRemoteAgents } from "../peers/shared-agent-state.js";
import { TransferMetrics } from "../peers/transfers.js";
import type { ConnectorStepMetadata } from "../requests/step-metadata.js";
import type { ReceiveError, ReceiveFailedOptions } from "./receive-error.js";

/** What both halves of a connector's worker share. */
export interface WorkerContext extends PeerContext {
  /**
   * Whether the engine's cache has one KV cache group, so that a block id alone identifies a block.
   */
  readonly hasSingleGroup: boolean;
  readonly output: WorkerOutputQueue;
  readonly notifications: NotificationSender;
}

/** P's or D's half of a connector's worker, between `registerKvCaches` and `close`. */
export interface WorkerHalf<Orders> {
  step(orders: Orders): void;
  /**
   * Takes a notification of the agent `from`. Returns false for one that is not for this half.
   * @throws `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`.
   */
  notified?(notification: KvNotification, from: string): boolean;
  layerComputed?(layer: ComputedLayer): void;
  outstanding(): Readonly<Record<string, number>>;
  readonly engines?: {
    outstanding(): { readonly opening: number; readonly closing: number };
    close(): Promise<void>;
  };
  /**
   * Aborts what waits for peers, and waits for transfers for at most `CLOSE_GRACE_MS`. With a
   * reason, the worker goes on later: each request is reported, as failed with this reason or as
   * sent.
   */
  close?(reason?: KvError): Promise<void>;
  closeLast?(reason?: KvError): void;
}

/** A connector, as `createConnectorWorker` needs it. */
export interface ConnectorWorkerOptions<Orders extends ConnectorStepMetadata> {
  readonly name: string;
  readonly transferMode: "pull" | "push";
  /** The transfer operation that this connector uses. The transport must support it. */
  readonly operation: "read" | "write";
  /** Extension messages that this worker understands, sent in the handshake. */
  readonly features?: readonly string[] | undefined;
  readonly lists: readonly (keyof Orders & string)[];
  /** Creates both halves, once the agent exists and the caches are registered. */
  createHalves(context: WorkerContext): {
    readonly prefill: WorkerHalf<Orders>;
    readonly decode: WorkerHalf<Orders>;
  };
}

/**
 * The worker side of a connector, one per rank, around one agent: it registers memory, serves the
 * handshake metadata, passes steps and notifications to P's and D's half, and closes everything in
 * the right order.
 * @throws `KV_TRANSPORT_UNSUPPORTED`, `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`.
 */
export function createConnectorWorker<Orders extends ConnectorStepMetadata>(
  options: WorkerOptions,
  connector: ConnectorWorkerOptions<Orders>,
): WorkerConnector & AsyncDisposable {
  requireSupported(options, connector);
  return new ConnectorWorker(options, connector);
}

interface OpenWorker<Orders> {
  readonly context: WorkerContext;
  readonly prefill: WorkerHalf<Orders>;
  readonly decode: WorkerHalf<Orders>;
  readonly registrations: readonly Registration[];
}

class ConnectorWorker<Orders extends ConnectorStepMetadata>
  implements WorkerConnector, AsyncDisposable
{
  readonly name: string;
  readonly #options: WorkerOptions;
  readonly #connector: ConnectorWorkerOptions<Orders>;
  readonly #settings: ConnectorSettings;
  readonly #output: WorkerOutputQueue;
  #opening: Promise<OpenWorker<Orders>> | undefined;
  #open: OpenWorker<Orders> | undefined;
  #closed = false;

  constructor(options: WorkerOptions, connector: ConnectorWorkerOptions<Orders>) {
    this.name = connector.name;
    this.#options = options;
    this.#connector = connector;
    this.#settings = connectorSettings(options.config);
    this.#output = new WorkerOutputQueue(this.#settings);
  }

  async registerKvCaches(caches: KvCaches): Promise<void> {
    if (this.#opening !== undefined)
      throw new KvError("KV_INTERNAL", "registerKvCaches was called before", {
        hint: "create a worker connector per set of KV caches, or call unregisterKvCaches first",
      });
    this.#opening = this.#openWith(caches);
    const opened = await this.#opening;
    if (!this.#closed) this.#open = opened;
  }

  async unregisterKvCaches(): Promise<void> {
    const open = this.#assertOpen();
    this.#open = undefined;
    const reason = new KvError(
      "KV_MEMORY_NOT_REGISTERED",
      `rank ${this.#options.tpRank} of engine ${this.#options.engine.engineId} has taken its KV caches back from the transport`,
      { hint: "the engine sleeps: send the request to another one, or again when it is awake" },
    );
    // What is reported before the agent is closed might still be written to.
    this.#output.hold(true);
    await closeWorker(open, reason);
    this.#output.hold(false);
    this.#opening = undefined;
  }

  async handshakeMetadata(): Promise<WorkerHandshakeMetadata> {
    const { agent, handshake } = this.#assertOpen().context;
    const { tpRank, ppRank } = this.#options;
    return { tpRank, ppRank, payload: handshake.payload(await agent.localMetadata()) };
  }

  startLoad(step: StepMetadata): void {
    const { prefill, decode } = this.#assertOpen();
    const orders = this.#orders(step);
    prefill.step(orders);
    decode.step(orders);
  }

  layerComputed(layer: ComputedLayer): void {
    this.#assertOpen().prefill.layerComputed?.(layer);
  }

  async waitForSave(): Promise<void> {
    this.#assertOpen();
  }

  collectFinished(): WorkerOutput {
    return this.#output.take();
  }

  onProgress(listener: () => void): void {
    this.#output.onProgress(listener);
  }

  outstanding(): Readonly<Record<string, number>> {
    if (this.#open === undefined) return {};
    const { prefill, decode } = this.#open;
    let handshakes = 0;
    let closing = 0;
    for (const { engines } of [prefill, decode]) {
      const held = engines?.outstanding();
      handshakes += held?.opening ?? 0;
      closing += held?.closing ?? 0;
    }
    const unreported = this.#output.size;
    return { ...prefill.outstanding(), ...decode.outstanding(), handshakes, closing, unreported };
  }

  async close(): Promise<void> {
    this.#closed = true;
    const open = this.#open ?? (await this.#opening?.catch(() => undefined));
    this.#open = undefined;
    if (open === undefined) return;
    await closeWorker(open);
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /**
   * @throws `KV_INTERNAL` for another connector's metadata, which only a wiring mistake can cause.
   */
  #orders(step: StepMetadata): Orders {
    const { name, lists } = this.#connector;
    const { schedulerClockMs, incarnation } = step;
    const areLists = ["inBatch", "notSent", "leases", "heartbeats", ...lists].every((key) =>
      Array.isArray(step[key]),
    );
    if (
      step.connector === name &&
      areLists &&
      typeof schedulerClockMs === "number" &&
      typeof incarnation === "string"
    )
      return step as Orders;
    throw new KvError(
      "KV_INTERNAL",
      `step ${step.step} carries metadata of connector "${step.connector}"; this worker belongs to "${name}"`,
      { hint: "build the scheduler side and the worker side from the same connector name" },
    );
  }

  #assertOpen(): OpenWorker<Orders> {
    if (this.#open !== undefined) return this.#open;
    throw new KvError("KV_INTERNAL", "the worker connector has no KV caches yet, or is closed", {
      hint: "await registerKvCaches first",
    });
  }

  #notified(
    { decode, prefill, context }: OpenWorker<Orders>,
    notification: KvNotification,
    from: string,
  ): void {
    if (
      decode.notified?.(notification, from) === true ||
      prefill.notified?.(notification, from) === true
    )
      return;
    context.metrics.notificationIgnored();
    const event = `notification-not-for-${this.name}`;
    if (notification.kind === "extension")
      context.log.debug(event, { from, type: notification.message.type });
    else context.log.warn(event, { from, kind: notification.kind });
  }

  async #openWith(given: KvCaches): Promise<OpenWorker<Orders>> {
    const caches = transferredCaches(given);
    const { config, engine, transport, tpRank, ppRank } = this.#options;
    const { clock, log, metrics, random, tracer } = ambient(this.#options);
    const sideChannel = encryptedSideChannel(this.#options.sideChannel, this.#settings, {
      clock,
      log,
    });
    const agent = await transport.createAgent({
      name: random.uuid(),
      backends: config.backends.length === 0 ? undefined : config.backends,
    });
    try {
      const registrations: Registration[] = [];
      for (const memory of new Set(caches.regions.map((region) => region.memory))) {
        registrations.push(await agent.register(memory));
      }
      const { tpSize, ppSize, dcpSize } = engine;
      const stage = ppSize === 1 ? {} : { ppRank, ppSize };
      const local = localGeometry(caches, { tpRank, tpSize, dcpSize, ...stage });
      const context: WorkerContext = {
        clock,
        log,
        metrics: new TransferMetrics(metrics),
        tracer,
        options: this.#options,
        settings: this.#settings,
        sideChannel,
        agent,
        caches,
        hasSingleGroup: given.config.groups.length === 1,
        local,
        model: modelGeometry(caches.config),
        handshake: new ConnectorHandshake({
          sideChannel,
          settings: this.#settings,
          engine,
          cache: caches.config,
          local,
          transferMode: this.#connector.transferMode,
          features: this.#connector.features,
          clock,
          log,
        }),
        output: this.#output,
        notifications: new NotificationSender({ agent, log }),
        localLists: new SharedLocalLists(agent),
        remoteAgents: new SharedRemoteAgents(agent),
      };
      const open = { context, registrations, ...this.#connector.createHalves(context) };
      receiveNotifications(context, (notification, from) =>
        this.#notified(open, notification, from),
      );
      return open;
    } catch (error) {
      await agent.close();
      throw error;
    }
  }
}

/** @throws `KV_TRANSPORT_UNSUPPORTED`, `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`. */
function requireSupported(
  { config, engine: { ppSize }, platform, transport }: WorkerOptions,
  { name, operation }: { readonly name: string; readonly operation: "read" | "write" },
): void {
  const { capabilities } = transport;
  if (!capabilities[operation] || !capabilities.notifications) {
    const missing = capabilities[operation] ? "notifications" : `${operation.toUpperCase()}s`;
    throw new KvError(
      "KV_TRANSPORT_UNSUPPORTED",
      `${name} needs ${operation.toUpperCase()}s and notifications; transport ${transport.name} has no ${missing}`,
      { hint: "use a transport whose capabilities include both, such as @kv/nixl" },
    );
  }
  const { bufferDevices } = platform.capabilities;
  if (config.bufferDevice !== undefined && !bufferDevices.includes(config.bufferDevice)) {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `kv_buffer_device is ${JSON.stringify(config.bufferDevice)}; platform ${platform.deviceType} has ${bufferDevices.join(", ")}`,
      { hint: `leave kv_buffer_device out for ${bufferDevices[0]}` },
    );
  }
  if (platform.createStaging !== undefined) {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `memory of platform ${platform.deviceType} cannot be registered directly: its blocks are staged`,
      { hint: "put staged() of @kv/connector around the connector" },
    );
  }
  if (ppSize > 1 && config.role === "kv_consumer") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `kv_role is "kv_consumer" and this engine has ${ppSize} pipeline stages: notifications are counted for each tensor-parallel rank of D, not for each stage`,
      { hint: "use pipeline_parallel_size 1 for decode workers" },
    );
  }
}

/**
 * Closes both halves, the remote engines and the agent, in this order. `reason` as in
 * `WorkerHalf.close`.
 */
async function closeWorker<Orders>(open: OpenWorker<Orders>, reason?: KvError): Promise<void> {
  const { context, registrations } = open;
  const halves = [open.prefill, open.decode];
  const halvesClosed = Promise.all(halves.map((half) => half.close?.(reason)));
  const peersClosed = new TaskTracker();
  for (const { engines } of halves) if (engines !== undefined) peersClosed.track(engines.close());
  await halvesClosed;
  if (!(await idleWithinGrace(context.clock, [peersClosed]))) {
    context.log.warn("close-did-not-wait", { closing: peersClosed.size });
    // A transfer that does not end still references a remote engine. Closing the agent ends it.
    await context.agent.close();
  }
  for (const half of halves) half.closeLast?.(reason);
  for (const registration of registrations) await registration.close();
  await context.agent.close();
}

/** Collects a worker's reports until the engine takes them. */
export class WorkerOutputQueue {
  #finishedSending: string[] = [];
  #finishedReceiving: string[] = [];
  #unverifiedReceiving: string[] = [];
  #failedReceiving: FailedReceive[] = [];
  #failedBlockIds = new Set<number>();
  readonly #listeners: (() => void)[] = [];
  readonly #reportsUnverified: boolean;
  #isHeld = false;

  /** `cachesUnverifiedKv`: whether KV that no P has compared counts as compared. */
  constructor({ cachesUnverifiedKv }: { readonly cachesUnverifiedKv: boolean }) {
    this.#reportsUnverified = !cachesUnverifiedKv;
  }

  /** P: the request's blocks are no longer needed. */
  sent(requestId: string): void {
    this.#finishedSending.push(requestId);
    this.#progress();
  }

  /**
   * D: the request's KV is in place, or the engine aborted the request and its blocks are free to
   * use. `isVerified`: P has compared the prompts, or nothing of the KV will be used.
   */
  received(requestId: string, isVerified: boolean): void {
    this.#finishedReceiving.push(requestId);
    if (!isVerified && this.#reportsUnverified) this.#unverifiedReceiving.push(requestId);
    this.#progress();
  }

  /** D: the request's KV did not arrive. */
  receiveFailed(
    requestId: string,
    { error, failureType }: ReceiveError,
    { invalidBlockIds, blocksAtRisk = false }: ReceiveFailedOptions,
  ): void {
    this.#finishedReceiving.push(requestId);
    this.#failedReceiving.push({
      requestId,
      code: error.code,
      message: error.message,
      failureType,
      blockIds: invalidBlockIds,
      ...(blocksAtRisk ? { blocksAtRisk } : {}),
    });
    for (const id of invalidBlockIds) this.#failedBlockIds.add(id);
    this.#progress();
  }

  /** D: no peer can write any more to the blocks of a request that failed with `blocksAtRisk`. */
  blocksSafe(requestId: string): void {
    const index = this.#failedReceiving.findIndex((failure) => failure.requestId === requestId);
    if (index < 0) this.#finishedReceiving.push(requestId);
    else {
      // The engine has not seen the failure yet: it is reported once, without the risk.
      const { blocksAtRisk: _, ...failure } = this.#failedReceiving[index] as FailedReceive;
      this.#failedReceiving[index] = failure;
    }
    this.#progress();
  }

  hold(isHeld: boolean): void {
    this.#isHeld = isHeld;
    this.#progress();
  }

  take(): WorkerOutput {
    if (this.#isHeld)
      return {
        finishedSending: [],
        finishedReceiving: [],
        failedReceiving: [],
        failedBlockIds: [],
      };
    const output: WorkerOutput = {
      finishedSending: this.#finishedSending,
      finishedReceiving: this.#finishedReceiving,
      ...(this.#unverifiedReceiving.length === 0
        ? {}
        : { unverifiedReceiving: this.#unverifiedReceiving }),
      failedReceiving: this.#failedReceiving,
      failedBlockIds: [...this.#failedBlockIds],
    };
    this.#finishedSending = [];
    this.#finishedReceiving = [];
    this.#unverifiedReceiving = [];
    this.#failedReceiving = [];
    this.#failedBlockIds = new Set();
    return output;
  }

  onProgress(listener: () => void): void {
    this.#listeners.push(listener);
  }

  get size(): number {
    return this.#finishedSending.length + this.#finishedReceiving.length;
  }

  #progress(): void {
    for (const listener of this.#listeners) listener();
  }
}
