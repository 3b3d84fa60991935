import { isDeepStrictEqual } from "node:util";
import {
  chatSchema,
  completionSchema,
  validateBody as validateInstanceBody,
} from "../../../../apps/demo/src/http/request-body.js";
import {
  bodyOf,
  type GenerationRequest,
  parseGenerationRequest,
  type RequestBody,
  withLongMembers,
} from "../../../../packages/fleet/src/request/generation-request.js";
import { EventFrames } from "../../../../packages/http/src/events/event-frames.js";
import {
  type ParsedPieces,
  parseJsonPieces,
} from "../../../../packages/http/src/json/json-pieces.js";
import { JsonScan } from "../../../../packages/http/src/json/json-reader.js";
import {
  checkRemotePrefillParams,
  parseTransferParams,
} from "../../../../packages/protocol/src/index.js";
import {
  decodeBody,
  KV_REQUEST_PULL,
  prefillBody,
  singleInstanceBody,
  splitRequest,
} from "../../../../packages/proxy/src/request/leg-bodies.js";
import {
  FirstEvent,
  StreamRules,
  streamedError,
} from "../../../../packages/proxy/src/response/answer-filter.js";
import { bytes, type FuzzTarget, isObject, json, parseJson } from "../target.js";

const ENDPOINTS = [
  "/v1/completions",
  "/v1/chat/completions",
  "/v1/responses",
  "/v1/messages",
] as const;
const remotePrefill = {
  do_remote_prefill: true,
  do_remote_decode: false,
  remote_block_ids: [[1, 2, 3]],
  remote_engine_id: "p",
  remote_request_id: "cmpl-a-0",
  remote_host: "127.0.0.1",
  remote_port: 5600,
  tp_size: 1,
  dcp_size: 1,
  pp_size: 1,
  remote_num_tokens: 40,
  remote_blocks_expiry_time: 12.5,
  remote_registration_generation: 1,
  transfer_mode: "pull",
  kv_peer: { incarnation: "i", generation: 1 },
};

export const transferParams: FuzzTarget = {
  seeds: [
    json(remotePrefill),
    json({ do_remote_decode: true, do_remote_prefill: false, remote_engine_id: null }),
    json({ ...remotePrefill, transfer_mode: "push", remote_block_ids: [] }),
  ],
  isJson: true,
  read(input) {
    const params = parseJson(input)?.value;
    if (!isObject(params)) return;
    checkRemotePrefillParams(params);
    parseTransferParams(params);
    parseTransferParams(params, "push");
  },
};

const completion = {
  model: "m",
  prompt: ["a prompt", [1, 2, 3]],
  max_tokens: 5,
  n: 2,
  stream: true,
  stream_options: { include_usage: true },
  logprobs: 1,
  echo: false,
  seed: 12345678901234567890n.toString(),
  stop: ["x"],
  temperature: 0.5,
};
const chat = {
  model: "m",
  messages: [
    { role: "system", content: "s" },
    { role: "user", content: [{ type: "text", text: "hello \u{1f600} \ud800" }] },
  ],
  max_completion_tokens: 4,
  min_tokens: 1,
  tools: [],
  response_format: { type: "text" },
};

function parsedBody(body: RequestBody): Record<string, unknown> {
  const text = typeof body === "string" ? body : Buffer.concat(body).toString();
  return JSON.parse(text) as Record<string, unknown>;
}

const utf8 = new TextDecoder("utf-8", { fatal: true });
const SCAN_LIMITS = { bodyDepth: 100, bodyMembers: 100_000, bodyValues: 2_097_152 };
/** They cut inputs of some bytes and of some KB. */
const PIECE_BYTES = [1, 2, 3, 7, 16, 33, 64, 250, 1000, 4096];

