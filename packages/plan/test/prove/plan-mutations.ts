import type {
  EngineTransferPlan,
  ReceivePassGroup,
  RequestPlan,
  RequestRead,
  SourcePlan,
} from "../../src/index.js";

/** One scene to prove: the plans of all local ranks, and their request plans for one request. */
export interface Case {
  readonly plans: readonly EngineTransferPlan[];
  readonly requests: readonly RequestPlan[];
}

export type Mutation = (sound: Case, pick: (below: number) => number) => Case | undefined;

type Rows = (rows: Float64Array, index: number) => void;

function replaced<T>(list: readonly T[], index: number, value: T): readonly T[] {
  return list.map((item, at) => (at === index ? value : item));
}

function withRequest(sound: Case, rank: number, change: Partial<RequestPlan>): Case {
  return {
    ...sound,
    requests: replaced(sound.requests, rank, { ...sound.requests[rank], ...change } as RequestPlan),
  };
}

function withNotified(sound: Case, rank: number, notifyRanks: readonly number[]): Case {
  return withRequest(sound, rank, {
    notifyRanks,
    notify: notifyRanks.map((tpRank) => ({ tpRank, ppRank: 0 })),
  });
}

function withPlan(sound: Case, rank: number, change: Partial<EngineTransferPlan>): Case {
  return {
    ...sound,
    plans: replaced(sound.plans, rank, { ...sound.plans[rank], ...change } as EngineTransferPlan),
  };
}

/** Changes one row of one table of one rank: one that a read of the request uses. */
function tableRow(side: "localTable" | "remoteTable", change: Rows): Mutation {
  return (sound, pick) => {
    const rank = pick(sound.plans.length);
    const [plan, request] = [sound.plans[rank], sound.requests[rank]];
    if (plan === undefined || request === undefined || request.reads.length === 0) return undefined;
    const read = request.reads[pick(request.reads.length)] as RequestRead;
    const source = plan.sources[read.sourceIndex];
    if (source === undefined) return undefined;
    const rows = source[side].rows.slice();
    change(rows, 5 * pick(rows.length / 5));
    const changed = {
      ...source.lists[0],
      [side]: { ...source[side], rows },
    } as SourcePlan["lists"][number];
    const other = { ...source, lists: [changed, ...source.lists.slice(1)] };
    return withPlan(sound, rank, { sources: replaced(plan.sources, read.sourceIndex, other) });
  };
}

/** Changes one read of one rank. */
function read(
  change: (
    read: RequestRead,
    pick: (below: number) => number,
    plan: EngineTransferPlan,
  ) => RequestRead | undefined,
): Mutation {
  return (sound, pick) => {
    const rank = pick(sound.requests.length);
    const [plan, request] = [sound.plans[rank], sound.requests[rank]];
    if (plan === undefined || request === undefined || request.reads.length === 0) return undefined;
    const index = pick(request.reads.length);
    const other = change(request.reads[index] as RequestRead, pick, plan);
    if (other === undefined) return undefined;
    // Rebuild the runs from the ids.
    const runs = Int32Array.from(
      [...other.localIds].flatMap((id, at) => [id, other.remoteIds[at] ?? -1, 1]),
    );
    return withRequest(sound, rank, { reads: replaced(request.reads, index, { ...other, runs }) });
  };
}

/** Changes the receive pass of one rank: that of the first group to which the change applies. */
const pass =
  (
    change: (group: ReceivePassGroup, plan: EngineTransferPlan) => ReceivePassGroup | undefined,
  ): Mutation =>
  (sound, pick) => {
    const rank = pick(sound.requests.length);
    const [plan, request] = [sound.plans[rank], sound.requests[rank]];
    if (plan === undefined || request?.receivePass === undefined) return undefined;
    const { groups } = request.receivePass;
    for (const [index, group] of groups.entries()) {
      const other = change(group, plan);
      if (other !== undefined)
        return withRequest(sound, rank, {
          receivePass: { groups: replaced(groups, index, other) },
        });
    }
    return undefined;
  };

/** Whether the finished blocks would differ without the pass of a group. */
const isNeeded = (group: ReceivePassGroup, plan: EngineTransferPlan) =>
  group.zeroBlockIds.length > 0 ||
  group.leadingBlock !== undefined ||
  group.partialBlock !== undefined ||
  (group.permuteBlockIds.length > 0 && orderMatters(plan));

/** Moves the end of the zeroed tokens before a window by this many tokens. */
const lead = (group: ReceivePassGroup, by: number): ReceivePassGroup | undefined => {
  const { leadingBlock } = group;
  if (leadingBlock === undefined) return undefined;
  return { ...group, leadingBlock: { ...leadingBlock, untilToken: leadingBlock.untilToken + by } };
};
/**
 * One head, or one token, has one order only; parts of one token come as tokens, which is what a
 * token-major block is.
 */
