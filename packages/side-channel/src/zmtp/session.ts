import { KvError } from "@kv/interface";
import { encodeFrames, FrameReader, type ZmtpFrame, type ZmtpFrameHeader } from "./frames.js";
import {
  checkGreetingStart,
  decodeCommand,
  decodeGreeting,
  decodeMetadata,
  encodeCommand,
  encodeGreeting,
  encodeMetadata,
  encodePong,
  errorReason,
  GREETING_BYTES,
  MAX_COMMAND_BYTES,
  malformed,
  type ZmtpMechanismName,
  type ZmtpMetadata,
} from "./handshake.js";

export interface ZmtpSessionOptions {
  readonly socketType: "ROUTER" | "DEALER" | "REQ" | "SUB";
  /** The routing id of a DEALER. @default "" */
  readonly identity?: string | undefined;
  /** Accepted types of the other side's socket. */
  readonly peerTypes: readonly string[];
  /** Frames of a received message, with its delimiter. */
  readonly maxFrames: number;
  /** Bytes of a received message, all frames together, checked when a header arrives. */
  readonly maxMessageBytes: number;
  /** Default: NULL. */
  readonly mechanism?: ZmtpMechanism | undefined;
}

/**
 * `send`: bytes of the handshake or a PONG to send in this order. `ready`: messages may be sent;
 * with the peer's minor version of ZMTP 3.
 */
export type ZmtpEvent =
  | { readonly type: "send"; readonly chunks: readonly Uint8Array[] }
  | { readonly type: "ready"; readonly minor: number }
  | { readonly type: "message"; readonly frames: readonly Uint8Array[] };

/** libzmq sends one PING per heartbeat interval. */
const MAX_COMMANDS_PER_CHUNK = 64;

/**
 * One ZMTP 3.0 or 3.1 connection (RFCs 23 and 37) without the socket: bytes go into `push`, and
 * `read` returns one event at a time. Limits apply before memory is allocated. After an error the
 * connection must be closed.
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
  #unannounced = false;
  #frames: Uint8Array[] = [];
  #messageBytes = 0;
  #commands = 0;

  constructor(options: ZmtpSessionOptions) {
    this.#options = options;
    this.#mechanism = options.mechanism ?? nullMechanism(options);
    this.greeting = encodeGreeting(this.#mechanism.name, this.#mechanism.asServer);
  }

  /** The peer's routing id; "" during the handshake. */
  get peerIdentity(): string {
    return this.#peer?.identity ?? "";
  }

  get partial(): boolean {
    return this.#reader.partial || this.#frames.length > 0;
  }

  get greetingBegun(): boolean {
    return this.#greetedBytes > 0;
  }

  get greetingComplete(): boolean {
    return this.#greetedBytes === GREETING_BYTES;
  }

  get unread(): boolean {
    return this.#reader.unread;
  }

  push(chunk: Uint8Array): void {
    this.#commands = 0;
    this.#reader.push(chunk);
  }

  /**
   * Undefined until more bytes come.
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

  /** In chunks to write in this order. */
  encode(frames: readonly Uint8Array[]): Uint8Array[] {
    const last = frames.length - 1;
    return encodeFrames(
      frames.map((body, at) => this.#mechanism.seal({ more: at < last, command: false, body })),
    );
  }

  #encodeCommand(body: Uint8Array): Uint8Array[] {
    return encodeFrames([this.#mechanism.seal({ more: false, command: true, body })]);
  }

  /** Subscribes a SUB to all topics, after the handshake. */
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
    // libzmq's servers do not set this flag.
    if (asServer && this.#mechanism.asServer)
      throw malformed(`both sides are the server of ${name}`);
    this.#minor = minor;
    return { type: "send", chunks: encodeCommands(this.#mechanism.open()) };
  }

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

/** One connection's security: its handshake, then its frames. */
export interface ZmtpMechanism {
  readonly name: ZmtpMechanismName;
  readonly asServer: boolean;
  /** Per frame. */
  readonly overheadBytes: number;
  /** Limits the next handshake command's body, whose header is checked. */
  readonly maxHandshakeBytes: number;
  /** The first commands, once both greetings are there. */
  open(): readonly Uint8Array[];
  /**
   * Takes a handshake command. `peer` ends the handshake.
   *
   * @throws `KV_WIRE_MALFORMED`, `KV_HANDSHAKE_UNTRUSTED`.
   */
  receive(command: Uint8Array): {
    readonly send: readonly Uint8Array[];
    readonly peer?: ZmtpMetadata | undefined;
  };
  seal(frame: ZmtpFrame): ZmtpFrame;
  /** @throws `KV_WIRE_MALFORMED`, `KV_HANDSHAKE_UNTRUSTED`. */
  unseal(frame: ZmtpFrame): ZmtpFrame;
}

/** Neither authenticated nor encrypted, as vLLM's side channel. */
export function nullMechanism(metadata: ZmtpMetadata): ZmtpMechanism {
  return {
    name: "NULL",
    asServer: false,
    overheadBytes: 0,
    maxHandshakeBytes: MAX_COMMAND_BYTES,
    open: () => [encodeCommand("READY", encodeMetadata(metadata))],
    receive(command) {
      const { name, data } = decodeCommand(command);
      if (name === "READY") return { send: [], peer: decodeMetadata(data) };
      throw unexpectedCommand(name, data, "READY");
    },
    seal: (frame) => frame,
    unseal: (frame) => frame,
  };
}

export function unexpectedCommand(name: string, data: Uint8Array, wanted: string): KvError {
  const what =
    name === "ERROR"
      ? `the peer refused the connection: ${errorReason(data) || "no reason given"}`
      : `the peer sent the command ${name.replace(/[^\x20-\x7e]/g, "?")}, not ${wanted}`;
  return malformed(what);
}

function encodeCommands(bodies: readonly Uint8Array[]): Uint8Array[] {
  return encodeFrames(bodies.map((body) => ({ more: false, command: true, body })));
}
