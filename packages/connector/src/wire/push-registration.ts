import { type BlockIds, KvError } from "@kv/interface";
import { fieldsOf, malformed } from "./fields.js";
import { HOST } from "./host.js";

const WHAT = "push registration";
const MAX_GROUPS = 1024;

/** A decode side's offer of its blocks (vLLM 0.33, push_scheduler.py): the body of a `PUSH_REG:` notification. */
export interface PushRegistration {
  /** The decode side's own id of the request. */
  readonly requestId: string;
  readonly decodeEngineId: string;
  readonly decodeHost: string;
  readonly decodePort: number;
  readonly decodeTpSize: number;
  /** Logical block ids per KV cache group, to be written into. */
  readonly localBlockIds: BlockIds;
  /** The prefill engine that is to write. */
  readonly remoteEngineId: string;
  readonly remoteHost: string;
  readonly remotePort: number;
  readonly remoteTpSize: number;
  readonly remotePpSize: number;
  readonly rest: Readonly<Record<string, unknown>>;
}

/** The map of a notification of kind `push-registration`, under vLLM's keys and in its order. */
export function encodePushRegistration(registration: PushRegistration): Readonly<Record<string, unknown>> {
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
    ...registration.rest,
  };
}

export interface DecodePushRegistrationOptions {
  /** `local_block_ids` may be an empty list: an offer of nothing, between our own peers. */
  readonly mayOfferNothing?: boolean;
}

/** Errors: `KV_WIRE_MALFORMED` naming the field, `KV_WIRE_LIMIT_EXCEEDED`. An empty group is refused: vLLM reads it as the whole list. */
export function decodePushRegistration(
  map: Readonly<Record<string, unknown>>,
  { mayOfferNothing = false }: DecodePushRegistrationOptions = {},
): PushRegistration {
  const fields = fieldsOf(map, WHAT, MAX_GROUPS);
  const port = { min: 1, max: 65_535 };
  const size = { min: 1, max: 65_536 };
  return {
    requestId: fields.text("request_id"),
    decodeEngineId: fields.text("decode_engine_id"),
    decodeHost: host(fields.text("decode_host")),
    decodePort: fields.integer("decode_port", port),
    decodeTpSize: fields.integer("decode_tp_size", size),
    localBlockIds: groups(fields.raw("local_block_ids"), mayOfferNothing),
    remoteEngineId: fields.text("remote_engine_id"),
    remoteHost: fields.text("remote_host"),
    remotePort: fields.integer("remote_port", port),
    remoteTpSize: fields.integer("remote_tp_size", size),
    remotePpSize: fields.integer("remote_pp_size", { ...size, fallback: 1 }),
    rest: fields.rest(),
  };
}

function host(value: string): string {
  if (HOST.test(value)) return value;
  throw malformed(WHAT, "decode_host", "a host name or an IP address", value);
}

function groups(value: unknown, mayBeEmpty: boolean): BlockIds {
  if (mayBeEmpty && Array.isArray(value) && value.length === 0) return [];
  if (!Array.isArray(value) || value.length === 0)
    throw malformed(WHAT, "local_block_ids", "a list of block ids per group", value);
  if (value.length > MAX_GROUPS) {
    throw new KvError(
      "KV_WIRE_LIMIT_EXCEEDED",
      `${WHAT}: local_block_ids has ${value.length} groups, at most ${MAX_GROUPS} are taken`,
    );
  }
  return value.map((group: unknown, index) => {
    const isIds = (ids: unknown): ids is number[] =>
      Array.isArray(ids) &&
      ids.length > 0 &&
      ids.every((id) => typeof id === "number" && Number.isSafeInteger(id) && id >= 0);
    if (isIds(group)) return group;
    throw malformed(WHAT, `local_block_ids[${index}]`, "a list of at least one block id", group);
  });
}
