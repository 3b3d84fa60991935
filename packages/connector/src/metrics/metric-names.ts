/** vLLM 0.33's names (v1/nixl/stats.py), so that its dashboards work, and one of this project. */
export const METRICS = {
  transferSeconds: "vllm:nixl_xfer_time_seconds",
  postSeconds: "vllm:nixl_post_time_seconds",
  bytesTransferred: "vllm:nixl_bytes_transferred",
  descriptors: "vllm:nixl_num_descriptors",
  failedTransfers: "vllm:nixl_num_failed_transfers",
  failedNotifications: "vllm:nixl_num_failed_notifications",
  expiredRequests: "vllm:nixl_num_kv_expired_reqs",
  notificationsAfterExpiry: "vllm:nixl_num_notifications_after_expiry",
  /**
   * Engines count prompt tokens, and those not computed by the source of their KV
   * (v1/metrics/loggers.py).
   */
  promptTokensBySource: "vllm:prompt_tokens_by_source",
  promptTokensCachedBySource: "vllm:prompt_tokens_cached_by_source",
  /** vLLM 0.33 throws in its engine step instead. */
  ignoredNotifications: "kv_connector_num_ignored_notifications",
} as const;

/** For Prometheus' `# HELP`. */
export const METRIC_HELP: Readonly<Record<string, string>> = {
  [METRICS.transferSeconds]: "Time of a KV cache transfer, from its first post to its last byte.",
  [METRICS.postSeconds]: "Time inside the post calls of a KV cache transfer.",
  [METRICS.bytesTransferred]: "Bytes of a KV cache transfer.",
  [METRICS.descriptors]: "Descriptors of a KV cache transfer.",
  [METRICS.failedTransfers]: "KV cache transfers, handshakes and notifications that failed.",
  [METRICS.failedNotifications]: "Notifications that failed; among the failed transfers as well.",
  [METRICS.expiredRequests]: "Requests whose lease ended before a decode worker had read their KV.",
  [METRICS.notificationsAfterExpiry]:
    "Notifications for requests that are no longer held; their blocks may have been reused before they were read.",
  [METRICS.promptTokensBySource]: "Number of prompt tokens by source.",
  [METRICS.promptTokensCachedBySource]:
    "Prefix-cache hit tokens by the cache tier that supplied them: device, host, disk, p2p or external_unspecified.",
  [METRICS.ignoredNotifications]:
    "Notifications of a form or type that this version does not know.",
};

const seconds = [0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5];

/** vLLM 0.33's upper bounds: only histograms with equal bounds can be added up. */
export const METRIC_BUCKETS: Readonly<Record<string, readonly number[]>> = {
  [METRICS.transferSeconds]: seconds.slice(1),
  [METRICS.postSeconds]: seconds,
  // 2 KiB to 8 GiB.
  [METRICS.bytesTransferred]: Array.from({ length: 12 }, (_, i) => 2 ** (11 + 2 * i)),
  [METRICS.descriptors]: [
    10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000,
  ],
};
