import { KvError } from "@kv/interface";

export interface ZmtpCommand {
  readonly name: string;
  readonly data: Uint8Array;
}

/** What a peer's READY says. */
export interface ZmtpMetadata {
  readonly socketType: string;
  /** The routing id of a DEALER. @default "" */
  readonly identity?: string | undefined;
}

/** Bytes of a command's body. libzmq's READY has about 60; CURVE's longest has about 400. */
export const MAX_COMMAND_BYTES = 4096;

export function encodeCommand(name: string, data: Uint8Array = new Uint8Array(0)): Uint8Array {
  return Buffer.concat([named(name), data]);
}

/** @throws `KV_WIRE_MALFORMED`. */
export function decodeCommand(body: Uint8Array): ZmtpCommand {
  const length = body[0] ?? 0;
  if (length === 0 || body.byteLength < 1 + length)
    throw malformed(`a command of ${body.byteLength} bytes has no name`);
  return { name: latin1(body.subarray(1, 1 + length)), data: body.subarray(1 + length) };
}

/** REQ, DEALER and ROUTER name an identity. */
export function encodeMetadata({ socketType, identity = "" }: ZmtpMetadata): Uint8Array {
  const type = property("Socket-Type", socketType);
  if (socketType === "SUB") return type;
  return Buffer.concat([type, property("Identity", identity)]);
}

function property(name: string, value: string): Uint8Array {
  const length = Buffer.alloc(4);
  length.writeUInt32BE(value.length);
  return Buffer.concat([named(name), length, Buffer.from(value)]);
}

function named(name: string): Uint8Array {
  return Buffer.concat([Uint8Array.of(name.length), Buffer.from(name)]);
}

/**
 * Ignores the case of names.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
export function decodeMetadata(bytes: Uint8Array): ZmtpMetadata {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const properties = new Map<string, string>();
  for (let at = 0; at < bytes.byteLength; ) {
    const nameEnd = at + 1 + (bytes[at] ?? 0);
    const valueAt = nameEnd + 4;
    if (nameEnd === at + 1 || valueAt > bytes.byteLength)
      throw malformed(`metadata ends at byte ${at}`);
    const end = valueAt + view.getUint32(nameEnd);
    if (end > bytes.byteLength)
      throw malformed(`a value of the metadata ends at byte ${end} of ${bytes.byteLength}`);
    const name = latin1(bytes.subarray(at + 1, nameEnd)).toLowerCase();
    properties.set(name, latin1(bytes.subarray(valueAt, end)));
    at = end;
  }
  const socketType = properties.get("socket-type");
  if (socketType === undefined) throw malformed("the metadata names no socket type");
  return { socketType, identity: properties.get("identity") };
}

/** A PING has a time to live of two bytes and a context to send back. */
export function encodePong(ping: Uint8Array): Uint8Array {
  return encodeCommand("PONG", ping.subarray(2, 2 + 16));
}

export function errorReason(data: Uint8Array): string {
  return latin1(data.subarray(1, 1 + (data[0] ?? 0))).replace(/[^\x20-\x7e]/g, "?");
}

function latin1(bytes: Uint8Array): string {
  return String.fromCharCode(...bytes);
}

export function malformed(why: string): KvError {
  return new KvError("KV_WIRE_MALFORMED", `ZMTP: ${why}`);
}

export type ZmtpMechanismName = "NULL" | "CURVE";

export interface ZmtpGreeting {
  readonly mechanism: string;
  /** The sender is the mechanism's server; only CURVE has one. */
  readonly asServer: boolean;
  readonly minor: number;
}

export const GREETING_BYTES = 64;

const MECHANISM_AT = 12;
const MECHANISM_BYTES = 20;
const AS_SERVER_AT = 32;

/** ZMTP 3.1: signature, version, mechanism, as-server, padding. */
export function encodeGreeting(mechanism: ZmtpMechanismName, asServer: boolean): Uint8Array {
  const bytes = new Uint8Array(GREETING_BYTES);
  bytes.set([0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1]);
  bytes.set(new TextEncoder().encode(mechanism), MECHANISM_AT);
  bytes[AS_SERVER_AT] = asServer ? 1 : 0;
  return bytes;
}

/**
 * Notices another protocol at its first byte.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
export function checkGreetingStart(bytes: Uint8Array): void {
  const [first] = bytes;
  const tenth = bytes[9];
  const major = bytes[10];
  // The bytes between are padding, or a length in ZMTP 1's form. Later major versions fall back to
  // 3.
  if (first !== undefined && first !== 0xff)
    throw notZmtp(`its first byte is 0x${first.toString(16)}, not 0xff`);
  if (tenth !== undefined && (tenth & 1) === 0)
    throw notZmtp(`its tenth byte is 0x${tenth.toString(16)}, not 0x7f`);
  if (major !== undefined && major < 3) throw notZmtp(`its version is ${major}, not 3 or later`);
}

/** @throws `KV_WIRE_MALFORMED`. */
export function decodeGreeting(bytes: Uint8Array): ZmtpGreeting {
  checkGreetingStart(bytes);
  const name = bytes.subarray(MECHANISM_AT, MECHANISM_AT + MECHANISM_BYTES);
  const end = name.indexOf(0);
  return {
    mechanism: String.fromCharCode(...(end === -1 ? name : name.subarray(0, end))),
    asServer: bytes[AS_SERVER_AT] === 1,
    minor: bytes[10] === 3 ? (bytes[11] ?? 0) : 1,
  };
}

function notZmtp(why: string): KvError {
  return malformed(`the peer's greeting is refused: ${why}`);
}