function inPieces(
  input: Uint8Array,
  pieceBytes: number,
  longMemberBytes: number,
): ParsedPieces | undefined {
  const pieces = parseJsonPieces(input, { pieceBytes, longMemberBytes });
  try {
    for (;;) {
      const { done, value } = pieces.next();
      if (done === true) return value;
    }
  } catch (error) {
    // The bytes are not UTF-8.
    if (error instanceof SyntaxError || error instanceof TypeError) return undefined;
    throw error;
  }
}

function checksum(input: Uint8Array): number {
  return input.reduce((sum, byte) => (Math.imul(sum, 31) + byte) >>> 0, input.length);
}

/**
 * Throws where the pieces give another value than `JSON.parse`, or refuse other texts. Returns one
 * way to cut the input.
 */
function parsedBothWays(input: Uint8Array): ParsedPieces | undefined {
  let whole: { readonly value: unknown } | undefined;
  try {
    whole = { value: JSON.parse(utf8.decode(input)) as unknown };
  } catch {
    whole = undefined;
  }
  const sum = checksum(input);
  // A large input is cut in one way.
  const ways = input.length < 1000 ? PIECE_BYTES.length : 1;
  let pieces: ParsedPieces | undefined;
  for (let way = 0; way < ways; way += 1) {
    const pieceBytes = PIECE_BYTES[(sum + way) % PIECE_BYTES.length] ?? 1;
    const longMemberBytes = PIECE_BYTES[((sum >>> 8) + way) % PIECE_BYTES.length] ?? 1;
    const how = `pieces of ${pieceBytes} bytes, long members of ${longMemberBytes}:`;
    pieces = inPieces(input, pieceBytes, longMemberBytes);
    if ((pieces === undefined) !== (whole === undefined))
      throw new Error(
        `${how} ${whole === undefined ? "no JSON was accepted" : "JSON was refused"}`,
      );
    if (pieces === undefined) continue;
    if (!isSame(pieces.value, whole?.value)) throw new Error(`${how} another value`);
    if (
      isObject(pieces.value) &&
      !isDeepStrictEqual(parsedBody(withLongMembers(pieces.text, pieces.long)), pieces.value)
    )
      throw new Error(`${how} the text and the long members are another object`);
  }
  return pieces;
}

/** The texts tell other orders of the members apart. */
function isSame(one: unknown, other: unknown): boolean {
  return isDeepStrictEqual(one, other) && JSON.stringify(one) === JSON.stringify(other);
}

function checkLegs(request: GenerationRequest) {
  const split = splitRequest(request, 16);
  let step = split.next();
  while (step.done !== true) step = split.next();
  for (const part of step.value) {
    const own = parsedBody(bodyOf(part.request));
    const prefill = parsedBody(prefillBody(part.request, KV_REQUEST_PULL, "id"));
    const decode = parsedBody(decodeBody(part.request, KV_REQUEST_PULL, "id"));
    const single = parsedBody(singleInstanceBody(part.request));
    for (const key of ["prompt", "messages", "input", "model"]) {
      for (const body of [prefill, decode, single, part.request.fields]) {
        if (JSON.stringify(body[key]) !== JSON.stringify(own[key]))
          throw new Error(`${key} was changed`);
      }
    }
    if (single.kv_transfer_params !== undefined)
      throw new Error("kv_transfer_params were passed on");
    const { do_remote_decode: isSet } = prefill.kv_transfer_params as Record<string, unknown>;
    if (isSet !== true) throw new Error("kv_transfer_params were not set");
  }
}

/**
 * In pieces bodies are read as by `JSON.parse`, and what is accepted gives legs whose bodies are
 * JSON again.
 */
