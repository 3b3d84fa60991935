import type { ConnectorModule } from "@kv/interface";
import { expect, it } from "vitest";
import { createScenario, prompt } from "./scenario.js";
import { withoutTokens } from "./without-tokens.js";

/** `sides`: how an error names P's engine, and D's. */
export function itNamesTheCause(
  connector: ConnectorModule,
  sides: readonly [string, string],
): void {
  it("H5: a router that leaves kv_peer out is told so, where the ids do not show P's request", async () => {
    await using play = createScenario({ connector });
    const { p, d } = await play.pair();
    const { kv_peer: _, ...params } = await play.prefilled(p);
    const work = d.decode({ ...prompt(1), requestId: "d1", params });
    await expect(play.clock.settle(work)).rejects.toMatchObject({
      code: "KV_REQUEST_INVALID",
      message: expect.stringContaining("have no kv_peer, which engine p sends") as string,
    });
    await play.clock.advance(50);
    expect(d.outstanding().blocks).toBe(0);
  });

  it.each([
    [sides[0], { connector: withoutTokens(connector) }, {}],
    [sides[1], {}, { connector: withoutTokens(connector) }],
  ])("H5: %s has no token ids: the error says so", async (who, prefill, decode) => {
    await using play = createScenario({ connector });
    const { p, d } = await play.pair(prefill, decode);
    const work = d.decode({ ...prompt(1), params: await play.prefilled(p) });
    await expect(play.clock.settle(work)).rejects.toMatchObject({
      code: "KV_PROMPT_MISMATCH",
      message: expect.stringContaining(`${who} handed its connector no token ids`) as string,
    });
    await play.clock.advance(50);
  });
}
