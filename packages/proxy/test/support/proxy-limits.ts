import { ADMIN_LIMITS, PREFILLER_HEADER, REQUEST_ID_LENGTH } from "@kv/fleet/front-end";
import { TOP_LEVEL_MEMBERS } from "@kv/http";
import {
  ABANDONED_PREFILL_MS,
  BODIES_PER_CLIENT_BYTES,
  readSettings,
} from "../../src/config/settings.js";
import { MAX_NAMED } from "../../src/sidecar/named-prefillers.js";

/** One limit of the proxy's listeners. */
export interface ProxyLimit {
  /** The setting, or a description of a limit without one. */
  readonly name: string;
  /** In `unit`; text where it depends on the machine. */
  readonly default: number | string;
  readonly unit:
    | "bytes"
    | "ms"
    | "connections"
    | "requests"
    | "levels"
    | "values"
    | "characters"
    | "streams";
  readonly listener: "clients" | "admin";
  /** HTTP status at the limit, or `close` where the connection ends. */
  readonly refusal: number | "close";
}

const { limits, timeouts } = readSettings({});
const descriptors = "descriptors / 2 (pull) or / 3, 10,000 at most";

/** All limits on what clients and operators can make the proxy hold. */
export const PROXY_LIMITS: readonly ProxyLimit[] = [
  client("limits.connections", descriptors, "connections", 503),
  client("limits.connectionsPerAddress", "half of limits.connections", "connections", 429),
  client("limits.pipelinedRequests", limits.pipelinedRequests, "requests", 429),
  client("limits.requestsInFlight", descriptors, "requests", 503),
  client("limits.requestsPerClient", "half of limits.requestsInFlight", "requests", 429),
  client("limits.abandonedPrefillMs", ABANDONED_PREFILL_MS, "ms", 429),
  client("limits.headersLengthBytes", limits.headersLengthBytes, "bytes", 431),
  client("limits.bodyLengthBytes", limits.bodyLengthBytes, "bytes", 413),
  client("limits.bodiesLengthBytes", limits.bodiesLengthBytes, "bytes", 503),
  client("limits.bodiesPerClientLengthBytes", BODIES_PER_CLIENT_BYTES, "bytes", 429),
  client("limits.bodyDepth", limits.bodyDepth, "levels", 400),
  client("limits.bodyMembers", limits.bodyMembers, "values", 400),
  client("limits.bodyValues", limits.bodyValues, "values", 400),
  client("top-level members of a body", TOP_LEVEL_MEMBERS, "values", 400),
  client("limits.parts", limits.parts, "requests", 400),
  client("length of X-Request-Id", REQUEST_ID_LENGTH, "characters", 400),
  client(`instances in ${PREFILLER_HEADER}`, MAX_NAMED, "values", 400),
  client("timeouts.headersMs", timeouts.headersMs, "ms", 408),
  client("timeouts.receiveMs", timeouts.receiveMs, "ms", 408),
  client("timeouts.keepAliveMs", timeouts.keepAliveMs, "ms", "close"),
  client("timeouts.stallMs", timeouts.stallMs, "ms", "close"),
  admin("connections", ADMIN_LIMITS.connections, "connections", 503),
  admin("connections per address", ADMIN_LIMITS.connectionsPerAddress, "connections", 429),
  admin("event streams", ADMIN_LIMITS.eventStreams, "streams", 503),
  admin("headers", ADMIN_LIMITS.headersLengthBytes, "bytes", 431),
  admin("body", ADMIN_LIMITS.bodyLengthBytes, "bytes", 413),
  admin("time of a request", ADMIN_LIMITS.requestMs, "ms", 408),
];

function client(
  name: string,
  value: ProxyLimit["default"],
  unit: ProxyLimit["unit"],
  refusal: ProxyLimit["refusal"],
): ProxyLimit {
  return { name, default: value, unit, listener: "clients", refusal };
}

function admin(
  name: string,
  value: ProxyLimit["default"],
  unit: ProxyLimit["unit"],
  refusal: ProxyLimit["refusal"],
): ProxyLimit {
  return { name: `admin: ${name}`, default: value, unit, listener: "admin", refusal };
}
