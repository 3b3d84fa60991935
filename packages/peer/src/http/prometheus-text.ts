/** Samples of Prometheus' text format. */
export interface MetricSamples {
  /** Over all label sets, or those with these labels; undefined without a sample. */
  sum(name: string, labels?: Readonly<Record<string, string>>): number | undefined;
  labels(name: string): Readonly<Record<string, string>> | undefined;
  /**
   * The upper bound of the quantile's bucket over all label sets; `Infinity` for the last. `name`
   * is without `_bucket`.
   */
  quantile(name: string, quantile: number): number | undefined;
}

interface Sample {
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
}

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

export function parsePrometheusText(text: string): MetricSamples {
  const samples = new Map<string, Sample[]>();
  for (const line of text.split("\n")) {
    const [, name, labelText = "", value] = SAMPLE.exec(line) ?? [];
    if (name === undefined || !Number.isFinite(Number(value))) continue;
    const labels = Array.from(labelText.matchAll(LABEL), ([, key = "", text = ""]) => [
      key,
      text.replace(/\\(.)/g, (_, character: string) => (character === "n" ? "\n" : character)),
    ]);
    const known = samples.get(name) ?? [];
    known.push({ labels: Object.fromEntries(labels), value: Number(value) });
    samples.set(name, known);
  }

  const named = (name: string) => samples.get(name) ?? [];
  function sum(name: string, wanted: Sample["labels"] = {}): number | undefined {
    const chosen = named(name).filter(({ labels }) =>
      Object.entries(wanted).every(([key, text]) => labels[key] === text),
    );
    return chosen.length === 0 ? undefined : chosen.reduce((total, { value }) => total + value, 0);
  }
  return {
    sum,
    labels: (name) => named(name)[0]?.labels,
    quantile(name, quantile) {
      const counts = new Map<number, number>();
      for (const { labels, value } of named(`${name}_bucket`)) {
        const bound = Number(labels["le"]?.replace("+Inf", "Infinity"));
        counts.set(bound, (counts.get(bound) ?? 0) + value);
      }
      const total = counts.get(Number.POSITIVE_INFINITY) ?? 0;
      const bounds = [...counts.keys()].sort((a, b) => a - b);
      if (total === 0) return undefined;
      return bounds.find((bound) => (counts.get(bound) ?? 0) >= quantile * total);
    },
  };
}
