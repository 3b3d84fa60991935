import { expect, test } from "vitest";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  planRequest,
  proveEnginePlans,
  provePlan,
  type RequestPlan,
  type RequestRead,
} from "../../src/index.js";
import { kindEngine } from "../bytes/kind-memory.js";

const CACHES = ["layer.0", "layer.1"].map((name) => ({ name, groups: [0], heads: 4 }));
const ENGINE = { kernelTokens: 8, perLogical: 1, logicalBlocks: 20 };
const BLOCKS = { localBlockIds: [[3, 4, 9]], remoteBlockIds: [[1, 2, 5]], numTokens: 21 };

/** All plans of a prefill engine that writes, TP 4 with the layers on two stages, into decode ranks of TP 2. */
function engines(prefillTp = 4, decodeTp = 2, stages: readonly (readonly number[])[] = [[0], [1]]) {
  const ranks = (engine: Parameters<typeof kindEngine>[0], base: number) =>
    kindEngine(engine, CACHES, ["full"], base, 0).map(({ geometry }) => geometry);
  const prefill = ranks({ ...ENGINE, tpSize: prefillTp, stages }, 2 ** 40);
  const remotes = ranks({ ...ENGINE, tpSize: decodeTp }, 2 ** 36);
  const ratio = prefillTp / decodeTp;
  const plans = prefill.map((local) =>
    buildEngineTransferPlan({
      groups: ["full"],
      numKvHeads: 4,
      local,
      remotes: remotes.filter(({ tpRank }) =>
        ratio >= 1
          ? tpRank === Math.floor(local.tpRank / ratio)
          : Math.floor(tpRank * ratio) === local.tpRank,
      ),
      operation: "WRITE",
    }),
  );
  return { plans, remotes };
}

type Given = ReturnType<typeof engines>;

function verdictOf({ plans, remotes }: Given, requests?: readonly RequestPlan[]) {
  return proveEnginePlans(plans, {
    remotes,
    numKvHeads: 4,
    requests: [{ blocks: BLOCKS, ...(requests === undefined ? {} : { plans: requests }) }],
  });
}

function faultOf(given: Given, spoil: (requests: RequestPlan[], plans: EngineTransferPlan[]) => void) {
  const plans = [...given.plans];
  const requests = plans.map((plan) => planRequest(plan, BLOCKS));
  spoil(requests, plans);
  const verdict = verdictOf({ ...given, plans }, requests);
  return verdict.proven ? "proven" : verdict.fault.kind;
}

test.each([
  [4, 2],
  [2, 4],
  [8, 2],
  [2, 8],
])("prefill TP %i with two stages, decode TP %i: written whole, and counted", (p, d) => {
  const verdict = verdictOf(engines(p, d));
  expect(verdict).toMatchObject({ proven: true });
  expect(verdict.proven && verdict.assumed.join()).toMatch(/written to zeroes or masks/);
});

test("one rank's share is right by itself, though others write the rest", () => {
  const { plans, remotes } = engines();
  const [plan] = plans as [EngineTransferPlan];
  const verdict = provePlan(plan, { remotes, numKvHeads: 4 });
  expect(verdict.proven && verdict.statements[1]).toMatch(/every byte that is written/);
});

const changed = (request: RequestPlan, change: (read: RequestRead) => Partial<RequestRead>): RequestPlan => ({
  ...request,
  reads: request.reads.map((read, index) => {
    if (index > 0) return read;
    const ids = { localIds: read.localIds, remoteIds: read.remoteIds, ...change(read) };
    const runs = Int32Array.from([...ids.localIds].flatMap((id, at) => [id, ids.remoteIds[at] ?? -1, 1]));
    return { ...read, ...ids, runs };
  }),
});

test.each<[string, string, Parameters<typeof faultOf>[1]]>([
  [
    "a rank writes nothing",
    "not-written",
    (requests) => {
      const [first] = requests as [RequestPlan];
      requests[0] = { ...first, reads: [], notify: [{ tpRank: 0, ppRank: 0 }], notifyRanks: [0] };
    },
  ],
  [
    "two ranks write the same",
    "written-twice",
    (_requests, plans) => {
      // The rank that holds the other heads writes to the first one's share.
      const [first, second] = plans as [EngineTransferPlan, EngineTransferPlan];
      const [own, other] = [second.sources[0], first.sources[0]];
      if (own === undefined || other === undefined) throw new Error("no source");
      const lists = own.lists.map((list, at) => ({
        ...list,
        remoteTable: other.lists[at]?.remoteTable ?? list.remoteTable,
      }));
      plans[1] = { ...second, sources: [{ ...own, lists }] };
    },
  ],
  [
    "a block of another request is written",
    "foreign-write",
    (requests) => {
      requests[0] = changed(requests[0] as RequestPlan, (read) => ({
        remoteIds: read.remoteIds.map((id, at) => (at === 0 ? id + 7 : id)),
      }));
    },
  ],
  [
    "a block of another request is sent",
    "wrong-source",
    (requests) => {
      requests[0] = changed(requests[0] as RequestPlan, (read) => ({
        localIds: read.localIds.map((id, at) => (at === 0 ? id + 7 : id)),
      }));
    },
  ],
  [
    "blocks change places",
    "wrong-source",
    (requests) => {
      requests[0] = changed(requests[0] as RequestPlan, (read) => ({
        remoteIds: read.remoteIds.toReversed(),
      }));
    },
  ],
  [
    "a rank with nothing to write keeps silent",
    "notification-missing",
    (requests) => {
      const last = requests.at(-1) as RequestPlan;
      requests[requests.length - 1] = { ...last, notify: [], notifyRanks: [], reads: [] };
    },
  ],
  [
    "a rank tells twice",
    "notification-twice",
    (requests) => {
      const [first] = requests as [RequestPlan];
      requests[0] = { ...first, notify: [{ tpRank: 0, ppRank: 0 }] };
    },
  ],
  [
    "the count is another",
    "notification-count",
    (_requests, plans) => {
      plans[0] = { ...(plans[0] as EngineTransferPlan), localConsumers: 1 };
    },
  ],
  [
    "the writer's own blocks are passed over",
    "receive-pass",
    (requests) => {
      const pass = { group: 0, permuteBlockIds: new Int32Array(0), zeroBlockIds: Int32Array.of(3) };
      requests[0] = { ...(requests[0] as RequestPlan), receivePass: { groups: [pass] } };
    },
  ],
])("%s: %s", (_name, kind, spoil) => {
  const given = kind === "notification-missing" ? engines(8, 1) : engines();
  expect(faultOf(given, spoil)).toBe(kind);
});

test("blocks before the first that is taken are left alone", () => {
  const { plans, remotes } = engines(1, 1, [[0, 1]]);
  const suffix = { ...BLOCKS, localBlockIds: [[4, 9]], localComputedBlocks: [1] };
  const proven = (plan: RequestPlan) =>
    proveEnginePlans(plans, { remotes, numKvHeads: 4, requests: [{ blocks: suffix, plans: [plan] }] });
  const [plan] = plans as [EngineTransferPlan];
  const request = planRequest(plan, suffix);
  expect(proven(request).proven).toBe(true);
  const early = changed(request, (read) => ({
    localIds: Int32Array.of(...read.localIds, 9),
    remoteIds: Int32Array.of(...read.remoteIds, 1),
  }));
  const verdict = proven(early);
  expect(verdict.proven ? "proven" : verdict.fault.kind).toBe("foreign-write");
});
