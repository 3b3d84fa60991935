import { readFile } from "node:fs/promises";
import { METRICS } from "@kv/connector";
import type { AgentMetadata } from "@kv/protocol";
import { z } from "zod";
import { type Check, check } from "../checks/report.js";
import { isThisHost } from "../doctor/target.js";
import type { EngineServer } from "../http/engine-server.js";
import { requestJson } from "../http/http-request.js";
import type { MetricSamples } from "../http/prometheus-text.js";
import { unfinishedRequests } from "../load/block-leaks.js";
import type { SideChannelAddress } from "../protocol/remote-engine.js";
import FINDING_KINDS from "./finding-kinds.json" with { type: "json" };

export { FINDING_KINDS };

type FindingKind = keyof typeof FINDING_KINDS;

export function finding(kind: FindingKind, server: string, found: string): Check {
  const { meaning, remedy } = FINDING_KINDS[kind];
  return check(`watch.${kind}`, meaning, "fail", found, remedy, { server });
}

export function findingJson({ id, title, found, fix, details }: Check) {
  const kind = id.slice("watch.".length);
  return { kind, server: String(details?.server), found, meaning: title, remedy: fix };
}

export function findingLine(seen: Check): string {
  const { kind, server, found, meaning, remedy } = findingJson(seen);
  return `${kind}  ${server}: ${found}; ${meaning}; remedy: ${remedy}`.replaceAll(
    /\s*[\r\n]+\s*/g,
    " ",
  );
}

const COUNTERS: readonly (readonly [FindingKind, string])[] = [
  ["notifications-after-expiry", `${METRICS.notificationsAfterExpiry}_total`],
  ["expired-requests", `${METRICS.expiredRequests}_total`],
  ["failed-transfers", `${METRICS.failedTransfers}_total`],
];
/** A lease, by default 30 s, frees a request whose D never comes. */
const HELD_TOO_LONG_MS = 90_000;

export class ServerCounters {
  readonly #url: string;
  readonly #before = new Map<string, number>();
  #heldSinceMs: number | undefined;

  constructor(url: string) {
    this.#url = url;
  }

  /** Since the last call. A lower counter shows a restarted server. */
  compare(samples: MetricSamples, nowMs: number): Check[] {
    const findings: Check[] = [];
    for (const [kind, name] of COUNTERS) {
      const value = samples.sum(name);
      if (value === undefined) continue;
      const before = this.#before.get(name);
      this.#before.set(name, value);
      if (before === undefined || value <= before) continue;
      findings.push(finding(kind, this.#url, `${name} grew by ${value - before} to ${value}`));
    }
    const used = samples.sum("vllm:kv_cache_usage_perc") ?? 0;
    if (used === 0 || unfinishedRequests(samples) > 0) this.#heldSinceMs = undefined;
    else this.#heldSinceMs ??= nowMs;
    const heldMs = nowMs - (this.#heldSinceMs ?? nowMs);
    if (heldMs >= HELD_TOO_LONG_MS) {
      const found = `${(100 * used).toFixed(1)} % of the blocks are in use for ${Math.round(heldMs / 1000)} s without a request`;
      findings.push(finding("blocks-stay-allocated", this.#url, found));
    }
    return findings;
  }
}

export function sharedAddresses(
  url: string,
  { baseAddresses, regionNames }: AgentMetadata,
): Check[] {
  const region = baseAddresses.findIndex((address, at) => baseAddresses.indexOf(address) < at);
  if (region < 0) return [];
  const [one, other] = [baseAddresses.indexOf(baseAddresses[region] ?? 0), region].map(
    (at) => regionNames?.[at] ?? `region ${at}`,
  );
  const found = `${one} and ${other} are both at address ${baseAddresses[region]}`;
  return [finding("shared-base-address", url, found)];
}

const eventSources = z.record(
  z.string(),
  z.looseObject({
    enable_kv_cache_events: z.boolean().nullish(),
    endpoint: z.string().max(1024).nullish(),
    replay_endpoint: z.string().max(1024).nullish(),
  }),
);
const WIDE_HOST = /^(\*|0\.0\.0\.0|\[?::\]?)$/;

/**
 * Finds KV event sockets by `GET /kv_event_sources` (vLLM 0.33), and a side channel by the host
 * that P announces or this host's kernel.
 */
export async function wideAddresses(
  server: EngineServer,
  sideChannel: SideChannelAddress | undefined,
): Promise<string[]> {
  const url = `${server.url}/kv_event_sources`;
  const sources = await requestJson(url, { timeoutMs: 5000 }, eventSources, "a map").catch(
    () => ({}),
  );
  const found = Object.values(sources)
    .filter((source) => source.enable_kv_cache_events !== false)
    .flatMap(({ endpoint, replay_endpoint }) => [endpoint ?? "", replay_endpoint ?? ""])
    .filter((endpoint) => WIDE_HOST.test(/^tcp:\/\/(.*):\d+$/.exec(endpoint)?.[1] ?? ""))
    .map((endpoint) => `KV events listen on ${endpoint}`);
  if (sideChannel === undefined) return found;
  const { host, port } = sideChannel;
  if (WIDE_HOST.test(host)) found.push(`the side channel announces ${host}:${port}`);
  else if (isThisHost(host) && (await listensWide(port)))
    found.push(`the side channel listens on every address at port ${port}`);
  return found;
}

/** False where the kernel has no /proc/net. */
async function listensWide(port: number): Promise<boolean> {
  const tables = await Promise.all(
    ["tcp", "tcp6"].map((name) => readFile(`/proc/net/${name}`, "utf8").catch(() => "")),
  );
  const hexPort = port.toString(16).toUpperCase().padStart(4, "0");
  // Columns: number, local address, remote address, state; 0A is LISTEN.
  const wide = new RegExp(`^ *\\d+: 0+:${hexPort} [0-9A-F:]+ 0A `, "m");
  return tables.some((table) => wide.test(table));
}
