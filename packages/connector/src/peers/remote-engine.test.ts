import { KvError, type PreparedList } from "@kv/interface";
import type { ModelGeometry, RankGeometry } from "@kv/plan";
import { manualClock } from "@kv/testing/manual-clock";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { describe, expect, it } from "vitest";
import { planPrefillEngine } from "./remote-engine.js";
import { RemoteEngines } from "./remote-engines.js";

const rank = testRank;

interface Given {
  readonly local?: RankGeometry;
  readonly remote?: RankGeometry;
  readonly groups?: ModelGeometry["groups"];
  readonly enablePermuteLocalKv?: boolean;
  readonly prefixCaching?: boolean | undefined;
  readonly dcpSize?: number;
  readonly preparesLists?: boolean;
}

/**
 * Opens a remote engine whose ranks all have the same geometry: the plan, and the ranks that were
 * asked.
 */
async function opened({
  local = rank(),
  remote = rank(),
  groups = ["full"],
  enablePermuteLocalKv = false,
  prefixCaching,
  dcpSize = 1,
  preparesLists = true,
}: Given) {
  let asked: readonly number[] = [];
  const context = testContext({
    agent: listAgent(),
    local,
    enablePermuteLocalKv,
    prefixCaching,
    model: { numKvHeads: 4, groups },
    remote(tpRanks) {
      asked = tpRanks;
      return testRanks((tpRank) => ({ ...remote, tpRank }))(tpRanks);
    },
  });
  const engines = new RemoteEngines(context, {
    failureType: "handshake_setup_failed",
    role: "prefill",
    plan: (_, answer) => planPrefillEngine(context, answer, { preparesLists }),
  });
  const address = { engineId: "p", host: "p", port: 1, tpSize: remote.tpSize, dcpSize, ppSize: 1 };
  const work = engines.open(address).then(({ engine }) => engine.plan);
  return { plan: await work.catch((error: Error) => error), asked: () => asked };
}

const STATE = { convBytes: 128, recurrentBytes: 256 };
/** D and P of a state-space model, whose kernel blocks per logical block differ. */
const STATES: Given = {
  groups: ["mamba"],
  local: rank({ stateSpace: STATE }),
  remote: rank({ stateSpace: STATE, physicalBlocksPerLogical: 2 }),
};
const LARGER = rank({ kernelBlockSize: 32 });

describe("the plan of a remote engine takes from this engine", () => {
  it.each<[string, Given, object]>([
    [
      "that it converts HND to NHD (enable_permute_local_kv)",
      { local: rank({ layout: "LBNHC" }), enablePermuteLocalKv: true },
      { form: "permute", conversions: ["hnd-to-nhd"] },
    ],
    [
      "that P writes, and plans with the conversion whatever this side's setting is",
      { local: rank({ layout: "LBNHC" }), preparesLists: false },
      { form: "permute", conversions: ["hnd-to-nhd"] },
    ],
    [
      "that it does not convert",
      { local: rank({ layout: "LBNHC" }) },
      { form: "direct", formReason: expect.stringContaining('"hnd-to-nhd"') as string },
    ],
    ["that its memory is the host's, which a pass reaches", { local: LARGER }, { form: "permute" }],
    [
      "that its memory is a device's, which no pass reaches",
      {
        local: {
          ...LARGER,
          regions: LARGER.regions.map((region) => ({ ...region, memoryType: "VRAM" })),
        },
      },
      { form: "direct", formReason: expect.stringContaining("device memory") as string },
    ],
    ["that it reuses no prefixes", { ...STATES, prefixCaching: false }, { form: "copy" }],
    ["that it reuses prefixes, the default", STATES, { code: "KV_PLAN_UNSUPPORTED" }],
  ])("%s", async (_, given, expected) => {
    expect((await opened(given)).plan).toMatchObject(expected);
  });
});

it("what was opened is closed when a list cannot be prepared, and a later try prepares it again", async () => {
  const clock = manualClock();
  let fails = true;
  let open = 0;
  const opened = <T extends object>(list: T) => {
    open += 1;
    return { ...list, close } as unknown as PreparedList;
  };
  const close = async () => {
    open -= 1;
  };
  const context = testContext({
    clock,
    local: rank(),
    remote: testRanks(() => rank()),
    agent: listAgent({
      removeRemote: close,
      prepareRemote: async (remote) => opened({ remote }),
      async addRemote() {
        opened({});
        return "agent";
      },
      async prepareLocal() {
        if (fails) throw new KvError("KV_TRANSFER_INVALID", "no memory");
        return opened({});
      },
    }),
  });
  const engines = new RemoteEngines(context, {
    failureType: "handshake_setup_failed",
    role: "prefill",
    plan: (_, answer) => planPrefillEngine(context, answer, {}),
  });
  const address = { engineId: "p", host: "p", port: 1, tpSize: 1, dcpSize: 1, ppSize: 1 };
  await expect(engines.open(address)).rejects.toMatchObject({ code: "KV_TRANSFER_INVALID" });
  expect(open).toBe(0);
  fails = false;
  clock.advance(1000);
  (await engines.open(address)).release();
  expect(open).toBe(3);
  await engines.close();
  expect([open, context.localLists.size, context.remoteAgents.size]).toEqual([0, 0, 0]);
});

describe("the ranks that are asked are those of the request's sizes", () => {
  it.each([
    [{ dcpSize: 1 }, [1]],
    [{ dcpSize: 2 }, [0, 1]],
    [{ dcpSize: 1, remote: rank({ tpSize: 4 }) }, [2, 3]],
  ])("%j: ranks %j", async (given, ranks) => {
    const half = rank({ tpSize: 2 });
    const { asked } = await opened({ remote: half, ...given, local: { ...half, tpRank: 1 } });
    expect(asked()).toEqual(ranks);
  });
});
