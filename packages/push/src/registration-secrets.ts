import { createHmac, randomBytes } from "node:crypto";
import { type EngineAddress, engineKey } from "@kv/connector/building-blocks";

/**
 * The secrets of D's registrations, one per P. A P learns only its own, so it cannot act on D's registrations at another P. All ranks of D
 * send the same one.
 */
export class RegistrationSecrets {
  readonly #key = randomBytes(32);

  /** The secret for a P, in the form of a capability. Throws nothing. */
  of(producer: EngineAddress): string {
    return createHmac("sha256", this.#key)
      .update(engineKey(producer))
      .digest()
      .subarray(0, 16)
      .toString("base64url");
  }
}
