import type { IncomingMessage } from "node:http";
import { KvError } from "@kv/interface";
import { shortened } from "../answers/shown-value.js";
import type { BodyBudget, BodyShare } from "./body-budget.js";
import { ByteCollector } from "./byte-collector.js";
import { parseJsonPieces } from "./json-pieces.js";
import { type JsonLimits, JsonScan } from "./json-scan.js";
import type { YieldingQueue } from "./yielding-queue.js";

/** A body of at most this many bytes is read and parsed at once; a longer one in steps, between those of other bodies. */
const AT_ONCE_BYTES = 64 * 1024;

/** Limits of one body. */
export interface BodyLimits extends JsonLimits {
  readonly bodyLengthBytes: number;
}

/** Where long bodies wait. */
export interface BodyQueues {
  /** For their next bytes: Node reads at most 64 KiB at once. */
  readonly reads: YieldingQueue;
  /** To be parsed. */
  readonly parses: YieldingQueue;
}

export interface ReadBodyOptions {
  readonly limits: BodyLimits;
  /** Takes every content type. */
  readonly anyContentType?: true | undefined;
  readonly budget: BodyBudget;
  readonly queues: BodyQueues;
  /** The client, as limits per client count it. */
  readonly client: string;
  /** Called when the head is accepted, before the body is read. */
  readonly onAccepted?: (() => void) | undefined;
}

/** A body that has arrived. */
export interface ReceivedBody {
  /** Returns the bytes once and forgets them, so that they do not stay in memory beside what is parsed from them. */
  readonly take: () => Uint8Array;
  /** Its memory in the budget. The caller ends it, with the request. */
  readonly share: BodyShare;
}

/**
 * Reads a JSON body. Errors: `KV_REQUEST_INVALID` with the HTTP status 413 or 415, or for JSON above the limits; `KV_PROXY_OVERLOADED` without
 * memory for it. The rest of the body is then unread, so the connection cannot be used again. `KV_REQUEST_ABORTED` when the client
 * disconnects.
 */
export function readJsonBody(
  request: IncomingMessage,
  { limits, anyContentType, budget, queues, client, onAccepted }: ReadBodyOptions,
): Promise<ReceivedBody> {
  const { bodyLengthBytes: limitBytes } = limits;
  const type = request.headers["content-type"];
  if (anyContentType !== true && !/^application\/json\s*(;|$)/i.test(type ?? ""))
    return Promise.reject(wrongType(type));
  if (Number(request.headers["content-length"] ?? 0) > limitBytes)
    return Promise.reject(tooLarge(limitBytes));
  onAccepted?.();
  return new Promise((resolve, reject) => {
    const bytes = new ByteCollector();
    let lengthBytes = 0;
    let complete = false;
    let refused = false;
    const scan = new JsonScan(limits);
    const refuse = (error: unknown) => {
      if (complete) return;
      refused = true;
      request.removeAllListeners("data");
      bytes.take();
      share.end();
      reject(error);
    };
    const share = budget.open(client, refuse);
    request.on("data", (chunk: Buffer) => {
      const leftBytes = limitBytes - lengthBytes;
      lengthBytes += chunk.length;
      try {
        // The first byte above a limit decides, wherever the chunks end.
        scan.push(chunk.length > leftBytes ? chunk.subarray(0, leftBytes) : chunk);
        if (chunk.length > leftBytes) throw tooLarge(limitBytes);
        share.add(chunk.length);
        bytes.push(chunk);
        if (lengthBytes > AT_ONCE_BYTES) {
          request.pause();
          // The rest of a refused body stays unread.
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
      share.arrived();
      const take = () => bytes.take();
      if (lengthBytes > AT_ONCE_BYTES) queues.parses.push(() => resolve({ take, share }));
      else resolve({ take, share });
    });
    request.once("error", (cause) => {
      refuse(
        new KvError("KV_REQUEST_ABORTED", "the client disconnected while it sent its request", { cause }),
      );
    });
  });
}

/** The value of a body. Errors: `KV_REQUEST_INVALID`. */
export async function parseBody(body: ReceivedBody, parses: YieldingQueue): Promise<unknown> {
  const bytes = body.take();
  const pieces = parseJsonPieces(bytes);
  try {
    if (bytes.length > AT_ONCE_BYTES) return (await parses.run(pieces)).value;
    let step = pieces.next();
    while (step.done !== true) step = pieces.next();
    return step.value.value;
  } catch {
    throw new KvError("KV_REQUEST_INVALID", "the body is not JSON");
  }
}

function wrongType(type: string | undefined): KvError {
  const what = type === undefined ? "missing" : shortened(type);
  return new KvError("KV_REQUEST_INVALID", `the content type of the body is ${what}, not JSON`, {
    hint: "send content-type: application/json",
    details: { httpStatus: 415 },
  });
}

function tooLarge(limitBytes: number): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body is larger than ${limitBytes} bytes`, {
    hint: "send less at once",
    details: { httpStatus: 413, limit: "limits.bodyLengthBytes" },
  });
}
