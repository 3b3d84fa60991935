import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { type BlockContents, inOrder, type Tile } from "./block-labels.js";
import { cacheSemantics, type HeadRange, headsInRegion, tokensInBlock } from "./cache-semantics.js";
import { type DescriptorLookup, descriptorLookup } from "./descriptors.js";
import { fail } from "./proof-result.js";

export interface ProofSubject {
  readonly plan: EngineTransferPlan;
  readonly model: ModelGeometry;
  readonly remotes: readonly RankGeometry[];
  /** By source, then by its list. */
  readonly lookups: readonly (readonly ListLookup[])[];
  contents(region: number, group: number): RegionContents;
}

export interface ListLookup {
  readonly local: DescriptorLookup;
  readonly remote: DescriptorLookup;
}

export interface RegionContents {
  readonly local: BlockContents;
  /** Undefined at a source without the region. */
  readonly sources: readonly (BlockContents | undefined)[];
  readonly remoteRegions: readonly (number | undefined)[];
  /** Equal for regions whose blocks differ only in the names of caches. */
  readonly key: string;
}

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

/** Undefined on a pipeline stage with other layers. */
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

/** A rank with only one row of packed caches has all of them in it. */
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

/** They order tokens within a head their own way. */
const OWN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

/** Where it is not plain. The conversion "attention-order" makes both sides equal. */
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

/** Each page of a row is one cache in each group: caches of different groups share a place. */
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

/** One cache, or several that never share a block. */
interface Page {
  cache: string;
  readonly offset: number;
  lengthBytes: number;
}

export interface BlockQuestion {
  readonly rank: RankGeometry;
  readonly region: RegionGeometry;
  readonly group: number;
  readonly model: ModelGeometry;
  readonly other: RankGeometry;
  /** The order within a head, where it is not plain. */
  readonly ownOrder: string | undefined;
}

/** Read from the letters of the layout. Undefined when the page does not divide as they say. */
function contentsOfPage(
  question: BlockQuestion,
  { cache, offset, lengthBytes }: { cache: string; offset: number; lengthBytes: number },
): BlockContents | undefined {
  const { rank, region, group, model, other, ownOrder } = question;
  const kind = cacheSemantics(model.groups[group] ?? "");
  if (kind?.sharing === "state") return stateContents(rank, other, cache);
  const plain = { kernelBlocks: 1, usesPadding: false };
  const whole = { cache, offset, firstByte: 0, heads: { begin: 0, size: 1 }, steps: 1 };
  const order = "head-major";
  if (kind === undefined) return undefined;
  if (kind.lists === "last") {
    const tile = { ...whole, kind: "a whole block", cellBytes: lengthBytes, order } as const;
    return { tiles: [tile], tokens: 1, tokensPerStep: 1, ...plain };
  }

  const heads = headsInRegion(rank, region, group, model);
  const tokens = tokensInBlock(rank, group, other);
  if (!Number.isInteger(tokens)) return undefined;
  const known = heads.size === 1 ? "head-major" : orderOf(rank.layout);
  const inCells = (steps: number, name: string, all: HeadRange): BlockContents | undefined => {
    const cellBytes = lengthBytes / (all.size * steps);
    if (!Number.isInteger(cellBytes)) return undefined;
    const tile = { ...whole, heads: all, steps, order: known ?? order, cellBytes };
    const tiles = [{ ...tile, kind: `${name}, cells of ${cellBytes}` }];
    return { tiles, tokens, tokensPerStep: tokens / steps, ...plain };
  };
  // Cells of compressed latents stand for several tokens each.
  const isCompressed = heads.size === 1 && lengthBytes % tokens !== 0;
  if (known === undefined || isCompressed || (ownOrder !== undefined && known !== "head-major")) {
    // Heads are apart or in unknown order, so the block is only known as a whole.
    const layout = heads.size === 1 ? "any layout" : rank.layout;
    const what = `${heads.size} heads from ${heads.begin}, ${tokens} tokens`;
    return inCells(1, `a block of ${layout} ${ownOrder ?? "plain"}, ${what}`, whole.heads);
  }
  if (ownOrder !== undefined) return inCells(1, `${ownOrder}, ${tokens} tokens`, heads);
  return inCells(tokens, "plain", heads);
}

function orderOf(layout: string): Tile["order"] | undefined {
  if (layout === "LBHNC" || layout === "BLHNC") return "head-major";
  return layout === "LBNHC" || layout === "BLNHC" ? "token-major" : undefined;
}

/** Projections and the recurrent part are each cut evenly over the ranks. */
function stateContents(
  rank: RankGeometry,
  other: RankGeometry,
  cache: string,
): BlockContents | undefined {
  const own = rank.stateSpace;
  if (own === undefined) return undefined;
  // A handshake has only sums. Missing projections are the other side's, scaled to this side's
  // ranks.
  const given = other.stateSpace?.convProjectionBytes;
  const projections = own.convProjectionBytes ??
    given?.map((bytes) => (bytes * other.tpSize) / rank.tpSize) ?? [own.convBytes];
  if (!projections.every(Number.isInteger)) return undefined;

  let end = 0;
  const tiles = [...projections, own.recurrentBytes].map((cellBytes, index): Tile => {
    const kind = index === projections.length ? "recurrent state" : `convolution ${index}`;
    const offset = end;
    end += cellBytes;
    const [firstByte, heads] = [rank.tpRank * cellBytes, { begin: 0, size: 1 }];
    return { cache, kind, offset, cellBytes, firstByte, heads, steps: 1, order: "head-major" };
  });
  const kernelBlocks = rank.physicalBlocksPerLogical;
  return { tiles, tokens: 1, tokensPerStep: 1, kernelBlocks, usesPadding: true };
}
