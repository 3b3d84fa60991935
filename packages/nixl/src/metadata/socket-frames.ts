import { KvError } from "@kv/interface";

/** A message of NIXL's metadata sockets (NIXL 1.5.0: `nixlP2PMetadataBackend`). */
export type MetadataMessage =
  /** The sender's metadata. */
  | { readonly kind: "LOAD"; readonly metadata: Uint8Array }
  /** The receiver answers with `LOAD`. */
  | { readonly kind: "SEND" }
  /** The agent of this name is not to be used any more. */
  | { readonly kind: "INVL"; readonly name: string };

const MARK = "NIXLCOMM:";
const KIND_BYTES = 4;
const LENGTH_BYTES = 8;
/** The most bytes of a frame. Metadata has some 100 bytes for each registration. */
export const MAX_FRAME_BYTES = 16_777_216;

/**
 * A frame: the length in 8 bytes, little-endian; `NIXLCOMM:`; the kind in 4 bytes; metadata or a
 * name.
 */
export function encodeMessage(message: MetadataMessage): Buffer {
  const body =
    message.kind === "LOAD"
      ? message.metadata
      : Buffer.from(message.kind === "INVL" ? message.name : "");
  const head = Buffer.from(`${MARK}${message.kind}`);
  const frame = Buffer.alloc(LENGTH_BYTES + head.length + body.length);
  frame.writeBigUInt64LE(BigInt(head.length + body.length));
  head.copy(frame, LENGTH_BYTES);
  frame.set(body, LENGTH_BYTES + head.length);
  return frame;
}

/** Decodes the frames of one connection. */
export class FrameReader {
  #parts: Buffer[] = [];
  #bytes = 0;
  /** The length of the frame that is being read; undefined before its first 8 bytes. */
  #expected: number | undefined;
  readonly #maxBytes: number;

  /** `maxBytes`: the limit of a frame. */
  constructor(maxBytes: number = MAX_FRAME_BYTES) {
    this.#maxBytes = maxBytes;
  }

  /** Whether a frame has begun and is not complete. */
  get incomplete(): boolean {
    return this.#bytes > 0 || this.#expected !== undefined;
  }

  /**
   * The messages that are complete with this chunk. Throws `KV_WIRE_LIMIT_EXCEEDED` and
   * `KV_WIRE_MALFORMED`.
   */
  read(chunk: Buffer): MetadataMessage[] {
    this.#parts.push(chunk);
    this.#bytes += chunk.length;
    const messages: MetadataMessage[] = [];
    for (;;) {
      if (this.#expected === undefined) {
        if (this.#bytes < LENGTH_BYTES) return messages;
        const length = this.#take(LENGTH_BYTES).readBigUInt64LE();
        if (length > BigInt(this.#maxBytes)) {
          throw new KvError(
            "KV_WIRE_LIMIT_EXCEEDED",
            `a metadata frame of ${length} bytes exceeds ${this.#maxBytes}`,
          );
        }
        this.#expected = Number(length);
      }
      if (this.#bytes < this.#expected) return messages;
      const body = this.#take(this.#expected);
      this.#expected = undefined;
      messages.push(messageOf(body));
    }
  }

  #take(length: number): Buffer {
    const all = this.#parts.length === 1 ? (this.#parts[0] as Buffer) : Buffer.concat(this.#parts);
    this.#parts = all.length > length ? [all.subarray(length)] : [];
    this.#bytes -= length;
    return all.subarray(0, length);
  }
}

function messageOf(body: Buffer): MetadataMessage {
  const mark = body.subarray(0, MARK.length).toString("latin1");
  const kind = body.subarray(MARK.length, MARK.length + KIND_BYTES).toString("latin1");
  const rest = body.subarray(MARK.length + KIND_BYTES);
  if (mark === MARK && kind === "LOAD") return { kind, metadata: new Uint8Array(rest) };
  if (mark === MARK && kind === "SEND" && rest.length === 0) return { kind };
  if (mark === MARK && kind === "INVL") return { kind, name: rest.toString("utf8") };
  throw new KvError(
    "KV_WIRE_MALFORMED",
    `a metadata frame of ${body.length} bytes is none of NIXL's messages`,
  );
}
