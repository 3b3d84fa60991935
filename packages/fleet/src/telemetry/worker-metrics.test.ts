import { expect, test } from "vitest";
import { signalsOf } from "./autoscaling-signals.js";
import { PrometheusMetrics, WorkerMetrics } from "./prometheus.js";

const SIGNALS = signalsOf([], [], []);

test("metrics of workers add up, and what an ended worker had counted stays", async () => {
  const [one, two] = [new PrometheusMetrics([]), new PrometheusMetrics([])];
  for (const metrics of [one, two]) {
    metrics.addSignals(() => SIGNALS);
    metrics.count("kv_proxy_requests_total", 2, { outcome: "200" });
    metrics.observe("kv_proxy_prefill_duration_seconds", 0.02);
  }
  const all = new WorkerMetrics();
  all.reported(1, await one.json());
  all.reported(2, await two.json());
  const before = await all.text(SIGNALS);
  expect(before).toContain('kv_proxy_requests_total{outcome="200"} 4');
  expect(before).toContain("kv_proxy_prefill_duration_seconds_count 2");
  expect(before.match(/^kv_proxy_kv_unread 0$/gm)).toHaveLength(1);
  const ended = all.ended(1);
  // No scrape sees less meanwhile.
  expect(await all.text(SIGNALS)).toContain('kv_proxy_requests_total{outcome="200"} 4');
  await ended;
  two.count("kv_proxy_requests_total", 1, { outcome: "200" });
  all.reported(2, await two.json());
  expect(await all.text(SIGNALS)).toContain('kv_proxy_requests_total{outcome="200"} 5');
  await all.ended(2);
  expect(await all.text(SIGNALS)).toContain("kv_proxy_prefill_duration_seconds_count 2");
});
