import { silentLog } from "@kv/interface";
import { isLongRun } from "@kv/testing/long-run";
import { afterEach, describe, expect, it } from "vitest";
import { type Cluster, startCluster } from "../src/cluster/cluster.js";
import { complete } from "../src/run/completion-client.js";
import { expectIdle, PAIR, preparedRun } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";

// vLLM's sleep mode: one side gives its caches back to the transport while the other one goes on.

const absence = await nixlAbsence();
let cluster: Cluster | undefined;
afterEach(async () => {
  await cluster?.close();
  cluster = undefined;
});

const call = async (url: string, method: "GET" | "POST", path: string) => {
  const response = await fetch(url + path, { method });
  return { status: response.status, text: await response.text() };
};

/** Of one connector, as `--extra-config` gives it to the demo. */
const MULTI = { connectors: [{ kv_connector: "NixlConnector", kv_role: "kv_both" }] };
const RUNS = [
  ["memory", "NixlConnector", {}],
  ["memory", "NixlPushConnector", {}],
  ...(isLongRun
    ? ([
        ["memory", "MultiConnector", MULTI],
        ["nixl", "NixlConnector", {}],
        ["nixl", "NixlPushConnector", {}],
      ] as const)
    : []),
] as const;

describe.each(RUNS)("over %s with %s", (transport, connector, extraConfig) => {
  it.skipIf(transport === "nixl" && absence !== undefined).each(["prefill", "decode"] as const)(
    "the %s engine sleeps and wakes: it answers 503 meanwhile, and then hands over with its peer as before",
    async (side) => {
      const { prompts, expected } = await preparedRun();
      cluster = await startCluster(
        { ...PAIR, transport, connector, extraConfig, leaseSeconds: 5 },
        { log: silentLog, logLevel: "silent" },
      );
      const { proxy, prefills, decodes } = cluster;
      const sleeper = (side === "prefill" ? prefills : decodes)[0]?.url ?? "";
      const ask = async (n: number) => {
        const maxTokens = expected[n]?.length ?? 0;
        const promptTokens = [...(prompts[n] ?? [])];
        const { tokens } = await complete({
          url: proxy.url,
          requestId: `r${n}`,
          promptTokens,
          maxTokens,
        });
        return tokens;
      };
      expect(await ask(0)).toEqual(expected[0]);
      // A request that runs while its engine falls asleep.
      const body = { prompt: prompts[3], max_tokens: 400, ignore_eos: true };
      const running = fetch(`${sleeper}/v1/completions`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      await new Promise((resolve) => setTimeout(resolve, 30));
      expect(await call(sleeper, "POST", "/sleep?level=1")).toEqual({ status: 200, text: "" });
      expect((await running).status).toBe(503);
      expect(JSON.parse((await call(sleeper, "GET", "/is_sleeping")).text)).toEqual({
        is_sleeping: true,
      });
      expect((await call(sleeper, "GET", "/health")).status).toBe(503);
      const status = JSON.parse((await call(sleeper, "GET", "/status")).text) as {
        free_blocks: number;
        num_blocks: number;
      };
      expect(status.free_blocks).toBe(status.num_blocks - 1);
      await expect(
        complete({ url: sleeper, requestId: "early", promptTokens: [7, 8], maxTokens: 1 }),
      ).rejects.toThrow();
      expect((await call(sleeper, "POST", "/wake_up")).status).toBe(200);
      // The proxy sees its health within a second.
      await expect
        .poll(() => ask(1).catch(String), { timeout: 20_000, interval: 300 })
        .toEqual(expected[1]);
      expect(await ask(2)).toEqual(expected[2]);
      // What was in the prefix cache before the sleep is gone.
      expect(await ask(0)).toEqual(expected[0]);
      for (const member of [...prefills, ...decodes]) await expectIdle(member);
    },
    240_000,
  );
});
