import type { Metrics } from "@kv/interface";
import {
  Counter,
  Gauge,
  Histogram,
  type MetricObjectWithValues,
  type MetricValue,
  Registry,
} from "prom-client";
import type { InstanceStatus } from "../instances/instance.js";
import type { PinnedStatus } from "../readback/kept-objects.js";
import type { InstancePool } from "../routing/instance-pool.js";
import type { SignalsStatus } from "./autoscaling-signals.js";

type Labels = Readonly<Record<string, string>>;

/** A metric with its samples, as `PrometheusMetrics.json` has it. */
export type MetricAsJson = MetricObjectWithValues<MetricValue<string>>;

/** Help texts of the metrics. */
const HELP: Readonly<Record<string, string>> = {
  kv_proxy_requests_total:
    "Requests of clients that have ended, by endpoint and outcome (a status or a KvError code)",
  kv_proxy_request_duration_seconds: "Duration of a request, to the last byte, by endpoint",
  kv_proxy_prefill_duration_seconds: "Duration of the prefill leg",
  kv_proxy_first_byte_seconds:
    "From the begin of the decode leg to the first byte of its answer, of streamed answers",
  kv_proxy_restarts_total: "Parts of requests that began again with the prefill leg",
  kv_proxy_refused_total: "Connections and requests that were refused at a limit, by limit",
  kv_proxy_released_total:
    "Blocks of prefill workers that were freed without being read, by outcome",
  kv_proxy_decode_alone_total: "Parts whose prompt a decode instance computed",
  kv_proxy_disaggregation_total: "Parts by the number of legs that a rule chose, and its reason",
  kv_proxy_prompt_tokens_total: "Tokens of the prompts that prefill instances answered",
  kv_proxy_cached_prompt_tokens_total:
    "Tokens of these prompts that the prefill instances had cached",
  kv_proxy_expected_cached_prompt_tokens_total:
    "Tokens of these prompts that the routing expected the prefill instances to have cached",
  kv_proxy_rendered_total: "Prompts whose token ids were needed for routing, by outcome",
  kv_proxy_readback_used_total:
    "Ended turns whose KV a prefill instance has read from its decode instance",
  kv_proxy_readback_tokens_total: "Tokens of these that the prefill instance did not compute",
  kv_proxy_readback_refused_total:
    "Turns that used no ended turn, or that are not kept for the next one, by reason",
  kv_proxy_readback_expired_total: "Ended turns that no further turn came for in time",
  kv_proxy_readback_released_total:
    "Ended turns that decode instances were asked to free, by outcome",
  kv_epp_pick_duration_seconds: "From the last byte of a request to the choice of its instances",
  kv_proxy_parts_total: "Parts that requests with several prompts or copies were split into",
};

const BUCKETS_SECONDS = [
  0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
];

/**
 * Counters whose labels are known are there from the start: without a first sample of 0,
 * `increase()` misses their first event.
 */
const FROM_THE_START: readonly (readonly [name: string, labels?: Labels])[] = [
  ["kv_proxy_restarts_total"],
  ["kv_proxy_decode_alone_total"],
  ["kv_proxy_parts_total"],
  ["kv_proxy_prompt_tokens_total"],
  ["kv_proxy_cached_prompt_tokens_total"],
  ["kv_proxy_expected_cached_prompt_tokens_total"],
  ...["rendered", "remembered", "unsupported", "failed"].map(
    (outcome) => ["kv_proxy_rendered_total", { outcome }] as const,
  ),
  ...["sent", "refused", "failed"].map(
    (outcome) => ["kv_proxy_released_total", { outcome }] as const,
  ),
  ["kv_proxy_readback_used_total"],
  ["kv_proxy_readback_tokens_total"],
  ["kv_proxy_readback_expired_total"],
  ...["sent", "refused", "failed"].map(
    (outcome) => ["kv_proxy_readback_released_total", { outcome }] as const,
  ),
];

