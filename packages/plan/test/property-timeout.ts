/** For a property's runs, and for so many more as a long run asks for. */
export const PROPERTY_TIMEOUT_MS = 300_000 * Number(process.env["KV_PROPERTY_FACTOR"] ?? 1);
