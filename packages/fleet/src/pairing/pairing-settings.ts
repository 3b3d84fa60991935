import type { Clock, Log } from "@kv/interface";
import type { InstanceGet } from "./engine-facts.js";

/**
 * What pairs with an instance whose side channel was never read, because its address is not known
 * or it cannot be reached. `lenient`: every instance, as without pairing; it is logged. `label`:
 * instances with its label. `strict`: none. With `off`, no side channel is read and all instances
 * pair.
 */
export const PAIRING_MODES = ["lenient", "label", "strict", "off"] as const;
/** One of `PAIRING_MODES`. */
export type PairingMode = (typeof PAIRING_MODES)[number];

/** How instances are paired. */
export interface PairingSettings {
  readonly mode: Exclude<PairingMode, "off">;
  readonly timeoutMs: number;
  /** Between two readings of an engine that shows no sign of a restart, in milliseconds. */
  readonly refreshMs: number;
  /**
   * The file with the key of the side channels, where the engines have one (`handshake_key_file`).
   */
  readonly handshakeKeyFile?: string | undefined;
}

/** What `Pairing` gets from its user. */
export interface PairingOptions extends PairingSettings {
  readonly get: InstanceGet;
  readonly clock: Clock;
  /** Gets one line when an instance finds no partner any more, or is paired unread. */
  readonly log: Log;
}
