import { statusOf } from "@kv/http";
import type { Ambient, KvError, LogFields, Metrics } from "@kv/interface";
import {
  AggregatorRegistry,
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
import TABLE from "./metrics.json" with { type: "json" };

type Labels = Readonly<Record<string, string>>;

/** A metric with its samples, as in `PrometheusMetrics.json`. */
export type MetricAsJson = MetricObjectWithValues<MetricValue<string>>;

interface MetricFacts {
  readonly help: string;
  /** It starts at 0. Else `increase()` misses the first event. */
  readonly starts?: true;
  /** It starts at 0 for each of these outcomes. */
  readonly outcomes?: readonly string[];
  /**
   * How workers' values are combined: loads and counts add up, other values come from the worker
   * that sees the worst state. A value that is read and has none is left out.
   */
  readonly aggregator?: "sum" | "min" | "max";
}

const FACTS = TABLE as Readonly<Record<string, MetricFacts>>;

const BUCKETS_SECONDS = [
  0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
];

/** Values that are read at each scrape. */
type Readers<S> = Readonly<Record<string, (source: S) => number | null | undefined>>;

/** By role and server; Prometheus writes its target to `instance`. */
const OF_INSTANCE: Readers<InstanceStatus> = {
  kv_proxy_instance_in_flight: (status) => status.in_flight,
  kv_proxy_instance_available: (status) => Number(status.available),
  kv_proxy_instance_requests_total: (status) => status.requests,
  kv_proxy_instance_failures_total: (status) => status.failures,
  kv_proxy_instance_ejections_total: (status) => status.ejections,
  kv_proxy_instance_pairs: ({ pairing }) => pairing?.partners,
  kv_proxy_instance_cached_blocks: ({ kv_events: events }) => events?.blocks,
  kv_proxy_instance_kv_events_complete: ({ kv_events: events }) =>
    events && Number(events.complete),
};
/** `/status` has the values. As labels they would make endless series. */
const UNPAIRED: Readers<InstanceStatus> = { kv_proxy_instance_unpaired: () => 1 };

const OF_DISCOVERY: Readers<{ readonly isCurrent: boolean }> = {
  kv_proxy_discovery_current: ({ isCurrent }) => Number(isCurrent),
};

/** Computed from all workers' measurements. */
const OF_SIGNALS: Readers<SignalsStatus> = {
  kv_proxy_prefill_waiting: (signals) => signals.prefill_waiting,
  kv_proxy_kv_unread: (signals) => signals.kv_unread.count,
  kv_proxy_kv_unread_bytes: (signals) => signals.kv_unread.bytes,
  kv_proxy_kv_unread_oldest_seconds: (signals) => signals.kv_unread.oldest_ms / 1000,
  kv_proxy_decode_in_flight: (signals) => signals.decode_in_flight,
  kv_proxy_prefix_hit_ratio: (signals) => signals.prefix_hit_rate,
  kv_proxy_recommended_prefill_instances: (signals) => signals.recommended?.prefill,
};

/** All workers share one store. */
const OF_PINNED: Readers<PinnedStatus> = {
  kv_proxy_readback_objects: (pinned) => pinned.objects,
  kv_proxy_readback_pinned_blocks: (pinned) => pinned.blocks,
  kv_proxy_readback_pinned_bytes: (pinned) => pinned.bytes,
  kv_proxy_readback_budget_blocks: (pinned) => pinned.budget_blocks,
};

/** A Prometheus registry that reads the instances' state at each scrape. */
export class PrometheusMetrics implements Metrics {
  readonly #registry = new Registry();
  #instances: readonly Reading<InstanceStatus>[] = [];

  constructor(private readonly pools: readonly InstancePool[]) {
    const labels = ["role", "server", "rank"];
    addRead(this.#registry, OF_INSTANCE, () => this.#instances, labels);
    const unpaired = () =>
      this.#instances.flatMap(([status, own]) =>
        status.pairing?.state === "unpaired"
          ? status.pairing.differences.map(({ factor }) => [status, { ...own, factor }] as const)
          : [],
      );
    addRead(this.#registry, UNPAIRED, unpaired, [...labels, "factor"]);
    for (const [name, { starts, outcomes = [] }] of Object.entries(FACTS)) {
      if (starts === true) this.count(name, 0);
      for (const outcome of outcomes) this.count(name, 0, { outcome });
    }
  }

  addDiscovery(discovery: { readonly isCurrent: boolean }): void {
    addRead(this.#registry, OF_DISCOVERY, () => [[discovery]]);
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
    const known = this.#registry.getSingleMetric(name) as Counter | undefined;
    const counter = known ?? new Counter(this.#optionsOf(name, labels));
    counter.inc(labels, by);
  }

  observe(name: string, value: number, labels: Labels = {}): void {
    const known = this.#registry.getSingleMetric(name) as Histogram | undefined;
    const histogram =
      known ?? new Histogram({ ...this.#optionsOf(name, labels), buckets: BUCKETS_SECONDS });
    histogram.observe(labels, value);
  }

  #optionsOf(name: string, labels: Labels) {
    const labelNames = Object.keys(labels);
    return { name, help: FACTS[name]?.help ?? name, labelNames, registers: [this.#registry] };
  }

  #readInstances(): void {
    this.#instances = this.pools.flatMap((pool) =>
      pool.status().map((status) => {
        const labels: Record<string, string | number> = { role: pool.role, server: status.url };
        if (status.data_parallel_rank !== null) labels.rank = status.data_parallel_rank;
        return [status, labels] as const;
      }),
    );
  }
}

function addSignalGauges(registry: Registry, read: () => SignalsStatus): void {
  addRead(registry, OF_SIGNALS, () => [[read()]]);
}

function addPinnedGauges(registry: Registry, read: () => readonly PinnedStatus[]): void {
  const readings = () => read().map((pinned) => [pinned, { server: pinned.server }] as const);
  addRead(registry, OF_PINNED, readings, ["server"]);
}

type Reading<S> = readonly [source: S, labels?: Readonly<Record<string, string | number>>];

/** A metric's own table would build a text key per sample. */
function addRead<S>(
  registry: Registry,
  readers: Readers<S>,
  read: () => readonly Reading<S>[],
  labelNames: string[] = [],
): void {
  for (const [name, numberOf] of Object.entries(readers)) {
    const { help = name, aggregator = "omit" } = FACTS[name] ?? {};
    const Metric = name.endsWith("_total") ? Counter : Gauge;
    const metric = new Metric({ name, help, labelNames, aggregator, registers: [registry] });
    const own = metric.get.bind(metric);
    metric.get = async () => {
      const values = read().flatMap(([source, labels = {}]) => {
        const value = numberOf(source);
        return value == null ? [] : [{ value, labels }];
      });
      return { ...(await own()), values };
    };
  }
}

/** A client's request that has ended. */
export interface EndedRequest {
  /** As metrics name it. */
  readonly endpoint: string;
  /** Of the answer. */
  readonly status: number;
  readonly failure: KvError | undefined;
  readonly durationMs: number;
  /** Of its log line. */
  readonly fields: LogFields;
}

/** Counts, measures and logs the end of a request. Returns its outcome. */
export function reportEnd(
  { metrics, log }: Pick<Ambient, "metrics" | "log">,
  { endpoint, status, failure, durationMs, fields }: EndedRequest,
): string {
  const outcome = failure?.code ?? statusName(status);
  metrics.count("kv_proxy_requests_total", 1, { endpoint, outcome });
  metrics.observe("kv_proxy_request_duration_seconds", durationMs / 1000, { endpoint });
  if (failure === undefined) {
    log.info("request-done", fields);
    return outcome;
  }
  countRefusal(metrics, failure);
  const { code, message, details } = failure;
  // A message about a client's error may repeat a value of its body.
  const shown = code === "KV_REQUEST_INVALID" ? { code, param: details.param } : { code, message };
  if (statusOf(failure) >= 500) log.warn("request-failed", { ...fields, ...shown });
  else if (code === "KV_REQUEST_ABORTED") log.info("request-aborted", { ...fields, ...shown });
  else log.info("request-refused", { ...fields, ...shown });
  return outcome;
}

/** Counts an error that a limit caused. */
export function countRefusal(metrics: Metrics, { details: { limit } }: KvError): void {
  if (typeof limit === "string") metrics.count("kv_proxy_refused_total", 1, { limit });
}

/** Statuses counted one by one. Instances could answer with hundreds of others. */
const COUNTED_STATUSES: ReadonlySet<number> = new Set([
  200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499, 500, 501, 502, 503, 504,
]);

/** A status as counts name it. */
export function statusName(status: number): string {
  return COUNTED_STATUSES.has(status) ? String(status) : `${Math.floor(status / 100)}xx`;
}

/** Counts and observes in both. */
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

const COUNTED: ReadonlySet<string> = new Set(["counter", "histogram"]);

/** Combines worker processes' metrics. The counts of ended workers stay. */
export class WorkerMetrics {
  readonly #last = new Map<number, readonly MetricAsJson[]>();
  readonly #ended: (readonly MetricAsJson[])[] = [];

  reported(worker: number, metrics: readonly MetricAsJson[]): void {
    this.#last.set(worker, metrics);
  }

  /** Keeps the last counts, so that no sum falls. */
  async ended(worker: number): Promise<void> {
    const last = this.#last.get(worker);
    if (!this.#last.delete(worker) || last === undefined) return;
    this.#ended.push(last.filter(({ type }) => COUNTED.has(String(type))));
    const parts = [...this.#ended];
    const sum = await aggregate(parts).getMetricsAsJSON();
    this.#ended.splice(0, parts.length, sum);
  }

  /** `signals` cover all workers. `pinned`: what ended turns hold. */
  text(signals: SignalsStatus, pinned?: readonly PinnedStatus[]): Promise<string> {
    const registry = aggregate([...this.#last.values(), ...this.#ended]);
    addSignalGauges(registry, () => signals);
    if (pinned !== undefined) addPinnedGauges(registry, () => pinned);
    return registry.metrics();
  }

  get contentType(): string {
    return Registry.PROMETHEUS_CONTENT_TYPE;
  }
}

function aggregate(parts: readonly (readonly MetricAsJson[])[]): Registry {
  return AggregatorRegistry.aggregate(parts.map((part) => [...part]));
}
