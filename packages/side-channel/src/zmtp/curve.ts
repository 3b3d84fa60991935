import {
  createPrivateKey,
  createPublicKey,
  diffieHellman,
  generateKeyPairSync,
  hkdfSync,
  type KeyObject,
  randomBytes,
  timingSafeEqual,
} from "node:crypto";
import { KvError } from "@kv/interface";
import { hsalsa, xsalsa20poly1305 } from "@noble/ciphers/salsa.js";
import type { ZmtpFrame } from "./frames.js";
import {
  decodeCommand,
  decodeMetadata,
  encodeCommand,
  encodeMetadata,
  type ZmtpMetadata,
} from "./handshake.js";
import { unexpectedCommand, type ZmtpMechanism } from "./session.js";

// CURVE's boxes as in NaCl: X25519, which is Node's, and HSalsa20 and XSalsa20-Poly1305 of
// @noble/ciphers, because Node's OpenSSL lacks Salsa20.

export interface CurveKeyPair {
  /** 32 bytes. */
  readonly publicKey: Uint8Array;
  readonly privateKey: KeyObject;
}

const text = new TextEncoder();
const SIGMA = "expand 32-byte k";
/** The prefix of a secret key in Node's encoding. */
const PKCS8 = Buffer.from("302e020100300506032b656e04220420", "hex");

/** From a secret key of 32 bytes; without one, a new pair. */
export function curveKeyPair(secretKey?: Uint8Array): CurveKeyPair {
  const privateKey =
    secretKey === undefined
      ? generateKeyPairSync("x25519").privateKey
      : createPrivateKey({ key: Buffer.concat([PKCS8, secretKey]), format: "der", type: "pkcs8" });
  const { x = "" } = createPublicKey(privateKey).export({ format: "jwk" });
  return { publicKey: new Uint8Array(Buffer.from(x, "base64url")), privateKey };
}

/**
 * The key of boxes between two pairs (NaCl's `crypto_box_beforenm`).
 *
 * @throws `KV_HANDSHAKE_UNTRUSTED` for a public key of low order.
 */
