import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import type { Clock } from "@kv/interface";

/** How long a challenge is valid. */
const VALID_MS = 60_000;
/** Nonces that are remembered at most. Only holders of the key add to them. */
const MAX_NONCES = 65_536;
const STAMP_BYTES = 16;

/**
 * The challenges of a listener. A challenge is a time and a random number, authenticated with a secret of this process: none is stored, so
 * strangers who ask for many take no memory. A nonce counts once while the challenge that it was used with may be valid.
 */
export class Challenges {
  readonly #clock: Clock;
  readonly #secret = randomBytes(32);
  /** When each nonce was used, the oldest first. */
  readonly #nonces = new Map<string, number>();

  constructor({ clock }: { readonly clock: Clock }) {
    this.#clock = clock;
  }

  /** A new challenge of 32 bytes. */
  issue(): Uint8Array {
    const stamp = Buffer.concat([Buffer.alloc(8), randomBytes(8)]);
    stamp.writeDoubleBE(this.#clock.now());
    return Buffer.concat([stamp, this.#digest(stamp)]);
  }

  /** Whether this process issued the challenge less than a minute ago. */
  isValid(challenge: Uint8Array): boolean {
    const bytes = Buffer.from(challenge);
    const stamp = bytes.subarray(0, STAMP_BYTES);
    const digest = bytes.subarray(STAMP_BYTES);
    if (digest.byteLength !== STAMP_BYTES || !timingSafeEqual(digest, this.#digest(stamp))) return false;
    const ageMs = this.#clock.now() - stamp.readDoubleBE();
    return ageMs >= 0 && ageMs < VALID_MS;
  }

  /** Records a nonce. False when it was used before. Call it only for a message with a valid proof. */
  use(nonce: Uint8Array): boolean {
    const nowMs = this.#clock.now();
    for (const [oldest, atMs] of this.#nonces) {
      if (this.#nonces.size < MAX_NONCES && nowMs - atMs < VALID_MS) break;
      this.#nonces.delete(oldest);
    }
    const name = Buffer.from(nonce).toString("base64");
    if (this.#nonces.has(name)) return false;
    this.#nonces.set(name, nowMs);
    return true;
  }

  #digest(stamp: Uint8Array): Buffer {
    return createHmac("sha256", this.#secret).update(stamp).digest().subarray(0, STAMP_BYTES);
  }
}
