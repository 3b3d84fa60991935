import type { KvCacheConfig, KvTransferParams } from "@kv/interface";
import { schedulerAlone } from "@kv/testing/scheduler-alone";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { describe, expect, it } from "vitest";
import { createPushScheduler } from "./scheduler.js";
import type { PushStepMetadata } from "./step-metadata.js";

const cache: KvCacheConfig = {
  ...simConfig(16),
  groups: [
    { kind: "full", layerNames: ["layers.0"] },
    { kind: "mamba", layerNames: ["layers.1"] },
  ],
};

async function setUp() {
  const { scheduler } = schedulerAlone(createPushScheduler, { cache });
  await scheduler.setHandshakeMetadata([]);
  return scheduler;
}

const request = (requestId: string, kvTransferParams: KvTransferParams) => ({
  requestId,
  numPromptTokens: 40,
  kvTransferParams,
});
/** What a proxy knows of a P before it has answered. */
const coordinates = {
  do_remote_prefill: true,
  do_remote_decode: false,
  remote_engine_id: "p",
  remote_request_id: "cmpl-p",
  remote_host: "p",
  remote_port: 1,
  tp_size: 1,
};

describe("a cache with states, whose last prompt token only the decode engine may compute (vllm#37310)", () => {
  it("refuses one that has computed it, and one that does not say how many it computes", async () => {
    const scheduler = await setUp();
    const answer = { ...coordinates, remote_num_tokens: 40, remote_block_ids: [[1, 2, 3], [4]] };
    expect(() => scheduler.matchedTokens(request("r", answer), 0)).toThrow(
      /group 1 of the KV cache is "mamba", .* last 1 of 40 prompt tokens to this one, and it has computed 40/,
    );
    const early = {
      ...coordinates,
      remote_request_id: "other",
      remote_block_ids: [[1, 2, 3], [4]],
    };
    expect(() => scheduler.matchedTokens(request("s", early), 0)).toThrow(
      /does not say how many it computes/,
    );
  });

  it("asks one that has not answered yet for all tokens but the last", async () => {
    const scheduler = await setUp();
    expect(scheduler.matchedTokens(request("r", coordinates), 0)).toEqual({
      tokens: 39,
      async: true,
    });
  });
});

it("a registration that replaces a cancelled one does not tell P that it has ended", async () => {
  const scheduler = await setUp();
  const named = (requestId: string) =>
    request(requestId, { ...coordinates, remote_request_id: requestId });
  for (const requestId of ["first", "second"]) {
    const { tokens } = scheduler.matchedTokens(named(requestId), 0);
    scheduler.afterAllocation(named(requestId), [[1, 2, 3], [4]], tokens);
  }
  scheduler.requestFinished(named("first"), [[1, 2, 3], [4]], "aborted");
  const { registrations } = scheduler.buildStepMetadata() as PushStepMetadata;
  const ofFirst = registrations.filter(({ requestId }) => requestId === "first");
  expect(ofFirst).toMatchObject([{ generation: 1, oldestOpen: 1, isAwaited: false }]);
});
