import { isMap } from "../encoding/map-fields.js";
import { decodeMsgpack, encodeMsgpack, type MsgpackLimits } from "../encoding/msgpack.js";
import { isCapability } from "../transfer-params/capability.js";
import { isDigest } from "../transfer-params/prompt-digest.js";

/**
 * D's query to P's side channel after a READ, before the bytes are used: does P still hold the
 * blocks of this request? An extension between `@kv` peers. P stops holding a request in the same
 * turn in which its blocks go back to the engine, so `held` means that the READ saw no other
 * request's bytes. D asks only a peer whose handshake named an incarnation: vLLM's listener would
 * stop.
 */
export interface LeaseQuery {
  readonly engineId: string;
  /** P's id of the request, as in `remote_request_id`. */
  readonly requestId: string;
  /** The generation of the request's blocks; undefined when `kv_transfer_params` had none. */
  readonly generation: number | undefined;
  /**
   * The request's capability; undefined when `kv_transfer_params` had none. P then does not answer
   * that it holds the blocks.
   */
  readonly capability?: string | undefined;
  /**
   * The blocks and tokens that D has read, see `blocksDigest`; undefined when D only asks which
   * process answers.
   */
  readonly blocks?: string | undefined;
  /**
   * The prompt whose KV D wants; undefined when D's engine does not know its tokens. P then does
   * not answer that it holds the blocks.
   */
  readonly prompt?: PromptPrefix | undefined;
}

/** The start of a prompt. */
export interface PromptPrefix {
  readonly numTokens: number;
  /** Of these tokens, see `promptDigest`. */
  readonly digest: string;
}

/** P's answer to a `LeaseQuery`. */
export interface LeaseReply {
  /** Identifies the process that answers; another start of the same engine has another value. */
  readonly incarnation: string;
  /**
   * Whether P has kept the request's blocks without interruption, and they hold the KV of the
   * queried prompt.
   */
  readonly held: boolean;
  /**
   * The result of comparing the prompts; undefined when P did not get that far, or does not
   * compare.
   */
  readonly prompt?: "same" | "differs" | undefined;
  /** How often P has registered its KV cache; undefined for an older peer. */
  readonly registrationGeneration?: number | undefined;
}

const KIND = "lease_check";
const LIMITS: MsgpackLimits = { maxBytes: 4096, maxDepth: 2, maxItems: 16 };
const MAX_ID_LENGTH = 1024;

/** Encodes the query's one frame. */
export function encodeLeaseQuery(query: LeaseQuery): Uint8Array {
  const { engineId, requestId, generation, capability, blocks, prompt } = query;
  return encodeMsgpack({
    kv: KIND,
    engine_id: engineId,
    request_id: requestId,
    ...(generation === undefined ? {} : { generation }),
    ...(capability === undefined ? {} : { capability }),
    ...(blocks === undefined ? {} : { blocks }),
    ...(prompt === undefined
      ? {}
      : { prompt: { num_tokens: prompt.numTokens, digest: prompt.digest } }),
  });
}

/**
 * Undefined for anything but a well-formed query: the side channel also gets handshakes and
 * arbitrary bytes.
 */
export function decodeLeaseQuery(frames: readonly Uint8Array[]): LeaseQuery | undefined {
  const map = decodeMap(frames);
  if (map === undefined || !isId(map.engine_id) || !isId(map.request_id)) return undefined;
  const { generation, capability, blocks } = map;
  if (generation !== undefined && !Number.isSafeInteger(generation)) return undefined;
  if (capability !== undefined && !isCapability(capability)) return undefined;
  if (blocks !== undefined && !isDigest(blocks)) return undefined;
  const prompt = readPrompt(map.prompt);
  if (map.prompt !== undefined && prompt === undefined) return undefined;
  return {
    engineId: map.engine_id,
    requestId: map.request_id,
    generation: generation as number | undefined,
    ...(capability === undefined ? {} : { capability }),
    ...(blocks === undefined ? {} : { blocks }),
    ...(prompt === undefined ? {} : { prompt }),
  };
}

/** Encodes the reply's one frame. */
export function encodeLeaseReply({
  incarnation,
  held,
  prompt,
  registrationGeneration,
}: LeaseReply): Uint8Array {
  return encodeMsgpack({
    kv: KIND,
    incarnation,
    held,
    ...(prompt === undefined ? {} : { prompt }),
    ...(registrationGeneration === undefined
      ? {}
      : { registration_generation: registrationGeneration }),
  });
}

/** Undefined for anything but a well-formed reply. */
export function decodeLeaseReply(frames: readonly Uint8Array[]): LeaseReply | undefined {
  const map = decodeMap(frames);
  if (map === undefined || !isId(map.incarnation) || typeof map.held !== "boolean")
    return undefined;
  const { incarnation, held, prompt } = map;
  const registered = map.registration_generation;
  return {
    incarnation,
    held,
    ...(prompt === "same" || prompt === "differs" ? { prompt } : {}),
    ...(Number.isSafeInteger(registered) ? { registrationGeneration: Number(registered) } : {}),
  };
}

function decodeMap(frames: readonly Uint8Array[]): Readonly<Record<string, unknown>> | undefined {
  const [frame] = frames;
  if (frames.length !== 1 || frame === undefined) return undefined;
  try {
    const value = decodeMsgpack(frame, "lease query", LIMITS);
    return isMap(value) && value.kv === KIND ? value : undefined;
  } catch {
    return undefined;
  }
}

function readPrompt(value: unknown): PromptPrefix | undefined {
  if (!isMap(value)) return undefined;
  const { num_tokens: numTokens, digest } = value;
  if (typeof numTokens !== "number" || !Number.isSafeInteger(numTokens) || numTokens < 0)
    return undefined;
  return isDigest(digest) ? { numTokens, digest } : undefined;
}

function isId(value: unknown): value is string {
  return typeof value === "string" && value.length > 0 && value.length <= MAX_ID_LENGTH;
}
