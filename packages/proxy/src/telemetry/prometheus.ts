import type { InstancePool, InstanceStatus } from "@kv/fleet";
import type { Metrics } from "@kv/interface";
import { Counter, Gauge, Histogram, Registry } from "prom-client";
import type { SignalsStatus } from "./autoscaling-signals.js";

/** Help texts of the metrics. */
const HELP: Readonly<Record<string, string>> = {
  kv_proxy_requests_total:
    "Requests of clients that have ended, by endpoint and outcome (a status or a KvError code)",
  kv_proxy_request_ms: "Duration of a request, to the last byte",
  kv_proxy_prefill_ms: "Duration of the prefill leg",
  kv_proxy_first_byte_ms: "From the begin of the decode leg to the first byte of its answer",
  kv_proxy_restarts_total: "Parts of requests that began again with the prefill leg",
  kv_proxy_refused_total: "Connections and requests that were refused at a limit, by limit",
  kv_proxy_released_total: "Blocks of prefill workers that were freed without being read, by outcome",
  kv_proxy_decode_alone_total: "Parts whose prompt a decode instance computed",
  kv_proxy_disaggregation_total: "Parts by the number of legs that a rule chose, and its reason",
  kv_proxy_prompt_tokens_total: "Tokens of the prompts that prefill instances answered",
  kv_proxy_cached_prompt_tokens_total: "Tokens of these prompts that the prefill instances had cached",
  kv_proxy_parts_total: "Parts that requests with several prompts or copies were split into",
};

const BUCKETS_MS = [1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000];

type Labels = Readonly<Record<string, string>>;

/** Metrics in a Prometheus registry of their own. The state of the instances is read at each scrape. */
export class PrometheusMetrics implements Metrics {
  readonly #registry = new Registry();
  readonly #counters = new Map<string, Counter>();
  readonly #histograms = new Map<string, Histogram>();
  /** Counters and histograms with their labels applied, by `seriesKey`. */
  readonly #counterSeries = new Map<string, Counter.Internal>();
  readonly #histogramSeries = new Map<string, Histogram.Internal<string>>();

