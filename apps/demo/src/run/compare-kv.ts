import type { KvRecord, KvTransferRecord } from "../instance/kv-journal.js";

/** The records of an instance, from `/kv/transfers`. */
export async function fetchRecords(url: string): Promise<KvRecord[]> {
  const response = await fetch(`${url}/kv/transfers`);
  const { records } = (await response.json()) as { records: KvRecord[] };
  return records;
}

export interface KvComparison {
  readonly sent: KvRecord | undefined;
  readonly received: KvRecord | undefined;
  /** The transfer, as the side that moved the bytes recorded it. */
  readonly transfer: KvTransferRecord | undefined;
  /** All transferred tokens have the same digests on both sides. */
  readonly equal: boolean;
  /** Why they are not equal. */
  readonly difference: string | undefined;
}

/** Finds the records of both sides for a client's request and compares the digests of the transferred tokens. */
export function compareKv(
  requestId: string,
  sentRecords: readonly KvRecord[],
  receivedRecords: readonly KvRecord[],
): KvComparison {
  const of = (records: readonly KvRecord[]) =>
    records.findLast((record) => record.request_id.startsWith(`cmpl-${requestId}-`));
  const sent = of(sentRecords);
  const received = of(receivedRecords);
  const transfer = [received, sent].find((record) => (record?.transfer?.length_bytes ?? 0) > 0)?.transfer;
  const unequal = (difference: string): KvComparison => ({
    sent,
    received,
    transfer,
    equal: false,
    difference,
  });
  if (sent === undefined) return unequal("no prefill instance recorded its KV");
  if (received === undefined) return unequal("no decode instance recorded its KV");
  if (sent.digests.length === 0 || received.digests.length !== sent.digests.length) {
    return unequal(
      `the sender has ${sent.digests.length} digests and the receiver ${received.digests.length}`,
    );
  }
  // The tokens in the receiver's prefix cache come from an earlier request.
  const first = Math.ceil(received.cached_tokens / received.digest_tokens);
  const differing = sent.digests.findIndex((digest, i) => i >= first && digest !== received.digests[i]);
  if (differing < 0) return { sent, received, transfer, equal: true, difference: undefined };
  return unequal(`from token ${differing * sent.digest_tokens} on, the received KV differs from the sent KV`);
}
