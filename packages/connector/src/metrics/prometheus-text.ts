/** One set of labels of a metric. */
export interface MetricSeries {
  readonly labels: Readonly<Record<string, string>>;
  /** The value of a counter, or the number of observations of a histogram. */
  readonly count: number;
  readonly sum: number;
  /** Observations up to each bound. */
  readonly buckets: readonly number[];
}

export interface MetricFamily {
  readonly name: string;
  readonly kind: "counter" | "histogram";
  readonly help: string | undefined;
  readonly bounds: readonly number[];
  readonly series: Iterable<MetricSeries>;
}

/**
 * Prometheus' text format, version 0.0.4. Counter names end in `_total`, as in Python's client and
 * therefore in vLLM's `/metrics`.
 */
export function prometheusText(families: Iterable<MetricFamily>): string {
  const lines: string[] = [];
  for (const { name, kind, help, bounds, series } of families) {
    const shown = kind === "counter" && !name.endsWith("_total") ? `${name}_total` : name;
    if (help !== undefined) lines.push(`# HELP ${shown} ${help.replace(/[\\\n]/g, escaped)}`);
    lines.push(`# TYPE ${shown} ${kind}`);
    for (const { labels, count, sum, buckets } of series) {
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