/**
 * The state of the instances, by role and server. The label is not `instance`: Prometheus writes
 * its target there. Of several workers, loads and counts add up; the rest is as the worker has it
 * that sees the instance worst.
 */
const INSTANCE_METRICS: readonly (readonly [
  Metric: typeof Gauge | typeof Counter,
  name: string,
  help: string,
  value: (status: InstanceStatus) => number | undefined,
])[] = [
  [Gauge, "kv_proxy_instance_in_flight", "Legs at an instance", (status) => status.in_flight],
  [
    Gauge,
    "kv_proxy_instance_available",
    "1 while an instance takes requests",
    (status) => Number(status.available),
  ],
  [
    Counter,
    "kv_proxy_instance_requests_total",
    "Legs that went to an instance",
    (status) => status.requests,
  ],
  [
    Counter,
    "kv_proxy_instance_failures_total",
    "Legs that failed at an instance",
    (status) => status.failures,
  ],
  [
    Gauge,
    "kv_proxy_instance_pairs",
    "Instances of the other role that an instance fits",
    ({ pairing }) => (pairing === null ? undefined : pairing.partners),
  ],
  [
    Gauge,
    "kv_proxy_instance_cached_blocks",
    "Blocks of an instance's prefix cache that its KV events have announced",
    ({ kv_events: events }) => events?.blocks,
  ],
  [
    Gauge,
    "kv_proxy_instance_kv_events_complete",
    "1 while these are all blocks of the cache",
    ({ kv_events: events }) => (events === null ? undefined : Number(events.complete)),
  ],
];

/** Gauges of instances that are the sum over all workers. */
const SUMMED: ReadonlySet<string> = new Set(["kv_proxy_instance_in_flight"]);

/**
 * Metrics in a Prometheus registry of their own. The state of the instances is read at each scrape.
 */
export class PrometheusMetrics implements Metrics {
  readonly #registry = new Registry();
  readonly #counters = new Map<string, Counter>();
  readonly #histograms = new Map<string, Histogram>();
  /** Counters and histograms with their labels applied, by `seriesKey`. */
  readonly #counterSeries = new Map<string, Counter.Internal>();
  readonly #histogramSeries = new Map<string, Histogram.Internal<string>>();

  readonly #pools: readonly InstancePool[];
  /** The state of the instances at this scrape. */
  #instances: readonly LabelledStatus[] = [];

