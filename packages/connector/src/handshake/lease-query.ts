import { KvError, type SideChannel } from "@kv/interface";
import { decodeLeaseReply, encodeLeaseQuery, type LeaseQuery, type LeaseReply } from "@kv/protocol";

export interface AskLeaseOptions {
  readonly sideChannel: SideChannel;
  readonly host: string;
  readonly port: number;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal;
}

/** Asks, and once more when the first query or its answer got lost. Errors: the side channel's; `KV_WIRE_MALFORMED`. */
export async function askLease(query: LeaseQuery, options: AskLeaseOptions): Promise<LeaseReply> {
  const { sideChannel, host, port, timeoutMs, signal } = options;
  for (let again = false; ; again = true) {
    try {
      const { frames } = await sideChannel.request({
        host,
        port,
        frames: [encodeLeaseQuery(query)],
        timeoutMs,
        ...(signal === undefined ? {} : { signal }),
      });
      const answer = decodeLeaseReply(frames);
      if (answer !== undefined) return answer;
      throw new KvError(
        "KV_WIRE_MALFORMED",
        `engine ${query.engineId} at ${host}:${port} answered a lease query with ${frames.length} frames that are none`,
      );
    } catch (error) {
      if (again || signal?.aborted) throw error;
    }
  }
}
