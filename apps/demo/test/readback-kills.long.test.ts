// A long suite: ends P and D between turns.
import { setTimeout as sleep } from "node:timers/promises";
import { KvError, silentLog } from "@kv/interface";
import { createProxy } from "@kv/proxy";
import { isLongRun } from "@kv/testing/long-run";
import { memoryNetwork, seededRandom } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { planInstances, planProxy } from "../src/cluster/cluster-plan.js";
import { sameTokens } from "../src/run/check-run.js";
import { complete } from "../src/run/completion-client.js";
import { type Conversation, prepareConversation, READBACK } from "../src/run/turns.js";
import { expectIdle, PAIR, startPair } from "./support/matrix.js";
import { post } from "./support/memory-pair.js";
import { nixlAbsence } from "./support/nixl-absence.js";
import { startRelayed } from "./support/relayed-instance.js";

// Two P and two D behind kv-proxy --readback; one of them after the other ends as by SIGKILL at a
// random moment and comes back (issue 48, point 5).

const absence = await nixlAbsence();
const [CLIENTS, TURNS] = [4, 4];
/** A D frees what a P that died was to read when the time of its own setting is over. */
const TTL_SECONDS = isLongRun ? 20 : 6;
const extraConfig = { ...READBACK, decoder_kv_blocks_ttl: TTL_SECONDS };
const FLEET = {
  ...PAIR,
  prefills: 2,
  decodes: 2,
  leaseSeconds: 6,
  requestTimeoutSeconds: 3,
  extraConfig,
  // What P does not read it computes.
  prefillInstance: { prefixCaching: false },
} as const;
/** Between the return of one and the end of the next, and how long it is gone. */
const [LIFE_MS, GONE_MS] = [400, 300];
/** Longer than a leg that fails late, a second P and a second D. */
const LONGEST_MS = 30_000;

/** An instance that ends, and starts again at its address. */
interface Victim {
  readonly name: string;
  readonly url: string;
  readonly sideChannel?: { readonly host: string; readonly port: number } | null | undefined;
  kill(): Promise<void>;
  start(): Promise<void>;
}

