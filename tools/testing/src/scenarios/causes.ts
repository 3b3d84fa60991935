import { delegateTo } from "@kv/connector/building-blocks";
import type { ConnectorModule, ConnectorRequest } from "@kv/interface";
import { expect, it } from "vitest";
import { createScenario, prompt } from "./scenario.js";

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

/** A connector whose engine hands it no token ids. */
function withoutTokens(module: ConnectorModule): ConnectorModule {
  const bare = (request: ConnectorRequest) => ({ ...request, promptTokenIds: undefined });
  return delegateTo(module, {
    async createScheduler(options) {
      const inner = await module.createScheduler(options);
      return delegateTo(inner, {
        matchedTokens: (request, ...rest) => inner.matchedTokens(bare(request), ...rest),
        afterAllocation: (request, ...rest) => inner.afterAllocation(bare(request), ...rest),
        requestFinished: (request, ...rest) => inner.requestFinished(bare(request), ...rest),
      });
    },
  });
}
