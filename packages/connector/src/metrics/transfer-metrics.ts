import type { Metrics, TransferResult } from "@kv/interface";
import { METRICS } from "./metric-names.js";

const COUNTERS = [
  METRICS.failedTransfers,
  METRICS.failedNotifications,
  METRICS.expiredRequests,
  METRICS.notificationsAfterExpiry,
  METRICS.ignoredNotifications,
];

/**
 * The counters and histograms of a connector's worker, under vLLM 0.33's names
 * (`v1/nixl/stats.py`).
 */
export class TransferMetrics {
  readonly #metrics: Metrics;

  constructor(metrics: Metrics) {
    this.#metrics = metrics;
    // As in vLLM, counters are there from the start: without a first sample of 0, `increase()`
    // misses their first event.
    for (const name of COUNTERS) metrics.count(name, 0);
  }

  /** Observes duration, post time, bytes and descriptors of a successful transfer. */
  transferred({ transferMs, postMs, lengthBytes, descriptorCount }: TransferResult): void {
    this.#metrics.observe(METRICS.transferSeconds, transferMs / 1000);
    this.#metrics.observe(METRICS.postSeconds, postMs / 1000);
    this.#metrics.observe(METRICS.bytesTransferred, lengthBytes);
    this.#metrics.observe(METRICS.descriptors, descriptorCount);
  }

  /** Counts a failed transfer. */
  transferFailed(): void {
    this.#metrics.count(METRICS.failedTransfers);
  }

  /** Counts a failed handshake as a failed transfer, as vLLM does. */
  handshakeFailed(): void {
    this.#metrics.count(METRICS.failedTransfers);
  }

  /** Counts a notification that the transport could not send. */
  notificationFailed(): void {
    this.#metrics.count(METRICS.failedNotifications);
  }

  /** Counts a request whose lease ended before all its readers had completed. */
  leaseExpired(): void {
    this.#metrics.count(METRICS.expiredRequests);
  }

  /**
   * Counts a notification of a form or type that this version does not know: a newer peer may have
   * more.
   */
  notificationIgnored(): void {
    this.#metrics.count(METRICS.ignoredNotifications);
  }

  /** Counts a notification for a request that is no longer known. */
  notificationAfterExpiry(): void {
    this.#metrics.count(METRICS.notificationsAfterExpiry);
  }
}
