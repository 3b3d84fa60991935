import { hash, randomBytes, timingSafeEqual } from "node:crypto";
import { type BlockIds, KvError, type KvTransferParams, readTraceparent } from "@kv/interface";
import { defined, encodeMsgpack, isMap, MapFields, malformed } from "../encoding/messages.js";

/** Longest request id that is accepted, in bytes of UTF-8. */
export const MAX_REQUEST_ID_BYTES = 512;

/** A host name or IP address: "*", ";" and "/" have a meaning in ZMQ endpoints. */
const HOST = /^[A-Za-z0-9]([A-Za-z0-9._-]{0,253})$|^[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9]{1,16})?$/;

export function hostOf(fields: MapFields, name: string): string {
  const value = fields.string(name);
  if (HOST.test(value)) return value;
  throw fields.malformed(name, "a host name or an IP address", value);
}

const WHAT = "kv_transfer_params";
const MAX_GROUPS = 1024;
const MAX_MODE_LENGTH = 64;
const MAX_BLOCKS_PER_GROUP = 4_000_000;
const MAX_TOKEN_ID = 2 ** 31 - 1;
const MAX_SAMPLING_KEY_LENGTH = 256;
const SIZE = { min: 1, max: 65_536 };
const PASS_ON_HINT = "pass the kv_transfer_params of the prefill answer on unchanged";

/** vLLM's modes: D reads ("pull") or P writes ("push"). Other connectors may have others. */
export type TransferMode = "pull" | "push";

/**
 * One use of a request's blocks at P: `kv_peer`, an extension between `@kv` peers that vLLM
 * ignores.
 */
export interface RemoteLease {
  /** Each start of an engine has another. */
  readonly incarnation: string;
  /** See `Generation` in `@kv/connector`. */
  readonly generation: number;
  /**
   * P accepts extended messages about the request only with it. Absent from peers that do not know
   * it.
   */
  readonly capability?: string | undefined;
  /** How often P has registered its KV cache, in push, where vLLM's parameters lack it. */
  readonly registrationGeneration?: number | undefined;
  /** W3C `traceparent` of P's request, for D's spans where no front end gives one. */
  readonly traceparent?: string | undefined;
  /** How P sampled `first_token_ids`; see `ConnectorRequest.samplingKey`. */
  readonly samplingKey?: string | undefined;
}

/**
 * `kv_transfer_params` of a request to D, from P's response (vLLM 0.33: `request_finished` in
 * pull_scheduler.py and push_scheduler.py).
 */
export interface RemotePrefillParams {
  readonly kind: "remote-prefill";
  /** Logical block ids per KV cache group. Empty in push when P's response had none. */
  readonly remoteBlockIds: BlockIds;
  readonly remoteEngineId: string;
  /** P's id of the request in notifications. */
  readonly remoteRequestId: string;
  readonly remoteHost: string;
  readonly remotePort: number;
  /** Default 1. */
  readonly tpSize: number;
  /** Default 1. */
  readonly dcpSize: number;
  /** Default 1. */
  readonly ppSize: number;
  /** Prompt tokens in the remote blocks. */
  readonly remoteNumTokens: number | undefined;
  /** End of P's lease in seconds of P's clock. */
  readonly remoteBlocksExpiryTime: number | undefined;
  /** D shakes hands again when it has grown. Default 0. */
  readonly remoteRegistrationGeneration: number;
  /** See `TransferMode`. Default "pull". */
  readonly transferMode: string;
  /** See `readTransferId`. */
  readonly transferId?: string | undefined;
  /** Undefined where P is vLLM. */
  readonly lease: RemoteLease | undefined;
  /** The parameters as received, with unknown keys. */
  readonly given: KvTransferParams;
}

/** The transfer that a request's `kv_transfer_params` ask for. */
export type RequestParams =
  | {
      readonly kind: "local";
    }
  /** P computes the prompt and keeps the blocks for a D. */
  | {
      readonly kind: "remote-decode";
      readonly given: KvTransferParams;
    }
  /** D receives the prompt's KV from a P. */
  | RemotePrefillParams;

