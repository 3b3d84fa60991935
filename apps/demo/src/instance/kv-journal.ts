/** KV that this instance sent or received for one request. Part of the body of `/kv/transfers`. */
export interface KvRecord {
  readonly direction: "sent" | "received";
  /** The engine's request id: a prefix, the client's `X-Request-Id` and a suffix. */
  readonly request_id: string;
  readonly tokens: number;
  /** Tokens at the start that were in the receiver's prefix cache. */
  readonly cached_tokens: number;
  /** SHA-256 of each `digest_tokens` tokens; empty without digests. */
  readonly digests: readonly string[];
  readonly digest_tokens: number;
  /** From the submission to the first forward pass (sender), or to the admission (receiver). */
  readonly queue_ms: number;
  /** From the arrival of the KV to the first token; receiver only. */
  readonly first_token_ms?: number;
  /** Time in forward passes; sender only. */
  readonly forward_ms?: number;
  /** Time of copies from device to host; sender only. */
  readonly save_ms?: number;
  /** Only on the side that moved the bytes: the receiver with pull, the sender with push. */
  readonly transfer?: KvTransferRecord;
}

export interface KvTransferRecord {
  readonly remote_engine_id: string | null;
  readonly remote_request_id: string | null;
  readonly length_bytes: number;
  readonly transfers: number;
  readonly descriptors: number;
  /** From the start of the first transfer to the end of the last. */
  readonly transfer_ms: number;
  /** From the admission of the request to the report of the last rank, handshake included. */
  readonly waited_ms: number;
  /** Time of copies from host to device. */
  readonly load_ms: number;
}

/** The latest records of an instance. */
export interface KvJournal {
  add(record: KvRecord): void;
  /** Adds the transfer to the latest record of a sent request. */
  sent(requestId: string, transfer: KvTransferRecord): void;
  /** Adds the time of the first token to the latest record of a received request. */
  firstToken(requestId: string, sinceMs: number): void;
  readonly records: readonly KvRecord[];
}

export function createKvJournal({ capacity = 256 }: { capacity?: number } = {}): KvJournal {
  const records: KvRecord[] = [];
  function update(direction: KvRecord["direction"], requestId: string, change: Partial<KvRecord>): void {
    const at = records.findLastIndex(
      (record) => record.direction === direction && record.request_id === requestId,
    );
    const record = records[at];
    if (record !== undefined) records[at] = { ...record, ...change };
  }
  return {
    add(record) {
      records.push(record);
      if (records.length > capacity) records.splice(0, records.length - capacity);
    },
    sent: (requestId, transfer) => update("sent", requestId, { transfer }),
    firstToken: (requestId, sinceMs) => update("received", requestId, { first_token_ms: sinceMs }),
    get records() {
      return records;
    },
  };
}
