/** KV that this instance has handed out, or taken in, for one request. Plain data: it leaves by HTTP. */
export interface KvRecord {
  readonly direction: "sent" | "received";
  /** The engine's id; begins with the client's `X-Request-Id` behind a prefix. */
  readonly request_id: string;
  readonly tokens: number;
  /** Tokens at the begin that the receiver had in its prefix cache. */
  readonly cached_tokens: number;
  /** SHA-256 of each `digest_tokens` tokens; empty where digests are off. */
  readonly digests: readonly string[];
  readonly digest_tokens: number;
  /** Sent only: in forward passes, and in copies from device to host. */
  readonly forward_ms?: number;
  readonly save_ms?: number;
  /** Of the side that moved the bytes: the receiver with pull, the sender with push. */
  readonly transfer?: KvTransferRecord;
}

export interface KvTransferRecord {
  readonly remote_engine_id: string | null;
  readonly remote_request_id: string | null;
  readonly length_bytes: number;
  readonly transfers: number;
  readonly descriptors: number;
  /** From the first post to the last byte. */
  readonly transfer_ms: number;
  /** From the engine's step to the report of the last rank, handshake included. */
  readonly waited_ms: number;
  /** In copies from host to device. */
  readonly load_ms: number;
}

/** The last records of an instance. */
export interface KvJournal {
  add(record: KvRecord): void;
  /** Completes the last record of KV that was sent for a request. */
  sent(requestId: string, transfer: KvTransferRecord): void;
  readonly records: readonly KvRecord[];
}

export function createKvJournal({ capacity = 256 }: { capacity?: number } = {}): KvJournal {
  const records: KvRecord[] = [];
  return {
    add(record) {
      records.push(record);
      if (records.length > capacity) records.splice(0, records.length - capacity);
    },
    sent(requestId, transfer) {
      const at = records.findLastIndex(
        (record) => record.direction === "sent" && record.request_id === requestId,
      );
      const record = records[at];
      if (record !== undefined) records[at] = { ...record, transfer };
    },
    get records() {
      return records;
    },
  };
}
