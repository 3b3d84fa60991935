import { type ProxySettingsInput, readSettings } from "../config/settings.js";

const DIVIDED = [
  "connections",
  "connectionsPerAddress",
  "requestsInFlight",
  "requestsPerClient",
] as const;
const DIVIDED_BYTES = ["bodiesLengthBytes", "bodiesPerClientLengthBytes"] as const;

/**
 * Settings of one of `workers` processes that share a port. Set limits are divided and rounded up;
 * unset ones have their default in each worker. Each worker has room for one largest body. The
 * primary serves the admin routes.
 */
export function workerSettings(settings: ProxySettingsInput, workers: number): ProxySettingsInput {
  const { limits: given = {}, admin: _, ...rest } = settings;
  const limits = { ...given };
  for (const name of DIVIDED) {
    const all = given[name];
    if (all !== undefined) limits[name] = Math.ceil(all / workers);
  }
  const { bodyLengthBytes } = readSettings(settings).limits;
  for (const name of DIVIDED_BYTES) {
    const all = given[name];
    if (all !== undefined) limits[name] = Math.max(bodyLengthBytes, Math.ceil(all / workers));
  }
  return { ...rest, limits };
}
