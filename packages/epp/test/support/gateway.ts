import { ChannelCredentials, Client, Metadata } from "@grpc/grpc-js";
import { onTestFinished } from "vitest";
import { createPicker, type PickerOptions } from "../../src/index.js";
import { EXT_PROC, HEALTH, serviceOf } from "../../src/server/grpc-server.js";

export interface RunningPicker {
  readonly picker: ReturnType<typeof createPicker>;
  readonly port: number;
  readonly healthPort: number;
  readonly metricsUrl: string;
}

/** The only instances, unless a test names others. */
export const P = "127.0.0.1:11";
export const D = "127.0.0.1:21";

/**
 * A picker on a free port without TLS, closed at once after the test. Its instances are neither
 * paired nor checked, unless `options` say so.
 */
export async function runPicker(options: PickerOptions = {}): Promise<RunningPicker> {
  const picker = createPicker({
    prefillers: [P],
    decoders: [D],
    health: { intervalMs: 0 },
    pairing: { mode: "off" },
    tls: false,
    ...options,
  });
  onTestFinished(() => picker.close({ drainMs: 0, graceMs: 0 }));
  const { port, healthPort = 0, metricsUrl = "" } = await picker.listen({ port: 0 });
  return { picker, port, healthPort, metricsUrl };
}

/** A client of one service of a picker. */
export function clientOf(port: number, credentials = ChannelCredentials.createInsecure()): Client {
  const client = new Client(`127.0.0.1:${port}`, credentials, {
    "grpc.ssl_target_name_override": "localhost",
    "grpc.max_receive_message_length": -1,
  });
  onTestFinished(() => client.close());
  return client;
}

/** The gRPC health of a picker: the status, or the code of an error. */
export function checkHealth(client: Client, service: string): Promise<string | number> {
  const { Check } = serviceOf(HEALTH);
  return new Promise((resolve) => {
    if (Check === undefined) throw new Error("no Check");
    client.makeUnaryRequest(
      Check.path,
      Check.requestSerialize,
      Check.responseDeserialize as (bytes: Buffer) => { status?: number },
      { service },
      new Metadata(),
      (error, answer) =>
        resolve(error?.code ?? ["UNKNOWN", "SERVING", "NOT_SERVING"][answer?.status ?? 0] ?? ""),
    );
  });
}

/** Any message, as `@grpc/proto-loader` reads it. */
// biome-ignore lint/suspicious/noExplicitAny: messages of a test
export type Message = any;

/** One request at a gateway: the ext_proc stream of it. */
export class GatewayRequest {
  readonly answers: Message[] = [];
  /** The gRPC status at the end of the stream. */
  readonly ended: Promise<{ readonly code: number; readonly details: string }>;
  readonly #stream;
  #changed = () => {};

