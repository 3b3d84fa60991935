import type { KvCacheKind } from "@kv/interface";
import { modelCaches } from "../model/model-caches.js";
import { kindOf } from "./pair-from-model.js";
import { nameOf, readJson } from "./read-pair.js";

/** The KV cache groups of a model, in vLLM's order. */
export interface ConfiguredGroups {
  /** The file that says so. */
  readonly from: string;
  /** Kind of each group. */
  readonly kinds: readonly KvCacheKind[];
  /** Names of each group's layers. */
  readonly layers: readonly (readonly string[])[];
}

/**
 * The groups that vLLM 0.33 makes of the layers of a model with this `config.json`, on one rank. Errors: `KV_CONFIG_INVALID` for a file that cannot be read or has a wrong
 * field; `KV_PLAN_UNSUPPORTED` for an architecture that the rules do not know.
 */
export async function groupsOfConfig(file: string): Promise<ConfiguredGroups> {
  const { groups } = modelCaches(nameOf(file), await readJson(file), { tpSize: 1 });
  return {
    from: file,
    kinds: groups.map(kindOf),
    layers: groups.map(({ layers }) => layers.map(({ name }) => name)),
  };
}
