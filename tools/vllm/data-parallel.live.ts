import { beforeAll, describe, expect, test } from "vitest";
import { complete, completionBody, freshId, handedOver, plain, prefill } from "./completion.js";
import { promptVariant } from "./held-blocks.js";
import { openOurPrefill } from "./our-prefill.js";
import { openProxy } from "./proxy-pair.js";
import { vllmServers } from "./server.js";
import { prompt } from "./tiny-peer.js";
import { handshakeTimedOut, retryAfterTimeout, until } from "./until.js";

/**
 * vLLM with `--data-parallel-size 2`: an API server, a coordinator, and two engines with a worker
 * each. Each engine is P in one test and D in another, so that two cores are enough.
 */
const kind = { version: "0.33", mode: "pull" } as const;
const RANKS = [0, 1] as const;
const OUTPUT_TOKENS = 8;
/**
 * vLLM gives rank r the memory of NUMA node r, and stops where there is one node. With these it
 * splits the one node.
 */
const env = { VLLM_CPU_SIM_MULTI_NUMA: "1", VLLM_CPU_OMP_THREADS_BIND: "auto" };

describe("vLLM 0.33, pull, two data-parallel ranks", () => {
  const servers = vllmServers({ kind, env, args: ["--data-parallel-size", "2"] });
  const server = () => servers.of("dp2");
  const onRank = (rank: number) => ({ "x-data-parallel-rank": String(rank) });
  const proxied = (prefiller: string, decoder: string) =>
    openProxy({
      prefillers: [prefiller],
      decoders: [decoder],
      mode: "pull",
      pairing: { mode: "off" },
    });
  beforeAll(async () => void (await servers.start("dp2")));

  test("each rank has vLLM's engine id and the side-channel port of its formula", async () => {
    const asked = await Promise.all(
      RANKS.map((rank) => prefill(server().url, prompt(40), { headers: onRank(rank) })),
    );
    const ids = asked.map(({ remote_engine_id: id }) => String(id));
    expect(ids.map((id) => id.slice(-4))).toEqual(["_dp0", "_dp1"]);
    expect(new Set(ids.map((id) => id.slice(0, -4))).size).toBe(1);
    const { sideChannelPort } = server();
    expect(asked.map(({ remote_port: port }) => port)).toEqual(
      RANKS.map((rank) => sideChannelPort + rank),
    );
  });

  test.each([
    [0, 1],
    [1, 0],
  ])(
    "rank %i as P and rank %i as D behind kv-proxy: the tokens of one engine",
    async (from, to) => {
      const { url: at, metric } = server();
      const tokens = promptVariant(100, from);
      const expected = await plain(at, tokens, OUTPUT_TOKENS, {
        salt: freshId(),
        headers: onRank(to),
      });
      const moved = await metric("vllm:nixl_xfer_time_seconds_count");
      await using proxy = await proxied(`${at}@${from}`, `${at}@${to}`);
      const made = await retryAfterTimeout(
        () => plain(proxy.url, tokens, OUTPUT_TOKENS, { salt: freshId() }),
        handshakeTimedOut(server()),
      );
      expect(made).toEqual(expected);
      await until(
        async () => (await metric("vllm:nixl_xfer_time_seconds_count")) > moved,
        "D counts its READ",
      );
    },
  );

  test("an unknown rank is refused by vLLM, and the proxy passes that on", async () => {
    const { url: at } = server();
    await using proxy = await proxied(`${at}@7`, at);
    await expect(complete(proxy.url, completionBody(prompt(40), 1))).rejects.toThrow(
      /answered 4\d\d/,
    );
  });

  // Last: a vLLM D on the CPU that has paired with a P of another attention backend repacks the
  // blocks of every P.
  test("our P serves both ranks of a vLLM D", async () => {
    await using ours = await openOurPrefill({ kind, leaseSeconds: 600 });
    for (const rank of RANKS) {
      const tokens = prompt(100);
      const headers = onRank(rank);
      const made = await handedOver(ours.url, server(), tokens, OUTPUT_TOKENS, { headers });
      expect(made).toEqual(await plain(ours.url, tokens, OUTPUT_TOKENS));
    }
    await ours.freed();
  });
});
