// Staging: the gain of overlapping copies and transfers on a simulated device whose bus is as fast as the network, and the cost of an idle step.
import { readTransferConfig, staged } from "@kv/connector";
import {
  type Agent,
  type Clock,
  type KvCacheConfig,
  type Memory,
  type PreparedList,
  type StagedBlocks,
  type Staging,
  systemClock,
  type Transport,
} from "@kv/interface";
import { neuronCaches, neuronPlatform, simulatedDevice } from "@kv/neuron";
import { pullConnector } from "@kv/pull";
import { engineIdentity } from "@kv/testing/engine-identity";
import { memoryNetwork, memorySideChannel, memoryTransport, virtualClock } from "@kv/transport-memory";
import { alone, median, pairRatio, type Row, spread } from "./report.js";

const ROUNDS = 1;
const REQUESTS = 16;
const BLOCKS_PER_REQUEST = 32;
/** Requests that the pool holds at once. */
const POOL_REQUESTS = 4;
const BYTES_PER_MS = 250_000;
const WANTED_OVERLAP = 1.8;
const WANTED_IDLE_US = 20;
const IDLE_STEPS = 20_000;

// 32 blocks are 32 MiB: 16 layers, 8 heads of 128 numbers of 2 bytes, 16 tokens, K and V.
const CONFIG: KvCacheConfig = {
  groups: [{ kind: "full", layerNames: Array.from({ length: 16 }, (_, i) => `layers.${i}`) }],
  blockSize: 16,
  physicalBlocksPerLogical: 1,
  numKvHeads: 8,
  headSize: 128,
  numHiddenLayers: 16,
  dtype: "torch.bfloat16",
  cacheDtype: "auto",
  layout: "LBHNC",
  attentionBackend: "PLAIN",
};

export async function neuron(): Promise<Row[]> {
  const virtual = virtualClock();
  return [
    // The schedule alone: the time of the simulated bus and network, without the processor's copies.
    await overlap("in virtual time", virtual, (work) => virtual.settle(work), 1, WANTED_OVERLAP),
    // With the processor's copies, all on one thread of this machine: reported only.
    await overlap("in real time", systemClock(), (work) => work, ROUNDS, undefined),
    await idle(),
  ];
}

interface Side {
  readonly staging: Staging;
  readonly agent: Agent;
  readonly list: PreparedList;
}

/** Tracks the most bytes that were allocated at once. */
function bounded(transport: Transport): { transport: Transport; readonly mostBytes: number } {
  let bytes = 0;
  let mostBytes = 0;
  return {
    transport: {
      name: transport.name,
      capabilities: transport.capabilities,
      createAgent: (options) => transport.createAgent(options),
      allocate(lengthBytes, options): Memory {
        bytes += lengthBytes;
        mostBytes = Math.max(mostBytes, bytes);
        return transport.allocate(lengthBytes, options);
      },
      close: () => transport.close(),
    },
    get mostBytes() {
      return mostBytes;
    },
  };
}

