import { decodeMsgpack, encodeMsgpack, isMap, type MsgpackLimits } from "../encoding/messages.js";
import { isCapability, isDigest } from "../transfer-params/transfer-params.js";

/**
 * D asks P after a READ, before it uses the bytes, whether P still holds the blocks. P ends a hold
 * in the turn in which the engine gets them back, so `held` means that the READ saw no other
 * request's bytes. Only for peers whose handshake named an incarnation: vLLM's listener would stop
 * for good.
 */
export interface LeaseQuery {
  readonly engineId: string;
  /** P's `remote_request_id`. */
  readonly requestId: string;
  /** Undefined when `kv_transfer_params` had none. */
  readonly generation: number | undefined;
  /** Undefined when `kv_transfer_params` had none; P then does not confirm. */
  readonly capability?: string | undefined;
  /** `blocksDigest` of what D has read; undefined when D only asks which process answers. */
  readonly blocks?: string | undefined;
  /**
   * The prompt whose KV D wants. Undefined when D's engine does not know its tokens; P then does
   * not confirm.
   */
  readonly prompt?: PromptPrefix | undefined;
}

/** The start of a prompt. */
export interface PromptPrefix {
  readonly numTokens: number;
  /** `promptDigest` of these tokens. */
  readonly digest: string;
}

/** P's answer to a `LeaseQuery`. */
export interface LeaseReply {
  /** Each start of an engine has another. */
  readonly incarnation: string;
  /** P has kept the blocks throughout, with the KV of the queried prompt. */
  readonly held: boolean;
  /** `unknown`: P's engine has no token ids. Undefined when P did not compare the prompts. */
  readonly prompt?: "same" | "differs" | "unknown" | undefined;
  /** As `RemoteLease.registrationGeneration`; undefined from an older peer. */
  readonly registrationGeneration?: number | undefined;
}

const KIND = "lease_check";
const COMPARED = ["same", "differs", "unknown"] as const;
const LIMITS: MsgpackLimits = { maxBytes: 4096, maxDepth: 2, maxItems: 16 };
const MAX_ID_LENGTH = 1024;

/** Encodes the query's one frame. */
export function encodeLeaseQuery(query: LeaseQuery): Uint8Array {
  const { engineId, requestId, generation, capability, blocks, prompt } = query;
  return encodeMsgpack({
    kv: KIND,
    engine_id: engineId,
    request_id: requestId,
    generation,
    capability,
    blocks,
    prompt: prompt && { num_tokens: prompt.numTokens, digest: prompt.digest },
  });
}

/** Decodes a query; undefined for anything else, such as a handshake. */
export function decodeLeaseQuery(frames: readonly Uint8Array[]): LeaseQuery | undefined {
  const { engine_id, request_id, generation, capability, blocks, prompt } = decodeMap(frames);
  if (!isId(engine_id) || !isId(request_id)) return undefined;
  const isPrompt = isMap(prompt) && isCount(prompt.num_tokens) && isDigest(prompt.digest);
  const isWellFormed =
    (generation === undefined || Number.isSafeInteger(generation)) &&
    (capability === undefined || isCapability(capability)) &&
    (blocks === undefined || isDigest(blocks)) &&
    (prompt === undefined || isPrompt);
  if (!isWellFormed) return undefined;
  return {
    engineId: engine_id,
    requestId: request_id,
    generation: generation as number | undefined,
    capability,
    blocks,
    prompt: isPrompt
      ? { numTokens: prompt.num_tokens as number, digest: prompt.digest as string }
      : undefined,
  };
}

/** Encodes the reply's one frame. */
export function encodeLeaseReply(reply: LeaseReply): Uint8Array {
  const { incarnation, held, prompt, registrationGeneration } = reply;
  return encodeMsgpack({
    kv: KIND,
    incarnation,
    held,
    prompt,
    registration_generation: registrationGeneration,
  });
}

/** Decodes a reply; undefined for anything else. */
export function decodeLeaseReply(frames: readonly Uint8Array[]): LeaseReply | undefined {
  const { incarnation, held, prompt, registration_generation: registered } = decodeMap(frames);
  if (!isId(incarnation) || typeof held !== "boolean") return undefined;
  return {
    incarnation,
    held,
    prompt: COMPARED.find((outcome) => outcome === prompt),
    registrationGeneration: Number.isSafeInteger(registered) ? Number(registered) : undefined,
  };
}

function decodeMap(frames: readonly Uint8Array[]): Readonly<Record<string, unknown>> {
  const [frame] = frames;
  if (frames.length !== 1 || frame === undefined) return {};
  try {
    const value = decodeMsgpack(frame, "lease query", LIMITS);
    return isMap(value) && value.kv === KIND ? value : {};
  } catch {
    return {};
  }
}

function isCount(value: unknown): boolean {
  return Number.isSafeInteger(value) && Number(value) >= 0;
}

function isId(value: unknown): value is string {
  return typeof value === "string" && value.length > 0 && value.length <= MAX_ID_LENGTH;
}
