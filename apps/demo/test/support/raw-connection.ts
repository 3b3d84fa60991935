import { once } from "node:events";
import { connect, type Socket } from "node:net";

/** A TCP connection on which a test writes HTTP by hand. */
export class RawConnection {
  readonly #socket: Socket;
  readonly #closed: Promise<void>;
  #text = "";

  private constructor(socket: Socket) {
    this.#socket = socket;
    socket.on("error", () => {});
    socket.on("data", (chunk) => {
      this.#text += String(chunk);
    });
    this.#closed = new Promise((resolve) => socket.once("close", () => resolve()));
  }

  /** `localAddress`: the address from which to connect. */
  static async open(url: string, localAddress?: string): Promise<RawConnection> {
    const { hostname, port } = new URL(url);
    const socket = connect({ port: Number(port), host: hostname, localAddress });
    const connection = new RawConnection(socket);
    await once(socket, "connect");
    return connection;
  }

  /** What the server has sent so far. */
  get text(): string {
    return this.#text;
  }

  write(text: string): this {
    this.#socket.write(text);
    return this;
  }

  /** Reads nothing from now on. */
  pause(): this {
    this.#socket.pause();
    return this;
  }

  /** Everything that the server sent until it closed the connection. */
  async untilClosed(): Promise<string> {
    await this.#closed;
    return this.#text;
  }

  /** What the server has sent when `pattern` matches it. */
  async until(pattern: RegExp): Promise<string> {
    while (!pattern.test(this.#text)) await once(this.#socket, "data");
    return this.#text;
  }

  close(): void {
    this.#socket.destroy();
  }
}

/** The text of a POST of JSON. */
export function postText(
  body: string,
  { path = "/v1/completions", headers = "", lengthBytes = Buffer.byteLength(body) } = {},
): string {
  return `POST ${path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: ${lengthBytes}\r\n${headers}\r\n${body}`;
}
