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

type Labels = Readonly<Record<string, string>>;

/** A metric with its samples, as in `PrometheusMetrics.json`. */
export type MetricAsJson = MetricObjectWithValues<MetricValue<string>>;

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
/** Counters that start at 0, with their outcomes. Else `increase()` misses the first event. */
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

/** A value that is read at each scrape. Workers' values are left out unless they aggregate. */
type ReadMetric<S> = readonly [
  name: string,
  help: string,
  numberOf: (source: S) => number | null | undefined,
  aggregator?: "sum" | "min" | "max",
  Metric?: typeof Counter,
];

/**
 * By role and server; Prometheus writes its target to `instance`. Workers' loads and counts add up.
 * Other values come from the worker that sees the worst state.
 */
const INSTANCE_METRICS: readonly ReadMetric<InstanceStatus>[] = [
  ["kv_proxy_instance_in_flight", "Legs at an instance", (status) => status.in_flight, "sum"],
  [
    "kv_proxy_instance_available",
    "1 while an instance takes requests",
    (status) => Number(status.available),
    "min",
  ],
  [
    "kv_proxy_instance_requests_total",
    "Legs that went to an instance",
    (status) => status.requests,
    "sum",
    Counter,
  ],
  [
    "kv_proxy_instance_failures_total",
    "Legs that failed at an instance",
    (status) => status.failures,
    "sum",
    Counter,
  ],
  [
    "kv_proxy_instance_ejections_total",
    "Ejections of an instance, by failed checks or failed requests in a row",
    (status) => status.ejections,
    "sum",
    Counter,
  ],
  [
    "kv_proxy_instance_pairs",
    "Instances of the other role that an instance fits",
    ({ pairing }) => pairing?.partners,
    "min",
  ],
  [
    "kv_proxy_instance_cached_blocks",
    "Blocks of an instance's prefix cache that its KV events have announced",
    ({ kv_events: events }) => events?.blocks,
    "min",
  ],
  [
    "kv_proxy_instance_kv_events_complete",
    "1 while these are all blocks of the cache",
    ({ kv_events: events }) => events && Number(events.complete),
    "min",
  ],
];
/** `/status` has the values. As labels they would make endless series. */
const UNPAIRED: ReadMetric<InstanceStatus> = [
  "kv_proxy_instance_unpaired",
  "1 while an instance fits no instance of the other role, by the factor that differs",
  () => 1,
  "max",
];

const DISCOVERY: ReadMetric<{ readonly isCurrent: boolean }> = [
  "kv_proxy_discovery_current",
  "1 while the last reading of the discovery succeeded; at 0, the instances are the last known ones",
  ({ isCurrent }) => Number(isCurrent),
  "min",
];

/** Computed from all workers' measurements. */
const SIGNALS: readonly ReadMetric<SignalsStatus>[] = [
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

/** All workers share one store. */
const PINNED: readonly ReadMetric<PinnedStatus>[] = [
  [
    "kv_proxy_readback_objects",
    "Ended turns that further turns can use",
    (pinned) => pinned.objects,
  ],
  [
    "kv_proxy_readback_pinned_blocks",
    "Blocks that a decode instance holds for them",
    (pinned) => pinned.blocks,
  ],
  [
    "kv_proxy_readback_pinned_bytes",
    "Bytes of these, where lengths of blocks are known",
    (pinned) => pinned.bytes,
  ],
  [
    "kv_proxy_readback_budget_blocks",
    "The most blocks that they may hold there",
    (pinned) => pinned.budget_blocks,
  ],
];

/** A Prometheus registry that reads the instances' state at each scrape. */
export class PrometheusMetrics implements Metrics {
  readonly #registry = new Registry();
  readonly #pools: readonly InstancePool[];
  #instances: readonly Reading<InstanceStatus>[] = [];

  constructor(pools: readonly InstancePool[]) {
    this.#pools = pools;
    const labels = ["role", "server", "rank"];
    for (const metric of INSTANCE_METRICS)
      addRead(this.#registry, metric, () => this.#instances, labels);
    const unpaired = () =>
      this.#instances.flatMap(([status, own]) =>
        status.pairing?.state === "unpaired"
          ? status.pairing.differences.map(({ factor }) => [status, { ...own, factor }] as const)
          : [],
      );
    addRead(this.#registry, UNPAIRED, unpaired, [...labels, "factor"]);
    for (const [name, outcomes] of Object.entries(FROM_THE_START)) {
      if (outcomes === undefined) this.count(name, 0);
      else for (const outcome of outcomes) this.count(name, 0, { outcome });
    }
  }

  addDiscovery(discovery: { readonly isCurrent: boolean }): void {
    addRead(this.#registry, DISCOVERY, () => [[discovery]]);
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
    return { name, help: HELP[name] ?? name, labelNames, registers: [this.#registry] };
  }

  #readInstances(): void {
    this.#instances = this.#pools.flatMap((pool) =>
      pool.status().map((status) => {
        const labels: Record<string, string | number> = { role: pool.role, server: status.url };
        if (status.data_parallel_rank !== null) labels.rank = status.data_parallel_rank;
        return [status, labels] as const;
      }),
    );
  }
}

function addSignalGauges(registry: Registry, read: () => SignalsStatus): void {
  for (const metric of SIGNALS) addRead(registry, metric, () => [[read()]]);
}

function addPinnedGauges(registry: Registry, read: () => readonly PinnedStatus[]): void {
  const readings = () => read().map((pinned) => [pinned, { server: pinned.server }] as const);
  for (const metric of PINNED) addRead(registry, metric, readings, ["server"]);
}

type Reading<S> = readonly [source: S, labels?: Readonly<Record<string, string | number>>];

/** The metric's own table would build a text key per sample. */
function addRead<S>(
  registry: Registry,
  [name, help, numberOf, aggregator, Metric = Gauge]: ReadMetric<S>,
  read: () => readonly Reading<S>[],
  labelNames: string[] = [],
): void {
  const metric = new Metric({
    name,
    help,
    labelNames,
    aggregator: aggregator ?? "omit",
    registers: [registry],
  });
  const own = metric.get.bind(metric);
  metric.get = async () => {
    const values = read().flatMap(([source, labels = {}]) => {
      const value = numberOf(source);
      return value == null ? [] : [{ value, labels }];
    });
    return { ...(await own()), values };
  };
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
