import { type BlockIds, type KvCacheConfig, type KvCaches, KvError } from "@kv/interface";
import { cacheKind } from "@kv/plan";
import { prefillBackoff } from "./scheduler/prefill-backoff.js";

/** The ids of the KV cache groups that peers exchange (vLLM 0.33: `transfer_group_ids`). On the wire, a group's id is its index in this list. */
function transferGroupIds({ groups }: Pick<KvCacheConfig, "groups">): readonly number[] {
  return [...groups.keys()].filter((group) => groups[group]?.enableKvTransfer !== false);
}

/** The cache with the groups that peers exchange alone. Errors: `KV_CONFIG_INVALID` for a cache without such a group. */
export function transferredConfig(config: KvCacheConfig): KvCacheConfig {
  const ids = transferGroupIds(config);
  if (ids.length === config.groups.length) return config;
  if (ids.length === 0) {
    throw new KvError("KV_CONFIG_INVALID", "enableKvTransfer is false for every group of the KV cache", {
      hint: "leave the connector out, or let peers exchange at least one group",
    });
  }
  const groups = config.groups.filter((_, group) => ids.includes(group));
  const hasState = groups.some(({ kind }) => cacheKind(kind).extent === "state");
  const backoff = prefillBackoff(config)?.tokens;
  const { stateSpace, ...rest } = config;
  return {
    ...rest,
    groups,
    ...(hasState && stateSpace !== undefined ? { stateSpace } : {}),
    // A state that no peer exchanges decides all the same which tokens D computes.
    ...(backoff === undefined ? {} : { prefillBackoffTokens: backoff }),
  };
}

/** The caches of the groups that peers exchange. Errors: as `transferredConfig`. */
export function transferredCaches(caches: KvCaches): KvCaches {
  const config = transferredConfig(caches.config);
  if (config === caches.config) return caches;
  const ids = transferGroupIds(caches.config);
  const regions = caches.regions.flatMap((region) => {
    if (region.groupId >= 0) {
      const groupId = ids.indexOf(region.groupId);
      return groupId < 0 ? [] : [{ ...region, groupId }];
    }
    if (region.groupIds === undefined) return [region];
    const groupIds = region.groupIds.map((group) => ids.indexOf(group)).filter((group) => group >= 0);
    return groupIds.length === 0 ? [] : [{ ...region, groupIds }];
  });
  return { config, regions };
}

/** The block lists of the groups that peers exchange. Errors: `KV_INTERNAL` where the engine lists another number of groups. */
export function transferredBlocks(blockIds: BlockIds, config: KvCacheConfig): BlockIds {
  if (config.groups.every(({ enableKvTransfer }) => enableKvTransfer !== false)) return blockIds;
  return ofTransferredGroups(blockIds, config);
}

/** What the engine has given for each group, of the groups that peers exchange. Errors: `KV_INTERNAL` for another number of groups. */
export function ofTransferredGroups<T>(given: readonly T[], config: KvCacheConfig): readonly T[] {
  if (given.length !== config.groups.length) {
    throw new KvError(
      "KV_INTERNAL",
      `the engine passed values for ${given.length} KV cache groups, its cache has ${config.groups.length}`,
    );
  }
  const ids = transferGroupIds(config);
  return given.filter((_, group) => ids.includes(group));
}
