import { expect, test } from "vitest";
import { METRIC_BUCKETS, METRIC_HELP, METRICS, memoryMetrics } from "./memory-metrics.js";

test("renders counters and histograms in Prometheus' text format", () => {
  const metrics = memoryMetrics({ buckets: { kv_test_seconds: [0.01, 1] } });
  metrics.count("kv_test_failures");
  metrics.count("kv_test_failures", 2, { reason: 'a"b\\c\nd', engine: "1" });
  metrics.count("kv_test_failures", 3, { engine: "1", reason: 'a"b\\c\nd' });
  metrics.observe("kv_test_seconds", 0.5);
  metrics.observe("kv_test_seconds", 1);
  metrics.observe("kv_test_seconds", 2);
  expect(metrics.total("kv_test_failures")).toBe(6);
  expect(metrics.total("kv_test_seconds")).toBe(3);
  expect(metrics.total("never")).toBe(0);
  expect(metrics.render().split("\n")).toEqual([
    "# TYPE kv_test_failures_total counter",
    "kv_test_failures_total 1",
    'kv_test_failures_total{engine="1",reason="a\\"b\\\\c\\nd"} 5',
    "# TYPE kv_test_seconds histogram",
    'kv_test_seconds_bucket{le="0.01"} 0',
    'kv_test_seconds_bucket{le="1"} 2',
    'kv_test_seconds_bucket{le="+Inf"} 3',
    "kv_test_seconds_sum 3.5",
    "kv_test_seconds_count 3",
    "",
  ]);
  expect(memoryMetrics().render()).toBe("");
});

test("vLLM's metrics have vLLM's names and histogram bounds", () => {
  const metrics = memoryMetrics({ labels: { engine: "0" } });
  metrics.count(METRICS.failedTransfers);
  metrics.observe(METRICS.bytesTransferred, 3000);
  const text = metrics.render();
  expect(text).toContain('vllm:nixl_num_failed_transfers_total{engine="0"} 1');
  expect(text).toContain('vllm:nixl_bytes_transferred_bucket{engine="0",le="2048"} 0');
  expect(text).toContain('vllm:nixl_bytes_transferred_bucket{engine="0",le="8192"} 1');
  expect(text).toContain('vllm:nixl_bytes_transferred_bucket{engine="0",le="8589934592"} 1');
  expect(text).toContain(
    `# HELP vllm:nixl_num_failed_transfers_total ${METRIC_HELP[METRICS.failedTransfers]}`,
  );
});

test("every metric has a help text, and every histogram's bounds ascend", () => {
  for (const name of Object.values(METRICS)) expect(METRIC_HELP[name]).toBeTruthy();
  for (const bounds of Object.values(METRIC_BUCKETS))
    expect([...bounds].sort((a, b) => a - b)).toEqual(bounds);
});
