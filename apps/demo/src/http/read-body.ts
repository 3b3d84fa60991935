import type { IncomingMessage } from "node:http";
import { ByteCollector } from "@kv/http";
import { Turns } from "@kv/interface";
import { httpError } from "./error-response.js";
import type { HttpLimits } from "./limits.js";

type BodyLimits = Pick<
  HttpLimits,
  "maxBodyBytes" | "maxBodiesBytes" | "maxBodiesBytesPerAddress" | "maxBodyDepth" | "maxBodyMembers"
>;

/** A body of at most this many bytes is read and parsed at once; a larger one in turns with the others. */
const AT_ONCE_BYTES = 64 * 1024;
/** Node reads pieces of at most 64 KiB. */
const PIECES = new Turns(4);
const PARSES = new Turns(1);

/** A body that is being read. */
interface PendingBody {
  bytes: number;
  readonly refuse: (error: Error) => void;
}

/** Reads the JSON bodies of requests. All of them together take a bounded number of bytes. */
export class BodyReader {
  readonly #limits: BodyLimits;
  /** Oldest first. */
  readonly #pending = new Set<PendingBody>();
  #bytes = 0;
  /** By remote address, the bytes that the bodies of `#pending` have or declare. */
  readonly #ofAddress = new Map<string, number>();

  constructor(limits: BodyLimits) {
    this.#limits = limits;
  }

  /**
   * Reads and parses a body. Errors, each with its status: 413 for a body that is too large, 503 for one that was read longest when
   * the memory for bodies was full or that is above the share of its address, 400 for anything that is not JSON within the limits.
   */
  async read(request: IncomingMessage): Promise<unknown> {
    const bytes = await this.#bytesOf(request);
    if (bytes.length > AT_ONCE_BYTES) await new Promise<void>((resolve) => PARSES.later(resolve));
    const text = decodeUtf8(bytes);
    checkShape(text, this.#limits);
    try {
      return JSON.parse(text);
    } catch {
      // The parser's message contains text of the body.
      throw httpError(400, `the body of ${bytes.length} bytes is not JSON`);
    }
  }

  #bytesOf(request: IncomingMessage): Promise<Buffer> {
    const { maxBodyBytes, maxBodiesBytes, maxBodiesBytesPerAddress } = this.#limits;
    const address = request.socket.remoteAddress ?? "";
    const declaredBytes = Number(request.headers["content-length"] ?? 0);
    const tooLarge = () => httpError(413, `the body is larger than the limit of ${maxBodyBytes} bytes`);
    const tooMany = () =>
      httpError(
        503,
        `the bodies of this address take more than ${maxBodiesBytesPerAddress} bytes, its limit`,
      );
    return new Promise((resolve, reject) => {
      const bytes = new ByteCollector();
      const body: PendingBody = { bytes: 0, refuse: (error) => end(() => reject(error)) };
      const end = (settle: () => void) => {
        if (!this.#pending.delete(body)) return;
        this.#bytes -= body.bytes;
        this.#count(address, -Math.max(declaredBytes, body.bytes));
        request.off("data", onData);
        settle();
        // Of a refused body, the request may live longer than its bytes are wanted.
        bytes.take();
      };
      const onData = (chunk: Buffer) => {
        const undeclared = Math.max(0, body.bytes + chunk.length - Math.max(declaredBytes, body.bytes));
        body.bytes += chunk.length;
        this.#bytes += chunk.length;
        const ofAddress = this.#count(address, undeclared);
        if (body.bytes > maxBodyBytes) return end(() => reject(tooLarge()));
        if (undeclared > 0 && ofAddress > maxBodiesBytesPerAddress) return end(() => reject(tooMany()));
        bytes.push(chunk);
        for (const oldest of this.#pending) {
          if (this.#bytes <= maxBodiesBytes) break;
          oldest.refuse(httpError(503, "the memory for request bodies is full", undefined));
        }
        if (body.bytes > AT_ONCE_BYTES) {
          request.pause();
          PIECES.later(() => request.resume());
        }
      };
      this.#pending.add(body);
      const ofAddress = this.#count(address, declaredBytes);
      if (declaredBytes > maxBodyBytes) return end(() => reject(tooLarge()));
      if (ofAddress > maxBodiesBytesPerAddress) return end(() => reject(tooMany()));
      request.on("data", onData);
      request.once("end", () => end(() => resolve(bytes.take())));
      request.once("error", (error) => end(() => reject(error)));
      request.once("close", () => end(() => reject(httpError(400, "the client closed the connection"))));
    });
  }

  /** Counts `more` bytes for an address. Returns how many it has. */
  #count(address: string, more: number): number {
    const bytes = (this.#ofAddress.get(address) ?? 0) + more;
    if (bytes > 0) this.#ofAddress.set(address, bytes);
    else this.#ofAddress.delete(address);
    return bytes;
  }
}

const utf8 = new TextDecoder("utf-8", { fatal: true });

function decodeUtf8(bytes: Buffer): string {
  try {
    return utf8.decode(bytes);
  } catch {
    throw httpError(400, `the body of ${bytes.length} bytes is not UTF-8`);
  }
}

/** Counts nesting and object members before the body is parsed: a few MB of small objects stall the parser for seconds. */
function checkShape(text: string, { maxBodyDepth, maxBodyMembers }: BodyLimits): void {
  let depth = 0;
  let members = 0;
  for (let at = 0; at < text.length; at += 1) {
    const code = text.charCodeAt(at);
    if (code === 0x22) at = endOfString(text, at);
    else if (code === 0x5b || code === 0x7b) {
      depth += 1;
      if (depth > maxBodyDepth) throw httpError(400, `the body is nested deeper than ${maxBodyDepth} levels`);
      // Each array or object is an allocation, as a member is.
      members += 1;
    } else if (code === 0x5d || code === 0x7d) depth -= 1;
    else if (code === 0x3a) members += 1;
    if (members > maxBodyMembers)
      throw httpError(400, `the body has more than ${maxBodyMembers} object members, objects and arrays`);
  }
}

/** Position of the quote that closes a string. */
function endOfString(text: string, quote: number): number {
  let close = text.indexOf('"', quote + 1);
  while (close !== -1) {
    let slashes = 0;
    while (text.charCodeAt(close - 1 - slashes) === 0x5c) slashes += 1;
    if (slashes % 2 === 0) return close;
    close = text.indexOf('"', close + 1);
  }
  return text.length;
}