/**
 * Reads and validates a request's `kv_transfer_params`; `defaultMode` is for those without a mode.
 *
 * @throws `KV_REQUEST_INVALID` naming the key, its value and the wanted form.
 */
export function parseTransferParams(
  params: KvTransferParams | null | undefined,
  defaultMode: TransferMode = "pull",
): RequestParams {
  if (params === undefined || params === null) return { kind: "local" };
  const prefill = readFlag(params, "do_remote_prefill");
  const decode = readFlag(params, "do_remote_decode");
  if (prefill && decode) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `${WHAT}: do_remote_prefill and do_remote_decode are both true`,
      { hint: "a prefill request has do_remote_decode, a decode request has do_remote_prefill" },
    );
  }
  if (decode) return { kind: "remote-decode", given: params };
  return prefill ? readRemotePrefill(params, defaultMode) : { kind: "local" };
}

/**
 * Checks P's response before a D gets it, and returns the error if there is one. A vLLM D (0.32,
 * 0.33) does not validate: a missing or mistyped field stops its engine or makes it read other
 * memory. Sizes must not be null, push needs `tp_size`, and pull needs a block. Another mode
 * belongs to a connector whose D reads the rest.
 */
export function checkRemotePrefillParams(params: KvTransferParams): KvError | undefined {
  try {
    const { transferMode, remoteBlockIds } = readRemotePrefill(params, "pull");
    for (const key of ["tp_size", "dcp_size", "pp_size"]) {
      const isNeeded = key === "tp_size" && transferMode === "push";
      const value = params[key];
      if (value === null || (value === undefined && isNeeded)) throw invalid(key, "a size", value);
    }
    if (transferMode === "pull" && remoteBlockIds.every((group) => group.length === 0))
      throw invalid(
        "remote_block_ids",
        "a list with at least one block id",
        params["remote_block_ids"],
      );
    return undefined;
  } catch (error) {
    if (KvError.is(error)) return error;
    throw error;
  }
}

function readRemotePrefill(
  params: KvTransferParams,
  defaultMode: TransferMode,
): RemotePrefillParams {
  try {
    const fields = new MapFields(params, {
      what: WHAT,
      maxItems: MAX_GROUPS,
      malformedCode: "KV_REQUEST_INVALID",
    });
    const transferMode =
      fields.raw("transfer_mode") == null
        ? defaultMode
        : fields.string("transfer_mode", { minLength: 1, maxLength: MAX_MODE_LENGTH });
    return {
      kind: "remote-prefill",
      remoteBlockIds: blockIds(fields, transferMode),
      remoteEngineId: requestId(fields, "remote_engine_id"),
      remoteRequestId: requestId(fields, "remote_request_id"),
      remoteHost: hostOf(fields, "remote_host"),
      remotePort: fields.integer("remote_port", { min: 1, max: 65_535 }),
      tpSize: fields.optionalInteger("tp_size", SIZE) ?? 1,
      dcpSize: fields.optionalInteger("dcp_size", SIZE) ?? 1,
      ppSize: fields.optionalInteger("pp_size", SIZE) ?? 1,
      remoteNumTokens: fields.optionalInteger("remote_num_tokens"),
      remoteBlocksExpiryTime: expiryTime(fields),
      remoteRegistrationGeneration: fields.optionalInteger("remote_registration_generation") ?? 0,
      transferMode,
      transferId: transferId(fields),
      lease: readLease(params["kv_peer"]),
      given: params,
    };
  } catch (error) {
    if (!KvError.is(error, "KV_REQUEST_INVALID")) throw error;
    throw new KvError(error.code, error.message, { hint: PASS_ON_HINT, details: error.details });
  }
}

