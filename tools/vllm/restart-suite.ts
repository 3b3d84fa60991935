import { afterEach, beforeAll, expect, test } from "vitest";
import { freshId, handedOver, plain, prefill } from "./completion.js";
import { type HeadlessDecode, openHeadlessDecode, requestOf } from "./headless-decode.js";
import { otherLegId, prefillAndHold, untilFreed } from "./held-blocks.js";
import { type OurPrefill, openOurPrefill, untilRepacks } from "./our-prefill.js";
import type { VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { retryAfterTimeout, until } from "./until.js";

const TOKENS = prompt(100);
const OUR_BLOCKS = [5, 2, 9, 11];
const OUTPUT_TOKENS = 8;
const OUR_LEASE_SECONDS = 5;
/** A push P that is gone sends nothing: our D waits so long. */
const REQUEST_TIMEOUT_SECONDS = 10;

/** A vLLM that is paired with our P and our D stops, and another starts at its address. */
export function restartSuite(server: () => VllmServer, restart: () => Promise<void>): void {
  let d: HeadlessDecode | undefined;
  let p: OurPrefill | undefined;
  beforeAll(() => untilRepacks(server()));
  afterEach(async () => {
    await d?.close();
    await p?.close();
  });

  test("vLLM restarts at the same address: its old request fails, and new requests work in both directions", async () => {
    const { kind } = server();
    const extra = { request_timeout: REQUEST_TIMEOUT_SECONDS };
    const decodeSide = await openHeadlessDecode({ kind, extra });
    d = decodeSide;
    const ours = await openOurPrefill({ kind, leaseSeconds: OUR_LEASE_SECONDS });
    p = ours;
    const kept = async () => {
      const { params, before } = await prefillAndHold(server(), TOKENS);
      return {
        asked: requestOf(otherLegId(params.remote_request_id), TOKENS.length, params),
        before,
      };
    };
    async function received(): Promise<void> {
      const { asked, before } = await kept();
      const { failure } = await decodeSide.receive(asked, OUR_BLOCKS);
      if (failure !== undefined) throw Object.assign(new Error(failure.message), failure);
      decodeSide.finish(asked, OUR_BLOCKS);
      await untilFreed(server(), before);
    }
    const served = () => handedOver(ours.url, server(), TOKENS, OUTPUT_TOKENS);
    const alone = await plain(ours.url, TOKENS, OUTPUT_TOKENS);
    const missed = (error: unknown) =>
      (error as { code?: string }).code === "KV_SIDE_CHANNEL_TIMEOUT";
    await retryAfterTimeout(received, missed);
    expect(await served()).toEqual(alone);

    const lost = await kept();
    // No decode worker reads these blocks.
    await prefill(ours.url, TOKENS, { id: freshId() });
    await restart();
    await untilRepacks(server());

    const { failure } = await decodeSide.receive(lost.asked, OUR_BLOCKS);
    expect(failure?.code).toMatch(/^KV_/);
    decodeSide.finish(lost.asked, OUR_BLOCKS);
    await retryAfterTimeout(received, missed);
    expect(await served()).toEqual(alone);
    await until(() => ours.held() === 0, "the lease of the unread blocks has expired");
  });
}
