import type { ServerResponse } from "node:http";
import { type Answer, type Seen, sendJson } from "@kv/testing/http/fake-upstream";

type Fields = Record<string, unknown>;

/** Memory that a prefill stub holds for a reader, by request id. */
interface Held {
  readonly prompt: string;
}

/**
 * A prefill and a decode server that behave as vLLM 0.33 does where prefill and decode part: who
 * holds which blocks, what frees them, which requests are refused where, what several prompts and
 * copies come to. The text is a function of prompt, seed and copy, so that an answer through both
 * can be compared with one of a server alone. A decode server that reads blocks which are not
 * there, or another prompt's, answers with garbage under 200, as a real one would.
 */
export interface VllmPair {
  readonly prefill: Answer;
  readonly decode: Answer;
  /** A server without a partner: the reference. */
  readonly alone: Answer;
  readonly held: ReadonlyMap<string, Held>;
  /** How often a decode server computed a prompt itself, or read what it should not. */
  readonly counts: { computedAtDecode: number; garbage: number; unknownFrees: number };
}

export function vllmPair(): VllmPair {
  const held = new Map<string, Held>();
  const counts = { computedAtDecode: 0, garbage: 0, unknownFrees: 0 };
  let serial = 0;

  function free(id: unknown): void {
    if (!held.delete(String(id))) counts.unknownFrees += 1;
  }

  const prefill: Answer = (seen) => {
    const refusal = invalid(seen.json);
    if (refusal !== undefined) return sendJson(seen.response, refusal, 400);
    const answer = compute(seen);
    const asked = seen.json.kv_transfer_params as Fields | undefined;
    if (asked?.do_remote_decode === true) {
      const ids = promptsOf(seen.json).flatMap((prompt) =>
        Array.from({ length: Number(seen.json.n ?? 1) }, () => {
          serial += 1;
          const id = `${String(seen.headers["x-request-id"])}-${serial}`;
          held.set(id, { prompt });
          return id;
        }),
      );
      // The parameters of the first prompt only; of several copies none.
      answer.kv_transfer_params =
        Number(seen.json.n ?? 1) > 1
          ? null
          : {
              do_remote_prefill: true,
              do_remote_decode: false,
              remote_request_id: ids[0],
              remote_block_ids: [[1]],
              remote_engine_id: "stub",
              remote_host: "127.0.0.1",
              remote_port: 5600,
              remote_prefill_cached_tokens: 3,
            };
    }
    return respond(seen, answer);
  };

  const decode: Answer = (seen) => {
    const refusal = invalid(seen.json);
    if (refusal !== undefined) return sendJson(seen.response, refusal, 400);
    const params = seen.json.kv_transfer_params as Fields | undefined;
    if (params?.do_remote_prefill !== true) {
      counts.computedAtDecode += 1;
      return respond(seen, compute(seen));
    }
    if (seen.json.stream === true && seen.json.use_beam_search === true) {
      free(params.remote_request_id);
      return sendJson(
        seen.response,
        error("Streaming is not currently supported with beam search"),
        400,
      );
    }
    const id = String(params.remote_request_id);
    const good = promptsOf(seen.json).flatMap((prompt) =>
      Array.from({ length: Number(seen.json.n ?? 1) }, () => {
        const right = held.get(id)?.prompt === prompt;
        free(id);
        return right;
      }),
    );
    const partial =
      seen.json.prompt_logprobs != null || (seen.json.echo === true && seen.json.logprobs != null);
    const answer = compute(seen, { cachedTokens: Number(params.remote_prefill_cached_tokens) });
    if (good.includes(false) || partial) {
      counts.garbage += 1;
      for (const choice of answer.choices as Fields[]) choice.text = "GARBAGE";
    }
    return respond(seen, answer);
  };

  const alone: Answer = (seen) => {
    const refusal = invalid(seen.json);
    if (refusal !== undefined) return sendJson(seen.response, refusal, 400);
    return respond(seen, compute(seen));
  };

  return { prefill, decode, alone, held, counts };
}

const error = (message: string) => ({
  error: { message, type: "BadRequestError", param: null, code: 400 },
});

function invalid(json: Fields): Fields | undefined {
  // A health check of another suite's router, whose instance had this port before.
  if (json.prompt === undefined && json.messages === undefined) return error("prompt is required");
  const limit = Number(json.max_completion_tokens ?? json.max_tokens ?? 16);
  if (Number(json.min_tokens ?? 0) > Math.max(limit, 1))
    return error("min_tokens must be at most max_tokens");
  if (json.stream_options != null && json.stream !== true)
    return error("Stream options need stream=True");
  if (json.stream === true && Number(json.prompt_logprobs ?? 0) !== 0)
    return error("prompt_logprobs with stream");
  if (json.temperature === -1) return error("temperature must be non-negative");
  return undefined;
}

