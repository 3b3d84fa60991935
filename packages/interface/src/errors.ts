/**
 * All codes of `KvError`, in the form `KV_<AREA>_<CONDITION>`. The list is closed: a caller may
 * switch over it, and a new code comes with a minor release. `docs/errors.md` has the meaning, the
 * likely cause and the remedy of each.
 */
export const KV_ERROR_CODES = [
  // configuration and registry
  "KV_CONFIG_INVALID",
  "KV_CONFIG_UNKNOWN_KEY",
  "KV_CONNECTOR_UNKNOWN",
  "KV_CONNECTOR_DUPLICATE",
  "KV_CONNECTOR_LOAD_FAILED",
  // topology and plan
  "KV_TOPOLOGY_INVALID",
  "KV_PLAN_INVALID",
  "KV_PLAN_INCOMPATIBLE",
  "KV_PLAN_UNSUPPORTED",
  "KV_BLOCKS_MISMATCH",
  "KV_BLOCKS_OUT_OF_RANGE",
  // side channel and handshake
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
  // transport
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
  // native library and installation
  "KV_LIBRARY_NOT_FOUND",
  "KV_LIBRARY_INCOMPATIBLE",
  "KV_ADDON_NOT_FOUND",
  "KV_INSTALL_FAILED",
  // requests
  "KV_REQUEST_INVALID",
  "KV_REQUEST_UNKNOWN",
  "KV_REQUEST_ABORTED",
  "KV_REQUEST_TIMEOUT",
  "KV_LEASE_EXPIRED",
  "KV_GENERATION_STALE",
  "KV_REFERENCE_USED",
  "KV_REFERENCES_FULL",
  "KV_PROMPT_MISMATCH",
  // platform
  "KV_PLATFORM_UNSUPPORTED",
  "KV_STAGING_FAILED",
  // engine and proxy
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

/** Options of the constructor of `KvError`. */
export interface KvErrorOptions {
  /** Remedy: a command, a setting, or a value that works. */
  hint?: string | undefined;
  /**
   * Values for programs, such as the two that disagree. Plain data only; logs and `--json` print
   * it.
   */
  details?: Readonly<Record<string, unknown>> | undefined;
  /** The error that caused this one. */
  cause?: unknown;
}

const brand: unique symbol = Symbol.for("@kv/KvError") as never;

/**
 * The error class of all `@kv` packages. The message says what failed and where, with both values
 * where two disagree; `hint` has the remedy. Use `KvError.is` and never `instanceof`: it recognises
 * errors of another copy of this package by a symbol.
 */
export class KvError extends Error {
  static {
    Object.defineProperty(KvError.prototype, brand, { value: true });
  }

  /** Always "KvError". */
  override readonly name = "KvError";
  readonly code: KvErrorCode;
  /** Remedy, as text for people; undefined when there is none. */
  readonly hint: string | undefined;
  /** Values for programs; empty when there are none. */
  readonly details: Readonly<Record<string, unknown>>;

  /** Creates an error. `message` says what failed and where. */
  constructor(code: KvErrorCode, message: string, options: KvErrorOptions = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.code = code;
    this.hint = options.hint;
    this.details = options.details ?? {};
  }

  /**
   * Returns true for a `KvError` of any copy of this package, and of one code when `code` is given.
   */
  static is(value: unknown, code?: KvErrorCode): value is KvError {
    if (typeof value !== "object" || value === null) return false;
    if ((value as { [brand]?: unknown })[brand] !== true) return false;
    return code === undefined || (value as KvError).code === code;
  }

  /**
   * Returns `value` when it is a `KvError`, otherwise a new error of `code` with `value` as its
   * cause and its message after `message`.
   */
  static from(value: unknown, code: KvErrorCode, message: string): KvError {
    return KvError.is(value)
      ? value
      : new KvError(code, `${message}: ${reason(value)}`, { cause: value });
  }

  /**
   * Returns plain data for logs and wires; `hint` is left out when there is none, the cause always.
   */
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
