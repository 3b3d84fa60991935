import { KvError, type KvTransferParams } from "@kv/interface";
import { expect, test } from "vitest";
import { expectThrown } from "../expect-error.js";
import type { ConnectorSuiteOptions } from "./engine.js";
import { type Fixture, REMOTE_DECODE } from "./fixture.js";

/** Changes to the block ids and address in vLLM's NixlConnector parameters. */
const VLLM_BAD_PARAMETERS: readonly KvTransferParams[] = [
  { remote_block_ids: "0,1" },
  { remote_block_ids: [[0, -1]] },
  { remote_block_ids: [["a"]] },
  { remote_block_ids: [[0.5]] },
  { remote_block_ids: [[0], [1], [2], [3], [4], [5], [6]] },
  { remote_engine_id: 7 },
  { remote_engine_id: null },
  { remote_host: ["p"] },
  { remote_host: null },
  { remote_port: 70_000 },
  { remote_port: "many" },
  { remote_request_id: { id: 1 } },
  { remote_request_id: null },
  { tp_size: 0 },
  { tp_size: 1.5 },
  { do_remote_prefill: "yes" },
];

export function failureTests(
  fixture: Fixture,
  { badParameters }: Pick<ConnectorSuiteOptions, "badParameters">,
): void {
  const blocks = (count: number): number => count * fixture.decode.config.blockSize;

  test("an aborted or failed prefill keeps no blocks and returns no parameters", async () => {
    const prefill = fixture.prefill;
    for (const [reason, rounds] of [
      ["aborted", 0],
      ["aborted", 2],
      ["error", 1],
    ] as const) {
      const request = prefill.request(`cmpl-${reason}-${rounds}`, blocks(2), REMOTE_DECODE);
      const running = prefill.admit(request, 0);
      await fixture.rounds(rounds);
      expect(prefill.finish(running, reason)).toBeUndefined();
      expect(prefill.kept).toBe(0);
    }
    await fixture.expectIdle();
  });

  test("a decode aborted at any point frees the blocks of both sides, and nothing is written afterwards", async () => {
    const decode = fixture.decode;
    for (const [index, when] of (
      ["not admitted", "no step yet", 1, 2, "posted", 3, "posted", "arrived"] as const
    ).entries()) {
      const requestId = `cmpl-abort-${index}`;
      const prompt = await fixture.prefilled(requestId, blocks(4), 30 + index);
      const request = decode.request(requestId, blocks(4), prompt.params);
      if (when === "not admitted") {
        decode.end.scheduler.requestQueued?.(request);
        decode.end.scheduler.matchedTokens(request, 0);
        decode.finish({ request, blockIds: decode.config.groups.map(() => []) }, "aborted");
      } else {
        const running = decode.admit(request, 0);
        if (typeof when === "number") await fixture.rounds(when);
        if (when === "posted") {
          // No time passes: the transfer in flight may still write.
          await decode.step();
          await new Promise((resolve) => void setTimeout(resolve, 0));
        }
        if (when === "arrived") await fixture.arrived(requestId);
        decode.finish(running, "aborted");
      }
      await fixture.freed(requestId);
    }
    await fixture.expectIdle();
  });

  test("outputs with unknown request ids have no effect", async () => {
    const requestId = "unknown";
    const failure = {
      requestId,
      code: "KV_TRANSFER_FAILED",
      message: "m",
      failureType: "transfer_failed",
    } as const;
    for (const { end } of [fixture.prefill, fixture.decode])
      end.scheduler.applyWorkerOutput({
        finishedSending: [requestId],
        finishedReceiving: [requestId],
        failedReceiving: [failure],
        failedBlockIds: [],
      });
    const decode = fixture.decode;
    const unseen = decode.request("never-seen", blocks(1), undefined);
    expect(decode.end.scheduler.requestFinished(unseen, [], "aborted")).toMatchObject({
      keepBlocks: false,
    });
    await fixture.expectIdle();
  });

  test("matchedTokens rejects invalid kv_transfer_params, and the next request works", async () => {
    const decode = fixture.decode;
    const { scheduler } = decode.end;
    const prompt = await fixture.prefilled("cmpl-right", blocks(2), 40);
    const good = prompt.params;
    for (const [index, change] of (badParameters ?? VLLM_BAD_PARAMETERS).entries()) {
      const request = decode.request(`cmpl-wrong-${index}`, blocks(2), { ...good, ...change });
      scheduler.requestQueued?.(request);
      const error = expectThrown(() => scheduler.matchedTokens(request, 0), "KV_REQUEST_INVALID");
      expect(error.message).toContain(Object.keys(change)[0]);
      expect(scheduler.requestFinished(request, [], "error").keepBlocks).toBe(false);
      await fixture.rounds(1);
    }
    const fresh = await fixture.prefilled("cmpl-after", blocks(2), 41);
    const running = await fixture.received(fresh);
    fixture.expectArrived(fresh, running);
    decode.finish(running, "stopped");
  });

  test("a peer that is not at the given address: the request fails with a code, and its blocks can be reused", async () => {
    const decode = fixture.decode;
    const prompt = await fixture.prefilled("cmpl-lost", blocks(2), 50);
    const params = {
      ...prompt.params,
      remote_engine_id: "an engine that never was",
      remote_port: 1,
    };
    const running = decode.admit(decode.request("cmpl-lost", blocks(2), params), 0);
    await fixture.until("it has failed", () => decode.received.has("cmpl-lost"));
    const failure = decode.failed.get("cmpl-lost");
    expect(failure?.failureType).toMatch(/^[a-z_]+$/);
    expect(KvError.is(new KvError(failure?.code ?? "KV_INTERNAL", failure?.message ?? ""))).toBe(
      true,
    );
    expect(failure?.message.length).toBeGreaterThan(10);
    const own = new Set(running.blockIds.flat());
    for (const id of decode.failedBlockIds) expect(own.has(id)).toBe(true);
    decode.finish(running, "error");
    expect(decode.kept).toBe(0);
    decode.expectFreeBlocksUntouched();
  });

  test("close completes with requests in flight, and a second time", async () => {
    const prompt = await fixture.prefilled("cmpl-closing", blocks(4), 60);
    const decode = fixture.decode;
    fixture.admitted(prompt);
    await fixture.rounds(1);
    await fixture.closeBoth();
    await fixture.closeBoth();
    for (const { end } of [fixture.prefill, decode]) {
      expect(end.scheduler.outstanding().listeners ?? 0).toBe(0);
    }
    const { pendingTimers } = fixture.pair;
    if (pendingTimers !== undefined)
      await fixture.eventually("no timer is left", () => pendingTimers() === 0);
  });
}
