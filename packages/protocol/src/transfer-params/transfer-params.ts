import { type BlockIds, KvError, type KvTransferParams, readTraceparent } from "@kv/interface";
import { isMap, MapFields, malformed } from "../encoding/map-fields.js";
import { MAX_REQUEST_ID_BYTES } from "../notifications/notifications.js";
import { isCapability } from "./capability.js";

/**
 * A host name or an IP address and nothing else: "*", ";" and "/" have a special meaning in ZMQ
 * endpoints.
 */
export const HOST =
  /^[A-Za-z0-9]([A-Za-z0-9._-]{0,253})$|^[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9]{1,16})?$/;

const WHAT = "kv_transfer_params";
const MAX_GROUPS = 1024;
const MAX_MODE_LENGTH = 64;
const MAX_BLOCKS_PER_GROUP = 4_000_000;
const MAX_TOKEN_ID = 2 ** 31 - 1;
const MAX_SAMPLING_KEY_LENGTH = 256;
const SIZE = { min: 1, max: 65_536 };
const PASS_ON_HINT = "pass the kv_transfer_params of the prefill answer on unchanged";

/**
 * The modes of vLLM's connectors: D reads ("pull") or P writes ("push"). Other connectors may have
 * modes of their own.
 */
export type TransferMode = "pull" | "push";

/**
 * Identifies one use of a request's blocks at P. An extension between `@kv` peers under the key
 * `kv_peer`; vLLM ignores it.
 */
export interface RemoteLease {
  /** P's process; another start of the same engine has another value. */
  readonly incarnation: string;
  /** Number of the use of the request's blocks; see `Generation` in `@kv/connector`. */
  readonly generation: number;
  /**
   * The request's capability: 128 random bits in base64url. P accepts the extended messages about
   * the request only from peers that send it. Absent from peers that do not know it.
   */
  readonly capability?: string | undefined;
  /** How often P has registered its KV cache, in push: there vLLM's parameters do not say it. */
  readonly registrationGeneration?: number | undefined;
  /**
   * W3C `traceparent` of the request at P: the parent of D's spans where no front end gives D one
   * over HTTP. Absent where P's request has no trace.
   */
  readonly traceparent?: string | undefined;
  /** How P sampled `first_token_ids`; see `ConnectorRequest.samplingKey`. Absent without them. */
  readonly samplingKey?: string | undefined;
}

/**
 * `kv_transfer_params` of a request to D, from P's response (vLLM 0.33: `request_finished` in
 * pull_scheduler.py and push_scheduler.py).
 */
export interface RemotePrefillParams {
  /** Distinguishes these parameters from other `RequestParams`. */
  readonly kind: "remote-prefill";
  /**
   * Logical block ids per KV cache group that hold the prompt's KV at P. Empty in push when P's
   * response had none.
   */
  readonly remoteBlockIds: BlockIds;
  readonly remoteEngineId: string;
  /** P's id of the request, used in notifications. */
  readonly remoteRequestId: string;
  readonly remoteHost: string;
  readonly remotePort: number;
  /** P's tensor-parallel size. Default 1. */
  readonly tpSize: number;
  /** P's decode-context-parallel size. Default 1. */
  readonly dcpSize: number;
  /** P's pipeline-parallel size. Default 1. */
  readonly ppSize: number;
  /** Prompt tokens whose KV the remote blocks hold; undefined when absent. */
  readonly remoteNumTokens: number | undefined;
  /** End of P's lease on P's clock, in seconds; undefined when absent. */
  readonly remoteBlocksExpiryTime: number | undefined;
  /**
   * How often P has registered its KV cache; D shakes hands again when it is higher than at the
   * last handshake. Default 0.
   */
  readonly remoteRegistrationGeneration: number;
  /** How the KV is transferred; see `TransferMode`. Default "pull". */
  readonly transferMode: string;
  /** `transfer_id`, see `readTransferId`; undefined when absent. */
  readonly transferId?: string | undefined;
  /** P's process and generation; undefined where P is vLLM. */
  readonly lease: RemoteLease | undefined;
  /** The parameters as received, with unknown keys. */
  readonly given: KvTransferParams;
}

/** The transfer that a request's `kv_transfer_params` ask for. */
export type RequestParams =
  /** No transfer. */
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
 * Reads a request's `kv_transfer_params`; the only validation of them in this project.
 * `defaultMode` applies when they have no mode.
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
      {
        hint: "a prefill request has do_remote_decode, a decode request has do_remote_prefill",
      },
    );
  }
  if (decode) return { kind: "remote-decode", given: params };
  return prefill ? readRemotePrefill(params, defaultMode) : { kind: "local" };
}

