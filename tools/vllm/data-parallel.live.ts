import { createProxy } from "@kv/proxy";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { complete, completionBody, decode, plain, prefill } from "./completion.js";
import { freshId, promptVariant } from "./held-blocks.js";
import { openOurPrefill } from "./our-prefill.js";
import { handshakeTimedOut, retryAfterTimeout } from "./retry-after-timeout.js";
import { showLogs, startVllm, type VllmServer } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { until } from "./until.js";

/**
 * vLLM with `--data-parallel-size 2` on both sides: four engines, two API servers and two coordinators on this machine. Two cores are enough,
 * because the test servers pause between idle steps (`hook/`).
 */
const kind = { version: "0.33", mode: "pull" } as const;
const RANKS = [0, 1] as const;
const OUTPUT_TOKENS = 8;

describe("vLLM 0.33, pull, two data-parallel ranks on each side", () => {
  const servers: VllmServer[] = [];
  const [p, d] = [() => servers[0] as VllmServer, () => servers[1] as VllmServer];
  beforeAll(async () => {
    // One after the other: the start of four engines at once takes longer than that of two and two.
    for (const name of ["dp2-p", "dp2-d"])
      servers.push(await startVllm({ kind, name, leaseSeconds: 60, args: ["--data-parallel-size", "2"] }));
  });
  beforeEach(({ onTestFailed }) => onTestFailed(() => showLogs(...servers)));
  afterAll(async () => {
    await Promise.all(servers.map((server) => server.stop()));
  });

  test("each rank has vLLM's engine id and the side-channel port of its formula", async () => {
    const asked = await Promise.all(
      RANKS.map((rank) =>
        prefill(p().url, prompt(40), { headers: { "x-data-parallel-rank": String(rank) } }),
      ),
    );
    const ids = asked.map(({ remote_engine_id: id }) => String(id));
    expect(ids.map((id) => id.slice(-4))).toEqual(["_dp0", "_dp1"]);
    expect(new Set(ids.map((id) => id.slice(0, -4))).size).toBe(1);
    expect(asked.map(({ remote_port: port }) => port)).toEqual(
      RANKS.map((rank) => p().sideChannelPort + rank),
    );
  });

  test.each(RANKS.flatMap((from) => RANKS.map((to) => [from, to] as const)))(
    "rank %i of P to rank %i of D behind kv-proxy: the tokens of one server",
    async (from, to) => {
      const tokens = promptVariant(100, 2 * from + to);
      const expected = await plain(d().url, tokens, OUTPUT_TOKENS, { salt: freshId() });
      const proxy = createProxy({
        prefillers: [`${p().url}@${from}`],
        decoders: [`${d().url}@${to}`],
        mode: "pull",
        pairing: { mode: "off" },
      });
      try {
        const { url } = await proxy.listen({ port: 0 });
        const made = await retryAfterTimeout(
          async () =>
            (await complete(url, completionBody(tokens, OUTPUT_TOKENS), { salt: freshId() })).choices[0],
          handshakeTimedOut(d()),
        );
        expect(made?.token_ids).toEqual(expected);
      } finally {
        await proxy.close();
      }
      const moved = await d().metric("vllm:nixl_bytes_transferred_count");
      expect(moved).toBeGreaterThan(0);
    },
  );

  test("an unknown rank is refused by vLLM, and the proxy passes that on", async () => {
    const proxy = createProxy({
      prefillers: [`${p().url}@7`],
      decoders: [d().url],
      mode: "pull",
      pairing: { mode: "off" },
    });
    try {
      const { url } = await proxy.listen({ port: 0 });
      await expect(complete(url, completionBody(prompt(40), 1))).rejects.toThrow(/answered 4\d\d/);
    } finally {
      await proxy.close();
    }
  });

  // Last: a vLLM D on the CPU that has paired with a P of another attention backend repacks the blocks of every P.
  test("our P serves both ranks of a vLLM D", async () => {
    const ours = await openOurPrefill({ kind, leaseSeconds: 600 });
    try {
      for (const rank of RANKS) {
        const tokens = prompt(100);
        const made = await retryAfterTimeout(async () => {
          const id = freshId();
          const params = await prefill(ours.url, tokens, { id });
          const headers = { "x-data-parallel-rank": String(rank) };
          return await decode(d().url, tokens, OUTPUT_TOKENS, params, { id, salt: id, headers });
        }, handshakeTimedOut(d()));
        expect(made).toEqual(await plain(ours.url, tokens, OUTPUT_TOKENS));
      }
      await until(() => ours.held() === 0, "our prefill side has freed the blocks");
    } finally {
      await ours.instance.close();
    }
  });
});
