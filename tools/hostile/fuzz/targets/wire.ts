import { readKvEventBatch } from "../../../../packages/fleet/src/kv-events/kv-event-batch.js";
import {
  checkHandshakeSeal,
  decodeAgentMetadata,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  decodeHandshakeRequest,
  decodeLeaseQuery,
  decodeLeaseReply,
  decodeNotification,
  decodePushControl,
  decodeRegistration,
  encodeHandshakePayload,
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  encodeHandshakeRequest,
  encodeMsgpack,
  encodeNotification,
  sealHandshake,
} from "../../../../packages/protocol/src/index.js";
import { bytes, type FuzzTarget } from "../target.js";

/** Separates the frames of a message in an input. */
const SEPARATOR = Uint8Array.of(0xff, 0x00, 0xff, 0x01);

function joinFrames(frames: readonly Uint8Array[]): Uint8Array {
  return Buffer.concat(
    frames.flatMap((frame, index) => (index === 0 ? [frame] : [SEPARATOR, frame])),
  );
}

function framesOf(input: Uint8Array): Uint8Array[] {
  const buffer = Buffer.from(input.buffer, input.byteOffset, input.byteLength);
  const frames: Uint8Array[] = [];
  for (let from = 0; ; ) {
    const at = buffer.indexOf(SEPARATOR, from);
    frames.push(buffer.subarray(from, at === -1 ? buffer.length : at));
    if (at === -1) return frames;
    from = at + SEPARATOR.length;
  }
}

const RANK = { ppRank: 0, tpRank: 0 };
const metadata = encodeMsgpack({
  engine_id: "engine",
  agent_metadata: Uint8Array.of(1, 2, 3),
  kv_caches_base_addr: [4096, 8192],
  device_id: 0,
  num_blocks: 16,
  block_lens: [64, 64],
  block_strides: [64, 64],
  kv_cache_layout: "HND",
  block_size: 16,
  ssm_sizes: [0, 0],
  attn_backend_name: "FLASH_ATTN",
  physical_blocks_per_logical_kv_block: 1,
  region_num_blocks: [16, 16],
  region_group_ids: [0, -1],
  region_names: ["layer.0", "layer.1"],
  region_mem_types: ["DRAM", "VRAM"],
  dcp_size: 1,
  pcp_size: 1,
  ple_block_len: null,
  region_members: [["a"], ["b"]],
  packed_member_layouts: { a: [0, 64] },
});
const payload = encodeHandshakePayload({
  compatibilityHash: "ab".repeat(32),
  agentMetadataBytes: metadata,
  extension: { version: 1, features: ["x"] },
  rest: {},
});
const registration = {
  request_id: "cmpl-a-0-00000000",
  decode_engine_id: "d",
  decode_host: "127.0.0.1",
  decode_port: 5600,
  decode_tp_size: 2,
  local_block_ids: [[1, 2, 3]],
  remote_engine_id: "p",
  remote_host: "::1",
  remote_port: 5601,
  remote_tp_size: 1,
  remote_pp_size: 1,
};

/**
 * Calls readers one after another; the error of one does not hide the others. The first error is
 * thrown.
 */
function readAll(...readers: (() => void)[]): void {
  const errors = readers.flatMap((read) => {
    try {
      read();
      return [];
    } catch (error) {
      return [error];
    }
  });
  // Anything that is no KvError is the finding.
  const [first] = [
    ...errors.filter((error) => (error as { code?: unknown }).code === undefined),
    ...errors,
  ];
  if (first !== undefined) throw first;
}

/** Requests and replies of the side channel. */
export const handshake: FuzzTarget = {
  seeds: [
    encodeHandshakeRequest(RANK),
    joinFrames(encodeHandshakeReply(payload, 12.5)),
    joinFrames(encodeHandshakeReply(sealHandshake(payload, RANK), 1)),
    encodeHandshakeRefusal("a reason"),
    metadata,
  ],
  words: [
    "get_meta_msg",
    "compatibility_hash",
    "agent_metadata_bytes",
    "kv_extension",
    "sha256",
    "hmac",
  ],
  read(input) {
    const frames = framesOf(input);
    readAll(
      () => decodeHandshakeRequest(frames),
      () => decodeHandshakeRefusal(frames),
      () => decodeAgentMetadata(input),
      () => {
        const { payload } = decodeHandshakeReply(frames);
        readAll(
          () => decodeAgentMetadata(payload.agentMetadataBytes),
          () => checkHandshakeSeal(payload, RANK),
        );
      },
    );
  },
};

/** Notifications of agents. */
export const notifications: FuzzTarget = {
  seeds: [
    bytes("cmpl-a-0-00000000:2"),
    bytes("HB:cmpl-a-0,cmpl-b-0,,"),
    encodeNotification({ kind: "push-registration", registration }),
    encodeNotification({
      kind: "push-registration",
      registration: {
        ...registration,
        kv_peer: { incarnation: "i", generation: 1, num_tokens: 40 },
      },
    }),
    encodeNotification({ kind: "extension", message: { type: "push_withdraw", ...registration } }),
    encodeNotification({
      kind: "extension",
      message: {
        type: "push_ended",
        request_id: "a",
        incarnation: "i",
        generation: 3,
        code: "KV_INTERNAL",
      },
    }),
  ],
  words: [
    "HB:",
    "PUSH_REG:",
    "KV1:",
    "kv_peer",
    "local_block_ids",
    "request_id",
    "generation",
    "type",
  ],
  read(input) {
    const notification = decodeNotification(input);
    if (notification.kind === "push-registration") decodeRegistration(notification.registration);
    if (notification.kind === "extension") decodePushControl(notification.message);
  },
};

/** The question whether P holds a request's blocks, and its answer. */
export const leaseQuery: FuzzTarget = {
  seeds: [
    encodeMsgpack({ kv: "lease_check", engine_id: "p", request_id: "cmpl-a-0", generation: 3 }),
    encodeMsgpack({ kv: "lease_check", incarnation: "i", held: true }),
  ],
  words: ["lease_check", "engine_id", "request_id", "generation", "incarnation", "held", "kv"],
  read(input) {
    const frames = framesOf(input);
    decodeLeaseQuery(frames);
    decodeLeaseReply(frames);
  },
};

const hash = Uint8Array.of(1, 2, 3, 4);
/** Batches of an instance's KV events. */
export const kvEvents: FuzzTarget = {
  seeds: [
    encodeMsgpack([
      1.5,
      [
        {
          type: "BlockStored",
          block_hashes: [hash, 12345678901],
          parent_block_hash: null,
          token_ids: [1, 2, 3, 4],
          block_size: 2,
          lora_name: null,
          extra_keys: [null],
          group_idx: 0,
        },
        { type: "BlockRemoved", block_hashes: [hash], group_idx: null },
        { type: "AllBlocksCleared" },
        { type: "Later", value: 1 },
      ],
      0,
    ]),
  ],
  words: [
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "block_hashes",
    "extra_keys",
    "token_ids",
  ],
  read: (input) => void [...readKvEventBatch(input)],
};