function boxKey(privateKey: KeyObject, publicKey: Uint8Array): Uint8Array {
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

/** Prefix and nonce have 24 bytes together. */
function seal(key: Uint8Array, prefix: string, nonce: Uint8Array, plain: Uint8Array): Uint8Array {
  return xsalsa20poly1305(key, Buffer.concat([text.encode(prefix), nonce])).encrypt(plain);
}

/** Undefined for another key or a changed box. */
function open(
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

function untrusted(why: string): KvError {
  return new KvError("KV_HANDSHAKE_UNTRUSTED", `ZMTP CURVE: the peer is refused: ${why}`);
}

// CURVE of ZMTP 3 (RFC 26): HELLO, WELCOME, INITIATE, READY, MESSAGE. As in the RFC, S and C are
// the long-term public keys of server and client, S' and C' a connection's; small letters are
// secret.

/** A group's long-term keys: a member is a server with one pair and a client with the other. */
export interface CurveKeys {
  /** Clients accept no other server. */
  readonly server: CurveKeyPair;
  /** Listeners accept no other client. */
  readonly client: CurveKeyPair;
}

export interface CurveOptions extends ZmtpMetadata {
  /** The valid keys: a server accepts each, a client uses the first. */
  readonly keys: () => readonly CurveKeys[];
  readonly random?: ((bytes: number) => Uint8Array) | undefined;
  readonly newKeyPair?: (() => CurveKeyPair) | undefined;
}

const KEY_BYTES = 32;
const MAC_BYTES = 16;
const NONCE_BYTES = 8;
const LONG_NONCE_BYTES = 16;
const COOKIE_BYTES = 96;
const VERSION_AND_PADDING_BYTES = 74;
const VOUCH_BYTES = 2 * KEY_BYTES + MAC_BYTES;
const HELLO_BYTES = 200;
const WELCOME_BYTES = 168;
/** libzmq's INITIATE and READY have about 300 and 70 bytes. */
const MAX_METADATA_COMMAND_BYTES = 1024;

/**
 * Derives the keys from a shared key (HKDF-SHA-256): whoever lacks it does not even know the public
 * keys.
 */
export function curveKeysOf(sharedKey: Uint8Array): CurveKeys {
  const pair = (role: string) =>
    curveKeyPair(
      Buffer.from(hkdfSync("sha256", sharedKey, "", `kv side channel CURVE 1 ${role}`, KEY_BYTES)),
    );
  return { server: pair("server"), client: pair("client") };
}

/** The server's side for one connection. Errors: see `ZmtpMechanism`. */
export function curveServer(options: CurveOptions): ZmtpMechanism {
  return new CurveServer(options);
}

/** The client's side for one connection. Errors: see `ZmtpMechanism`. */
export function curveClient(options: CurveOptions): ZmtpMechanism {
  return new CurveClient(options);
}

interface Welcomed {
  /** The client's HELLO was made for them. */
  readonly keys: CurveKeys;
  readonly client: Uint8Array;
  readonly privateKey: KeyObject;
  readonly cookie: Uint8Array;
}

class CurveServer implements ZmtpMechanism {
  readonly name = "CURVE";
  readonly asServer = true;
  readonly overheadBytes = MESSAGE_OVERHEAD_BYTES;
  readonly #options: CurveOptions;
  readonly #traffic = new CurveTraffic("CurveZMQMESSAGES", "CurveZMQMESSAGEC");
  #welcomed: Welcomed | undefined;

  constructor(options: CurveOptions) {
    this.#options = options;
  }

  get maxHandshakeBytes(): number {
    return this.#welcomed === undefined ? HELLO_BYTES : MAX_METADATA_COMMAND_BYTES;
  }

  open(): readonly Uint8Array[] {
    return [];
  }

  receive(command: Uint8Array) {
    const { name, data } = decodeCommand(command);
    const welcomed = this.#welcomed;
    if (welcomed === undefined) {
      if (name !== "HELLO") throw unexpectedCommand(name, data, "HELLO");
      return { send: [this.#welcome(data, command.byteLength)] };
    }
    if (name !== "INITIATE") throw unexpectedCommand(name, data, "INITIATE");
    return this.#ready(data, welcomed);
  }

  seal(frame: ZmtpFrame): ZmtpFrame {
    return this.#traffic.seal(frame);
  }

  unseal(frame: ZmtpFrame): ZmtpFrame {
    const own = this.#welcomed?.keys;
    // Removing a key ends its connections.
    if (!this.#options.keys().some(({ server }) => own !== undefined && isSame(server, own.server)))
      throw untrusted("the connection's key is no longer valid");
    return this.#traffic.unseal(frame);
  }

  #welcome(data: Uint8Array, bodyBytes: number): Uint8Array {
    if (bodyBytes !== HELLO_BYTES)
      throw malformed(`a HELLO of ${bodyBytes} bytes, not ${HELLO_BYTES}`);
    if (data[0] !== 1 || data[1] !== 0)
      throw malformed(`a HELLO of version ${data[0]}.${data[1]}, not 1.0`);
    const read = new Reader(data.subarray(VERSION_AND_PADDING_BYTES));
    const client = read.take(KEY_BYTES);
    const nonce = this.#traffic.accept(read.take(NONCE_BYTES));
    const box = read.rest();
    for (const keys of this.#options.keys()) {
      const key = boxKey(keys.server.privateKey, client);
      if (open(key, "CurveZMQHELLO---", nonce, box) === undefined) continue;
      const { random = randomBytes, newKeyPair = curveKeyPair } = this.#options;
      // The RFC lets a cookie carry the connection's secret key, but then a recorded handshake
      // would be valid on other connections. Here the key stays in the session, and the cookie is
      // random.
      const cookie = random(COOKIE_BYTES);
      const own = newKeyPair();
      const longNonce = random(LONG_NONCE_BYTES);
      this.#welcomed = { keys, client, privateKey: own.privateKey, cookie };
      const sealed = seal(key, "WELCOME-", longNonce, Buffer.concat([own.publicKey, cookie]));
      return encodeCommand("WELCOME", Buffer.concat([longNonce, sealed]));
    }
    throw untrusted("its HELLO was made for another server key");
  }

  #ready(data: Uint8Array, { keys, client, privateKey, cookie }: Welcomed) {
    const wanted =
      COOKIE_BYTES + NONCE_BYTES + MAC_BYTES + KEY_BYTES + LONG_NONCE_BYTES + VOUCH_BYTES;
    if (data.byteLength < wanted)
      throw malformed(`an INITIATE with ${data.byteLength} bytes of data, not ${wanted} or more`);
    const read = new Reader(data);
    if (!timingSafeEqual(read.take(COOKIE_BYTES), cookie))
      throw untrusted("the cookie of its INITIATE is not this connection's");
    const nonce = this.#traffic.accept(read.take(NONCE_BYTES));
    const key = boxKey(privateKey, client);
    const opened = open(key, "CurveZMQINITIATE", nonce, read.rest());
    if (opened === undefined) throw untrusted("its INITIATE cannot be decrypted");
    const initiate = new Reader(opened);
    const longTerm = initiate.take(KEY_BYTES);
    if (!timingSafeEqual(longTerm, keys.client.publicKey))
      throw untrusted("its client key is not accepted");
    const longNonce = initiate.take(LONG_NONCE_BYTES);
    const vouch = open(
      boxKey(privateKey, longTerm),
      "VOUCH---",
      longNonce,
      initiate.take(VOUCH_BYTES),
    );
    if (
      vouch === undefined ||
      !timingSafeEqual(vouch, Buffer.concat([client, keys.server.publicKey]))
    )
      throw untrusted("it does not prove its client key");
    const peer = decodeMetadata(initiate.rest());
    const readyNonce = this.#traffic.next();
    const ready = seal(key, "CurveZMQREADY---", readyNonce, encodeMetadata(this.#options));
    this.#traffic.key = key;
    return { send: [encodeCommand("READY", Buffer.concat([readyNonce, ready]))], peer };
  }
}

class CurveClient implements ZmtpMechanism {
  readonly name = "CURVE";
  readonly asServer = false;
  readonly overheadBytes = MESSAGE_OVERHEAD_BYTES;
  readonly #options: CurveOptions;
  readonly #keys: CurveKeys;
  /** C' and c'. */
  readonly #own: CurveKeyPair;
  readonly #traffic = new CurveTraffic("CurveZMQMESSAGEC", "CurveZMQMESSAGES");
  #boxKey: Uint8Array | undefined;

  constructor(options: CurveOptions) {
    const { keys, newKeyPair = curveKeyPair } = options;
    const [first] = keys();
    if (first === undefined) throw new KvError("KV_INTERNAL", "CURVE has no key");
    this.#options = options;
    this.#keys = first;
    this.#own = newKeyPair();
  }

  get maxHandshakeBytes(): number {
    return this.#boxKey === undefined ? WELCOME_BYTES : MAX_METADATA_COMMAND_BYTES;
  }

  open(): readonly Uint8Array[] {
    const start = new Uint8Array(VERSION_AND_PADDING_BYTES);
    start[0] = 1;
    const nonce = this.#traffic.next();
    const key = boxKey(this.#own.privateKey, this.#keys.server.publicKey);
    const signature = seal(key, "CurveZMQHELLO---", nonce, new Uint8Array(64));
    return [encodeCommand("HELLO", Buffer.concat([start, this.#own.publicKey, nonce, signature]))];
  }

  receive(command: Uint8Array) {
    const { name, data } = decodeCommand(command);
    const key = this.#boxKey;
    if (key === undefined) {
      if (name !== "WELCOME") throw unexpectedCommand(name, data, "WELCOME");
      return { send: [this.#initiate(data, command.byteLength)] };
    }
    if (name !== "READY") throw unexpectedCommand(name, data, "READY");
    if (data.byteLength < NONCE_BYTES + MAC_BYTES)
      throw malformed(`a READY with ${data.byteLength} bytes of data`);
    const read = new Reader(data);
    const metadata = open(
      key,
      "CurveZMQREADY---",
      this.#traffic.accept(read.take(NONCE_BYTES)),
      read.rest(),
    );
    if (metadata === undefined) throw untrusted("its READY cannot be decrypted");
    this.#traffic.key = key;
    return { send: [], peer: decodeMetadata(metadata) };
  }

  seal(frame: ZmtpFrame): ZmtpFrame {
    return this.#traffic.seal(frame);
  }

  unseal(frame: ZmtpFrame): ZmtpFrame {
    return this.#traffic.unseal(frame);
  }

  #initiate(data: Uint8Array, bodyBytes: number): Uint8Array {
    if (bodyBytes !== WELCOME_BYTES)
      throw malformed(`a WELCOME of ${bodyBytes} bytes, not ${WELCOME_BYTES}`);
    const { random = randomBytes } = this.#options;
    const { server, client } = this.#keys;
    const own = this.#own;
    const read = new Reader(data);
    const welcomeNonce = read.take(LONG_NONCE_BYTES);
    const opened = open(
      boxKey(own.privateKey, server.publicKey),
      "WELCOME-",
      welcomeNonce,
      read.rest(),
    );
    if (opened === undefined)
      throw untrusted("its WELCOME was not made with the expected server key");
    const welcome = new Reader(opened);
    const connectionKey = welcome.take(KEY_BYTES);
    const cookie = welcome.rest();
    const key = boxKey(own.privateKey, connectionKey);
    const longNonce = random(LONG_NONCE_BYTES);
    const vouchKey = boxKey(client.privateKey, connectionKey);
    const vouch = seal(
      vouchKey,
      "VOUCH---",
      longNonce,
      Buffer.concat([own.publicKey, server.publicKey]),
    );
    const nonce = this.#traffic.next();
    const inner = Buffer.concat([
      client.publicKey,
      longNonce,
      vouch,
      encodeMetadata(this.#options),
    ]);
    this.#boxKey = key;
    return encodeCommand(
      "INITIATE",
      Buffer.concat([cookie, nonce, seal(key, "CurveZMQINITIATE", nonce, inner)]),
    );
  }
}

const MESSAGE = Uint8Array.of(7, ...text.encode("MESSAGE"));
/** Name, nonce, MAC and flags of a MESSAGE. */
const MESSAGE_OVERHEAD_BYTES = MESSAGE.byteLength + NONCE_BYTES + MAC_BYTES + 1;
const MORE = 0x01;
const COMMAND = 0x02;

class CurveTraffic {
  key: Uint8Array = new Uint8Array(0);
  readonly #sends: string;
  readonly #receives: string;
  #sent = 0n;
  #received = -1n;

  constructor(sends: string, receives: string) {
    this.#sends = sends;
    this.#receives = receives;
  }

  next(): Uint8Array {
    const nonce = new Uint8Array(NONCE_BYTES);
    this.#sent += 1n;
    new DataView(nonce.buffer).setBigUint64(0, this.#sent);
    return nonce;
  }

  /** Refuses a nonce that is not above all earlier ones: the command is a replay. */
  accept(nonce: Uint8Array): Uint8Array {
    const number = new DataView(nonce.buffer, nonce.byteOffset).getBigUint64(0);
    if (number <= this.#received)
      throw untrusted(`a command has nonce ${number} after ${this.#received}: it was sent before`);
    this.#received = number;
    return nonce;
  }

  seal({ more, command, body }: ZmtpFrame): ZmtpFrame {
    const nonce = this.next();
    const flags = Uint8Array.of((more ? MORE : 0) | (command ? COMMAND : 0));
    const box = seal(this.key, this.#sends, nonce, Buffer.concat([flags, body]));
    // As libzmq: the frame's own flags are inside.
    return { more: false, command: false, body: Buffer.concat([MESSAGE, nonce, box]) };
  }

  unseal({ more, body }: ZmtpFrame): ZmtpFrame {
    const name = body.subarray(0, MESSAGE.byteLength);
    if (more || body.byteLength < MESSAGE_OVERHEAD_BYTES || Buffer.compare(name, MESSAGE) !== 0)
      throw malformed(`a frame of ${body.byteLength} bytes is not an encrypted message`);
    const read = new Reader(body.subarray(MESSAGE.byteLength));
    const opened = open(this.key, this.#receives, this.accept(read.take(NONCE_BYTES)), read.rest());
    if (opened === undefined) throw untrusted("a message cannot be decrypted");
    const flags = opened[0] ?? 0;
    return {
      more: (flags & MORE) !== 0,
      command: (flags & COMMAND) !== 0,
      body: opened.subarray(1),
    };
  }
}

class Reader {
  #bytes: Uint8Array;

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
  }

  take(count: number): Uint8Array {
    const field = this.#bytes.subarray(0, count);
    this.#bytes = this.#bytes.subarray(count);
    return field;
  }

  rest(): Uint8Array {
    return this.#bytes;
  }
}

function isSame(one: CurveKeyPair, other: CurveKeyPair): boolean {
  return timingSafeEqual(one.publicKey, other.publicKey);
}

function malformed(why: string): KvError {
  return new KvError("KV_WIRE_MALFORMED", `ZMTP CURVE: the peer sent ${why}`);
}