/** Sends so many requests, turn after turn, while instances end. */
async function serveUnderKills(victims: readonly Victim[], requests: number, memory: boolean) {
  const spoken = await conversation();
  const of = (role: string) =>
    victims
      .filter(({ name }) => name.startsWith(role))
      .map(({ url, sideChannel }) => ({ url, sideChannel: memory ? null : sideChannel }));
  const reasons: Record<string, number> = {};
  let readTokens = 0;
  const proxy = createProxy({
    ...planProxy(of("prefill"), of("decode"), FLEET),
    ...(memory ? { pairing: { mode: "off" } } : {}),
    health: { intervalMs: 200 },
    readback: { timeoutMs: 5000, minTokens: 1, ttlMs: TTL_SECONDS * 750 },
    log: {
      ...silentLog,
      info: (event, fields = {}) => {
        if (event !== "request-done") return;
        const { readback, readbackTokens } = fields;
        readTokens += Number(readbackTokens ?? 0);
        reasons[String(readback)] = (reasons[String(readback)] ?? 0) + 1;
      },
    },
  });
  const { url } = await proxy.listen({ port: 0 });
  const random = seededRandom("kills");
  const counts = { served: 0, cut: 0, kills: 0 };
  const failures: string[] = [];
  let sent = 0;

  /** A turn through the proxy. A stream that has begun may end with an error. */
  async function ask(turn: number): Promise<void> {
    sent += 1;
    const [prompt = [], wanted = []] = [spoken.prompts[turn], spoken.expected[turn]];
    const requestId = `kills-${sent}`;
    const isStream = sent % 4 === 0;
    const begunAt = performance.now();
    try {
      const tokens = isStream
        ? (await complete({ url, requestId, promptTokens: prompt, maxTokens: wanted.length }))
            .tokens
        : await answered(url, requestId, prompt, wanted.length);
      if (sameTokens(tokens, wanted)) counts.served += 1;
      else failures.push(`${requestId}, turn ${turn}: other tokens`);
    } catch (error) {
      const message = KvError.from(error, "KV_INTERNAL", "failed").message;
      // The status was sent, and some of the answer.
      if (isStream && message.includes("HTTP 200")) counts.cut += 1;
      else failures.push(`${requestId}, turn ${turn}: ${message}`);
    }
    const tookMs = performance.now() - begunAt;
    if (tookMs > LONGEST_MS) failures.push(`${requestId} took ${tookMs.toFixed(0)} ms`);
  }

  const running = new Set<Promise<void>>();
  const client = async () => {
    while (sent < requests)
      for (let turn = 0; turn < TURNS && sent < requests; turn += 1) {
        const asked = ask(turn);
        running.add(asked);
        await asked;
        running.delete(asked);
        // Somebody reads the answer.
        await sleep(20 * random.next());
      }
  };
  const clients = Promise.all(Array.from({ length: CLIENTS }, client));
  let met: Promise<void>[] = [];
  const chaos = (async () => {
    while (sent < requests) {
      // A leg is repeated once: no request meets two ends, however slow the machine is.
      await Promise.all(met);
      await sleep(LIFE_MS * random.next());
      const victim = victims[random.integer(victims.length)];
      met = [...running];
      await victim?.kill();
      counts.kills += 1;
      await sleep(GONE_MS * random.next());
      await victim?.start();
      // Of each role one is there at any time, and the proxy knows of it.
      const isBack = () => {
        const { prefillers, decoders } = proxy.status();
        return [...prefillers, ...decoders].every(({ available }) => available);
      };
      while (!isBack() && sent < requests) await sleep(50);
    }
  })();
  await Promise.all([clients, chaos]);
  await proxy.close();
  console.info(JSON.stringify({ ...counts, readback: reasons }));
  expect(failures).toEqual([]);
  expect(counts.served + counts.cut).toBe(sent);
  expect(counts.cut).toBeLessThanOrEqual(counts.kills);
  // A turn is computed whose D or P has ended.
  expect(reasons["used"] ?? 0).toBeGreaterThan(requests / 3);
  // P says how many it has read: the first prompt is longer than this.
  expect(readTokens).toBeGreaterThanOrEqual(100 * (reasons["used"] ?? 0));
  // Nothing is pinned: each D was told, or its time is over.
  await expectIdle(...victims);
}

let prepared: Promise<Conversation> | undefined;
const conversation = () =>
  (prepared ??= prepareConversation(TURNS, {}, { maxTokens: 8, say: () => {} }));

/** The tokens of an answer that is no stream. */
async function answered(
  url: string,
  requestId: string,
  prompt: readonly number[],
  max_tokens: number,
) {
  const { status, body } = await post(url, { prompt, max_tokens }, { "x-request-id": requestId });
  if (status === 200) return body.choices?.[0]?.token_ids ?? [];
  throw new KvError("KV_PROXY_UPSTREAM_FAILED", `HTTP ${status}: ${body.error?.message}`);
}

describe("instances end under conversations that are read back", () => {
  const inMemory = isLongRun ? 1000 : 40;
  it(
    `${inMemory} of ${inMemory} requests are served over the memory transport`,
    async () => {
      const network = memoryNetwork();
      const { prefills, decodes } = planInstances(FLEET);
      const victims = await Promise.all(
        [...prefills, ...decodes].map((one) => startRelayed(one, network)),
      );
      try {
        await serveUnderKills(victims, inMemory, true);
      } finally {
        for (const victim of victims) await victim.end();
      }
    },
    isLongRun ? 900_000 : 60_000,
  );

  it.runIf(isLongRun && absence === undefined)(
    "50 of 50 requests are served over NIXL, each instance in its own process",
    async () => {
      await using cluster = await startPair({ ...FLEET, transport: "nixl" }, { restart: true });
      const victims = [...cluster.prefills, ...cluster.decodes].map((member): Victim => {
        let replaced = Promise.resolve();
        return {
          ...member,
          async kill() {
            const { process: victim } = member;
            if (victim === undefined) throw new Error(`${member.name} has no process`);
            replaced = victim.replaced();
            process.kill(victim.pid, "SIGKILL");
          },
          start: () => replaced,
        };
      });
      await serveUnderKills(victims, 50, false);
    },
    600_000,
  );
});
