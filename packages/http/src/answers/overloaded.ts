import { KvError } from "@kv/interface";

/** Why a request or a connection is refused at a limit. */
export interface Overload {
  /** The setting of the limit, such as `limits.connections`. */
  readonly limit: string;
  /** For the client. */
  readonly message: string;
  /** Whether one client has reached the limit (429), or all together (503). */
  readonly byClient: boolean;
  /** After how many seconds the client may try again. */
  readonly retryAfterSeconds?: number | undefined;
  /** What the client, or the operator, can do. */
  readonly hint?: string | undefined;
}

/** The error of a limit that is reached: 429 or 503, with `Retry-After`. */
export function overloaded({
  limit,
  message,
  byClient,
  retryAfterSeconds = 1,
  hint,
}: Overload): KvError {
  return new KvError("KV_PROXY_OVERLOADED", message, {
    hint: hint ?? `try again in ${retryAfterSeconds} s; the limit is ${limit}`,
    details: { httpStatus: byClient ? 429 : 503, retryAfterSeconds, limit },
  });
}
