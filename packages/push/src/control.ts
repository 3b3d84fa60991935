import {
  decodePushRegistration,
  encodeNotification,
  encodePushRegistration,
  type OwnNotification,
} from "@kv/connector";
import { type BlockIds, KV_ERROR_CODES, KvError, type KvErrorCode } from "@kv/interface";
import type { RegistrationOrder } from "./step-metadata.js";

/**
 * What push says between our own peers beyond vLLM's protocol, named in the handshake: a registration tells which rank and which use of
 * the blocks it is of, a withdrawal takes it back, and the producer answers that no WRITE comes (any more).
 */
export const PUSH_CONTROL = "push-control-1";

const WITHDRAW = "push_withdraw";
const ENDED = "push_ended";
/** The key of a registration under which our own fields go; vLLM reads the keys that it knows. */
const PEER = "kv_peer";

/** A consumer rank's word about one request, as the producer has it. */
export interface Offer {
  /** The consumer's name of the request: what it is told under. */
  readonly wireId: string;
  /** What is compared with the producer's ids: the consumer engine's own id of the request. */
  readonly matchId: string;
  readonly engineId: string;
  readonly host: string;
  readonly port: number;
  readonly tpSize: number;
  /** Blocks to be written into, per group; empty: nothing is wanted, or wanted no longer. */
  readonly blockIds: BlockIds;
  /** The producer that is meant. */
  readonly producerEngineId: string;
  /** Of our own peers alone. */
  readonly own?: OwnOffer;
}

interface OwnOffer {
  readonly rank: number;
  /** Which process the consumer is. */
  readonly incarnation: string;
  readonly generation: number;
  readonly oldestOpen: number;
  readonly numTokens: number;
  readonly computedBlocks: readonly number[];
  /** The very request that the producer's answer named. */
  readonly prefill?: { readonly wireId: string; readonly incarnation: string; readonly generation: number };
}

/** The producer's word to one consumer rank: no WRITE of this registration is under way, and none will come. */
export interface Ended {
  readonly wireId: string;
  readonly incarnation: string;
  readonly generation: number;
  readonly code: KvErrorCode;
  readonly message: string;
}

export interface Registrant {
  readonly engineId: string;
  readonly tpSize: number;
  readonly tpRank: number;
  readonly incarnation: string;
}

/** `PUSH_REG:`, as vLLM sends it; `own`: with what only our own peers read. */
export function encodeRegistration(order: RegistrationOrder, us: Registrant, own: boolean): Uint8Array {
  return encodeNotification({ kind: "push-registration", registration: registrationMap(order, us, own) });
}

/** For our own peers alone. */
export function encodeWithdrawal(order: RegistrationOrder, us: Registrant): Uint8Array {
  const registration = registrationMap({ ...order, localBlockIds: [] }, us, true);
  return encodeNotification({ kind: "own", message: { type: WITHDRAW, ...registration } });
}

