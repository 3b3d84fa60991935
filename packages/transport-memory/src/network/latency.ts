import { KvError } from "@kv/interface";

/** How long things take. All default to "at once", in as few pieces as may be. */
export interface MemoryLatency {
  /** Before the first byte of a transfer lands, and for each notification and each way of a request. 0 by default. */
  readonly latencyMs?: number;
  /** Up to so much more, drawn per operation. 0 by default. */
  readonly jitterMs?: number;
  /** Infinity by default. Each transfer has all of it. */
  readonly bytesPerMs?: number;
  /** Transfers land in pieces of this size at most; 8 MiB by default. */
  readonly pieceLengthBytes?: number;
  /** Transfers land in at least so many pieces where they have the bytes, so that small ones take time too; 1 by default. */
  readonly minPieces?: number;
  /**
   * How long a transfer that was given up, or that failed, goes on writing before its memory is released: an adapter
   * cannot be stopped. The last write comes just before the release. 1 by default.
   */
  readonly lingerMs?: number;
}

export type ResolvedLatency = Readonly<Required<MemoryLatency>>;

export function resolveLatency(given: MemoryLatency = {}): ResolvedLatency {
  const resolved: ResolvedLatency = {
    latencyMs: given.latencyMs ?? 0,
    jitterMs: given.jitterMs ?? 0,
    bytesPerMs: given.bytesPerMs ?? Number.POSITIVE_INFINITY,
    pieceLengthBytes: given.pieceLengthBytes ?? 8 * 1024 * 1024,
    minPieces: given.minPieces ?? 1,
    lingerMs: given.lingerMs ?? 1,
  };
  for (const name of ["latencyMs", "jitterMs", "lingerMs"] as const) {
    if (!(resolved[name] >= 0)) throw invalid(name, resolved[name], "0 or more");
  }
  for (const name of ["bytesPerMs", "pieceLengthBytes", "minPieces"] as const) {
    if (!(resolved[name] > 0)) throw invalid(name, resolved[name], "more than 0");
  }
  return resolved;
}

/** Bytes of each piece but the last, which has what is left. */
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
