import { hash } from "node:crypto";
import { KvError } from "@kv/interface";
import { encodeMsgpack } from "../encoding/msgpack.js";

/** Part of the digest's input, so that the digest is valid for nothing else. */
const DOMAIN = "kv-prompt-1";

/** What decides the KV of a prompt. */
export interface PromptContent {
  /** The token ids as 32-bit integers. */
  readonly tokenIds: Int32Array;
  /** As `ConnectorRequest.contentKey`. */
  readonly contentKey?: string | undefined;
}

/**
 * `PromptContent` as plain data: 4 bytes per token in base64 are copied between threads and
 * processes faster than a list of numbers.
 */
export interface EncodedPrompt {
  /** The token ids, in base64. */
  readonly tokenIds: string;
  /** As `PromptContent.contentKey`. */
  readonly contentKey?: string | undefined;
}

/**
 * Reads the content of an engine's request; undefined where the engine does not know the tokens.
 *
 * @throws `KV_REQUEST_INVALID` for a token id that is not an integer from 0 to 2^31 - 1.
 */
export function promptContent(request: {
  readonly promptTokenIds?: ArrayLike<number> | undefined;
  readonly contentKey?: string | undefined;
}): PromptContent | undefined {
  const { promptTokenIds: given, contentKey } = request;
  if (given === undefined) return undefined;
  const tokenIds = new Int32Array(given.length);
  for (let index = 0; index < given.length; index++) {
    const id = given[index] as number;
    if ((id | 0) !== id || id < 0) {
      throw new KvError(
        "KV_REQUEST_INVALID",
        `token ${index} of the prompt has the id ${id}, not an integer from 0 to 2147483647`,
      );
    }
    tokenIds[index] = id;
  }
  return { tokenIds, ...(contentKey === undefined ? {} : { contentKey }) };
}

/**
 * SHA-256 in hex of a prompt's first `numTokens` tokens and of its content key. P and D compare it
 * before D uses P's KV. Undefined when the prompt is shorter.
 */
export function promptDigest(
  { tokenIds, contentKey }: PromptContent,
  numTokens: number,
): string | undefined {
  if (numTokens > tokenIds.length) return undefined;
  const head = encodeMsgpack([DOMAIN, numTokens, contentKey ?? null]);
  const tokens = new Uint8Array(tokenIds.buffer, tokenIds.byteOffset, 4 * numTokens);
  return hash("sha256", Buffer.concat([head, tokens]), "hex");
}

/** Whether a peer's value has the form of a digest. */
export function isDigest(value: unknown): value is string {
  return typeof value === "string" && /^[0-9a-f]{64}$/.test(value);
}

/** The content as plain data. */
export function encodePrompt({ tokenIds, contentKey }: PromptContent): EncodedPrompt {
  const { buffer, byteOffset, byteLength } = tokenIds;
  return {
    tokenIds: Buffer.from(buffer, byteOffset, byteLength).toString("base64"),
    ...(contentKey === undefined ? {} : { contentKey }),
  };
}

/** The content of `encodePrompt`'s result. */
export function decodePrompt({ tokenIds, contentKey }: EncodedPrompt): PromptContent {
  // A copy: Buffer.from may return memory that is not aligned to 4 bytes.
  const bytes = Uint8Array.from(Buffer.from(tokenIds, "base64"));
  return {
    tokenIds: new Int32Array(bytes.buffer, 0, bytes.byteLength >> 2),
    ...(contentKey === undefined ? {} : { contentKey }),
  };
}
