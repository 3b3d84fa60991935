import { type BlockIds, KV_ERROR_CODES, type KvErrorCode } from "@kv/interface";
import { MapFields } from "../encoding/map-fields.js";
import type { RemoteLease } from "../transfer-params/transfer-params.js";
import { type ExtensionMessage, encodeNotification } from "./notifications.js";
import { decodePushRegistration, encodePushRegistration } from "./push-registration.js";

/**
 * Feature name of the extension below, listed in the handshake. With it, a registration also names D's rank and the generation of
 * its blocks, D can withdraw a registration, and P sends a notice when it will not write.
 */
export const PUSH_CONTROL = "push-control-1";

const WITHDRAW = "push_withdraw";
const ENDED = "push_ended";
/** The registration's key for the extension; vLLM ignores it. */
const PEER = "kv_peer";
const MAX_ID_LENGTH = 1024;

/** A registration of D's blocks for one request, as P decodes it. */
export interface Registration {
  /** D's name of the request in notifications: P's completion and answers carry it. */
  readonly wireId: string;
  /** D's engine-wide id of the request, which P compares with its own ids (vLLM: the base request id). */
  readonly matchId: string;
  /** D's engine id. */
  readonly engineId: string;
  /** Host of D's side channel. */
  readonly host: string;
  /** Port of D's side channel. */
  readonly port: number;
  /** D's tensor-parallel size. */
  readonly tpSize: number;
  /** Logical block ids per KV cache group that P writes into; empty when D wants nothing (any more). */
  readonly blockIds: BlockIds;
  /** Engine id of the P that shall write. */
  readonly producerEngineId: string;
  /** Only from `@kv` peers. */
  readonly own?: RegistrationExtension | undefined;
}

/** The part that an `@kv` D adds to a registration. */
export interface RegistrationExtension {
  /** D's tensor-parallel rank. */
  readonly rank: number;
  /** Identifies D's process. */
  readonly incarnation: string;
  /** Which use of D's blocks this is; a later registration of the same blocks has a higher one. */
  readonly generation: number;
  /** D's lowest generation that is still valid: P may forget everything about lower ones. */
  readonly oldestOpen: number;
  /** Prompt tokens whose KV P writes. */
  readonly numTokens: number;
  /** Blocks per group at the start of the prompt that D has already. */
  readonly computedBlocks: readonly number[];
  /** The request at P that P's `kv_transfer_params` named; absent when D registered before P responded. */
  readonly prefill?: (RemoteLease & { readonly wireId: string }) | undefined;
}

/** P's notice to one rank of D: no WRITE for this registration is in flight, and none will follow. */
export interface RegistrationEnded {
  /** D's name of the request. */
  readonly wireId: string;
  /** D's process, as in the registration. */
  readonly incarnation: string;
  /** The registration's generation. */
  readonly generation: number;
  /** Why P does not write. */
  readonly code: KvErrorCode;
  /** The reason as text; at most 500 characters. */
  readonly message: string;
}

/** A rank of D that registers blocks. */
export interface Registrant {
  /** D's engine id. */
  readonly engineId: string;
  /** D's tensor-parallel size. */
  readonly tpSize: number;
  /** This rank. */
  readonly tpRank: number;
  /** Identifies D's process. */
  readonly incarnation: string;
}

/** The blocks that D registers for one request. */
export interface RegistrationRequest {
  /** D's engine-wide id of the request. */
  readonly requestId: string;
  /** D's name of the request in notifications. */
  readonly wireId: string;
  /** As `RegistrationExtension.generation`. */
  readonly generation: number;
  /** As `RegistrationExtension.oldestOpen`. */
  readonly oldestOpen: number;
  /** Logical block ids per KV cache group. */
  readonly localBlockIds: BlockIds;
  /** As `RegistrationExtension.computedBlocks`. */
  readonly localComputedBlocks: readonly number[];
  /** Prompt tokens whose KV is wanted. */
  readonly numTokens: number;
  /** Host of D's side channel. */
  readonly host: string;
  /** Port of D's side channel. */
  readonly port: number;
  /** The P that computes the prompt. */
  readonly remote: {
    readonly engineId: string;
    readonly host: string;
    readonly port: number;
    readonly tpSize: number;
    readonly ppSize: number;
    /** P's id of the request. */
    readonly requestId: string;
    /** P's process and generation, where `kv_transfer_params` named them. */
    readonly lease?: RemoteLease | undefined;
  };
}

/** Encodes a `PUSH_REG:` notification. With `extended` it carries the extension; only `@kv` peers read it. Throws nothing. */
export function encodeRegistration(
  request: RegistrationRequest,
  registrant: Registrant,
  extended: boolean,
): Uint8Array {
  const registration = registrationMap(request, registrant, extended);
  return encodeNotification({ kind: "push-registration", registration });
}