/**
 * Reads `transfer_id`, the front end's name of a prompt, shared by both legs. A push P matches by
 * it before request ids. In vLLM 0.33 only the MooncakeConnector knows it. Undefined when absent.
 *
 * @throws `KV_REQUEST_INVALID`.
 */
export function readTransferId(params: KvTransferParams | null | undefined): string | undefined {
  if (params?.["transfer_id"] == null) return undefined;
  return transferId(
    new MapFields(params, { what: WHAT, maxItems: 0, malformedCode: "KV_REQUEST_INVALID" }),
  );
}

/**
 * Reads the first output token that P sampled (`first_token_ids` of vllm#51919, in no release), and
 * how. Undefined when absent.
 *
 * @throws `KV_REQUEST_INVALID` for anything else than a list of one token id.
 */
export function readFirstToken(
  params: KvTransferParams | null | undefined,
): { readonly token: number; readonly samplingKey: string | undefined } | undefined {
  const given = params?.["first_token_ids"];
  if (given === undefined || given === null) return undefined;
  const [token] = Array.isArray(given) && given.length === 1 ? (given as unknown[]) : [];
  if (
    typeof token !== "number" ||
    !Number.isSafeInteger(token) ||
    token < 0 ||
    token > MAX_TOKEN_ID
  )
    throw invalid("first_token_ids", `a list of one token id from 0 to ${MAX_TOKEN_ID}`, given);
  return { token, samplingKey: readLease(params?.["kv_peer"])?.samplingKey };
}

function transferId(fields: MapFields): string | undefined {
  return fields.raw("transfer_id") == null ? undefined : requestId(fields, "transfer_id");
}

function blockIds(fields: MapFields, transferMode: string): BlockIds {
  // A P that pushes does not need its own block ids.
  if (transferMode === "push" && fields.raw("remote_block_ids") == null) return [];
  return fields.blockIds("remote_block_ids", { maxPerGroup: MAX_BLOCKS_PER_GROUP });
}

function requestId(fields: MapFields, key: string): string {
  return fields.string(key, { minLength: 1, maxLength: MAX_REQUEST_ID_BYTES });
}

function expiryTime(fields: MapFields): number | undefined {
  const value = fields.raw("remote_blocks_expiry_time");
  if (value == null) return undefined;
  if (typeof value === "number" && Number.isFinite(value)) return value;
  throw fields.malformed("remote_blocks_expiry_time", "a number of seconds", value);
}

/**
 * Whether a prefill request names blocks of a decode engine, whose KV of the last turn P may read
 * back.
 */
export function namesReadback(params: KvTransferParams | null | undefined): boolean {
  const { do_remote_decode, do_remote_prefill, remote_block_ids: blockIds } = params ?? {};
  const isPrefill = do_remote_decode === true && (do_remote_prefill ?? false) === false;
  return isPrefill && Array.isArray(blockIds) && blockIds.length > 0;
}

/**
 * Exchanges the roles in a prefill request that names a decode engine's blocks, so that P reads it
 * as a D reads a P's.
 *
 * @throws `KV_REQUEST_INVALID` without `remote_num_tokens`, or where a vLLM D's have no
 * `remote_blocks_expiry_time`: nothing else says that it still holds the blocks.
 */
export function readbackParams(params: KvTransferParams): KvTransferParams {
  const { remote_num_tokens: numTokens, remote_blocks_expiry_time: expiry, kv_peer: peer } = params;
  const missing = (key: string, value: unknown) =>
    new KvError(
      "KV_REQUEST_INVALID",
      `${WHAT}: ${key} is ${JSON.stringify(value ?? null)}, and KV of a decode worker cannot be read without it`,
      { hint: "pass the kv_transfer_params of the decode answer on unchanged", details: { key } },
    );
  if (numTokens === undefined || numTokens === null) throw missing("remote_num_tokens", numTokens);
  if ((expiry === undefined || expiry === null) && readLease(peer) === undefined)
    throw missing("remote_blocks_expiry_time", expiry);
  return { ...params, do_remote_prefill: true, do_remote_decode: false };
}

