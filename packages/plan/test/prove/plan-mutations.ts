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

type Pick = (below: number) => number;
export type Mutation = (sound: Case, pick: Pick) => Case | undefined;

interface Changed {
  readonly plan?: Partial<EngineTransferPlan>;
  readonly request?: Partial<RequestPlan>;
}

const replaced = <T>(list: readonly T[], index: number, change: Partial<T>): readonly T[] =>
  list.map((item, at) => (at === index ? { ...item, ...change } : item));

/** Changes the plan or the request of one rank. */
const ofRank =
  (
    change: (plan: EngineTransferPlan, request: RequestPlan, pick: Pick) => Changed | undefined,
  ): Mutation =>
  (sound, pick) => {
    const rank = pick(sound.plans.length);
    const { plans, requests } = sound;
    const [plan, request] = [plans[rank], requests[rank]];
    const other = plan && request && change(plan, request, pick);
    return (
      other && {
        plans: other.plan === undefined ? plans : replaced(plans, rank, other.plan),
        requests: other.request === undefined ? requests : replaced(requests, rank, other.request),
      }
    );
  };

/** Changes one row of one table of one rank: one that a read of the request uses. */
const tableRow = (
  side: "localTable" | "remoteTable",
  change: (rows: Float64Array, index: number) => void,
): Mutation =>
  ofRank(({ sources }, { reads }, pick) => {
    if (reads.length === 0) return undefined;
    const { sourceIndex } = reads[pick(reads.length)] as RequestRead;
    const source = sources[sourceIndex] as SourcePlan;
    const rows = source[side].rows.slice();
    change(rows, 5 * pick(rows.length / 5));
    const lists = replaced(source.lists, 0, { [side]: { ...source[side], rows } });
    return { plan: { sources: replaced(sources, sourceIndex, { lists }) } };
  });

/** Changes one read of one rank. */
const read = (
  change: (
    read: RequestRead,
    ids: { local: number[]; remote: number[] },
    plan: EngineTransferPlan,
  ) => object | undefined,
): Mutation =>
  ofRank((plan, { reads }, pick) => {
    if (reads.length === 0) return undefined;
    const index = pick(reads.length);
    const old = reads[index] as RequestRead;
    const ids = { local: [...old.localIds], remote: [...old.remoteIds] };
    const other = ids.local.length === 0 ? undefined : change(old, ids, plan);
    if (other === undefined) return undefined;
    // Rebuild the runs from the ids.
    const runs = Int32Array.from(ids.local.flatMap((id, at) => [id, ids.remote[at] ?? -1, 1]));
    const localIds = Int32Array.from(ids.local);
    const remoteIds = Int32Array.from(ids.remote);
    const changed = { ...old, localIds, remoteIds, runs, ...other };
    return { request: { reads: replaced(reads, index, changed) } };
  });

/** Changes the receive pass of one rank: that of the first group to which the change applies. */
const pass = (
  change: (
    group: ReceivePassGroup,
    plan: EngineTransferPlan,
  ) => Partial<ReceivePassGroup> | undefined,
): Mutation =>
  ofRank((plan, { receivePass }) => {
    const { groups = [] } = receivePass ?? {};
    for (const [index, group] of groups.entries()) {
      const other = change(group, plan);
      if (other !== undefined)
        return { request: { receivePass: { groups: replaced(groups, index, other) } } };
    }
    return undefined;
  });

const notified = (
  change: (notify: readonly number[], request: RequestPlan, plan: EngineTransferPlan) => number[],
): Mutation =>
  ofRank((plan, request) => {
    const notifyRanks = change(request.notifyRanks, request, plan);
    if (notifyRanks.join() === request.notifyRanks.join()) return undefined;
    return {
      request: { notifyRanks, notify: notifyRanks.map((tpRank) => ({ tpRank, ppRank: 0 })) },
    };
  });

/** Whether the finished blocks would differ without the pass of a group. */
const isNeeded = (group: ReceivePassGroup, plan: EngineTransferPlan) =>
  group.zeroBlockIds.length > 0 ||
  group.leadingBlock !== undefined ||
  group.partialBlock !== undefined ||
  (group.permuteBlockIds.length > 0 && orderMatters(plan));

/**
 * One head, or one token, has one order only; parts of one token come as tokens, which is what a
 * token-major block is.
 */
const orderMatters = ({ localHeads, local, blockOrder, blockSizeRatio }: EngineTransferPlan) =>
  localHeads > 1 && local.kernelBlockSize > (blockOrder === "token-major" ? blockSizeRatio : 1);