const orderMatters = ({ localHeads, local, blockOrder, blockSizeRatio }: EngineTransferPlan) =>
  localHeads > 1 && local.kernelBlockSize > (blockOrder === "token-major" ? blockSizeRatio : 1);
const change = (rows: Float64Array, at: number, by: number) => {
  rows[at] = (rows[at] ?? 0) + by;
};
const moved = (ids: Int32Array, at: number, to: number) => {
  const other = ids.slice();
  other[at] = to;
  return other;
};

/** All mutations by name. A mutation returns undefined when it does not apply to the plan. */
export const MUTATIONS: Readonly<Record<string, Mutation>> = {
  "a local row begins one byte late": tableRow("localTable", (rows, at) => change(rows, at, 1)),
  "a local row begins one share late": tableRow("localTable", (rows, at) =>
    change(rows, at, rows[at + 1] ?? 0),
  ),
  "a remote row begins one byte late": tableRow("remoteTable", (rows, at) => change(rows, at, 1)),
  "a remote row begins one share late": tableRow("remoteTable", (rows, at) =>
    change(rows, at, rows[at + 1] ?? 0),
  ),
  "a local row is one byte shorter": tableRow("localTable", (rows, at) => change(rows, at + 1, -1)),
  "a remote row is one byte longer": tableRow("remoteTable", (rows, at) => change(rows, at + 1, 1)),
  "a local row's stride is one byte more": tableRow("localTable", (rows, at) =>
    change(rows, at + 3, 1),
  ),
  "a remote row has one descriptor less": tableRow("remoteTable", (rows, at) =>
    change(rows, at + 4, -1),
  ),
  "two pairs change places on one side": read((old) => {
    const last = old.remoteIds.length - 1;
    if (last < 1) return undefined;
    const [first, other] = [old.remoteIds[0] as number, old.remoteIds[last] as number];
    return { ...old, remoteIds: moved(moved(old.remoteIds, 0, other), last, first) };
  }),
  "a pair is left out": read((old) =>
    old.localIds.length === 0
      ? undefined
      : { ...old, localIds: old.localIds.slice(1), remoteIds: old.remoteIds.slice(1) },
  ),
  "a pair is there twice": read((old) =>
    old.localIds.length === 0
      ? undefined
      : {
          ...old,
          localIds: Int32Array.of(...old.localIds, old.localIds[0] as number),
          remoteIds: Int32Array.of(...old.remoteIds, old.remoteIds[0] as number),
        },
  ),
  "a block comes from another region": read((old, _pick, plan) => {
    const step = plan.remoteIndexing[0]?.count ?? 0;
    const other = (old.remoteIds[0] ?? 0) + step;
    if (old.remoteIds.length === 0 || plan.remoteIndexing.length < 2) return undefined;
    return { ...old, remoteIds: moved(old.remoteIds, 0, other) };
  }),
  "a block lands in another region": read((old, _pick, plan) => {
    const step = plan.localIndexing[0]?.count ?? 0;
    if (old.localIds.length === 0 || plan.localIndexing.length < 2) return undefined;
    return { ...old, localIds: moved(old.localIds, 0, (old.localIds[0] ?? 0) + step) };
  }),
  "a block comes from the block before": read((old) => {
    const first = old.remoteIds[0] ?? 0;
    return first === 0 ? undefined : { ...old, remoteIds: moved(old.remoteIds, 0, first - 1) };
  }),
  "two sources change places": (sound, pick) => {
    const rank = pick(sound.plans.length);
    const plan = sound.plans[rank];
    const [one, two, ...others] = plan?.sources ?? [];
    if (plan === undefined || one === undefined || two === undefined) return undefined;
    // With DCP, a request behind a prefix hit may read neither. The order means nothing to another
    // request.
    if (sound.requests[rank]?.reads.every(({ sourceIndex }) => sourceIndex > 1) !== false)
      return undefined;
    return withPlan(sound, rank, { sources: [two, one, ...others] });
  },
  "a source's heads come from another rank": (sound, pick) => {
    const rank = pick(sound.plans.length);
    const plan = sound.plans[rank];
    const [one, two, ...others] = plan?.sources ?? [];
    if (plan === undefined || one === undefined || two === undefined) return undefined;
    const lists = one.lists.map((list, index) => ({
      ...list,
      remoteTable: two.lists[index]?.remoteTable ?? list.remoteTable,
    }));
    const spoiled = { ...one, lists };
    return withPlan(sound, rank, { sources: [spoiled, two, ...others] });
  },
  "a read names another rank": read((old, _pick, plan) =>
    plan.remote.tpSize === 1
      ? undefined
      : { ...old, remoteRank: (old.remoteRank + 1) % plan.remote.tpSize },
  ),
  "a whole read is left out": (sound, pick) => {
    const rank = pick(sound.requests.length);
    const reads = sound.requests[rank]?.reads ?? [];
    return reads.length === 0 ? undefined : withRequest(sound, rank, { reads: reads.slice(1) });
  },
  "a notification is left out": (sound, pick) => {
    const rank = pick(sound.requests.length);
    const notified = sound.requests[rank]?.notifyRanks ?? [];
    return notified.length === 0 ? undefined : withNotified(sound, rank, notified.slice(1));
  },
  "a rank is notified twice": (sound, pick) => {
    const rank = pick(sound.requests.length);
    const request = sound.requests[rank];
    const told = request?.reads[0]?.remoteRank;
    if (request === undefined || told === undefined) return undefined;
    return withNotified(sound, rank, [...request.notifyRanks, told]);
  },
  "a rank that does not wait is notified": (sound, pick) => {
    const rank = pick(sound.requests.length);
    const [plan, request] = [sound.plans[rank], sound.requests[rank]];
    if (plan === undefined || request === undefined) return undefined;
    const told = [...request.notifyRanks, ...request.reads.map((one) => one.remoteRank)];
    const other = Array.from({ length: plan.remote.tpSize + 1 }, (_, at) => at).find(
      (at) => !told.includes(at),
    );
    return other === undefined
      ? undefined
      : withNotified(sound, rank, [...request.notifyRanks, other]);
  },
  "the count of notifications is one more": (sound) => ({
    ...sound,
    plans: sound.plans.map((plan) => ({ ...plan, localConsumers: plan.localConsumers + 1 })),
  }),
  "the count of notifications is one less on one rank": (sound, pick) => {
    const rank = pick(sound.plans.length);
    return withPlan(sound, rank, { localConsumers: (sound.plans[rank]?.localConsumers ?? 0) - 1 });
  },
  "a block is not permuted": pass((group, plan) => {
    if (group.permuteBlockIds.length === 0 || !orderMatters(plan)) return undefined;
    return { ...group, permuteBlockIds: group.permuteBlockIds.slice(1) };
  }),
  "a block is permuted twice": pass((group) =>
    group.permuteBlockIds.length === 0
      ? undefined
      : {
          ...group,
          permuteBlockIds: Int32Array.of(
            ...group.permuteBlockIds,
            group.permuteBlockIds[0] as number,
          ),
        },
  ),
  "the tail begins one token late": pass((group) =>
    group.partialBlock === undefined
      ? undefined
      : {
          ...group,
          partialBlock: { ...group.partialBlock, fromToken: group.partialBlock.fromToken + 1 },
        },
  ),
  "the tail begins one token early": pass((group) =>
    group.partialBlock === undefined
      ? undefined
      : {
          ...group,
          partialBlock: { ...group.partialBlock, fromToken: group.partialBlock.fromToken - 1 },
        },
  ),
  "the tail is not zeroed": pass(({ partialBlock, ...group }) =>
    partialBlock === undefined ? undefined : group,
  ),
  "what is before a window ends one token late": pass((group) => lead(group, 1)),
  "what is before a window ends one token early": pass((group) => lead(group, -1)),
  "what is before a window is not zeroed": pass(({ leadingBlock, ...group }) =>
    leadingBlock === undefined ? undefined : group,
  ),
  "a block beyond the end is not zeroed": pass((group) =>
    group.zeroBlockIds.length === 0
      ? undefined
      : { ...group, zeroBlockIds: group.zeroBlockIds.slice(1) },
  ),
  "a foreign block is zeroed": pass((group, plan) => ({
    ...group,
    zeroBlockIds: Int32Array.of(...group.zeroBlockIds, (plan.local.regions[0]?.numBlocks ?? 0) + 1),
  })),
  "there is no receive pass": (sound, pick) => {
    const rank = pick(sound.requests.length);
    const [plan, pass] = [sound.plans[rank], sound.requests[rank]?.receivePass];
    if (plan === undefined || !pass?.groups.some((group) => isNeeded(group, plan)))
      return undefined;
    return withRequest(sound, rank, { receivePass: undefined });
  },
  "the pass leaves out a region": (sound, pick) => {
    const rank = pick(sound.requests.length);
    const [plan, pass] = [sound.plans[rank], sound.requests[rank]?.receivePass];
    const needed = plan && pass?.groups.find((group) => isNeeded(group, plan));
    if (plan === undefined || needed === undefined) return undefined;
    return withPlan(sound, rank, {
      regionsOfGroup: plan.regionsOfGroup.map((regions, group) =>
        group === needed.group ? regions.slice(1) : regions,
      ),
    });
  },
  "the pass sees another number of parts": (sound, pick) => {
    const rank = pick(sound.plans.length);
    const plan = sound.plans[rank];
    const permuted = sound.requests[rank]?.receivePass?.groups.some(
      (group) => group.permuteBlockIds.length > 0,
    );
    if (plan === undefined || permuted !== true || !orderMatters(plan)) return undefined;
    if (plan.blockOrder === "token-major" && plan.blockSizeRatio === 1) return undefined;
    const blockSizeRatio = plan.blockSizeRatio === 1 ? plan.local.kernelBlockSize : 1;
    return withPlan(sound, rank, { blockSizeRatio });
  },
};
