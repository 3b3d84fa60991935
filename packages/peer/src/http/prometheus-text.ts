/** Samples of a page in Prometheus' text format. */
export interface MetricSamples {
  /** The sum of a metric over all label sets; undefined when the page has no such sample. */
  sum(name: string): number | undefined;
  /** The labels of the first sample of a metric. vLLM publishes settings in the labels of `vllm:cache_config_info`. */
  labels(name: string): Readonly<Record<string, string>> | undefined;
}

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Reads a page and skips lines that are not samples. */
export function parsePrometheusText(text: string): MetricSamples {
  const sums = new Map<string, number>();
  const labels = new Map<string, Readonly<Record<string, string>>>();
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const [, name, labelText = "", value] = SAMPLE.exec(line) ?? [];
    if (name === undefined || !Number.isFinite(Number(value))) continue;
    sums.set(name, (sums.get(name) ?? 0) + Number(value));
    if (labels.has(name)) continue;
    const entries = Array.from(labelText.matchAll(LABEL), ([, key = "", text = ""]) => [
      key,
      text.replace(/\\(.)/g, (_, character: string) => (character === "n" ? "\n" : character)),
    ]);
    labels.set(name, Object.fromEntries(entries) as Record<string, string>);
  }
  return { sum: (name) => sums.get(name), labels: (name) => labels.get(name) };
}
