import type { IncomingMessage } from "node:http";
import type { YieldingQueue } from "@kv/interface";
import { KvError } from "@kv/interface";
import { overloaded, refusedRequest, shortened } from "../answers/client-error.js";
import { AT_ONCE_BYTES } from "../json/json-pieces.js";
import { type JsonLimits, JsonScan } from "../json/json-reader.js";

export interface BodyLimits extends JsonLimits {
  readonly bodyLengthBytes: number;
}

export interface BodyQueues {
  /** Node reads at most 64 KiB at once. */
  readonly reads: YieldingQueue;
  readonly parses: YieldingQueue;
}

export interface ReadBodyOptions {
  readonly limits: BodyLimits;
  readonly anyContentType?: true | undefined;
  readonly budget: BodyBudget;
  readonly queues: BodyQueues;
  /** The client that limits count. */
  readonly client: string;
  readonly onAccepted?: (() => void) | undefined;
}

/** A whole body and its share of the memory. */
export type ReceivedBody = Pick<IncomingBody, "take" | "share">;

/** One body while it arrives, within its limits and the memory for all. */
export class IncomingBody {
  /** The reader ends it with the request. */
  readonly share: BodyShare;
  readonly #limits: BodyLimits;
  readonly #scan: JsonScan;
  readonly #bytes: ByteCollector;
  #lengthBytes = 0;

  /**
   * `refuse` is called to make room for others.
   * @throws `KV_REQUEST_INVALID` (413) when `content-length` is above the limit.
   */
  constructor(
    { limits, budget, client }: Pick<ReadBodyOptions, "limits" | "budget" | "client">,
    contentLength: string | undefined,
    refuse: (error: KvError) => void,
  ) {
    const expectedBytes = Number(contentLength ?? 0);
    if (expectedBytes > limits.bodyLengthBytes) throw tooLarge(limits.bodyLengthBytes);
    this.#bytes = new ByteCollector(expectedBytes);
    this.#limits = limits;
    this.#scan = new JsonScan(limits);
    this.share = budget.open(client, refuse);
  }

  get lengthBytes(): number {
    return this.#lengthBytes;
  }

  /**
   * @throws `KV_REQUEST_INVALID` above a limit, with 413 for too many bytes; `KV_PROXY_OVERLOADED`
   * without memory.
   */
  push(chunk: Buffer): void {
    const { bodyLengthBytes: limitBytes } = this.#limits;
    const leftBytes = limitBytes - this.#lengthBytes;
    this.#lengthBytes += chunk.length;
    // The error must not depend on the chunks.
    this.#scan.push(chunk.length > leftBytes ? chunk.subarray(0, leftBytes) : chunk);
    if (chunk.length > leftBytes) throw tooLarge(limitBytes);
    this.share.add(chunk.length);
    this.#bytes.push(chunk);
  }

  /** Also forgets the bytes, so that they do not stay beside their parsed value. */
  take(): Buffer {
    return this.#bytes.take();
  }
}

/**
 * Reads a JSON body. After an error the connection cannot be used again.
 * @throws `KV_REQUEST_INVALID` (413, 415, or JSON above the limits); `KV_PROXY_OVERLOADED` without
 * memory; `KV_REQUEST_ABORTED` when the client disconnects.
 */
export function readJsonBody(
  request: IncomingMessage,
  options: ReadBodyOptions,
): Promise<ReceivedBody> {
  const { anyContentType, queues, onAccepted } = options;
  const type = request.headers["content-type"];
  return new Promise((resolve, reject) => {
    if (anyContentType !== true && !/^application\/json\s*(;|$)/i.test(type ?? ""))
      throw refusedRequest(
        415,
        `the body is of ${type === undefined ? "no content type" : `the content type ${shortened(type)}`}, not JSON`,
        "send content-type: application/json",
      );
    const coding = request.headers["content-encoding"];
    if (coding !== undefined && coding.toLowerCase() !== "identity")
      throw refusedRequest(
        415,
        `the body is in the content-encoding ${shortened(coding)}, not JSON`,
        "send the body as it is",
      );
    let complete = false;
    let refused = false;
    const refuse = (error: unknown) => {
      if (complete) return;
      refused = true;
      request.removeAllListeners("data");
      body.take();
      body.share.end();
      reject(error);
    };
    const body = new IncomingBody(options, request.headers["content-length"], refuse);
    onAccepted?.();
    request.on("data", (chunk: Buffer) => {
      try {
        body.push(chunk);
        if (body.lengthBytes > AT_ONCE_BYTES) {
          request.pause();
          queues.reads.push(() => {
            if (!refused) request.resume();
          });
        }
      } catch (error) {
        refuse(error);
      }
    });
    request.once("end", () => {
      complete = true;
      body.share.arrived();
      if (body.lengthBytes > AT_ONCE_BYTES) queues.parses.push(() => resolve(body));
      else resolve(body);
    });
    request.once("error", (cause) => {
      refuse(
        new KvError("KV_REQUEST_ABORTED", "the client disconnected while it sent its request", {
          cause,
        }),
      );
    });
  });
}

function tooLarge(limitBytes: number): KvError {
  const message = `the body is larger than ${limitBytes} bytes`;
  return refusedRequest(413, message, "send less at once", { limit: "limits.bodyLengthBytes" });
}

/** Read at each use, so that they may change. */
export interface BodiesBytes {
  readonly bodiesLengthBytes: number;
  readonly bodiesPerClientLengthBytes: number;
}

/** Short requests are served while long ones wait for memory. */
const UNCOUNTED_BYTES = 16 * 1024;

/**
 * The memory for clients' bodies, until their answers. When it is used up, the largest arriving
 * body is refused, so clients with large slow bodies are refused first.
 */
