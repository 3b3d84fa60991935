/** Samples of a page in Prometheus' text format. */
export interface MetricSamples {
  /**
   * The sum of a metric over all label sets, or those that have these labels; undefined when the
   * page has no such sample.
   */
  sum(name: string, labels?: Readonly<Record<string, string>>): number | undefined;
  /**
   * The labels of the first sample of a metric. vLLM publishes settings in the labels of
   * `vllm:cache_config_info`.
   */
  labels(name: string): Readonly<Record<string, string>> | undefined;
  /**
   * An upper limit of a histogram's quantile, over all label sets: the upper bound of the bucket
   * that holds it, `Infinity` for the last one. `name` is without `_bucket`; `quantile` is between
   * 0 and 1. Undefined when nothing was observed.
   */
  quantile(name: string, quantile: number): number | undefined;
}

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Reads a page and skips lines that are not samples. */
export function parsePrometheusText(text: string): MetricSamples {
  const samples = new Map<
    string,
    { readonly labels: Readonly<Record<string, string>>; value: number }[]
  >();
  /** Per histogram, the observations up to each bound. */
  const buckets = new Map<string, Map<number, number>>();
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const [, name, labelText = "", value] = SAMPLE.exec(line) ?? [];
    if (name === undefined || !Number.isFinite(Number(value))) continue;
    const entries = Array.from(labelText.matchAll(LABEL), ([, key = "", text = ""]) => [
      key,
      text.replace(/\\(.)/g, (_, character: string) => (character === "n" ? "\n" : character)),
    ]);
    const named = Object.fromEntries(entries) as Record<string, string>;
    const known = samples.get(name) ?? [];
    known.push({ labels: named, value: Number(value) });
    samples.set(name, known);
    if (name.endsWith("_bucket") && named["le"] !== undefined) {
      const histogram = name.slice(0, -"_bucket".length);
      const counts = buckets.get(histogram) ?? new Map<number, number>();
      const bound = named["le"] === "+Inf" ? Number.POSITIVE_INFINITY : Number(named["le"]);
      buckets.set(histogram, counts.set(bound, (counts.get(bound) ?? 0) + Number(value)));
    }
  }
  return {
    sum(name, wanted = {}) {
      const chosen = samples
        .get(name)
        ?.filter(({ labels }) =>
          Object.entries(wanted).every(([key, text]) => labels[key] === text),
        );
      return chosen?.length ? chosen.reduce((sum, { value }) => sum + value, 0) : undefined;
    },
    labels: (name) => samples.get(name)?.[0]?.labels,
    quantile: (name, quantile) => quantileOf(buckets.get(name), quantile),
  };
}

function quantileOf(
  counts: ReadonlyMap<number, number> | undefined,
  quantile: number,
): number | undefined {
  const total = counts?.get(Number.POSITIVE_INFINITY) ?? 0;
  if (counts === undefined || total === 0) return undefined;
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  return bounds.find((bound) => (counts.get(bound) ?? 0) >= quantile * total);
}
