import type { LeaseOrder } from "@kv/connector";
import { KvError } from "@kv/interface";
import { describe, expect, it } from "vitest";
import type { Offer } from "../control.js";
import type { Produced } from "./registration-matcher.js";
import { createPeerQueues } from "./queues.js";
import { createWritesAhead } from "./layerwise-writes.js";

function setUp() {
  const ends: ((failure?: Error) => void)[] = [];
  const signals: AbortSignal[] = [];
  const written: string[][] = [];
  const ahead = createWritesAhead({
    queues: createPeerQueues({ perPeer: 8 }),
    regions: ["a", "b", "c"],
    runs: {
      async run(_offer, _id, controller, body) {
        signals.push(controller.signal);
        try {
          await body({} as never);
          return undefined;
        } catch (error) {
          return KvError.from(error, "KV_TRANSFER_FAILED", "");
        }
      },
    },
    write(_link, _ranks, _pair, _signal, part) {
      written.push(["a", "b", "c"].filter((region) => part.has(region)));
      return new Promise<void>((resolve, reject) => {
        ends.push((failure) => (failure === undefined ? resolve() : reject(failure)));
      });
    },
  });
  const produced = (wireId: string): Produced => {
    const order = {
      requestId: wireId,
      wireId,
      generation: 1,
      blockIds: [[1]],
      numTokens: 9,
      promptBlockIds: [[1]],
    };
    return { requestId: wireId, wireId, generation: 1, order, finished: undefined, consumer: undefined };
  };
  const offer = { engineId: "d", own: { rank: 0 }, blockIds: [[5]] } as unknown as Offer;
  const order = (of: Produced, blocks = [[1]]) =>
    ({ ...of.order, promptBlockIds: blocks, numTokens: 9 }) as unknown as LeaseOrder;
  const settled = async (work: Promise<unknown> | undefined) => {
    let done = false;
    void work?.then(() => {
      done = true;
    });
    for (let i = 0; i < 20; i++) await Promise.resolve();
    return done;
  };
  return { ahead, ends, signals, written, produced, offer, order, settled };
}
const wanted = new AbortController().signal;

describe("writes ahead", () => {
  it("take each region once, and leave the last to the end", async () => {
    const { ahead, ends, written, produced, offer, order } = setUp();
    const p = produced("p");
    ahead.computed(p, ["a"], [["k", offer]]);
    ahead.computed(p, ["a"], [["k", offer]]);
    ahead.computed(p, ["b"], [["k", offer]]);
    ahead.computed(p, ["c"], [["k", offer]]);
    expect(written).toEqual([["a"], ["b"]]);
    for (const end of ends) end();
    expect([...(await ahead.settle("k", order(p), wanted))]).toEqual(["a", "b"]);
    expect(ahead.size).toBe(0);
  });

  it("bring a consumer that comes late what was computed before", () => {
    const { ahead, written, produced, offer } = setUp();
    const p = produced("p");
    ahead.computed(p, ["a"], []);
    ahead.computed(p, ["b"], [["k", offer]]);
    expect(written).toEqual([["a", "b"]]);
  });

  it("are waited for by all who end: the request, the offer, the producer that frees its blocks", async () => {
    for (const who of ["settle", "giveUp", "release"] as const) {
      const { ahead, ends, signals, produced, offer, order, settled } = setUp();
      const p = produced("p");
      ahead.computed(p, ["a"], [["k", offer]]);
      const work = {
        settle: () => ahead.settle("k", order(p), wanted),
        giveUp: () => ahead.giveUp("k", new KvError("KV_REQUEST_ABORTED", "withdrawn")),
        release: () => ahead.release(p),
      }[who]();
      expect(await settled(work)).toBe(false);
      expect(signals[0]?.aborted).toBe(who !== "settle");
      ends[0]?.();
      expect(await settled(work)).toBe(true);
      expect(ahead.size).toBe(0);
    }
  });

  it("count for nothing when they failed, were of another request, or of other blocks", async () => {
    const { ahead, ends, produced, offer, order } = setUp();
    const [p, q] = [produced("p"), produced("q")];
    ahead.computed(p, ["a"], [["failed", offer]]);
    ends[0]?.(new KvError("KV_TRANSFER_FAILED", "no"));
    expect((await ahead.settle("failed", order(p), wanted)).size).toBe(0);
    ahead.computed(
      q,
      ["a"],
      [
        ["other", offer],
        ["moved", offer],
      ],
    );
    for (const end of ends.slice(1)) end();
    expect((await ahead.settle("other", order(p), wanted)).size).toBe(0);
    expect((await ahead.settle("moved", order(q, [[2]]), wanted)).size).toBe(0);
  });
});
