import type { KvRecord, KvTransferRecord } from "../instance/kv-journal.js";

/** What an instance says at `/kv/transfers`. */
export async function fetchRecords(url: string): Promise<KvRecord[]> {
  const response = await fetch(`${url}/kv/transfers`);
  const { records } = (await response.json()) as { records: KvRecord[] };
  return records;
}

export interface KvComparison {
  readonly sent: KvRecord | undefined;
  readonly received: KvRecord | undefined;
  /** Of the side that moved the bytes. */
  readonly transfer: KvTransferRecord | undefined;
  /** Every group of tokens that was transferred has the hash that it had on the other side. */
  readonly equal: boolean;
  readonly why: string | undefined;
}

/** Finds both sides' records of a client's request, and compares the hashes of what crossed. */
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
  const unequal = (why: string): KvComparison => ({ sent, received, transfer, equal: false, why });
  if (sent === undefined) return unequal("no prefill instance has sent its KV");
  if (received === undefined) return unequal("no decode instance has received its KV");
  if (sent.digests.length === 0 || received.digests.length !== sent.digests.length) {
    return unequal(`${sent.digests.length} hashes were sent and ${received.digests.length} received`);
  }
  // What the receiver had in its cache came from an earlier request.
  const first = Math.ceil(received.cached_tokens / received.digest_tokens);
  const differing = sent.digests.findIndex((digest, i) => i >= first && digest !== received.digests[i]);
  if (differing < 0) return { sent, received, transfer, equal: true, why: undefined };
  return unequal(`the KV of tokens ${differing * sent.digest_tokens} and on is not what was sent`);
}
