import type { RegionGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks, RequestPlan } from "../request/request-plan-types.js";
import { type BlockPattern, patternKey, provePattern } from "./block-pattern.js";
import { blockBytes } from "./contents/block-contents.js";
import { cacheSemantics, regionsHolding } from "./contents/cache-semantics.js";
import {
  contentsOfRegion,
  type ProofSubject,
  type RegionContents,
} from "./contents/proof-subject.js";
import { blockKey, landedWrites, type Owner, type Owners } from "./landed-writes.js";
import { type NeededTokens, neededTokens } from "./needed-tokens.js";
import { type BlockPass, passByBlock, passGrid, UNTOUCHED } from "./pass-effect.js";
import { fail } from "./proof-result.js";

/** Patterns that are proven already. The requests of one plan share them. */
export type ProvenPatterns = Set<string>;

/**
 * Proves one request of one plan; returns the number of destination blocks, counted in each region.
 */
export function proveRequest(
  subject: ProofSubject,
  blocks: RequestBlocks,
  request: RequestPlan,
  proven: ProvenPatterns,
): number {
  const { plan, model } = subject;
  const demands = [...plan.groups.keys()]
    .filter((group) => (blocks.localBlockIds[group]?.length ?? 0) > 0)
    .map((group) => neededTokens(group, plan.local, subject.remotes, model, blocks));
  const regionContents = new Map(
    demands.map((demand) => {
      const held = regionsHolding(plan.local, demand.group);
      return [
        demand,
        new Map(held.map((region) => [region, contentsOfRegion(subject, region, demand.group)])),
      ] as const;
    }),
  );
  const landed = landedWrites(subject, request, ownersOf(subject, regionContents));
  const passes = passesOf(request, demands);
  let count = 0;
  for (const [demand, regions] of regionContents) {
    const lists = cacheSemantics(model.groups[demand.group] ?? "")?.lists;
    for (const [region, contents] of regions) {
      const own = plan.local.regions[region] as RegionGeometry;
      const seen = classOf(contents);
      const grid = passGrid(plan, demand.group, region);
      const lengthBytes = blockBytes(own, contents.local);
      for (const [position, block] of demand.local.blocks.entries()) {
        const begin = demand.local.tokens[position] as number;
        const within = (token: number) =>
          Math.max(0, Math.min(contents.local.tokens, token - begin));
        const neededTo = within(demand.endToken);
        // The pass does not zero a part of a block that is known as a whole only; the engine masks
        // it.
        const isPart = contents.local.tokensPerStep > 1 && neededTo > 0;
        const pass = passes.get(demand)?.get(block) ?? UNTOUCHED;
        const pattern: BlockPattern = {
          lengthBytes,
          writes: (landed[region]?.get(blockKey(block, contents.local)) ?? []).map((write) => ({
            ...write,
            remoteToken: write.remoteToken - begin,
          })),
          pass: isPart && pass.zeroFromToken > 0 ? { ...UNTOUCHED, permuted: pass.permuted } : pass,
          grid,
          neededFrom: within(demand.fromToken),
          neededTo,
          clearsLead: lists === "window" && !isPart && plan.uncovered === "zeroed",
          clearsTail: lists !== "last" && !isPart && plan.uncovered === "zeroed",
          contents: contents.local,
          sourceContents: contents.sources,
        };
        count += 1;
        const key = seen + patternKey(pattern);
        if (proven.has(key)) continue;
        provePattern(pattern, {
          localRank: plan.local.tpRank,
          region: own.name,
          group: demand.group,
          block,
          firstToken: begin,
        });
        proven.add(key);
      }
    }
  }
  return count;
}

/** A key that is equal for regions whose blocks differ only in the name of the cache. */
function classOf({ local, sources }: RegionContents): string {
  const plain = (tile: RegionContents["local"]["tiles"][number]) => {
    const { name, ...shape } = tile;
    return [name.slice(name.indexOf(": ")), shape];
  };
  return JSON.stringify([local, ...sources].map((contents) => contents?.tiles.map(plain)));
}

/** The pass by group and block. It may only change blocks of the request. */
function passesOf(
  request: RequestPlan,
  demands: readonly NeededTokens[],
): ReadonlyMap<NeededTokens, ReadonlyMap<number, BlockPass>> {
  const groups = request.receivePass?.groups ?? [];
  for (const { group } of groups) {
    if (!demands.some((demand) => demand.group === group))
      fail(
        "receive-pass",
        `the receive pass names group ${group}, of which the request fills nothing`,
        {
          group,
        },
      );
    if (groups.filter((pass) => pass.group === group).length > 1)
      fail("receive-pass", `the receive pass names group ${group} more than once`, { group });
  }
  return new Map(
    demands.map((demand) => {
      const pass = passByBlock(groups.find(({ group }) => group === demand.group));
      for (const block of pass.keys()) {
        if (demand.local.position.has(block)) continue;
        fail(
          "receive-pass",
          `the receive pass changes kernel block ${block}, which does not belong to the request`,
          { group: demand.group, block },
        );
      }
      return [demand, pass] as const;
    }),
  );
}

/**
 * The owner of each kernel block that is filled. Two groups of a request may not list the same
 * block.
 */
function ownersOf(
  { plan }: ProofSubject,
  regionContents: ReadonlyMap<NeededTokens, ReadonlyMap<number, RegionContents>>,
): Owners {
  const owners = plan.local.regions.map(() => new Map<number, Owner>());
  for (const [demand, regions] of regionContents) {
    for (const [region, contents] of regions) {
      const known = owners[region] as Map<number, Owner>;
      const { kernelBlocks } = contents.local;
      for (const [position, block] of demand.local.blocks.entries()) {
        for (let part = 0; part < kernelBlocks; part++) {
          const kernelBlock = block * kernelBlocks + part;
          const before = known.get(kernelBlock)?.demand.group;
          if (before !== undefined) {
            fail(
              "request-tables",
              `kernel block ${kernelBlock} of region ${region} is given to groups ${before} and ${demand.group}`,
              { region, block: kernelBlock },
            );
          }
          known.set(kernelBlock, { demand, regionContents: contents, position });
        }
      }
    }
  }
  return owners;
}
