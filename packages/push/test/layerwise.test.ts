import { type Agent, descriptorPairs, type Transport } from "@kv/interface";
import { LAYERS, STAGED } from "@kv/testing/scenarios/pipeline-stages";
import { createScenario, prompt, started } from "@kv/testing/scenarios/scenario";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import type { SimEngineOptions } from "@kv/testing/simulator/sim-options";
import type { FaultRule } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

interface Posted {
  readonly descriptors: number;
  readonly notified: boolean;
  /** How many WRITEs were done when this one was posted. */
  readonly after: number;
}

/** Records the WRITEs that are posted, and how many were done by then. */
function watching(posted: Posted[]): (transport: Transport) => Transport {
  let done = 0;
  const watched = (agent: Agent): Agent =>
    new Proxy(agent, {
      get(target, name) {
        const value: unknown = Reflect.get(target, name);
        if (name !== "transfer") return typeof value === "function" ? value.bind(target) : value;
        return (request: Parameters<Agent["transfer"]>[0]) => {
          const notified = request.notification !== undefined;
          posted.push({
            descriptors: descriptorPairs(request).localIds.length,
            notified,
            after: done,
          });
          const transfer = target.transfer(request);
          transfer.done.then(
            () => {
              done += 1;
            },
            () => {},
          );
          return transfer;
        };
      },
    });
  return (transport) => ({
    ...transport,
    capabilities: transport.capabilities,
    allocate: transport.allocate.bind(transport),
    close: transport.close.bind(transport),
    createAgent: async (options) => watched(await transport.createAgent(options)),
  });
}

const LAYERWISE = { extra: { push_layerwise: true }, reportsLayers: true };
const prefill = { ...prompt(1), requestId: "cmpl-r1-0-0000aaaa" };
const decode = { ...prompt(1), requestId: "cmpl-r1-0-bbbb0000" };

/** `received`: D's leg, which has registered its blocks. */
async function setUp({
  faults = [],
  ofP = {},
  ofD = {},
}: {
  readonly faults?: readonly FaultRule[];
  readonly ofP?: Partial<SimEngineOptions>;
  readonly ofD?: Partial<SimEngineOptions>;
} = {}) {
  const posted: Posted[] = [];
  const play = createScenario({ faults, connector: pushConnector });
  const { p, d } = await play.pair({ ...LAYERWISE, wrapTransport: watching(posted), ...ofP }, ofD);
  const params = { ...coordinatesOf(p, "r1"), pp_size: ofP.ppSize ?? 1 };
  const received = started(d.decode({ ...decode, params }));
  await play.clock.advance(20);
  return { posted, play, p, d, received };
}

describe("layer-wise push", () => {
  it("writes a layer while the next is computed, and notifies only with the final WRITE, after all others are done", async () => {
    const { posted, play, p, received } = await setUp({ ofP: { stepMs: 50 } });
    const computed = p.prefill(prefill);
    await play.clock.advance(80);
    // The prompt is still being computed.
    expect(posted).toEqual([{ descriptors: 3, notified: false, after: 0 }]);
    await play.clock.settle(Promise.all([computed, received]));
    expect(posted.slice(1)).toEqual([{ descriptors: 3, notified: true, after: 1 }]);
  });

  it("the final WRITE waits for a slow layer-wise WRITE", async () => {
    const { posted, play, p, received } = await setUp({
      faults: [{ fault: "delay", operation: "WRITE", delayMs: 300, times: 1 }],
      ofD: { tpSize: 2 },
    });
    await play.clock.settle(Promise.all([p.prefill(prefill), received]));
    // Each of D's ranks gets a layer-wise WRITE and a final one after it.
    expect(posted.map(({ notified }) => notified).sort()).toEqual([false, false, true, true]);
    expect(posted.filter(({ notified }) => notified).every(({ after }) => after >= 1)).toBe(true);
  });

  it("the final WRITE repeats a layer-wise WRITE that failed", async () => {
    const { posted, play, p, received } = await setUp({
      faults: [{ fault: "fail", operation: "WRITE", times: 1 }],
    });
    await play.clock.settle(p.prefill(prefill));
    expect(await play.outcome(received)).toBe("ok");
    expect(posted.map(({ descriptors }) => descriptors)).toEqual([3, 6]);
  });

  it.each(["the producer", "the consumer"])(
    "%s aborts during a layer-wise WRITE: the blocks are kept until it has ended",
    async (side) => {
      const { play, p, d, received } = await setUp({
        faults: [{ fault: "delay", operation: "WRITE", delayMs: 400, times: 1 }],
        ofP: { stepMs: 50 },
      });
      void started(p.prefill(prefill));
      await play.clock.advance(60);
      if (side === "the producer") p.abort(prefill.requestId);
      else d.abort(decode.requestId);
      expect(await play.outcome(received)).toBe("KV_REQUEST_ABORTED");
      await play.clock.advance(2000);
      expect([p.outstanding().blocks, d.outstanding().blocks]).toEqual([0, 0]);
    },
  );

  it("writes everything at once if the consumer registers late", async () => {
    const { posted, play, p, d, received } = await setUp();
    await play.prefilled(p, 1, prefill);
    await play.outcome(received);
    posted.splice(0);
    expect(await play.handedOver(p, d, 2)).toBe("ok");
    expect(posted).toMatchObject([{ descriptors: 6, notified: true }]);
  });

  it.each([1, 2])(
    "with pipeline stages: the first stage writes its first layer early, and each stage notifies with its last WRITE; D's TP %i",
    async (tpSize) => {
      const { posted, play, p, received } = await setUp({
        ofP: { ...STAGED, stepMs: 50 },
        ofD: { ...LAYERS, tpSize },
      });
      const computed = p.prefill(prefill);
      await play.clock.advance(80);
      expect(posted.map(({ descriptors, notified }) => [descriptors, notified])).toEqual(
        Array.from({ length: tpSize }, () => [3, false]),
      );
      await play.clock.settle(Promise.all([computed, received]));
      // Two layers of the first stage are left, and two of the second.
      const last = posted.slice(tpSize);
      expect(last.map(({ descriptors }) => descriptors)).toEqual(
        Array.from({ length: 2 * tpSize }, () => 6),
      );
      expect(last.every(({ notified }) => notified)).toBe(true);
    },
  );
});
