import { KvError, type SideChannel } from "@kv/interface";
import { decodeLeaseReply, encodeLeaseQuery, type LeaseQuery, type LeaseReply } from "@kv/protocol";

/** Options of `queryLease`. */
export interface QueryLeaseOptions {
  readonly sideChannel: SideChannel;
  /** Host of P's side channel. */
  readonly host: string;
  /** Port of P's side channel. */
  readonly port: number;
  /** For each of the two attempts. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/**
 * Asks P whether it has kept a request's blocks; a second time when the first query or its reply is lost. Errors: those of
 * `SideChannel.request`; `KV_WIRE_MALFORMED` for a reply that is none.
 */
export async function queryLease(query: LeaseQuery, options: QueryLeaseOptions): Promise<LeaseReply> {
  const { sideChannel, host, port, timeoutMs, signal } = options;
  for (let isSecondTry = false; ; isSecondTry = true) {
    try {
      const { frames } = await sideChannel.request({
        host,
        port,
        frames: [encodeLeaseQuery(query)],
        timeoutMs,
        signal,
      });
      const reply = decodeLeaseReply(frames);
      if (reply !== undefined) return reply;
      throw new KvError(
        "KV_WIRE_MALFORMED",
        `engine ${query.engineId} at ${host}:${port} answered a lease query with ${frames.length} frames that are no lease reply`,
      );
    } catch (error) {
      if (isSecondTry || signal?.aborted) throw error;
    }
  }
}
