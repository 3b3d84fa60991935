import {
  type Agent,
  type Ambient,
  ambient,
  type ComputedLayer,
  type KvCaches,
  KvError,
  type Registration,
  type StepMetadata,
  type WorkerConnector,
  type WorkerOptions,
} from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import type { Peers } from "../peers/peer-table.js";
import { createBackground, idleWithin } from "./task-tracker.js";
import { createOutbox, type Outbox } from "./worker-output.js";
import { createPairHandshake, type PairHandshake } from "../handshake/connector-handshake.js";
import { type PairSettings, pairSettings } from "../config/connector-settings.js";
import { localGeometry } from "../handshake/rank-geometry.js";

/** What a connector's worker does between `registerKvCaches` and `close`. */
export interface WorkerHalves {
  /** Errors: `KV_INTERNAL` for another connector's metadata. */
  step(step: StepMetadata): void;
  layer?(layer: ComputedLayer): void;
  outstanding(): Readonly<Record<string, number>>;
  /** Tables of remote engines; closed with what uses them. */
  readonly peers: readonly Pick<Peers<unknown>, "outstanding" | "close">[];
  /** Gives up what waits for others; transfers are waited for, not longer than `CLOSE_GRACE_MS`. */
  close(): Promise<void>;
  /** After the peers are closed. */
  closeLast?(): void;
}

export interface WorkerSurroundings {
  readonly ambient: Ambient;
  readonly settings: PairSettings;
  readonly options: WorkerOptions;
  readonly agent: Agent;
  /** What is registered. */
  readonly caches: KvCaches;
  readonly local: RankGeometry;
  readonly handshake: PairHandshake;
  readonly outbox: Outbox;
}

export interface WorkerShellOptions {
  readonly name: string;
  readonly transferMode: "pull" | "push";
  /** What moves the bytes. */
  readonly operation: "read" | "write";
  /** Notifications of our own that this worker understands. */
  readonly features?: readonly string[];
  createHalves(around: WorkerSurroundings): WorkerHalves;
}

/** The worker side of a connector, of one rank, around one agent: memory, registrations, and their end in the right order. */
export function createWorkerShell(options: WorkerOptions, shell: WorkerShellOptions): WorkerConnector {
  const { config, engine, transport, platform, sideChannel } = options;
  const { name, operation } = shell;
  const { capabilities } = transport;
  if (!capabilities[operation] || !capabilities.notifications) {
    throw new KvError(
      "KV_TRANSPORT_UNSUPPORTED",
      `${name} needs ${operation.toUpperCase()}s and notifications; transport ${transport.name} has no ${
        capabilities[operation] ? "notifications" : `${operation.toUpperCase()}s`
      }`,
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
  if (engine.ppSize > 1 && config.role === "kv_consumer") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `kv_role is "kv_consumer" and this engine has ${engine.ppSize} pipeline stages: a producer counts one word of each tensor-parallel rank, not of each stage`,
      { hint: "use pipeline_parallel_size 1 for decode workers" },
    );
  }
  if (engine.ppSize > 1 && shell.transferMode === "push") {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `this engine has ${engine.ppSize} pipeline stages; ${name} serves engines with one, on either side`,
      { hint: "use pipeline_parallel_size 1 on both sides of push, or the pull connector" },
    );
  }
  if (platform.createStaging !== undefined) {
    throw new KvError(
      "KV_PLATFORM_UNSUPPORTED",
      `memory of platform ${platform.deviceType} is not registered as it is: its blocks are staged`,
      { hint: "put staged() of @kv/connector around the connector" },
    );
  }
  const given = ambient(options);
  const settings = pairSettings(config);
  const outbox = createOutbox();
  let opening: Promise<Open> | undefined;
  let open: Open | undefined;
  let closed = false;

  function assertOpen(): Open {
    if (open !== undefined) return open;
    throw new KvError("KV_INTERNAL", "the worker connector has no KV caches yet, or is closed", {
      hint: "await registerKvCaches first",
    });
  }

  async function openWith(caches: KvCaches): Promise<Open> {
    const agent = await transport.createAgent({
      name: given.random.uuid(),
      ...(config.backends.length === 0 ? {} : { backends: config.backends }),
    });
    try {
      const registrations: Registration[] = [];
      for (const memory of new Set(caches.regions.map((region) => region.memory))) {
        registrations.push(await agent.register(memory));
      }
      const { tpSize, ppSize } = engine;
      const { tpRank, ppRank } = options;
      const local = localGeometry(
        caches,
        ppSize === 1 ? { tpRank, tpSize } : { tpRank, tpSize, ppRank, ppSize },
      );
      const handshake = createPairHandshake({
        sideChannel,
        settings,
        engine,
        cache: caches.config,
        transferMode: shell.transferMode,
        log: given.log,
        ...(shell.features === undefined ? {} : { features: shell.features }),
      });
      const parts = { agent, caches, local, handshake };
      const halves = shell.createHalves({ ambient: given, settings, options, outbox, ...parts });
      return { halves, registrations, ...parts };
    } catch (error) {
      await agent.close();
      throw error;
    }
  }

  return {
    name,
    async registerKvCaches(caches) {
      if (opening !== undefined) throw new KvError("KV_INTERNAL", "registerKvCaches was called before");
      opening = openWith(caches);
      const opened = await opening;
      if (!closed) open = opened;
    },
    async handshakeMetadata() {
      const { agent, handshake, local } = assertOpen();
      return {
        tpRank: options.tpRank,
        ppRank: options.ppRank,
        payload: handshake.payload(local, await agent.localMetadata()),
      };
    },
    startLoad: (step) => assertOpen().halves.step(step),
    layerComputed: (layer) => assertOpen().halves.layer?.(layer),
    async waitForSave() {
      assertOpen();
    },
    collectFinished: () => outbox.take(),
    onProgress: (listener) => outbox.onProgress(listener),
    outstanding() {
      if (open === undefined) return {};
      let handshakes = 0;
      let closing = 0;
      for (const peers of open.halves.peers) {
        const held = peers.outstanding();
        handshakes += held.opening;
        closing += held.closing;
      }
      return { ...open.halves.outstanding(), handshakes, closing, unreported: outbox.size };
    },
    async close() {
      closed = true;
      const closing = open ?? (await opening?.catch(() => undefined));
      open = undefined;
      if (closing === undefined) return;
      const { agent, halves, registrations } = closing;
      const ended = halves.close();
      const links = createBackground();
      for (const peers of halves.peers) links.track(peers.close());
      await ended;
      if (!(await idleWithin(given.clock, [links]))) {
        given.log.warn("close-did-not-wait", { closing: links.size });
        // What holds a link yet, such as a transfer that does not let go, is the agent's to end.
        await agent.close();
      }
      halves.closeLast?.();
      for (const registration of registrations) await registration.close();
      await agent.close();
    },
  };
}

interface Open {
  readonly halves: WorkerHalves;
  readonly agent: Agent;
  readonly handshake: PairHandshake;
  readonly local: RankGeometry;
  readonly registrations: readonly Registration[];
}
