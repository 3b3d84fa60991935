import { ADMIN_LIMITS, REQUEST_ID_LENGTH } from "@kv/fleet/front-end";
import { TOP_LEVEL_MEMBERS } from "@kv/http";
import { readSettings } from "../../src/config/settings.js";

/** One limit of the picker's listeners, for documentation and tests. */
export interface PickerLimit {
  /** A description where there is no setting. */
  readonly name: string;
  readonly default: number | string;
  readonly listener: "gateways" | "metrics";
}

const { limits, timeouts } = readSettings({});

/** All limits on what gateways, clients and operators can make the picker hold. */
export const PICKER_LIMITS: readonly PickerLimit[] = [
  gateway("limits.connections", limits.connections),
  gateway("limits.connectionsPerAddress", "half of limits.connections"),
  gateway("limits.requestsPerConnection", limits.requestsPerConnection),
  gateway("limits.requestsInFlight", limits.requestsInFlight),
  gateway("limits.requestsPerDecode", "none"),
  gateway("limits.messageLengthBytes", limits.messageLengthBytes),
  gateway("limits.bodyLengthBytes", limits.bodyLengthBytes),
  gateway("limits.bodiesLengthBytes", limits.bodiesLengthBytes),
  gateway("limits.bodyDepth", limits.bodyDepth),
  gateway("limits.bodyMembers", limits.bodyMembers),
  gateway("limits.bodyValues", limits.bodyValues),
  gateway("top-level members of a body", TOP_LEVEL_MEMBERS),
  gateway("limits.subsetEndpoints", limits.subsetEndpoints),
  gateway("length of X-Request-Id", REQUEST_ID_LENGTH),
  gateway("timeouts.receiveMs", timeouts.receiveMs),
  gateway("timeouts.idleMs", timeouts.idleMs),
  { name: "metrics: connections", default: ADMIN_LIMITS.connections, listener: "metrics" },
  {
    name: "metrics: connections per address",
    default: ADMIN_LIMITS.connectionsPerAddress,
    listener: "metrics",
  },
  { name: "metrics: headers", default: ADMIN_LIMITS.headersLengthBytes, listener: "metrics" },
  { name: "metrics: time of a request", default: ADMIN_LIMITS.requestMs, listener: "metrics" },
];

function gateway(name: string, value: PickerLimit["default"]): PickerLimit {
  return { name, default: value, listener: "gateways" };
}
