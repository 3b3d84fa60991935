import type { Clock, Log } from "@kv/interface";
import type { InstanceGet } from "./engine-facts.js";

/**
 * What pairs with an instance whose side channel was never read. `lenient`: every instance, with a
 * log line. `label`: instances with its label. `strict`: none. With `off`, no side channel is read
 * and all instances pair.
 */
export const PAIRING_MODES = ["lenient", "label", "strict", "off"] as const;
/** One of `PAIRING_MODES`. */
export type PairingMode = (typeof PAIRING_MODES)[number];

/** How instances are paired. */
export interface PairingSettings {
  readonly mode: Exclude<PairingMode, "off">;
  readonly timeoutMs: number;
  /** Unless an engine may have restarted. */
  readonly refreshMs: number;
  /** If the engines have one (`handshake_key_file`). */
  readonly handshakeKeyFile?: string | undefined;
}

/** Options of `Pairing`. */
export interface PairingOptions extends PairingSettings {
  readonly get: InstanceGet;
  readonly clock: Clock;
  /** Gets a line when an instance loses its last partner, or is paired unread. */
  readonly log: Log;
}
