/** What the thread of a fuzz run gets. */
export interface FuzzWork {
  readonly name: string;
  readonly seed: number;
  /** When it ends, as `Date.now()`. */
  readonly untilMs: number;
  readonly corpus: readonly Uint8Array[];
  /** The number of inputs that were begun, the length of the current one (32 bits each), and its bytes. */
  readonly shared: SharedArrayBuffer;
}

/** What the thread of a fuzz run reports. */
export type FuzzReport =
  | { readonly kind: "failed"; readonly input: Uint8Array; readonly failure: string; readonly tries: number }
  | { readonly kind: "covers"; readonly input: Uint8Array }
  | { readonly kind: "done"; readonly tries: number; readonly blocks: number; readonly inputs: number };
