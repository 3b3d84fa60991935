import { type BlockIds, KV_ERROR_CODES, type KvErrorCode } from "@kv/interface";
import { defined, MapFields } from "../encoding/messages.js";
import {
  hostOf,
  isCapability,
  isDigest,
  MAX_REQUEST_ID_BYTES,
  type RemoteLease,
} from "../transfer-params/transfer-params.js";
import { type ExtensionMessage, encodeExtension, encodeNotification } from "./notifications.js";

/**
 * Feature of the extension below, listed in the handshake. A registration then names D's rank, the
 * generation of its blocks, the only prompt that P may write, and a secret. D's withdrawal and P's
 * answers repeat the secret, so that no stranger can forge them.
 */
export const PUSH_CONTROL = "push-control-3";

const WITHDRAW = "push_withdraw";
const ENDED = "push_ended";
const WRITTEN = "push_done";
/** vLLM ignores this key of a registration. */
const PEER = "kv_peer";
const MAX_ID_LENGTH = 1024;

/** D's registration of blocks for one request, as P decodes it. */
export interface Registration {
  /** D's name of the request, which P's answers repeat. */
  readonly wireId: string;
  /** D's engine-wide id of the request, to compare with P's own (vLLM: the base request id). */
  readonly matchId: string;
  /** See `readTransferId`. */
  readonly transferId?: string | undefined;
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  /** Logical block ids per KV cache group; empty when D wants nothing. */
  readonly blockIds: BlockIds;
  readonly producerEngineId: string;
  /** Only from `@kv` peers. */
  readonly own?: RegistrationExtension | undefined;
}

/** What an `@kv` D adds to a registration. */
export interface RegistrationExtension {
  readonly rank: number;
  /** @default 1 */
  readonly dcpSize?: number | undefined;
  readonly incarnation: string;
  /** A secret in the form of a capability. Messages about the registration count only with it. */
  readonly secret: string;
  /** Later uses of D's blocks have higher ones. */
  readonly generation: number;
  /** P may forget all lower generations. */
  readonly oldestOpen: number;
  /** As `RemoteLease.registrationGeneration`, of D. Absent from older peers. */
  readonly registrationGeneration?: number | undefined;
  readonly numTokens: number;
  /**
   * `promptDigest` of these tokens. Undefined: D's engine does not know them, and P writes nothing.
   */
  readonly promptDigest?: string | undefined;
  /** Per group: blocks at the prompt's start that D has. */
  readonly computedBlocks: readonly number[];
  /** Absent when D registered before P responded. */
  readonly prefill?: (RemoteLease & { readonly wireId: string }) | undefined;
}

/** P's notice to one rank of D: no WRITE for this registration is in flight or will follow. */
export interface RegistrationEnded {
  readonly wireId: string;
  readonly incarnation: string;
  readonly generation: number;
  readonly secret: string;
  readonly code: KvErrorCode;
  /** At most 500 characters. */
  readonly message: string;
}

/** P's notice to one rank of D: its share of the blocks was written. */
export interface RegistrationWritten {
  readonly wireId: string;
  /** P's tensor-parallel size: how many notices the rank waits for. */
  readonly readers: number;
  readonly secret: string;
}

/** A rank of D that registers blocks. */
export interface Registrant {
  readonly engineId: string;
  readonly tpSize: number;
  /** @default 1 */
  readonly dcpSize?: number | undefined;
  readonly tpRank: number;
  readonly incarnation: string;
}

/** The blocks that D registers for one request. */
export interface RegistrationRequest
  extends Pick<
    RegistrationExtension,
    "secret" | "generation" | "oldestOpen" | "numTokens" | "promptDigest" | "registrationGeneration"
  > {
  readonly requestId: string;
  readonly wireId: string;
  /** Logical block ids per KV cache group. */
  readonly localBlockIds: BlockIds;
  /** As `RegistrationExtension.computedBlocks`. */
  readonly localComputedBlocks: readonly number[];
  readonly host: string;
  readonly port: number;
  readonly remote: {
    readonly engineId: string;
    readonly host: string;
    readonly port: number;
    readonly tpSize: number;
    readonly ppSize: number;
    readonly requestId: string;
    readonly transferId?: string | undefined;
    /** P's lease, where `kv_transfer_params` named one. */
    readonly lease?: RemoteLease | undefined;
  };
}

const MAX_GROUPS = 1024;

/**
 * The body of vLLM 0.33's `PUSH_REG:` notification, with which D registers its blocks at P
 * (push_scheduler.py).
 */
export interface PushRegistration {
  readonly requestId: string;
  readonly decodeEngineId: string;
  readonly decodeHost: string;
  readonly decodePort: number;
  readonly decodeTpSize: number;
  /** Logical block ids per KV cache group; P writes into them. */
  readonly localBlockIds: BlockIds;
  readonly remoteEngineId: string;
  readonly remoteHost: string;
  readonly remotePort: number;
  readonly remoteTpSize: number;
  readonly remotePpSize: number;
  /** vLLM 0.33 does not send it. */
  readonly transferId?: string | undefined;
  /** Fields that vLLM does not have, as received. */
  readonly rest: Readonly<Record<string, unknown>>;
}

