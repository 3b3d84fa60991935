import { httpLimitTries, type LimitedServer } from "@kv/testing/http/http-limits";
import { postText, rawClient } from "@kv/testing/http/raw-client";
import { recordedLog } from "@kv/testing/recorded-log";
import { describe, expect, it, onTestFinished } from "vitest";
import type { HeadlessPrefill } from "../src/headless/headless-prefill.js";
import {
  PREFILL_LIMITS,
  type PrefillLimits,
  PrefillServer,
} from "../src/headless/prefill-server.js";
import { serveSample } from "./served.js";

/** A server whose prompts are answered when the test says so. */
async function serveWith(limits: Partial<PrefillLimits>): Promise<LimitedServer> {
  let asked = 0;
  let release = () => {};
  const released = new Promise<void>((resolve) => {
    release = resolve;
  });
  const prefill = {
    blocks: { total: 2, used: 0 },
    blockSize: 16,
    prefill: async () => {
      asked += 1;
      return released.then(() => ({}));
    },
  } as unknown as HeadlessPrefill;
  const server = new PrefillServer({ prefill, model: "m", vllmVersion: "0", limits });
  const url = await server.listen({ host: "127.0.0.1", port: 0 });
  onTestFinished(() => {
    release();
    return server.close();
  });
  const body = JSON.stringify({ prompt: [1, 2], kv_transfer_params: { do_remote_decode: true } });
  return { url, body, release, asked: () => asked };
}

const tries = httpLimitTries(serveWith);

describe("limits of the HTTP of kv-peer", () => {
  it.each(Object.entries(tries))(
    "%s: the offender is refused, and others are served",
    (_, attempt) => attempt(),
  );

  it("a client that leaves gives its place back", async () => {
    const server = await serveWith({ maxRequests: 1 });
    const { socket } = await rawClient(server.url, postText(server.body));
    await expect.poll(server.asked).toBe(1);
    expect((await fetch(server.url)).status).toBe(503);
    socket.destroy();
    await expect.poll(async () => (await fetch(server.url)).status).toBe(404);
  });

  it("each limit is tried here", () => {
    expect(Object.keys(tries)).toEqual(Object.keys(PREFILL_LIMITS));
  });

  it("an answer to a refused body is short, and repeats nothing of it", async () => {
    const { url } = await serveWith({});
    for (const body of [
      '{"prompt": "a secret" oops}',
      JSON.stringify({ prompt: Array(300_000).fill("secret") }),
    ]) {
      const answer = await fetch(`${url}/v1/completions`, { method: "POST", body });
      expect(answer.status).toBe(400);
      const text = await answer.text();
      expect(text.length).toBeLessThan(500);
      expect(text).not.toContain("secret");
    }
  });
});

it("the log of a prefill worker has no token ids of prompts and no credentials", async () => {
  const { log, events: lines } = recordedLog();
  const served = await serveSample({ leaseMs: 1000, numBlocks: 8, log });
  const url = served.server.url;
  const headers = { authorization: "Bearer secret", "content-type": "application/json" };
  const ask = (prompt: unknown) =>
    fetch(`${url}/v1/completions`, {
      method: "POST",
      headers,
      body: JSON.stringify({ prompt, kv_transfer_params: { do_remote_decode: true } }),
    });
  const prompt = Array.from({ length: 90 }, () => 76_543);
  // The second one gets no blocks, the others are refused.
  const statuses = [];
  for (const given of [prompt, prompt, prompt, Array(500).fill(76_543), "a secret"])
    statuses.push((await ask(given)).status);
  expect(statuses).toEqual(expect.arrayContaining([200, 503, 400]));
  await expect.poll(() => served.prefill.blocks.used).toBe(0);
  expect(JSON.stringify(lines)).not.toMatch(/secret|76543/);
  // The lease that ran out is logged, so the log is the one that is read here.
  expect(lines.length).toBeGreaterThan(0);
});