export const requestBody: FuzzTarget = {
  seeds: [
    json(completion),
    json(chat),
    json({ model: "m", input: "text", max_output_tokens: 3, background: false }),
    json({ model: "m", messages: chat.messages, max_tokens: 3 }),
    json({ prompt: "xé\u{1f600}\\\n\ud800".repeat(20) }),
    bytes(
      String.raw`{"a\"b" : "\\" , "prompt":"x","n":1.0e0,"seed":123456789012345678901, "prompt":"y"}`,
    ),
    bytes(
      String.raw` {"prompt" : [ "a long prompt \ud83d\ude00", "é😀" ], "__proto__" : { "0" : [ -0, 1E-2 ] } , "prompt" : "\u0061" } `,
    ),
  ],
  words: [
    "kv_transfer_params",
    "use_beam_search",
    "min_completion_tokens",
    "prompt_logprobs",
    "\\u0000",
    "__proto__",
    "\ufeff",
    ',"prompt":',
    "[[],{}]",
  ],
  isJson: true,
  read(input) {
    const endpoint = ENDPOINTS[input.length % ENDPOINTS.length] ?? "/v1/completions";
    const scan = new JsonScan(SCAN_LIMITS);
    const size = 1 + (checksum(input) % 100);
    for (let at = 0; at < input.length; at += size) scan.push(input.subarray(at, at + size));
    const pieces = parsedBothWays(input);
    const request = parseGenerationRequest(endpoint, input);
    checkLegs(request);
    if (pieces !== undefined) checkLegs({ ...request, text: pieces.text, long: pieces.long });
  },
};

export const instanceBody: FuzzTarget = {
  seeds: [
    json({ ...completion, prompt: [1, 2, 3], n: 1, seed: 5, stop: [], logprobs: null }),
    json(chat),
  ],
  words: ["kv_transfer_params", "response_format", "logit_bias", "stop_token_ids", "content"],
  isJson: true,
  read(input) {
    const parsed = parseJson(input);
    if (parsed === undefined) return;
    const isChat = JSON.stringify(parsed.value)?.includes('"messages"') === true;
    if (isChat) validateInstanceBody(chatSchema, parsed.value);
    else validateInstanceBody(completionSchema, parsed.value);
  },
};

export const eventStream: FuzzTarget = {
  seeds: [
    bytes(': c\n\ndata: {"choices":[{"index":0,"text":"a"}]}\n\ndata: [DONE]\n\n'),
    bytes('data: {"error":{"message":"x","code":400}}\r\n\r\n'),
    bytes('event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    bytes("data:a\ndata: b\nid: 1\n\n\n\n"),
  ],
  words: [
    "data: ",
    "[DONE]",
    "event: response.failed",
    "\r\n\r\n",
    "\n\n",
    '"error"',
    '"choices":[{',
    '"code":',
  ],
  read(input) {
    const all = Buffer.from(input);
    const size = 1 + ((input[0] ?? 0) % 7);
    const pieces: Buffer[] = [];
    for (let at = 0; at < all.length; at += size) pieces.push(all.subarray(at, at + size));
    const [whole, cut] = [[all], pieces].map((chunks) => JSON.stringify(readStream(chunks)));
    if (whole !== cut)
      throw new Error(`chunks of ${size} bytes are read as ${cut}, the whole as ${whole}`);
  },
};

function readStream(chunks: readonly Buffer[]) {
  const frames = new EventFrames("latin1", 1 << 16);
  const events = [...chunks.flatMap((chunk) => frames.push(chunk)), ...frames.end()];
  const first = new FirstEvent(1 << 16);
  for (const chunk of chunks) first.push(chunk);
  first.end();
  const ruled = ENDPOINTS.map((endpoint) => {
    const rules = new StreamRules(endpoint, true);
    let passedBytes = 0;
    for (const event of events) {
      rules.read(event);
      if (rules.problem === undefined) passedBytes += event.bytes.length;
    }
    rules.end();
    return { passedBytes, problem: rules.problem, failed: rules.failed };
  });
  return {
    events: events.flatMap(({ name, data }) => (data === "" ? [] : { name, data })),
    text: events.map(({ bytes: all }) => all.toString("latin1")).join(""),
    problem: frames.problem,
    first: first.event?.data,
    error: first.event && streamedError(first.event),
    ruled,
  };
}