/** Returns the `traceparent` of an `@kv` P's request; undefined where absent or malformed. */
export function peerTraceparent(params: KvTransferParams | null | undefined): string | undefined {
  const peer = params?.["kv_peer"];
  return isMap(peer) ? readTraceparent(peer["traceparent"]) : undefined;
}

/** A malformed lease counts as absent: proxies may carry anything under our key. */
function readLease(value: unknown): RemoteLease | undefined {
  if (!isMap(value)) return undefined;
  const { incarnation, generation, registration_generation: registered, sampling } = value;
  const capability = value.capability ?? undefined;
  if (typeof incarnation !== "string" || incarnation === "" || incarnation.length > 255)
    return undefined;
  if (typeof generation !== "number" || !Number.isSafeInteger(generation)) return undefined;
  if (capability !== undefined && !isCapability(capability)) return undefined;
  const hasSampling = typeof sampling === "string" && sampling.length <= MAX_SAMPLING_KEY_LENGTH;
  return defined({
    incarnation,
    generation,
    capability,
    registrationGeneration: Number.isSafeInteger(registered) ? Number(registered) : undefined,
    traceparent: readTraceparent(value.traceparent),
    samplingKey: hasSampling ? sampling : undefined,
  });
}

/** P's response, for `encodeRemotePrefillParams`. */
export interface RemotePrefillAnswer
  extends Omit<
    RemotePrefillParams,
    | "kind"
    | "given"
    | "remoteNumTokens"
    | "remoteBlocksExpiryTime"
    | "remoteRegistrationGeneration"
    | "lease"
  > {
  readonly remoteNumTokens: number;
  /** Only pull has it; undefined leaves the key out. */
  readonly remoteBlocksExpiryTime?: number | null | undefined;
  /** Undefined leaves the key out. */
  readonly remoteRegistrationGeneration?: number | undefined;
  /** Undefined leaves the `@kv` extension out. */
  readonly lease?: RemoteLease | undefined;
  /** As `readFirstToken`; undefined leaves the key out. */
  readonly firstToken?: number | undefined;
  /** A decode engine answers a prefill engine that reads back. @default false */
  readonly isDecoded?: boolean | undefined;
}

/** Returns P's or D's response with vLLM's keys in vLLM's order, then the `@kv` extension. */
export function encodeRemotePrefillParams(answer: RemotePrefillAnswer): KvTransferParams {
  const { lease, firstToken, isDecoded = false } = answer;
  return defined({
    do_remote_prefill: !isDecoded,
    do_remote_decode: isDecoded,
    remote_block_ids: answer.remoteBlockIds,
    remote_engine_id: answer.remoteEngineId,
    remote_request_id: answer.remoteRequestId,
    remote_host: answer.remoteHost,
    remote_port: answer.remotePort,
    tp_size: answer.tpSize,
    dcp_size: answer.dcpSize,
    pp_size: answer.ppSize,
    remote_num_tokens: answer.remoteNumTokens,
    remote_blocks_expiry_time: answer.remoteBlocksExpiryTime,
    remote_registration_generation: answer.remoteRegistrationGeneration,
    transfer_mode: answer.transferMode,
    transfer_id: answer.transferId,
    first_token_ids: firstToken === undefined ? undefined : [firstToken],
    kv_peer:
      lease &&
      defined({
        incarnation: lease.incarnation,
        generation: lease.generation,
        capability: lease.capability,
        registration_generation: lease.registrationGeneration,
        traceparent: lease.traceparent,
        sampling: lease.samplingKey,
      }),
  });
}

/** Removes the eight hex digits that vLLM appends to a request id (vLLM: `get_base_request_id`). */
export function baseRequestId(requestId: string): string {
  return requestId.replace(/-[0-9a-f]{8}$/i, "");
}