  constructor(pools: readonly InstancePool[]) {
    const gauge = (name: string, help: string, value: (status: InstanceStatus) => number | undefined) =>
      addInstanceGauge(this.#registry, pools, name, help, value);
    gauge("kv_proxy_instance_in_flight", "Legs at an instance", (status) => status.in_flight);
    gauge("kv_proxy_instance_available", "1 while an instance takes requests", ({ available }) =>
      Number(available),
    );
    gauge("kv_proxy_instance_requests", "Legs that went to an instance", ({ requests }) => requests);
    gauge("kv_proxy_instance_pairs", "Instances of the other role that an instance fits", ({ pairing }) =>
      pairing === null ? undefined : pairing.partners,
    );
    addUnpairedGauge(this.#registry, pools);
    gauge("kv_proxy_instance_failures", "Legs that failed at an instance", ({ failures }) => failures);
  }

  /** Adds the signals for autoscalers, which are read at each scrape. */
  addSignals(read: () => SignalsStatus): void {
    const gauge = (
      name: string,
      help: string,
      value: (signals: SignalsStatus) => number | null | undefined,
    ) =>
      new Gauge({
        name,
        help,
        registers: [this.#registry],
        collect() {
          this.reset();
          const now = value(read());
          if (now != null) this.set(now);
          else this.remove();
        },
      });
    gauge(
      "kv_proxy_prefill_waiting",
      "Prefill legs behind another one at their instance",
      (signals) => signals.prefill_waiting,
    );
    gauge(
      "kv_proxy_kv_unread",
      "Parts whose KV is ready at a prefill instance and not read yet",
      (signals) => signals.kv_unread.count,
    );
    gauge(
      "kv_proxy_kv_unread_bytes",
      "Bytes of this KV, where lengths of blocks are known",
      (signals) => signals.kv_unread.bytes,
    );
    gauge(
      "kv_proxy_kv_unread_oldest_seconds",
      "Age of the oldest of it",
      (signals) => signals.kv_unread.oldest_ms / 1000,
    );
    gauge(
      "kv_proxy_decode_in_flight",
      "Requests in flight for each available decode instance",
      (signals) => signals.decode_in_flight,
    );
    gauge(
      "kv_proxy_prefix_hit_ratio",
      "Share of the prompts' tokens of the last five minutes that prefill instances had cached",
      (signals) => signals.prefix_hit_rate,
    );
    gauge(
      "kv_proxy_recommended_prefill_instances",
      "Prefill instances that the prompts of the last five minutes need",
      (signals) => signals.recommended?.prefill,
    );
  }

  /** The `content-type` of `text`. */
  get contentType(): string {
    return this.#registry.contentType;
  }

  /** All metrics in Prometheus' text format. */
  text(): Promise<string> {
    return this.#registry.metrics();
  }

  count(name: string, by = 1, labels: Labels = {}): void {
    const key = seriesKey(name, labels);
    let series = this.#counterSeries.get(key);
    if (series === undefined) {
      series = this.#counter(name, labels).labels(labels);
      this.#counterSeries.set(key, series);
    }
    series.inc(by);
  }

  observe(name: string, value: number, labels: Labels = {}): void {
    const key = seriesKey(name, labels);
    let series = this.#histogramSeries.get(key);
    if (series === undefined) {
      series = this.#histogram(name, labels).labels(labels);
      this.#histogramSeries.set(key, series);
    }
    series.observe(value);
  }

  #counter(name: string, labels: Labels): Counter {
    let counter = this.#counters.get(name);
    if (counter === undefined) {
      counter = new Counter({ ...this.#options(name), labelNames: Object.keys(labels) });
      this.#counters.set(name, counter);
    }
    return counter;
  }

  #histogram(name: string, labels: Labels): Histogram {
    let histogram = this.#histograms.get(name);
    if (histogram === undefined) {
      const labelNames = Object.keys(labels);
      histogram = new Histogram({ ...this.#options(name), labelNames, buckets: BUCKETS_MS });
      this.#histograms.set(name, histogram);
    }
    return histogram;
  }

  #options(name: string) {
    return { name, help: HELP[name] ?? name, registers: [this.#registry] };
  }
}

function addInstanceGauge(
  registry: Registry,
  pools: readonly InstancePool[],
  name: string,
  help: string,
  value: (status: InstanceStatus) => number | undefined,
): void {
  new Gauge({
    name,
    help,
    labelNames: ["role", "instance", "rank"],
    registers: [registry],
    collect() {
      this.reset();
      for (const pool of pools)
        for (const status of pool.status()) {
          const now = value(status);
          if (now !== undefined) this.set(labelsOf(pool, status), now);
        }
    },
  });
}

/** 1 for each factor that keeps an instance from a pair. Its values are in `/status`: as labels they would make series without end. */
function addUnpairedGauge(registry: Registry, pools: readonly InstancePool[]): void {
  new Gauge({
    name: "kv_proxy_instance_unpaired",
    help: "1 while an instance fits no instance of the other role, by the factor that differs",
    labelNames: ["role", "instance", "rank", "factor"],
    registers: [registry],
    collect() {
      this.reset();
      for (const pool of pools)
        for (const status of pool.status())
          if (status.pairing?.state === "unpaired")
            for (const { factor } of status.pairing.differences)
              this.set({ ...labelsOf(pool, status), factor }, 1);
    },
  });
}

function labelsOf({ role }: InstancePool, { url, data_parallel_rank: rank }: InstanceStatus) {
  const labels: Record<string, string | number> = { role, instance: url };
  if (rank !== null) labels.rank = rank;
  return labels;
}

/** The metric's name and the values of its labels. */
function seriesKey(name: string, labels: Labels): string {
  let key = name;
  for (const label in labels) key += `\n${labels[label]}`;
  return key;
}

/** Metrics that go to both. */
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
