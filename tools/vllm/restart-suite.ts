import { afterEach, beforeAll, expect, test } from "vitest";
import { freshId, handedOver, plain, prefill } from "./completion.js";
import {
  type HeadlessDecode,
  isTimeout,
  OUR_BLOCKS,
  openHeadlessDecode,
  receiveAll,
} from "./headless-decode.js";
import { prefillAndHold, untilFreed } from "./held-blocks.js";
import { type OurPrefill, openOurPrefill, untilRepacks } from "./our-prefill.js";
import type { VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { retryAfterTimeout } from "./until.js";

const TOKENS = prompt(100);
const OUTPUT_TOKENS = 8;
const OUR_LEASE_SECONDS = 5;
/** A push P that is gone sends nothing: our D waits so long. */
const REQUEST_TIMEOUT_SECONDS = 10;

/** Another vLLM starts at the address of one that is paired with our P and our D. */
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
    async function received() {
      const { asked, before } = await prefillAndHold(server(), TOKENS);
      await receiveAll(decodeSide, asked);
      decodeSide.finish(asked, [OUR_BLOCKS]);
      await untilFreed(server(), before);
    }
    const served = () => handedOver(ours.url, server(), TOKENS, OUTPUT_TOKENS);
    const alone = await plain(ours.url, TOKENS, OUTPUT_TOKENS);
    await retryAfterTimeout(received, isTimeout);
    expect(await served()).toEqual(alone);

    const lost = await prefillAndHold(server(), TOKENS);
    await prefill(ours.url, TOKENS, { id: freshId() });
    await restart();
    await untilRepacks(server());

    const { failure } = await decodeSide.receive(lost.asked, [OUR_BLOCKS]);
    expect(failure?.code).toMatch(/^KV_/);
    decodeSide.finish(lost.asked, [OUR_BLOCKS]);
    await retryAfterTimeout(received, isTimeout);
    expect(await served()).toEqual(alone);
    await ours.freed();
  });
}
