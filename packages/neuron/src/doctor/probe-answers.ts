/** What a probe's process says, a message for each. */
export type ProbeMessage =
  | { readonly stage: string }
  | { readonly answer: DescribedLibrary | TriedRuntime }
  | { readonly error: string; readonly hint?: string };

export interface DescribedLibrary {
  /** The file that the loader took. */
  readonly path: string;
  readonly symbols: Readonly<Record<string, boolean>>;
}

export interface TriedRuntime {
  readonly initMs: number;
  /** Bytes that were written to a tensor and read again came back as they were. */
  readonly copied: boolean;
}

export type Probe = "library" | "runtime";
