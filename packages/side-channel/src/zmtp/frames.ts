import { malformed } from "./handshake.js";

// A ZMTP 3 frame: flags, a size of one or eight bytes, the body.
const MORE = 0x01;
const LONG = 0x02;
const COMMAND = 0x04;
const RESERVED = ~(MORE | LONG | COMMAND);

export interface ZmtpFrame {
  readonly more: boolean;
  /** A command, not a part of a message. */
  readonly command: boolean;
  readonly body: Uint8Array;
}

export type ZmtpFrameHeader = Omit<ZmtpFrame, "body"> & { readonly sizeBytes: number };

/** Larger bodies are not copied into one chunk with their headers. */
const COPIED_BYTES = 16 * 1024;

/** In chunks to write in this order. */
export function encodeFrames(frames: readonly ZmtpFrame[]): Uint8Array[] {
  const chunks: Uint8Array[] = [];
  let together: Uint8Array[] = [];
  for (const { more, command, body } of frames) {
    const size = body.byteLength;
    const isLong = size > 255;
    const header = new Uint8Array(isLong ? 9 : 2);
    header[0] = (more ? MORE : 0) | (isLong ? LONG : 0) | (command ? COMMAND : 0);
    if (isLong) new DataView(header.buffer).setBigUint64(1, BigInt(size));
    else header[1] = size;
    together.push(header);
    if (size <= COPIED_BYTES) together.push(body);
    else {
      chunks.push(Buffer.concat(together), body);
      together = [];
    }
  }
  if (together.length > 0) chunks.push(Buffer.concat(together));
  return chunks;
}

/**
 * Cuts received bytes into frames, one per call, so that the caller limits the work. `admit` sees
 * each header and throws for a frame that is too large, before memory is allocated. A body within
 * one chunk is a view of it.
 */
export class FrameReader {
  readonly #admit: (header: ZmtpFrameHeader) => void;
  readonly #chunks: Uint8Array[] = [];
  #at = 0;
  readonly #header = new Uint8Array(9);
  #headerBytes = 0;
  #frame: ZmtpFrameHeader | undefined;
  /** A body in several chunks, and its arrived bytes. */
  #body: Uint8Array | undefined;
  #bodyBytes = 0;

  constructor(admit: (header: ZmtpFrameHeader) => void) {
    this.#admit = admit;
  }

  get partial(): boolean {
    return this.#headerBytes > 0;
  }

  get unread(): boolean {
    return this.#chunks.length > 0;
  }

  push(chunk: Uint8Array): void {
    if (chunk.byteLength > 0) this.#chunks.push(chunk);
  }

  /** Takes up to `count` bytes, such as the greeting's, without a frame. */
  take(count: number): Uint8Array | undefined {
    const chunk = this.#chunks[0];
    if (chunk === undefined) return undefined;
    const bytes = chunk.subarray(this.#at, this.#at + count);
    this.#advance(chunk, bytes.byteLength);
    return bytes;
  }

  /**
   * Undefined until more bytes come.
   *
   * @throws `KV_WIRE_MALFORMED`, and those of `admit`.
   */
  read(): ZmtpFrame | undefined {
    const frame = this.#frame ?? this.#readHeader();
    if (frame === undefined) return undefined;
    this.#frame = frame;
    const body = this.#readBody(frame.sizeBytes);
    if (body === undefined) return undefined;
    this.#frame = undefined;
    this.#body = undefined;
    this.#bodyBytes = 0;
    this.#headerBytes = 0;
    return { more: frame.more, command: frame.command, body };
  }

  #readHeader(): ZmtpFrameHeader | undefined {
    const header = this.#header;
    while (this.#headerBytes < this.#headerSize()) {
      const chunk = this.#chunks[0];
      if (chunk === undefined) return undefined;
      header[this.#headerBytes] = chunk[this.#at] ?? 0;
      this.#headerBytes += 1;
      this.#advance(chunk, 1);
      if (this.#headerBytes === 1) checkFlags(header[0] ?? 0);
    }
    const flags = header[0] ?? 0;
    // A size above 2^53 loses its last digits and is refused all the same.
    const sizeBytes =
      (flags & LONG) === 0 ? (header[1] ?? 0) : Number(new DataView(header.buffer).getBigUint64(1));
    const frame = { more: (flags & MORE) !== 0, command: (flags & COMMAND) !== 0, sizeBytes };
    this.#admit(frame);
    return frame;
  }

  #headerSize(): number {
    return this.#headerBytes > 0 && ((this.#header[0] ?? 0) & LONG) !== 0 ? 9 : 2;
  }

  #readBody(sizeBytes: number): Uint8Array | undefined {
    const first = this.#chunks[0];
    if (this.#body === undefined) {
      if (sizeBytes === 0) return new Uint8Array(0);
      if (first === undefined) return undefined;
      if (first.byteLength - this.#at >= sizeBytes) {
        const body = first.subarray(this.#at, this.#at + sizeBytes);
        this.#advance(first, sizeBytes);
        return body;
      }
      this.#body = new Uint8Array(sizeBytes);
    }
    const body = this.#body;
    while (this.#bodyBytes < sizeBytes) {
      const bytes = this.take(sizeBytes - this.#bodyBytes);
      if (bytes === undefined) return undefined;
      body.set(bytes, this.#bodyBytes);
      this.#bodyBytes += bytes.byteLength;
    }
    return body;
  }

  #advance(chunk: Uint8Array, count: number): void {
    this.#at += count;
    if (this.#at < chunk.byteLength) return;
    this.#chunks.shift();
    this.#at = 0;
  }
}

function checkFlags(flags: number): void {
  if ((flags & RESERVED) === 0 && (flags & (COMMAND | MORE)) !== (COMMAND | MORE)) return;
  throw malformed(`a frame has the flags 0x${flags.toString(16)}`);
}
