import {
  type Clock,
  type ConnectorModule,
  type EngineIdentity,
  type KvCacheConfig,
  type KvCacheRegion,
  type KvCaches,
  KvError,
  type KvTransferConfig,
  type KvTransferParams,
  type ModelIdentity,
  type Platform,
  readMaxModelLen,
  type StagedBlocks,
  type Transport,
} from "@kv/interface";
import {
  NO_FAULTS,
  type SceneNetwork,
  type SceneProcess,
  withNotificationFaults,
} from "./network.js";
import { createRanks, stateSpaceOf } from "./ranks.js";
import {
  BLOCK_TOKENS,
  MAX_REQUESTS,
  MAX_TOKENS,
  type Scene,
  type SceneEvent,
  type SceneGroup,
  type SceneRequest,
} from "./scene.js";
import { createSides, registerCaches } from "./sides.js";
import { type CreateAggregator, createSteps } from "./steps.js";

/** What a staged engine of a scene is made of. */
export interface StageOptions {
  /** Its `createStaging` copies between two memories of the transport. */
  readonly platform: Platform;
  readonly poolBlocks: number;
}

/** How `playScene` and `engineSuite` make engines. */
export interface SceneOptions {
  readonly connector: ConnectorModule;
  /** A new network: `sceneNetwork` of `@kv/transport-memory`, or one of your own. */
  readonly createNetwork: (seed: number) => SceneNetwork;
  /** `createWorkerOutputAggregator` of `@kv/connector`, or your engine's own. */
  readonly createWorkerOutputAggregator: CreateAggregator;
  /**
   * The connector behind host staging, as `staged` of `@kv/connector` makes it.
   * @default scenes have no staging
   */
  readonly stage?: ((options: StageOptions) => ConnectorModule) | undefined;
  /** `kv_connector_extra_config`. Its times must end within `endMs`. @default those of vLLM, short */
  readonly extra?: Readonly<Record<string, unknown>> | undefined;
  /** After so much time, nothing may wait for anything. @default 120_000 */
  readonly endMs?: number | undefined;
}

/** Leases, requests and blocks kept for a next turn end within `END_MS`. */
const EXTRA = { kv_lease_duration: 6, request_timeout: 15, decoder_kv_blocks_ttl: 20 };
const END_MS = 120_000;
/** Enough for whatever follows the last request of a scene in which nothing fails. */
const CALM_END_MS = 1000;
/** Enough for what an engine has sent before it closed. */
const CLOSED_MS = 10_000;
const ASLEEP_MS = 30;
/** The longest time of a copy between device and staging pool. */
const COPY_MS = 4;
const MAX_BLOCKS = Math.ceil(MAX_TOKENS / BLOCK_TOKENS);
const SIDES = ["prefill", "decode"] as const;

const READBACK = { bidirectional_kv_xfer: true, kv_recompute_threshold: 0 };
const MODEL: ModelIdentity = {
  model: "scene",
  vllmVersion: "0.33.0",
  connectorVersion: 15,
  isHmaEnabled: false,
  speculativeConfig: null,
};
const CONFIG: Omit<KvTransferConfig, "connector" | "sideChannelHost" | "extra"> = {
  role: "kv_both",
  loadFailurePolicy: "fail",
  enablePermuteLocalKv: false,
  sideChannelPort: 0,
  backends: [],
  env: {},
};

const PLATFORM: Platform = {
  deviceType: "cpu",
  capabilities: { registersAs: ["DRAM"], bufferDevices: ["cpu"], maxConcurrentBatches: 2 },
  kvCacheShape: ({ numBlocks, numKvHeads, blockSize, headSize }) => [
    numBlocks,
    numKvHeads,
    blockSize,
    2 * headSize,
  ],
  maxModelLen: readMaxModelLen,
  check: () => [],
};

type Side = (typeof SIDES)[number];
type Engine = Awaited<ReturnType<typeof openEngine>>;

/**
 * Plays a scene, and returns what must not happen: wrong bytes, a request that fails without a
 * cause or without a code, blocks that are written while nobody has them, and whatever is left.
 */
