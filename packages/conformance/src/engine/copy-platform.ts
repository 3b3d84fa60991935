import type { Clock, KvCacheRegion, KvCaches, Platform, StagedBlocks } from "@kv/interface";

/** Stages through a second memory of the transport, by copies that take up to `maxMs`. */
export function copyPlatform(
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