/** Returns the map of a `push-registration` notification in vLLM's order. */
export function encodePushRegistration(
  registration: PushRegistration,
): Readonly<Record<string, unknown>> {
  return {
    request_id: registration.requestId,
    decode_engine_id: registration.decodeEngineId,
    decode_host: registration.decodeHost,
    decode_port: registration.decodePort,
    decode_tp_size: registration.decodeTpSize,
    local_block_ids: registration.localBlockIds,
    remote_engine_id: registration.remoteEngineId,
    remote_host: registration.remoteHost,
    remote_port: registration.remotePort,
    remote_tp_size: registration.remoteTpSize,
    remote_pp_size: registration.remotePpSize,
    ...defined({ transfer_id: registration.transferId }),
    ...registration.rest,
  };
}

/** Options of `decodePushRegistration`. */
export interface DecodePushRegistrationOptions {
  /** Accepts an empty `local_block_ids`, with which `@kv` peers withdraw. @default false */
  readonly mayBeEmpty?: boolean | undefined;
}

/**
 * Reads the map of a `push-registration` notification. Empty groups are refused: vLLM reads them as
 * all blocks.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodePushRegistration(
  map: Readonly<Record<string, unknown>>,
  { mayBeEmpty = false }: DecodePushRegistrationOptions = {},
): PushRegistration {
  const fields = new MapFields(map, { what: "push registration", maxItems: MAX_GROUPS });
  const port = { min: 1, max: 65_535 };
  const size = { min: 1, max: 65_536 };
  return {
    requestId: fields.string("request_id"),
    decodeEngineId: fields.string("decode_engine_id"),
    decodeHost: hostOf(fields, "decode_host"),
    decodePort: fields.integer("decode_port", port),
    decodeTpSize: fields.integer("decode_tp_size", size),
    localBlockIds: localBlockIds(fields, mayBeEmpty),
    remoteEngineId: fields.string("remote_engine_id"),
    remoteHost: fields.string("remote_host"),
    remotePort: fields.integer("remote_port", port),
    remoteTpSize: fields.integer("remote_tp_size", size),
    remotePpSize: fields.integer("remote_pp_size", { ...size, fallback: 1 }),
    transferId: transferId(fields),
    rest: fields.rest(),
  };
}

function transferId(fields: MapFields): string | undefined {
  if (fields.raw("transfer_id") == null) return undefined;
  return fields.string("transfer_id", { minLength: 1, maxLength: MAX_REQUEST_ID_BYTES });
}

function localBlockIds(fields: MapFields, mayBeEmpty: boolean): BlockIds {
  const groups = fields.blockIds("local_block_ids", { minPerGroup: 1 });
  if (groups.length > 0 || mayBeEmpty) return groups;
  throw fields.malformed("local_block_ids", "a list of block ids per KV cache group", groups);
}

/** Encodes a `PUSH_REG:` notification; `extended` adds what only `@kv` peers read. */
export function encodeRegistration(
  request: RegistrationRequest,
  registrant: Registrant,
  extended: boolean,
): Uint8Array {
  const registration = registrationMap(request, registrant, extended);
  return encodeNotification({ kind: "push-registration", registration });
}

/** Encodes a withdrawal for peers with the feature `PUSH_CONTROL`. */
export function encodeWithdrawal(request: RegistrationRequest, registrant: Registrant): Uint8Array {
  const registration = registrationMap({ ...request, localBlockIds: [] }, registrant, true);
  return encodeExtension({ type: WITHDRAW, ...registration });
}

/** Encodes P's answer that a registration has ended, for peers with `PUSH_CONTROL`. */
export function encodeRegistrationEnded(ended: RegistrationEnded): Uint8Array {
  const { wireId, incarnation, generation, secret, code, message } = ended;
  return encodeExtension({
    type: ENDED,
    request_id: wireId,
    incarnation,
    generation,
    secret,
    code,
    message: message.slice(0, 500),
  });
}

/** Encodes P's notice that it has written, for a registration with the extension. */
export function encodeRegistrationWritten(written: RegistrationWritten): Uint8Array {
  const { wireId, readers, secret } = written;
  return encodeExtension({ type: WRITTEN, request_id: wireId, readers, secret });
}

function registrationMap(
  request: RegistrationRequest,
  registrant: Registrant,
  extended: boolean,
): Readonly<Record<string, unknown>> {
  const { remote } = request;
  return encodePushRegistration({
    requestId: request.wireId,
    decodeEngineId: registrant.engineId,
    decodeHost: request.host,
    decodePort: request.port,
    decodeTpSize: registrant.tpSize,
    localBlockIds: request.localBlockIds,
    remoteEngineId: remote.engineId,
    remoteHost: remote.host,
    remotePort: remote.port,
    remoteTpSize: remote.tpSize,
    remotePpSize: remote.ppSize,
    transferId: remote.transferId,
    rest: extended ? { [PEER]: extensionMap(request, registrant) } : {},
  });
}

