import { expect, test } from "vitest";
import { clientOf, GatewayRequest, type Message, runPicker } from "./support/gateway.js";

/** A text whole, and cut at each byte. */
function cutsOf(text: string): Buffer[][] {
  const bytes = Buffer.from(text);
  return [[bytes], ...Array.from(bytes, (_, at) => [bytes.subarray(0, at), bytes.subarray(at)])];
}

const pieceOf = (message: Message) =>
  message.response_body?.response.body_mutation.streamed_response;

test("a stream of events passes the picker byte for byte wherever the gateway cuts it", async () => {
  const { port, picker } = await runPicker();
  const client = clientOf(port);
  const text =
    'data: {"choices":[{"index":0,"text":"é🎈"}]}\r\n\r\ndata: {"error":{}}\n\ndata: [DONE]\n\n';
  for (const pieces of cutsOf(text)) {
    const request = new GatewayRequest(client);
    request.headers({});
    request.body('{"prompt":"a"}');
    await request.choice();
    request.answerHead(200);
    for (const [i, body] of pieces.entries())
      request.write({ response_body: { body, end_of_stream: i === pieces.length - 1 } });
    await request.find((message) => pieceOf(message)?.end_of_stream === true);
    const passed = request.answers.map((message) => pieceOf(message)?.body ?? Buffer.alloc(0));
    expect(Buffer.concat(passed).toString()).toBe(text);
    request.leave();
  }
  const inFlight = () => {
    const { prefillers, decoders } = picker.status();
    return [...prefillers, ...decoders].map((instance) => instance.in_flight);
  };
  await expect.poll(inFlight).toEqual([0, 0]);
});

test.each([
  ["chosen for", '{"prompt":"é🎈 \\"[","seed":12345678901234567890}', undefined],
  ["refused as it is no JSON", '{"prompt":"a"', "not JSON"],
  ["refused for its depth, though it is too long", `{"x":[[[["${"a".repeat(60)}"]]]]}`, "levels"],
  [
    "refused for its length, though it is too deep",
    `{"x":"${"a".repeat(60)}","y":[[[[]]]]}`,
    "larger than 60",
  ],
])("a body is %s wherever the gateway cuts it", async (_what, text, refusal) => {
  const limits = { bodyLengthBytes: 60, bodyDepth: 3 };
  const { port } = await runPicker({ limits });
  const client = clientOf(port);
  for (const pieces of cutsOf(text)) {
    const request = new GatewayRequest(client);
    request.headers({});
    for (const [i, body] of pieces.entries()) request.body(body, i === pieces.length - 1);
    if (refusal === undefined) expect((await request.passedBody()).toString()).toBe(text);
    else expect((await request.refusal()).error.message).toContain(refusal);
    request.leave();
  }
});
