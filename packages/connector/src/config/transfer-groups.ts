import { type KvCacheConfig, type KvCaches, KvError } from "@kv/interface";
import { cacheKind } from "@kv/plan";
import { prefillBackoff } from "./prefill-backoff.js";

/** The KV cache groups that peers exchange. */
export interface TransferGroups {
  /** The wire uses a group's index in this list (vLLM 0.33: `transfer_group_ids`). */
  readonly ids: readonly number[];
  readonly config: KvCacheConfig;
  /**
   * Picks these groups' values.
   * @throws `KV_INTERNAL` for another number of values.
   */
  select<T>(given: readonly T[]): readonly T[];
}

/**
 * Undefined where peers exchange all groups of the cache.
 * @throws `KV_CONFIG_INVALID` where they exchange none.
 */
export function transferGroups(config: KvCacheConfig): TransferGroups | undefined {
  const ids = [...config.groups.keys()].filter(
    (group) => config.groups[group]?.enableKvTransfer !== false,
  );
  if (ids.length === config.groups.length) return undefined;
  if (ids.length === 0) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "enableKvTransfer is false for every group of the KV cache",
      {
        hint: "leave the connector out, or let peers exchange at least one group",
      },
    );
  }
  const groups = config.groups.filter((_, group) => ids.includes(group));
  const hasState = groups.some(({ kind }) => cacheKind(kind).extent === "state");
  const backoff = prefillBackoff(config)?.tokens;
  const { stateSpace, ...rest } = config;
  return {
    ids,
    config: {
      ...rest,
      groups,
      ...(hasState && stateSpace !== undefined ? { stateSpace } : {}),
      // A state that no peer exchanges still decides which tokens D computes.
      ...(backoff === undefined ? {} : { prefillBackoffTokens: backoff }),
    },
    select(given) {
      if (given.length !== config.groups.length) {
        throw new KvError(
          "KV_INTERNAL",
          `the engine passed values for ${given.length} KV cache groups, its cache has ${config.groups.length}`,
        );
      }
      return given.filter((_, group) => ids.includes(group));
    },
  };
}

/** @throws As `transferGroups`. */
export function transferredCaches(caches: KvCaches): KvCaches {
  const transferred = transferGroups(caches.config);
  if (transferred === undefined) return caches;
  const { ids, config } = transferred;
  const regions = caches.regions.flatMap((region) => {
    if (region.groupId >= 0) {
      const groupId = ids.indexOf(region.groupId);
      return groupId < 0 ? [] : [{ ...region, groupId }];
    }
    if (region.groupIds === undefined) return [region];
    const groupIds = region.groupIds
      .map((group) => ids.indexOf(group))
      .filter((group) => group >= 0);
    return groupIds.length === 0 ? [] : [{ ...region, groupIds }];
  });
  return { config, regions };
}
