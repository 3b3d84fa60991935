import {
  ambient,
  type ComputedLayer,
  type KvCaches,
  KvError,
  type Registration,
  type StepMetadata,
  type WorkerConnector,
  type WorkerHandshakeMetadata,
  type WorkerOptions,
  type WorkerOutput,
} from "@kv/interface";
import {
  type ConnectorSettings,
  connectorSettings,
  encryptedSideChannel,
} from "../config/connector-settings.js";
import { ConnectorHandshake } from "../handshake/connector-handshake.js";
import { localGeometry, modelGeometry } from "../handshake/rank-geometry.js";
import { TransferMetrics } from "../metrics/transfer-metrics.js";
import { NotificationSender } from "../peers/notification-sender.js";
import type { PeerTable } from "../peers/peer-table.js";
import { SharedLocalLists, SharedRemoteAgents } from "../peers/shared-agent-state.js";
import { idleWithinGrace, TaskTracker } from "./task-tracker.js";
import type { WorkerContext } from "./worker-context.js";
import { WorkerOutputQueue } from "./worker-output.js";

/** What a connector's worker does between `registerKvCaches` and `close`. */
export interface WorkerHalves {
  /** `startLoad`. Errors: `KV_INTERNAL` for another connector's metadata. */
  step(step: StepMetadata): void;
  /** `layerComputed`. */
  layer?(layer: ComputedLayer): void;
  /** Numbers of held resources, by name. */
  outstanding(): Readonly<Record<string, number>>;
  /** Tables of remote engines. The worker closes them. */
  readonly peers: readonly Pick<PeerTable<never>, "outstanding" | "close">[];
  /** Aborts operations that wait for peers, and waits for transfers for at most `CLOSE_GRACE_MS`. */
  close(): Promise<void>;
  /** Called after the tables of remote engines were closed. */
  closeLast?(): void;
}

/** A connector, as `createConnectorWorker` needs it. */
export interface ConnectorWorkerOptions {
  /** The connector's name in errors. */
  readonly name: string;
  /** Part of the compatibility hash. */
  readonly transferMode: "pull" | "push";
  /** The transfer operation that this connector uses. The transport must support it. */
  readonly operation: "read" | "write";
  /** Extension messages that this worker understands, sent in the handshake. */
  readonly features?: readonly string[] | undefined;
  /** Creates both halves, once the agent exists and the caches are registered. */
  createHalves(context: WorkerContext): WorkerHalves;
}

/**
 * The worker side of a connector, one per rank, around one agent: it registers memory, serves the handshake metadata, and closes
 * everything in the right order. Errors: `KV_TRANSPORT_UNSUPPORTED`, `KV_PLATFORM_UNSUPPORTED`, `KV_CONFIG_INVALID`.
 */
export function createConnectorWorker(
  options: WorkerOptions,
  connector: ConnectorWorkerOptions,
): WorkerConnector & AsyncDisposable {
  checkTransport(options, connector);
  checkPlatform(options);
  checkPipelineStages(options, connector);
  return new ConnectorWorker(options, connector);
}

interface OpenWorker {
  readonly context: WorkerContext;
  readonly halves: WorkerHalves;
  readonly registrations: readonly Registration[];
}

class ConnectorWorker implements WorkerConnector, AsyncDisposable {
  readonly name: string;
  readonly #options: WorkerOptions;
  readonly #connector: ConnectorWorkerOptions;
  readonly #settings: ConnectorSettings;
  readonly #output: WorkerOutputQueue;
  #opening: Promise<OpenWorker> | undefined;
  #open: OpenWorker | undefined;
  #closed = false;

  constructor(options: WorkerOptions, connector: ConnectorWorkerOptions) {
    this.name = connector.name;
    this.#options = options;
    this.#connector = connector;
    this.#settings = connectorSettings(options.config);
    this.#output = new WorkerOutputQueue(this.#settings);
  }