  constructor(pools: readonly InstancePool[]) {
    this.#pools = pools;
    const instances = () => this.#instances;
    for (const metric of INSTANCE_METRICS) addInstanceMetric(this.#registry, instances, metric);
    addUnpairedGauge(this.#registry, instances);
    for (const [name, labels] of FROM_THE_START) this.count(name, 0, labels);
  }

  /** Adds whether the discovery's last reading succeeded. */
  addDiscovery(discovery: { readonly isCurrent: boolean }): void {
    new Gauge({
      name: "kv_proxy_discovery_current",
      help: "1 while the last reading of the discovery succeeded; at 0, the instances are the last known ones",
      registers: [this.#registry],
      aggregator: "min",
      collect() {
        this.set(Number(discovery.isCurrent));
      },
    });
  }

  /** Adds what ended turns hold at decode instances, which is read at each scrape. */
  addPinned(read: () => readonly PinnedStatus[]): void {
    addPinnedGauges(this.#registry, read);
  }

  /** Adds the signals for autoscalers, which are read at each scrape. */
  addSignals(read: () => SignalsStatus): void {
    addSignalGauges(this.#registry, read);
  }

  /** The `content-type` of `text`. */
  get contentType(): string {
    return this.#registry.contentType;
  }

  /** All metrics in Prometheus' text format. */
  text(): Promise<string> {
    this.#readInstances();
    return this.#registry.metrics();
  }

  /** All metrics as JSON, for `WorkerMetrics`. */
  json(): Promise<MetricAsJson[]> {
    this.#readInstances();
    return this.#registry.getMetricsAsJSON();
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

  /** Reads the state once for all metrics: it costs more than a sample. */
  #readInstances(): void {
    this.#instances = this.#pools.flatMap((pool) =>
      pool.status().map((status) => ({ status, labels: labelsOf(pool, status) })),
    );
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
      histogram = new Histogram({ ...this.#options(name), labelNames, buckets: BUCKETS_SECONDS });
      this.#histograms.set(name, histogram);
    }
    return histogram;
  }

  #options(name: string) {
    return { name, help: HELP[name] ?? name, registers: [this.#registry] };
  }
}

/** Adds the signals for autoscalers to a registry; `read` is called at each scrape. */
export function addSignalGauges(registry: Registry, read: () => SignalsStatus): void {
  const gauge = (
    name: string,
    help: string,
    value: (signals: SignalsStatus) => number | null | undefined,
  ) =>
    new Gauge({
      name,
      help,
      registers: [registry],
      // Of workers they are read from what all workers have measured.
      aggregator: "omit",
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

/**
 * Adds what ended turns hold at decode instances to a registry; `read` is called at each scrape.
 */
export function addPinnedGauges(registry: Registry, read: () => readonly PinnedStatus[]): void {
  const gauge = (name: string, help: string, member: Exclude<keyof PinnedStatus, "server">) =>
    new Gauge({
      name,
      help,
      labelNames: ["server"],
      registers: [registry],
      // All workers have one store.
      aggregator: "omit",
      collect() {
        this.reset();
        for (const pinned of read()) this.set({ server: pinned.server }, pinned[member]);
      },
    });
  gauge("kv_proxy_readback_objects", "Ended turns that further turns can use", "objects");
  gauge(
    "kv_proxy_readback_pinned_blocks",
    "Blocks that a decode instance holds for them",
    "blocks",
  );
  gauge(
    "kv_proxy_readback_pinned_bytes",
    "Bytes of these, where lengths of blocks are known",
    "bytes",
  );
  gauge(
    "kv_proxy_readback_budget_blocks",
    "The most blocks that they may hold there",
    "budget_blocks",
  );
}

function addInstanceMetric(
  registry: Registry,
  instances: () => readonly LabelledStatus[],
  [Metric, name, help, value]: (typeof INSTANCE_METRICS)[number],
): void {
  const metric = new Metric({
    name,
    help,
    labelNames: ["role", "server", "rank"],
    registers: [registry],
    aggregator: SUMMED.has(name) || Metric === Counter ? "sum" : "min",
  });
  const own = metric.get.bind(metric);
  // The samples of a scrape go past the metric's own table, whose key for each sample is a text of
  // its labels.
  metric.get = async () => ({ ...(await own()), values: samplesOf(instances(), value) });
}

function samplesOf(
  instances: readonly LabelledStatus[],
  read: (status: InstanceStatus) => number | undefined,
): MetricValue<string>[] {
  const samples: MetricValue<string>[] = [];
  for (const { status, labels } of instances) {
    const value = read(status);
    if (value !== undefined) samples.push({ value, labels });
  }
  return samples;
}

/**
 * 1 for each factor that keeps an instance from a pair. Its values are in `/status`: as labels they
 * would make series without end.
 */
function addUnpairedGauge(registry: Registry, instances: () => readonly LabelledStatus[]): void {
  new Gauge({
    name: "kv_proxy_instance_unpaired",
    help: "1 while an instance fits no instance of the other role, by the factor that differs",
    labelNames: ["role", "server", "rank", "factor"],
    registers: [registry],
    aggregator: "max",
    collect() {
      this.reset();
      for (const { status, labels } of instances())
        if (status.pairing?.state === "unpaired")
          for (const { factor } of status.pairing.differences) this.set({ ...labels, factor }, 1);
    },
  });
}

interface LabelledStatus {
  readonly status: InstanceStatus;
  readonly labels: Record<string, string | number>;
}

function labelsOf({ role }: InstancePool, { url, data_parallel_rank: rank }: InstanceStatus) {
  const labels: Record<string, string | number> = { role, server: url };
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
