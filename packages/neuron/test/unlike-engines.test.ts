import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { createScenario, prompt } from "@kv/testing/scenarios/scenario";
import type { SimDeviceAround } from "@kv/testing/simulator/sim-options";
import { describe, expect, test } from "vitest";
import { simNeuron } from "./sim-neuron.js";

const NEURON = { device: (around: SimDeviceAround) => simNeuron(around, { poolBlocks: 12 }) };

describe.each([pullConnector, pushConnector])("$name", (connector) => {
  test.each([
    { p: NEURON, d: { memoryType: "VRAM" } },
    { p: { memoryType: "VRAM" }, d: NEURON },
  ] as const)(
    "Neuron with kv_buffer_device cpu and a GPU with cuda exchange KV, %#",
    async ({ p, d }) => {
      const play = createScenario({ connector });
      const prefill = await play.engine("p", { ...p, tpSize: 2 });
      const decode = await play.engine("d", { ...d });
      for (const n of [1, 2]) {
        // The second prompt does not fill its last block: D zeroes the tokens behind it.
        const request = { ...prompt(n, n === 1 ? 48 : 45), requestId: `cmpl-r${n}-0-0000aaaa` };
        const params = await play.clock.settle(prefill.prefill(request));
        const consumer = { ...request, requestId: `cmpl-r${n}-0-bbbb0000`, params };
        expect(await play.outcome(decode.decode(consumer))).toBe("ok");
      }
      await play.end();
    },
  );
});

describe("the compatibility hash of unlike engines", () => {
  const LAX = { extra: { enforce_handshake_compat: false } };

  test("is relaxed only by a setting, and the log has the factors that are not checked", async () => {
    const play = createScenario();
    const neuron = await play.engine("p", { ...NEURON, model: "compiled-for-neuron" });
    const strict = await play.engine("strict");
    const lax = await play.engine("lax", LAX);
    expect(await play.handedOver(neuron, strict, 1)).toBe("KV_HANDSHAKE_INCOMPATIBLE");
    expect(await play.handedOver(neuron, lax, 2)).toBe("ok");
    expect(play.logged("lax", "compatibility-relaxed")).toMatchObject([
      {
        engineId: "p",
        ignored: expect.stringContaining('model is "sim" here and "compiled-for-neuron" there'),
      },
    ]);
    await play.end();
  });

  test("is adopted only by a setting, and the order of bytes in a head is still checked", async () => {
    const play = createScenario();
    const attentionBackend = "NEURON";
    const own = await play.engine("own", { ...NEURON, attentionBackend });
    const adopting = await play.engine("adopting", {
      ...NEURON,
      attentionBackend,
      hashedAttentionBackend: "SIM",
    });
    const strict = await play.engine("strict");
    const lax = await play.engine("lax", LAX);
    const decode = async (from: typeof own, to: typeof strict, n: number) => {
      const params = await play.clock.settle(from.prefill(prompt(n)));
      return play.outcome(to.decode({ ...prompt(n), params }));
    };
    expect(await decode(own, strict, 1)).toBe("KV_HANDSHAKE_INCOMPATIBLE");
    expect(play.logged("own", "compatibility-factor-adopted")).toEqual([]);
    // The hash accepts both; the plan, which is built from the peer's metadata, does not.
    expect(await decode(own, lax, 2)).toBe("KV_PLAN_INCOMPATIBLE");
    expect(await decode(adopting, strict, 3)).toBe("KV_PLAN_INCOMPATIBLE");
    expect(play.logged("adopting", "compatibility-factor-adopted")).toMatchObject([
      {
        factor: "attn_backend_name",
        ours: "NEURON",
        announced: "SIM",
        consequence: expect.any(String),
      },
    ]);
    expect(play.logged("strict", "compatibility-relaxed")).toEqual([]);
    // The pool has the plain order, so a peer reads it when it is announced under the peer's name.
    const announcing = await play.engine("announcing", { ...NEURON, attentionBackend: "SIM" });
    expect(await decode(announcing, strict, 4)).toBe("ok");
    await play.end();
  });
});