  async registerKvCaches(caches: KvCaches): Promise<void> {
    if (this.#opening !== undefined)
      throw new KvError("KV_INTERNAL", "registerKvCaches was called before", {
        hint: "create a worker connector per set of KV caches",
      });
    this.#opening = this.#openWith(caches);
    const opened = await this.#opening;
    if (!this.#closed) this.#open = opened;
  }

  async handshakeMetadata(): Promise<WorkerHandshakeMetadata> {
    const { agent, handshake } = this.#assertOpen().context;
    const { tpRank, ppRank } = this.#options;
    return { tpRank, ppRank, payload: handshake.payload(await agent.localMetadata()) };
  }

  startLoad(step: StepMetadata): void {
    this.#assertOpen().halves.step(step);
  }

  layerComputed(layer: ComputedLayer): void {
    this.#assertOpen().halves.layer?.(layer);
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
    const { halves } = this.#open;
    let handshakes = 0;
    let closing = 0;
    for (const peers of halves.peers) {
      const held = peers.outstanding();
      handshakes += held.opening;
      closing += held.closing;
    }
    return { ...halves.outstanding(), handshakes, closing, unreported: this.#output.size };
  }

  async close(): Promise<void> {
    this.#closed = true;
    const open = this.#open ?? (await this.#opening?.catch(() => undefined));
    this.#open = undefined;
    if (open === undefined) return;
    const { context, halves, registrations } = open;
    const halvesClosed = halves.close();
    const peersClosed = new TaskTracker();
    for (const peers of halves.peers) peersClosed.track(peers.close());
    await halvesClosed;
    if (!(await idleWithinGrace(context.clock, [peersClosed]))) {
      context.log.warn("close-did-not-wait", { closing: peersClosed.size });
      // A transfer that does not end still references a remote engine. Closing the agent ends it.
      await context.agent.close();
    }
    halves.closeLast?.();
    for (const registration of registrations) await registration.close();
    await context.agent.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #assertOpen(): OpenWorker {
    if (this.#open !== undefined) return this.#open;
    throw new KvError("KV_INTERNAL", "the worker connector has no KV caches yet, or is closed", {
      hint: "await registerKvCaches first",
    });
  }

  async #openWith(caches: KvCaches): Promise<OpenWorker> {
    const { config, engine, transport, tpRank, ppRank } = this.#options;
    const { clock, log, metrics, random, tracer } = ambient(this.#options);
    const sideChannel = encryptedSideChannel(this.#options.sideChannel, this.#settings, { clock, log });
    const agent = await transport.createAgent({
      name: random.uuid(),
      backends: config.backends.length === 0 ? undefined : config.backends,
    });
    try {
      const registrations: Registration[] = [];
      for (const memory of new Set(caches.regions.map((region) => region.memory))) {
        registrations.push(await agent.register(memory));
      }
      const { tpSize, ppSize } = engine;
      const local = localGeometry(
        caches,
        ppSize === 1 ? { tpRank, tpSize } : { tpRank, tpSize, ppRank, ppSize },
      );
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
      return { context, halves: this.#connector.createHalves(context), registrations };
    } catch (error) {
      await agent.close();
      throw error;
    }
  }
}

function checkTransport({ transport }: WorkerOptions, { name, operation }: ConnectorWorkerOptions): void {
  const { capabilities } = transport;
  if (capabilities[operation] && capabilities.notifications) return;
  const missing = capabilities[operation] ? "notifications" : `${operation.toUpperCase()}s`;
  throw new KvError(
    "KV_TRANSPORT_UNSUPPORTED",
    `${name} needs ${operation.toUpperCase()}s and notifications; transport ${transport.name} has no ${missing}`,
    { hint: "use a transport whose capabilities include both, such as @kv/nixl" },
  );
}

function checkPlatform({ config, platform }: WorkerOptions): void {
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
}

function checkPipelineStages(
  { config, engine: { ppSize } }: WorkerOptions,
  { name, transferMode }: ConnectorWorkerOptions,
): void {
  if (ppSize === 1) return;
  if (config.role === "kv_consumer") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `kv_role is "kv_consumer" and this engine has ${ppSize} pipeline stages: P counts one notification per tensor-parallel rank of D, not per stage`,
      { hint: "use pipeline_parallel_size 1 for decode workers" },
    );
  }
  if (transferMode === "push") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `this engine has ${ppSize} pipeline stages; ${name} serves engines with one, on either side`,
      { hint: "use pipeline_parallel_size 1 on both sides of push, or the pull connector" },
    );
  }
}
