// A long suite: hundreds of requests that D refuses; packages/proxy/test/flow has the releases.
import { silentLog } from "@kv/interface";
import { someOf } from "@kv/testing/long-run";
import { afterEach, describe, expect, it } from "vitest";
import { type Cluster, startCluster } from "../src/cluster/cluster.js";
import type { ClusterOptions } from "../src/cluster/cluster-plan.js";
import { complete } from "../src/run/completion-client.js";
import { expectIdle, PAIR, preparedRun } from "./support/matrix.js";
import { post } from "./support/memory-pair.js";
import { nixlAbsence } from "./support/nixl-absence.js";

const absence = await nixlAbsence();
/** Far longer than the test waits: blocks that are freed were released. */
const LEASE_SECONDS = 300;

let cluster: Cluster | undefined;
afterEach(async () => {
  await cluster?.close();
  cluster = undefined;
});

async function start(options: Partial<ClusterOptions>) {
  cluster = await startCluster(
    { ...PAIR, leaseSeconds: LEASE_SECONDS, ...options },
    { log: silentLog, logLevel: "silent" },
  );
  const [prefill] = cluster.prefills;
  const [decode] = cluster.decodes;
  if (prefill === undefined || decode === undefined) throw new Error("no instances were started");
  return { prefill, decode, proxy: cluster.proxy };
}

const leases = async (url: string): Promise<number | undefined> => {
  const status = (await (await fetch(`${url}/status`)).json()) as {
    outstanding: Record<string, number>;
  };
  return status.outstanding.leases;
};

/**
 * The proxy's request for blocks that nobody will decode: the decode instance refuses it and tells
 * the prefill instance.
 */
async function expectReleased(options: Partial<ClusterOptions>): Promise<void> {
  const { prompts, expected } = await preparedRun();
  const { prefill, decode, proxy } = await start(options);
  const prompt = prompts[0] ?? [];
  const transfer_mode = options.connector === "push" ? { transfer_mode: "push" } : {};
  const { body } = await post(prefill.url, {
    prompt,
    max_tokens: 1,
    kv_transfer_params: { do_remote_decode: true, ...transfer_mode },
  });
  expect(await leases(prefill.url)).toBe(1);
  const refused = await post(decode.url, {
    prompt: [0],
    max_tokens: 1,
    stream: true,
    use_beam_search: true,
    kv_transfer_params: body.kv_transfer_params,
  });
  expect(refused.status).toBe(400);
  await expectIdle(prefill);
  await expectIdle(decode);
  // Both still serve, and the same prompt is right.
  const again = { url: proxy.url, requestId: "again", promptTokens: prompt, maxTokens: 16 };
  expect((await complete(again)).tokens).toEqual(expected[0]);
}

describe("a request for blocks that nobody will decode", () => {
  it.each(["NixlConnector", "push"])(
    "frees them at once, in one process, with %s",
    async (connector) => {
      await expectReleased({ connector });
    },
  );
});

describe("requests that a decode instance refuses", () => {
  it.each(["push", "NixlConnector"])(
    "F1: 120 of them leave the prefill instance's pool empty, with %s",
    async (connector) => {
      const { prefill, decode, proxy } = await start({ connector });
      // The proxy learns where P is, and then sends both legs of push at once.
      await complete({ url: proxy.url, requestId: "first", promptTokens: [7, 8, 9], maxTokens: 1 });
      const ask = async (_: unknown, at: number) =>
        (await post(proxy.url, { prompt: [at + 1, 8, 9], max_tokens: 1e6 })).status;
      expect(new Set(await Promise.all(Array.from({ length: 120 }, ask)))).toEqual(new Set([400]));
      await expectIdle(prefill);
      await expectIdle(decode);
    },
  );
});

describe.skipIf(absence !== undefined)(
  `a request for blocks that nobody will decode, over NIXL${absence === undefined ? "" : ` (${absence})`}`,
  () => {
    it.each(someOf(["push", "NixlConnector"], 2))(
      "frees them at once, between two processes, with %s",
      async (connector) => {
        await expectReleased({ transport: "nixl", connector });
      },
      120_000,
    );
  },
);

describe("a request id of 128 characters, the longest that the proxy takes", () => {
  it.each(["NixlConnector", "push"] as const)(
    "passes proxy and instances with %s",
    async (connector) => {
      const { prompts, expected } = await preparedRun();
      const { proxy } = await start({ connector });
      for (const letter of ["a", "b"]) {
        const answer = await complete({
          url: proxy.url,
          requestId: letter.repeat(128),
          promptTokens: prompts[0] ?? [],
          maxTokens: 16,
        });
        expect(answer.tokens).toEqual(expected[0]);
      }
    },
  );
});
