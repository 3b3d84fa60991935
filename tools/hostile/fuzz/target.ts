/** A reader of bytes that peers, clients or files send. */
export interface FuzzTarget {
  readonly seeds: readonly Uint8Array[];
  /** Beside those of the seeds. */
  readonly words?: readonly string[];
  /** Values are mutated, not only bytes. */
  readonly isJson?: boolean;
  /** It may throw a `KvError` and nothing else. */
  read(input: Uint8Array): void;
}

export const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

export const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);

export const json = (value: unknown): Uint8Array => bytes(JSON.stringify(value));

export function parseJson(input: Uint8Array): { readonly value: unknown } | undefined {
  try {
    return { value: JSON.parse(new TextDecoder().decode(input)) };
  } catch {
    return undefined;
  }
}
