const MAX_CHARACTERS = 60;

/**
 * A value of a client's body for an error message: short, and without a walk through nested values.
 */
export function shownValue(value: unknown): string {
  if (Array.isArray(value)) return "a list";
  if (typeof value === "object" && value !== null) return "an object";
  if (typeof value !== "string") return String(value);
  return JSON.stringify(shortened(value));
}

/** The begin of a text. */
export function shortened(text: string): string {
  return text.length <= MAX_CHARACTERS ? text : `${text.slice(0, MAX_CHARACTERS)}…`;
}