async function overlap(
  how: string,
  clock: Clock,
  run: (work: Promise<number>) => Promise<number>,
  rounds: number,
  wanted: number | undefined,
): Promise<Row> {
  const network = memoryNetwork({ clock, latency: { bytesPerMs: BYTES_PER_MS, pieceLengthBytes: 4 << 20 } });
  const device = simulatedDevice({ clock, bytesPerMs: BYTES_PER_MS });
  const poolBlocks = POOL_REQUESTS * BLOCKS_PER_REQUEST + 1;
  const caches = neuronCaches({ device, config: CONFIG, numBlocks: BLOCKS_PER_REQUEST, numHeads: 8 });
  const counted = [0, 1].map((host) => bounded(memoryTransport({ network, host: `h${host}` })));
  const sides = await Promise.all(counted.map(({ transport }) => open(transport, poolBlocks)));
  const [source, target] = sides;
  if (source === undefined || target === undefined) throw new Error("two sides are opened");
  const rows = (side: Side) => tableOf(side.staging);
  const name = await target.agent.addRemote(await source.agent.localMetadata());
  const remote = await target.agent.prepareRemote(name, { memoryType: "DRAM", rows: rows(source) });

  async function open(transport: Transport, blocks: number): Promise<Side> {
    const staging = await neuronPlatform().createStaging?.({
      transport,
      config: CONFIG,
      caches,
      poolBlocks: blocks,
    });
    if (staging === undefined) throw new Error("the platform stages");
    const agent = await transport.createAgent();
    for (const memory of new Set(staging.wireCaches.regions.map((region) => region.memory)))
      await agent.register(memory);
    const list = await agent.prepareLocal({ memoryType: "DRAM", rows: tableOf(staging) });
    return { staging, agent, list };
  }

  const slotOf = (request: number): StagedBlocks => {
    const first = 1 + (request % POOL_REQUESTS) * BLOCKS_PER_REQUEST;
    const each = Array.from({ length: BLOCKS_PER_REQUEST }, (_, i) => i);
    return { device: [each], wire: [each.map((i) => first + i)] };
  };
  const save = (request: number) => source.staging.save(`r${request}`, slotOf(request));
  async function move(request: number): Promise<void> {
    const ids = Int32Array.from(
      CONFIG.groups.flatMap(({ layerNames }) =>
        layerNames.flatMap((_, layer) =>
          (slotOf(request).wire[0] ?? []).map((id) => layer * poolBlocks + id),
        ),
      ),
    );
    const { agent, list } = target as Side;
    await agent.transfer({ operation: "READ", local: list, localIds: ids, remote, remoteIds: ids }).done;
  }

  async function oneAfterTheOther(): Promise<number> {
    const startMs = clock.now();
    for (let request = 0; request < REQUESTS; request++) {
      await save(request);
      await move(request);
    }
    return clock.now() - startMs;
  }

  /** Saves a request while the previous one is transferred. Its place in the pool must have been read before. */
  async function overlapped(): Promise<number> {
    const startMs = clock.now();
    const moves: Promise<void>[] = [];
    for (let request = 0; request < REQUESTS; request++) {
      await moves[request - POOL_REQUESTS];
      await save(request);
      const before = moves[request - 1];
      moves.push((before ?? Promise.resolve()).then(() => move(request)));
    }
    await Promise.all(moves);
    return clock.now() - startMs;
  }

  const [ours, theirs]: [number[], number[]] = [[], []];
  for (let round = 0; round < rounds; round++) {
    ours.push(await run(overlapped()));
    theirs.push(await run(oneAfterTheOther()));
  }
  const ratio = pairRatio(theirs, ours);
  const poolBytes = source.staging.wireCaches.regions[0]?.memory.lengthBytes ?? 0;
  const within = counted.every(({ mostBytes }) => mostBytes === poolBytes);
  for (const { agent } of sides) await agent.close();
  for (const { staging } of sides) await staging.close();
  for (const { transport } of counted) await transport.close();
  await device.close();
  return {
    what: `save and transfer of 512 MiB, overlapped / one after the other, ${how}; host memory ${within ? "within" : "ABOVE"} the pool of ${Math.round(poolBytes / 2 ** 20)} MiB`,
    ours: spread(ours, "ms"),
    theirs: spread(theirs, "ms"),
    ratio,
    wanted: wanted === undefined ? "-" : `>= ${wanted}`,
    met: wanted === undefined ? undefined : ratio >= wanted && within,
  };
}

function tableOf({ wireCaches }: Staging): Float64Array {
  return Float64Array.from(
    wireCaches.regions.flatMap(({ memory, offsetBytes, blockLengthBytes, blockStrideBytes, numBlocks }) => [
      memory.address + offsetBytes,
      blockLengthBytes,
      0,
      blockStrideBytes,
      numBlocks,
    ]),
  );
}

/** Scheduler and worker of a staged pull connector in steps without work. */
async function idle(): Promise<Row> {
  const network = memoryNetwork();
  const transport = memoryTransport({ network, host: "idle" });
  const sideChannel = memorySideChannel({ network, host: "idle" });
  const device = simulatedDevice();
  const platform = neuronPlatform();
  const module = staged(pullConnector, { platform, poolBlocks: 9 });
  const shared = {
    config: {
      ...readTransferConfig({ kv_connector: "NixlConnector", kv_role: "kv_both" }),
      sideChannelHost: "idle",
    },
    engine: engineIdentity("idle"),
    cache: CONFIG,
    sideChannel,
    transport,
    platform,
  };
  const worker = await module.createWorker({ ...shared, tpRank: 0, ppRank: 0 });
  await worker.registerKvCaches(neuronCaches({ device, config: CONFIG, numBlocks: 8, numHeads: 8 }));
  const scheduler = await module.createScheduler(shared);
  const steps = async (): Promise<{ wallUs: number; processorUs: number }> => {
    const usage = process.cpuUsage();
    const start = performance.now();
    for (let step = 0; step < IDLE_STEPS; step++) {
      const metadata = scheduler.buildStepMetadata();
      worker.startLoad(metadata);
      await worker.waitForSave(metadata);
      scheduler.applyWorkerOutput(worker.collectFinished());
    }
    const wallUs = ((performance.now() - start) * 1000) / IDLE_STEPS;
    const { user, system } = process.cpuUsage(usage);
    return { wallUs, processorUs: (user + system) / IDLE_STEPS };
  };
  await steps();
  const rounds = [await steps(), await steps(), await steps()];
  const costs = rounds.map(({ wallUs }) => wallUs);
  // Wall time includes waiting for a busy machine; processor time does not.
  const processor = spread(
    rounds.map(({ processorUs }) => processorUs),
    "us",
  );
  await worker.close();
  await scheduler.close();
  await transport.close();
  await device.close();
  const what = `an idle step of a staged connector, both sides (processor time ${processor})`;
  return alone(what, spread(costs, "us"), `<= ${WANTED_IDLE_US} us`, median(costs) <= WANTED_IDLE_US);
}
