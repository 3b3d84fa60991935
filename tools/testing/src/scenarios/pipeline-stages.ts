import type { ConnectorModule, Memory } from "@kv/interface";
import { expect, it } from "vitest";
import { createScenario, prompt } from "./scenario.js";

export const LAYERS = { numLayers: 5 };
export const STAGED = { ...LAYERS, ppSize: 2 };

export function itLandsEachLayer(connector: ConnectorModule, tpSize: number): void {
  it("has the KV of each rank of each stage land at D's matching layers and heads only", async () => {
    for (let rank = 0; rank < 2 * tpSize; rank += 1) {
      const play = createScenario({ connector });
      const memories: Memory[] = [];
      const p = await play.engine("p", {
        ...STAGED,
        tpSize,
        wrapTransport: (transport) => ({
          ...transport,
          allocate(...given) {
            const memory = transport.allocate(...given);
            memories.push(memory);
            return memory;
          },
        }),
      });
      const d = await play.engine("d", { ...LAYERS, tpSize: 2 });
      const params = await play.prefilled(p, 1);
      expect(memories).toHaveLength(5 * tpSize);
      // Flips one bit of each byte in the last layer of the rank.
      const [layer, last] =
        rank < tpSize ? [2, 3 * rank + 2] : [4, 3 * tpSize + 2 * (rank - tpSize) + 1];
      const spoilt = memories[last] as Memory & { bytes: Uint8Array };
      for (const [at, byte] of spoilt.bytes.entries()) spoilt.bytes[at] = byte ^ 1;
      await play.ends(d.decode({ ...prompt(1), params }));
      const wrong = play.violations
        .splice(0)
        .map((what) => what.match(/rank \d, layer \d/)?.[0] ?? what);
      // With TP 2, only the rank with the same heads gets the changed layer.
      expect([...new Set(wrong)]).toEqual([`rank ${rank % tpSize}, layer ${layer}`]);
    }
  });
}
