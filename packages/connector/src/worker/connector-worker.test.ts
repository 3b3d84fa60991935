import { createRanks } from "@kv/conformance/engine/ranks";
import type { AgentOptions, KvCaches, Platform, Tracer } from "@kv/interface";
import { decodeHandshakePayload } from "@kv/protocol";
import { engineIdentity } from "@kv/testing/engine-identity";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { expect, test } from "vitest";
import { readTransferConfig } from "../config/transfer-config.js";
import { METRICS } from "../metrics/memory-metrics.js";
import { cpuPlatform } from "../platforms.js";
import { createConnectorWorker, type WorkerContext } from "./connector-worker.js";

/**
 * Opens a worker with this `kv_connector_extra_config`: the options of its agent, what its halves
 * get, and its handshake payload.
 */
async function opened(
  extra: Readonly<Record<string, unknown>>,
  change: (caches: KvCaches) => KvCaches = (caches) => caches,
) {
  const network = memoryNetwork();
  const transport = memoryTransport({ network });
  const ranks = createRanks({ transport, config: simConfig(16), tpSize: 1, numBlocks: 4 });
  const [caches] = ranks.caches;
  if (caches === undefined) throw new Error("no rank");
  const asked: (AgentOptions | undefined)[] = [];
  const contexts: WorkerContext[] = [];
  const counted: string[] = [];
  const tracer: Tracer = { start: () => undefined };
  const worker = createConnectorWorker(
    {
      config: readTransferConfig({
        kv_connector: "NixlConnector",
        kv_role: "kv_both",
        kv_connector_extra_config: extra,
      }),
      engine: engineIdentity("e"),
      tpRank: 0,
      ppRank: 0,
      transport: {
        ...transport,
        createAgent(options) {
          asked.push(options);
          // The memory transport has other backends.
          return transport.createAgent();
        },
      },
      platform: cpuPlatform(),
      sideChannel: memorySideChannel({ network }),
      metrics: { count: (name) => counted.push(name), observe() {} },
      tracer,
    },
    {
      name: "stub",
      transferMode: "pull",
      operation: "read",
      features: ["a", "b"],
      lists: [],
      createHalves(context) {
        contexts.push(context);
        const half = { step() {}, outstanding: () => ({}) };
        return { prefill: half, decode: half };
      },
    },
  );
  await worker.registerKvCaches(change(caches));
  const { payload } = await worker.handshakeMetadata();
  const [context] = contexts;
  if (context === undefined) throw new Error("no halves");
  context.metrics.leaseExpired();
  await worker.close();
  ranks.close();
  return { asked, context, counted, tracer, told: decodeHandshakePayload(payload) };
}

test.each([
  ["in their order", { backends: ["LIBFABRIC", "UCX"] }, [{ name: "LIBFABRIC" }, { name: "UCX" }]],
  [
    "UCX with its threads",
    { backends: ["UCX"], num_threads: 2 },
    [{ name: "UCX", parameters: { num_threads: "2" } }],
  ],
  ["none: those of the transport", {}, undefined],
])(
  "S5.2: the agent has the backends of the transfer config, by the user's key: %s",
  async (_, extra, backends) => {
    const { asked } = await opened(extra);
    const backendsSetting = "kv_connector_extra_config.backends";
    expect(asked).toEqual([expect.objectContaining({ backends, backendsSetting })]);
  },
);

test("both halves get the settings, the engine's tracer and its metrics; peers are told the connector's messages", async () => {
  const { context, counted, tracer, told } = await opened({ request_timeout: 7, engine_ttl: 8 });
  expect(context.settings).toMatchObject({ requestTimeoutMs: 7000, engineTtlMs: 8000 });
  expect(context.tracer).toBe(tracer);
  expect(counted.at(-1)).toBe(METRICS.expiredRequests);
  expect(told.extension?.features).toEqual(["a", "b"]);
});

test("H3: an engine's own layout of states is served, or refused when it registers its caches", async () => {
  const withStates = (recurrentBytes: number, ownRegion: boolean) => (caches: KvCaches) => ({
    config: {
      ...caches.config,
      groups: ["full", "mamba"].map((kind) => ({ kind, layerNames: [] })),
      stateSpace: { convProjectionBytes: [64], recurrentBytes },
    },
    regions: caches.regions.map((region, index) => ({
      ...region,
      groupId: ownRegion ? index : -1,
      // Two states of the second region have the size of one of the first.
      ...(ownRegion && index === 0
        ? { blockLengthBytes: region.blockLengthBytes / 2, numKvHeads: 2 }
        : {}),
    })),
  });
  const bytes = (await opened({})).context.caches.regions[0]?.blockLengthBytes ?? 0;
  await expect(opened({}, withStates(bytes - 64, true))).resolves.toBeDefined();
  for (const [ownRegion, name] of [
    [true, "layers.1"],
    [false, "layers.0"],
  ] as const)
    await expect(opened({}, withStates(bytes, ownRegion))).rejects.toThrow(
      `the local rank, region "${name}": a state of 64 + ${bytes} bytes is larger than`,
    );
});

interface Given {
  readonly platform?: Platform;
  readonly ppSize?: number;
  readonly kv_role?: string;
  readonly kv_buffer_device?: string;
}
const STAGES = { kv_role: "kv_consumer", ppSize: 2 };
const STAGED_PLATFORM = { ...cpuPlatform(), createStaging: () => expect.fail() };
test.each<["read" | "write", lacks: object, Given, message: string | undefined]>([
  [
    "read",
    { read: false },
    {},
    "stub needs READs and notifications; transport memory has no READs",
  ],
  [
    "write",
    { write: false },
    {},
    "stub needs WRITEs and notifications; transport memory has no WRITEs",
  ],
  ["read", { notifications: false }, {}, "transport memory has no notifications"],
  ["read", { write: false }, {}, undefined],
  ["write", { read: false }, {}, undefined],
  ["read", {}, { kv_buffer_device: "cuda" }, 'kv_buffer_device is "cuda"; platform cpu has cpu'],
  ["read", {}, { kv_buffer_device: "cpu" }, undefined],
  ["read", {}, { platform: STAGED_PLATFORM }, "its blocks are staged"],
  ["read", {}, STAGES, 'kv_role is "kv_consumer" and this engine has 2 pipeline stages'],
  ["read", {}, { ...STAGES, kv_role: "kv_producer" }, undefined],
  ["read", {}, { ...STAGES, ppSize: 1 }, undefined],
])("a connector of %ss with a transport of %j and %j: %s", (operation, lacks, given, message) => {
  const { ppSize = 1, platform = cpuPlatform(), ...config } = given;
  const network = memoryNetwork();
  const transport = memoryTransport({ network });
  const create = () =>
    createConnectorWorker(
      {
        config: readTransferConfig({
          kv_connector: "NixlConnector",
          kv_role: "kv_both",
          ...config,
        }),
        engine: engineIdentity("e", { ppSize }),
        tpRank: 0,
        ppRank: 0,
        transport: { ...transport, capabilities: { ...transport.capabilities, ...lacks } },
        platform,
        sideChannel: memorySideChannel({ network }),
      },
      {
        name: "stub",
        transferMode: "pull",
        operation,
        lists: [],
        createHalves: () => expect.fail("not opened"),
      },
    );
  if (message === undefined) expect(create).not.toThrow();
  else expect(create).toThrow(message);
});
