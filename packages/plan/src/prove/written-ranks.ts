import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { fromOtherSide, turnedRuns } from "../request/swap-direction.js";
import type { RequestBlocks, RequestPlan, RequestRead } from "../request/request-plan-types.js";
import { namedMemory } from "./descriptor-lookup.js";
import type { ProofSubject } from "./proof-subject.js";
import type { DemandBlocks } from "./needed-tokens.js";
import { fail } from "./proof-result.js";

/** What is written into one rank, seen from there: as if it read from those who write. */
export interface WrittenRank {
  readonly subject: ProofSubject;
  /** Turns a request of the writers, and what each of them does for it, round. */
  turn(
    blocks: RequestBlocks,
    requests: readonly RequestPlan[],
  ): { readonly blocks: DemandBlocks; readonly request: RequestPlan };
}

/**
 * The remote ranks that plans write into, each with all that the plans write there. A write is a read told from the other end: so both are
 * proven by the same means, and here by the tables and ids that the writers would post.
 */
export function writtenRanks(
  plans: readonly EngineTransferPlan[],
  subjects: readonly ProofSubject[],
  remotes: readonly RankGeometry[],
): readonly WrittenRank[] {
  return remotes.flatMap((rank): WrittenRank[] => {
    const writers = plans.flatMap((plan, index) =>
      [...plan.sources.entries()]
        .filter(
          ([, source]) => source.remoteRank === rank.tpRank && source.remotePpRank === (rank.ppRank ?? 0),
        )
        .map(([at]) => ({ plan, index, at })),
    );
    const [first] = writers;
    return first === undefined ? [] : [writtenRank(rank, writers, subjects)];
  });
}

interface Writer {
  readonly plan: EngineTransferPlan;
  /** Position among the plans, and of the rank among the plan's. */
  readonly index: number;
  readonly at: number;
}

function writtenRank(
  rank: RankGeometry,
  writers: readonly Writer[],
  subjects: readonly ProofSubject[],
): WrittenRank {
  const [{ plan, index }] = writers as [Writer];
  const lists = ({ plan: own, at }: Writer) => own.sources[at]?.lists ?? [];
  const subject: ProofSubject = {
    // Of the plan only what describes the destination is looked at; there is no pass over it.
    plan: { ...plan, local: rank, remote: plan.local, uncovered: "masked" },
    model: (subjects[index] as ProofSubject).model,
    remotes: writers.map((writer) => writer.plan.local),
    localMemory: writers.map((writer) =>
      lists(writer).map((list) => namedMemory(`remote rank ${rank.tpRank}`, list.remoteTable, rank)),
    ),
    remoteMemory: writers.map((writer) =>
      lists(writer).map((list) =>
        namedMemory(`rank ${writer.plan.local.tpRank}`, list.localTable, writer.plan.local),
      ),
    ),
  };
  return {
    subject,
    turn: (blocks, requests) => ({
      blocks: {
        ...blocks,
        localBlockIds: blocks.remoteBlockIds,
        remoteBlockIds: blocks.localBlockIds,
        written: true,
      },
      request: {
        ...(requests[index] as RequestPlan),
        reads: writers.flatMap((writer, source) =>
          (requests[writer.index]?.reads ?? [])
            .filter(({ sourceIndex }) => sourceIndex === writer.at)
            .map((read) => turned(read, rank, writer, source)),
        ),
        receivePass: undefined,
      },
    }),
  };
}

function turned(read: RequestRead, rank: RankGeometry, { plan }: Writer, sourceIndex: number): RequestRead {
  if (read.remoteRank !== rank.tpRank || read.remotePpRank !== (rank.ppRank ?? 0)) {
    fail("wrong-source", `a write to rank ${read.remoteRank} goes through the lists of rank ${rank.tpRank}`, {
      localRank: plan.local.tpRank,
      remoteRank: rank.tpRank,
    });
  }
  return {
    remoteRank: plan.local.tpRank,
    remotePpRank: plan.local.ppRank ?? 0,
    sourceIndex,
    listIndex: read.listIndex,
    runs: turnedRuns(read.runs),
    localIds: read.remoteIds,
    remoteIds: read.localIds,
    descriptors: fromOtherSide(read.descriptors),
    descriptorCount: read.descriptorCount,
    lengthBytes: read.lengthBytes,
  };
}
