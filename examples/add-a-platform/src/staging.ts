import {
  type KvCacheRegion,
  KvError,
  type StagedBlocks,
  type Staging,
  type StagingOptions,
} from "@kv/interface";

export async function createBrickStaging(options: StagingOptions): Promise<Staging> {
  const { transport, config, caches, poolBlocks } = options;
  const pairs = caches.regions.map((device) => {
    const memory = transport.allocate(poolBlocks * device.blockLengthBytes);
    const host: KvCacheRegion = {
      ...device,
      memory,
      offsetBytes: 0,
      numBlocks: poolBlocks,
      blockStrideBytes: device.blockLengthBytes,
      memoryType: memory.memoryType,
    };
    return { device, host };
  });

  async function copy(requestId: string, blocks: StagedBlocks, toHost: boolean): Promise<void> {
    try {
      for (const { device, host } of pairs) {
        const onDevice = runs(device, blocks.device[device.groupId] ?? []);
        const inPool = runs(host, blocks.wire[device.groupId] ?? []);
        if (toHost) await host.memory.scatter(inPool, await device.memory.gather(onDevice));
        else await device.memory.scatter(onDevice, await host.memory.gather(inPool));
      }
    } catch (cause) {
      throw KvError.from(cause, "KV_STAGING_FAILED", `copying the blocks of request ${requestId}`);
    }
  }

  return {
    wireCaches: { config, regions: pairs.map(({ host }) => host) },
    save: (requestId, blocks) => copy(requestId, blocks, true),
    load: (requestId, blocks) => copy(requestId, blocks, false),
    async close() {
      for (const { host } of pairs) host.memory.close();
    },
  };
}

function runs(
  { offsetBytes, numBlocks, blockStrideBytes, blockLengthBytes }: KvCacheRegion,
  ids: readonly number[],
): Float64Array {
  const bad = ids.find((id) => !Number.isSafeInteger(id) || id < 0 || id >= numBlocks);
  if (bad !== undefined)
    throw new KvError("KV_STAGING_FAILED", `block ${bad} is not one of ${numBlocks}`);
  return Float64Array.from(
    ids.flatMap((id) => [offsetBytes + id * blockStrideBytes, blockLengthBytes]),
  );
}