function extensionMap(
  { remote, ...request }: RegistrationRequest,
  { tpRank, dcpSize = 1, incarnation }: Registrant,
): Readonly<Record<string, unknown>> {
  const { lease, requestId } = remote;
  return {
    match_id: request.requestId,
    rank: tpRank,
    dcp_size: dcpSize === 1 ? undefined : dcpSize,
    incarnation,
    secret: request.secret,
    generation: request.generation,
    oldest_open: request.oldestOpen,
    registration_generation: request.registrationGeneration,
    num_tokens: request.numTokens,
    prompt_digest: request.promptDigest,
    computed_blocks: request.localComputedBlocks,
    prefill: lease && {
      request_id: requestId,
      incarnation: lease.incarnation,
      generation: lease.generation,
      capability: lease.capability,
    },
  };
}

/**
 * Reads the map of a `push-registration` notification with its extension.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeRegistration(
  map: Readonly<Record<string, unknown>>,
  mayBeEmpty = false,
): Registration {
  const registration = decodePushRegistration(map, { mayBeEmpty });
  const peer = registration.rest[PEER];
  const fields = peer === undefined ? undefined : pushFields(peer);
  return {
    wireId: registration.requestId,
    matchId: fields === undefined ? registration.requestId : id(fields, "match_id"),
    transferId: registration.transferId,
    engineId: registration.decodeEngineId,
    host: registration.decodeHost,
    port: registration.decodePort,
    tpSize: registration.decodeTpSize,
    blockIds: registration.localBlockIds,
    producerEngineId: registration.remoteEngineId,
    own: fields && readExtension(fields),
  };
}

function readExtension(fields: MapFields): RegistrationExtension {
  const prefill = fields.raw("prefill");
  const promptDigest = fields.raw("prompt_digest");
  if (promptDigest !== undefined && !isDigest(promptDigest))
    throw fields.malformed("prompt_digest", "a SHA-256 of 64 hex digits", promptDigest);
  const computedBlocks = fields.integers("computed_blocks");
  if (computedBlocks === undefined)
    throw fields.malformed("computed_blocks", "a list of integers", computedBlocks);
  return {
    rank: fields.integer("rank"),
    dcpSize: fields.optionalInteger("dcp_size", { min: 1 }),
    incarnation: id(fields, "incarnation"),
    secret: secret(fields),
    generation: fields.integer("generation"),
    oldestOpen: fields.integer("oldest_open"),
    registrationGeneration: fields.optionalInteger("registration_generation"),
    numTokens: fields.integer("num_tokens"),
    promptDigest,
    computedBlocks,
    prefill: prefill === undefined ? undefined : readPrefill(pushFields(prefill)),
  };
}

/** A message of the feature `PUSH_CONTROL`. */
export type PushControlMessage =
  | {
      readonly kind: "withdrawal";
      readonly registration: Registration;
    }
  | {
      readonly kind: "ended";
      readonly ended: RegistrationEnded;
    }
  | {
      readonly kind: "written";
      readonly written: RegistrationWritten;
    };

/**
 * Decodes a message; undefined for a `type` of another extension.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodePushControl(message: ExtensionMessage): PushControlMessage | undefined {
  const { type, ...rest } = message;
  const fields = pushFields(rest);
  if (type === WITHDRAW) {
    const registration = decodeRegistration(rest, true);
    if (registration.own === undefined) throw fields.malformed(PEER, "a map", undefined);
    return { kind: "withdrawal", registration };
  }
  if (type === WRITTEN) {
    const wireId = id(fields, "request_id");
    const readers = fields.integer("readers", { min: 1 });
    return { kind: "written", written: { wireId, readers, secret: secret(fields) } };
  }
  if (type !== ENDED) return undefined;
  const code = fields.raw("code");
  return {
    kind: "ended",
    ended: {
      wireId: id(fields, "request_id"),
      incarnation: id(fields, "incarnation"),
      generation: fields.integer("generation"),
      secret: secret(fields),
      // A newer peer may have unknown codes.
      code: KV_ERROR_CODES.find((each) => each === code) ?? "KV_TRANSFER_FAILED",
      message: id(fields, "message"),
    },
  };
}

function readPrefill(fields: MapFields): NonNullable<RegistrationExtension["prefill"]> {
  const capability = fields.raw("capability");
  if (capability !== undefined && !isCapability(capability))
    throw fields.malformed("capability", "a capability of 22 characters", capability);
  return {
    wireId: id(fields, "request_id"),
    incarnation: id(fields, "incarnation"),
    generation: fields.integer("generation"),
    capability,
  };
}

function secret(fields: MapFields): string {
  const value = fields.raw("secret");
  if (isCapability(value)) return value;
  throw fields.malformed("secret", "a secret of 22 characters", value);
}

function pushFields(value: unknown): MapFields {
  return new MapFields(value, { what: "push message", maxItems: 1024 });
}

function id(fields: MapFields, name: string): string {
  return fields.string(name, { minLength: 1, maxLength: MAX_ID_LENGTH });
}
