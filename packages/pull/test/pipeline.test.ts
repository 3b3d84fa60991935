import type { Memory, Transport } from "@kv/interface";
import { decodeHandshakeRequest } from "@kv/protocol";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import { expectKeptWaiting, ROOM_FOR_ONE } from "@kv/testing/scenarios/waiting-for-room";
import { memorySideChannel } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";

/** Five layers on two stages: 0 to 2 and 3 to 4. */
const LAYERS = { numLayers: 5 };
const STAGED = { ...LAYERS, ppSize: 2 };
const text = (payload: Uint8Array | undefined) => new TextDecoder().decode(payload);

/** Notifications of requests by the agents that got them. */
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

/** A transport that shows what was allocated: the caches, rank by rank, and layer by layer of each. */
function watched(memories: Memory[]): (transport: Transport) => Transport {
  return (transport) => ({
    ...transport,
    allocate(...given) {
      const memory = transport.allocate(...given);
      memories.push(memory);
      return memory;
    },
  });
}

describe.each([1, 2])("a producer of two pipeline stages and TP %i", (tpSize) => {
  it("is asked for its ranks as vLLM asks: stage by stage, the ranks that are read from", async () => {
    const play = createScenario();
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
    const params = await play.clock.settle(p.prefill(prompt(1)));
    expect(params).toMatchObject({ tp_size: tpSize, pp_size: 2 });
    expect(await play.outcome(d.decode({ ...prompt(1), params }))).toBe("ok");
    expect(asked).toEqual(tpSize === 1 ? ["0 0", "1 0"] : ["0 0", "0 1", "1 0", "1 1"]);
    await play.end();
  });

  it("has what each rank of each stage holds landed at its layers and heads, and nowhere else", async () => {
    for (const rank of Array.from({ length: 2 * tpSize }, (_, index) => index)) {
      const play = createScenario();
      const memories: Memory[] = [];
      const p = await play.engine("p", { ...STAGED, tpSize, wrapTransport: watched(memories) });
      const d = await play.engine("d", { ...LAYERS, tpSize: 2 });
      const params = await play.clock.settle(p.prefill(prompt(1)));
      const sizes = Array.from({ length: 2 * tpSize }, (_, index) => (index < tpSize ? 3 : 2));
      expect(memories).toHaveLength(5 * tpSize);
      const first = sizes.slice(0, rank).reduce((sum, size) => sum + size, 0);
      // The last layer of the rank is another prompt's, by one bit of each byte.
      const layer = (rank < tpSize ? 0 : 3) + (sizes[rank] ?? 0) - 1;
      const spoilt = memories[first + (sizes[rank] ?? 0) - 1] as Memory & { bytes: Uint8Array };
      for (const [at, byte] of spoilt.bytes.entries()) spoilt.bytes[at] = byte ^ 1;
      expect(await play.outcome(d.decode({ ...prompt(1), params }))).toBe("ok");
      const wrong = new Set(
        play.violations.splice(0).map((what) => what.match(/rank \d, layer \d/)?.[0] ?? what),
      );
      // Of a producer with TP 1 both decode ranks have it; of one with TP 2 the one of the same heads. `firstWrong` names the first.
      expect([...wrong]).toEqual([`rank ${rank % tpSize}, layer ${layer}`]);
      await play.end();
    }
  });

  it.each([1, 2])("tells each rank of each stage once from each of its readers, TP %i", async (readers) => {
    for (const plain of [true, false]) {
      const { told, rule } = listening();
      const play = createScenario({ faults: [rule] });
      const p = await play.engine("p", { ...STAGED, tpSize, plain });
      const d = await play.engine("d", { ...LAYERS, tpSize: readers });
      const n = Math.max(1, readers / tpSize);
      const all = Array.from({ length: 2 * tpSize }, () => n);
      // Read, and hit in full: told all the same.
      for (const [index, cachedTokens] of [0, 40].entries()) {
        expect(await play.handedOver(p, d, index, { cachedTokens })).toBe("ok");
        await play.clock.advance(50);
        expect(p.outstanding().kept).toBe(0);
        expect([...told.values()].map((words) => words.length)).toEqual(all);
        expect(new Set([...told.values()].flat())).toEqual(new Set([`r${index}:${n}`]));
        told.clear();
      }
      await play.end();
    }
  });

  it("keeps the blocks until the last stage has heard, and frees with the lease where it never does", async () => {
    const play = createScenario({
      faults: [{ fault: "drop", operation: "NOTIFY", nth: 2 * tpSize, from: "d" }],
    });
    const p = await play.engine("p", { ...STAGED, tpSize });
    const d = await play.engine("d", LAYERS);
    expect(await play.handedOver(p, d)).toBe("ok");
    await play.clock.advance(1000);
    expect(p.outstanding().kept).toBe(1);
    await play.clock.advance(30_000);
    expect(p.outstanding().kept).toBe(0);
    expect(play.counted("p", "expiredRequests")).toBe(1);
    await play.end();
  });

  it("has its lease extended on every stage", async () => {
    const play = createScenario();
    const p = await play.engine("p", { ...STAGED, tpSize });
    const d = await play.engine("d", { ...LAYERS, ...ROOM_FOR_ONE });
    await expectKeptWaiting(play, p, d, () => expect(play.counted("p", "expiredRequests")).toBe(0));
    await play.end();
  });

  it("is let go of on every stage when one READ of a stage fails", async () => {
    const play = createScenario({ faults: [{ fault: "fail", operation: "READ", nth: 2 * tpSize }] });
    const p = await play.engine("p", { ...STAGED, tpSize });
    const d = await play.engine("d", LAYERS);
    expect(await play.handedOver(p, d)).toBe("KV_TRANSFER_FAILED");
    expect(play.logged("d", "transfer_failed")).toMatchObject([{ remoteRank: `pp1tp${tpSize - 1}` }]);
    await play.clock.advance(50);
    expect(p.outstanding().kept).toBe(0);
    await play.end();
  });
});

describe("pipeline stages that are refused", () => {
  it("of a decode engine: a producer would free after the first of them", async () => {
    const play = createScenario();
    const p = await play.engine("p", LAYERS);
    const d = await play.engine("d", STAGED);
    expect(await play.handedOver(p, d)).toBe("KV_PLAN_UNSUPPORTED");
    expect(String(play.logged("d", "handshake_setup_failed")[0]?.error)).toMatch(
      /only prefill workers may have stages/,
    );
    await play.clock.advance(31_000);
    await play.end();
  });

  it("that are fewer than the parameters say: layers would be missing", async () => {
    const play = createScenario();
    const p = await play.engine("p", STAGED);
    const d = await play.engine("d", LAYERS);
    const params = await play.clock.settle(p.prefill(prompt(1)));
    expect(await play.outcome(d.decode({ ...prompt(1), params: { ...params, pp_size: 1 } }))).toBe(
      "KV_PLAN_INCOMPATIBLE",
    );
    await play.clock.advance(61_000);
    expect(await play.outcome(d.decode({ ...prompt(1), params: { ...params, pp_size: 3 } }))).toBe(
      "KV_HANDSHAKE_REFUSED",
    );
    await play.end();
  });
});
