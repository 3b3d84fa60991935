import type { KvCacheKind } from "@kv/interface";
import type { EngineTransferPlan } from "../engine-plan-types.js";
import type { ModelGeometry, RankGeometry } from "../geometry.js";
import { type BlockMeaning, meaningOfBlock } from "./block-meaning.js";
import { type NamedMemory, namedMemory } from "./named-memory.js";
import { fail } from "./verdict.js";

/** Attention backends known to order the tokens within a head in a way of their own. */
const OWN_ORDER: ReadonlySet<string> = new Set(["CPU_ATTN"]);

/** A plan beside what both sides say of themselves: all that the proof looks at. */
export interface ProofSubject {
  readonly plan: EngineTransferPlan;
  readonly model: ModelGeometry;
  /** By the position of the source in the plan. */
  readonly remotes: readonly RankGeometry[];
  /** By the position of the source in the plan. */
  readonly localMemory: readonly NamedMemory[];
  readonly remoteMemory: readonly NamedMemory[];
}

export function proofSubject(
  plan: EngineTransferPlan,
  remotes: readonly RankGeometry[],
  numKvHeads: number,
): ProofSubject {
  const byRank = new Map(remotes.map((rank) => [rank.tpRank, rank]));
  const sources = plan.sources.map((source) => {
    const rank = byRank.get(source.remoteRank);
    if (rank !== undefined) return rank;
    return fail(
      "descriptor-outside",
      `the plan reads from remote rank ${source.remoteRank}, which is none of the remote engine`,
      {
        remoteRank: source.remoteRank,
      },
    );
  });
  return {
    plan,
    model: { numKvHeads, groups: plan.groups },
    remotes: sources,
    localMemory: plan.sources.map((source) => namedMemory("local", source.localTable, plan.local)),
    remoteMemory: plan.sources.map((source, index) =>
      namedMemory(`remote rank ${source.remoteRank}`, source.remoteTable, sources[index] as RankGeometry),
    ),
  };
}

/** The inside of a cell on both sides, where it is not plain. Unlike orders are made alike by the engine, if the plan says so. */
function insides({ plan, remotes }: ProofSubject): readonly [string | undefined, string | undefined] {
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

/** What a block of a region means here, and at each source. */
export function meaningsOf(
  subject: ProofSubject,
  region: number,
  kind: KvCacheKind,
): { readonly local: BlockMeaning; readonly sources: readonly BlockMeaning[] } {
  const [inLocal, inRemote] = insides(subject);
  const read = (whose: string, rank: RankGeometry, inside: string | undefined): BlockMeaning => {
    const found = rank.regions[region];
    const meaning =
      found === undefined ? undefined : meaningOfBlock(rank, found, subject.model, kind, inside);
    if (meaning !== undefined) return meaning;
    return fail(
      "request-tables",
      `${whose}: a block of region ${region} does not divide by its layout ${rank.layout}`,
      {
        region,
      },
    );
  };
  return {
    local: read("the local rank", subject.plan.local, inLocal),
    sources: subject.remotes.map((rank) => read(`remote rank ${rank.tpRank}`, rank, inRemote)),
  };
}

/** Regions that hold a group's blocks, by what the regions say of themselves. */
export function regionsHolding(rank: RankGeometry, group: number): readonly number[] {
  const named = rank.regions.map((region) => region.groupId);
  const one = named.every((id) => id === named[0]);
  return [...named.keys()].filter((index) => one || named[index] === group || named[index] === -1);
}
