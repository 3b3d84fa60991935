import {
  type KvCacheRegion,
  type KvCaches,
  KvError,
  type Memory,
  type StagedBlocks,
  type Staging,
  type StagingOptions,
} from "@kv/interface";
import { type LayerPlanes, layersOf, rowLengthBytes } from "./caches.js";
import { createLanes } from "./lanes.js";
import { type PlaneGeometry, type PlaneRuns, planeRuns } from "./relayout.js";
import { stageOf } from "./stage.js";

const NO_RUNS = new Float64Array(0);
const PAGE_BYTES = 4096;
/** Of a copy between device and host. */
const PIECE_BYTES = 4 << 20;
/** Copies of requests at once, the others in the order of arrival; each has two pieces under way, so that bus and processor both work. */
const LANES = 2;

/**
 * A pool with one region per layer, K and V of a head and token side by side, as vLLM's peers have it, in one page-aligned allocation. Besides it
 * four pieces of 4 MiB (or of one block of a plane, where that is more) are under way at most. Errors: `KV_PLATFORM_UNSUPPORTED` for caches without K and V
 * apart.
 */
export async function createNeuronStaging(options: StagingOptions): Promise<Staging> {
  const { transport, config, caches, poolBlocks } = options;
  const layers = layersOf(caches);
  const rowBytes = rowLengthBytes(config);
  let end = 0;
  const places = layers.map(({ key }) => {
    const offsetBytes = Math.ceil(end / PAGE_BYTES) * PAGE_BYTES;
    end = offsetBytes + poolBlocks * 2 * key.blockLengthBytes;
    return offsetBytes;
  });
  const pool = transport.allocate(Math.ceil(end / PAGE_BYTES) * PAGE_BYTES);
  const regions = layers.map(({ name, key }, index): KvCacheRegion => {
    const blockLengthBytes = 2 * key.blockLengthBytes;
    return {
      name,
      memory: pool,
      offsetBytes: places[index] ?? 0,
      numBlocks: poolBlocks,
      blockLengthBytes,
      blockStrideBytes: blockLengthBytes,
      groupId: key.groupId,
      memoryType: pool.memoryType,
    };
  });
  const wireCaches: KvCaches = { config, regions };
  const lanes = createLanes(LANES);

  async function copy(requestId: string, blocks: StagedBlocks, toPool: boolean): Promise<void> {
    const leave = await lanes.enter();
    try {
      const pieces = [...piecesOf(layers, regions, rowBytes, blocks)];
      await (toPool ? toHost(pieces, pool) : toDevice(pieces, pool));
    } catch (cause) {
      if (KvError.is(cause, "KV_STAGING_FAILED")) throw cause;
      const error = KvError.from(cause, "KV_STAGING_FAILED", "the copy failed");
      const what = toPool ? "from the device to the pool" : "from the pool to the device";
      throw new KvError(
        "KV_STAGING_FAILED",
        `copying blocks of request ${requestId} ${what}: ${error.message}`,
        { cause },
      );
    } finally {
      leave();
    }
  }

  return {
    wireCaches,
    stage: stageOf(layers, rowBytes),
    save: (requestId, blocks) => copy(requestId, blocks, true),
    load: (requestId, blocks) => copy(requestId, blocks, false),
    async close() {
      pool.close();
    },
  };
}

interface Piece {
  readonly device: Memory;
  readonly runs: PlaneRuns;
}

/** The copies of a request, each of some blocks of one plane of one layer. */
function* piecesOf(
  layers: readonly LayerPlanes[],
  regions: readonly KvCacheRegion[],
  rowBytes: number,
  { device, wire }: StagedBlocks,
): Iterable<Piece> {
  for (const [index, layer] of layers.entries()) {
    const region = regions[index];
    if (region === undefined) continue;
    const { groupId } = layer.key;
    const [deviceIds, wireIds] = [device[groupId] ?? [], wire[groupId] ?? []];
    requireBlocks(layer, region, deviceIds, wireIds);
    for (const [half, plane] of [layer.key, layer.value].entries()) {
      const geometry: PlaneGeometry = {
        deviceOffsetBytes: plane.offsetBytes,
        deviceStrideBytes: plane.blockStrideBytes,
        wireOffsetBytes: region.offsetBytes,
        wireStrideBytes: region.blockStrideBytes,
        blockLengthBytes: plane.blockLengthBytes,
        rowBytes,
        half: half === 0 ? 0 : 1,
      };
      const most = Math.max(1, Math.floor(PIECE_BYTES / plane.blockLengthBytes));
      for (let at = 0; at < deviceIds.length; at += most) {
        yield {
          device: plane.memory,
          runs: planeRuns(geometry, deviceIds.slice(at, at + most), wireIds.slice(at, at + most)),
        };
      }
    }
  }
}

/** While one piece is put in its place in the pool, the next one is on the device's bus. */
async function toHost(pieces: readonly Piece[], pool: Memory): Promise<void> {
  const read = (index: number) => quiet(pieces[index]?.device.gather(pieces[index]?.runs.device ?? NO_RUNS));
  let reading = read(0);
  let placing: Promise<void> | undefined;
  try {
    for (const [index, { runs }] of pieces.entries()) {
      const bytes = await reading;
      await placing;
      reading = read(index + 1);
      if (bytes !== undefined) placing = quiet(pool.scatter(runs.wire, bytes));
    }
  } finally {
    // Nothing is left under way, whatever failed: the blocks have other owners next.
    await Promise.allSettled([reading, placing]);
  }
  await placing;
}

async function toDevice(pieces: readonly Piece[], pool: Memory): Promise<void> {
  const read = (index: number) => quiet(pieces[index] && pool.gather(pieces[index].runs.wire));
  let reading = read(0);
  let writing: Promise<void> | undefined;
  try {
    for (const [index, { device, runs }] of pieces.entries()) {
      const bytes = await reading;
      await writing;
      reading = read(index + 1);
      if (bytes !== undefined) writing = quiet(device.scatter(runs.device, bytes));
    }
  } finally {
    await Promise.allSettled([reading, writing]);
  }
  await writing;
}

/** Its failure is seen where it is awaited, which may be later than the event loop likes. */
function quiet<T>(promise: Promise<T> | undefined): Promise<T> | undefined {
  promise?.catch(() => {});
  return promise;
}

function requireBlocks(
  { name, key }: LayerPlanes,
  region: KvCacheRegion,
  deviceIds: readonly number[],
  wireIds: readonly number[],
): void {
  const inside = (numBlocks: number, least: number) => (id: number) =>
    Number.isSafeInteger(id) && id >= least && id < numBlocks;
  const badDevice = deviceIds.find((id) => !inside(key.numBlocks, 0)(id));
  const badWire = wireIds.find((id) => !inside(region.numBlocks, 1)(id));
  if (deviceIds.length === wireIds.length && badDevice === undefined && badWire === undefined) return;
  const problem =
    badDevice !== undefined
      ? `device block ${badDevice} is not one of ${key.numBlocks}`
      : badWire !== undefined
        ? `pool block ${badWire} is not one of 1 to ${region.numBlocks - 1}`
        : `${deviceIds.length} device blocks and ${wireIds.length} pool blocks`;
  throw new KvError("KV_STAGING_FAILED", `layer ${name}: ${problem}`);
}
