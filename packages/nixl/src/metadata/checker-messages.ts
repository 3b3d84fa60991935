/** To the process that checks: metadata in base64. */
export interface CheckRequest {
  readonly metadata: string;
}

/** From it: `ready` once, then an answer to each request. */
export interface CheckAnswer {
  readonly ready?: true;
  readonly error?: { readonly code: string; readonly message: string };
}
