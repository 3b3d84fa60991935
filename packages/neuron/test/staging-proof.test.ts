import type { KvCacheConfig, Staging } from "@kv/interface";
import { buildEngineTransferPlan, type RankGeometry } from "@kv/plan";
import { proveEnginePlans } from "@kv/plan/prove";
import { memoryTransport, seededRandom } from "@kv/transport-memory";
import { afterEach, beforeEach, describe, expect, test } from "vitest";
import { localGeometry, modelGeometry } from "../../connector/src/handshake/rank-geometry.js";
import { neuronCaches, neuronPlatform, simulatedDevice } from "../src/index.js";
import { CONFIG } from "./config.js";

const HEADS = 4;
const POOL_BLOCKS = 12;
const config = (blockSize: number): KvCacheConfig => ({ ...CONFIG, blockSize, numKvHeads: HEADS });

let transport = memoryTransport();
let device = simulatedDevice();
let opened: Staging[] = [];
beforeEach(() => {
  transport = memoryTransport();
  device = simulatedDevice();
});
afterEach(async () => {
  await Promise.all(opened.map((staging) => staging.close()));
  opened = [];
  await transport.close();
  await device.close();
});

async function openStaging(tpSize: number, blockSize: number) {
  const given = config(blockSize);
  const caches = neuronCaches({ device, config: given, numBlocks: 20, numHeads: HEADS / tpSize });
  const options = { transport, config: given, caches, poolBlocks: POOL_BLOCKS };
  const staging = await neuronPlatform().createStaging?.(options);
  if (staging?.layout === undefined) throw new Error("the staging has a layout");
  opened.push(staging);
  return { ...staging, caches, layout: staging.layout };
}

/** An engine with staging: the geometry that its ranks announce, and the layout of its copies. */
async function engine(tpSize: number, blockSize: number) {
  const { wireCaches, layout } = await openStaging(tpSize, blockSize);
  const ranks = Array.from({ length: tpSize }, (_, tpRank) =>
    localGeometry(wireCaches, { tpRank, tpSize }),
  );
  return { ranks, layout, blockSize };
}

/** Ranks that have a KV head in common. */
function shareHeads(one: RankGeometry, other: RankGeometry): boolean {
  const heads = ({ tpRank, tpSize }: RankGeometry) => [
    (tpRank * HEADS) / tpSize,
    ((tpRank + 1) * HEADS) / tpSize,
  ];
  const [[from = 0, to = 0], [begin = 0, end = 0]] = [heads(one), heads(other)];
  return from < end && begin < to;
}

const PAIRS = [
  { p: [1, 16], d: [1, 16] },
  { p: [2, 16], d: [1, 16] },
  { p: [1, 16], d: [2, 32] },
  { p: [4, 32], d: [2, 16] },
] as const;

describe.each(["decode reads prefill", "prefill reads decode"])("plans: %s", (direction) => {
  test.each(PAIRS)("are proven from device to device: TP and block $p → $d", async ({ p, d }) => {
    const [prefill, decode] = [await engine(p[0], p[1]), await engine(d[0], d[1])];
    const [local, remote] =
      direction === "decode reads prefill" ? [decode, prefill] : [prefill, decode];
    const plans = local.ranks.map((rank) =>
      buildEngineTransferPlan({
        ...modelGeometry(config(local.blockSize)),
        local: rank,
        remotes: remote.ranks.filter((other) => shareHeads(rank, other)),
      }),
    );
    const staging = { local: local.layout, remote: remote.layout };
    const proof = { remotes: remote.ranks, numKvHeads: HEADS, staging };
    expect(proveEnginePlans(plans, proof)).toMatchObject({ proven: true });
  });
});

test("the layout describes the copies byte for byte, in both directions", async () => {
  const { caches, layout, wireCaches, save, load } = await openStaging(1, 16);
  const named = ({ regions }: typeof caches, name: string) =>
    regions.find((region) => region.name === name) ?? expect.fail(name);

  const random = seededRandom("stage");
  const filled = new Map<string, Uint8Array>();
  for (const region of caches.regions) {
    const bytes = Uint8Array.from({ length: region.blockLengthBytes }, () =>
      Math.floor(random.next() * 256),
    );
    filled.set(region.name, bytes);
    const run = Float64Array.of(region.offsetBytes + 3 * region.blockStrideBytes, bytes.length);
    await region.memory.scatter(run, bytes.slice().buffer);
  }
  await save("r", { device: [[3]], wire: [[2]] });
  await load("r", { device: [[1]], wire: [[2]] });
  for (const copy of layout.copies) {
    const { name, region } = layout.planes[copy.plane] ?? expect.fail("a plane");
    const onDevice = filled.get(name) ?? expect.fail(name);
    const inPool = named(wireCaches, region);
    const block = inPool.memory.bytes.subarray(inPool.offsetBytes + 2 * inPool.blockStrideBytes);
    for (let piece = 0; piece < copy.count; piece++) {
      const from = copy.deviceOffsetBytes + piece * copy.deviceStrideBytes;
      const to = copy.wireOffsetBytes + piece * copy.wireStrideBytes;
      expect(block.slice(to, to + copy.lengthBytes)).toEqual(
        onDevice.slice(from, from + copy.lengthBytes),
      );
    }
  }
  for (const [name, bytes] of filled) {
    const region = named(caches, name);
    const run = Float64Array.of(region.offsetBytes + region.blockStrideBytes, bytes.length);
    expect(new Uint8Array(await region.memory.gather(run))).toEqual(bytes);
  }
});
