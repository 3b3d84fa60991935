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

const OUTCOMES = ["sent", "refused", "failed"];
/**
 * Counters whose labels are known are there from the start: without a first sample of 0,
 * `increase()` misses their first event. By name, their outcomes.
 */
const FROM_THE_START: Readonly<Record<string, readonly string[] | undefined>> = {
  kv_proxy_restarts_total: undefined,
  kv_proxy_decode_alone_total: undefined,
  kv_proxy_parts_total: undefined,
  kv_proxy_prompt_tokens_total: undefined,
  kv_proxy_cached_prompt_tokens_total: undefined,
  kv_proxy_expected_cached_prompt_tokens_total: undefined,
  kv_proxy_rendered_total: ["rendered", "remembered", "unsupported", "failed"],
  kv_proxy_released_total: OUTCOMES,
  kv_proxy_readback_used_total: undefined,
  kv_proxy_readback_tokens_total: undefined,
  kv_proxy_readback_expired_total: undefined,
  kv_proxy_readback_released_total: OUTCOMES,
};

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

/** The signals for autoscalers. */
const SIGNALS: readonly (readonly [
  name: string,
  help: string,
  value: (signals: SignalsStatus) => number | null | undefined,
])[] = [
  [
    "kv_proxy_prefill_waiting",
    "Prefill legs behind another one at their instance",
    (signals) => signals.prefill_waiting,
  ],
  [
    "kv_proxy_kv_unread",
    "Parts whose KV is ready at a prefill instance and not read yet",
    (signals) => signals.kv_unread.count,
  ],
  [
    "kv_proxy_kv_unread_bytes",
    "Bytes of this KV, where lengths of blocks are known",
    (signals) => signals.kv_unread.bytes,
  ],
  [
    "kv_proxy_kv_unread_oldest_seconds",
    "Age of the oldest of it",
    (signals) => signals.kv_unread.oldest_ms / 1000,
  ],
  [
    "kv_proxy_decode_in_flight",
    "Requests in flight for each available decode instance",
    (signals) => signals.decode_in_flight,
  ],
  [
    "kv_proxy_prefix_hit_ratio",
    "Share of the prompts' tokens of the last five minutes that prefill instances had cached",
    (signals) => signals.prefix_hit_rate,
  ],
  [
    "kv_proxy_recommended_prefill_instances",
    "Prefill instances that the prompts of the last five minutes need",
    (signals) => signals.recommended?.prefill,
  ],
];

/** What ended turns hold at a decode instance. */
const PINNED: readonly (readonly [
  name: string,
  help: string,
  member: Exclude<keyof PinnedStatus, "server">,
])[] = [
  ["kv_proxy_readback_objects", "Ended turns that further turns can use", "objects"],
  ["kv_proxy_readback_pinned_blocks", "Blocks that a decode instance holds for them", "blocks"],
  ["kv_proxy_readback_pinned_bytes", "Bytes of these, where lengths of blocks are known", "bytes"],
  ["kv_proxy_readback_budget_blocks", "The most blocks that they may hold there", "budget_blocks"],
];

type CreateMetric<S> = (options: {
  readonly name: string;
  readonly help: string;
  readonly labelNames: string[];
}) => { labels(labels: Labels): S };

/** Metrics of one kind, which are created with their first sample, and their series. */
class Series<S> {
  readonly #metrics = new Map<string, { labels(labels: Labels): S }>();
  readonly #series = new Map<string, S>();
  readonly #create: CreateMetric<S>;

  constructor(create: CreateMetric<S>) {
    this.#create = create;
  }

  of(name: string, labels: Labels): S {
    let key = name;
    for (const label in labels) key += `\n${labels[label]}`;
    let series = this.#series.get(key);
    if (series === undefined) {
      const labelNames = Object.keys(labels);
      const metric =
        this.#metrics.get(name) ?? this.#create({ name, help: HELP[name] ?? name, labelNames });
      this.#metrics.set(name, metric);
      series = metric.labels(labels);
      this.#series.set(key, series);
    }
    return series;
  }
}

/**
 * Metrics in a Prometheus registry of their own. The state of the instances is read at each scrape.
 */