function readFlag(params: KvTransferParams, key: string): boolean {
  const value = params[key];
  if (value === undefined || value === null) return false;
  if (typeof value === "boolean") return value;
  throw invalid(key, "true or false", value);
}

function invalid(key: string, wanted: string, value: unknown): KvError {
  return malformed(WHAT, key, wanted, value, "KV_REQUEST_INVALID");
}

const CAPABILITY = /^[A-Za-z0-9_-]{22}$/;
/** Each makes its digest valid for nothing else. */
const BLOCKS_DOMAIN = "kv-blocks-1";
const PROMPT_DOMAIN = "kv-prompt-1";

const CAPABILITY_BYTES = 16;
/** One system call for each capability took a third of P's engine step. */
let random = Buffer.alloc(0);

/**
 * Returns 128 random bits in base64url, whose holder may act on the request. They come from the
 * system: the injected generator is not for secrets.
 */
export function newCapability(): string {
  if (random.byteLength === 0) random = randomBytes(256 * CAPABILITY_BYTES);
  const own = random.subarray(0, CAPABILITY_BYTES);
  random = random.subarray(CAPABILITY_BYTES);
  const capability = own.toString("base64url");
  own.fill(0);
  return capability;
}

export function isCapability(value: unknown): value is string {
  return typeof value === "string" && CAPABILITY.test(value);
}

/** Compares two capabilities in constant time. */
export function sameCapability(a: string, b: string): boolean {
  const [first, second] = [Buffer.from(a), Buffer.from(b)];
  return first.byteLength === second.byteLength && timingSafeEqual(first, second);
}

/**
 * Returns the SHA-256, in hex, of block ids and number of tokens. D's lease query has it, so that P
 * answers only for the blocks that D has read.
 */
export function blocksDigest(blockIds: BlockIds, numTokens: number | undefined): string {
  return hash("sha256", encodeMsgpack([BLOCKS_DOMAIN, numTokens ?? null, blockIds]), "hex");
}

/** What decides the KV of a prompt. */
export interface PromptContent {
  readonly tokenIds: Int32Array;
  readonly contentKey?: string | undefined;
}

/** `PromptContent` as plain data: threads copy base64 faster than a list. */
export interface EncodedPrompt {
  readonly tokenIds: string;
  readonly contentKey?: string | undefined;
}

/**
 * Reads the content of a request; undefined where the engine does not know the tokens.
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
  return { tokenIds, contentKey };
}

/**
 * Returns the SHA-256, in hex, of a prompt's first `numTokens` tokens and content key, which P and
 * D compare. Undefined when the prompt is shorter.
 */
export function promptDigest(
  { tokenIds, contentKey }: PromptContent,
  numTokens: number,
): string | undefined {
  if (numTokens > tokenIds.length) return undefined;
  const head = encodeMsgpack([PROMPT_DOMAIN, numTokens, contentKey ?? null]);
  const tokens = new Uint8Array(tokenIds.buffer, tokenIds.byteOffset, 4 * numTokens);
  return hash("sha256", Buffer.concat([head, tokens]), "hex");
}

export function isDigest(value: unknown): value is string {
  return typeof value === "string" && /^[0-9a-f]{64}$/.test(value);
}

/** Encodes the content as plain data. */
export function encodePrompt({ tokenIds, contentKey }: PromptContent): EncodedPrompt {
  const { buffer, byteOffset, byteLength } = tokenIds;
  const encoded = { tokenIds: Buffer.from(buffer, byteOffset, byteLength).toString("base64") };
  return contentKey === undefined ? encoded : { ...encoded, contentKey };
}

/** Decodes what `encodePrompt` returns. */
export function decodePrompt({ tokenIds, contentKey }: EncodedPrompt): PromptContent {
  // Buffer.from may return memory that is not aligned to 4 bytes.
  const bytes = Uint8Array.from(Buffer.from(tokenIds, "base64"));
  return { tokenIds: new Int32Array(bytes.buffer, 0, bytes.byteLength >> 2), contentKey };
}
