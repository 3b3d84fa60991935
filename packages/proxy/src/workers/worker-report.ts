import { type InstanceStatus, instanceName } from "@kv/fleet";
import { signalsOf } from "@kv/fleet/front-end";
import type { ProxyStatus, WorkerReport } from "../proxy.js";
import { total } from "../response/merge-answers.js";
import {
  MOST_ENDED,
  type RequestCountsStatus,
  type RequestSummary,
} from "../telemetry/request-record.js";

export function mergedStatus(reports: readonly [WorkerReport, ...WorkerReport[]]): ProxyStatus {
  const statuses = reports.map(({ status }) => status);
  const prefillers = mergedInstances(statuses.map((status) => status.prefillers));
  const decoders = mergedInstances(statuses.map((status) => status.decoders));
  const loads = (instances: readonly InstanceStatus[]) =>
    instances.map(({ in_flight: inFlight, available }) => ({ inFlight, available }));
  return {
    ...reports[0].status,
    draining: statuses.some(({ draining }) => draining),
    uptime_s: Math.max(...statuses.map((status) => status.uptime_s)),
    requests: total(statuses.map(({ requests }) => requests)) as RequestCountsStatus,
    signals: signalsOf(
      reports.map(({ measured }) => measured),
      loads(prefillers),
      loads(decoders),
    ),
    prefillers,
    decoders,
  };
}

/** The last ended requests of all workers, oldest first. */
export function mergedRequests(reports: readonly WorkerReport[]): readonly RequestSummary[] {
  const endedAtMs = ({ began_at, duration_ms }: RequestSummary) =>
    Date.parse(began_at) + duration_ms;
  return reports
    .flatMap(({ requests }) => requests)
    .sort((a, b) => endedAtMs(a) - endedAtMs(b))
    .slice(-MOST_ENDED);
}

/** Running requests of all workers, oldest first. */
export function mergedRunning(reports: readonly WorkerReport[]): readonly RequestSummary[] {
  return reports
    .flatMap(({ running }) => running)
    .sort((a, b) => Date.parse(a.began_at) - Date.parse(b.began_at));
}

/** Adds up counts. Other members come from the worker that sees the instance worst. */
export function mergedInstances(lists: readonly (readonly InstanceStatus[])[]): InstanceStatus[] {
  const merged = new Map<string, InstanceStatus>();
  for (const one of lists.flat()) {
    const name = instanceName({
      url: one.url,
      dataParallelRank: one.data_parallel_rank ?? undefined,
    });
    const other = merged.get(name);
    merged.set(name, other === undefined ? one : both(other, one));
  }
  return [...merged.values()];
}

function both(a: InstanceStatus, b: InstanceStatus): InstanceStatus {
  const shown = a.available && !b.available ? b : a;
  return {
    ...shown,
    in_flight: a.in_flight + b.in_flight,
    requests: a.requests + b.requests,
    failures: a.failures + b.failures,
    ejections: a.ejections + b.ejections,
    consecutive_failures: Math.max(a.consecutive_failures, b.consecutive_failures),
    last_error: shown.last_error ?? a.last_error ?? b.last_error,
  };
}
