import type { KvError } from "@kv/interface";
import {
  decodeCommand,
  decodeMetadata,
  encodeCommand,
  encodeMetadata,
  errorReason,
  MAX_COMMAND_BYTES,
  malformed,
  type ZmtpMetadata,
} from "./commands.js";
import { encodeFrames, type ZmtpFrame } from "./frames.js";
import type { ZmtpMechanismName } from "./greeting.js";

/** The security of one connection: its handshake, and what it does to the frames afterwards. */
export interface ZmtpMechanism {
  readonly name: ZmtpMechanismName;
  readonly asServer: boolean;
  /** Bytes that each frame grows by. */
  readonly overheadBytes: number;
  /**
   * Longest body, in bytes, of the handshake command that comes next. A longer one is refused when
   * its header arrives.
   */
  readonly maxHandshakeBytes: number;
  /** The bodies of the commands to send when both greetings are there. */
  open(): readonly Uint8Array[];
  /**
   * Takes a command of the handshake. `peer` ends the handshake.
   *
   * @throws `KV_WIRE_MALFORMED`, `KV_HANDSHAKE_UNTRUSTED`.
   */
  receive(command: Uint8Array): {
    readonly send: readonly Uint8Array[];
    readonly peer?: ZmtpMetadata | undefined;
  };
  seal(frame: ZmtpFrame): ZmtpFrame;
  /**
   * The frame that was sealed.
   *
   * @throws `KV_WIRE_MALFORMED`, `KV_HANDSHAKE_UNTRUSTED`.
   */
  unseal(frame: ZmtpFrame): ZmtpFrame;
}

/** NULL: neither authenticated nor encrypted, as vLLM's side channel. */
export function nullMechanism(socketType: string): ZmtpMechanism {
  return {
    name: "NULL",
    asServer: false,
    overheadBytes: 0,
    maxHandshakeBytes: MAX_COMMAND_BYTES,
    open: () => [encodeCommand("READY", encodeMetadata({ socketType }))],
    receive(command) {
      const { name, data } = decodeCommand(command);
      if (name === "READY") return { send: [], peer: decodeMetadata(data) };
      throw unexpectedCommand(name, data, "READY");
    },
    seal: (frame) => frame,
    unseal: (frame) => frame,
  };
}

/** The error for another command than the one that the handshake needs next. */
export function unexpectedCommand(name: string, data: Uint8Array, wanted: string): KvError {
  const what =
    name === "ERROR"
      ? `the peer refused the connection: ${errorReason(data) || "no reason given"}`
      : `the peer sent the command ${name.replace(/[^\x20-\x7e]/g, "?")}, not ${wanted}`;
  return malformed(what);
}

/** The bytes of commands. */
export function encodeCommands(bodies: readonly Uint8Array[]): Uint8Array[] {
  return encodeFrames(bodies.map((body) => ({ more: false, command: true, body })));
}
