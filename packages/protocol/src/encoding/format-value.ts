/**
 * Formats a peer's value for an error message. The value may be of any type and size: megabytes
 * long, cyclic, a bigint, or an object with a key named `toString`; the text stays short.
 */
export function formatValue(value: unknown): string {
  if (value === undefined) return "missing";
  if (value instanceof Uint8Array) return `${value.byteLength} bytes`;
  if (Array.isArray(value))
    return value.length === 0 ? "an empty list" : `a list of ${value.length}`;
  if (typeof value === "string")
    return JSON.stringify(value.length > 80 ? `${value.slice(0, 80)}…` : value);
  if (typeof value !== "object" || value === null) return String(value);
  const keys = Object.keys(value);
  const more = keys.length > 4 ? ", …" : "";
  return `a map {${keys
    .slice(0, 4)
    .map((key) => key.slice(0, 20))
    .join(", ")}${more}}`;
}
