/** Samples of a Prometheus text page. */
export interface MetricSamples {
  /** Sum over the labels; undefined when the page has no such sample. */
  sum(name: string): number | undefined;
  /** Labels of the first sample of a name: how vLLM publishes settings. */
  labels(name: string): Readonly<Record<string, string>> | undefined;
}

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Lines that are no samples are passed over: a page of another program is one without what is looked for. */
export function readMetrics(text: string): MetricSamples {
  const sums = new Map<string, number>();
  const labels = new Map<string, Readonly<Record<string, string>>>();
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const [, name, given = "", value] = SAMPLE.exec(line) ?? [];
    if (name === undefined || !Number.isFinite(Number(value))) continue;
    sums.set(name, (sums.get(name) ?? 0) + Number(value));
    if (labels.has(name)) continue;
    const entries = Array.from(given.matchAll(LABEL), ([, key = "", text = ""]) => [
      key,
      text.replace(/\\(.)/g, (_, character: string) => (character === "n" ? "\n" : character)),
    ]);
    labels.set(name, Object.fromEntries(entries) as Record<string, string>);
  }
  return { sum: (name) => sums.get(name), labels: (name) => labels.get(name) };
}
