import { KvError } from "@kv/interface";
import { MAX_WORKERS, type ProxySettingsInput, readSettings } from "../config/settings.js";

const DIVIDED = ["connections", "connectionsPerAddress", "requestsInFlight", "requestsPerClient"] as const;
const DIVIDED_BYTES = ["bodiesLengthBytes", "bodiesPerClientLengthBytes"] as const;

/**
 * The settings of one of `workers` processes that serve one port. A limit that is set is that of all workers, so each gets its share, rounded up; one that
 * is not set has its default in each worker. Bodies have room for at least one of the largest in each. The admin routes are the primary's.
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

/** Refuses a number of workers that cannot work. Errors: `KV_CONFIG_INVALID`. */
export function checkWorkers(workers: number, settings: ProxySettingsInput): void {
  if (!Number.isInteger(workers) || workers < 1 || workers > MAX_WORKERS) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--workers is ${workers}, and kv-proxy takes 1 to ${MAX_WORKERS}`,
      { hint: "give one worker for each core that kv-proxy may use" },
    );
  }
  if (workers > 1 && settings.sidecar !== undefined) {
    throw new KvError("KV_CONFIG_INVALID", `--workers is ${workers}, and a --sidecar has one process`, {
      hint: "leave --workers out: a sidecar serves one decode instance",
    });
  }
}