export class BodyBudget {
  readonly #arriving = new Set<BodyShare>();
  readonly #byClient = new Map<string, number>();
  #heldBytes = 0;

  constructor(private readonly limits: BodiesBytes) {}

  /** The caller ends the share. `refuse` is called to make room for others. */
  open(client: string, refuse: (error: KvError) => void): BodyShare {
    return new BodyShare(this, client, refuse);
  }

  /** @throws `KV_PROXY_OVERLOADED`; with 413 when waiting would not help. */
  take(share: BodyShare, more: number): void {
    const { bodiesLengthBytes: allBytes, bodiesPerClientLengthBytes: perClientBytes } = this.limits;
    if (share.heldBytes + more > Math.min(allBytes, perClientBytes))
      throw neverFits(share, more, this.limits);
    const heldByClient = () => this.#byClient.get(share.client) ?? 0;
    while (heldByClient() + more > perClientBytes) this.#makeRoom(share, more, true);
    while (this.#heldBytes + more > allBytes) this.#makeRoom(share, more, false);
    this.#heldBytes += more;
    this.#byClient.set(share.client, heldByClient() + more);
    if (share.arriving) this.#arriving.add(share);
  }

  give(share: BodyShare): void {
    this.#arriving.delete(share);
    this.#heldBytes -= share.heldBytes;
    const left = (this.#byClient.get(share.client) ?? 0) - share.heldBytes;
    if (left > 0) this.#byClient.set(share.client, left);
    else this.#byClient.delete(share.client);
  }

  arrived(share: BodyShare): void {
    this.#arriving.delete(share);
  }

  #makeRoom(share: BodyShare, more: number, ofClient: boolean): void {
    let largest = share;
    let largestBytes = share.heldBytes + more;
    for (const other of this.#arriving) {
      if (other === share || (ofClient && other.client !== share.client)) continue;
      if (other.heldBytes <= largestBytes) continue;
      largest = other;
      largestBytes = other.heldBytes;
    }
    const error = full(this.limits, ofClient);
    if (largest === share) throw error;
    largest.end();
    largest.refuse(error);
  }
}

/** One request's part of the budget. */
export class BodyShare {
  #lengthBytes = 0;
  heldBytes = 0;
  arriving = true;
  #ended = false;

  constructor(
    private readonly budget: BodyBudget,
    readonly client: string,
    readonly refuse: (error: KvError) => void,
  ) {}

  /**
   * Counts bytes that have arrived, or copies of them.
   * @throws `KV_PROXY_OVERLOADED`.
   */
  add(lengthBytes: number): void {
    if (this.#ended) return;
    this.#lengthBytes += lengthBytes;
    const more = Math.max(0, this.#lengthBytes - UNCOUNTED_BYTES) - this.heldBytes;
    if (more === 0) return;
    this.budget.take(this, more);
    this.heldBytes += more;
  }

  arrived(): void {
    this.arriving = false;
    this.budget.arrived(this);
  }

  end(): void {
    if (this.#ended) return;
    this.#ended = true;
    this.budget.give(this);
    this.heldBytes = 0;
  }
}

function full(
  { bodiesLengthBytes, bodiesPerClientLengthBytes }: BodiesBytes,
  byClient: boolean,
): KvError {
  return overloaded({
    limit: byClient ? "limits.bodiesPerClientLengthBytes" : "limits.bodiesLengthBytes",
    message: byClient
      ? `the bodies of this client are larger than ${bodiesPerClientLengthBytes} bytes together`
      : `the bodies of all requests are larger than ${bodiesLengthBytes} bytes together`,
    byClient,
  });
}

function neverFits(
  share: BodyShare,
  more: number,
  { bodiesLengthBytes: allBytes, bodiesPerClientLengthBytes: perClientBytes }: BodiesBytes,
): KvError {
  const limit =
    perClientBytes <= allBytes ? "limits.bodiesPerClientLengthBytes" : "limits.bodiesLengthBytes";
  const message =
    `the request needs ${share.heldBytes + more} bytes with all its prompts and copies; ` +
    `the limit is ${Math.min(allBytes, perClientBytes)}`;
  const hint = `send fewer copies in one request, or raise ${limit}`;
  return refusedRequest(413, message, hint, { limit });
}

const FIRST_BYTES = 64 * 1024;
const NOTHING = Buffer.alloc(0);

/** Collects a body's chunks. Many small ones take no more memory than a large one. */
export class ByteCollector {
  #bytes: Buffer = NOTHING;
  #length = 0;

  /** `expectedLength` saves copies, but reserves no memory for bytes that may not come. */
  constructor(private readonly expectedLength = 0) {}

  push(chunk: Buffer): void {
    const length = this.#length + chunk.length;
    // Most bodies are one chunk, which is not copied.
    if (this.#length === 0) this.#bytes = chunk;
    else {
      if (length > this.#bytes.length) this.#grow(length);
      chunk.copy(this.#bytes, this.#length);
    }
    this.#length = length;
  }

  get length(): number {
    return this.#length;
  }

  /** Returns the bytes and forgets them. */
  take(): Buffer {
    const bytes = this.#bytes.subarray(0, this.#length);
    this.#bytes = NOTHING;
    this.#length = 0;
    return bytes;
  }

  #grow(length: number): void {
    const isExpected = length <= this.expectedLength;
    const wanted = isExpected ? Math.min(this.expectedLength, 4 * length) : 2 * length;
    const grown = Buffer.allocUnsafeSlow(Math.max(FIRST_BYTES, wanted));
    this.#bytes.copy(grown, 0, 0, this.#length);
    this.#bytes = grown;
  }
}
