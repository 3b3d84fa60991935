import { KvError, type SideChannel } from "@kv/interface";
import { decodeMsgpack, encodeMsgpack, type MsgpackLimits } from "./wire/msgpack.js";

/**
 * "Have you kept the blocks of this request until now?" An extension between our own peers, asked over the side channel after a
 * READ and before its bytes are used. The scheduler side of the producer answers from what it holds: it stops holding a request
 * in the turn in which its blocks go back to the engine, so that "held" means that the READ saw no other request's bytes.
 * It is asked only of a peer whose handshake told an incarnation; vLLM's listener would die of it.
 */
export interface LeaseQuestion {
  readonly engineId: string;
  /** The producer's name of the request. */
  readonly requestId: string;
  /** Which use of that name, where the reader was told. */
  readonly generation: number | undefined;
}

export interface LeaseAnswer {
  /** The process that answers. */
  readonly incarnation: string;
  readonly held: boolean;
}

const KIND = "lease_check";
const LIMITS: MsgpackLimits = { maxBytes: 4096, maxDepth: 1, maxItems: 8 };
const MAX_ID_LENGTH = 1024;

export function encodeLeaseQuestion({ engineId, requestId, generation }: LeaseQuestion): Uint8Array {
  return encodeMsgpack({
    kv: KIND,
    engine_id: engineId,
    request_id: requestId,
    ...(generation === undefined ? {} : { generation }),
  });
}

/** Undefined for anything that is not a well-formed question: the side channel carries other requests, and strangers' bytes. */
export function decodeLeaseQuestion(frames: readonly Uint8Array[]): LeaseQuestion | undefined {
  const map = decodeMap(frames);
  if (map === undefined || !isId(map.engine_id) || !isId(map.request_id)) return undefined;
  const { generation } = map;
  if (generation !== undefined && !Number.isSafeInteger(generation)) return undefined;
  return {
    engineId: map.engine_id,
    requestId: map.request_id,
    generation: generation as number | undefined,
  };
}

export function encodeLeaseAnswer({ incarnation, held }: LeaseAnswer): Uint8Array {
  return encodeMsgpack({ kv: KIND, incarnation, held });
}

export function decodeLeaseAnswer(frames: readonly Uint8Array[]): LeaseAnswer | undefined {
  const map = decodeMap(frames);
  if (map === undefined || !isId(map.incarnation) || typeof map.held !== "boolean") return undefined;
  return { incarnation: map.incarnation, held: map.held };
}

export interface AskLeaseOptions {
  readonly sideChannel: SideChannel;
  readonly host: string;
  readonly port: number;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal;
}

/** Asks, and once more when the first question or its answer got lost. Errors: the side channel's; `KV_WIRE_MALFORMED`. */
export async function askLease(question: LeaseQuestion, options: AskLeaseOptions): Promise<LeaseAnswer> {
  const { sideChannel, host, port, timeoutMs, signal } = options;
  for (let again = false; ; again = true) {
    try {
      const { frames } = await sideChannel.request({
        host,
        port,
        frames: [encodeLeaseQuestion(question)],
        timeoutMs,
        ...(signal === undefined ? {} : { signal }),
      });
      const answer = decodeLeaseAnswer(frames);
      if (answer !== undefined) return answer;
      throw new KvError(
        "KV_WIRE_MALFORMED",
        `engine ${question.engineId} at ${host}:${port} answered a lease question with ${frames.length} frames that are none`,
      );
    } catch (error) {
      if (again || signal?.aborted) throw error;
    }
  }
}

function decodeMap(frames: readonly Uint8Array[]): Record<string, unknown> | undefined {
  const [frame] = frames;
  if (frames.length !== 1 || frame === undefined) return undefined;
  try {
    const value = decodeMsgpack(frame, "lease check", LIMITS);
    if (typeof value !== "object" || value === null) return undefined;
    const map = value as Record<string, unknown>;
    return map.kv === KIND ? map : undefined;
  } catch {
    return undefined;
  }
}

function isId(value: unknown): value is string {
  return typeof value === "string" && value.length > 0 && value.length <= MAX_ID_LENGTH;
}
