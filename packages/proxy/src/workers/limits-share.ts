import { type ProxySettingsInput, readSettings } from "../config/settings.js";

const DIVIDED = [
  "connections",
  "connectionsPerAddress",
  "requestsInFlight",
  "requestsPerClient",
] as const;
const DIVIDED_BYTES = ["bodiesLengthBytes", "bodiesPerClientLengthBytes"] as const;

/**
 * The settings of one of `workers` processes that serve one port. A limit that is set is that of
 * all workers, so each gets its share, rounded up; one that is not set has its default in each
 * worker. Bodies have room for at least one of the largest in each. The admin routes are the
 * primary's.
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