function promptsOf(json: Fields): string[] {
  if (json.messages !== undefined)
    return [JSON.stringify([json.messages, json.tools, json.chat_template_kwargs])];
  const { prompt } = json;
  const several = Array.isArray(prompt) && typeof prompt[0] !== "number";
  return (several ? (prompt as unknown[]) : [prompt]).map((one) =>
    typeof one === "string" ? one : JSON.stringify(one),
  );
}

const tokensOf = (prompt: string) => prompt.match(/.{1,3}/gsu) ?? [];

/** The whole answer, as a server gives it that computes the prompt itself (or has its KV). */
function compute({ json, headers, path }: Seen, { cachedTokens = 3 } = {}): Fields {
  const chat = path.endsWith("/chat/completions");
  const choices: Fields[] = [];
  const usage = { prompt_tokens: 0, completion_tokens: 0, total_tokens: 0 };
  const prompts = promptsOf(json);
  for (const prompt of prompts) {
    const tokens = tokensOf(prompt);
    usage.prompt_tokens += tokens.length;
    for (let copy = 0; copy < Number(json.n ?? 1); copy += 1) {
      const seed = Number(json.seed ?? 0) + copy;
      const limit = Number(json.max_completion_tokens ?? json.max_tokens ?? 16);
      const made = Array.from(
        { length: Math.min(limit, 5) },
        (_, at) => ` ${tokens.length}.${seed}.${at}`,
      );
      const stopAt = made.findIndex((token) => token.includes(String(json.stop ?? "never")));
      const kept = stopAt === -1 ? made : made.slice(0, stopAt);
      usage.completion_tokens += kept.length;
      choices.push(choiceOf(json, chat, tokens, kept, choices.length, stopAt !== -1));
    }
  }
  usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
  const id = `${chat ? "chatcmpl" : "cmpl"}-${String(headers["x-request-id"])}`;
  return {
    id,
    object: chat ? "chat.completion" : "text_completion",
    created: 1,
    model: json.model ?? "m",
    choices,
    usage: { ...usage, prompt_tokens_details: { cached_tokens: cachedTokens * prompts.length } },
    ...(chat && {
      prompt_logprobs: json.prompt_logprobs == null ? null : tokensOf(prompts[0] ?? ""),
    }),
    kv_transfer_params: null,
  };
}

/** Of log probabilities it has only the tokens that they are of. */
function choiceOf(
  json: Fields,
  chat: boolean,
  prompt: readonly string[],
  made: readonly string[],
  index: number,
  stopped: boolean,
): Fields {
  const ending = { index, finish_reason: stopped ? "stop" : "length" };
  if (chat) {
    const tool = { id: "call-1", type: "function", function: { name: "f", arguments: "{}" } };
    const calls = json.tools === undefined ? {} : { tool_calls: [tool] };
    return {
      ...ending,
      message: { role: "assistant", content: made.join(""), ...calls },
      logprobs: null,
    };
  }
  const echo = json.echo === true;
  const tokens = echo ? (json.max_tokens === 0 ? prompt : [...prompt, ...made]) : made;
  const wanted = json.prompt_logprobs != null || (echo && json.logprobs != null);
  return {
    ...ending,
    text: tokens.join(""),
    logprobs: json.logprobs == null ? null : { tokens },
    prompt_logprobs: wanted ? prompt : null,
  };
}

function respond(seen: Seen, answer: Fields): void {
  if (seen.json.stream !== true) sendJson(seen.response, answer);
  else stream(seen.response, seen.json, answer);
}

/** Token by token, choices in turn, as vLLM's stream generators do. */
function stream(response: ServerResponse, json: Fields, { choices, usage, ...head }: Fields): void {
  response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
  const send = (chunk: Fields) =>
    response.write(`data: ${JSON.stringify({ ...head, ...chunk })}\n\n`);
  for (const choice of choices as Fields[]) {
    const { message, text, logprobs, prompt_logprobs: _, ...rest } = choice;
    if (message !== undefined) {
      const { content, ...start } = message as Fields;
      send({
        choices: [{ index: rest.index, delta: { ...start, content: "" }, finish_reason: null }],
      });
      send({ choices: [{ ...rest, delta: { content } }] });
    } else {
      const whole = String(text);
      send({ choices: [{ ...rest, finish_reason: null, text: whole, logprobs }] });
      send({ choices: [{ ...rest, text: "", logprobs: null }] });
    }
  }
  const options = json.stream_options as Fields | undefined;
  if (options?.include_usage === true) send({ choices: [], usage });
  response.end("data: [DONE]\n\n");
}
