import { KvError } from "@kv/interface";
import {
  decodeCommand,
  encodeCommand,
  encodePong,
  errorReason,
  MAX_COMMAND_BYTES,
  malformed,
  type ZmtpMetadata,
} from "./commands.js";
import { encodeFrames, FrameReader, type ZmtpFrame, type ZmtpFrameHeader } from "./frames.js";
import { checkGreetingStart, decodeGreeting, encodeGreeting, GREETING_BYTES } from "./greeting.js";
import { encodeCommands, nullMechanism, type ZmtpMechanism } from "./mechanism.js";

/** Options of `ZmtpSession`. */
export interface ZmtpSessionOptions {
  readonly socketType: "ROUTER" | "REQ" | "SUB";
  /** Types of the other side's socket that are accepted. */
  readonly peerTypes: readonly string[];
  /** Frames of a message that is received, with its delimiter. */
  readonly maxFrames: number;
  /**
   * Bytes of a message that is received, all frames together. A larger frame is refused when its
   * header arrives.
   */
  readonly maxMessageBytes: number;
  /** Default: NULL. */
  readonly mechanism?: ZmtpMechanism | undefined;
}

/**
 * What a session has read. `send`: it must send a part of the handshake, or a PONG, in this order.
 * `ready`: the handshake is over, messages may be sent; with the peer's minor version of ZMTP 3.
 */
export type ZmtpEvent =
  | { readonly type: "send"; readonly chunks: readonly Uint8Array[] }
  | { readonly type: "ready"; readonly minor: number }
  | { readonly type: "message"; readonly frames: readonly Uint8Array[] };

/** Commands of a peer in one chunk of bytes. libzmq sends one PING per heartbeat interval. */
const MAX_COMMANDS_PER_CHUNK = 64;

/**
 * One connection of ZMTP 3.0 or 3.1 (ZeroMQ's protocol over TCP, RFCs 23 and 37), without the
 * socket: received bytes go into `push`, and `read` returns one event at a time. What a peer sends
 * is limited while it arrives, before memory is allocated for it. After an error the connection
 * must be closed.
 */
export class ZmtpSession {
  readonly greeting: Uint8Array;
  readonly #options: ZmtpSessionOptions;
  readonly #mechanism: ZmtpMechanism;
  readonly #reader = new FrameReader((header) => this.#admit(header));
  readonly #greeted = new Uint8Array(GREETING_BYTES);
  #greetedBytes = 0;
  #minor = 0;
  #peer: ZmtpMetadata | undefined;
  /** The handshake is over, and `read` has not said so yet. */
  #unannounced = false;
  #frames: Uint8Array[] = [];
  #messageBytes = 0;
  #commands = 0;

