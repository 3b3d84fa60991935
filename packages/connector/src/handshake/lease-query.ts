import { KvError, type SideChannel } from "@kv/interface";
import { decodeLeaseReply, encodeLeaseQuery, type LeaseQuery, type LeaseReply } from "@kv/protocol";

/** Options of `queryLease`. */
export interface QueryLeaseOptions {
  readonly sideChannel: SideChannel;
  /** Host of P's side channel. */
  readonly host: string;
  /** Port of P's side channel. */
  readonly port: number;
  /** Timeout of each of the two attempts. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/**
 * Asks P whether it still holds a request's blocks. Asks again once when the first query or its reply is lost. Errors: those of
 * `SideChannel.request`; `KV_WIRE_MALFORMED` for a malformed reply.
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
        `engine ${query.engineId} at ${host}:${port} answered a lease query with ${frames.length} frames that are not a lease reply`,
      );
    } catch (error) {
      if (isSecondTry || signal?.aborted) throw error;
    }
  }
}
