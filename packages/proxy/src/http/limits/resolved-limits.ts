import { readFileSync } from "node:fs";
import { ABANDONED_PREFILL_MS } from "../../config/limit-settings.js";
import { bodiesPerClientBytes, isOneClient, type ProxySettings } from "../../config/settings.js";

/** The limits with all defaults, those that depend on the machine included. */
export type ResolvedLimits = Omit<
  ProxySettings["limits"],
  | "connections"
  | "connectionsPerAddress"
  | "requestsInFlight"
  | "requestsPerClient"
  | "bodiesPerClientLengthBytes"
  | "abandonedPrefillMs"
> & {
  readonly bodiesPerClientLengthBytes: number;
  /** Infinite where clients cannot be told apart. */
  readonly abandonedPrefillMs: number;
  readonly connections: number;
  readonly connectionsPerAddress: number;
  readonly requestsInFlight: number;
  readonly requestsPerClient: number;
};

/**
 * Descriptors that clients cannot take: for the admin routes, health checks, files, and connections
 * that are being refused.
 */
const KEPT_DESCRIPTORS = 256;
/** More connections would need more memory than a proxy has. */
const MAX_CONNECTIONS = 10_000;
/** Of systems that do not tell theirs. */
const USUAL_DESCRIPTORS = 10_240;

/**
 * How many files and sockets this process may open. Node raises its limit to the hard one at the
 * start.
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
 * Fills in the limits that have no fixed default. Each request needs a descriptor for its client
 * and one for an instance, in push two: so the default is a half or a third of the descriptors,
 * 10,000 at most. One address may have half of the connections, one client half of the requests. A
 * sidecar's only clients are the gateways in front of it: limits per client hold only where
 * `clientHeader` tells the clients behind them apart.
 */
export function resolveLimits(
  settings: Pick<ProxySettings, "limits" | "mode" | "sidecar">,
  descriptors = descriptorLimit(),
): ResolvedLimits {
  const { limits, mode, sidecar } = settings;
  const perRequest = mode === "pull" ? 2 : 3;
  const most = Math.max(
    1,
    Math.min(MAX_CONNECTIONS, Math.floor((descriptors - KEPT_DESCRIPTORS) / perRequest)),
  );
  const shareOfClient = isOneClient(settings) ? 1 : 0.5;
  const connections = limits.connections ?? most;
  const requestsInFlight = limits.requestsInFlight ?? most;
  return {
    ...limits,
    connections,
    connectionsPerAddress:
      limits.connectionsPerAddress ?? Math.ceil(connections * (sidecar === undefined ? 0.5 : 1)),
    requestsInFlight,
    requestsPerClient: limits.requestsPerClient ?? Math.ceil(requestsInFlight * shareOfClient),
    bodiesPerClientLengthBytes: bodiesPerClientBytes(settings),
    abandonedPrefillMs:
      limits.abandonedPrefillMs ??
      (isOneClient(settings) ? Number.POSITIVE_INFINITY : ABANDONED_PREFILL_MS),
  };
}
