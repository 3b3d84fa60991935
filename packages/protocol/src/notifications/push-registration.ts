import type { BlockIds } from "@kv/interface";
import { MapFields } from "../encoding/map-fields.js";
import { HOST } from "../transfer-params/transfer-params.js";
import { MAX_REQUEST_ID_BYTES } from "./notifications.js";

const MAX_GROUPS = 1024;

/**
 * D registers its blocks at P: the body of vLLM 0.33's `PUSH_REG:` notification
 * (push_scheduler.py).
 */
export interface PushRegistration {
  readonly requestId: string;
  readonly decodeEngineId: string;
  readonly decodeHost: string;
  readonly decodePort: number;
  readonly decodeTpSize: number;
  /** Logical block ids per KV cache group, which P writes into. */
  readonly localBlockIds: BlockIds;
  readonly remoteEngineId: string;
  readonly remoteHost: string;
  readonly remotePort: number;
  readonly remoteTpSize: number;
  readonly remotePpSize: number;
  /** `transfer_id` of D's parameters, which vLLM 0.33 does not send; undefined when absent. */
  readonly transferId?: string | undefined;
  /** Fields that vLLM does not have, as received. */
  readonly rest: Readonly<Record<string, unknown>>;
}

/** The map of a `push-registration` notification, with vLLM's keys in vLLM's order. */
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
    ...(registration.transferId === undefined ? {} : { transfer_id: registration.transferId }),
    ...registration.rest,
  };
}

/** Options of `decodePushRegistration`. */
export interface DecodePushRegistrationOptions {
  /**
   * Accepts an empty `local_block_ids`, with which `@kv` peers withdraw a registration. @default
   * false
   */
  readonly mayBeEmpty?: boolean | undefined;
}

/**
 * Reads the map of a `push-registration` notification. An empty group is refused: vLLM reads it as
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
    decodeHost: decodeHost(fields),
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

function decodeHost(fields: MapFields): string {
  const host = fields.string("decode_host");
  if (HOST.test(host)) return host;
  throw fields.malformed("decode_host", "a host name or an IP address", host);
}

function localBlockIds(fields: MapFields, mayBeEmpty: boolean): BlockIds {
  const groups = fields.blockIds("local_block_ids", { minPerGroup: 1 });
  if (groups.length > 0 || mayBeEmpty) return groups;
  throw fields.malformed("local_block_ids", "a list of block ids per KV cache group", groups);
}
