import { Float64 } from "../encoding/messages.js";

/**
 * Writes JSON as Python's `json.dumps(value, sort_keys=True)`: separators ", " and ": ", keys by
 * code point, ASCII only. Whole numbers are integers; `new Float64(1)` is 1.0.
 */
export function pythonJson(value: unknown): string {
  if (value === null || value === undefined) return "null";
  if (typeof value === "string") return ascii(value);
  if (typeof value === "boolean" || typeof value === "bigint") return String(value);
  if (value instanceof Float64) return pythonFloat(value.value);
  if (typeof value === "number")
    return Number.isInteger(value) ? BigInt(value).toString() : pythonFloat(value);
  if (Array.isArray(value)) return `[${value.map(pythonJson).join(", ")}]`;
  const entries = Object.entries(value as Record<string, unknown>).sort(([a], [b]) =>
    byCodePoint(a, b),
  );
  return `{${entries.map(([key, item]) => `${ascii(key)}: ${pythonJson(item)}`).join(", ")}}`;
}

/** Python has JavaScript's digits, but other sizes begin the exponent form. */
function pythonFloat(value: number): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "Infinity" : "-Infinity";
  if (Object.is(value, -0)) return "-0.0";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e16)) {
    const [digits = "", exponent = ""] = value.toExponential().split("e");
    return `${digits}e${exponent.slice(0, 1)}${exponent.slice(1).padStart(2, "0")}`;
  }
  const text = String(value);
  return text.includes(".") ? text : `${text}.0`;
}

function ascii(text: string): string {
  return JSON.stringify(text).replace(
    /[\u007f-\uffff]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

function byCodePoint(a: string, b: string): number {
  const left = [...a];
  const right = [...b];
  for (let i = 0; i < left.length && i < right.length; i += 1) {
    const difference = (left[i]?.codePointAt(0) ?? 0) - (right[i]?.codePointAt(0) ?? 0);
    if (difference !== 0) return difference;
  }
  return left.length - right.length;
}
