import { type KvCaches, KvError, type Memory, silentLog } from "@kv/interface";
import { buildEngineTransferPlan, planRequest } from "@kv/plan";
import { manualClock } from "@kv/testing/manual-clock";
import { testRank } from "@kv/testing/worker-context";
import { expect, it } from "vitest";
import type { RemoteEngine } from "../peers/remote-engine.js";
import { TaskTracker } from "../peers/transfers.js";
import type { RemoteRequest } from "../requests/references.js";
import { WorkerOutputQueue } from "./connector-worker.js";
import { PendingReceives, type Receiver } from "./pending-receives.js";

interface Order {
  readonly requestId: string;
  readonly remote: RemoteRequest;
  readonly localBlockIds: readonly (readonly number[])[];
}

/** Orders of `r` until they have ended: what is reported, and the errors that are logged. */
async function received(
  run: Receiver<Order>["run"],
  {
    regions = [] as unknown as KvCaches["regions"],
    hasSingleGroup = true,
    localBlockIds = [[4, 5]],
    times = 1,
  } = {},
) {
  const clock = manualClock(0);
  const output = new WorkerOutputQueue({ cachesUnverifiedKv: false });
  const tasks = new TaskTracker();
  const errors: string[] = [];
  const receives = new PendingReceives<Order>(
    {
      caches: { regions } as KvCaches,
      clock,
      log: { ...silentLog, error: (event) => void errors.push(event) },
      output,
      tasks,
      timeoutMs: 1000,
      hasSingleGroup,
    },
    { run },
  );
  const remote = { engineId: "p" } as RemoteRequest;
  for (let time = 0; time < times; time++)
    receives.start({ requestId: "r", remote, localBlockIds });
  await tasks.idle();
  expect([receives.size, clock.pending()]).toEqual([0, 0]);
  return { ...output.take(), errors };
}

it.each([
  [true, [4, 5]],
  // An id without its group would name blocks of other requests (vLLM 0.33: `failed_recving`).
  [false, []],
])(
  "a failed load is reported by request, and by block ids where the cache has a single group: %s",
  async (hasSingleGroup, blockIds) => {
    const localBlockIds = hasSingleGroup ? [[4, 5]] : [[4, 5], [6]];
    const run = () => Promise.reject(new KvError("KV_TRANSFER_FAILED", "no"));
    expect(await received(run, { hasSingleGroup, localBlockIds })).toMatchObject({
      finishedReceiving: ["r"],
      failedReceiving: [{ requestId: "r", code: "KV_TRANSFER_FAILED", blockIds }],
      failedBlockIds: blockIds,
    });
  },
);

it("a request that is ordered twice is received once: two transfers must not fill the same blocks", async () => {
  const { finishedReceiving, errors } = await received(async () => {}, { times: 2 });
  expect([finishedReceiving, errors]).toEqual([["r"], ["receive-ordered-twice"]]);
});

it.each([
  ["zeroed", undefined, []],
  ["refused by name where they cannot be", "KV_TRANSPORT_UNSUPPORTED", ["KV_PLATFORM_UNSUPPORTED"]],
  ["refused with the error of the device", "KV_TRANSFER_FAILED", ["KV_TRANSFER_FAILED"]],
] as const)("tokens of device memory after the prompt's end are %s", async (_, thrown, codes) => {
  const [region] = testRank().regions;
  const rank = testRank({
    layout: "LBNHC",
    regions: [{ ...(region as NonNullable<typeof region>), memoryType: "VRAM" }],
  });
  const shape = { numKvHeads: 4, groups: ["full"], canPass: false };
  const plan = buildEngineTransferPlan({ local: rank, remotes: [rank], ...shape });
  const blocks = { localBlockIds: [[2]], remoteBlockIds: [[7]], numTokens: 10 };
  const zeroed: [rows: number[], lengthBytes: number][] = [];
  const memory: Partial<Memory> = {
    memoryType: "VRAM",
    async scatter(rows, { byteLength }) {
      zeroed.push([[...rows], byteLength]);
      if (thrown !== undefined) throw new KvError(thrown, "no copies");
      return undefined as never;
    },
  };
  const { failedReceiving } = await received(
    (receive) => receive.pass({ plan } as RemoteEngine, planRequest(plan, blocks)),
    {
      regions: [
        { name: "layers.0", memory, memoryType: "VRAM", offsetBytes: 4096 },
      ] as unknown as KvCaches["regions"],
    },
  );
  // Block 2 of 1024 bytes, from its 11th token of 64 bytes on.
  expect(zeroed).toEqual([[[4096 + 2 * 1024 + 640, 384], 384]]);
  expect(failedReceiving.map(({ code }) => code)).toEqual(codes);
});
