import type { EngineResult, EngineToken } from "../engine/request.js";
import { textStream } from "../model/tokenizer/text-stream.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import type { AnswerForms } from "./completions.js";
import type { Generation } from "./generation.js";
import { transferParamsOf, usageOf } from "./generation.js";
import type { ChatBody } from "./generation-body.js";

/** Tokens of the conversation, its parts of text joined. */
export function chatPrompt({ messages }: ChatBody, tokenizer: Tokenizer): number[] {
  const plain = messages.map((message) => {
    const { content } = message;
    return {
      ...message,
      content: typeof content === "string" ? content : content.map(({ text }) => text).join(""),
    };
  });
  return Array.from(tokenizer.encodeChat(plain));
}

/** The forms of `/v1/chat/completions`, as vLLM writes them. */
export function chatForms(body: ChatBody, tokenizer: Tokenizer): AnswerForms {
  const returnTokenIds = body.return_token_ids === true;
  const text = textStream(tokenizer);
  const head = ({ id, model, createdSeconds }: Generation, object: string) => ({
    id,
    object,
    created: createdSeconds,
    model,
  });
  const chunkHead = (generation: Generation) => head(generation, "chat.completion.chunk");

  function logprobsOf(tokens: readonly EngineToken[]): object | null {
    if (body.logprobs !== true) return null;
    const word = (token: number) => tokenizer.decode([token], { skipSpecialTokens: false });
    const entry = (token: number, logprob: number) => {
      const written = word(token);
      return { token: written, logprob, bytes: [...Buffer.from(written)] };
    };
    return {
      content: tokens.map(({ token, logprob, top }) => ({
        ...entry(token, logprob),
        top_logprobs: top.map((each) => entry(each.token, each.logprob)),
      })),
    };
  }

  return {
    whole(generation, result) {
      const tokens = result.tokens.map(({ token }) => token);
      return {
        ...head(generation, "chat.completion"),
        choices: [
          {
            index: 0,
            message: { role: "assistant", content: tokenizer.decode(tokens) },
            logprobs: logprobsOf(result.tokens),
            finish_reason: result.finishReason,
            stop_reason: null,
            ...(returnTokenIds ? { token_ids: tokens } : {}),
          },
        ],
        usage: usageOf(generation, tokens.length),
        ...(returnTokenIds ? { prompt_token_ids: generation.promptTokens } : {}),
        kv_transfer_params: transferParamsOf(result),
      };
    },
    chunk(generation, token, first) {
      const choice = {
        index: 0,
        delta: { ...(first ? { role: "assistant" } : {}), content: text.push(token.token) },
        logprobs: logprobsOf([token]),
        finish_reason: null,
        ...(returnTokenIds ? { token_ids: [token.token] } : {}),
      };
      const prompt = returnTokenIds && first ? { prompt_token_ids: generation.promptTokens } : {};
      return { ...chunkHead(generation), choices: [choice], ...prompt };
    },
    closing(generation, result: EngineResult) {
      const choice = {
        index: 0,
        delta: { content: text.end() },
        logprobs: null,
        finish_reason: result.finishReason,
        stop_reason: null,
      };
      return { ...chunkHead(generation), choices: [choice] };
    },
    usage: (generation, result) => ({
      ...chunkHead(generation),
      choices: [],
      usage: usageOf(generation, result.tokens.length),
    }),
  };
}
