/**
 * A value of a peer's, short enough for a message and whatever it is: it may be megabytes long, cyclic, hold a bigint, or have a key
 * named `toString`.
 */
export function show(value: unknown): string {
  if (value === undefined) return "missing";
  if (value instanceof Uint8Array) return `${value.byteLength} bytes`;
  if (Array.isArray(value)) return value.length === 0 ? "an empty list" : `a list of ${value.length}`;
  if (typeof value === "string") return JSON.stringify(value.length > 80 ? `${value.slice(0, 80)}…` : value);
  if (typeof value !== "object" || value === null) return String(value);
  const keys = Object.keys(value);
  const more = keys.length > 4 ? ", …" : "";
  return `a map {${keys
    .slice(0, 4)
    .map((key) => key.slice(0, 20))
    .join(", ")}${more}}`;
}