export async function playScene(scene: Scene, options: SceneOptions): Promise<readonly string[]> {
  const network = options.createNetwork(scene.seed);
  const { clock } = network;
  const found: string[] = [];
  const engines = new Map<Side, Engine>();
  const { events = [], notifications = NO_FAULTS, requests } = scene;
  const isDisturbed = events.length > 0 || notifications.lost > 0;
  // A last turn's blocks wait for one more.
  const waits = isDisturbed || readsBack(scene);
  const endMs = waits ? (options.endMs ?? END_MS) : CALM_END_MS;
  let isOver = false;

  const reach = (ms: number) =>
    new Promise<void>((resolve) => void clock.setTimer(resolve, Math.max(0, ms - clock.now())));
  const engineOf = (side: Side): Engine => engines.get(side) as Engine;

  async function open(side: Side): Promise<void> {
    const process = network.start(side);
    const transport = withNotificationFaults(process, () => (isOver ? NO_FAULTS : notifications));
    engines.set(side, await openEngine(side, process, transport, scene, options, found));
  }

  async function happen({ side, what }: SceneEvent): Promise<void> {
    const engine = engineOf(side);
    if (what === "restart") {
      await engine.kill();
      await open(side);
    } else if (engine.canSleep) {
      await engine.sleep();
      await reach(clock.now() + ASLEEP_MS);
      await engine.wakeUp();
    }
  }

  async function happenInOrder(): Promise<void> {
    for (const event of [...events].sort((one, other) => one.atMs - other.atMs)) {
      await reach(event.atMs);
      await happen(event);
    }
  }

  async function serve(request: SceneRequest, index: number): Promise<void> {
    const { atMs = 0, abortAfterMs } = request;
    await reach(atMs);
    let isGone = false;
    const abort = () => {
      isGone = true;
      for (const engine of engines.values()) for (const leg of LEGS) engine.abort(idOf(index, leg));
    };
    const timer = abortAfterMs === undefined ? undefined : clock.setTimer(abort, abortAfterMs);
    try {
      await handOver(request, index, scene, engineOf);
    } catch (error) {
      if (!KvError.is(error) || !(isDisturbed || isGone))
        found.push(`request ${index} ended with ${String(error)}`);
    }
    timer?.cancel();
  }

  function look(where: string, counts: Readonly<Record<string, number>>): void {
    for (const [name, count] of Object.entries(counts))
      if (count !== 0) found.push(`${where}: ${count} ${name} are left`);
  }

  try {
    await network.settle(Promise.all(SIDES.map(open)));
    await network.settle(Promise.all([...requests.map(serve), happenInOrder()]));
    await network.advance(endMs);
    isOver = true;
    // Whatever happened, the pair serves again.
    await network.settle(serve({ numTokens: 48 }, requests.length));
    await network.advance(endMs);
    for (const [side, engine] of engines) look(side, engine.outstanding());
    await network.settle(Promise.all([...engines.values()].map((engine) => engine.close())));
    await network.advance(CLOSED_MS);
    look("network", network.outstanding());
  } catch (error) {
    found.push(`something did not end: ${String(error)}`);
  }
  return found;
}

