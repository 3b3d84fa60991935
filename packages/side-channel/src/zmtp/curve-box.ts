import {
  createPrivateKey,
  createPublicKey,
  diffieHellman,
  generateKeyPairSync,
  type KeyObject,
} from "node:crypto";
import { KvError } from "@kv/interface";
import { hsalsa, xsalsa20poly1305 } from "@noble/ciphers/salsa.js";

// Boxes of CURVE: X25519, HSalsa20 and XSalsa20-Poly1305, as in NaCl. X25519 is Node's;
// @noble/ciphers has Salsa20, which Node's OpenSSL lacks.

/** A key pair of X25519. */
export interface CurveKeyPair {
  /** What the other side knows; 32 bytes. */
  readonly publicKey: Uint8Array;
  /** The secret key. Node does not print what it holds. */
  readonly privateKey: KeyObject;
}

const text = new TextEncoder();
const SIGMA = "expand 32-byte k";
/** What precedes a secret key in the encoding that Node reads. */
const PKCS8 = Buffer.from("302e020100300506032b656e04220420", "hex");

/**
 * The key pair of a secret key of 32 bytes; without one, a new pair. Throws nothing for 32 bytes.
 */
export function curveKeyPair(secretKey?: Uint8Array): CurveKeyPair {
  const privateKey =
    secretKey === undefined
      ? generateKeyPairSync("x25519").privateKey
      : createPrivateKey({ key: Buffer.concat([PKCS8, secretKey]), format: "der", type: "pkcs8" });
  const { x = "" } = createPublicKey(privateKey).export({ format: "jwk" });
  return { publicKey: new Uint8Array(Buffer.from(x, "base64url")), privateKey };
}

/**
 * The key of boxes between two pairs (`crypto_box_beforenm` of NaCl).
 *
 * @throws `KV_HANDSHAKE_UNTRUSTED` for a public key of low order.
 */
export function boxKey(privateKey: KeyObject, publicKey: Uint8Array): Uint8Array {
  let shared: Uint8Array;
  try {
    // Node reads this form five times as fast as the others.
    const key = { kty: "OKP", crv: "X25519", x: Buffer.from(publicKey).toString("base64url") };
    shared = diffieHellman({ privateKey, publicKey: createPublicKey({ key, format: "jwk" }) });
  } catch {
    throw untrusted("its public key is not valid");
  }
  const out = new Uint32Array(8);
  hsalsa(words(text.encode(SIGMA)), words(shared), new Uint32Array(4), out);
  return new Uint8Array(out.buffer);
}

function words(bytes: Uint8Array): Uint32Array {
  return new Uint32Array(Uint8Array.from(bytes).buffer);
}

/** Encrypts and authenticates. Prefix and nonce have 24 bytes together. */
export function seal(
  key: Uint8Array,
  prefix: string,
  nonce: Uint8Array,
  plain: Uint8Array,
): Uint8Array {
  return xsalsa20poly1305(key, Buffer.concat([text.encode(prefix), nonce])).encrypt(plain);
}

/** Undefined when the box was made with another key or was changed. */
export function open(
  key: Uint8Array,
  prefix: string,
  nonce: Uint8Array,
  box: Uint8Array,
): Uint8Array | undefined {
  try {
    return xsalsa20poly1305(key, Buffer.concat([text.encode(prefix), nonce])).decrypt(box);
  } catch {
    return undefined;
  }
}

/** The error of a peer whose keys or boxes are not accepted. */
export function untrusted(why: string): KvError {
  return new KvError("KV_HANDSHAKE_UNTRUSTED", `ZMTP CURVE: the peer is refused: ${why}`);
}
