import type { Metrics, TransferResult } from "@kv/interface";
import { METRICS } from "./index.js";

/** What connectors count, under vLLM 0.33's names (`v1/nixl/stats.py`). */
export interface TransferMetrics {
  transferred(result: TransferResult): void;
  transferFailed(): void;
  /** Counted as failed transfers, as vLLM's report does. */
  handshakeFailed(): void;
  notificationFailed(): void;
  leaseExpired(): void;
  notificationAfterExpiry(): void;
}

export function transferMetrics(metrics: Metrics): TransferMetrics {
  return {
    transferred({ transferMs, postMs, lengthBytes, descriptorCount }) {
      metrics.observe(METRICS.transferSeconds, transferMs / 1000);
      metrics.observe(METRICS.postSeconds, postMs / 1000);
      metrics.observe(METRICS.bytesTransferred, lengthBytes);
      metrics.observe(METRICS.descriptors, descriptorCount);
    },
    transferFailed: () => metrics.count(METRICS.failedTransfers),
    handshakeFailed: () => metrics.count(METRICS.failedTransfers),
    notificationFailed: () => metrics.count(METRICS.failedNotifications),
    leaseExpired: () => metrics.count(METRICS.expiredRequests),
    notificationAfterExpiry: () => metrics.count(METRICS.notificationsAfterExpiry),
  };
}