async function openEngine(
  side: Side,
  { clock, random, sideChannel, kill }: SceneProcess,
  transport: Transport,
  scene: Scene,
  options: SceneOptions,
  found: string[],
) {
  const at = SIDES.indexOf(side);
  const cache = configOf(scene, at);
  const [tpSize, dcpSize] = [scene.tp[at] ?? 1, scene.dcp?.[at] ?? 1];
  const ppSize = side === "prefill" ? (scene.stages ?? 1) : 1;
  const numBlocks = roomOf(scene, side) * MAX_BLOCKS;
  const hasStaging = scene.isStaged?.[at] === true && options.stage !== undefined;
  const connector = hasStaging
    ? options.stage({
        platform: copyPlatform(PLATFORM, { clock, next: () => random.next(), maxMs: COPY_MS }),
        poolBlocks: 1 + numBlocks * cache.groups.length,
      })
    : options.connector;
  const engine: EngineIdentity = {
    engineId: side,
    tpSize,
    ppSize,
    dcpSize,
    dpRank: 0,
    model: MODEL,
  };
  const ranks = createRanks({ transport, config: cache, tpSize, ppSize, dcpSize, numBlocks });
  const sides = await createSides({
    connector,
    engine,
    cache,
    transport,
    sideChannel,
    ranks,
    clock,
    random,
    platform: PLATFORM,
    staged: hasStaging,
    config: {
      ...CONFIG,
      connector: connector.name,
      sideChannelHost: side,
      extra: { ...(options.extra ?? EXTRA), ...(readsBack(scene) ? READBACK : {}) },
    },
  });
  await registerCaches(sides);
  const steps = createSteps(
    {
      hostName: side,
      engineId: side,
      tpSize,
      dcpSize,
      numBlocks,
      chunks: random,
      violation: (what) => void found.push(what),
    },
    sides,
    clock,
    options.createWorkerOutputAggregator,
  );
  return {
    ...steps,
    engineId: side,
    tpSize,
    dcpSize,
    ppSize,
    address: sides.address(),
    canSleep: sides.workers.every((worker) => worker.unregisterKvCaches !== undefined),
    async kill() {
      steps.die();
      await kill();
    },
    async close() {
      steps.stop();
      await sides.close();
    },
  };
}

const readsBack = ({ requests }: Scene) => requests.some(({ next }) => next !== undefined);

/**
 * How many of the longest prompts an engine has room for: few, so that requests wait. A D that
 * registers early or keeps a turn holds its room until P has had room too.
 */
function roomOf(scene: Scene, side: Side): number {
  if (readsBack(scene)) return 4 * MAX_REQUESTS;
  return side === "decode" && scene.requests.some(({ isEarly }) => isEarly) ? MAX_REQUESTS : 2;
}

function configOf(scene: Scene, side: number): KvCacheConfig {
  const { groups, cacheDtype = "auto", dcp, decodeTimes = 1 } = scene;
  const times = side === 1 ? decodeTimes : 1;
  let layers = 0;
  const kindOf = ({ isState, windowTokens }: SceneGroup) => {
    if (isState === true) return "mamba";
    if (windowTokens !== undefined) return "swa";
    return dcp === undefined ? "full" : "mla";
  };
  return {
    groups: groups.map((group) => ({
      kind: kindOf(group),
      layerNames: Array.from({ length: group.layers }, () => `layers.${layers++}`),
      slidingWindowTokens: group.windowTokens,
      numKvHeads: group.kvHeads,
      enableKvTransfer: group.isTransferred,
      blockSize: group.blockTokens * times,
    })),
    blockSize: BLOCK_TOKENS * times,
    physicalBlocksPerLogical: 1,
    numKvHeads: dcp === undefined ? 4 : 1,
    headSize: 2,
    numHiddenLayers: layers,
    dtype: "torch.float32",
    cacheDtype,
    layout: "LBHNC",
    attentionBackend: "SCENE",
    stateSpace: groups.some(({ isState }) => isState)
      ? stateSpaceOf(scene.tp[side] ?? 1)
      : undefined,
  };
}

const LEGS = ["a1", "d1", "a2", "d2"] as const;

/** The base id is equal at P and D: vLLM strips a suffix of 8 hexadecimal digits. */
const idOf = (index: number, leg: (typeof LEGS)[number]) => `cmpl-r${index}-0-000000${leg}`;

