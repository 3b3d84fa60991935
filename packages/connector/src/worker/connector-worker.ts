import {
  ambient,
  type ComputedLayer,
  type FailedReceive,
  type KvCaches,
  KvError,
  type Registration,
  type StepMetadata,
  settleAll,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
  type WorkerOptions,
  type WorkerOutput,
} from "@kv/interface";
import { checkCompatibility } from "@kv/plan";
import type { KvNotification } from "@kv/protocol";
import {
  type ConnectorSettings,
  connectorSettings,
  encryptedSideChannel,
} from "../config/connector-settings.js";
import { transferredCaches } from "../config/transfer-groups.js";
import { ConnectorHandshake } from "../handshake/connector-handshake.js";
import { localGeometry, modelGeometry } from "../handshake/rank-geometry.js";
import { NotificationSender, receiveNotifications } from "../peers/messages.js";
import { type PeerContext, SharedLocalLists, SharedRemoteAgents } from "../peers/remote-engine.js";
import { idleWithinGrace, TaskTracker, TransferMetrics } from "../peers/transfers.js";
import type { ConnectorStepMetadata } from "../requests/step-metadata.js";

/** What both halves of a worker share. */
export interface WorkerContext extends PeerContext {
  /** A block id alone identifies a block. */
  readonly hasSingleGroup: boolean;
  readonly output: WorkerOutputQueue;
  readonly notifications: NotificationSender;
}

/** P's or D's half of a worker, between `registerKvCaches` and `close`. */
export interface WorkerHalf<Orders> {
  step(orders: Orders): void;
  /**
   * Takes a notification of the agent `from`; false if it is for the other half.
   * @throws `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`.
   */
  notified?(notification: KvNotification, from: string): boolean;
  layerComputed?(layer: ComputedLayer): void;
  outstanding(): Readonly<Record<string, number>>;
  readonly engines?: {
    outstanding(): Readonly<Record<"opening" | "closing" | "references", number>>;
    close(): Promise<void>;
  };
  /**
   * Aborts what waits for peers, and waits up to `CLOSE_GRACE_MS` for transfers. With a reason,
   * every request is reported: as failed with it, or as sent.
   */
  close?(reason?: KvError): Promise<void>;
  closeLast?(reason?: KvError): void;
}

export interface ConnectorWorkerOptions<Orders extends ConnectorStepMetadata> {
  readonly name: string;
  readonly transferMode: "pull" | "push";
  /** The transport must support it. */
  readonly operation: "read" | "write";
  readonly features?: readonly string[] | undefined;
  readonly lists: readonly (keyof Orders & string)[];
  /** Called once the caches are registered. */
  createHalves(context: WorkerContext): {
    readonly prefill: WorkerHalf<Orders>;
    readonly decode: WorkerHalf<Orders>;
  };
}

