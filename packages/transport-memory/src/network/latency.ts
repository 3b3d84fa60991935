import { KvError } from "@kv/interface";

/** Latency and bandwidth of a memory network. By default everything happens at once. */
export interface MemoryLatency {
  /**
   * Time until the first byte of a transfer lands, and of each notification and each way of a
   * request. @default 0
   */
  readonly latencyMs?: number | undefined;
  /** Upper bound of a uniform addition to `latencyMs`, drawn for each operation. @default 0 */
  readonly jitterMs?: number | undefined;
  /** Bandwidth of each transfer. @default Infinity */
  readonly bytesPerMs?: number | undefined;
  /**
   * Whether the transfers between two hosts share `bytesPerMs` of each direction, piece by piece.
   * @default false
   */
  readonly sharesBandwidth?: boolean | undefined;
  /**
   * Time that each byte range of a transfer adds, as a network adapter that handles one work
   * request per range. @default 0
   */
  readonly rangeMs?: number | undefined;
  /** Largest piece in which a transfer lands. @default 8 * 1024 * 1024 */
  readonly pieceLengthBytes?: number | undefined;
  /**
   * Fewest pieces of a transfer, as far as it has enough bytes, so that small transfers take time
   * too. @default 1
   */
  readonly minPieces?: number | undefined;
  /**
   * Time for which a transfer that failed or was aborted keeps writing before its memory is
   * released, as a network adapter that cannot be stopped. The last write comes just before the
   * release. @default 1
   */
  readonly lingerMs?: number | undefined;
}

/** `MemoryLatency` with its defaults filled in. */
export type ResolvedLatency = {
  readonly [K in keyof MemoryLatency]-?: NonNullable<MemoryLatency[K]>;
};

/**
 * Fills in defaults.
 *
 * @throws `KV_CONFIG_INVALID`.
 */
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

/** Returns the bytes of each piece; the last one may be smaller. */
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