  constructor(options: ZmtpSessionOptions) {
    this.#options = options;
    this.#mechanism = options.mechanism ?? nullMechanism(options.socketType);
    this.greeting = encodeGreeting(this.#mechanism.name, this.#mechanism.asServer);
  }

  /** A message has begun and is not complete. */
  get partial(): boolean {
    return this.#reader.partial || this.#frames.length > 0;
  }

  /** Bytes of the peer's greeting have arrived. */
  get greetingBegun(): boolean {
    return this.#greetedBytes > 0;
  }

  get greetingComplete(): boolean {
    return this.#greetedBytes === GREETING_BYTES;
  }

  /** Bytes have arrived that `read` has not seen. */
  get unread(): boolean {
    return this.#reader.unread;
  }

  push(chunk: Uint8Array): void {
    this.#commands = 0;
    this.#reader.push(chunk);
  }

  /**
   * The next event; undefined until more bytes come.
   *
   * @throws `KV_WIRE_MALFORMED`, `KV_WIRE_LIMIT_EXCEEDED`, `KV_HANDSHAKE_UNTRUSTED`.
   */
  read(): ZmtpEvent | undefined {
    if (this.#greetedBytes < GREETING_BYTES) return this.#readGreeting();
    for (;;) {
      if (this.#unannounced) {
        this.#unannounced = false;
        return { type: "ready", minor: this.#minor };
      }
      const sealed = this.#reader.read();
      if (sealed === undefined) return undefined;
      if (this.#peer === undefined) {
        const chunks = this.#readHandshake(sealed);
        if (chunks.length > 0) return { type: "send", chunks };
        continue;
      }
      const frame = this.#mechanism.unseal(sealed);
      const event = frame.command ? this.#readCommand(frame.body) : this.#readPart(frame);
      if (event !== undefined) return event;
    }
  }

  /** The bytes of a message, in chunks to write one after another. */
  encode(frames: readonly Uint8Array[]): Uint8Array[] {
    const last = frames.length - 1;
    return encodeFrames(
      frames.map((body, at) => this.#mechanism.seal({ more: at < last, command: false, body })),
    );
  }

  #encodeCommand(body: Uint8Array): Uint8Array[] {
    return encodeFrames([this.#mechanism.seal({ more: false, command: true, body })]);
  }

  /** The bytes with which a SUB subscribes to all topics. To be sent after the handshake. */
  encodeSubscription(): Uint8Array[] {
    // A message in ZMTP 3.0, a command in 3.1.
    if (this.#minor === 0) return this.encode([Uint8Array.of(1)]);
    return this.#encodeCommand(encodeCommand("SUBSCRIBE"));
  }

  #readGreeting(): ZmtpEvent | undefined {
    while (this.#greetedBytes < GREETING_BYTES) {
      const bytes = this.#reader.take(GREETING_BYTES - this.#greetedBytes);
      if (bytes === undefined) return undefined;
      this.#greeted.set(bytes, this.#greetedBytes);
      this.#greetedBytes += bytes.byteLength;
      checkGreetingStart(this.#greeted.subarray(0, this.#greetedBytes));
    }
    const { mechanism, asServer, minor } = decodeGreeting(this.#greeted);
    const { name } = this.#mechanism;
    if (mechanism !== name) {
      throw new KvError(
        "KV_HANDSHAKE_UNTRUSTED",
        `ZMTP: the peer's security mechanism is ${printable(mechanism)}, this side's is ${name}`,
      );
    }
    // libzmq's servers do not say that they are servers.
    if (asServer && this.#mechanism.asServer)
      throw malformed(`both sides are the server of ${name}`);
    this.#minor = minor;
    return { type: "send", chunks: encodeCommands(this.#mechanism.open()) };
  }

  /** Takes a step of the handshake. Returns what is to be sent. */
  #readHandshake({ command, body }: ZmtpFrame): readonly Uint8Array[] {
    if (!command) throw malformed("the peer sent a message before the handshake was complete");
    const { send, peer } = this.#mechanism.receive(body);
    if (peer !== undefined) {
      const { peerTypes } = this.#options;
      if (!peerTypes.includes(peer.socketType))
        throw malformed(
          `the peer's socket is ${printable(peer.socketType)}, not ${peerTypes.join(" or ")}`,
        );
      this.#peer = peer;
      this.#unannounced = true;
    }
    return encodeCommands(send);
  }

  #readCommand(body: Uint8Array): ZmtpEvent | undefined {
    this.#commands += 1;
    if (this.#commands > MAX_COMMANDS_PER_CHUNK) {
      throw tooMuch(`${this.#commands} commands in a row`, MAX_COMMANDS_PER_CHUNK);
    }
    const { name, data } = decodeCommand(body);
    if (name === "ERROR") throw malformed(`the peer ended the connection: ${errorReason(data)}`);
    // Others, such as PONG, need no answer.
    return name === "PING"
      ? { type: "send", chunks: this.#encodeCommand(encodePong(data)) }
      : undefined;
  }

  #readPart({ more, body }: ZmtpFrame): ZmtpEvent | undefined {
    this.#messageBytes += body.byteLength;
    this.#frames.push(body);
    if (more) return undefined;
    const frames = this.#frames;
    this.#frames = [];
    this.#messageBytes = 0;
    return { type: "message", frames };
  }

  #admit({ command, sizeBytes }: ZmtpFrameHeader): void {
    const { maxFrames, maxMessageBytes } = this.#options;
    if (command || this.#peer === undefined) {
      const limit =
        this.#peer === undefined ? this.#mechanism.maxHandshakeBytes : MAX_COMMAND_BYTES;
      if (sizeBytes > limit) throw tooMuch(`a command of ${sizeBytes} bytes`, limit);
      return;
    }
    const frames = this.#frames.length + 1;
    if (frames > maxFrames) throw tooMuch(`a message of more than ${maxFrames} frames`, maxFrames);
    const bytes = this.#messageBytes + sizeBytes - this.#mechanism.overheadBytes;
    if (bytes > maxMessageBytes)
      throw tooMuch(`a message of at least ${bytes} bytes`, maxMessageBytes);
  }
}

function printable(text: string): string {
  return JSON.stringify(text.slice(0, 40));
}

function tooMuch(found: string, limit: number): KvError {
  return new KvError("KV_WIRE_LIMIT_EXCEEDED", `ZMTP: ${found}; the limit is ${limit}`, {
    details: { limit },
  });
}
