import type { Metrics } from "@kv/interface";
import { Counter, Gauge, Histogram, Registry } from "prom-client";
import type { InstancePool } from "./instances.js";

/** What each metric says; one that is not named here is a defect and throws in tests. */
const HELP: Readonly<Record<string, string>> = {
  kv_proxy_requests_total:
    "Requests of clients that have ended, by endpoint and outcome (a status or a KvError code)",
  kv_proxy_request_ms: "Duration of a request, to the last byte",
  kv_proxy_prefill_ms: "Duration of the prefill leg",
  kv_proxy_first_byte_ms: "From the decode leg's begin to the first byte of its answer",
  kv_proxy_restarts_total: "Parts of requests that began again at prefill",
  kv_proxy_released_total: "Blocks of prefill workers that were freed as nobody would read them, by outcome",
  kv_proxy_decode_alone_total: "Parts that a decode instance computed from the prompt on",
  kv_proxy_parts_total: "Parts that requests with several prompts or copies were split into",
};

const BUCKETS_MS = [1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000];

export interface Prometheus {
  readonly metrics: Metrics;
  readonly contentType: string;
  text(): Promise<string>;
}

/** A registry of its own, also fed with the state of the instances at each scrape. */
export function createPrometheus(pools: () => readonly InstancePool[]): Prometheus {
  const registry = new Registry();
  const counters = new Map<string, Counter>();
  const counts = new Map<string, Counter.Internal>();
  const histograms = new Map<string, Histogram>();
  const observations = new Map<string, Histogram.Internal<string>>();
  const help = (name: string) => HELP[name] ?? name;
  const labelNames = ["role", "instance", "rank"];
  const each = (set: Gauge, value: (status: ReturnType<InstancePool["status"]>[number]) => number) => {
    set.reset();
    for (const { role, status: all } of pools())
      for (const status of all()) {
        const { url: instance, data_parallel_rank: rank } = status;
        set.set({ role, instance, ...(rank === null ? {} : { rank }) }, value(status));
      }
  };
  const gauge = (name: string, what: string, value: Parameters<typeof each>[1]) =>
    new Gauge({
      name,
      help: what,
      labelNames,
      registers: [registry],
      collect() {
        each(this, value);
      },
    });
  gauge("kv_proxy_instance_in_flight", "Legs at an instance", ({ in_flight: legs }) => legs);
  gauge("kv_proxy_instance_available", "1 while an instance takes requests", ({ available }) =>
    Number(available),
  );
  gauge("kv_proxy_instance_requests", "Legs that went to an instance", ({ requests }) => requests);
  gauge("kv_proxy_instance_failures", "Legs that failed at an instance", ({ failures }) => failures);

  return {
    metrics: {
      count(name, by = 1, labels = {}) {
        const key = keyOf(name, labels);
        const known = counts.get(key);
        if (known !== undefined) {
          known.inc(by);
          return;
        }
        let counter = counters.get(name);
        if (counter === undefined) {
          counter = new Counter({
            name,
            help: help(name),
            labelNames: Object.keys(labels),
            registers: [registry],
          });
          counters.set(name, counter);
        }
        const child = counter.labels(labels);
        counts.set(key, child);
        child.inc(by);
      },
      observe(name, value, labels = {}) {
        const key = keyOf(name, labels);
        const known = observations.get(key);
        if (known !== undefined) {
          known.observe(value);
          return;
        }
        let histogram = histograms.get(name);
        if (histogram === undefined) {
          const names = Object.keys(labels);
          histogram = new Histogram({
            name,
            help: help(name),
            labelNames: names,
            buckets: BUCKETS_MS,
            registers: [registry],
          });
          histograms.set(name, histogram);
        }
        const child = histogram.labels(labels);
        observations.set(key, child);
        child.observe(value);
      },
    },
    contentType: registry.contentType,
    text: () => registry.metrics(),
  };
}

/** One word for a metric and its labels' values. */
function keyOf(name: string, labels: Readonly<Record<string, string>>): string {
  let key = name;
  for (const label in labels) key += `\n${labels[label]}`;
  return key;
}

/** Tells both. */
export function bothMetrics(first: Metrics, second: Metrics): Metrics {
  return {
    count(name, by, labels) {
      first.count(name, by, labels);
      second.count(name, by, labels);
    },
    observe(name, value, labels) {
      first.observe(name, value, labels);
      second.observe(name, value, labels);
    },
  };
}
