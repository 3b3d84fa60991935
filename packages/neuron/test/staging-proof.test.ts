import type { KvCacheConfig, Staging, StagingLayout } from "@kv/interface";
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

async function openStaging(tpSize: number, blockSize: number): Promise<Staging> {
  const given = config(blockSize);
  const caches = neuronCaches({ device, config: given, numBlocks: 20, numHeads: HEADS / tpSize });
  const staging = await neuronPlatform().createStaging?.({
    transport,
    config: given,
    caches,
    poolBlocks: POOL_BLOCKS,
  });
  if (staging === undefined) throw new Error("the platform stages");
  opened.push(staging);
  return staging;
}

/** An engine with staging: the geometry that its ranks announce, and the layout of its copies. */
async function engine(tpSize: number, blockSize: number) {
  const ranks: RankGeometry[] = [];
  let layout: StagingLayout | undefined;
  for (let tpRank = 0; tpRank < tpSize; tpRank++) {
    const staging = await openStaging(tpSize, blockSize);
    ranks.push(localGeometry(staging.wireCaches, { tpRank, tpSize }));
    layout = staging.layout;
  }
  if (layout === undefined) throw new Error("the staging has a layout");
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
    const prove = (staging: { local: StagingLayout; remote: StagingLayout }) =>
      proveEnginePlans(plans, { remotes: remote.ranks, numKvHeads: HEADS, staging });
    expect(prove({ local: local.layout, remote: remote.layout })).toMatchObject({ proven: true });
    // Swap K and V: the proof must fail.
    const planes = local.layout.planes.map((plane, index) => ({
      ...plane,
      cellBeginBytes: local.layout.planes[index ^ 1]?.cellBeginBytes ?? -1,
    }));
    const swapped = prove({ local: { ...local.layout, planes }, remote: remote.layout });
    expect(swapped).toMatchObject({ proven: false, fault: { kind: "stage" } });
  });
});

test("the layout describes the copies byte for byte, in both directions", async () => {
  const given = config(16);
  const caches = neuronCaches({ device, config: given, numBlocks: 4, numHeads: HEADS });
  const staging = await neuronPlatform().createStaging?.({
    transport,
    config: given,
    caches,
    poolBlocks: 4,
  });
  if (staging?.layout === undefined) throw new Error("the staging has a layout");
  opened.push(staging);
  const { layout, wireCaches } = staging;
  const plane = (name: string) =>
    caches.regions.find((region) => region.name === name) ?? expect.fail(name);
  const wire = (name: string) =>
    wireCaches.regions.find((region) => region.name === name) ?? expect.fail(name);

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
  await staging.save("r", { device: [[3]], wire: [[2]] });
  await staging.load("r", { device: [[1]], wire: [[2]] });
  for (const copy of layout.copies) {
    const { name, region } = layout.planes[copy.plane] ?? expect.fail("a plane");
    const onDevice = filled.get(name) ?? expect.fail(name);
    const inPool = wire(region);
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
    const region = plane(name);
    const run = Float64Array.of(region.offsetBytes + region.blockStrideBytes, bytes.length);
    expect(new Uint8Array(await region.memory.gather(run))).toEqual(bytes);
  }
});
