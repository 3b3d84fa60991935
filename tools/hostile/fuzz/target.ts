/** A reader of bytes that peers, clients or files send. */
export interface FuzzTarget {
  /** Valid inputs, from which the first mutants are made. */
  readonly seeds: readonly Uint8Array[];
  /** Words that its inputs may contain, beside those of the seeds. */
  readonly words?: readonly string[];
  /** Inputs are JSON: their values are mutated, not only their bytes. */
  readonly isJson?: boolean;
  /** Reads an input. It may throw a `KvError` and nothing else. */
  read(input: Uint8Array): void;
}

export const bytes = (text: string): Uint8Array => new TextEncoder().encode(text);

export const json = (value: unknown): Uint8Array => bytes(JSON.stringify(value));

/** Parses an input as JSON; undefined where it is not JSON, which the caller refuses. */
export function parseJson(input: Uint8Array): { readonly value: unknown } | undefined {
  try {
    return { value: JSON.parse(new TextDecoder().decode(input)) };
  } catch {
    return undefined;
  }
}
