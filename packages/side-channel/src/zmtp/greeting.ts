import type { KvError } from "@kv/interface";
import { malformed } from "./commands.js";

/** The security mechanisms of ZMTP that are supported here. */
export type ZmtpMechanismName = "NULL" | "CURVE";

/** What a greeting says. */
export interface ZmtpGreeting {
  readonly mechanism: string;
  /** The sender is the server of its mechanism. Only CURVE has one. */
  readonly asServer: boolean;
  /** Minor version of ZMTP 3. */
  readonly minor: number;
}

/** Length of a greeting in bytes. */
export const GREETING_BYTES = 64;

const MECHANISM_AT = 12;
const MECHANISM_BYTES = 20;
const AS_SERVER_AT = 32;

/** Encodes the greeting of ZMTP 3.1: signature, version, mechanism, as-server, padding. */
export function encodeGreeting(mechanism: ZmtpMechanismName, asServer: boolean): Uint8Array {
  const bytes = new Uint8Array(GREETING_BYTES);
  bytes.set([0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1]);
  bytes.set(new TextEncoder().encode(mechanism), MECHANISM_AT);
  bytes[AS_SERVER_AT] = asServer ? 1 : 0;
  return bytes;
}

/**
 * Refuses the beginning of a greeting that no peer of ZMTP 3 sends, so that another protocol is
 * noticed at its first byte.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
export function checkGreetingStart(bytes: Uint8Array): void {
  const [first] = bytes;
  const tenth = bytes[9];
  const major = bytes[10];
  // The bytes between are padding, or a length in the form of ZMTP 1. A later major version is
  // spoken down to 3.
  if (first !== undefined && first !== 0xff)
    throw notZmtp(`its first byte is 0x${first.toString(16)}, not 0xff`);
  if (tenth !== undefined && (tenth & 1) === 0)
    throw notZmtp(`its tenth byte is 0x${tenth.toString(16)}, not 0x7f`);
  if (major !== undefined && major < 3) throw notZmtp(`its version is ${major}, not 3 or later`);
}

/**
 * Decodes a complete greeting.
 *
 * @throws `KV_WIRE_MALFORMED`.
 */
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
