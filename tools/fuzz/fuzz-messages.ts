/** What the thread of a fuzz run gets. */
export interface FuzzWork {
  readonly name: string;
  readonly seed: number;
  /** When it ends, as `Date.now()`. */
  readonly untilMs: number;
  readonly corpus: readonly Uint8Array[];
  /**
   * The number of inputs that were begun, the length of the current one or `NOT_READING` (32 bits
   * each), and its bytes.
   */
  readonly shared: SharedArrayBuffer;
}

/** In place of a length: the thread mutates, or counts the code that ran. */
export const NOT_READING = -1;

/** What the thread of a fuzz run reports. */
export type FuzzReport =
  | { readonly kind: "failed"; readonly input: Uint8Array; readonly failure: string }
  | { readonly kind: "covers"; readonly input: Uint8Array }
  | { readonly kind: "done"; readonly tries: number; readonly blocks: number };
