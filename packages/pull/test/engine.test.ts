import { engineSuite, playScene } from "@kv/conformance/engine";
import { delegateTo } from "@kv/connector/building-blocks";
import type { ConnectorModule, SchedulerConnector, WorkerConnector } from "@kv/interface";
import { sceneOptions } from "@kv/testing/groups/group-tests";
import { expect, it } from "vitest";
import { pullConnector } from "../src/index.js";

// `npm run test:long -- --only engine` plays 10,000.
engineSuite({
  ...sceneOptions(pullConnector),
  name: "pull",
  without: ["early"],
  scenes: Number(process.env.KV_SCENES ?? 40),
});

function broken(
  scheduler: (inner: SchedulerConnector) => Partial<SchedulerConnector>,
  worker: (inner: WorkerConnector) => Partial<WorkerConnector> = () => ({}),
): ConnectorModule {
  return {
    name: "broken",
    async createScheduler(options) {
      const inner = await pullConnector.createScheduler(options);
      return delegateTo(inner, scheduler(inner));
    },
    async createWorker(options) {
      const inner = await pullConnector.createWorker(options);
      return delegateTo(inner, worker(inner));
    },
  };
}

const receiving = new Set<string>();

it.each<[what: string, found: RegExp, connector: ConnectorModule]>([
  [
    "frees what D reads",
    /wrong bytes/,
    broken((inner) => ({
      requestFinished: (...ended) => ({ ...inner.requestFinished(...ended), keepBlocks: false }),
    })),
  ],
  [
    "takes blocks in another order",
    /wrong bytes/,
    broken((inner) => ({
      afterAllocation: (request, blockIds, ...more) =>
        inner.afterAllocation(
          request,
          blockIds.map((ids) => ids.toReversed()),
          ...more,
        ),
    })),
  ],
  [
    "reports KV that has not arrived",
    /wrong bytes/,
    broken(
      (inner) => ({
        afterAllocation(request, blockIds, externalTokens, ...more) {
          if (externalTokens > 0) receiving.add(request.requestId);
          inner.afterAllocation(request, blockIds, externalTokens, ...more);
        },
      }),
      (inner) => ({
        collectFinished() {
          const output = inner.collectFinished();
          const early = [...receiving];
          receiving.clear();
          return { ...output, finishedReceiving: [...output.finishedReceiving, ...early] };
        },
      }),
    ),
  ],
  [
    "never reports that D has read",
    /prefill: \d+ (blocks|kept) are left/,
    broken(
      () => ({}),
      (inner) => ({
        collectFinished: () => ({ ...inner.collectFinished(), finishedSending: [] }),
      }),
    ),
  ],
  [
    "counts what it does not hold",
    /1 scheduler\.requests are left/,
    broken((inner) => ({ outstanding: () => ({ ...inner.outstanding(), requests: 1 }) })),
  ],
  [
    "fails without a code",
    /request 0 ended with KvError: matchedTokens/,
    broken(() => ({
      matchedTokens() {
        throw new Error("of a kind that no contract names");
      },
    })),
  ],
])("a scene finds a connector that %s", async (_, found, connector) => {
  const scene = {
    seed: 3,
    groups: [{ blockTokens: 16, windowTokens: undefined, layers: 1 }],
    tp: [1, 1],
    requests: [{ numTokens: 70 }, { numTokens: 100 }, { numTokens: 90, hitBlocks: 2 }],
  } as const;
  expect(await playScene(scene, sceneOptions(pullConnector))).toEqual([]);
  const options = { ...sceneOptions(pullConnector), connector };
  expect((await playScene(scene, options)).join("\n")).toMatch(found);
});
