import { decodeHandshakeRequest, decodeNotification, decodeRequestControl } from "@kv/protocol";
import { itLandsEachLayer, LAYERS, STAGED } from "@kv/testing/scenarios/pipeline-stages";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { expectKeptWaiting, ROOM_FOR_ONE } from "@kv/testing/scenarios/waiting-for-room";
import { memorySideChannel } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { pullConnector } from "../src/index.js";

/** A done notification in vLLM's form, with or without a capability. */
const text = (payload: Uint8Array = new Uint8Array()) => {
  const notification = decodeNotification(payload);
  const done =
    notification.kind === "extension" ? decodeRequestControl(notification.message) : notification;
  return done?.kind === "done" ? `${done.requestId}:${done.readers}` : "";
};

/**
 * A fault rule that records the notifications of requests, except heartbeats, by receiving agent.
 */
function listening() {
  const told = new Map<string, string[]>();
  const rule = {
    fault: "delay",
    operation: "NOTIFY",
    delayMs: 0,
    where: ({ payload, toAgent = "" }: { payload?: Uint8Array; toAgent?: string }) => {
      const said = text(payload);
      if (payload !== undefined && !said.startsWith("HB:"))
        told.set(toAgent, [...(told.get(toAgent) ?? []), said]);
      return false;
    },
  } as const;
  return { told, rule };
}

describe.each([1, 2])("a producer with two pipeline stages and TP %i", (tpSize) => {
  it("gets handshake requests in vLLM's order: stage by stage, for each rank that is read", async () => {
    await using play = createScenario();
    const asked: string[] = [];
    const p = await play.engine("p", { ...STAGED, tpSize });
    const own = memorySideChannel({ network: play.network, host: "d" });
    const d = await play.engine("d", {
      ...LAYERS,
      sideChannel: {
        ...own,
        request(options) {
          const [frame] = options.frames;
          if (options.frames.length === 1 && frame !== undefined && frame.length < 30) {
            const { ppRank, tpRank } = decodeHandshakeRequest([frame]);
            asked.push(`${ppRank} ${tpRank}`);
          }
          return own.request(options);
        },
      },
    });
    const params = await play.prefilled(p);
    expect(params).toMatchObject({ tp_size: tpSize, pp_size: 2 });
    expect(await play.decoded(d, params)).toBe("ok");
    expect(asked).toEqual(tpSize === 1 ? ["0 0", "1 0"] : ["0 0", "0 1", "1 0", "1 1"]);
  });

  itLandsEachLayer(pullConnector, tpSize);

  it.each([1, 2])(
    "gets one notification per rank from each reader, with decode TP %i",
    async (readers) => {
      for (const plain of [true, false]) {
        const { told, rule } = listening();
        await using play = createScenario({ faults: [rule] });
        const { p, d } = await play.pair(
          { ...STAGED, tpSize, plain },
          { ...LAYERS, tpSize: readers },
        );
        const n = Math.max(1, readers / tpSize);
        const all = Array.from({ length: 2 * tpSize }, () => n);
        // A READ and a full prefix hit both send the notifications.
        for (const [index, cachedTokens] of [0, 40].entries()) {
          expect(await play.handedOver(p, d, index, { cachedTokens })).toBe("ok");
          await play.frees(p);
          expect([...told.values()].map((words) => words.length)).toEqual(all);
          expect(new Set([...told.values()].flat())).toEqual(new Set([`r${index}:${n}`]));
          told.clear();
        }
      }
    },
  );

  it("keeps its blocks until the last stage is notified, or until the lease ends if that notification is lost", async () => {
    await using play = createScenario({
      faults: [{ fault: "drop", operation: "NOTIFY", nth: 2 * tpSize, from: "d" }],
    });
    const { p, d } = await play.pair({ ...STAGED, tpSize }, LAYERS);
    expect(await play.handedOver(p, d)).toBe("ok");
    await play.clock.advance(1000);
    expect(p.outstanding().kept).toBe(1);
    await play.clock.advance(30_000);
    expect(p.outstanding().kept).toBe(0);
    expect(play.counted("p", "expiredRequests")).toBe(1);
  });

  it("has its lease extended on every stage", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair({ ...STAGED, tpSize }, { ...LAYERS, ...ROOM_FOR_ONE });
    await expectKeptWaiting(play, p, d, () => expect(play.counted("p", "expiredRequests")).toBe(0));
  });

  it("frees its blocks on every stage when one READ of a stage fails", async () => {
    await using play = createScenario({
      faults: [{ fault: "fail", operation: "READ", nth: 2 * tpSize }],
    });
    const { p, d } = await play.pair({ ...STAGED, tpSize }, LAYERS);
    expect(await play.handedOver(p, d)).toBe("KV_TRANSFER_FAILED");
    expect(play.logged("d", "transfer_failed")).toMatchObject([
      { remoteRank: `pp1tp${tpSize - 1}` },
    ]);
    await play.frees(p);
  });
});

describe("refused pipeline stages", () => {
  it("on a decode engine, because a producer would free its blocks after the first stage's notification", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair(LAYERS, STAGED);
    expect(await play.handedOver(p, d)).toBe("KV_PLAN_UNSUPPORTED");
    expect(String(play.logged("d", "handshake_setup_failed")[0]?.error)).toMatch(
      /only prefill workers may have stages/,
    );
    await play.clock.advance(31_000);
  });

  it("of a producer that has another number of them than the parameters say", async () => {
    await using play = createScenario();
    const { p, d } = await play.pair(STAGED, LAYERS);
    for (const [n, pp_size, refusal] of [
      [1, 1, "KV_PLAN_INCOMPATIBLE"],
      [2, 3, "KV_HANDSHAKE_REFUSED"],
    ] as const) {
      const params = await play.prefilled(p, n);
      expect(await play.outcome(d.decode({ ...prompt(n), params: { ...params, pp_size } }))).toBe(
        refusal,
      );
      await play.clock.advance(61_000);
    }
  });
});
