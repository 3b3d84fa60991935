import { readFileSync } from "node:fs";
import {
  ABANDONED_PREFILL_MS,
  bodiesPerClientBytes,
  isOneClient,
  type ProxySettings,
} from "../config/settings.js";

export type ResolvedLimits = ReturnType<typeof resolveLimits>;

/** Kept for the admin routes, health checks, files and connections being refused. */
const KEPT_DESCRIPTORS = 256;
/** More connections need more memory than a proxy has. */
const MAX_CONNECTIONS = 10_000;
/** Taken on systems that do not report their limit. */
const USUAL_DESCRIPTORS = 10_240;

/**
 * Files and sockets that this process may open. At its start, Node raises the soft limit to the
 * hard one.
 */
function descriptorLimit(): number {
  try {
    const found = /^Max open files\s+(\d+|unlimited)/m.exec(
      readFileSync("/proc/self/limits", "utf8"),
    )?.[1];
    return found === undefined || found === "unlimited" ? USUAL_DESCRIPTORS : Number(found);
  } catch {
    return USUAL_DESCRIPTORS;
  }
}

/**
 * Fills in defaults that depend on the machine. Each request needs a descriptor for its client and
 * one for an instance (two in push): the default is a half or a third of the descriptors, at most
 * 10,000. One address may have half of the connections, one client half of the requests. A
 * sidecar's clients are gateways, so limits per client need `clientHeader`.
 */
export function resolveLimits(settings: ProxySettings) {
  const { limits, mode, sidecar } = settings;
  const { headersMs, receiveMs, keepAliveMs } = settings.timeouts;
  const perRequest = mode === "pull" ? 2 : 3;
  const descriptors = Math.floor((descriptorLimit() - KEPT_DESCRIPTORS) / perRequest);
  const most = Math.max(1, Math.min(MAX_CONNECTIONS, descriptors));
  const shareOfClient = isOneClient(settings) ? 1 : 0.5;
  const connections = limits.connections ?? most;
  const requestsInFlight = limits.requestsInFlight ?? most;
  return {
    ...limits,
    headersMs,
    receiveMs,
    keepAliveMs,
    connections,
    connectionsPerAddress:
      limits.connectionsPerAddress ?? Math.ceil(connections * (sidecar === undefined ? 0.5 : 1)),
    requestsInFlight,
    requestsPerClient: limits.requestsPerClient ?? Math.ceil(requestsInFlight * shareOfClient),
    bodiesPerClientLengthBytes: bodiesPerClientBytes(settings),
    // No limit where clients cannot be told apart.
    abandonedPrefillMs:
      limits.abandonedPrefillMs ??
      (isOneClient(settings) ? Number.POSITIVE_INFINITY : ABANDONED_PREFILL_MS),
  };
}
