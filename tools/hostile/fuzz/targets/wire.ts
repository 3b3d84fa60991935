import { readFileSync } from "node:fs";
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
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  encodeMsgpack,
  encodeNotification,
  type KvNotification,
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

const recorded = (name: string) =>
  readFileSync(new URL(`../../../../packages/protocol/fixtures/wire/${name}`, import.meta.url));
const notified = (name: string) =>
  Buffer.from(
    /"hex": "([0-9a-f]+)"/.exec(recorded(`${name}.notifs.jsonl`).toString())?.[1] ?? "",
    "hex",
  );

const RANK = { ppRank: 0, tpRank: 0 };
const frame = (name: string) => recorded(`handshake/v33_pull_p1.pp0tp0.${name}.bin`);
const reply = [frame("rep0"), frame("rep1")] as const;
const pushed = notified("push_p1d1");
const registration = (
  decodeNotification(pushed) as Extract<KvNotification, { kind: "push-registration" }>
).registration;

/** The error of one reader does not hide the others. */
function readAll(...readers: (() => void)[]) {
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

export const handshake: FuzzTarget = {
  seeds: [
    frame("req"),
    joinFrames(reply),
    joinFrames(encodeHandshakeReply(sealHandshake(reply[0], RANK), 1)),
    encodeHandshakeRefusal("a reason"),
    decodeHandshakeReply(reply).payload.agentMetadataBytes,
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

export const notifications: FuzzTarget = {
  seeds: [
    bytes("cmpl-a-0-00000000:2"),
    bytes("HB:cmpl-a-0,cmpl-b-0,,"),
    pushed,
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
  read(input) {
    const notification = decodeNotification(input);
    if (notification.kind === "push-registration") decodeRegistration(notification.registration);
    if (notification.kind === "extension") decodePushControl(notification.message);
  },
};

export const leaseQuery: FuzzTarget = {
  seeds: [
    encodeMsgpack({ kv: "lease_check", engine_id: "p", request_id: "cmpl-a-0", generation: 3 }),
    encodeMsgpack({ kv: "lease_check", incarnation: "i", held: true }),
  ],
  read(input) {
    const frames = framesOf(input);
    decodeLeaseQuery(frames);
    decodeLeaseReply(frames);
  },
};

const hash = Uint8Array.of(1, 2, 3, 4);
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
  read: (input) => void [...readKvEventBatch(input)],
};
