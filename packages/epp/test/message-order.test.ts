import fc from "fast-check";
import { expect, test } from "vitest";
import {
  clientOf,
  GatewayRequest,
  headerList,
  type Message,
  runPicker,
  send,
} from "./support/gateway.js";

async function start(timeouts = {}) {
  const options = { prefillers: ["127.0.0.1:11"], decoders: ["127.0.0.1:21", "127.0.0.1:22"] };
  const running = await runPicker({ ...options, timeouts });
  const { picker } = running;
  /** Streams, then the visits of each instance. */
  const inFlight = () => [
    picker.status().in_flight,
    ...Object.values(picker.instances).flatMap((pool) => pool.list().map((one) => one.inFlight)),
  ];
  return { ...running, client: clientOf(running.port), inFlight };
}

const REQUEST = headerList({ ":method": "POST", ":path": "/v1/completions" });
const protocol_config = { request_body_mode: 4, response_body_mode: 4 };
const requestHeaders = (end_of_stream: boolean, path = "/v1/completions"): Message => ({
  request_headers: {
    headers: path === "/v1/completions" ? REQUEST : headerList({ ":method": "GET", ":path": path }),
    end_of_stream,
  },
  protocol_config,
});
const body = (of: "request" | "response", text: string, end_of_stream: boolean): Message => ({
  [`${of}_body`]: { body: Buffer.from(text), end_of_stream },
});
const answerHeaders = (status: string, served?: string): Message => ({
  response_headers: { headers: headerList({ ":status": status }) },
  ...(served === undefined
    ? {}
    : {
        metadata_context: {
          filter_metadata: {
            "envoy.lb": {
              fields: { "x-gateway-destination-endpoint-served": { stringValue: served } },
            },
          },
        },
      }),
});

const MESSAGES: readonly Message[] = [
  requestHeaders(false),
  requestHeaders(true, "/v1/models"),
  requestHeaders(true),
  body("request", '{"prompt":"a"}', true),
  body("request", '{"prompt":', false),
  body("request", '"a"}', true),
  body("request", "", true),
  body("request", "", false),
  { request_trailers: {} },
  answerHeaders("200"),
  answerHeaders("503", "127.0.0.1:22"),
  answerHeaders("200", "127.0.0.1:22"),
  body("response", "{}", true),
  body("response", "data: 1\n\n", false),
  body("response", "", true),
  { response_trailers: {} },
  {},
];
/**
 * Leaves as soon as the picker has the stream. Before its head has left, Node's HTTP/2 client does
 * not always tell the server that a stream is over.
 */
async function leave(request: GatewayRequest, isThere: () => boolean): Promise<void> {
  let hasEnded = false;
  void request.ended.then(() => {
    hasEnded = true;
  });
  while (!hasEnded && !isThere()) await new Promise((resolve) => setImmediate(resolve));
  request.leave();
}

/** What an Envoy sends; a test changes it. */
const WHOLE = [0, 3, 11, 13, 12].map((at) => MESSAGES[at]);

test("field.md R7, strain.md A4: messages in any order, repeated or missing: each stream ends, and nothing stays in flight", {
  timeout: 60_000,
}, async () => {
  const { client, inFlight } = await start();
  const any = fc.constantFrom(...MESSAGES);
  const changed = fc
    .array(fc.record({ at: fc.nat(5), what: fc.option(any) }), { maxLength: 3 })
    .map((changes) => {
      const messages = [...WHOLE];
      for (const { at, what } of changes)
        messages.splice(at, what === null ? 1 : 0, ...(what === null ? [] : [what]));
      return messages;
    });
  await fc.assert(
    fc.asyncProperty(
      fc.oneof(fc.array(any, { maxLength: 8 }), changed),
      fc.boolean(),
      async (messages, leaves) => {
        const request = new GatewayRequest(client);
        for (const message of messages) request.write(message);
        if (leaves) await leave(request, () => (inFlight()[0] ?? 0) > 0);
        else request.end();
        const late = setTimeout(() => request.leave(), 4000);
        const { code } = await request.ended;
        clearTimeout(late);
        expect(leaves ? [0, 1, 9] : [0, 9]).toContain(code);
        // A request is picked at most once.
        expect(
          request.answers.filter((message) => message.request_headers !== undefined).length,
        ).toBeLessThan(2);
        await expect.poll(inFlight).toEqual([0, 0, 0, 0]);
      },
    ),
    { numRuns: 100 },
  );
  expect((await send(client).choice()).destination).not.toBe("");
});

test("envoy#46237: a second end of the body is not picked again", async () => {
  const { client, inFlight } = await start();
  const request = send(client);
  request.body("");
  await request.passedBody();
  request.answer(200);
  expect((await request.ended).code).toBe(0);
  expect(request.answers.filter((message) => message.request_headers !== undefined)).toHaveLength(
    1,
  );
  await expect.poll(inFlight).toEqual([0, 0, 0, 0]);
});

test("strain.md A4: a stream that begins with a body is refused at once, and names the setting; one without a message ends in time", async () => {
  const { client } = await start();
  const first = new GatewayRequest(client);
  first.body("a".repeat(1_000_000), false);
  const { code, details } = await first.ended;
  expect([code, details]).toEqual([
    9,
    expect.stringContaining("processing_mode.request_header_mode to SEND"),
  ]);
  const silent = new GatewayRequest((await start({ receiveMs: 50 })).client);
  silent.write({});
  const { status, error } = await silent.refusal();
  expect([status, error.type]).toEqual([408, "invalid_request_error"]);
});

test("an answer of the gateway before the request has ended frees the body, and the rest of the request is not read", async () => {
  const { client, inFlight } = await start();
  const request = new GatewayRequest(client);
  request.headers({});
  request.body('{"prompt":', false);
  request.write(answerHeaders("413"));
  request.body('"a"}');
  request.write(body("response", "", true));
  request.end();
  expect((await request.ended).code).toBe(0);
  expect(request.answers.some((message) => message.request_headers !== undefined)).toBe(false);
  expect(inFlight()).toEqual([0, 0, 0, 0]);
});

test("field.md R7: a stream that its gateway never ends is ended, and counts no longer", async () => {
  const { client, inFlight } = await start({ requestMs: 300 });
  const request = send(client);
  await request.passedBody();
  expect(inFlight()[0]).toBe(1);
  const { code, details } = await request.ended;
  expect([code, details]).toEqual([13, "the gateway has not ended the stream within 300 ms"]);
  await expect.poll(inFlight).toEqual([0, 0, 0, 0]);
});
