import { type KvCaches, KvError, silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, it } from "vitest";
import { TaskTracker } from "../peers/transfers.js";
import type { RemoteRequest } from "../requests/references.js";
import { WorkerOutputQueue } from "./connector-worker.js";
import { PendingReceives } from "./pending-receives.js";

it.each([
  [true, [4, 5]],
  // An id without its group would name blocks of other requests (vLLM 0.33: `failed_recving`).
  [false, []],
])(
  "a failed load is reported by request, and by block ids where the cache has a single group: %s",
  async (hasSingleGroup, blockIds) => {
    const output = new WorkerOutputQueue({ cachesUnverifiedKv: false });
    const tasks = new TaskTracker();
    const receives = new PendingReceives(
      {
        caches: { regions: [] } as unknown as KvCaches,
        clock: manualClock(0),
        log: silentLog,
        output,
        tasks,
        timeoutMs: 1000,
        hasSingleGroup,
      },
      { run: () => Promise.reject(new KvError("KV_TRANSFER_FAILED", "no")) },
    );
    const localBlockIds = hasSingleGroup ? [[4, 5]] : [[4, 5], [6]];
    receives.start({ requestId: "r", remote: { engineId: "p" } as RemoteRequest, localBlockIds });
    await tasks.idle();
    expect(output.take()).toMatchObject({
      finishedReceiving: ["r"],
      failedReceiving: [{ requestId: "r", code: "KV_TRANSFER_FAILED", blockIds }],
      failedBlockIds: blockIds,
    });
  },
);