  constructor(client: Client) {
    const { Process } = serviceOf(EXT_PROC);
    if (Process === undefined) throw new Error("no Process");
    this.#stream = client.makeBidiStreamRequest<Message, Message>(
      Process.path,
      Process.requestSerialize,
      Process.responseDeserialize as (bytes: Buffer) => Message,
    );
    this.#stream.on("data", (message: Message) => {
      this.answers.push(message);
      this.#changed();
    });
    this.ended = new Promise((resolve) => {
      this.#stream.on("status", resolve);
      this.#stream.on("error", () => {});
    });
    void this.ended.then(() => this.#changed());
  }

  write(message: Message): void {
    this.#stream.write(message);
  }

  /** Sends the head of a request. */
  headers(headers: Record<string, string>, more: Message = {}): void {
    const all = { ":method": "POST", ":path": "/v1/completions", ...headers };
    const { end_of_stream, ...rest } = more;
    this.write({
      request_headers: { headers: headerList(all), end_of_stream },
      protocol_config: { request_body_mode: 4, response_body_mode: 4 },
      ...rest,
    });
  }

  body(body: string | Buffer, end_of_stream = true): void {
    this.write({ request_body: { body: Buffer.from(body), end_of_stream } });
  }

  /** Sends the head of an answer. */
  answerHead(status: number, more: Message = {}, contentType = "application/json"): void {
    const headers = headerList({ ":status": String(status), "content-type": contentType });
    this.write({ response_headers: { headers }, ...more });
  }

  /** Sends the head of an answer, and its end. */
  answer(...head: Parameters<GatewayRequest["answerHead"]>): void {
    this.answerHead(...head);
    this.write({ response_body: { body: Buffer.from("{}"), end_of_stream: true } });
    this.#stream.end();
  }

  /** Is served by the instances that are chosen. */
  async serve(status = 200): Promise<void> {
    await this.choice();
    this.answer(status);
    await this.ended;
  }

  /** Sends nothing more. */
  end(): void {
    this.#stream.end();
  }

  leave(): void {
    this.#stream.cancel();
  }

  /** The first message for which `find` is true; rejects when the stream ends without. */
  async find(find: (message: Message) => boolean): Promise<Message> {
    let hasEnded = false;
    void this.ended.then(() => {
      hasEnded = true;
    });
    for (;;) {
      const found = this.answers.find(find);
      if (found !== undefined) return found;
      if (hasEnded) throw new Error(`the stream ended: ${JSON.stringify(await this.ended)}`);
      await new Promise<void>((resolve) => {
        this.#changed = resolve;
      });
    }
  }

  /** The headers that the picker sets; rejects for a refusal. */
  async choice(): Promise<{
    readonly headers: Readonly<Record<string, string>>;
    readonly removed: readonly string[];
    readonly destination: string;
  }> {
    const message = await this.find(
      (each) => each.request_headers !== undefined || each.immediate_response,
    );
    if (message.immediate_response !== undefined)
      throw new Error(JSON.stringify(await this.refusal()));
    const { set_headers: set = [], remove_headers: removed = [] } =
      message.request_headers.response.header_mutation;
    return {
      headers: headersIn(set),
      removed,
      destination:
        message.dynamic_metadata.fields["envoy.lb"].structValue.fields[
          "x-gateway-destination-endpoint"
        ].stringValue,
    };
  }

  async refusal(): Promise<{
    readonly status: number;
    readonly headers: Readonly<Record<string, string>>;
    readonly error: { readonly message: string; readonly code: string; readonly type: string };
  }> {
    const message = await this.find(
      (each) => each.immediate_response !== undefined || each.request_headers,
    );
    const { status, headers, body } = message.immediate_response;
    return {
      status: status.code,
      headers: headersIn(headers.set_headers),
      ...JSON.parse(body.toString()),
    };
  }

  /** The request's body as the picker passes it on. */
  async passedBody(): Promise<Buffer> {
    const pieceOf = (message: Message) =>
      message.request_body?.response.body_mutation.streamed_response;
    await this.find((message) => pieceOf(message)?.end_of_stream === true);
    return Buffer.concat(this.answers.map((message) => pieceOf(message)?.body ?? Buffer.alloc(0)));
  }
}

/** Headers in a message. */
export function headerList(headers: Readonly<Record<string, string>>): Message {
  const raw = Object.entries(headers).map(([key, value]) => ({
    key,
    raw_value: Buffer.from(value),
  }));
  return { headers: raw };
}

function headersIn(set: Message[]): Record<string, string> {
  return Object.fromEntries(set.map(({ header }) => [header.key, header.raw_value.toString()]));
}

/** Sends a whole request, and returns it. */
export function send(
  client: Client,
  body: unknown = { prompt: "a" },
  headers: Record<string, string> = {},
  more: Message = {},
): GatewayRequest {
  const request = new GatewayRequest(client);
  request.headers(headers, more);
  request.body(typeof body === "string" || Buffer.isBuffer(body) ? body : JSON.stringify(body));
  return request;
}

/** The metadata of a subset hint. */
export function subsetHint(endpoints: readonly string[]): Message {
  const listValue = { values: endpoints.map((stringValue) => ({ stringValue })) };
  const fields = { "x-gateway-destination-endpoint-subset": { listValue } };
  return { metadata_context: { filter_metadata: { "envoy.lb.subset_hint": { fields } } } };
}
