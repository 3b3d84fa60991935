/**
 * All codes of `KvError`, as `KV_<AREA>_<CONDITION>`. The list is closed; only a minor release adds
 * a code. `docs/errors.md` explains each.
 */
export const KV_ERROR_CODES = [
  "KV_CONFIG_INVALID",
  "KV_CONFIG_UNKNOWN_KEY",
  "KV_CONNECTOR_UNKNOWN",
  "KV_CONNECTOR_DUPLICATE",
  "KV_CONNECTOR_LOAD_FAILED",
  "KV_TOPOLOGY_INVALID",
  "KV_PLAN_INVALID",
  "KV_PLAN_INCOMPATIBLE",
  "KV_PLAN_UNSUPPORTED",
  "KV_BLOCKS_MISMATCH",
  "KV_BLOCKS_OUT_OF_RANGE",
  "KV_WIRE_MALFORMED",
  "KV_WIRE_LIMIT_EXCEEDED",
  "KV_SIDE_CHANNEL_BIND_FAILED",
  "KV_SIDE_CHANNEL_UNREACHABLE",
  "KV_SIDE_CHANNEL_TIMEOUT",
  "KV_SIDE_CHANNEL_CLOSED",
  "KV_HANDSHAKE_REFUSED",
  "KV_HANDSHAKE_INCOMPATIBLE",
  "KV_HANDSHAKE_WRONG_ENGINE",
  "KV_HANDSHAKE_UNTRUSTED",
  "KV_HANDSHAKE_BACKED_OFF",
  "KV_TRANSPORT_UNAVAILABLE",
  "KV_TRANSPORT_CLOSED",
  "KV_TRANSPORT_UNSUPPORTED",
  "KV_AGENT_INVALID",
  "KV_AGENT_CLOSED",
  "KV_AGENT_UNKNOWN_REMOTE",
  "KV_AGENT_METADATA_INVALID",
  "KV_BACKEND_UNAVAILABLE",
  "KV_MEMORY_INVALID",
  "KV_MEMORY_NOT_REGISTERED",
  "KV_MEMORY_IN_USE",
  "KV_LIST_INVALID",
  "KV_LIST_CLOSED",
  "KV_TRANSFER_INVALID",
  "KV_TRANSFER_FAILED",
  "KV_TRANSFER_ABORTED",
  "KV_TRANSFER_TIMEOUT",
  "KV_NOTIFICATION_INVALID",
  "KV_NOTIFICATION_FAILED",
  "KV_PEER_DISCONNECTED",
  "KV_LIBRARY_NOT_FOUND",
  "KV_LIBRARY_INCOMPATIBLE",
  "KV_ADDON_NOT_FOUND",
  "KV_INSTALL_FAILED",
  "KV_REQUEST_INVALID",
  "KV_REQUEST_UNKNOWN",
  "KV_REQUEST_ABORTED",
  "KV_REQUEST_TIMEOUT",
  "KV_LEASE_EXPIRED",
  "KV_GENERATION_STALE",
  "KV_REFERENCE_USED",
  "KV_REFERENCES_FULL",
  "KV_PROMPT_MISMATCH",
  "KV_PLATFORM_UNSUPPORTED",
  "KV_STAGING_FAILED",
  "KV_ENGINE_FAILED",
  "KV_MODEL_UNSUPPORTED",
  "KV_OUT_OF_BLOCKS",
  "KV_PROXY_UPSTREAM_FAILED",
  "KV_PROXY_NO_INSTANCE",
  "KV_PROXY_OVERLOADED",
  // a defect in these packages
  "KV_INTERNAL",
] as const;

/** One of `KV_ERROR_CODES`. */
export type KvErrorCode = (typeof KV_ERROR_CODES)[number];

/** Options of `KvError`'s constructor. */
export interface KvErrorOptions {
  /** A remedy: a command, a setting, or a value that works. */
  hint?: string | undefined;
  /** Plain values for programs, such as the two that disagree; logs and `--json` print them. */
  details?: Readonly<Record<string, unknown>> | undefined;
  cause?: unknown;
}

const brand: unique symbol = Symbol.for("@kv/KvError") as never;

/**
 * The error class of all `@kv` packages. The message has both values where two disagree; `hint` has
 * the remedy. Use `KvError.is`, never `instanceof`: it recognises errors of other copies of this
 * package.
 */
export class KvError extends Error {
  static {
    Object.defineProperty(KvError.prototype, brand, { value: true });
  }

  override readonly name = "KvError";
  readonly code: KvErrorCode;
  readonly hint: string | undefined;
  readonly details: Readonly<Record<string, unknown>>;

  constructor(code: KvErrorCode, message: string, options: KvErrorOptions = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.code = code;
    this.hint = options.hint;
    this.details = options.details ?? {};
  }

  /** Returns true for a `KvError` of any copy of this package, with `code` if given. */
  static is(value: unknown, code?: KvErrorCode): value is KvError {
    if (typeof value !== "object" || value === null) return false;
    if ((value as { [brand]?: unknown })[brand] !== true) return false;
    return code === undefined || (value as KvError).code === code;
  }

  /** Returns a `KvError` unchanged, and anything else as the cause of a new error of `code`. */
  static from(value: unknown, code: KvErrorCode, message: string): KvError {
    return KvError.is(value)
      ? value
      : new KvError(code, `${message}: ${reason(value)}`, { cause: value });
  }

  /** Returns plain data for logs and wires, without the cause. */
  toJSON(): { name: string; code: KvErrorCode; message: string; hint?: string; details: unknown } {
    return {
      name: this.name,
      code: this.code,
      message: this.message,
      ...(this.hint === undefined ? {} : { hint: this.hint }),
      details: this.details,
    };
  }
}

function reason(value: unknown): string {
  return value instanceof Error ? value.message : String(value);
}

/**
 * Waits until all have ended, and then rejects with the first error. `Promise.all` would reject
 * while the others still use what the caller frees next.
 */
export async function settleAll(ends: Iterable<Promise<unknown> | undefined>): Promise<void> {
  const failed = (await Promise.allSettled(ends)).find(({ status }) => status === "rejected");
  if (failed !== undefined) throw (failed as PromiseRejectedResult).reason;
}
