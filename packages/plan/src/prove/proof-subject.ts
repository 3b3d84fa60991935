import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { type BlockContents, type BlockQuestion, contentsOfPage, inOrder } from "./block-labels.js";
import { type DescriptorLookup, descriptorLookup } from "./descriptors.js";
import { fail } from "./proof-result.js";

/** A plan and the geometries of both sides: all facts that the proof uses. */
export interface ProofSubject {
  readonly plan: EngineTransferPlan;
  readonly model: ModelGeometry;
  readonly remotes: readonly RankGeometry[];
  /** By the position of the source in the plan, then by that of the list in the source. */
  readonly lookups: readonly (readonly ListLookup[])[];
  contents(region: number, group: number): RegionContents;
}

/** Both sides of a list. */
export interface ListLookup {
  readonly local: DescriptorLookup;
  readonly remote: DescriptorLookup;
}

/**
 * The contents of a region's blocks for a group, locally and at each source that holds the region.
 */
export interface RegionContents {
  readonly local: BlockContents;
  /** Undefined at a source without the region. */
  readonly sources: readonly (BlockContents | undefined)[];
  readonly remoteRegions: readonly (number | undefined)[];
  /** Equal for regions whose blocks differ only in the names of caches. */
  readonly key: string;
}

/**
 * A plan with the geometries of its sources. Ends the proof for a source that is not a rank of the
 * remote engine.
 */
export function proofSubject(
  plan: EngineTransferPlan,
  ranks: readonly RankGeometry[],
  options: Omit<ModelGeometry, "groups">,
): ProofSubject {
  const remotes = plan.sources.map(({ remoteRank, remotePpRank }) => {
    const rank = ranks.find(
      ({ tpRank, ppRank = 0 }) => tpRank === remoteRank && ppRank === remotePpRank,
    );
    if (rank !== undefined) return rank;
    return fail(
      "descriptor-outside",
      `the plan reads from remote rank ${remoteRank}, which is not a rank of the remote engine`,
      { remoteRank, remotePpRank },
    );
  });
  const lookups = plan.sources.map(({ lists, remoteRank }, index) =>
    lists.map(({ localTable, remoteTable }) => ({
      local: descriptorLookup("local", localTable, plan.local),
      remote: descriptorLookup(
        `remote rank ${remoteRank}`,
        remoteTable,
        remotes[index] as RankGeometry,
      ),
    })),
  );
  const model = { ...options, groups: plan.groups };
  const known = new Map<string, RegionContents>();
  const contents = (region: number, group: number) => {
    const found =
      known.get(`${region}:${group}`) ?? contentsOfRegion(plan, remotes, model, region, group);
    known.set(`${region}:${group}`, found);
    return found;
  };
  return { plan, model, remotes, lookups, contents };
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
 * Names of the caches in a region; where a rank has nothing but one row of packed caches, all of
 * them.
 */
function cachesOf(region: RegionGeometry, rank: RankGeometry): readonly string[] {
  if (region.members !== undefined) return region.members;
  const packed = rank.regions.length === 1 ? Object.keys(rank.packedMembers ?? {}) : [];
  return packed.length > 0 ? packed : [region.name];
}

function contentsOfRegion(
  plan: EngineTransferPlan,
  remotes: readonly RankGeometry[],
  model: ModelGeometry,
  index: number,
  group: number,
): RegionContents {
  const { local: rank } = plan;
  const region = rank.regions[index] as RegionGeometry;
  const remote = remotes[0] ?? plan.remote;
  const [inLocal, inRemote] = orders(plan, remote);
  const local = contentsOfBlock(
    "the local rank",
    { rank, region, group, model, other: remote, ownOrder: inLocal },
    region.name,
  );
  const remoteRegions = remotes.map((source) => counterpart(region, source, rank));
  const sources = remotes.map((source, at) => {
    const other = source.regions[remoteRegions[at] ?? -1];
    if (other === undefined) return undefined;
    return contentsOfBlock(
      `remote rank ${source.tpRank}`,
      { rank: source, region: other, group, model, other: rank, ownOrder: inRemote },
      region.name,
    );
  });

  const caches = local.tiles.map(({ cache }) => cache);
  const shapes = [local, ...sources].map((contents) =>
    contents?.tiles.map(({ cache, ...shape }) => [caches.indexOf(cache), shape]),
  );
  const { blockLengthBytes, numKvHeads, replicated } = region;
  const own = [plan.headsOfRegion[index], blockLengthBytes, numKvHeads, replicated];
  return { local, sources, remoteRegions, key: JSON.stringify([own, shapes]) };
}

/** Attention backends known to order the tokens within a head in a way of their own. */
const OWN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

/**
 * The order within a head on both sides, where it is not plain. With the conversion
 * "attention-order" the engine makes both equal.
 */
function orders(
  plan: EngineTransferPlan,
  remote: RankGeometry,
): readonly [string | undefined, string | undefined] {
  const [mine, theirs] = [plan.local.attentionBackend, remote.attentionBackend];
  const own = (name: string) => (OWN_ORDER.has(name) ? name : undefined);
  if (mine === theirs || !plan.conversions.includes("attention-order"))
    return [own(mine), own(theirs)];
  const converted = (own(mine) ?? own(theirs)) ? "converted" : undefined;
  return [converted, converted];
}

/**
 * The contents of a block. A row that packs several caches has pages, and each page is one cache in
 * each group: caches of different groups have the same place.
 */
function contentsOfBlock(owner: string, question: BlockQuestion, name: string): BlockContents {
  const { rank, region } = question;
  const packed = cachesOf(region, rank).flatMap((cache) => {
    const page = rank.packedMembers?.[cache];
    return page === undefined ? [] : [{ cache, at: page.offsetBytes, ...page }];
  });
  const pages: Page[] = [];
  for (const { cache, at: offset, lengthBytes } of inOrder(packed)) {
    const last = pages.at(-1);
    if (last === undefined || offset >= last.offset + last.lengthBytes) {
      pages.push({ cache, offset, lengthBytes });
      continue;
    }
    last.cache = [...last.cache.split(", "), cache].sort().join(", ");
    last.lengthBytes = Math.max(last.lengthBytes, offset + lengthBytes - last.offset);
  }
  if (pages.length === 0)
    pages.push({ cache: name, offset: 0, lengthBytes: region.blockLengthBytes });

  const [first, ...others] = pages.map((page) => {
    const contents = contentsOfPage(question, page);
    if (contents !== undefined) return contents;
    const { cache, lengthBytes } = page;
    return fail(
      "request-tables",
      `${owner}: ${lengthBytes} bytes of a block of "${cache}" do not divide by the layout ${rank.layout}`,
      { region: region.name, lengthBytes },
    );
  }) as [BlockContents, ...BlockContents[]];
  return { ...first, tiles: [first, ...others].flatMap(({ tiles }) => tiles) };
}

/** The bytes of one cache in a block, or of several that are never in the same block. */
interface Page {
  cache: string;
  readonly offset: number;
  lengthBytes: number;
}
