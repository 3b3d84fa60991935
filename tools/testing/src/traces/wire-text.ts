import {
  decodeHandshakeRequest,
  decodeLeaseQuery,
  decodeLeaseReply,
  decodeNotification,
} from "@kv/protocol";

export function describeRequest(frames: readonly Uint8Array[]): string {
  const query = decodeLeaseQuery(frames);
  if (query === undefined)
    return `handshake: metadata of rank ${decodeHandshakeRequest(frames).tpRank}?`;
  const { requestId, prompt } = query;
  const content =
    prompt === undefined ? "" : `, the KV of this prompt of ${prompt.numTokens} tokens`;
  return `lease query: do you hold ${requestId}${content}?`;
}

export function describeAnswer(frames: readonly Uint8Array[]): string {
  const lease = decodeLeaseReply(frames);
  if (lease === undefined) return "handshake answer: compatibility hash, agent, regions";
  const compared = lease.prompt === undefined ? "" : `, prompt ${lease.prompt}`;
  return `lease answer: ${lease.held ? "held" : "not held"}${compared}`;
}

/** Without proofs between `@kv` peers. */
export function describeNotification(payload: Uint8Array): string {
  const notification = decodeNotification(payload);
  switch (notification.kind) {
    case "done":
      return `done ${notification.requestId}:${notification.readers}`;
    case "heartbeat":
      return `HB:${notification.requestIds.join()}`;
    case "push-failure":
      return `PUSH_FAIL ${notification.requestId}:${notification.readers}`;
    case "push-registration":
      return `PUSH_REG ${mapText(notification.registration)}`;
    case "extension":
      return notification.message.type === "heartbeat"
        ? `HB:${String(notification.message["request_ids"])}`
        : `${notification.message.type} ${mapText(notification.message)}`;
  }
}

function mapText({
  request_id,
  readers,
  code,
  local_block_ids,
  kv_peer,
}: Readonly<Record<string, unknown>>): string {
  const id = String(request_id) + (readers === undefined ? "" : `:${String(readers)}`);
  if (code !== undefined) return `${id}: ${String(code)}`;
  if (!Array.isArray(local_block_ids)) return id;
  const { prefill } = (kv_peer ?? {}) as { readonly prefill?: { readonly request_id: string } };
  const blocks =
    local_block_ids.length === 0 ? "no blocks" : `blocks ${blockRanges(local_block_ids.flat())}`;
  return `${id}, ${blocks}, ${prefill === undefined ? "by name" : `for ${prefill.request_id}`}`;
}

/** In the form `0-2,7`, ascending; "-" for none. */
export function blockRanges(blockIds: readonly number[]): string {
  const ranges: [from: number, to: number][] = [];
  for (const id of [...new Set(blockIds)].sort((a, b) => a - b)) {
    const last = ranges.at(-1);
    if (last?.[1] === id - 1) last[1] = id;
    else ranges.push([id, id]);
  }
  return ranges.map(([from, to]) => (from === to ? String(from) : `${from}-${to}`)).join() || "-";
}
