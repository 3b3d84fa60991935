import {
  type KvCacheRegion,
  type KvCaches,
  KvError,
  type Memory,
  type StagedBlocks,
  type Staging,
  type StagingOptions,
} from "@kv/interface";
import { deviceLayers, type LayerPlanes, rowLengthBytes } from "./neuron-caches.js";
import { type PlaneGeometry, type PlaneRuns, planeRuns } from "./relayout.js";
import { stagingLayout } from "./staging-layout.js";

const PAGE_BYTES = 4096;
/** The most bytes in a copy, unless one block of a plane is larger. */
const PIECE_BYTES = 4 << 20;
/**
 * Others wait in order of arrival. Two pieces of each are in progress, to keep both the bus and the
 * processor busy.
 */
const CONCURRENT_REQUESTS = 2;

/**
 * Creates the pool: one region per layer in one page-aligned allocation. It packs K and V of a head
 * and token, as vLLM's peers do. Host memory also holds up to four pieces of 4 MiB, or of one block
 * of a plane where that is larger.
 * @throws `KV_PLATFORM_UNSUPPORTED` for caches that do not store K and V of a layer in separate
 * regions.
 */
export async function createNeuronStaging(
  options: StagingOptions,
): Promise<Staging & AsyncDisposable> {
  const { transport, config, caches, poolBlocks } = options;
  const layers = deviceLayers(caches);
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
  const waiting: (() => void)[] = [];
  let running = 0;

  async function copy(requestId: string, blocks: StagedBlocks, toPool: boolean): Promise<void> {
    if (running < CONCURRENT_REQUESTS) running += 1;
    else await new Promise<void>((resolve) => void waiting.push(resolve));
    try {
      const pieces = [...piecesOf(layers, regions, rowBytes, blocks)];
      if (toPool)
        await copyPieces(
          pieces,
          ({ device, runs }) => device.gather(runs.device),
          ({ runs }, bytes) => pool.scatter(runs.wire, bytes),
        );
      else
        await copyPieces(
          pieces,
          ({ runs }) => pool.gather(runs.wire),
          ({ device, runs }, bytes) => device.scatter(runs.device, bytes),
        );
    } catch (cause) {
      if (KvError.is(cause, "KV_STAGING_FAILED")) throw cause;
      const error = KvError.from(cause, "KV_STAGING_FAILED", "the copy failed");
      const direction = toPool ? "from the device to the pool" : "from the pool to the device";
      throw new KvError(
        "KV_STAGING_FAILED",
        `copying blocks of request ${requestId} ${direction}: ${error.message}`,
        { cause },
      );
    } finally {
      // The next one takes the place at once: no later request may overtake it.
      const next = waiting.shift();
      if (next === undefined) running -= 1;
      else next();
    }
  }

  const close = async (): Promise<void> => pool.close();
  return {
    wireCaches,
    layout: stagingLayout(layers, rowBytes),
    save: (requestId, blocks) => copy(requestId, blocks, true),
    load: (requestId, blocks) => copy(requestId, blocks, false),
    close,
    [Symbol.asyncDispose]: close,
  };
}

interface Piece {
  readonly device: Memory;
  readonly runs: PlaneRuns;
}

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
      const maxBlocks = Math.max(1, Math.floor(PIECE_BYTES / plane.blockLengthBytes));
      for (let at = 0; at < deviceIds.length; at += maxBlocks) {
        yield {
          device: plane.memory,
          runs: planeRuns(
            geometry,
            deviceIds.slice(at, at + maxBlocks),
            wireIds.slice(at, at + maxBlocks),
          ),
        };
      }
    }
  }
}

/** Reads the next piece while it writes the current one. */
async function copyPieces(
  pieces: readonly Piece[],
  read: (piece: Piece) => Promise<ArrayBuffer>,
  write: (piece: Piece, bytes: ArrayBuffer) => Promise<unknown>,
): Promise<void> {
  const readPiece = (index: number) => markHandled(pieces[index] && read(pieces[index]));
  let reading = readPiece(0);
  let writing: Promise<unknown> | undefined;
  try {
    for (const [index, piece] of pieces.entries()) {
      const bytes = await reading;
      await writing;
      reading = readPiece(index + 1);
      if (bytes !== undefined) writing = markHandled(write(piece, bytes));
    }
  } finally {
    // Wait for every copy, even after a failure: afterwards the blocks may get other owners.
    await Promise.allSettled([reading, writing]);
  }
  await writing;
}

/** The promise is awaited later; its error is thrown there. */
function markHandled<T>(promise: Promise<T> | undefined): Promise<T> | undefined {
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
  if (deviceIds.length === wireIds.length && badDevice === undefined && badWire === undefined)
    return;
  const problem =
    badDevice !== undefined
      ? `device block ${badDevice} is not one of ${key.numBlocks}`
      : badWire !== undefined
        ? `pool block ${badWire} is not one of 1 to ${region.numBlocks - 1}`
        : `${deviceIds.length} device blocks and ${wireIds.length} pool blocks`;
  throw new KvError("KV_STAGING_FAILED", `layer ${name}: ${problem}`);
}
