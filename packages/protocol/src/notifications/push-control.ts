import { KV_ERROR_CODES } from "@kv/interface";
import { MapFields } from "../encoding/map-fields.js";
import { isCapability } from "../transfer-params/capability.js";
import { isDigest } from "../transfer-params/prompt-digest.js";
import { type ExtensionMessage, encodeNotification } from "./notifications.js";
import { decodePushRegistration, encodePushRegistration } from "./push-registration.js";
import type {
  Registrant,
  Registration,
  RegistrationEnded,
  RegistrationExtension,
  RegistrationRequest,
  RegistrationWritten,
} from "./registration.js";

/**
 * Feature name of the extension below, listed in the handshake. With it, a registration also names
 * D's rank and the generation of its blocks, D can withdraw a registration, and P sends a notice
 * when it will not write. Each registration has a secret of D, which D's withdrawal and P's answers
 * repeat: a stranger can forge neither. P writes only the KV of the prompt that the registration
 * names.
 */
export const PUSH_CONTROL = "push-control-3";

const WITHDRAW = "push_withdraw";
const ENDED = "push_ended";
const WRITTEN = "push_done";
/** The registration's key for the extension; vLLM ignores it. */
const PEER = "kv_peer";
const MAX_ID_LENGTH = 1024;

/**
 * Encodes a `PUSH_REG:` notification. With `extended` it carries the extension; only `@kv` peers
 * read it.
 */
export function encodeRegistration(
  request: RegistrationRequest,
  registrant: Registrant,
  extended: boolean,
): Uint8Array {
  const registration = registrationMap(request, registrant, extended);
  return encodeNotification({ kind: "push-registration", registration });
}

/**
 * Encodes a notification that withdraws a registration. Only for peers with the feature
 * `PUSH_CONTROL`.
 */
export function encodeWithdrawal(request: RegistrationRequest, registrant: Registrant): Uint8Array {
  const registration = registrationMap({ ...request, localBlockIds: [] }, registrant, true);
  return encodeNotification({ kind: "extension", message: { type: WITHDRAW, ...registration } });
}

/**
 * Encodes P's answer that a registration has ended. Only for peers with the feature `PUSH_CONTROL`.
 */
export function encodeRegistrationEnded(ended: RegistrationEnded): Uint8Array {
  const { wireId, incarnation, generation, secret, code, message } = ended;
  return encodeNotification({
    kind: "extension",
    message: {
      type: ENDED,
      request_id: wireId,
      incarnation,
      generation,
      secret,
      code,
      message: message.slice(0, 500),
    },
  });
}

/** Encodes P's notice that it has written. Only for a registration with the extension. */
export function encodeRegistrationWritten({
  wireId,
  readers,
  secret,
}: RegistrationWritten): Uint8Array {
  return encodeNotification({
    kind: "extension",
    message: { type: WRITTEN, request_id: wireId, readers, secret },
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
    transferId: remote.transferId,
    rest: extended ? { [PEER]: extensionMap(request, registrant) } : {},
  });
}

function extensionMap(
  { remote, ...request }: RegistrationRequest,
  { tpRank, dcpSize = 1, incarnation }: Registrant,
): Readonly<Record<string, unknown>> {
  const { lease } = remote;
  return {
    match_id: request.requestId,
    rank: tpRank,
    ...(dcpSize === 1 ? {} : { dcp_size: dcpSize }),
    incarnation,
    secret: request.secret,
    generation: request.generation,
    oldest_open: request.oldestOpen,
    ...(request.registrationGeneration === undefined
      ? {}
      : { registration_generation: request.registrationGeneration }),
    num_tokens: request.numTokens,
    ...(request.promptDigest === undefined ? {} : { prompt_digest: request.promptDigest }),
    computed_blocks: request.localComputedBlocks,
    ...(lease === undefined
      ? {}
      : {
          prefill: {
            request_id: remote.requestId,
            incarnation: lease.incarnation,
            generation: lease.generation,
            ...(lease.capability === undefined ? {} : { capability: lease.capability }),
          },
        }),
  };
}

/**
 * Reads the map of a `push-registration` notification with its extension. `mayBeEmpty` accepts a
 * registration without blocks.
 *
 * @throws `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`.
 */
export function decodeRegistration(
  map: Readonly<Record<string, unknown>>,
  mayBeEmpty = false,
): Registration {
  const registration = decodePushRegistration(map, { mayBeEmpty });
  const peer = registration.rest[PEER];
  const common = {
    wireId: registration.requestId,
    ...(registration.transferId === undefined ? {} : { transferId: registration.transferId }),
    engineId: registration.decodeEngineId,
    host: registration.decodeHost,
    port: registration.decodePort,
    tpSize: registration.decodeTpSize,
    blockIds: registration.localBlockIds,
    producerEngineId: registration.remoteEngineId,
  };
  if (peer === undefined) return { matchId: registration.requestId, ...common };
  const fields = pushFields(peer);
  const prefill = fields.raw("prefill");
  const digest = fields.raw("prompt_digest");
  if (digest !== undefined && !isDigest(digest))
    throw fields.malformed("prompt_digest", "a SHA-256 of 64 hex digits", digest);
  return {
    matchId: id(fields, "match_id"),
    ...common,
    own: {
      rank: fields.integer("rank"),
      dcpSize: fields.optionalInteger("dcp_size", { min: 1 }),
      incarnation: id(fields, "incarnation"),
      secret: secret(fields),
      generation: fields.integer("generation"),
      oldestOpen: fields.integer("oldest_open"),
      registrationGeneration: fields.optionalInteger("registration_generation"),
      numTokens: fields.integer("num_tokens"),
      ...(digest === undefined ? {} : { promptDigest: digest }),
      computedBlocks: computedBlocks(fields),
      prefill: prefill === undefined ? undefined : readPrefill(pushFields(prefill)),
    },
  };
}

/** A message of this extension. */
export type PushControlMessage =
  /** D withdraws a registration. */
  | {
      readonly kind: "withdrawal";
      readonly registration: Registration;
    }
  /** P answers that it does not write. */
  | {
      readonly kind: "ended";
      readonly ended: RegistrationEnded;
    }
  /** P answers that it has written. */
  | {
      readonly kind: "written";
      readonly written: RegistrationWritten;
    };

/**
 * Undefined for a `type` of another extension.
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
    return {
      kind: "written",
      written: {
        wireId: id(fields, "request_id"),
        readers: fields.integer("readers", { min: 1 }),
        secret: secret(fields),
      },
    };
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
      // A newer peer may have codes that this version does not know.
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
    ...(capability === undefined ? {} : { capability }),
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

function computedBlocks(fields: MapFields): readonly number[] {
  const blocks = fields.integers("computed_blocks");
  if (blocks !== undefined) return blocks;
  throw fields.malformed("computed_blocks", "a list of integers", blocks);
}