/** Encodes a notification that withdraws a registration. Only for peers with the feature `PUSH_CONTROL`. Throws nothing. */
export function encodeWithdrawal(request: RegistrationRequest, registrant: Registrant): Uint8Array {
  const registration = registrationMap({ ...request, localBlockIds: [] }, registrant, true);
  return encodeNotification({ kind: "extension", message: { type: WITHDRAW, ...registration } });
}

/** Encodes P's answer that a registration has ended. Only for peers with the feature `PUSH_CONTROL`. Throws nothing. */
export function encodeRegistrationEnded(ended: RegistrationEnded): Uint8Array {
  const { wireId, incarnation, generation, code, message } = ended;
  return encodeNotification({
    kind: "extension",
    message: {
      type: ENDED,
      request_id: wireId,
      incarnation,
      generation,
      code,
      message: message.slice(0, 500),
    },
  });
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
    rest: extended ? { [PEER]: extensionMap(request, registrant) } : {},
  });
}

function extensionMap(
  { remote, ...request }: RegistrationRequest,
  { tpRank, incarnation }: Registrant,
): Readonly<Record<string, unknown>> {
  const { lease } = remote;
  return {
    match_id: request.requestId,
    rank: tpRank,
    incarnation,
    generation: request.generation,
    oldest_open: request.oldestOpen,
    num_tokens: request.numTokens,
    computed_blocks: request.localComputedBlocks,
    ...(lease === undefined
      ? {}
      : {
          prefill: {
            request_id: remote.requestId,
            incarnation: lease.incarnation,
            generation: lease.generation,
          },
        }),
  };
}

/**
 * Reads the map of a `push-registration` notification with its extension. `mayBeEmpty` accepts a registration without blocks.
 * Errors: `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeRegistration(map: Readonly<Record<string, unknown>>, mayBeEmpty = false): Registration {
  const registration = decodePushRegistration(map, { mayBeEmpty });
  const peer = registration.rest[PEER];
  const common = {
    wireId: registration.requestId,
    engineId: registration.decodeEngineId,
    host: registration.decodeHost,
    port: registration.decodePort,
    tpSize: registration.decodeTpSize,
    blockIds: registration.localBlockIds,
    producerEngineId: registration.remoteEngineId,
  };
  if (peer === undefined) return { ...common, matchId: registration.requestId };
  const fields = pushFields(peer);
  const prefill = fields.raw("prefill");
  return {
    ...common,
    matchId: id(fields, "match_id"),
    own: {
      rank: fields.integer("rank"),
      incarnation: id(fields, "incarnation"),
      generation: fields.integer("generation"),
      oldestOpen: fields.integer("oldest_open"),
      numTokens: fields.integer("num_tokens"),
      computedBlocks: computedBlocks(fields),
      prefill: prefill === undefined ? undefined : readPrefill(pushFields(prefill)),
    },
  };
}

/** A message of this extension. */
export type PushControlMessage =
  /** D withdraws a registration. */
  | {
      /** Distinguishes the messages. */
      readonly kind: "withdrawal";
      /** The registration, without blocks. */
      readonly registration: Registration;
    }
  /** P answers that it does not write. */
  | {
      readonly kind: "ended";
      /** P's answer. */
      readonly ended: RegistrationEnded;
    };

/** Undefined for a `type` of another extension. Errors: `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodePushControl(message: ExtensionMessage): PushControlMessage | undefined {
  const { type, ...rest } = message;
  const fields = pushFields(rest);
  if (type === WITHDRAW) {
    const registration = decodeRegistration(rest, true);
    if (registration.own === undefined) throw fields.malformed(PEER, "a map", undefined);
    return { kind: "withdrawal", registration };
  }
  if (type !== ENDED) return undefined;
  const code = fields.raw("code");
  return {
    kind: "ended",
    ended: {
      wireId: id(fields, "request_id"),
      incarnation: id(fields, "incarnation"),
      generation: fields.integer("generation"),
      // A newer peer may have codes that this version does not know.
      code: KV_ERROR_CODES.find((each) => each === code) ?? "KV_TRANSFER_FAILED",
      message: id(fields, "message"),
    },
  };
}

function readPrefill(fields: MapFields): NonNullable<RegistrationExtension["prefill"]> {
  return {
    wireId: id(fields, "request_id"),
    incarnation: id(fields, "incarnation"),
    generation: fields.integer("generation"),
  };
}

function pushFields(value: unknown): MapFields {
  return new MapFields(value, { what: "push message", maxItems: 1024 });
}

function id(fields: MapFields, name: string): string {
  return fields.string(name, { minLength: 1, maxLength: MAX_ID_LENGTH });
}

function computedBlocks(fields: MapFields): readonly number[] {
  const blocks = fields.integers("computed_blocks");
  if (blocks !== undefined) return blocks;
  throw fields.malformed("computed_blocks", "a list of integers", blocks);
}
