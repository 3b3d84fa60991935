import type { ConnectorModule } from "@kv/interface";
import { expect, it } from "vitest";
import { createScenario, prompt } from "./scenario.js";

/** The shapes of deployments in vLLM's guide and reports, over parameters, handshakes and plans. */
export function itServesTheShapesOfTheGuide(connector: ConnectorModule): void {
  it("S2.6: TP 8 on each of two P and two D, on four hosts with one port number", async () => {
    await using play = createScenario({ connector });
    const options = { tpSize: 8, numKvHeads: 8 };
    const prefills = [await play.engine("p0", options), await play.engine("p1", options)];
    const decodes = [await play.engine("d0", options), await play.engine("d1", options)];
    let n = 0;
    for (const p of prefills) {
      for (const d of decodes) {
        n += 1;
        const params = await play.prefilled(p, n);
        expect(params).toMatchObject({ remote_port: 5600, tp_size: 8 });
        expect(await play.decoded(d, params, n)).toBe("ok");
      }
    }
    await play.clock.advance(100);
    for (const engine of [...prefills, ...decodes]) expect(engine.outstanding().kept).toBe(0);
  });

  it("S4.10: DP 4 on each side, blocks of 256 tokens, one request id for both legs, and null parameters", async () => {
    await using play = createScenario({ connector });
    const side = async (name: string) => {
      const ranks = [];
      for (const rank of [0, 1, 2, 3])
        ranks.push(
          await play.engine(`${name}${rank}`, {
            engineId: `${name}_dp${rank}`,
            blockSize: 256,
          }),
        );
      return ranks;
    };
    const [prefills, decodes] = [await side("p"), await side("d")];
    const asked = {
      do_remote_decode: true,
      do_remote_prefill: false,
      remote_engine_id: null,
      remote_block_ids: null,
      remote_host: null,
      remote_port: null,
    };
    for (const [rank, p] of prefills.entries()) {
      const request = { ...prompt(rank, 600), requestId: `cmpl-x${rank}-0` };
      const params = await play.clock.settle(p.prefill({ ...request, params: asked }));
      expect(params).toMatchObject({ remote_engine_id: `p_dp${rank}` });
      const d = decodes[3 - rank];
      if (d === undefined) throw new Error("no decode engine");
      const handed = { ...params, remote_prefill_cached_tokens: null, transfer_id: null };
      expect(await play.outcome(d.decode({ ...request, params: handed }))).toBe("ok");
    }
  });
}
