import { assumedGroups, hasMla, hasStates } from "@kv/fleet";
import { type BlockIds, KV_CACHE_KINDS, type KvCacheKind, KvError } from "@kv/interface";
import type { ConfiguredGroups } from "@kv/kv-plan";
import { cacheKind } from "@kv/plan";
import type { AgentMetadata } from "@kv/protocol";

/** KV cache groups as a user gives them: by kind, or by a model's config.json. */
export type GivenGroups = readonly KvCacheKind[] | ConfiguredGroups;

const isConfigured = (given: GivenGroups): given is ConfiguredGroups => "kinds" in given;

export const kindsOf = (given: GivenGroups): readonly KvCacheKind[] =>
  isConfigured(given) ? given.kinds : given;

/**
 * A handshake has the sizes of states, but not their groups.
 *
 * @throws `KV_CONFIG_INVALID` for kinds that must be given, and for given ones that do not fit the
 * engine.
 */
export function groupKinds(
  metadata: AgentMetadata,
  numGroups: number,
  given: GivenGroups | undefined,
): readonly KvCacheKind[] {
  if (given !== undefined) return checkGiven(metadata, numGroups, given);
  if (numGroups === 1 && !hasStates(metadata)) return assumedGroups(metadata, numGroups);
  const [what, example] = hasStates(metadata)
    ? [`states of ${metadata.ssmSizes.join(" + ")} bytes`, "full,mamba"]
    : hasMla(metadata)
      ? [`MLA (${metadata.attentionBackend})`, "mla,swa-mla"]
      : [`attention (${metadata.attentionBackend})`, "full,swa"];
  throw new KvError(
    "KV_CONFIG_INVALID",
    `the engine has ${what} and ${numGroups} KV cache groups, and its handshake does not say which group holds what`,
    {
      hint: `give --config with the config.json of the model, or the kind of each group in the order of remote_block_ids, such as --groups ${example}; kinds: ${KV_CACHE_KINDS.join(", ")}`,
      details: { ssmSizes: metadata.ssmSizes, groups: numGroups },
    },
  );
}

function checkGiven(
  metadata: AgentMetadata,
  numGroups: number,
  groups: GivenGroups,
): readonly KvCacheKind[] {
  const given = kindsOf(groups);
  const from = isConfigured(groups) ? groups.from : "--groups";
  if (given.length !== numGroups) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `${from} names ${given.length} kinds (${given.join(", ")}), and the engine has ${numGroups} KV cache groups`,
      { details: { given: given.length, groups: numGroups } },
    );
  }
  const namesStates = given.some((kind) => cacheKind(kind).sharding === "state");
  if (namesStates === hasStates(metadata)) {
    if (isConfigured(groups)) checkLayers(metadata, groups);
    return given;
  }
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${from} (${given.join(",")}) names ${namesStates ? "a" : "no"} group of states, and the engine announces states of ${metadata.ssmSizes.join(" + ")} bytes (ssm_sizes)`,
    { details: { ssmSizes: metadata.ssmSizes } },
  );
}

function checkLayers(
  { regionNames = [], regionGroupIds = [] }: AgentMetadata,
  configured: ConfiguredGroups,
): void {
  const isTold = new Set(regionGroupIds).size > 1;
  for (const [region, name] of regionNames.entries()) {
    const told = isTold ? (regionGroupIds[region] ?? -1) : -1;
    const group = configured.layers.findIndex((names) => names.includes(name));
    if (group >= 0 && (told < 0 || told === group)) continue;
    const layers = configured.layers.flat();
    throw new KvError(
      "KV_CONFIG_INVALID",
      group < 0
        ? `${configured.from} has no layer ${name}, which the engine has a region of: its layers are ${layers[0]} to ${layers.at(-1)}`
        : `${name} is in KV cache group ${told} of the engine, and in group ${group} by ${configured.from}`,
      {
        hint: "give the config.json of the model that the engine serves, or --groups",
        details: { region: name, group: told },
      },
    );
  }
}

const SHARED_REGION = -1;

export function groupsOfRegion(
  metadata: AgentMetadata,
  region: number,
  numGroups: number,
): readonly number[] {
  const groupIds = metadata.regionGroupIds ?? [];
  const group = groupIds[region] ?? 0;
  // If all regions name one group, every group's blocks lie in every region.
  const holdsAllGroups = group === SHARED_REGION || new Set(groupIds).size <= 1;
  return holdsAllGroups ? Array.from({ length: numGroups }, (_, each) => each) : [group];
}

export function kernelBlocksOfRegion(
  metadata: AgentMetadata,
  region: number,
  blockIds: BlockIds,
): readonly number[] {
  const logical = groupsOfRegion(metadata, region, blockIds.length).flatMap(
    (group) => blockIds[group] ?? [],
  );
  const kernels = metadata.physicalBlocksPerLogical;
  if (kernels === 1) return logical;
  return logical.flatMap((id) =>
    Array.from({ length: kernels }, (_, kernel) => id * kernels + kernel),
  );
}
