import { expect, test } from "vitest";
import { parsePrometheusText } from "./prometheus-text.js";

const PAGE = `# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a\\"}b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="x"} 0.5
vllm:cache_config_info{block_size="32",num_gpu_blocks="64"} 1.0
plain_total 1e3
broken NaN
`;

test("sum adds the samples of a metric, labels are those of its first sample", () => {
  const samples = parsePrometheusText(PAGE);
  expect(samples.sum("vllm:kv_cache_usage_perc")).toBe(0.75);
  expect(samples.labels("vllm:kv_cache_usage_perc")).toEqual({ engine: "0", model_name: 'a"}b' });
  expect(samples.labels("vllm:cache_config_info")?.num_gpu_blocks).toBe("64");
  expect(samples.sum("plain_total")).toBe(1000);
  expect(samples.sum("vllm:kv_cache_usage_perc", { engine: "1" })).toBe(0.5);
  expect(samples.sum("vllm:kv_cache_usage_perc", { engine: "2" })).toBeUndefined();
});

test("a missing metric and a value that is not a number are undefined", () => {
  const samples = parsePrometheusText(PAGE);
  expect(samples.sum("vllm:other")).toBeUndefined();
  expect(samples.sum("broken")).toBeUndefined();
});

test("a quantile of a histogram is the upper bound of its bucket, over all label sets", () => {
  const page = `
h_bucket{engine="0",le="0.5"} 90
h_bucket{engine="0",le="2.0"} 98
h_bucket{engine="0",le="+Inf"} 100
h_bucket{engine="1",le="0.5"} 0
h_bucket{engine="1",le="2.0"} 100
h_bucket{engine="1",le="+Inf"} 100
empty_bucket{le="1"} 0
empty_bucket{le="+Inf"} 0
`;
  const samples = parsePrometheusText(page);
  expect([0.45, 0.5, 0.99, 1].map((quantile) => samples.quantile("h", quantile))).toEqual([
    0.5,
    2,
    2,
    Number.POSITIVE_INFINITY,
  ]);
  expect(samples.quantile("empty", 0.5)).toBeUndefined();
  expect(samples.quantile("other", 0.5)).toBeUndefined();
});
