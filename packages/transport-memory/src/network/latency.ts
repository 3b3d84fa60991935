import { KvError } from "@kv/interface";

/** Latency and bandwidth of a memory network. By default all is immediate. */
export interface MemoryLatency {
  /** Delay of a transfer's first byte, a notification, and each way of a request. @default 0 */
  readonly latencyMs?: number | undefined;
  /** Adds 0 to this to `latencyMs`, uniformly, per operation. @default 0 */
  readonly jitterMs?: number | undefined;
  /** Bandwidth of each transfer. @default Infinity */
  readonly bytesPerMs?: number | undefined;
  /**
   * Transfers between two hosts share each direction's `bytesPerMs`.
   * @default false
   */
  readonly sharesBandwidth?: boolean | undefined;
  /** Added for each byte range, as by a network adapter with a work request for each. @default 0 */
  readonly rangeMs?: number | undefined;
  /** Largest piece that lands at once. @default 8 * 1024 * 1024 */
  readonly pieceLengthBytes?: number | undefined;
  /** Makes small transfers take time too. @default 1 */
  readonly minPieces?: number | undefined;
  /**
   * How long a failed or aborted transfer keeps writing, like an unstoppable network adapter. The
   * last write comes just before the release. @default 1
   */
  readonly lingerMs?: number | undefined;
}

export type ResolvedLatency = {
  readonly [K in keyof MemoryLatency]-?: NonNullable<MemoryLatency[K]>;
};

export function resolveLatency(options: MemoryLatency = {}): ResolvedLatency {
  const resolved: ResolvedLatency = {
    latencyMs: options.latencyMs ?? 0,
    jitterMs: options.jitterMs ?? 0,
    bytesPerMs: options.bytesPerMs ?? Number.POSITIVE_INFINITY,
    sharesBandwidth: options.sharesBandwidth ?? false,
    rangeMs: options.rangeMs ?? 0,
    pieceLengthBytes: options.pieceLengthBytes ?? 8 * 1024 * 1024,
    minPieces: options.minPieces ?? 1,
    lingerMs: options.lingerMs ?? 1,
  };
  for (const name of ["latencyMs", "jitterMs", "rangeMs", "lingerMs"] as const) {
    if (!(resolved[name] >= 0)) throw invalid(name, resolved[name], "0 or more");
  }
  for (const name of ["bytesPerMs", "pieceLengthBytes", "minPieces"] as const) {
    if (!(resolved[name] > 0)) throw invalid(name, resolved[name], "more than 0");
  }
  return resolved;
}

export function pieceLength(lengthBytes: number, latency: ResolvedLatency): number {
  return Math.max(
    1,
    Math.min(Math.floor(latency.pieceLengthBytes), Math.ceil(lengthBytes / latency.minPieces)),
  );
}

function invalid(name: string, value: number, wanted: string): KvError {
  return new KvError(
    "KV_CONFIG_INVALID",
    `latency of the memory network: ${name} is ${value}, it must be ${wanted}`,
  );
}
