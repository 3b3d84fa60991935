import { readFileSync } from "node:fs";
import {
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakeReply,
  decodeHandshakeRequest,
  decodeNotification,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeReply,
  encodeHandshakeRequest,
  encodeNotification,
} from "@kv/protocol";
import { Difference } from "./outcome.js";
import { hex, type Recorded, record, same } from "./recordings.js";

/**
 * The three frames of a handshake decode to vLLM's values and encode to the same bytes. `path`: of
 * the `.json`.
 */
export function checkHandshake(path: string): void {
  const meant = JSON.parse(readFileSync(path, "utf8")) as Recorded;
  const frame = (kind: string) =>
    new Uint8Array(readFileSync(path.replace(/json$/, `${kind}.bin`)));
  const [asked, payload, clock] = [frame("req"), frame("rep0"), frame("rep1")];

  const request = decodeHandshakeRequest([asked]);
  same("request", request, { ppRank: meant["pp_rank"], tpRank: meant["tp_rank"] });
  same("request, encoded", hex(encodeHandshakeRequest(request)), hex(asked));

  const reply = decodeHandshakeReply([payload, clock]);
  same("clock", reply.clockSeconds, meant["server_perf_counter"]);
  same(
    "hash",
    reply.payload.compatibilityHash,
    record(meant["payload"], "payload")["compatibility_hash"],
  );
  const encoded = encodeHandshakeReply(
    encodeHandshakePayload(reply.payload),
    reply.clockSeconds ?? 0,
  );
  same("reply, encoded", encoded.map(hex), [hex(payload), hex(clock)]);

  const metadata = decodeAgentMetadata(reply.payload.agentMetadataBytes);
  const told = record(meant["agent_metadata"], "agent_metadata");
  const ours = {
    engine_id: metadata.engineId,
    kv_caches_base_addr: metadata.baseAddresses,
    device_id: metadata.deviceId,
    num_blocks: metadata.numBlocks,
    block_lens: metadata.blockLengthsBytes,
    block_strides: metadata.blockStridesBytes,
    kv_cache_layout: metadata.kvCacheLayout,
    block_size: metadata.blockSize,
    attn_backend_name: metadata.attentionBackend,
    region_names: metadata.regionNames,
  };
  same("metadata", ours, Object.fromEntries(Object.keys(ours).map((key) => [key, told[key]])));
  same(
    "metadata, encoded",
    hex(encodeAgentMetadata(metadata)),
    hex(reply.payload.agentMetadataBytes),
  );
}

export function checkNotification(line: Recorded): void {
  const bytes = new Uint8Array(Buffer.from(String(line["hex"]), "hex"));
  const notification = decodeNotification(bytes);
  const meant = record(line["decoded"], "decoded");
  if (notification.kind === "done") {
    same(
      "done",
      [notification.requestId, notification.readers],
      [meant["request_id"], meant["count"]],
    );
  } else if (notification.kind === "heartbeat") {
    same("heartbeat", notification.requestIds, meant["req_ids"]);
  } else if (notification.kind === "push-registration") {
    same("push registration", notification.registration, meant["msgpack"]);
  } else {
    throw new Difference(
      `a notification of vLLM was decoded as one of our own kinds: ${notification.kind}`,
    );
  }
  same(
    "kind",
    { done: "DONE", heartbeat: "HB", "push-registration": "PUSH_REG" }[notification.kind],
    meant["kind"],
  );
  same("encoded", hex(encodeNotification(notification)), hex(bytes));
}

export function checkCompatibilityHash(line: Recorded): void {
  same("hash", compatibilityHash(record(line["factors"], "factors")), line["hash"]);
}
