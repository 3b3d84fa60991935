import { readFile } from "node:fs/promises";
import { METRICS } from "@kv/connector";
import type { AgentMetadata } from "@kv/protocol";
import { z } from "zod";
import { isThisHost } from "../doctor/target.js";
import type { EngineServer } from "../http/engine-server.js";
import { requestJson } from "../http/http-request.js";
import type { MetricSamples } from "../http/prometheus-text.js";
import { unfinishedRequests } from "../load/block-leaks.js";
import type { Finding, FindingKind } from "./findings.js";

const COUNTERS: readonly (readonly [FindingKind, string])[] = [
  ["notifications-after-expiry", `${METRICS.notificationsAfterExpiry}_total`],
  ["expired-requests", `${METRICS.expiredRequests}_total`],
  ["failed-transfers", `${METRICS.failedTransfers}_total`],
];
/**
 * Blocks of a request whose D never comes are freed when its lease ends: 30 s by default, and what
 * a busy engine needs to notice.
 */
const HELD_TOO_LONG_MS = 90_000;

/** The counters of one server between two rounds. */
export class ServerCounters {
  readonly #url: string;
  readonly #before = new Map<string, number>();
  #heldSinceMs: number | undefined;

  constructor(url: string) {
    this.#url = url;
  }

  /**
   * What has changed since the last call. A counter that is lower than before belongs to a server
   * that was restarted, and counts from there.
   */
  compare(samples: MetricSamples, nowMs: number): Finding[] {
    const findings: Finding[] = [];
    for (const [kind, name] of COUNTERS) {
      const value = samples.sum(name);
      if (value === undefined) continue;
      const before = this.#before.get(name);
      this.#before.set(name, value);
      if (before === undefined || value <= before) continue;
      findings.push({
        kind,
        server: this.#url,
        found: `${name} grew by ${value - before} to ${value}`,
      });
    }
    const used = samples.sum("vllm:kv_cache_usage_perc") ?? 0;
    if (used === 0 || unfinishedRequests(samples) > 0) this.#heldSinceMs = undefined;
    else this.#heldSinceMs ??= nowMs;
    const heldMs = nowMs - (this.#heldSinceMs ?? nowMs);
    if (heldMs >= HELD_TOO_LONG_MS) {
      const found = `${(100 * used).toFixed(1)} % of the blocks are in use for ${Math.round(heldMs / 1000)} s without a request`;
      findings.push({ kind: "blocks-stay-allocated", server: this.#url, found });
    }
    return findings;
  }
}

/** Regions of one cache at the same address. */
export function sharedAddresses(server: string, metadata: AgentMetadata): Finding[] {
  const byAddress = new Map<number, number>();
  for (const [region, address] of metadata.baseAddresses.entries()) {
    const other = byAddress.get(address);
    if (other === undefined) {
      byAddress.set(address, region);
      continue;
    }
    const name = (index: number) => metadata.regionNames?.[index] ?? `region ${index}`;
    const found = `${name(other)} and ${name(region)} are both at address ${address}`;
    return [{ kind: "shared-base-address", server, found }];
  }
  return [];
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
 * Ports that listen on every address: KV event sockets by `GET /kv_event_sources` (vLLM 0.33), a
 * side channel by the host that P announces, and on this host by the kernel's table of sockets.
 */
export async function wideAddresses(
  server: EngineServer,
  sideChannel: { readonly host: string; readonly port: number } | undefined,
): Promise<Finding[]> {
  const finding = (found: string): Finding => ({ kind: "wide-address", server: server.url, found });
  const findings: Finding[] = [];
  const answer = await requestJson(`${server.url}/kv_event_sources`, { timeoutMs: 5000 }).catch(
    () => ({}),
  );
  for (const source of Object.values(eventSources.safeParse(answer).data ?? {})) {
    if (source.enable_kv_cache_events === false) continue;
    for (const endpoint of [source.endpoint, source.replay_endpoint]) {
      const [, host] = /^tcp:\/\/(.*):\d+$/.exec(endpoint ?? "") ?? [];
      if (host !== undefined && WIDE_HOST.test(host))
        findings.push(finding(`KV events listen on ${endpoint}`));
    }
  }
  if (sideChannel === undefined) return findings;
  const { host, port } = sideChannel;
  if (WIDE_HOST.test(host)) findings.push(finding(`the side channel announces ${host}:${port}`));
  else if (isThisHost(host) && (await listensWide(port)))
    findings.push(finding(`the side channel listens on every address at port ${port}`));
  return findings;
}

/**
 * Whether a socket of this host listens on 0.0.0.0 or :: at the port; false where the kernel has no
 * /proc/net.
 */
async function listensWide(port: number): Promise<boolean> {
  const tables = await Promise.all(
    ["tcp", "tcp6"].map((name) => readFile(`/proc/net/${name}`, "utf8").catch(() => "")),
  );
  const hexPort = port.toString(16).toUpperCase().padStart(4, "0");
  // Columns: number, local address, remote address, state; 0A is LISTEN.
  const wide = new RegExp(`^ *\\d+: 0+:${hexPort} [0-9A-F:]+ 0A `, "m");
  return tables.some((table) => wide.test(table));
}