/**
 * The worker side of a connector for one rank, around one agent. Registers memory, serves P's and
 * D's half, and closes all in the right order.
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
    // Until the agent is closed, peers might still write to reported blocks.
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
    let references = 0;
    for (const { engines } of [prefill, decode]) {
      const held = engines?.outstanding();
      handshakes += held?.opening ?? 0;
      closing += held?.closing ?? 0;
      references += held?.references ?? 0;
    }
    return {
      ...prefill.outstanding(),
      ...decode.outstanding(),
      handshakes,
      closing,
      references,
      unreported: this.#output.size,
    };
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

  /** @throws `KV_INTERNAL` for another connector's metadata. */
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
      backendsSetting: "kv_connector_extra_config.backends",
    });
    try {
      const registrations: Registration[] = [];
      for (const memory of new Set(caches.regions.map((region) => region.memory))) {
        registrations.push(await agent.register(memory));
      }
      const { tpSize, ppSize, dcpSize } = engine;
      const stage = ppSize === 1 ? {} : { ppRank, ppSize };
      const local = localGeometry(caches, { tpRank, tpSize, dcpSize, ...stage });
      const model = modelGeometry(caches.config);
      // A stage does not show which groups share its regions.
      if (ppSize === 1) checkCompatibility({ local, remote: local, ...model });
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
        model,
        handshake: new ConnectorHandshake({
          sideChannel,
          settings: this.#settings,
          engine,
          cache: caches.config,
          local,
          transferMode: this.#connector.transferMode,
          features: this.#connector.features,
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
  const { bufferDevice } = config;
  if (bufferDevice !== undefined && !bufferDevices.includes(bufferDevice)) {
    const isPlatform = bufferDevice === "cuda" || bufferDevice === "cpu";
    const other = isPlatform
      ? `, or give the engine the platform of that device (the demo: --platform ${bufferDevice}; a program: ${bufferDevice}Platform())`
      : "";
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `kv_buffer_device is ${JSON.stringify(bufferDevice)}; platform ${platform.deviceType} has ${bufferDevices.join(", ")}`,
      { hint: `leave kv_buffer_device out for ${bufferDevices[0]}${other}` },
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

async function closeWorker<Orders>(open: OpenWorker<Orders>, reason?: KvError): Promise<void> {
  const { context, registrations } = open;
  const halves = [open.prefill, open.decode];
  const halvesClosed = settleAll(halves.map((half) => half.close?.(reason)));
  const peersClosed = new TaskTracker();
  for (const { engines } of halves) if (engines !== undefined) peersClosed.track(engines.close());
  await halvesClosed;
  if (!(await idleWithinGrace(context.clock, [peersClosed]))) {
    context.log.warn("close-did-not-wait", { closing: peersClosed.size });
    // A transfer that hangs keeps a remote engine; closing the agent ends it.
    await context.agent.close();
  }
  for (const half of halves) half.closeLast?.(reason);
  for (const registration of registrations) await registration.close();
  await context.agent.close();
}

export const noOutput = () => ({
  finishedSending: [] as string[],
  finishedReceiving: [] as string[],
  failedReceiving: [] as FailedReceive[],
  failedBlockIds: [] as number[],
});

export function withUnverified(output: WorkerOutput, unverified: Set<string>): WorkerOutput {
  const unverifiedReceiving = output.finishedReceiving.filter((id) => unverified.delete(id));
  return unverifiedReceiving.length === 0 ? output : { ...output, unverifiedReceiving };
}

export class WorkerOutputQueue {
  #output = noOutput();
  readonly #unverified = new Set<string>();
  readonly #listeners: (() => void)[] = [];
  readonly #cachesUnverifiedKv: boolean;
  #isHeld = false;

  /** `cachesUnverifiedKv`: KV that no P has compared counts as compared. */
  constructor({ cachesUnverifiedKv }: { readonly cachesUnverifiedKv: boolean }) {
    this.#cachesUnverifiedKv = cachesUnverifiedKv;
  }

  sent(requestId: string): void {
    this.#output.finishedSending.push(requestId);
    this.#progress();
  }

  /**
   * D: the blocks are ready. `isVerified`: P has compared the prompts, or none of the KV will be
   * used.
   */
  received(requestId: string, isVerified: boolean): void {
    this.#output.finishedReceiving.push(requestId);
    if (!isVerified && !this.#cachesUnverifiedKv) this.#unverified.add(requestId);
    this.#progress();
  }

  /** D: the KV did not arrive. With `blocksAtRisk`, `blocksSafe` follows. */
  receiveFailed(failure: FailedReceive): void {
    this.#output.finishedReceiving.push(failure.requestId);
    this.#output.failedReceiving.push(failure);
    this.#output.failedBlockIds.push(...(failure.blockIds ?? []));
    this.#progress();
  }

  blocksSafe(requestId: string): void {
    const { failedReceiving, finishedReceiving } = this.#output;
    const index = failedReceiving.findIndex((failure) => failure.requestId === requestId);
    if (index < 0) finishedReceiving.push(requestId);
    else {
      // The engine has not seen the failure: report it once, without the risk.
      const { blocksAtRisk: _, ...failure } = failedReceiving[index] as FailedReceive;
      failedReceiving[index] = failure;
    }
    this.#progress();
  }

  hold(isHeld: boolean): void {
    this.#isHeld = isHeld;
    this.#progress();
  }

  take(): WorkerOutput {
    if (this.#isHeld) return noOutput();
    const output = this.#output;
    this.#output = noOutput();
    return withUnverified(output, this.#unverified);
  }

  onProgress(listener: () => void): void {
    this.#listeners.push(listener);
  }

  get size(): number {
    const { finishedSending, finishedReceiving } = this.#output;
    return finishedSending.length + finishedReceiving.length + this.#unverified.size;
  }

  #progress(): void {
    for (const listener of this.#listeners) listener();
  }
}
