import { KvError } from "@kv/interface";

/** A command: its name, and the data after it. */
export interface ZmtpCommand {
  readonly name: string;
  readonly data: Uint8Array;
}

/** The metadata of a peer: what its READY says. */
export interface ZmtpMetadata {
  /** `REQ`, `ROUTER` and so on. */
  readonly socketType: string;
}

/**
 * Longest body of a command, in bytes. libzmq's READY has about 60; CURVE's longest has about 400.
 */
export const MAX_COMMAND_BYTES = 4096;

export function encodeCommand(name: string, data: Uint8Array = new Uint8Array(0)): Uint8Array {
  return Buffer.concat([named(name), data]);
}

/**
 * Decodes the body of a command.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
export function decodeCommand(body: Uint8Array): ZmtpCommand {
  const length = body[0] ?? 0;
  if (length === 0 || body.byteLength < 1 + length)
    throw malformed(`a command of ${body.byteLength} bytes has no name`);
  return { name: latin1(body.subarray(1, 1 + length)), data: body.subarray(1 + length) };
}

/**
 * Encodes metadata as READY carries it. REQ, DEALER and ROUTER name an identity; here it is always
 * empty.
 */
export function encodeMetadata({ socketType }: ZmtpMetadata): Uint8Array {
  const type = property("Socket-Type", socketType);
  if (socketType === "SUB") return type;
  return Buffer.concat([type, property("Identity", "")]);
}

function property(name: string, value: string): Uint8Array {
  const length = Buffer.alloc(4);
  length.writeUInt32BE(value.length);
  return Buffer.concat([named(name), length, Buffer.from(value)]);
}

/** A name after its length. */
function named(name: string): Uint8Array {
  return Buffer.concat([Uint8Array.of(name.length), Buffer.from(name)]);
}

/**
 * Decodes metadata. Names are compared without regard to case.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
export function decodeMetadata(bytes: Uint8Array): ZmtpMetadata {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let socketType: string | undefined;
  for (let at = 0; at < bytes.byteLength; ) {
    const nameEnd = at + 1 + (bytes[at] ?? 0);
    const valueAt = nameEnd + 4;
    if (nameEnd === at + 1 || valueAt > bytes.byteLength)
      throw malformed(`metadata ends at byte ${at}`);
    const end = valueAt + view.getUint32(nameEnd);
    if (end > bytes.byteLength)
      throw malformed(`a value of the metadata ends at byte ${end} of ${bytes.byteLength}`);
    if (latin1(bytes.subarray(at + 1, nameEnd)).toLowerCase() === "socket-type")
      socketType = latin1(bytes.subarray(valueAt, end));
    at = end;
  }
  if (socketType === undefined) throw malformed("the metadata names no socket type");
  return { socketType };
}

/**
 * The answer to a PING, whose data is a time to live of two bytes and a context that is sent back.
 */
export function encodePong(ping: Uint8Array): Uint8Array {
  return encodeCommand("PONG", ping.subarray(2, 2 + 16));
}

/** The reason in the data of an ERROR command, cut to printable characters. */
export function errorReason(data: Uint8Array): string {
  return latin1(data.subarray(1, 1 + (data[0] ?? 0))).replace(/[^\x20-\x7e]/g, "?");
}

function latin1(bytes: Uint8Array): string {
  return String.fromCharCode(...bytes);
}

/** The error for what a peer must not send. */
export function malformed(why: string): KvError {
  return new KvError("KV_WIRE_MALFORMED", `ZMTP: ${why}`);
}
