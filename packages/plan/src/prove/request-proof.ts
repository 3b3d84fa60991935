import type { RequestBlocks, RequestPlan } from "../request-plan-types.js";
import { type BlockPattern, patternKey, provePattern, type Write } from "./block-pattern.js";
import { meaningsOf, type ProofSubject, regionsHolding } from "./pair-meaning.js";
import { type BlockPass, passByBlock } from "./pass-effect.js";
import { demandOf, type GroupDemand } from "./request-demand.js";
import { fail } from "./verdict.js";

const UNTOUCHED: BlockPass = { permuted: false, zeroFromToken: Number.POSITIVE_INFINITY };

/** Patterns already proven, by region class; shared over the requests of one plan. */
export type ProvenPatterns = Set<string>;

/** Proves one request of one plan; returns the number of destination blocks, region by region. */
export function proveRequest(
  subject: ProofSubject,
  blocks: RequestBlocks,
  request: RequestPlan,
  proven: ProvenPatterns,
): number {
  const { plan } = subject;
  const remote = subject.remotes[0] ?? plan.remote;
  const demands = plan.groups
    .map((kind, group) => demandOf(group, kind, plan.local, remote, blocks))
    .filter((demand) => demand.localBlocks.length > 0);
  const owners = ownersOf(subject, demands);
  const landed = collectWrites(subject, request, owners);
  const passes = new Map<GroupDemand, ReadonlyMap<number, BlockPass>>();
  for (const demand of demands) {
    const pass = passByBlock(onlyOne(request, demand.group));
    for (const block of pass.keys()) {
      if (demand.localPosition.has(block)) continue;
      fail("receive-pass", `the receive pass changes kernel block ${block}, which is not the request's`, {
        group: demand.group,
        block,
      });
    }
    passes.set(demand, pass);
  }
  for (const { group } of request.receivePass?.groups ?? []) {
    if (demands.some((demand) => demand.group === group)) continue;
    fail("receive-pass", `the receive pass names group ${group}, of which the request fills nothing`, {
      group,
    });
  }
  let count = 0;
  for (const demand of demands) {
    const pass = passes.get(demand);
    for (const region of regionsHolding(plan.local, demand.group)) {
      const lengthBytes = plan.local.regions[region]?.blockLengthBytes ?? 0;
      const meanings = meaningsOf(subject, region, demand.kind);
      const heads = meanings.sources.map((meaning) => meaning.cellBytes).join();
      const seen = `${demand.kind};${meanings.local.cellBytes};${heads};`;
      for (const [position, block] of demand.localBlocks.entries()) {
        const begin = demand.localBegin + position * plan.local.kernelBlockSize;
        const pattern: BlockPattern = {
          lengthBytes,
          writes: (landed[region]?.get(block) ?? []).map((write) => ({
            ...write,
            remoteToken: write.remoteToken - begin,
          })),
          pass: pass?.get(block) ?? UNTOUCHED,
          neededTokens: Math.max(0, Math.min(plan.local.kernelBlockSize, demand.endToken - begin)),
          meaning: meanings.local,
          sourceMeanings: meanings.sources,
        };
        count += 1;
        const key = seen + patternKey(pattern);
        if (proven.has(key)) continue;
        provePattern(plan, pattern, {
          localRank: plan.local.tpRank,
          region: plan.local.regions[region]?.name ?? region,
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

function onlyOne(request: RequestPlan, group: number) {
  const found = (request.receivePass?.groups ?? []).filter((pass) => pass.group === group);
  if (found.length > 1)
    fail("receive-pass", `the receive pass names group ${group} ${found.length} times`, { group });
  return found[0];
}

/** Per region: the group of the request that owns each destination block. */
function ownersOf(
  { plan }: ProofSubject,
  demands: readonly GroupDemand[],
): readonly ReadonlyMap<number, GroupDemand>[] {
  const owners = plan.local.regions.map(() => new Map<number, GroupDemand>());
  for (const demand of demands) {
    for (const region of regionsHolding(plan.local, demand.group)) {
      const known = owners[region] as Map<number, GroupDemand>;
      for (const block of demand.localBlocks) {
        const before = known.get(block);
        if (before !== undefined)
          fail(
            "request-tables",
            `kernel block ${block} of region ${region} is given to groups ${before.group} and ${demand.group}`,
            {
              region,
              block,
            },
          );
        known.set(block, demand);
      }
    }
  }
  return owners;
}

/** Every descriptor pair of every read, as a write into a block of the request; tokens counted from the sequence's begin. */
function collectWrites(
  { plan, localMemory, remoteMemory, remotes }: ProofSubject,
  request: RequestPlan,
  owners: readonly ReadonlyMap<number, GroupDemand>[],
): readonly Map<number, Write[]>[] {
  const landed = plan.local.regions.map(() => new Map<number, Write[]>());
  for (const read of request.reads) {
    const source = read.sourceIndex;
    const [local, remote, rank] = [localMemory[source], remoteMemory[source], remotes[source]];
    if (local === undefined || remote === undefined || rank === undefined) {
      fail("wrong-source", `a read names source ${source}; the plan has ${plan.sources.length}`, { source });
    }
    if (rank.tpRank !== read.remoteRank || read.localIds.length !== read.remoteIds.length) {
      fail(
        "wrong-source",
        `a read of rank ${read.remoteRank} goes through the lists of rank ${rank.tpRank}, or its ids do not pair`,
        {
          source,
          localIds: read.localIds.length,
          remoteIds: read.remoteIds.length,
        },
      );
    }
    for (let index = 0; index < read.localIds.length; index++) {
      const to = local.place(read.localIds[index] as number);
      const from = remote.place(read.remoteIds[index] as number);
      const at = {
        localRank: plan.local.tpRank,
        remoteRank: rank.tpRank,
        region: to.region,
        block: to.block,
      };
      if (to.lengthBytes !== from.lengthBytes)
        fail("descriptor-lengths", `${from.lengthBytes} bytes are read into ${to.lengthBytes}`, at);
      const [here, there] = [plan.local.regions[to.region]?.name, rank.regions[from.region]?.name];
      if (here !== there) fail("wrong-source", `region "${here}" is filled from region "${there}"`, at);
      const demand = owners[to.region]?.get(to.block);
      if (demand === undefined) {
        fail(
          "foreign-write",
          `kernel block ${to.block} of region "${here}" is written and is not the request's`,
          at,
        );
      }
      const position = demand.remotePosition.get(from.block);
      if (position === undefined) {
        fail("wrong-source", `remote kernel block ${from.block} is read and is not the request's`, {
          ...at,
          remoteBlock: from.block,
        });
      }
      const blocks = landed[to.region] as Map<number, Write[]>;
      const write: Write = {
        offset: to.offset,
        lengthBytes: to.lengthBytes,
        source,
        remoteOffset: from.offset,
        remoteToken: demand.remoteBegin + position * rank.kernelBlockSize,
      };
      const before = blocks.get(to.block);
      if (before === undefined) blocks.set(to.block, [write]);
      else before.push(write);
    }
  }
  return landed;
}
