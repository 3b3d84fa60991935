import { hash, randomBytes, timingSafeEqual } from "node:crypto";
import type { BlockIds } from "@kv/interface";
import { encodeMsgpack } from "../encoding/msgpack.js";

const CAPABILITY = /^[A-Za-z0-9_-]{22}$/;
/** Part of the digest's input, so that the digest is valid for nothing else. */
const DOMAIN = "kv-blocks-1";

const CAPABILITY_BYTES = 16;
/**
 * Random bytes of the next capabilities. Asking the system for each one's took a third of the time
 * of P's engine step.
 */
let random = Buffer.alloc(0);

/**
 * A new capability: 128 random bits in base64url. Who holds it may act on the request that it was
 * made for. It comes from the system's generator, not from the injected one, which is not for
 * secrets.
 */
export function newCapability(): string {
  if (random.byteLength === 0) random = randomBytes(256 * CAPABILITY_BYTES);
  const own = random.subarray(0, CAPABILITY_BYTES);
  random = random.subarray(CAPABILITY_BYTES);
  const capability = own.toString("base64url");
  own.fill(0);
  return capability;
}

/** Whether a peer's value has the form of a capability. */
export function isCapability(value: unknown): value is string {
  return typeof value === "string" && CAPABILITY.test(value);
}

/** Whether two capabilities are equal, in a time that does not depend on where they differ. */
export function sameCapability(a: string, b: string): boolean {
  const [first, second] = [Buffer.from(a), Buffer.from(b)];
  return first.byteLength === second.byteLength && timingSafeEqual(first, second);
}

/**
 * SHA-256 in hex of a request's block ids per group and of its number of tokens. D sends it with
 * its lease query, so that P answers for the blocks that D has read and for no others.
 */
export function blocksDigest(blockIds: BlockIds, numTokens: number | undefined): string {
  return hash("sha256", encodeMsgpack([DOMAIN, numTokens ?? null, blockIds]), "hex");
}
