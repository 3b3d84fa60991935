import { isLongRun } from "@kv/testing/long-run";
import { describe, expect, it } from "vitest";
import { complete } from "../src/run/completion-client.js";
import { expectAllIdle, preparedRun, startPair } from "./support/matrix.js";
import { post } from "./support/memory-pair.js";
import { nixlAbsence } from "./support/nixl-absence.js";

// vLLM's sleep mode: one side gives its caches back to the transport while the other one goes on.

const absence = await nixlAbsence();

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
      await using cluster = await startPair({
        transport,
        connector,
        extraConfig,
        leaseSeconds: 5,
      });
      const { proxy, prefills, decodes } = cluster;
      const sleeper = (side === "prefill" ? prefills : decodes)[0]?.url ?? "";
      const call = (path: string, method = "GET") => fetch(sleeper + path, { method });
      const ask = async (n: number) => {
        const [promptTokens = [], answer = []] = [prompts[n], expected[n]];
        const request = { requestId: `r${n}`, promptTokens, maxTokens: answer.length };
        return (await complete({ url: proxy.url, ...request })).tokens;
      };
      expect(await ask(0)).toEqual(expected[0]);
      // A request that runs while its engine falls asleep.
      const running = post(sleeper, { prompt: prompts[3], max_tokens: 400 });
      await new Promise((resolve) => setTimeout(resolve, 30));
      expect((await call("/sleep?level=1", "POST")).status).toBe(200);
      expect((await running).status).toBe(503);
      expect(await (await call("/is_sleeping")).json()).toEqual({ is_sleeping: true });
      expect((await call("/health")).status).toBe(503);
      const status = (await (await call("/status")).json()) as Record<string, number>;
      expect(status.free_blocks).toBe((status.num_blocks ?? 0) - 1);
      await expect(
        complete({ url: sleeper, requestId: "early", promptTokens: [7, 8], maxTokens: 1 }),
      ).rejects.toThrow();
      expect((await call("/wake_up", "POST")).status).toBe(200);
      // The proxy sees its health within a second.
      await expect
        .poll(() => ask(1).catch(String), { timeout: 20_000, interval: 300 })
        .toEqual(expected[1]);
      expect(await ask(2)).toEqual(expected[2]);
      // What was in the prefix cache before the sleep is gone.
      expect(await ask(0)).toEqual(expected[0]);
      await expectAllIdle(cluster);
    },
    240_000,
  );
});
