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
});

test("a missing metric and a value that is not a number are undefined", () => {
  const samples = parsePrometheusText(PAGE);
  expect(samples.sum("vllm:other")).toBeUndefined();
  expect(samples.sum("broken")).toBeUndefined();
});
