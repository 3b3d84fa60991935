import type { Metrics } from "@kv/interface";
import help from "./metric-help.json" with { type: "json" };

/** vLLM 0.33's names (v1/nixl/stats.py), so that its dashboards work, and one of this project. */
export const METRICS = {
  transferSeconds: "vllm:nixl_xfer_time_seconds",
  postSeconds: "vllm:nixl_post_time_seconds",
  bytesTransferred: "vllm:nixl_bytes_transferred",
  descriptors: "vllm:nixl_num_descriptors",
  failedTransfers: "vllm:nixl_num_failed_transfers",
  failedNotifications: "vllm:nixl_num_failed_notifications",
  expiredRequests: "vllm:nixl_num_kv_expired_reqs",
  notificationsAfterExpiry: "vllm:nixl_num_notifications_after_expiry",
  /**
   * Engines count prompt tokens, and those not computed by the source of their KV
   * (v1/metrics/loggers.py).
   */
  promptTokensBySource: "vllm:prompt_tokens_by_source",
  promptTokensCachedBySource: "vllm:prompt_tokens_cached_by_source",
  /** vLLM 0.33 throws in its engine step instead. */
  ignoredNotifications: "kv_connector_num_ignored_notifications",
} as const;

/** For Prometheus' `# HELP`. */
export const METRIC_HELP: Readonly<Record<string, string>> = help;

const seconds = [0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5];

/** vLLM 0.33's upper bounds: only histograms with equal bounds can be added up. */
export const METRIC_BUCKETS: Readonly<Record<string, readonly number[]>> = {
  [METRICS.transferSeconds]: seconds.slice(1),
  [METRICS.postSeconds]: seconds,
  // 2 KiB to 8 GiB.
  [METRICS.bytesTransferred]: Array.from({ length: 12 }, (_, i) => 2 ** (11 + 2 * i)),
  [METRICS.descriptors]: [
    10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000,
  ],
};

/** Metrics kept in memory. */
export interface MemoryMetrics extends Metrics {
  /** A counter's sum over all label sets, or a histogram's number of observations; 0 if unknown. */
  total(name: string): number;
  /** Prometheus' text format, for `text/plain; version=0.0.4`. */
  render(): string;
}

/** Options of `memoryMetrics`. */
export interface MemoryMetricsOptions {
  /**
   * Ascending upper bounds of histogram buckets by metric name. @default vLLM's bounds for vLLM's
   * metrics, bounds in seconds for others
   */
  readonly buckets?: Readonly<Record<string, readonly number[]>>;
  /** Added to every series, such as `{ engine: "0" }`. */
  readonly labels?: Readonly<Record<string, string>>;
}

const DEFAULT_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10];

interface Series {
  readonly labels: Readonly<Record<string, string>>;
  count: number;
  sum: number;
  readonly buckets: number[];
}

interface Family {
  readonly name: string;
  readonly kind: "counter" | "histogram";
  readonly help: string | undefined;
  readonly bounds: readonly number[];
  readonly byLabels: Map<string, Series>;
}

/** Creates counters and histograms in memory. */
export function memoryMetrics(options: MemoryMetricsOptions = {}): MemoryMetrics {
  const families = new Map<string, Family>();

  function familyOf(name: string, kind: Family["kind"]): Family {
    const known = families.get(name);
    if (known !== undefined) return known;
    const buckets = options.buckets?.[name] ?? METRIC_BUCKETS[name] ?? DEFAULT_BUCKETS;
    const bounds = kind === "counter" ? [] : buckets;
    const family: Family = { name, kind, help: METRIC_HELP[name], bounds, byLabels: new Map() };
    families.set(name, family);
    return family;
  }

  function seriesOf({ byLabels, bounds }: Family, given: Readonly<Record<string, string>>): Series {
    const all = Object.entries({ ...options.labels, ...given }).sort(([a], [b]) =>
      a < b ? -1 : 1,
    );
    const key = JSON.stringify(all);
    let series = byLabels.get(key);
    if (series === undefined) {
      series = { labels: Object.fromEntries(all), count: 0, sum: 0, buckets: bounds.map(() => 0) };
      byLabels.set(key, series);
    }
    return series;
  }

  return {
    count(name, by = 1, labels = {}) {
      seriesOf(familyOf(name, "counter"), labels).count += by;
    },
    observe(name, value, labels = {}) {
      const family = familyOf(name, "histogram");
      const series = seriesOf(family, labels);
      series.count += 1;
      series.sum += value;
      for (const [i, bound] of family.bounds.entries())
        if (value <= bound) series.buckets[i] = (series.buckets[i] ?? 0) + 1;
    },
    total(name) {
      let sum = 0;
      for (const { count } of families.get(name)?.byLabels.values() ?? []) sum += count;
      return sum;
    },
    render: () => prometheusText(families.values()),
  };
}

/** Version 0.0.4. Counter names end in `_total`, as in Python's client. */
function prometheusText(families: Iterable<Family>): string {
  const lines: string[] = [];
  for (const { name, kind, help, bounds, byLabels } of families) {
    const shown = kind === "counter" && !name.endsWith("_total") ? `${name}_total` : name;
    if (help !== undefined) lines.push(`# HELP ${shown} ${help.replace(/[\\\n]/g, escaped)}`);
    lines.push(`# TYPE ${shown} ${kind}`);
    for (const { labels, count, sum, buckets } of byLabels.values()) {
      if (kind === "counter") {
        lines.push(`${shown}${braces(labels)} ${count}`);
        continue;
      }
      for (const [i, bound] of bounds.entries())
        lines.push(`${name}_bucket${braces({ ...labels, le: String(bound) })} ${buckets[i] ?? 0}`);
      lines.push(
        `${name}_bucket${braces({ ...labels, le: "+Inf" })} ${count}`,
        `${name}_sum${braces(labels)} ${sum}`,
        `${name}_count${braces(labels)} ${count}`,
      );
    }
  }
  return lines.length === 0 ? "" : `${lines.join("\n")}\n`;
}

function braces(labels: Readonly<Record<string, string>>): string {
  const pairs = Object.entries(labels).map(
    ([key, value]) => `${key}="${value.replace(/[\\"\n]/g, escaped)}"`,
  );
  return pairs.length === 0 ? "" : `{${pairs.join(",")}}`;
}

const escaped = (char: string) => (char === "\n" ? "\\n" : `\\${char}`);