const change = (rows: Float64Array, at: number, by: number) => {
  rows[at] = (rows[at] ?? 0) + by;
};
const share = (rows: Float64Array, at: number) => change(rows, at, rows[at + 1] ?? 0);
const SAME = {};

/** Moves the end of the zeroed tokens before a window, or the begin of those behind the last. */
const lead = ({ leadingBlock }: ReceivePassGroup, by: number) =>
  leadingBlock && { leadingBlock: { ...leadingBlock, untilToken: leadingBlock.untilToken + by } };
const tail = ({ partialBlock }: ReceivePassGroup, by: number) =>
  partialBlock && { partialBlock: { ...partialBlock, fromToken: partialBlock.fromToken + by } };

/**
 * All mutations by name, each with the kinds of the fault that it may be found as. A mutation returns
 * undefined when it does not apply to the plan.
 */
export const MUTATIONS: Readonly<Record<string, readonly [kinds: string, Mutation]>> = {
  "a local row begins one byte late": [
    "descriptor-step|written-twice",
    tableRow("localTable", (rows, at) => change(rows, at, 1)),
  ],
  "a local row begins one share late": [
    "descriptor-step|written-twice",
    tableRow("localTable", share),
  ],
  "a remote row begins one byte late": [
    "descriptor-step|wrong-source",
    tableRow("remoteTable", (rows, at) => change(rows, at, 1)),
  ],
  "a remote row begins one share late": [
    "descriptor-step|wrong-source",
    tableRow("remoteTable", share),
  ],
  "a local row is one byte shorter": [
    "descriptor-step",
    tableRow("localTable", (rows, at) => change(rows, at + 1, -1)),
  ],
  "a remote row is one byte longer": [
    "descriptor-step",
    tableRow("remoteTable", (rows, at) => change(rows, at + 1, 1)),
  ],
  "a local row's stride is one byte more": [
    "descriptor-step",
    tableRow("localTable", (rows, at) => change(rows, at + 3, 1)),
  ],
  "a remote row has one descriptor less": [
    "descriptor-outside|descriptor-step",
    tableRow("remoteTable", (rows, at) => change(rows, at + 4, -1)),
  ],
  "two pairs change places on one side": [
    "descriptor-lengths|wrong-source",
    read((_, { remote }) => {
      const last = remote.length - 1;
      [remote[0], remote[last]] = [remote[last] as number, remote[0] as number];
      return last < 1 ? undefined : SAME;
    }),
  ],
  "a pair is left out": [
    "not-written",
    read((_, { local, remote }) => {
      local.shift();
      remote.shift();
      return SAME;
    }),
  ],
  "a pair is there twice": [
    "written-twice",
    read((_, { local, remote }) => {
      local.push(local[0] as number);
      remote.push(remote[0] as number);
      return SAME;
    }),
  ],
  "a block comes from another region": [
    "descriptor-lengths|wrong-source",
    read((_, { remote }, { remoteIndexing: [first, other] }) => {
      remote[0] = (remote[0] as number) + (first?.count ?? 0);
      return other && SAME;
    }),
  ],
  "a block lands in another region": [
    "foreign-write|wrong-source",
    read((_, { local }, { localIndexing: [first, other] }) => {
      local[0] = (local[0] as number) + (first?.count ?? 0);
      return other && SAME;
    }),
  ],
  "a block comes from the block before": [
    "wrong-source",
    read((_, { remote }) => {
      remote[0] = (remote[0] as number) - 1;
      return remote[0] < 0 ? undefined : SAME;
    }),
  ],
  "a read names another rank": [
    "wrong-source",
    read((old, _, { remote: { tpSize } }) =>
      tpSize === 1 ? undefined : { remoteRank: (old.remoteRank + 1) % tpSize },
    ),
  ],
  "two sources change places": [
    "wrong-source",
    ofRank(({ sources: [one, two, ...others] }, { reads }) => {
      // With DCP, a request behind a prefix hit may read neither. The order means nothing to another
      // request.
      const isRead = reads.some(({ sourceIndex }) => sourceIndex < 2);
      return one && two && isRead ? { plan: { sources: [two, one, ...others] } } : undefined;
    }),
  ],
  "a source's heads come from another rank": [
    "descriptor-outside",
    ofRank(({ sources: [one, two, ...others] }) => {
      if (one === undefined || two === undefined) return undefined;
      const lists = one.lists.map((list, index) => ({
        ...list,
        remoteTable: two.lists[index]?.remoteTable ?? list.remoteTable,
      }));
      return { plan: { sources: [{ ...one, lists }, two, ...others] } };
    }),
  ],
  "a whole read is left out": [
    "not-written",
    ofRank((_, { reads }) =>
      reads.length === 0 ? undefined : { request: { reads: reads.slice(1) } },
    ),
  ],
  "a notification is left out": ["notification-missing", notified((notify) => notify.slice(1))],
  "a rank is notified twice": [
    "notification-twice",
    notified((notify, { reads: [first] }) =>
      first === undefined ? [...notify] : [...notify, first.remoteRank],
    ),
  ],
  "a rank that does not wait is notified": [
    "notification-count|notification-stray",
    notified((notify, { reads }, { remote }) => {
      const told = new Set([...notify, ...reads.map(({ remoteRank }) => remoteRank)]);
      const others = Array.from({ length: remote.tpSize + 1 }, (_, rank) => rank);
      return [...notify, ...others.filter((rank) => !told.has(rank)).slice(0, 1)];
    }),
  ],
  "the count of notifications is one more": [
    "notification-missing",
    (sound) => ({
      ...sound,
      plans: sound.plans.map((plan) => ({ ...plan, localConsumers: plan.localConsumers + 1 })),
    }),
  ],
  "the count of notifications is one less on one rank": [
    "notification-count",
    ofRank(({ localConsumers }) => ({
      plan: { localConsumers: localConsumers - 1 },
    })),
  ],
  "a block is not permuted": [
    "not-written|wrong-source",
    pass(({ permuteBlockIds }, plan) =>
      permuteBlockIds.length === 0 || !orderMatters(plan)
        ? undefined
        : { permuteBlockIds: permuteBlockIds.slice(1) },
    ),
  ],
  "a block is permuted twice": [
    "receive-pass",
    pass(({ permuteBlockIds: [first, ...more] }) =>
      first === undefined ? undefined : { permuteBlockIds: Int32Array.of(first, ...more, first) },
    ),
  ],
  "the tail begins one token late": ["tail-not-cleared", pass((group) => tail(group, 1))],
  "the tail begins one token early": ["needed-but-cleared", pass((group) => tail(group, -1))],
  "the tail is not zeroed": [
    "tail-not-cleared",
    pass(({ partialBlock }) => partialBlock && { partialBlock: undefined }),
  ],
  "what is before a window ends one token late": [
    "needed-but-cleared",
    pass((group) => lead(group, 1)),
  ],
  "what is before a window ends one token early": [
    "lead-not-cleared",
    pass((group) => lead(group, -1)),
  ],
  "what is before a window is not zeroed": [
    "lead-not-cleared",
    pass(({ leadingBlock }) => leadingBlock && { leadingBlock: undefined }),
  ],
  "a block beyond the end is not zeroed": [
    "lead-not-cleared|tail-not-cleared",
    pass(({ zeroBlockIds }) =>
      zeroBlockIds.length === 0 ? undefined : { zeroBlockIds: zeroBlockIds.slice(1) },
    ),
  ],
  "a foreign block is zeroed": [
    "receive-pass",
    pass(({ zeroBlockIds }, { local: { regions } }) => ({
      zeroBlockIds: Int32Array.of(...zeroBlockIds, (regions[0]?.numBlocks ?? 0) + 1),
    })),
  ],
  "there is no receive pass": [
    "lead-not-cleared|tail-not-cleared|wrong-source|not-written",
    ofRank((plan, { receivePass }) =>
      receivePass?.groups.some((group) => isNeeded(group, plan))
        ? { request: { receivePass: undefined } }
        : undefined,
    ),
  ],
  "the pass leaves out a region": [
    "lead-not-cleared|not-written|tail-not-cleared",
    ofRank((plan, { receivePass }) => {
      const needed = receivePass?.groups.find((group) => isNeeded(group, plan))?.group;
      if (needed === undefined) return undefined;
      const regionsOfGroup = plan.regionsOfGroup.map((regions, group) =>
        group === needed ? regions.slice(1) : regions,
      );
      return { plan: { regionsOfGroup } };
    }),
  ],
  "the pass sees another number of parts": [
    "not-written|wrong-source",
    ofRank((plan, { receivePass }) => {
      const isPermuted = receivePass?.groups.some(
        ({ permuteBlockIds }) => permuteBlockIds.length > 0,
      );
      if (isPermuted !== true || !orderMatters(plan)) return undefined;
      const { blockOrder, blockSizeRatio, local } = plan;
      if (blockOrder === "token-major" && blockSizeRatio === 1) return undefined;
      return { plan: { blockSizeRatio: blockSizeRatio === 1 ? local.kernelBlockSize : 1 } };
    }),
  ],
};
