import { assumedGroups, hasMla, hasStates } from "@kv/fleet";
import { KV_CACHE_KINDS, type KvCacheKind, KvError } from "@kv/interface";
import { cacheKind } from "@kv/plan";
import type { AgentMetadata } from "@kv/protocol";

/**
 * The kinds of an engine's KV cache groups, where its handshake leaves no choice or the user has given them: a handshake carries the sizes of states, but not the
 * groups that hold them. Errors: `KV_CONFIG_INVALID` for kinds that must be given, and for given ones that do not fit the engine.
 */
export function groupKinds(
  metadata: AgentMetadata,
  numGroups: number,
  given: readonly KvCacheKind[] | undefined,
): readonly KvCacheKind[] {
  if (given !== undefined) return checkGiven(metadata, numGroups, given);
  if (!hasStates(metadata) && (numGroups === 1 || !hasMla(metadata)))
    return assumedGroups(metadata, numGroups);
  const what = hasStates(metadata)
    ? `states of ${metadata.ssmSizes.join(" + ")} bytes`
    : `MLA (${metadata.attentionBackend})`;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `the engine has ${what} and ${numGroups} KV cache groups, and its handshake does not say which group holds what`,
    {
      hint: `give the kind of each group in the order of remote_block_ids, such as --groups ${hasStates(metadata) ? "full,mamba" : "mla,swa-mla"}; kinds: ${KV_CACHE_KINDS.join(", ")}`,
      details: { ssmSizes: metadata.ssmSizes, groups: numGroups },
    },
  );
}

function checkGiven(
  metadata: AgentMetadata,
  numGroups: number,
  given: readonly KvCacheKind[],
): readonly KvCacheKind[] {
  if (given.length !== numGroups) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--groups names ${given.length} kinds (${given.join(", ")}), and the engine has ${numGroups} KV cache groups`,
      { details: { given: given.length, groups: numGroups } },
    );
  }
  const namesStates = given.some((kind) => cacheKind(kind).sharding === "state");
  if (namesStates === hasStates(metadata)) return given;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `--groups ${given.join(",")} names ${namesStates ? "a" : "no"} group of states, and the engine announces states of ${metadata.ssmSizes.join(" + ")} bytes (ssm_sizes)`,
    { details: { ssmSizes: metadata.ssmSizes } },
  );
}