export class PrometheusMetrics implements Metrics {
  readonly #registry = new Registry();
  readonly #counters = new Series(
    (options) => new Counter({ ...options, registers: [this.#registry] }),
  );
  readonly #histograms = new Series(
    (options) =>
      new Histogram({ ...options, buckets: BUCKETS_SECONDS, registers: [this.#registry] }),
  );
  readonly #pools: readonly InstancePool[];
  #instances: readonly LabelledStatus[] = [];

  constructor(pools: readonly InstancePool[]) {
    this.#pools = pools;
    for (const metric of INSTANCE_METRICS) this.#addInstanceMetric(metric);
    // The values that differ are in `/status`: as labels they would make series without end.
    addGauge(this.#registry, {
      name: "kv_proxy_instance_unpaired",
      help: "1 while an instance fits no instance of the other role, by the factor that differs",
      labelNames: ["role", "server", "rank", "factor"],
      aggregator: "max",
      read: () =>
        this.#instances.flatMap(({ status: { pairing }, labels }) =>
          pairing?.state === "unpaired"
            ? pairing.differences.map(({ factor }) => [1, { ...labels, factor }] as const)
            : [],
        ),
    });
    for (const [name, outcomes] of Object.entries(FROM_THE_START)) {
      if (outcomes === undefined) this.count(name, 0);
      else for (const outcome of outcomes) this.count(name, 0, { outcome });
    }
  }

  addDiscovery(discovery: { readonly isCurrent: boolean }): void {
    addGauge(this.#registry, {
      name: "kv_proxy_discovery_current",
      help: "1 while the last reading of the discovery succeeded; at 0, the instances are the last known ones",
      aggregator: "min",
      read: () => [[Number(discovery.isCurrent)]],
    });
  }

  addPinned(read: () => readonly PinnedStatus[]): void {
    addPinnedGauges(this.#registry, read);
  }

  addSignals(read: () => SignalsStatus): void {
    addSignalGauges(this.#registry, read);
  }

  get contentType(): string {
    return this.#registry.contentType;
  }

  text(): Promise<string> {
    this.#readInstances();
    return this.#registry.metrics();
  }

  json(): Promise<MetricAsJson[]> {
    this.#readInstances();
    return this.#registry.getMetricsAsJSON();
  }

  count(name: string, by = 1, labels: Labels = {}): void {
    this.#counters.of(name, labels).inc(by);
  }

  observe(name: string, value: number, labels: Labels = {}): void {
    this.#histograms.of(name, labels).observe(value);
  }

  #readInstances(): void {
    this.#instances = this.#pools.flatMap((pool) =>
      pool.status().map((status) => {
        const labels: LabelledStatus["labels"] = { role: pool.role, server: status.url };
        if (status.data_parallel_rank !== null) labels.rank = status.data_parallel_rank;
        return { status, labels };
      }),
    );
  }

  #addInstanceMetric([Metric, name, help, read]: (typeof INSTANCE_METRICS)[number]): void {
    const metric = new Metric({
      name,
      help,
      labelNames: ["role", "server", "rank"],
      registers: [this.#registry],
      aggregator: Metric === Counter || name === "kv_proxy_instance_in_flight" ? "sum" : "min",
    });
    const own = metric.get.bind(metric);
    // The samples of a scrape go past the metric's own table, whose key for each sample is a text
    // of its labels.
    metric.get = async () => {
      const values = this.#instances.flatMap(({ status, labels }) => {
        const value = read(status);
        return value === undefined ? [] : [{ value, labels }];
      });
      return { ...(await own()), values };
    };
  }
}

/** Adds the signals for autoscalers to a registry; `read` is called at each scrape. */
export function addSignalGauges(registry: Registry, read: () => SignalsStatus): void {
  for (const [name, help, signalOf] of SIGNALS)
    addGauge(registry, {
      name,
      help,
      // Of workers they are read from what all workers have measured.
      aggregator: "omit",
      read() {
        const value = signalOf(read());
        return value == null ? [] : [[value]];
      },
    });
}

/**
 * Adds what ended turns hold at decode instances to a registry; `read` is called at each scrape.
 */
export function addPinnedGauges(registry: Registry, read: () => readonly PinnedStatus[]): void {
  for (const [name, help, member] of PINNED)
    addGauge(registry, {
      name,
      help,
      labelNames: ["server"],
      // All workers have one store.
      aggregator: "omit",
      read: () => read().map((pinned) => [pinned[member], { server: pinned.server }]),
    });
}

interface LabelledStatus {
  readonly status: InstanceStatus;
  readonly labels: Record<string, string | number>;
}

/** Adds a gauge whose samples are read at each scrape. */
function addGauge(
  registry: Registry,
  {
    read,
    ...options
  }: {
    readonly name: string;
    readonly help: string;
    readonly labelNames?: string[];
    readonly aggregator: "min" | "max" | "omit";
    readonly read: () => readonly (readonly [value: number, labels?: LabelledStatus["labels"]])[];
  },
): void {
  new Gauge({
    ...options,
    registers: [registry],
    collect() {
      this.reset();
      // `reset` gives a gauge without labels the value 0.
      this.remove({});
      for (const [value, labels = {}] of read()) this.set(labels, value);
    },
  });
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
