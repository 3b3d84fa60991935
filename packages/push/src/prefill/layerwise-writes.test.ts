import type { LeaseOrder } from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import type { Registration } from "@kv/protocol";
import { describe, expect, it } from "vitest";
import { LayerwiseWrites } from "./layerwise-writes.js";
import type { ProducedRequest } from "./registrations.js";
import type { DispatchedWrite } from "./write-blocks.js";

/** A dispatcher whose writes end when the test ends them. */
function setUp() {
  const ends: ((error?: KvError) => void)[] = [];
  const signals: AbortSignal[] = [];
  const written: string[][] = [];
  const layerwise = new LayerwiseWrites({
    regions: ["a", "b", "c"],
    dispatcher: {
      write({ controller, includesRegion }: DispatchedWrite) {
        signals.push(controller.signal);
        written.push(["a", "b", "c"].filter((region) => includesRegion?.(region)));
        return new Promise((resolve) => {
          ends.push(resolve);
        });
      },
    },
  });
  const request = (wireId: string): ProducedRequest => {
    const order = {
      requestId: wireId,
      wireId,
      generation: 1,
      blockIds: [[1]],
      numTokens: 9,
      promptBlockIds: [[1]],
    };
    return {
      requestId: wireId,
      wireId,
      generation: 1,
      capability: undefined,
      isProven: false,
      order,
      finished: undefined,
      progress: undefined,
    };
  };
  const registration = {
    engineId: "d",
    own: { rank: 0 },
    blockIds: [[5]],
  } as unknown as Registration;
  const order = (of: ProducedRequest, blocks = [[1]]) =>
    ({ ...of.order, promptBlockIds: blocks, numTokens: 9 }) as unknown as LeaseOrder;
  const hasEnded = async (work: Promise<unknown> | undefined) => {
    let done = false;
    void work?.then(() => {
      done = true;
    });
    for (let i = 0; i < 20; i++) await Promise.resolve();
    return done;
  };
  return { layerwise, ends, signals, written, request, registration, order, hasEnded };
}
const neverAborted = new AbortController().signal;

describe("layer-wise writes", () => {
  it("write each region once, and leave the last one to the final write", async () => {
    const { layerwise, ends, written, request, registration, order } = setUp();
    const p = request("p");
    layerwise.layerComputed(p, ["a"], [["k", registration]]);
    layerwise.layerComputed(p, ["a"], [["k", registration]]);
    layerwise.layerComputed(p, ["b"], [["k", registration]]);
    layerwise.layerComputed(p, ["c"], [["k", registration]]);
    expect(written).toEqual([["a"], ["b"]]);
    for (const end of ends) end();
    expect([...(await layerwise.finish("k", order(p), neverAborted))]).toEqual(["a", "b"]);
    expect(layerwise.size).toBe(0);
  });

  it("write only what was computed into the blocks that the request has now: a preempted request runs again with others", () => {
    const { layerwise, written, request, registration } = setUp();
    const p = request("p");
    layerwise.layerComputed(p, ["a", "b"], []);
    p.order = { ...p.order, promptBlockIds: [[2]] };
    layerwise.layerComputed(p, ["a"], [["k", registration]]);
    expect(written).toEqual([["a"]]);
    layerwise.layerComputed(p, ["b"], [["k", registration]]);
    expect(written).toEqual([["a"], ["b"]]);
  });

  it("write to a late registration what was computed before", () => {
    const { layerwise, written, request, registration } = setUp();
    const p = request("p");
    layerwise.layerComputed(p, ["a"], []);
    layerwise.layerComputed(p, ["b"], [["k", registration]]);
    expect(written).toEqual([["a", "b"]]);
  });

  it("are awaited by the final write, by an abort of the registration, and before the blocks are freed", async () => {
    for (const method of ["finish", "abort", "release"] as const) {
      const { layerwise, ends, signals, request, registration, order, hasEnded } = setUp();
      const p = request("p");
      layerwise.layerComputed(p, ["a"], [["k", registration]]);
      const work = {
        finish: () => layerwise.finish("k", order(p), neverAborted),
        abort: () => layerwise.abort("k", new KvError("KV_REQUEST_ABORTED", "withdrawn")),
        release: () => layerwise.release(p),
      }[method]();
      expect(await hasEnded(work)).toBe(false);
      expect(signals[0]?.aborted).toBe(method !== "finish");
      ends[0]?.();
      expect(await hasEnded(work)).toBe(true);
      expect(layerwise.size).toBe(0);
    }
  });

  it("do not count if they failed, or read another request or other blocks", async () => {
    const { layerwise, ends, request, registration, order } = setUp();
    const [p, q] = [request("p"), request("q")];
    layerwise.layerComputed(p, ["a"], [["failed", registration]]);
    ends[0]?.(new KvError("KV_TRANSFER_FAILED", "no"));
    expect((await layerwise.finish("failed", order(p), neverAborted)).size).toBe(0);
    layerwise.layerComputed(
      q,
      ["a"],
      [
        ["other", registration],
        ["moved", registration],
      ],
    );
    for (const end of ends.slice(1)) end();
    expect((await layerwise.finish("other", order(p), neverAborted)).size).toBe(0);
    expect((await layerwise.finish("moved", order(q, [[2]]), neverAborted)).size).toBe(0);
  });
});
