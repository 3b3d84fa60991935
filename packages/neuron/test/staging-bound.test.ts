import type { KvCacheConfig, Memory, StagedBlocks, Transport } from "@kv/interface";
import { memoryTransport } from "@kv/transport-memory";
import { expect, test } from "vitest";
import { neuronCaches, neuronPlatform, simulatedDevice } from "../src/index.js";
import { CONFIG } from "./config.js";

const MIB = 2 ** 20;
const REQUESTS = 6;
const BLOCKS = 32;

/** A block of a plane has 256 KiB, so a piece of 4 MiB has 16 blocks. */
const config: KvCacheConfig = {
  ...CONFIG,
  groups: [{ kind: "full", layerNames: ["layers.0"] }],
  numHiddenLayers: 1,
  numKvHeads: 8,
  headSize: 1024,
};

/** Counts the bytes that have left one memory and not reached the other. */
function watched() {
  let bytes = 0;
  let mostBytes = 0;
  const watch = (memory: Memory): Memory => ({
    ...memory,
    async gather(runs) {
      let total = 0;
      for (let row = 1; row < runs.length; row += 2) total += runs[row] ?? 0;
      bytes += total;
      mostBytes = Math.max(mostBytes, bytes);
      return memory.gather(runs);
    },
    async scatter(runs, source) {
      const { byteLength } = source;
      const written = await memory.scatter(runs, source);
      bytes -= byteLength;
      return written;
    },
  });
  return { watch, most: () => mostBytes, now: () => bytes };
}

test("six concurrent requests use no more host memory than the pool and four pieces", async () => {
  const inside = memoryTransport();
  const counted = watched();
  const pools: number[] = [];
  const transport: Transport = {
    ...inside,
    allocate(lengthBytes, options) {
      pools.push(lengthBytes);
      return counted.watch(inside.allocate(lengthBytes, options));
    },
  };
  const real = simulatedDevice({ bytesPerMs: 2 ** 22 });
  // The `bytes` getter of device memory throws, so the object cannot be copied with spread syntax.
  const device = {
    ...real,
    allocate(lengthBytes: number): Memory {
      const memory = real.allocate(lengthBytes);
      return counted.watch(plain(memory));
    },
  };
  const caches = neuronCaches({ device, config, numBlocks: BLOCKS, numHeads: 8 });
  const poolBlocks = 1 + REQUESTS * BLOCKS;
  const staging = await neuronPlatform().createStaging?.({ transport, config, caches, poolBlocks });
  if (staging === undefined) throw new Error("the platform stages");
  expect(pools).toEqual([poolBlocks * 512 * 1024]);

  const blocks = (request: number): StagedBlocks => ({
    device: [Array.from({ length: BLOCKS }, (_, i) => i)],
    wire: [Array.from({ length: BLOCKS }, (_, i) => 1 + request * BLOCKS + i)],
  });
  const each = Array.from({ length: REQUESTS }, (_, request) => request);
  await Promise.all(each.map((request) => staging.save(`s${request}`, blocks(request))));
  await Promise.all(each.map((request) => staging.load(`l${request}`, blocks(request))));
  expect(counted.now()).toBe(0);
  expect(counted.most()).toBeLessThanOrEqual(4 * 4 * MIB);
  // The copies overlap: two pieces of each of two requests.
  expect(counted.most()).toBe(4 * 4 * MIB);
  expect(pools).toHaveLength(1);
  await staging.close();
  await inside.close();
  await device.close();
});

function plain(memory: Memory): Memory {
  const { address, lengthBytes, memoryType, deviceId } = memory;
  return {
    address,
    lengthBytes,
    memoryType,
    deviceId,
    bytes: new Uint8Array(0),
    view: (offsetBytes, viewBytes) => memory.view(offsetBytes, viewBytes),
    gather: (runs) => memory.gather(runs),
    scatter: (runs, source) => memory.scatter(runs, source),
    close: () => memory.close(),
  };
}
