// A long suite: ends the demo's instances by force over NIXL; the fault runs and
// packages/proxy/test/flow/failure.test.ts have such ends.
import { existsSync } from "node:fs";
import { KvError } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { describe, expect, it } from "vitest";
import type { Cluster } from "../src/cluster/cluster.js";
import { planProxy } from "../src/cluster/cluster-plan.js";
import { compareKv, fetchRecords, sameTokens } from "../src/run/check-run.js";
import { complete } from "../src/run/completion-client.js";
import { expectIdle, PAIR, preparedRun, startPair } from "./support/matrix.js";
import { nixlAbsence } from "./support/nixl-absence.js";

const absence = await nixlAbsence();
/** Caches in host memory, and where there is a GPU in its memory. */
const caches = existsSync("/dev/nvidia0") ? (["cpu", "cuda"] as const) : (["cpu"] as const);
/** Limit of a request: more than the lease and the connector's request timeout together. */
const DEADLINE_MS = 30_000;

interface Ended {
  readonly requestId: string;
  readonly prompt: number;
  readonly result: "equal" | "different" | "error" | "late";
  readonly code: string | undefined;
}

/** Sends requests, four at a time, until `stop`. */
async function sendTraffic(url: string, name: string) {
  const { prompts, expected } = await preparedRun();
  const ended: Ended[] = [];
  let isRunning = true;
  let next = 0;
  async function client(): Promise<void> {
    while (isRunning) {
      const prompt = next++ % prompts.length;
      const requestId = `${name}-${next}`;
      const signal = AbortSignal.timeout(DEADLINE_MS);
      try {
        const promptTokens = [...(prompts[prompt] ?? [])];
        const maxTokens = expected[prompt]?.length ?? 0;
        const { tokens } = await complete({ url, requestId, promptTokens, maxTokens, signal });
        const result = sameTokens(tokens, expected[prompt] ?? []) ? "equal" : "different";
        ended.push({ requestId, prompt, result, code: undefined });
      } catch (error) {
        const code = KvError.is(error) ? String(error.details.code ?? error.code) : String(error);
        ended.push({ requestId, prompt, result: signal.aborted ? "late" : "error", code });
        // A stopped instance refuses connections at once.
        await new Promise((resolve) => setTimeout(resolve, 50));
      }
    }
  }
  const clients = Array.from({ length: 4 }, client);
  return {
    ended,
    async until(what: () => boolean): Promise<void> {
      await expect.poll(what, { timeout: 120_000, interval: 50 }).toBe(true);
    },
    async stop(): Promise<void> {
      isRunning = false;
      await Promise.all(clients);
    },
  };
}

/** How a proxy with the cluster's settings pairs both instances before it has sent a request. */
async function pairingStates({ prefills, decodes }: Cluster) {
  const settings = planProxy(prefills, decodes, PAIR);
  await using proxy = createProxy({ ...settings, pairing: { mode: "strict" } });
  await proxy.listen({ port: 0 });
  const { prefillers, decoders } = proxy.status();
  return [...prefillers, ...decoders].map(({ pairing }) => pairing?.state);
}

describe.skipIf(absence !== undefined)(
  `an instance killed under traffic over NIXL${absence === undefined ? "" : ` (${absence})`}`,
  () => {
    it.each(
      (["prefill", "decode"] as const).flatMap((role) =>
        caches.map((platform) => [role, platform] as const),
      ),
    )(
      "the other instance continues, clients get an error in time, and the restarted %s is used again, with caches of %s",
      async (role, platform) => {
        await preparedRun();
        const platforms = { prefillPlatform: platform, decodePlatform: platform };
        await using up = await startPair(
          { ...platforms, transport: "nixl", leaseSeconds: 6, requestTimeoutSeconds: 10 },
          { restart: true },
        );
        const [victim, other] =
          role === "prefill" ? [up.prefills[0], up.decodes[0]] : [up.decodes[0], up.prefills[0]];
        if (victim?.process === undefined || other?.process === undefined)
          throw new Error("no processes were started");
        expect(await pairingStates(up)).toEqual(["paired", "paired"]);
        const otherPid = other.process.pid;
        const load = await sendTraffic(up.proxy.url, role);
        await load.until(() => load.ended.length >= 8);

        const replaced = victim.process.replaced();
        process.kill(victim.process.pid, "SIGKILL");
        const atKill = load.ended.length;
        await load.until(() => load.ended.length >= atKill + 4);
        // The other instance answers while its peer is down.
        expect((await fetch(`${other.url}/health`)).status).toBe(200);
        await replaced;
        const atRestart = load.ended.length;
        const equalSince = () =>
          load.ended.slice(atRestart).filter(({ result }) => result === "equal").length;
        await load.until(() => equalSince() >= 8);
        await load.stop();

        expect(
          load.ended.filter(({ result }) => result === "different" || result === "late"),
        ).toEqual([]);
        expect(other.process.pid).toBe(otherPid);
        // The restarted instance took part: both sides recorded the same KV of a request.
        const [sent, received] = await Promise.all([
          fetchRecords(up.prefills[0]?.url ?? ""),
          fetchRecords(up.decodes[0]?.url ?? ""),
        ]);
        const since = load.ended.slice(atRestart).filter(({ result }) => result === "equal");
        expect(since.some(({ requestId }) => compareKv(requestId, sent, received).equal)).toBe(
          true,
        );
        await expectIdle(victim, other);
        // The restarted instance answers handshakes where the proxy was started to read them.
        expect(await pairingStates(up)).toEqual(["paired", "paired"]);
      },
      300_000,
    );
  },
);
