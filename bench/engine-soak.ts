// npm run soak:proxy -- --engines memory|nixl [--connector NixlPushConnector]: requests through kv-proxy to two P and two D of the demo, whose tokens are those of one engine. Over NIXL, a process dies now and then and is
// started again. Clients leave at random. At the end no engine holds anything.
import { setTimeout as sleep } from "node:timers/promises";
import { silentLog } from "@kv/interface";
import { startCluster } from "../apps/demo/src/cluster/cluster.js";
import type { ClusterMember } from "../apps/demo/src/cluster/members.js";
import { sameTokens } from "../apps/demo/src/run/check-run.js";
import { complete } from "../apps/demo/src/run/completion-client.js";
import { prepareRun } from "../apps/demo/src/run/prepare-run.js";

export interface EngineSoak {
  readonly transport: "memory" | "nixl";
  readonly connector: string;
  readonly durationMs: number;
  readonly everyMs: number;
  readonly clients: number;
}

/** More than a lease and a request's time limit together. */
const LATE_MS = 30_000;
const IDLE_MS = 40_000;

/** Returns whether all was well, and prints the counts. */
export async function engineSoak(soak: EngineSoak): Promise<boolean> {
  const { transport, connector, durationMs, everyMs, clients } = soak;
  const { prompts, expected } = await prepareRun({ requests: 16, maxTokens: 16, tinyKvHeads: 4 }, () => {});
  const sizes = { prefillTp: 2, decodeTp: 1, prefillBlockSize: 16, decodeBlockSize: 32, cacheTokens: 8192 };
  const cluster = await startCluster(
    { transport, connector, prefills: 2, decodes: 2, ...sizes, leaseSeconds: 6, requestTimeoutSeconds: 10 },
    { log: silentLog, logLevel: "silent", restart: true },
  );
  const members = [...cluster.prefills, ...cluster.decodes];
  const counts = { equal: 0, different: 0, left: 0, failed: 0, late: 0, deaths: 0 };
  const why = new Map<string, number>();
  const endAtMs = Date.now() + durationMs;
  let serial = 0;

  async function client(): Promise<void> {
    while (Date.now() < endAtMs) {
      const at = serial++ % prompts.length;
      const leaves = Math.random() < 0.2;
      const signal = AbortSignal.timeout(leaves ? Math.floor(200 * Math.random()) : LATE_MS);
      const request = {
        promptTokens: [...(prompts[at] ?? [])],
        maxTokens: expected[at]?.length ?? 0,
        signal,
      };
      try {
        const { tokens } = await complete({
          url: cluster.proxy.url,
          requestId: `soak-${serial}`,
          ...request,
        });
        counts[sameTokens(tokens, expected[at] ?? []) ? "equal" : "different"] += 1;
      } catch (error) {
        counts[signal.aborted ? (leaves ? "left" : "late") : "failed"] += 1;
        const reason = (error as Error).message.replaceAll(/soak-\d+/g, "");
        if (!signal.aborted) why.set(reason, (why.get(reason) ?? 0) + 1);
        await sleep(50);
      }
    }
  }
  async function chaos(): Promise<void> {
    while (transport === "nixl" && Date.now() + everyMs < endAtMs) {
      await sleep(everyMs * Math.random());
      const victim = members[Math.floor(Math.random() * members.length)]?.process;
      if (victim === undefined) return;
      const replaced = victim.replaced();
      process.kill(victim.pid, "SIGKILL");
      await replaced;
      counts.deaths += 1;
    }
  }
  let held: string[] = [];
  try {
    await Promise.all([chaos(), ...Array.from({ length: clients }, client)]);
    for (const until = Date.now() + IDLE_MS; Date.now() < until; await sleep(200)) {
      held = (await Promise.all(members.map(heldBy))).flat();
      if (held.length === 0) break;
    }
  } finally {
    await cluster.close();
  }
  console.log(JSON.stringify({ transport, connector, ...counts, held }));
  for (const [reason, count] of why) console.log(`failed ${count}: ${reason}`);
  // Without deaths nothing may fail.
  const failures = counts.deaths === 0 ? counts.failed : 0;
  return counts.equal > 0 && counts.different + counts.late + failures + held.length === 0;
}

/** What an instance has not released. */
async function heldBy({ name, url }: ClusterMember): Promise<string[]> {
  const status = (await (await fetch(`${url}/status`)).json()) as { outstanding: Record<string, number> };
  return Object.entries(status.outstanding)
    .filter(([what, count]) => what !== "listeners" && count !== 0)
    .map(([what, count]) => `${name}: ${count} ${what}`);
}
