import { METRICS } from "@kv/connector";
import type { EngineServer } from "../http/engine-server.js";
import type { MetricSamples } from "../http/prometheus-text.js";

const bySource = (source: string) => [`${METRICS.promptTokensBySource}_total`, { source }] as const;

/**
 * The samples that are read, by vLLM's names (0.31 to 0.33). Only the engine that posts a transfer
 * counts it: a D that READs, or a P that WRITEs.
 */
const SAMPLES = {
  transfers: [`${METRICS.bytesTransferred}_count`],
  bytes: [`${METRICS.bytesTransferred}_sum`],
  transferSeconds: [`${METRICS.transferSeconds}_sum`],
  postSeconds: [`${METRICS.postSeconds}_sum`],
  descriptors: [`${METRICS.descriptors}_sum`],
  failedTransfers: [`${METRICS.failedTransfers}_total`],
  expiredRequests: [`${METRICS.expiredRequests}_total`],
  notificationsAfterExpiry: [`${METRICS.notificationsAfterExpiry}_total`],
  computedTokens: bySource("local_compute"),
  cachedTokens: bySource("local_cache_hit"),
  // vLLM counts these when it plans to load them; where the load then fails, they are computed and
  // stay counted here.
  externalTokens: bySource("external_kv_transfer"),
} as const satisfies Readonly<Record<string, readonly [string, Readonly<Record<string, string>>?]>>;

/** What engines have counted. Times are in seconds. What a page does not have is 0. */
export type EngineCounters = Readonly<Record<keyof typeof SAMPLES, number>>;

export function promptTokens({
  computedTokens,
  cachedTokens,
  externalTokens,
}: EngineCounters): number {
  return computedTokens + cachedTokens + externalTokens;
}

/** Whether the engine has a NixlConnector: vLLM publishes its counters from the start. */
export function hasNixlConnector(samples: MetricSamples): boolean {
  return samples.sum(`${METRICS.failedTransfers}_total`) !== undefined;
}

/**
 * What servers of one role have counted together.
 *
 * @throws `KV_PROXY_UPSTREAM_FAILED` when one has no /metrics.
 */
export async function readCounters(servers: readonly EngineServer[]): Promise<EngineCounters> {
  const all = await Promise.all(servers.map((server) => server.metrics()));
  return counters((name) => {
    const [sample, labels] = SAMPLES[name];
    return all.reduce((sum, samples) => sum + (samples.sum(sample, labels) ?? 0), 0);
  });
}

export function growth(before: EngineCounters, after: EngineCounters): EngineCounters {
  return counters((name) => after[name] - before[name]);
}

function counters(of: (name: keyof EngineCounters) => number): EngineCounters {
  const names = Object.keys(SAMPLES) as (keyof EngineCounters)[];
  return Object.fromEntries(names.map((name) => [name, of(name)])) as EngineCounters;
}
