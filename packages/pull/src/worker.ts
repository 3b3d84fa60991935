import {
  type Agent,
  ambient,
  KvError,
  type Registration,
  type Staging,
  type WorkerConnector,
  type WorkerOptions,
} from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import { createOutbox } from "./outbox.js";
import { localGeometry } from "./rank-geometry.js";
import { pullSettings } from "./settings.js";
import { createPullHandshake, type PullHandshake } from "./shake-hands.js";
import { PULL, pullStepMetadata } from "./step-metadata.js";
import { createWorkerParts, type WorkerParts } from "./worker-parts.js";

interface Open extends WorkerParts {
  readonly agent: Agent;
  readonly handshake: PullHandshake;
  readonly local: RankGeometry;
  readonly registrations: readonly Registration[];
  readonly staging: Staging | undefined;
}

/** The worker side of pull, of one rank: both halves around one agent. */
export function createPullWorker(options: WorkerOptions): WorkerConnector {
  const { config, engine, transport, platform, sideChannel } = options;
  const { read, notifications } = transport.capabilities;
  if (!read || !notifications) {
    throw new KvError(
      "KV_TRANSPORT_UNSUPPORTED",
      `pull needs READs and notifications; transport ${transport.name} has ${read ? "no notifications" : "no READs"}`,
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
  const given = ambient(options);
  const settings = pullSettings(config);
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

  const connector: WorkerConnector = {
    name: PULL,
    async registerKvCaches(deviceCaches) {
      if (opening !== undefined) throw new KvError("KV_INTERNAL", "registerKvCaches was called before");
      opening = (async () => {
        const agent = await transport.createAgent({
          name: given.random.uuid(),
          ...(config.backends.length === 0 ? {} : { backends: config.backends }),
        });
        try {
          const staging = await platform.createStaging?.({
            transport,
            agent,
            config: deviceCaches.config,
            caches: deviceCaches,
          });
          const caches = staging?.wireCaches ?? deviceCaches;
          const registrations: Registration[] = [];
          for (const memory of new Set(caches.regions.map((region) => region.memory))) {
            registrations.push(await agent.register(memory));
          }
          const local = localGeometry(caches, { tpRank: options.tpRank, tpSize: engine.tpSize });
          const handshake = createPullHandshake({ sideChannel, settings, engine, cache: caches.config });
          const parts = createWorkerParts({
            ambient: given,
            settings,
            options,
            agent,
            caches,
            staging,
            local,
            handshake,
            outbox,
          });
          return { ...parts, agent, handshake, local, registrations, staging };
        } catch (error) {
          await agent.close();
          throw error;
        }
      })();
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
    startLoad(step) {
      const { prefill, decode } = assertOpen();
      const orders = pullStepMetadata(step);
      prefill.step(orders);
      decode.step(orders);
    },
    async waitForSave() {
      const { prefill, staging } = assertOpen();
      if (staging === undefined) return;
      await Promise.all(
        [...prefill.running()].map(({ requestId, blockIds }) => staging.save(requestId, blockIds)),
      );
    },
    collectFinished: () => outbox.take(),
    onProgress: (listener) => outbox.onProgress(listener),
    outstanding() {
      if (open === undefined) return {};
      const { opening: handshakes, closing } = open.peers.outstanding();
      return {
        ...open.prefill.outstanding(),
        ...open.decode.outstanding(),
        handshakes,
        closing,
        unreported: outbox.size,
      };
    },
    async close() {
      closed = true;
      const closing = open ?? (await opening?.catch(() => undefined));
      open = undefined;
      if (closing === undefined) return;
      const { agent, decode, peers, prefill, registrations, staging } = closing;
      await Promise.all([decode.close(), peers.close()]);
      prefill.close();
      for (const registration of registrations) await registration.close();
      await agent.close();
      await staging?.close();
    },
  };
  return connector;
}
