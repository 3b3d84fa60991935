import type { EngineTransferPlan } from "../../engine/engine-plan-types.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../../geometry/rank-geometry.js";
import { type DescriptorLookup, descriptorLookup } from "../descriptor-lookup.js";
import { fail } from "../proof-result.js";
import { type BlockContents, contentsOfBlock } from "./block-contents.js";

/** Attention backends known to order the tokens within a head in a way of their own. */
const OWN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

/** A plan and the geometries of both sides: all facts that the proof uses. */
export interface ProofSubject {
  readonly plan: EngineTransferPlan;
  readonly model: ModelGeometry;
  /** By the position of the source in the plan. */
  readonly remotes: readonly RankGeometry[];
  /** By the position of the source in the plan, then by that of the list in the source. */
  readonly localLookups: readonly (readonly DescriptorLookup[])[];
  readonly remoteLookups: readonly (readonly DescriptorLookup[])[];
}

/**
 * A plan with the geometries of its sources. Ends the proof for a source that is not a rank of the
 * remote engine.
 */
export function proofSubject(
  plan: EngineTransferPlan,
  remotes: readonly RankGeometry[],
  model: Omit<ModelGeometry, "groups">,
): ProofSubject {
  const byRank = new Map(remotes.map((rank) => [`${rank.ppRank ?? 0}:${rank.tpRank}`, rank]));
  const sources = plan.sources.map(({ remoteRank, remotePpRank }) => {
    const rank = byRank.get(`${remotePpRank}:${remoteRank}`);
    if (rank !== undefined) return rank;
    return fail(
      "descriptor-outside",
      `the plan reads from remote rank ${remoteRank}, which is not a rank of the remote engine`,
      { remoteRank, remotePpRank },
    );
  });
  return {
    plan,
    model: { ...model, groups: plan.groups },
    remotes: sources,
    localLookups: plan.sources.map((source) =>
      source.lists.map((list) => descriptorLookup("local", list.localTable, plan.local)),
    ),
    remoteLookups: plan.sources.map((source, index) =>
      source.lists.map((list) =>
        descriptorLookup(
          `remote rank ${source.remoteRank}`,
          list.remoteTable,
          sources[index] as RankGeometry,
        ),
      ),
    ),
  };
}

/**
 * The order within a head on both sides, where it is not plain. With the conversion
 * "attention-order" the engine makes both equal.
 */
function insides({
  plan,
  remotes,
}: ProofSubject): readonly [string | undefined, string | undefined] {
  const [mine, theirs] = [
    plan.local.attentionBackend,
    remotes[0]?.attentionBackend ?? plan.remote.attentionBackend,
  ];
  if (mine !== theirs && plan.conversions.includes("attention-order")) {
    const either = OWN_ORDER.has(mine) || OWN_ORDER.has(theirs);
    return either ? ["converted", "converted"] : [undefined, undefined];
  }
  const own = (name: string) => (OWN_ORDER.has(name) ? name : undefined);
  return [own(mine), own(theirs)];
}

/**
 * Names of the caches in a region; where a rank has nothing but one row of packed caches, all of
 * them.
 */
function cachesOf(region: RegionGeometry, rank: RankGeometry): readonly string[] {
  if (region.members !== undefined) return region.members;
  const packed = rank.regions.length === 1 ? Object.keys(rank.packedMembers ?? {}) : [];
  return packed.length > 0 ? packed : [region.name];
}

/**
 * The region of a remote rank that holds the same cache; undefined on a stage of a pipeline that
 * holds other layers.
 */
export function counterpart(
  region: RegionGeometry,
  rank: RankGeometry,
  owner: RankGeometry,
): number | undefined {
  const same = rank.regions.findIndex((other) => other.name === region.name);
  if (same >= 0) return same;
  const names = new Set([region.name, ...cachesOf(region, owner)]);
  const found = rank.regions.findIndex((other) =>
    cachesOf(other, rank).some((name) => names.has(name)),
  );
  return found < 0 ? undefined : found;
}

/**
 * The contents of a region's blocks for a group, locally and at each source that holds the region.
 */
export interface RegionContents {
  readonly local: BlockContents;
  /** Undefined at a source without the region. */
  readonly sources: readonly (BlockContents | undefined)[];
  /** Region at each source. */
  readonly remoteRegions: readonly (number | undefined)[];
}

export function contentsOfRegion(
  subject: ProofSubject,
  index: number,
  group: number,
): RegionContents {
  const { plan, model, remotes } = subject;
  const region = plan.local.regions[index] as RegionGeometry;
  const [inLocal, inRemote] = insides(subject);
  const [remote] = remotes;
  const remoteRegions = remotes.map((rank) => counterpart(region, rank, plan.local));
  const local = read(
    "the local rank",
    { rank: plan.local, region, group, model, other: remote ?? plan.remote, ownOrder: inLocal },
    region.name,
  );
  const sources = remotes.map((rank, at) => {
    const found = remoteRegions[at];
    const other = found === undefined ? undefined : rank.regions[found];
    if (other === undefined) return undefined;
    const question = { rank, region: other, group, model, other: plan.local, ownOrder: inRemote };
    return read(`remote rank ${rank.tpRank}`, question, region.name);
  });
  return { local, sources, remoteRegions };
}

/**
 * The contents of a block, with the name of its cache. A row that packs several caches has a page
 * for each.
 */
function read(
  owner: string,
  question: Omit<Parameters<typeof contentsOfBlock>[0], "lengthBytes">,
  name: string,
): BlockContents {
  const { rank, region } = question;
  const pages = cachesOf(region, rank).flatMap((cache) => {
    const page = rank.packedMembers?.[cache];
    return page === undefined ? [] : [{ cache, ...page }];
  });
  const parts =
    pages.length > 0
      ? pages
      : [{ cache: name, offsetBytes: 0, lengthBytes: region.blockLengthBytes }];
  const regionContents = parts.map(({ cache, offsetBytes, lengthBytes }) => {
    const contents = contentsOfBlock({ ...question, lengthBytes });
    if (contents === undefined) {
      fail(
        "request-tables",
        `${owner}: ${lengthBytes} bytes of a block of "${cache}" do not divide by the layout ${rank.layout}`,
        { region: region.name, lengthBytes },
      );
    }
    const tiles = contents.tiles.map((tile) => ({
      ...tile,
      name: `${cache}: ${tile.name}`,
      offset: tile.offset + offsetBytes,
    }));
    return { ...contents, tiles };
  });
  const [first] = regionContents;
  if (first === undefined)
    return fail("request-tables", `${owner}: nothing lies in region "${region.name}"`);
  return { ...first, tiles: regionContents.flatMap((contents) => contents.tiles) };
}