export function encodeEnded({ wireId, incarnation, generation, code, message }: Ended): Uint8Array {
  return encodeNotification({
    kind: "own",
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
  order: RegistrationOrder,
  us: Registrant,
  own: boolean,
): Readonly<Record<string, unknown>> {
  const { remote } = order;
  return encodePushRegistration({
    requestId: order.wireId,
    decodeEngineId: us.engineId,
    decodeHost: order.host,
    decodePort: order.port,
    decodeTpSize: us.tpSize,
    localBlockIds: order.localBlockIds,
    remoteEngineId: remote.engineId,
    remoteHost: remote.host,
    remotePort: remote.port,
    remoteTpSize: remote.tpSize,
    remotePpSize: remote.ppSize,
    rest: own ? { [PEER]: ownFields(order, us) } : {},
  });
}

function ownFields({ remote, ...order }: RegistrationOrder, us: Registrant): Record<string, unknown> {
  return {
    match_id: order.requestId,
    rank: us.tpRank,
    incarnation: us.incarnation,
    generation: order.generation,
    oldest_open: order.oldestOpen,
    num_tokens: order.numTokens,
    computed_blocks: order.localComputedBlocks,
    ...(remote.lease === undefined
      ? {}
      : {
          prefill: {
            request_id: remote.requestId,
            incarnation: remote.lease.incarnation,
            generation: remote.lease.generation,
          },
        }),
  };
}

/** Errors: `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodeRegistration(map: Readonly<Record<string, unknown>>, mayOfferNothing = false): Offer {
  const registration = decodePushRegistration(map, { mayOfferNothing });
  const peer = registration.rest[PEER];
  const offer = {
    wireId: registration.requestId,
    engineId: registration.decodeEngineId,
    host: registration.decodeHost,
    port: registration.decodePort,
    tpSize: registration.decodeTpSize,
    blockIds: registration.localBlockIds,
    producerEngineId: registration.remoteEngineId,
  };
  if (peer === undefined) return { ...offer, matchId: registration.requestId };
  const fields = mapOf(peer, PEER);
  return {
    ...offer,
    matchId: text(fields, "match_id"),
    own: {
      rank: whole(fields, "rank"),
      incarnation: text(fields, "incarnation"),
      generation: whole(fields, "generation"),
      oldestOpen: whole(fields, "oldest_open"),
      numTokens: whole(fields, "num_tokens"),
      computedBlocks: wholes(fields, "computed_blocks"),
      ...(fields.prefill === undefined ? {} : { prefill: prefillOf(mapOf(fields.prefill, "prefill")) }),
    },
  };
}

export type ControlMessage =
  | { readonly kind: "withdrawal"; readonly offer: Offer }
  | { readonly kind: "ended"; readonly ended: Ended };

/** Undefined for a type that is another's. Errors: `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`. */
export function decodeControl(message: OwnNotification): ControlMessage | undefined {
  const { type, ...fields } = message;
  if (type === WITHDRAW) {
    const offer = decodeRegistration(fields, true);
    if (offer.own === undefined) throw malformed(PEER, "a map", undefined);
    return { kind: "withdrawal", offer };
  }
  if (type !== ENDED) return undefined;
  const code = KV_ERROR_CODES.find((each) => each === fields.code);
  return {
    kind: "ended",
    ended: {
      wireId: text(fields, "request_id"),
      incarnation: text(fields, "incarnation"),
      generation: whole(fields, "generation"),
      // A newer peer may know more codes.
      code: code ?? "KV_TRANSFER_FAILED",
      message: text(fields, "message"),
    },
  };
}

function prefillOf(fields: Readonly<Record<string, unknown>>): NonNullable<OwnOffer["prefill"]> {
  return {
    wireId: text(fields, "request_id"),
    incarnation: text(fields, "incarnation"),
    generation: whole(fields, "generation"),
  };
}

function mapOf(value: unknown, name: string): Readonly<Record<string, unknown>> {
  if (
    typeof value === "object" &&
    value !== null &&
    !Array.isArray(value) &&
    !(value instanceof Uint8Array)
  ) {
    return value as Record<string, unknown>;
  }
  throw malformed(name, "a map", value);
}

function text(fields: Readonly<Record<string, unknown>>, name: string): string {
  const value = fields[name];
  if (typeof value === "string" && value !== "" && value.length <= 1024) return value;
  throw malformed(name, "a string of 1 to 1024 characters", value);
}

function whole(fields: Readonly<Record<string, unknown>>, name: string): number {
  const value = fields[name];
  if (typeof value === "number" && Number.isSafeInteger(value) && value >= 0) return value;
  throw malformed(name, "a whole number", value);
}

function wholes(fields: Readonly<Record<string, unknown>>, name: string): readonly number[] {
  const value = fields[name];
  if (Array.isArray(value) && value.length <= 1024) {
    return value.map((each, index) => whole({ [`${name}[${index}]`]: each as unknown }, `${name}[${index}]`));
  }
  throw malformed(name, "a list of at most 1024 whole numbers", value);
}

function malformed(name: string, wanted: string, found: unknown): KvError {
  const shown = typeof found === "string" ? JSON.stringify(found.slice(0, 80)) : typeof found;
  return new KvError("KV_WIRE_MALFORMED", `push message: ${name} is ${shown}, not ${wanted}`, {
    details: { field: name, wanted },
  });
}
