import { AggregatorRegistry, Registry } from "prom-client";
import type { PinnedStatus } from "../readback/kept-objects.js";
import type { SignalsStatus } from "./autoscaling-signals.js";
import { addPinnedGauges, addSignalGauges, type MetricAsJson } from "./prometheus.js";

const COUNTED: ReadonlySet<string> = new Set(["counter", "histogram"]);

/**
 * The metrics of several worker processes as those of one. What a worker had counted stays counted
 * after its end.
 */
export class WorkerMetrics {
  readonly #last = new Map<number, readonly MetricAsJson[]>();
  readonly #ended: (readonly MetricAsJson[])[] = [];

  reported(worker: number, metrics: readonly MetricAsJson[]): void {
    this.#last.set(worker, metrics);
  }

  /**
   * A worker has ended: its counts remain as it has reported them last, so that no sum goes down
   * between two scrapes.
   */
  async ended(worker: number): Promise<void> {
    const last = this.#last.get(worker);
    if (!this.#last.delete(worker) || last === undefined) return;
    this.#ended.push(last.filter(({ type }) => COUNTED.has(String(type))));
    const parts = [...this.#ended];
    const sum = await aggregate(parts).getMetricsAsJSON();
    this.#ended.splice(0, parts.length, sum);
  }

  /**
   * All workers' metrics in Prometheus' text format, with the signals of all workers. `pinned`:
   * what ended turns hold, where they are kept.
   */
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