async function handOver(
  { numTokens, hitBlocks = 0, prefillHitBlocks = 0, isEarly, next }: SceneRequest,
  index: number,
  { groups, dcp }: Scene,
  engineOf: (side: Side) => Engine,
): Promise<void> {
  // A hit of a whole prompt is taken for one token less.
  const hit = (blocks: number, side: 0 | 1) => {
    const unit = BLOCK_TOKENS * (dcp?.[side] ?? 1);
    return Math.min(blocks, Math.floor((numTokens - 2) / unit)) * unit;
  };
  const turn = { prompt: index + 1, numTokens };
  const cachedTokens = hit(hitBlocks, 1);
  const lacks = groups.map(({ isState, isEvicted }) => isState === true || isEvicted === true);
  const produced = {
    ...turn,
    requestId: idOf(index, "a1"),
    cachedTokens: hit(prefillHitBlocks, 0),
  };
  const consumed = {
    ...turn,
    requestId: idOf(index, "d1"),
    cachedTokens,
    cachedByGroup: lacks.includes(true)
      ? lacks.map((isLost) => (isLost ? 0 : cachedTokens))
      : undefined,
  };
  const prefill = engineOf("prefill");
  if (isEarly) {
    const params = coordinatesOf(prefill, `cmpl-r${index}-0`);
    const legs = [engineOf("decode").decode({ ...consumed, params }), prefill.prefill(produced)];
    const failed = (await Promise.allSettled(legs)).find(({ status }) => status === "rejected");
    if (failed?.status === "rejected") throw failed.reason;
    return;
  }

  const { outputTokens = 1, newTokens = 0 } = next ?? {};
  const first = await prefill.prefill(produced);
  const params = await engineOf("decode").decode({ ...consumed, outputTokens, params: first });
  if (next === undefined) return;
  const longer = { ...turn, numTokens: numTokens + outputTokens + newTokens };
  const last = await engineOf("prefill").prefill({
    ...longer,
    requestId: idOf(index, "a2"),
    cachedTokens: hit(next.hitBlocks, 0),
    params,
  });
  await engineOf("decode").decode({ ...longer, requestId: idOf(index, "d2"), params: last });
}

/** What a proxy knows before P has answered. */
export function coordinatesOf(
  {
    engineId,
    address,
    tpSize,
    dcpSize = 1,
    ppSize = 1,
  }: {
    readonly engineId: string;
    readonly address: { readonly host: string; readonly port: number };
    readonly tpSize: number;
    readonly dcpSize?: number;
    readonly ppSize?: number;
  },
  requestId: string,
): KvTransferParams {
  return {
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_engine_id: engineId,
    remote_request_id: requestId,
    remote_host: address.host,
    remote_port: address.port,
    tp_size: tpSize,
    ...(dcpSize === 1 ? {} : { dcp_size: dcpSize }),
    ...(ppSize === 1 ? {} : { pp_size: ppSize }),
  };
}

/** Stages through a second memory of the transport, by copies that take up to `maxMs`. */
function copyPlatform(
  platform: Platform,
  {
    clock,
    next,
    maxMs,
  }: { readonly clock: Clock; readonly next: () => number; readonly maxMs: number },
): Platform {
  const wait = () => new Promise<void>((resolve) => void clock.setTimer(resolve, next() * maxMs));
  const block = ({ memory, blockLengthBytes }: KvCacheRegion, id: number) =>
    memory.bytes.subarray(id * blockLengthBytes, (id + 1) * blockLengthBytes);

  return {
    ...platform,
    async createStaging({ transport, caches, poolBlocks }) {
      const memories = caches.regions.map(({ blockLengthBytes }) =>
        transport.allocate(poolBlocks * blockLengthBytes),
      );
      for (const memory of memories) memory.bytes.fill(0x5a);
      const wireCaches: KvCaches = {
        ...caches,
        regions: caches.regions.map((region, index) => ({
          ...region,
          memory: memories[index] ?? region.memory,
          numBlocks: poolBlocks,
        })),
      };
      async function copy({ device, wire }: StagedBlocks, toPool: boolean) {
        await wait();
        for (const [index, region] of caches.regions.entries()) {
          const pool = wireCaches.regions[index] ?? region;
          for (const [at, id] of (device[region.groupId] ?? []).entries()) {
            const [onDevice, inPool] = [
              block(region, id),
              block(pool, wire[region.groupId]?.[at] ?? -1),
            ];
            if (toPool) inPool.set(onDevice);
            else onDevice.set(inPool);
          }
        }
      }
      return {
        wireCaches,
        save: (_, blocks) => copy(blocks, true),
        load: (_, blocks) => copy(blocks, false),
        async close() {
          for (const memory of memories) memory.close();
        },
      };
    },
  };
}
