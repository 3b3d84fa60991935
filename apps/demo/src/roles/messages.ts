/** What a child process of the demo says to its parent over Node's IPC channel. */
export type FromChild =
  | { readonly kind: "ready"; readonly url: string; readonly port: number; readonly backend: string | null }
  | { readonly kind: "failed"; readonly error: ChildFailure };

/** A `KvError` on its way between processes. */
export interface ChildFailure {
  readonly code: string;
  readonly message: string;
  readonly hint: string | undefined;
}