/**
 * Checks the parameters of P's response before a D gets them. A vLLM D (0.32, 0.33) does not
 * validate them: a field that is missing or of another type stops its engine or makes it read other
 * memory. Returns the error, or undefined when the parameters are usable. Stricter than
 * `parseTransferParams`: sizes may be absent but not null, push needs `tp_size`, and pull needs at
 * least one block. A mode that is not vLLM's belongs to a connector of its own, whose D reads the
 * rest.
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
      remoteHost: host(fields),
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
 * The `transfer_id` of a request's parameters: the front end's name of a prompt, which both legs
 * share. A push P matches by it before it compares request ids. vLLM 0.33's NixlConnector does not
 * know it (its MooncakeConnector does). Undefined when absent.
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
 * The first output token, where P has sampled it (`first_token_ids` of vllm#51919, in no release),
 * and how a P of `@kv` sampled it. Undefined when absent.
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

function host(fields: MapFields): string {
  const value = fields.string("remote_host");
  if (HOST.test(value)) return value;
  throw fields.malformed("remote_host", "a host name or an IP address", value);
}

function expiryTime(fields: MapFields): number | undefined {
  const value = fields.raw("remote_blocks_expiry_time");
  if (value === undefined || value === null) return undefined;
  if (typeof value === "number" && Number.isFinite(value)) return value;
  throw fields.malformed("remote_blocks_expiry_time", "a number of seconds", value);
}

/**
 * Whether a prefill request names blocks of a decode engine, whose KV of the last turn P may read
 * back. A request with both flags does not: `parseTransferParams` refuses it.
 */
export function namesReadback(params: KvTransferParams | null | undefined): boolean {
  const { do_remote_decode, do_remote_prefill, remote_block_ids: blockIds } = params ?? {};
  const isPrefill = do_remote_decode === true && (do_remote_prefill ?? false) === false;
  return isPrefill && Array.isArray(blockIds) && blockIds.length > 0;
}

/**
 * The parameters of a prefill request that names blocks of a decode engine, with the roles
 * exchanged: P reads them as a D reads those of a P.
 *
 * @throws `KV_REQUEST_INVALID` without `remote_num_tokens`, and where a vLLM D's have no
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

/**
 * `traceparent` of P's request, from the parameters that an `@kv` P answered; undefined where they
 * have none, or a malformed one.
 */
export function peerTraceparent(params: KvTransferParams | null | undefined): string | undefined {
  const peer = params?.["kv_peer"];
  return isMap(peer) ? readTraceparent(peer["traceparent"]) : undefined;
}

/** A malformed lease counts as absent: the key is ours, and proxies may carry anything under it. */
function readLease(value: unknown): RemoteLease | undefined {
  if (!isMap(value)) return undefined;
  const { incarnation, generation, capability } = value;
  const traceparent = readTraceparent(value["traceparent"]);
  if (typeof incarnation !== "string" || incarnation === "" || incarnation.length > 255)
    return undefined;
  if (typeof generation !== "number" || !Number.isSafeInteger(generation)) return undefined;
  const { registration_generation: registered, sampling } = value;
  const hasSampling = typeof sampling === "string" && sampling.length <= MAX_SAMPLING_KEY_LENGTH;
  const lease = {
    incarnation,
    generation,
    ...(Number.isSafeInteger(registered) ? { registrationGeneration: Number(registered) } : {}),
    ...(traceparent === undefined ? {} : { traceparent }),
    ...(hasSampling ? { samplingKey: sampling } : {}),
  };
  if (capability === undefined || capability === null) return lease;
  return isCapability(capability) ? { capability, ...lease } : undefined;
}

/** The parameters of P's response, for `encodeRemotePrefillParams`. */
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
  /** Prompt tokens whose KV the blocks hold. */
  readonly remoteNumTokens: number;
  /**
   * Only pull names the end of the lease and the registration generation; undefined leaves the key
   * out.
   */
  readonly remoteBlocksExpiryTime?: number | null | undefined;
  /** As `RemotePrefillParams.remoteRegistrationGeneration`; undefined leaves the key out. */
  readonly remoteRegistrationGeneration?: number | undefined;
  /** Undefined leaves the `@kv` extension out. */
  readonly lease?: RemoteLease | undefined;
  /** As `readFirstToken`; undefined leaves the key out. */
  readonly firstToken?: number | undefined;
  /** A decode engine answers, for a prefill engine that reads its KV back. @default false */
  readonly isDecoded?: boolean | undefined;
}

/**
 * P's or D's response as `kv_transfer_params`, with vLLM's keys in vLLM's order and the `@kv`
 * extension last.
 */
export function encodeRemotePrefillParams(answer: RemotePrefillAnswer): KvTransferParams {
  const { remoteBlocksExpiryTime, remoteRegistrationGeneration, lease, isDecoded = false } = answer;
  return {
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
    ...(remoteBlocksExpiryTime === undefined
      ? {}
      : { remote_blocks_expiry_time: remoteBlocksExpiryTime }),
    ...(remoteRegistrationGeneration === undefined
      ? {}
      : { remote_registration_generation: remoteRegistrationGeneration }),
    transfer_mode: answer.transferMode,
    ...(answer.transferId === undefined ? {} : { transfer_id: answer.transferId }),
    ...(answer.firstToken === undefined ? {} : { first_token_ids: [answer.firstToken] }),
    ...(lease === undefined ? {} : { kv_peer: leaseMap(lease) }),
  };
}

function leaseMap({
  incarnation,
  generation,
  capability,
  registrationGeneration,
  traceparent,
  samplingKey,
}: RemoteLease): Readonly<Record<string, unknown>> {
  return {
    incarnation,
    generation,
    ...(capability === undefined ? {} : { capability }),
    ...(registrationGeneration === undefined
      ? {}
      : { registration_generation: registrationGeneration }),
    ...(traceparent === undefined ? {} : { traceparent }),
    ...(samplingKey === undefined ? {} : { sampling: samplingKey }),
  };
}

/**
 * The request id without the suffix of eight hex digits that vLLM appends (vLLM:
 * `get_base_request_id`).
 */
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
