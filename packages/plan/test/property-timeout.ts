/** The timeout of a property test, scaled by the number of runs. */
export const PROPERTY_TIMEOUT_MS = 300_000 * Number(process.env["KV_PROPERTY_FACTOR"] ?? 1);
